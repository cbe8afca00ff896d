//! Streams and memory of other libraries, and ours for them, as the runtime's own values.
//!
//! | of the runtime | here | how |
//! |---|---|---|
//! | `hipStream_t` | [`RawStream`] | its device, and its address as the handle |
//! | `hipDeviceptr_t`, `void *` | [`DevicePtr`] | the same number |
//! | `hipEvent_t` | [`RawEvent`](gpu_api::RawEvent) | its address |
//!
//! Where the runtime numbers its streams (`hipStreamGetId`) any stream will do; elsewhere a stream
//! is adopted first. Memory is always adopted first.

use gpu_api::{AddressRange, DevicePtr, Error, RawStream, Result};

use driver::Vendor;
use driver::memory_table::{Origin, Way};
use driver::pointer::driver_range;

use crate::hip::Hip;
use crate::stream::require;
use crate::version::MemoryType;

impl Hip {
    /// Takes in a stream that somebody else made, under an identity that no other stream has.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a default stream, which has no end to be told of, and
    /// [`Error::Mismatch`] where the runtime tells of another device than the stream's.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and stays so until [`forget_stream`](Hip::forget_stream).
    pub unsafe fn adopt_stream(&self, stream: RawStream) -> Result<()> {
        if stream.is_default() {
            return Err(Error::invalid(
                "the stream",
                format!("the default stream {}", stream.handle),
                "one of its own",
            ));
        }
        self.ordinal(stream.device)?;
        // SAFETY: `device_of` asks for a stream that is alive, and no default one: our caller
        // vouches for it.
        match unsafe { self.device_of(stream) } {
            Ok(device) => require(stream, device)?,
            // Who made the stream knows where, also where the runtime is too old to tell.
            Err(Error::Unsupported { .. }) => {}
            Err(error) => return Err(error),
        }
        self.driver().streams.insert(stream);
        Ok(())
    }

    /// Forgets a stream that was adopted; says whether it was. Call it before the stream is
    /// destroyed.
    pub fn forget_stream(&self, stream: RawStream) -> bool {
        self.driver().streams.remove(stream).is_some()
    }

    /// Takes in an allocation of `hipMalloc` that somebody else made in this process, so that it
    /// can be exported.
    ///
    /// Returns all of it, whatever address within it was given: its base is what is exported.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address that the runtime does not know as device memory, or that
    /// this backend has in its table already.
    ///
    /// # Safety
    ///
    /// The memory came from `hipMalloc`, not from `hipMallocAsync`, `hipMemCreate` or another
    /// process: asked for the handle of such, some runtimes bring the kernel down. It is not freed
    /// before [`forget_memory`](Hip::forget_memory).
    pub unsafe fn adopt_memory(&self, ptr: DevicePtr) -> Result<AddressRange> {
        let refused = |got: String| Error::invalid("the address", got, "one of hipMalloc's, once");
        if self.driver().memory.find(ptr).is_some() {
            return Err(refused(format!("{ptr}, which is known already")));
        }
        let scope = self.anywhere()?;
        let found = self.attributes(&scope, ptr)?.filter(|found| {
            self.version().memory_type(found.kind) == MemoryType::Device && found.is_managed == 0
        });
        let device = found.and_then(|found| self.numbered(found.device));
        let device = device.ok_or_else(|| refused(format!("{ptr}, which is not device memory")))?;
        let range = driver_range(&scope, ptr)?;
        self.driver()
            .memory
            .insert(range.base.0, range.len, device, Origin::Adopted);
        Ok(range)
    }

    /// Forgets memory that was adopted; says whether it was. Call it before the memory is freed,
    /// and once nobody has its handle open.
    pub fn forget_memory(&self, base: DevicePtr) -> bool {
        let disowned = self.driver().memory.take(base, Way::Never).is_ok();
        if disowned {
            self.forgotten(base);
        }
        disowned
    }
}
