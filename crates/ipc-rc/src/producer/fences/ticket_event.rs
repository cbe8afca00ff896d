//! Points in a stream's order, for readers that are not known yet.
//!
//! A grant to a participant writes a value into that participant's word at once. A ticket has no
//! participant, so it keeps a [`TicketEvent`]: an event on the stream. When a participant claims
//! the ticket, either the event is done and no fence is needed, or a stream of the producer's own
//! waits for the event and writes the claimant's word.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use gpu_api::{Gpu, ParticipantId, Result};

use crate::gpu_event::GpuEvent;
use crate::producer::fences::fence::Fences;
use crate::producer::fences::words::Words;
use crate::stream::{Stream, StreamKey};
use transport::wire::descriptor::Fence;

/// Writes queued on one stream: far below the 1,020 entries at which a driver blocks; each write
/// has a wait before it.
const MOST_QUEUED: u32 = 64;
/// Streams of our own after which idle ones are given up before another is made.
const MANY_STREAMS: usize = 64;

/// A point in the order of a stream's work.
#[derive(Debug)]
pub(crate) struct TicketEvent {
    gpu: Gpu,
    mark: GpuEvent,
    stream: StreamKey,
}

impl TicketEvent {
    /// Says whether the work before it is done.
    ///
    /// # Errors
    ///
    /// The driver's error: the context may be broken.
    pub fn is_passed(&self) -> Result<bool> {
        self.mark.is_passed()
    }

    /// Makes a stream wait for it.
    ///
    /// # Errors
    ///
    /// The driver's error: nothing was queued then.
    pub fn hold(&self, stream: &Stream) -> Result<()> {
        self.mark.hold(stream)
    }

    /// Marks the work queued on `stream` at this moment.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`](gpu_api::Error::Capturing),
    /// [`Error::Mismatch`](gpu_api::Error::Mismatch) for a stream of another device, and the
    /// driver's error.
    pub fn mark(gpu: &Gpu, stream: &Stream) -> Result<TicketEvent> {
        stream.refuse_capture("share before the capture begins or after it ended")?;
        let mark = GpuEvent::new(gpu)?;
        mark.record(stream)?;
        Ok(TicketEvent {
            gpu: gpu.clone(),
            mark,
            stream: stream.key(),
        })
    }
}

/// What a claimant has to wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Await {
    /// Nothing: the point is passed.
    Nothing,
    /// This fence.
    Fence(Fence),
    /// The stream that waits for it is full: ask again.
    Room,
}

/// The producer's own streams that wait for tickets' events: one for each stream that a claimed
/// ticket was made after, so that one stuck stream holds up only claims that wait for it. The
/// session's thread has them.
#[derive(Debug, Default)]
pub(crate) struct TicketStreams(HashMap<StreamKey, TicketStream>);

#[derive(Debug)]
struct TicketStream {
    stream: Stream,
    /// Writes queued since it was last seen dry.
    queued: u32,
}

impl TicketStream {
    fn is_dry(&self) -> bool {
        // SAFETY: `query_stream` asks for a live stream: `self` keeps it. After an error nobody
        // knows: not dry.
        unsafe { self.stream.gpu().backend().query_stream(self.stream.raw()) }.unwrap_or(false)
    }

    /// Settles what it owes to participants' words if all is written, and says whether it is.
    fn settle(&self, fences: &Fences) -> bool {
        let debt = fences.debt(&self.stream);
        let is_dry = self.is_dry();
        if is_dry && let Some(debt) = debt {
            debt.settle();
        }
        is_dry
    }
}

impl TicketStreams {
    /// Settles what they owe to the words of participants that have gone.
    pub fn settle(&self, fences: &Fences) {
        for own in self.0.values() {
            own.settle(fences);
        }
    }

    /// Says whether one owes a word.
    pub fn owe(&self, fences: &Fences) -> bool {
        self.0
            .values()
            .any(|own| fences.debt(&own.stream).is_some())
    }

    /// Makes a participant's word tell when a point is passed.
    ///
    /// # Errors
    ///
    /// The driver's error: nothing was queued then.
    pub fn fence(
        &mut self,
        point: &TicketEvent,
        fences: &Fences,
        to: ParticipantId,
        words: &Words,
    ) -> Result<Await> {
        if point.mark.is_passed()? {
            return Ok(Await::Nothing);
        }
        if self.0.len() >= MANY_STREAMS && !self.0.contains_key(&point.stream) {
            self.0.retain(|_, own| !own.settle(fences));
        }
        let own = match self.0.entry(point.stream) {
            Entry::Occupied(own) => own.into_mut(),
            Entry::Vacant(place) => place.insert(TicketStream {
                stream: Stream::create(&point.gpu)?,
                queued: 0,
            }),
        };
        if own.queued >= MOST_QUEUED {
            if !own.is_dry() {
                return Ok(Await::Room);
            }
            own.queued = 0;
        }
        own.queued += 1;
        point.mark.hold(&own.stream)?;
        fences
            .queue(&point.gpu, &own.stream, to, words)
            .map(Await::Fence)
    }
}
