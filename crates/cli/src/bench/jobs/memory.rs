//! Memory of the jobs' own: device memory that a process does not share, and host memory that
//! processes share.

use crate::failure::Result;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use gpu_ipc::backend::{DevicePtr, HostPtr, Sharing};
use gpu_ipc::{Gpu, Stream};
use memmap2::MmapRaw;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// Device memory of this process. Freed when dropped, after all work of its stream.
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Gpu,
    stream: Stream,
    base: DevicePtr,
}

impl DeviceMemory {
    /// Takes it; only work of this stream may use it.
    pub fn new(stream: &Stream, bytes: u64) -> Result<DeviceMemory> {
        let gpu = stream.gpu().clone();
        let base = gpu.backend().alloc(gpu.device(), bytes, Sharing::Fd)?.base;
        Ok(DeviceMemory {
            gpu,
            stream: stream.clone(),
            base,
        })
    }

    /// Returns an address in it.
    pub fn at(&self, offset: u64) -> DevicePtr {
        self.base.offset(offset)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.stream.synchronize().is_ok() {
            // SAFETY: `free` asks for memory that came from `alloc`, once, and that nothing uses:
            // only work of the stream did, and it is done.
            let _ = unsafe { self.gpu.backend().free(self.base) };
        }
    }
}

/// Host memory that processes share, pinned where there is a GPU.
#[derive(Debug)]
pub struct HostShared {
    file: OwnedFd,
    map: MmapRaw,
    /// Of a GPU that knows of the memory.
    pinned: Option<Gpu>,
}

impl HostShared {
    /// Makes it, for processes that inherit its descriptor.
    pub fn create(gpu: &Gpu, bytes: u64) -> Result<HostShared> {
        let file = memfd_create("gpu-ipc-job", MemfdFlags::empty())
            .map_err(|e| format!("memfd_create: {e}"))?;
        ftruncate(&file, bytes.next_multiple_of(4096)).map_err(|e| format!("ftruncate: {e}"))?;
        HostShared::map(gpu, file)
    }

    /// Maps what another process made.
    pub fn map(gpu: &Gpu, file: OwnedFd) -> Result<HostShared> {
        let file = File::from(file);
        let map =
            MmapRaw::map_raw(&file).map_err(|e| format!("host memory cannot be mapped: {e}"))?;
        let mut shared = HostShared {
            file: file.into(),
            map,
            pinned: None,
        };
        if !gpu.kind().in_host_memory() {
            // SAFETY: `register_words` asks for bytes that stay mapped until `unregister_words`:
            // `drop` does both.
            unsafe {
                gpu.backend()
                    .register_words(shared.start(), shared.map.len())
            }?;
            shared.pinned = Some(gpu.clone());
        }
        Ok(shared)
    }

    fn start(&self) -> HostPtr {
        HostPtr(self.map.as_mut_ptr().expose_provenance())
    }

    /// Returns an address in it.
    pub fn at(&self, offset: u64) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(offset as usize)
    }

    /// Returns its descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for HostShared {
    fn drop(&mut self) {
        if let Some(gpu) = self.pinned.take() {
            // SAFETY: `unregister_words` asks for what was registered, and that no stream uses it:
            // each copy is waited for by the thread that queued it.
            let _ = unsafe { gpu.backend().unregister_words(self.start()) };
        }
    }
}
