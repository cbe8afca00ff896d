//! The way through staging buffers: a ring of slots at the origin.
//!
//! ```text
//!            origin                                        replica
//! object ──copy──► its slot i ──read──► object, or slot i ──copy──► object
//!
//! slot:  Free ──fill──► Filling ──filled──► Reading ──arrived──► Copying ──copied──► Free
//! ```
//!
//! Each slot goes its round by itself, so that with three or more the origin's copy, the read and
//! the replica's copy of three pieces run at a time. After a failure no step is begun, and the
//! error is told when all that were begun have ended. A step that never ends keeps the ring
//! running, as any [`Transfer`].

use std::fmt;
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::transport::{Pair, Peer, Progress, RemoteSpan, Span, Transfer};

/// The origin's side: it copies pieces of its object into its slots.
pub trait Source: Send {
    /// Notes that bytes of the object are wanted in the origin's slot, which is not read at that
    /// time.
    fn fill(&mut self, slot: usize, bytes: Range<u64>);

    /// Asks for all that was noted.
    ///
    /// # Errors
    ///
    /// Nothing was asked for.
    fn send(&mut self) -> Result<()>;

    /// Looks whether they are there, without waiting.
    ///
    /// # Errors
    ///
    /// They never will be.
    fn filled(&mut self, slot: usize) -> Result<bool>;
}

/// Where the bytes of a slot land on this side: in the object, or in a slot here, from which they
/// are copied.
pub trait Landing: Send {
    /// Lists where a piece of the object lands, in its order. All of it is registered with the
    /// transport.
    ///
    /// # Errors
    ///
    /// There is no such slot, or the object has no such bytes.
    fn spans(&self, slot: usize, piece: &Range<u64>) -> Result<Vec<Span>>;

    /// Begins to copy what has landed to these bytes of the object, if it is not there already.
    ///
    /// # Errors
    ///
    /// Nothing was begun.
    ///
    /// # Safety
    ///
    /// Until the copy has ended, the slot and the object stay mapped, and nobody writes to either
    /// or reads those bytes of the object.
    unsafe fn copy(&mut self, slot: usize, piece: Range<u64>) -> Result<()>;

    /// Looks whether the copy has ended, without waiting.
    ///
    /// # Errors
    ///
    /// It has, and has failed.
    fn copied(&mut self, slot: usize) -> Result<bool>;
}

/// Steps of a slot's round.
const ROUND: usize = 4;

enum State {
    Free,
    Filling(Range<u64>),
    /// With the bytes that have arrived.
    Reading(Range<u64>, Box<dyn Transfer>, u64),
    Copying(Range<u64>),
}

/// How long a ring has read, and how long it could not, in nanoseconds; and what it asked for.
#[derive(Default, Debug)]
pub struct Times {
    /// A slot or more was being read.
    pub reading: AtomicU64,
    /// None was: the origin was waited for.
    pub filling: AtomicU64,
    /// None was, and none was being filled: copies to the object were waited for.
    pub copying: AtomicU64,
    /// How many questions to fill slots were answered.
    pub answers: AtomicU64,
    /// The sum of their times, from the question until its answer was heard.
    pub answering: AtomicU64,
}

/// A read through a ring of buffers.
pub struct Ring<S> {
    peer: Box<dyn Peer>,
    source: S,
    landing: Box<dyn Landing>,
    remote: Vec<RemoteSpan>,
    slots: Vec<State>,
    /// The first byte that no slot was asked for.
    next: u64,
    bytes: u64,
    done: u64,
    /// The bytes that have arrived, as it was told.
    told: u64,
    failed: Option<Error>,
    ended: Option<Result<(), String>>,
    times: Arc<Times>,
    looked: Option<Instant>,
}

impl<S: Source> Ring<S> {
    /// Prepares to read `bytes` bytes through the origin's slots. Nothing begins before it is
    /// polled.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for no slots, and for slots of several lengths.
    ///
    /// # Safety
    ///
    /// Until the ring has ended, or for the process' life if it is dropped before, what `landing`
    /// names stays mapped and is used by nobody else.
    pub unsafe fn new(
        peer: Box<dyn Peer>,
        source: S,
        landing: Box<dyn Landing>,
        remote: Vec<RemoteSpan>,
        bytes: u64,
        times: Arc<Times>,
    ) -> Result<Self> {
        let lengths: Vec<_> = remote.iter().map(|one| one.bytes).collect();
        if lengths
            .first()
            .is_none_or(|&first| first == 0 || lengths.iter().any(|&one| one != first))
        {
            return Err(Error::Invalid {
                what: "the slots of the origin",
                got: format!("{} of {lengths:?} bytes", lengths.len()),
                must: "one or more, of one length",
            });
        }
        let slots = remote.iter().map(|_| State::Free).collect();
        Ok(Self {
            peer,
            source,
            landing,
            remote,
            slots,
            next: 0,
            bytes,
            done: 0,
            told: 0,
            failed: None,
            ended: None,
            times,
            looked: None,
        })
    }

