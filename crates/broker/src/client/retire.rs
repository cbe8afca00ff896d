//! Addresses without a holder: given back once the GPU is done with them.

use gpu_api::{EventKind, Gpu, RawEvent};
use ipc_rc::Stream;

use super::farewell::Farewell;
use crate::memory::range::Range;

/// Events for the work queued on streams at one moment.
#[derive(Debug)]
pub(super) struct Behind {
    gpu: Gpu,
    events: Vec<RawEvent>,
    /// An event could not be recorded: the end of the work cannot be observed.
    unknown: bool,
}

impl Behind {
    /// Records an event on each stream.
    pub(super) fn of(gpu: &Gpu, streams: &[Stream]) -> Behind {
        let mut behind = Behind {
            gpu: gpu.clone(),
            events: Vec::new(),
            unknown: false,
        };
        for stream in streams {
            if let Err(error) = behind.record(stream) {
                tracing::warn!(%error, "memory stays mapped until the process ends: its use cannot be followed");
                behind.unknown = true;
            }
        }
        behind
    }

    fn record(&mut self, stream: &Stream) -> gpu_api::Result<()> {
        stream.refuse_capture("end the capture before the object goes")?;
        let backend = self.gpu.backend();
        let event = backend.create_event(stream.gpu().device(), EventKind::Local)?;
        self.events.push(event);
        // SAFETY: `record_event` asks for both alive and of one device: just made on the stream's.
        unsafe { backend.record_event(event, stream.raw()) }
    }

    /// Says whether all of it has finished.
    pub(super) fn is_done(&self) -> bool {
        let finished = |&event: &RawEvent| {
            // SAFETY: `query_event` asks for a live event: `drop` destroys them.
            matches!(unsafe { self.gpu.backend().query_event(event) }, Ok(true))
        };
        !self.unknown && self.events.iter().all(finished)
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        for &event in &self.events {
            // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: it is this
            // value's own.
            let _ = unsafe { self.gpu.backend().destroy_event(event) };
        }
    }
}

/// A range on its way out.
#[derive(Debug)]
pub(super) struct Retiring {
    range: Option<Range>,
    behind: Behind,
    /// The hold of a pool that ends with the range.
    pub farewell: Option<Farewell>,
}

impl Retiring {
    /// Gives a range up once the streams have finished their queued work.
    pub(super) fn new(gpu: &Gpu, range: Range, streams: &[Stream]) -> Retiring {
        Retiring {
            range: Some(range),
            behind: Behind::of(gpu, streams),
            farewell: None,
        }
    }

    /// Gives the range back if it is time, and says whether it is gone.
    pub(super) fn go_on(&mut self) -> bool {
        if self.behind.unknown {
            // Leaked: the memory lives as long as this process.
            std::mem::forget(self.range.take());
            std::mem::forget(self.farewell.take());
            return true;
        }
        if !self.behind.is_done() {
            return false;
        }
        if let Some(range) = self.range.take() {
            // SAFETY: `release` asks that no work touches the range: what was queued on every
            // stream that was named has finished, and its holder, who could queue more, has gone.
            unsafe { range.release() };
        }
        true
    }
}
