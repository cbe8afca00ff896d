//! A backend's own calls as the floor: what the library's bookkeeping adds to them is seen.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::time::Instant;

use gpu_ipc::Gpu;
use gpu_ipc::backend::{Access, DevicePtr, RawEvent, RawStream, StreamOp, WordPtr};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::time::{ClockId, clock_gettime};

use super::calls::{Floor, Foreign, Opened};
use crate::failure::{Failure, Result};

/// The calls of a backend.
#[derive(Debug)]
pub struct Backend {
    gpu: Gpu,
    /// Regions are files of shared memory, mapped by the kernel alone.
    maps: bool,
}

impl Backend {
    /// Takes a device.
    pub fn new(gpu: &Gpu, maps: bool) -> Backend {
        Backend {
            gpu: gpu.clone(),
            maps,
        }
    }

    fn batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `stream_batch` asks for a live stream and registered words: `Floor` is given no
        // others.
        unsafe { self.gpu.backend().stream_batch(stream, ops) }.map_err(Failure::from)
    }
}

impl Floor for Backend {
    fn write(&self, stream: RawStream, word: WordPtr, value: u64) -> Result<()> {
        self.batch(stream, &[StreamOp::Write { word, value }])
    }

    fn writes(&self, stream: RawStream, word: WordPtr, value: u64, count: usize) -> Result<()> {
        self.batch(stream, &vec![StreamOp::Write { word, value }; count])
    }

    fn wait(&self, stream: RawStream, word: WordPtr, value: u64) -> Result<()> {
        self.batch(stream, &[StreamOp::WaitGeq { word, value }])
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        // SAFETY: `record_event` asks for a live event and stream of one device: `Floor` is given
        // no others.
        unsafe { self.gpu.backend().record_event(event, stream) }.map_err(Failure::from)
    }

    fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        // SAFETY: `stream_wait_event` asks for a live stream and event: `Floor` is given no others.
        unsafe { self.gpu.backend().stream_wait_event(stream, event) }.map_err(Failure::from)
    }

    fn settle(&self, stream: RawStream) -> Result<()> {
        // SAFETY: `synchronize_stream` asks for a live stream: `Floor` is given no others.
        unsafe { self.gpu.backend().synchronize_stream(stream) }.map_err(Failure::from)
    }

    fn fill(&self, stream: RawStream, to: DevicePtr, len: u64) -> Result<()> {
        // SAFETY: `fill` asks for a live stream and a range that stays valid: `Floor` is given no
        // others.
        unsafe { self.gpu.backend().fill(stream, to, 0, len) }.map_err(Failure::from)
    }

    fn stamp(&self, stream: RawStream, to: DevicePtr) -> Result<()> {
        if !self.maps {
            return Err(format!(
                "{} has no clock here that the kernels of two processes can read",
                self.gpu.kind()
            )
            .into());
        }
        let stamp = move || {
            let time = clock_gettime(ClockId::Monotonic);
            let nanos = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
            // SAFETY: `write_unaligned` asks for memory that may be written: on the host backend a
            // device's address is one, and `Floor` is given no others.
            unsafe {
                ptr::with_exposed_provenance_mut::<u64>(to.0 as usize).write_unaligned(nanos)
            };
        };
        // SAFETY: `host_function` asks for a live stream that nobody captures: `Floor` is given no
        // others.
        unsafe { self.gpu.backend().host_function(stream, Box::new(stamp)) }.map_err(Failure::from)
    }

    fn stretch(&self, stream: RawStream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        self.settle(stream)?;
        let start = Instant::now();
        work()?;
        self.settle(stream)?;
        Ok(start.elapsed().as_nanos() as f64)
    }

    fn open(&self, foreign: &Foreign) -> Result<Opened> {
        match foreign {
            Foreign::Fd(fd, len) if self.maps => {
                let (protection, bytes) = (ProtFlags::READ | ProtFlags::WRITE, *len as usize);
                // SAFETY: `mmap` of a null address takes free addresses only; nobody dereferences
                // the result.
                let mapped =
                    unsafe { mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0) };
                let mapped =
                    mapped.map_err(|e| format!("mmap of descriptor {}: {e}", fd.as_raw_fd()))?;
                Ok(Opened {
                    address: mapped as u64,
                    len: *len,
                    is_fd: true,
                })
            }
            Foreign::Fd(fd, len) => {
                let base = self.gpu.backend().import_fd(
                    self.gpu.device(),
                    fd.as_fd(),
                    *len,
                    Access::ReadWrite,
                );
                Ok(Opened {
                    address: base?.0,
                    len: *len,
                    is_fd: true,
                })
            }
            Foreign::Handle(handle) => {
                let base = self.gpu.backend().open_handle(self.gpu.device(), handle);
                Ok(Opened {
                    address: base?.0,
                    len: 0,
                    is_fd: false,
                })
            }
        }
    }

    fn close(&self, opened: Opened) -> Result<()> {
        if self.maps && opened.is_fd {
            // SAFETY: `munmap` asks for a mapping that nothing uses: `open` made it, and nobody
            // dereferences it.
            return unsafe { munmap(opened.address as *mut _, opened.len as usize) }
                .map_err(|e| format!("munmap: {e}").into());
        }
        // SAFETY: `close` asks for what was opened and is not in use: `open` made it, and nothing
        // was queued on it.
        unsafe { self.gpu.backend().close(DevicePtr(opened.address)) }.map_err(Failure::from)
    }
}
