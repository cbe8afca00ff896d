//! Waiting without the runtime's locks before calls that wait with them.
//!
//! `hipIpcCloseMemHandle` and `hipFree` wait for all that the device has queued, the others for
//! some of it, and other threads' calls may stand still meanwhile: on CUDA's driver, under the same
//! calls, they were measured to. So events on the streams that this backend knows are waited for
//! first, by looking; among those streams are the ones that wait, on the library's behalf, for the
//! application's.

use std::ptr;
use std::thread;
use std::time::Duration;

use gpu_api::RawStream;

use crate::backend::HipBackend;
use crate::call;
use crate::error::NOT_READY;
use crate::sys::{EVENT_DISABLE_TIMING, Event};

/// The shortest and the longest time between two looks.
const PAUSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(5));

impl HipBackend {
    /// Waits until all that the known streams have queued at this moment is done. For a call that
    /// would wait for it anyway, on a thread that may block.
    pub(crate) fn pass_known_streams(&self) {
        let marks = self
            .streams
            .for_each(|stream| Some((stream.device, self.mark(stream)?)));
        let mut pause = PAUSE.0;
        for (device, mark) in marks {
            let Ok(scope) = self.driver.on_device(device) else {
                continue;
            };
            let symbols = &self.driver.symbols;
            let pending = || {
                scope.code(&symbols.hipEventQuery, |function| {
                    // SAFETY: `hipEventQuery` asks for a live event: `mark` made it, and it is
                    // destroyed below.
                    unsafe { function(mark) }
                })
            };
            // After an error nothing is to be waited for.
            while matches!(pending(), Ok(NOT_READY)) {
                thread::sleep(pause);
                pause = (pause * 2).min(PAUSE.1);
            }
            let _ = scope.call(&symbols.hipEventDestroy, |function| {
                // SAFETY: `hipEventDestroy` asks for a live event that nobody uses afterwards: as
                // above. An error leaks it.
                unsafe { function(mark) }
            });
        }
    }

    /// Marks what a stream has queued. One that cannot be marked is not waited for: it captures, or
    /// its device is broken and runs nothing.
    ///
    /// It asks nothing of the table of streams, whose lock is held.
    fn mark(&self, stream: RawStream) -> Option<Event> {
        let scope = self.driver.on_stream(stream).ok()?;
        let symbols = &self.driver.symbols;
        if symbols.hipStreamIsCapturing.function.is_some() {
            let mut status = 0;
            let asked = scope.call(&symbols.hipStreamIsCapturing, |function| {
                // SAFETY: `hipStreamIsCapturing` writes one integer: `status` is one. The stream is
                // alive: it is in the table, whose lock is held.
                unsafe { function(call::stream(stream), &raw mut status) }
            });
            if asked.is_err() || status != 0 {
                return None;
            }
        }
        let mut event: Event = ptr::null_mut();
        scope
            .call(&symbols.hipEventCreateWithFlags, |function| {
                // SAFETY: `hipEventCreateWithFlags` writes one pointer: `event` is one.
                unsafe { function(&raw mut event, EVENT_DISABLE_TIMING) }
            })
            .ok()?;
        let recorded = scope.call(&symbols.hipEventRecord, |function| {
            // SAFETY: `hipEventRecord` asks for both alive and of one device: just made, and as
            // above.
            unsafe { function(event, call::stream(stream)) }
        });
        if recorded.is_err() {
            let _ = scope.call(&symbols.hipEventDestroy, |function| {
                // SAFETY: `hipEventDestroy` asks for a live event that nobody uses afterwards: just
                // made.
                unsafe { function(event) }
            });
            return None;
        }
        Some(event)
    }
}
