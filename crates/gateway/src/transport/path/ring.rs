//! The way through staging buffers: a ring of slots on each side.
//!
//! ```text
//!            origin                      replica
//! object ──copy──► its slot i ──read──► slot i ──copy──► object
//!
//! slot:  Free ──fill──► Filling ──filled──► Reading ──arrived──► Copying ──copied──► Free
//! ```
//!
//! Each slot goes its round by itself, so that with three or more the origin's copy, the read and the replica's copy of
//! three pieces run at a time. After a failure no step is begun, and the error is told when all that were begun have
//! ended. A step that never ends keeps the ring running, as any [`Transfer`].

use std::fmt;
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::transport::{Pair, Peer, Progress, RemoteSpan, Span, Transfer, Transport};

/// The origin's side: it copies pieces of its object into its slots.
pub trait Source: Send {
    /// Notes that bytes of the object are wanted in the origin's slot, which is not read at that time.
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

/// The replica's copies from its slots to the object.
pub trait Copier: Send {
    /// Begins to copy from the start of a slot to bytes of the object.
    ///
    /// # Errors
    ///
    /// Nothing was begun.
    ///
    /// # Safety
    ///
    /// Until the copy has ended, the slot and the object stay mapped, and nobody writes to either or reads those bytes
    /// of the object.
    unsafe fn copy(&mut self, slot: usize, from: Span, to: Range<u64>) -> Result<()>;

    /// Looks whether it has ended, without waiting.
    ///
    /// # Errors
    ///
    /// It has, and has failed.
    fn copied(&mut self, slot: usize) -> Result<bool>;
}

/// The buffers of both sides, of one number and one length.
#[derive(Clone, Debug)]
pub struct Buffers {
    /// This side's, registered with the transport.
    pub local: Vec<Span>,
    /// The origin's.
    pub remote: Vec<RemoteSpan>,
}

/// Steps of a slot's round.
const ROUND: usize = 4;

enum State {
    Free,
    Filling(Range<u64>),
    Reading(Range<u64>, Box<dyn Transfer>),
    Copying(Range<u64>),
}

/// How long a ring has read, and how long it could not, in nanoseconds.
#[derive(Default, Debug)]
pub struct Times {
    /// A slot or more was being read.
    pub reading: AtomicU64,
    /// None was: the origin was waited for.
    pub filling: AtomicU64,
    /// None was, and none was being filled: copies to the object were waited for.
    pub copying: AtomicU64,
}

/// A read through a ring of buffers.
pub struct Ring<S, C> {
    transport: Arc<dyn Transport>,
    peer: Box<dyn Peer>,
    source: S,
    copier: C,
    local: Vec<Span>,
    remote: Vec<RemoteSpan>,
    slots: Vec<State>,
    /// The first byte that no slot was asked for.
    next: u64,
    bytes: u64,
    done: u64,
    failed: Option<Error>,
    ended: Option<Result<(), String>>,
    times: Arc<Times>,
    looked: Option<Instant>,
}

impl<S: Source, C: Copier> Ring<S, C> {
    /// Prepares to read `bytes` bytes. Nothing begins before it is polled.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for buffers that do not match.
    ///
    /// # Safety
    ///
    /// Until the ring has ended, or for the process' life if it is dropped before, the object to which `copier` writes
    /// and the buffers here stay mapped and are used by nobody else.
    pub unsafe fn new(
        transport: Arc<dyn Transport>,
        peer: Box<dyn Peer>,
        source: S,
        copier: C,
        buffers: Buffers,
        bytes: u64,
    ) -> Result<Self> {
        let Buffers { local, remote } = buffers;
        let lengths: Vec<_> = local.iter().map(|one| one.bytes).chain(remote.iter().map(|one| one.bytes)).collect();
        if local.is_empty() || local.len() != remote.len() || lengths.iter().any(|&one| one == 0 || one != lengths[0]) {
            return Err(Error::Invalid {
                what: "the staging buffers",
                got: format!("{} here and {} at the origin, of {lengths:?} bytes", local.len(), remote.len()),
                must: "as many here as there, of one length",
            });
        }
        let slots = local.iter().map(|_| State::Free).collect();
        Ok(Self {
            transport,
            peer,
            source,
            copier,
            local,
            remote,
            slots,
            next: 0,
            bytes,
            done: 0,
            failed: None,
            ended: None,
            times: Arc::default(),
            looked: None,
        })
    }

    /// Returns what it spends its time with, which goes on while it is polled.
    pub fn times(&self) -> Arc<Times> {
        Arc::clone(&self.times)
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
        kind.fetch_add(u64::try_from((now - since).as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Takes a slot one step further, and says whether there was one. An error is of a step that has ended or did not
    /// begin: the slot is free.
    fn step(&mut self, slot: usize) -> Result<bool> {
        let (next, moved) = match mem::replace(&mut self.slots[slot], State::Free) {
            State::Free => {
                let end = self.bytes.min(self.next.saturating_add(self.local[slot].bytes));
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
                    let bytes = piece.end - piece.start;
                    let pair = Pair {
                        from: RemoteSpan { bytes, ..self.remote[slot] },
                        to: Span { bytes, ..self.local[slot] },
                    };
                    // SAFETY: `Peer::read`: the slot is this ring's alone, in no other step, and stays mapped, as the
                    // caller of `new` promises.
                    (State::Reading(piece, unsafe { self.peer.read(&[pair]) }?), true)
                }
            },
            State::Reading(piece, mut transfer) => match transfer.poll()? {
                Progress::Running { .. } => (State::Reading(piece, transfer), false),
                Progress::Done if self.failed.is_some() => return Ok(true),
                Progress::Done => {
                    self.transport.flush()?;
                    let from = Span { bytes: piece.end - piece.start, ..self.local[slot] };
                    // SAFETY: `Copier::copy`: the slot is in no other step; slot and object stay mapped, as the caller
                    // of `new` promises, and pieces do not overlap.
                    unsafe { self.copier.copy(slot, from, piece.clone()) }?;
                    (State::Copying(piece), true)
                }
            },
            State::Copying(piece) => match self.copier.copied(slot)? {
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

    /// Takes every slot one step further, and says whether one moved.
    fn pass(&mut self) -> bool {
        let mut moved = false;
        for slot in 0..self.slots.len() {
            match self.step(slot) {
                Ok(this) => moved |= this,
                // The first error is the cause of those after it.
                Err(error) => {
                    self.failed.get_or_insert(error);
                    moved = true;
                }
            }
        }
        if let Err(error) = self.source.send() {
            self.failed.get_or_insert(error);
        }
        moved
    }
}

impl<S: Source, C: Copier> Transfer for Ring<S, C> {
    fn poll(&mut self) -> Result<Progress> {
        if let Some(ended) = &self.ended {
            return ended.clone().map(|()| Progress::Done).map_err(|why| Error::Transfer { why });
        }
        self.count();
        // A step that has ended lets the next begin at once, and not after a caller's pause.
        for _ in 0..ROUND {
            if !self.pass() {
                break;
            }
        }
        if self.slots.iter().any(|state| !matches!(state, State::Free))
            || (self.failed.is_none() && self.done < self.bytes)
        {
            return Ok(Progress::Running { bytes: self.done });
        }
        let ended = match self.failed.take() {
            Some(Error::Transfer { why }) => Err(why),
            Some(other) => Err(other.to_string()),
            None => Ok(()),
        };
        self.ended = Some(ended.clone());
        ended.map(|()| Progress::Done).map_err(|why| Error::Transfer { why })
    }
}

impl<S, C> fmt::Debug for Ring<S, C> {
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
