//! Reading and writing what an allocator handed out, for wrappers that look into it.

// Tests: `crates/allocators/tests/process_state.rs`, `crates/allocators/tests/bfc_on_memory.rs`.

use std::fmt;
use std::ptr;

use gpu_api::{DevicePtr, Gpu, RawStream, Result};

/// How bytes behind addresses are read and written.
///
/// Both calls return when it is done. They are for marks and checks, not for data.
pub trait Memory: fmt::Debug + Send + Sync + 'static {
    /// Reads bytes.
    ///
    /// # Errors
    ///
    /// The driver's error.
    ///
    /// # Safety
    ///
    /// The range from `address` on, as long as `to`, lies in one allocation whose allocator gave
    /// this memory, which is not freed meanwhile; nothing writes it meanwhile.
    unsafe fn read(&self, address: u64, to: &mut [u8]) -> Result<()>;

    /// Writes bytes.
    ///
    /// # Errors
    ///
    /// The driver's error.
    ///
    /// # Safety
    ///
    /// As [`read`](Memory::read), and nothing reads it meanwhile.
    unsafe fn write(&self, address: u64, from: &[u8]) -> Result<()>;
}

/// Memory of this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostBytes;

impl Memory for HostBytes {
    unsafe fn read(&self, address: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: `copy_nonoverlapping` asks for `to.len()` readable and writable bytes apart from
        // each other: the caller vouches for the first, `to` is a slice, and it is no part of what
        // an allocator handed out.
        unsafe { ptr::copy_nonoverlapping(pointer(address), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn write(&self, address: u64, from: &[u8]) -> Result<()> {
        // SAFETY: as in `read`, the other way round.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), pointer(address), from.len()) };
        Ok(())
    }
}

/// Backends give host memory as numbers whose provenance they exposed.
fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Memory of a device, copied on a stream of its own.
#[derive(Debug)]
pub struct DeviceBytes {
    gpu: Gpu,
    stream: RawStream,
}

impl DeviceBytes {
    /// Makes the stream.
    ///
    /// # Errors
    ///
    /// What [`create_stream`](gpu_api::GpuStreams::create_stream) gives.
    pub fn new(gpu: Gpu) -> Result<DeviceBytes> {
        let stream = gpu.backend().create_stream(gpu.device())?;
        Ok(DeviceBytes { gpu, stream })
    }

    fn check(&self) -> Result<()> {
        self.gpu.check_fork()
    }

    fn finish(&self) -> Result<()> {
        // SAFETY: `synchronize_stream` asks for a live stream: this value's own, destroyed by its
        // drop.
        unsafe { self.gpu.backend().synchronize_stream(self.stream) }
    }
}

impl Memory for DeviceBytes {
    unsafe fn read(&self, address: u64, to: &mut [u8]) -> Result<()> {
        self.check()?;
        let from = DevicePtr(address);
        // SAFETY: `copy_to_host` asks for a live stream, which is our own, and for ranges that are
        // valid until the copy has finished: the caller vouches for one, `to` is borrowed until
        // `finish` has returned.
        unsafe {
            self.gpu
                .backend()
                .copy_to_host(self.stream, to.as_mut_ptr(), from, to.len())
        }?;
        self.finish()
    }

    unsafe fn write(&self, address: u64, from: &[u8]) -> Result<()> {
        self.check()?;
        let to = DevicePtr(address);
        // SAFETY: `copy_to_device` asks as `copy_to_host` does.
        unsafe {
            self.gpu
                .backend()
                .copy_to_device(self.stream, to, from.as_ptr(), from.len())
        }?;
        self.finish()
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        if self.check().is_err() {
            return;
        }
        // SAFETY: `destroy_stream` asks for a live stream that nobody uses afterwards: this is its
        // owner's drop.
        if let Err(error) = unsafe { self.gpu.backend().destroy_stream(self.stream) } {
            tracing::warn!(%error, "a stream is leaked");
        }
    }
}
