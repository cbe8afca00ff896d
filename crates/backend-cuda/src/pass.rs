//! Waiting without the driver's lock before calls that wait with it.
//!
//! `cuMemFree`, `cuMemFreeHost`, `cuIpcCloseMemHandle` and `cuMemHostUnregister` wait for all that
//! the context has queued, under a lock that every other thread's calls need: measured on driver
//! 580 with one stream that waited for 3 s, calls of other threads stood still for 2.95 s, and for
//! 0.1 ms when the calling thread had waited beforehand. `cuCtxSynchronize` would be that wait, but
//! during a global capture of the application's it gives 900 and destroys the capture, in relaxed
//! mode too. So events on the streams of this backend's own serve; among them are those that wait,
//! on the library's behalf, for the application's.

use std::thread;
use std::time::Duration;

use gpu_api::{CaptureStatus, EventKind, GpuEvents, GpuStreams, RawEvent, RawStream};

use crate::backend::CudaBackend;

/// The shortest and the longest time between two looks.
const PAUSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(5));

impl CudaBackend {
    /// Waits until all that streams of our own have queued at this moment is done. For a call that
    /// would wait for it anyway, on a thread that may block.
    pub(crate) fn pass_own_streams(&self) {
        let marks: Vec<RawEvent> = self.streams.for_each(|stream| self.mark(stream));
        let mut pause = PAUSE.0;
        for mark in marks {
            // SAFETY: `query_event` asks for a live event: `mark` made it, and it is destroyed
            // below. After an error nothing is to be waited for.
            while matches!(unsafe { self.query_event(mark) }, Ok(false)) {
                thread::sleep(pause);
                pause = (pause * 2).min(PAUSE.1);
            }
            // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: as above.
            // An error leaks it.
            let _ = unsafe { self.destroy_event(mark) };
        }
    }

    /// Marks what a stream has queued. One that cannot be marked is not waited for: it captures, or
    /// its context is broken and runs nothing.
    fn mark(&self, stream: RawStream) -> Option<RawEvent> {
        // SAFETY: `capture_status` asks for a live stream: it is in the table, whose lock is held.
        if unsafe { self.capture_status(stream) }.ok()? != CaptureStatus::None {
            return None;
        }
        let event = self.create_event(stream.device, EventKind::Local).ok()?;
        // SAFETY: `record_event` asks for a live event and stream of one device: just made, and as
        // above.
        if unsafe { self.record_event(event, stream) }.is_err() {
            // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: just made.
            let _ = unsafe { self.destroy_event(event) };
            return None;
        }
        Some(event)
    }
}