    /// Counts the time since the last look to what was going on then.
    fn count(&mut self) {
        let any = |wanted: fn(&State) -> bool| self.slots.iter().any(wanted);
        let kind = if any(|state| matches!(state, State::Reading(..))) {
            &self.times.reading
        } else if any(|state| matches!(state, State::Filling(_))) {
            &self.times.filling
        } else {
            &self.times.copying
        };
        let now = Instant::now();
        let since = self.looked.replace(now).unwrap_or(now);
        kind.fetch_add(
            u64::try_from((now - since).as_nanos()).unwrap_or(u64::MAX),
            Ordering::Relaxed,
        );
    }

    /// Takes a slot one step further, and says whether there was one. An error is of a step that
    /// has ended or did not begin: the slot is free.
    fn step(&mut self, slot: usize) -> Result<bool> {
        let (next, moved) = match mem::replace(&mut self.slots[slot], State::Free) {
            State::Free => {
                let end = self
                    .bytes
                    .min(self.next.saturating_add(self.remote[slot].bytes));
                if self.failed.is_some() || self.next == end {
                    return Ok(false);
                }
                let piece = self.next..end;
                self.source.fill(slot, piece.clone());
                self.next = end;
                (State::Filling(piece), true)
            }
            State::Filling(piece) => match self.source.filled(slot)? {
                false => (State::Filling(piece), false),
                true if self.failed.is_some() => return Ok(true),
                true => {
                    let mut from = self.remote[slot];
                    let pair = |to: Span| {
                        let pair = Pair {
                            from: RemoteSpan {
                                bytes: to.bytes,
                                ..from
                            },
                            to,
                        };
                        // The origin's word: a range that wraps is refused by the peer.
                        from.address = from.address.wrapping_add(to.bytes);
                        pair
                    };
                    let pairs: Vec<_> = self
                        .landing
                        .spans(slot, &piece)?
                        .into_iter()
                        .map(pair)
                        .collect();
                    // SAFETY: `Peer::read`: the slot, or these bytes of the object, are in no other
                    // step, and stay mapped, as the caller of `new` promises.
                    (
                        State::Reading(piece, unsafe { self.peer.read(&pairs) }?, 0),
                        true,
                    )
                }
            },
            State::Reading(piece, mut transfer, _) => match transfer.poll()? {
                Progress::Running { bytes } => (State::Reading(piece, transfer, bytes), false),
                Progress::Done if self.failed.is_some() => return Ok(true),
                Progress::Done => {
                    // SAFETY: `Landing::copy`: the slot is in no other step; slot and object stay
                    // mapped, as the caller of `new` promises, and pieces do not overlap.
                    unsafe { self.landing.copy(slot, piece.clone()) }?;
                    (State::Copying(piece), true)
                }
            },
            State::Copying(piece) => match self.landing.copied(slot)? {
                false => (State::Copying(piece), false),
                true => {
                    self.done += piece.end - piece.start;
                    (State::Free, true)
                }
            },
        };
        self.slots[slot] = next;
        Ok(moved)
    }

    /// Takes a slot as many steps further as have ended, and asks for what it wants then. Some
    /// transports read within
    /// [`Peer::read`]: the origin fills this slot while the next one is read.
    fn pass(&mut self, slot: usize) {
        for _ in 0..ROUND {
            match self.step(slot) {
                Ok(true) => {}
                Ok(false) => break,
                // The first error is the cause of those after it.
                Err(error) => drop(self.failed.get_or_insert(error)),
            }
        }
        if let Err(error) = self.source.send() {
            self.failed.get_or_insert(error);
        }
    }
}

impl<S: Source> Transfer for Ring<S> {
    fn poll(&mut self) -> Result<Progress> {
        if let Some(ended) = &self.ended {
            return ended
                .clone()
                .map(|()| Progress::Done)
                .map_err(|why| Error::Transfer { why });
        }
        self.count();
        for slot in 0..self.slots.len() {
            self.pass(slot);
        }
        if self.slots.iter().any(|state| !matches!(state, State::Free))
            || (self.failed.is_none() && self.done < self.bytes)
        {
            let arrived = |state: &State| match state {
                State::Free | State::Filling(_) => 0,
                State::Reading(_, _, bytes) => *bytes,
                State::Copying(piece) => piece.end - piece.start,
            };
            // A piece whose step fails is counted all the same.
            self.told = self
                .told
                .max(self.done + self.slots.iter().map(arrived).sum::<u64>());
            return Ok(Progress::Running { bytes: self.told });
        }
        let ended = match self.failed.take() {
            Some(Error::Transfer { why }) => Err(why),
            Some(other) => Err(other.to_string()),
            None => Ok(()),
        };
        self.ended = Some(ended.clone());
        ended
            .map(|()| Progress::Done)
            .map_err(|why| Error::Transfer { why })
    }
}

impl<S> fmt::Debug for Ring<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("slots", &self.slots.len())
            .field("done", &self.done)
            .field("bytes", &self.bytes)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
