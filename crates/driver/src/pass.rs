//! Waiting without the driver's locks before calls that wait with them.
//!
//! `free`, `host_free`, `handle_close` and `host_unregister` wait for all that the context or the
//! device has queued, under a lock that other threads' calls need: measured on CUDA's driver 580
//! with one stream that waited for 3 s, calls of other threads stood still for 2.95 s, and for
//! 0.1 ms when the calling thread had waited beforehand. `cuCtxSynchronize` would be that wait, but
//! during a global capture of the application's it gives 900 and destroys the capture, in relaxed
//! mode too. So events on the streams that this backend knows serve; among them are those that
//! wait, on the library's behalf, for the application's.
//!
//! The events are kept and recorded again: a close makes and destroys none.

use std::thread;
use std::time::Duration;

use gpu_api::lock::Acquire;
use gpu_api::{CaptureStatus, DeviceId, EventKind, GpuCaptures, GpuEvents, RawEvent, RawStream};

use crate::backend::Backend;
use crate::vendor::Vendor;

/// The shortest and the longest time between two looks.
const PAUSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(5));

impl<V: Vendor> Backend<V> {
    /// Waits until all that known streams have queued at this moment is done. For a call that would
    /// wait for it anyway, on a thread that may block.
    pub fn pass_known_streams(&self) {
        let marks = self
            .driver()
            .streams
            .for_each(|stream| Some((stream.device, self.mark(stream)?)));
        let mut pause = PAUSE.0;
        for (device, mark) in marks {
            // SAFETY: `query_event` asks for a live event: `mark` made it, and no other wait has
            // it. After an error nothing is to be waited for.
            while matches!(unsafe { self.query_event(mark) }, Ok(false)) {
                thread::sleep(pause);
                pause = (pause * 2).min(PAUSE.1);
            }
            self.driver().marks.acquire().push((device, mark));
        }
    }

    /// Destroys the kept events, so that nothing of this backend's is left in a context.
    pub fn forget_marks(&self) {
        for (_, mark) in std::mem::take(&mut *self.driver().marks.acquire()) {
            // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: it was
            // taken out of the list. An error leaks it.
            let _ = unsafe { self.destroy_event(mark) };
        }
    }

    /// Marks what a stream has queued. One that cannot be marked is not waited for: it captures, or
    /// its context is broken and runs nothing.
    ///
    /// It asks nothing of the table of streams, whose lock is held.
    fn mark(&self, stream: RawStream) -> Option<RawEvent> {
        // SAFETY: `capture_status` asks for a live stream: it is in the table, whose lock is held.
        if unsafe { self.capture_status(stream) }.ok()? != CaptureStatus::None {
            return None;
        }
        let event = self.idle_mark(stream.device)?;
        // SAFETY: `record_event` asks for a live event and stream of one device: just taken, and as
        // above.
        if unsafe { self.record_event(event, stream) }.is_err() {
            // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: as above.
            let _ = unsafe { self.destroy_event(event) };
            return None;
        }
        Some(event)
    }

    /// Takes an event that no wait uses, or makes one.
    fn idle_mark(&self, device: DeviceId) -> Option<RawEvent> {
        let mut marks = self.driver().marks.acquire();
        if let Some(found) = marks.iter().position(|(of, _)| *of == device) {
            return Some(marks.swap_remove(found).1);
        }
        drop(marks);
        self.create_event(device, EventKind::Local).ok()
    }
}
