//! Work on a stream, by an event of the device's.

// Tests: `crates/allocators/tests/process_state.rs`, `crates/allocators/tests/bfc_on_memory.rs`.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use gpu_api::{CaptureStatus, Error, EventKind, Gpu, RawEvent, RawStream, Result, StreamIdentity};

use crate::{Allocator, Completion, Work};

/// Stands for the work that a stream had at one moment.
///
/// # Examples
///
/// ```
/// use allocators::{Allocator, Bfc, BfcOptions, DeviceMemory, Recorded, Request};
/// # use backend_host::{HostBackend, HostConfig};
/// # let gpu = gpu_api::Gpu::new(HostBackend::new(HostConfig::default())?, gpu_api::DeviceId(0))?;
/// # let stream = gpu.backend().create_stream(gpu.device())?;
/// let bfc = Bfc::new(BfcOptions::new("bfc"), DeviceMemory::new(gpu.clone())?);
/// let placed = bfc.alloc(Request::new(1 << 20))?;
/// // Kernels are queued that use it; then, without waiting for them:
/// // SAFETY: the stream is alive.
/// unsafe { Recorded::free_on(&bfc, placed.address, &gpu, &[stream]) }?;
/// # // SAFETY: the stream is alive, and nobody uses it afterwards.
/// # unsafe { gpu.backend().destroy_stream(stream) }?;
/// # Ok::<(), gpu_api::Error>(())
/// ```
pub struct Recorded {
    gpu: Gpu,
    event: RawEvent,
    done: AtomicBool,
}

impl Recorded {
    /// Records what is in a stream at this moment, and says which stream it is.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] for a stream that is being captured: its work runs when the graph is
    /// launched, perhaps more than once; the driver's error.
    ///
    /// # Safety
    ///
    /// `stream` is alive and of this device.
    pub unsafe fn on(gpu: &Gpu, stream: RawStream) -> Result<(StreamIdentity, Recorded)> {
        let backend = gpu.backend();
        // SAFETY: `capture_status` asks for a live stream: the caller vouches for it.
        if unsafe { backend.capture_status(stream) }? != CaptureStatus::None {
            let remedy = "take it from a `GraphPool` and free it there, or free it when no graph uses it any more";
            return Err(Error::Capturing {
                stream: stream.handle,
                remedy,
            });
        }
        // SAFETY: `stream_info` asks as `capture_status`.
        let info = unsafe { backend.stream_info(stream) }?;
        let event = backend.create_event(gpu.device(), EventKind::Local)?;
        let recorded = Recorded {
            gpu: gpu.clone(),
            event,
            done: AtomicBool::new(false),
        };
        // SAFETY: `record_event` asks for a live event and stream of one device: the event was made
        // just now, and the caller vouches for the stream.
        unsafe { backend.record_event(event, stream) }?;
        Ok((info.identity, recorded))
    }

    /// Returns the work that is queued on a stream, for [`Allocator::free_after`] and
    /// [`Allocator::record_work`].
    ///
    /// # Errors
    ///
    /// As [`on`](Recorded::on).
    ///
    /// # Safety
    ///
    /// `stream` is alive and of this device.
    pub unsafe fn work_on(gpu: &Gpu, stream: RawStream) -> Result<Work> {
        // SAFETY: `on` asks what this function asks.
        let (identity, recorded) = unsafe { Recorded::on(gpu, stream) }?;
        Ok(Work::on(identity, recorded))
    }

    /// Takes an allocation back whose bytes may be used again once the work that is queued on these
    /// streams has finished, and in a stream's order at once when there is one. Does not wait.
    ///
    /// # Errors
    ///
    /// As [`on`](Recorded::on) and [`Allocator::free_after`]; the allocation stays then.
    ///
    /// # Safety
    ///
    /// The streams are alive and of this device.
    pub unsafe fn free_on(
        allocator: &dyn Allocator,
        address: u64,
        gpu: &Gpu,
        streams: &[RawStream],
    ) -> Result<()> {
        // SAFETY: `work_on` asks what this function asks.
        let work = streams
            .iter()
            .map(|&stream| unsafe { Recorded::work_on(gpu, stream) });
        allocator.free_after(address, work.collect::<Result<_>>()?)
    }
}

impl Completion for Recorded {
    fn is_done(&self) -> bool {
        if self.done.load(Ordering::Acquire) {
            return true;
        }
        if self.gpu.check_fork().is_err() {
            return false;
        }
        // SAFETY: `query_event` asks for a live event: it is destroyed by the drop alone.
        match unsafe { self.gpu.backend().query_event(self.event) } {
            Ok(done) => {
                self.done.store(done, Ordering::Release);
                done
            }
            // Nobody knows whether the work has ended: the memory is not used again while the
            // driver says so.
            Err(error) => {
                tracing::debug!(%error, "an event cannot be asked");
                false
            }
        }
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if self.gpu.check_fork().is_err() {
            return;
        }
        // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: this is its
        // owner's drop.
        if let Err(error) = unsafe { self.gpu.backend().destroy_event(self.event) } {
            tracing::warn!(%error, "an event is leaked");
        }
    }
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorded")
            .field("event", &self.event)
            .finish_non_exhaustive()
    }
}
