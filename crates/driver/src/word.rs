//! 64-bit words in shared memory that streams write and wait for.

use std::ffi::c_void;
use std::ptr;

use crate::checks;
use gpu_api::{DeviceId, GpuWords, HostPtr, RawStream, Result, StreamOp, WordOps, WordPtr};

use crate::backend::Backend;
use crate::host;
use crate::vendor::Vendor;

// SAFETY: the condition of `GpuWords`: writes have the barrier that the manual describes as the
// default: after all work before them.
unsafe impl<V: Vendor> GpuWords for Backend<V> {
    fn word_ops(&self, device: DeviceId) -> Result<WordOps> {
        Ok(Vendor::word_ops(&**self, device))
    }

    unsafe fn register_words(&self, start: HostPtr, len: usize) -> Result<WordPtr> {
        checks::whole_pages(start, len)?;
        let scope = self.anywhere()?;
        let address: *mut c_void = ptr::with_exposed_provenance_mut(start.0);
        // SAFETY: `register` asks for memory that is mapped until it is unregistered: our caller
        // vouches for it.
        unsafe { host::register(&scope, address, len) }?;
        let mut words = 0;
        let found = scope.call(&self.driver().calls.host_device_pointer, |function| {
            // SAFETY: `host_device_pointer` writes one address: `words` is one. The memory
            // was registered for devices above. Its flags are 0.
            unsafe { function(&raw mut words, address, 0) }
        });
        if let Err(error) = found {
            let _ = scope.call(&self.driver().calls.host_unregister, |function| {
                // SAFETY: `host_unregister` asks for memory that is registered and not in use:
                // above, and no stream was told of it.
                unsafe { function(address) }
            });
            return Err(error);
        }
        let device = scope.device();
        self.driver().registrations.insert(start.0, device);
        Ok(WordPtr(words))
    }

    unsafe fn unregister_words(&self, start: HostPtr) -> Result<()> {
        let device = self
            .driver()
            .registrations
            .take(start, "the start of what `register_words` took")?;
        // SAFETY: `words_end` asks for a registration out of the table that no stream uses: our
        // caller vouches for it.
        let result = unsafe { self.words_end(start, device) };
        if result.is_err() {
            self.driver().registrations.leak(start, device);
        }
        result
    }

    unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `words_batch` has our conditions.
        unsafe { self.words_batch(stream, ops, false) }
    }
}

impl<V: Vendor> Backend<V> {
    /// # Safety
    ///
    /// `start` came out of the table, and no operation on its words is unfinished on any stream of
    /// this process.
    unsafe fn words_end(&self, start: HostPtr, device: DeviceId) -> Result<()> {
        let address: *mut c_void = ptr::with_exposed_provenance_mut(start.0);
        self.pass_known_streams();
        let scope = self.on_device(device)?;
        scope.call(&self.driver().calls.host_unregister, |function| {
            // SAFETY: `host_unregister` asks for memory that is registered and not in use: it
            // was taken out of the table once, and our caller vouches for the rest.
            unsafe { function(address) }
        })
    }

    /// Queues operations; on a stream that may be captured only after a look in the same scope that
    /// it is not.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and every word lies in a registration that outlives the operation.
    pub(crate) unsafe fn words_batch(
        &self,
        stream: RawStream,
        ops: &[StreamOp],
        may_capture: bool,
    ) -> Result<()> {
        checks::batch(ops)?;
        let scope = self.beside_stream(stream)?;
        if may_capture {
            // SAFETY: `status_within` asks for a stream that is alive, and for its scope: as above.
            gpu_api::refuse_capture(stream, unsafe { self.status_within(&scope, stream) }?)?;
        }
        // SAFETY: `queue_words` has our conditions, and the scope is the stream's.
        unsafe { self.queue_words(&scope, stream, ops) }
    }
}
