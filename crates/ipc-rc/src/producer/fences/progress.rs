//! How far a producing stream has come with the values that it owes to participants' words.
//!
//! A file is unmapped only when no stream of ours has yet to write into it. Shared memory cannot
//! tell: the participant writes there too. So of each stream it is known which value is `queued`,
//! and which an event of ours has proven to be `passed`.
//!
//! | step | who | what |
//! |---|---|---|
//! | queue | the thread that shares, under the cell's lock | refuses if the words are closed; enqueues; notes the cell's last value and `queued` |
//! | record | a thread that drops a block shared after the stream, or prunes its list; the next share, if `wanted` | takes `queued` ([`Debt`]), then records an event |
//! | settle | who sees the event passed | raises `passed` to what was taken |
//! | close | the session's thread | closes the words, then tries each cell: one that is locked owes a value |
//!
//! - **A closed word gets no value**: the flag is set before a cell's lock is tried, and read under
//!   that lock.
//! - **Every value is settled**: it is queued by the share of a block that has the stream in its
//!   list, and a block goes only after an event on each. The streams of
//!   [`TicketStreams`](super::ticket_event::TicketStreams) are our own and are asked themselves.
//! - **Not covered**: a broken context, in which nothing is written any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The values of one producing stream.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The highest value whose enqueueing has returned.
    queued: AtomicU64,
    /// The highest value that an event of ours has proven to be written.
    passed: AtomicU64,
    /// A participant that has gone waits for what was queued last.
    wanted: AtomicBool,
}

impl Progress {
    /// Says whether the stream has yet to write the value that was queued last.
    pub fn owes(&self) -> bool {
        self.owes_up_to(self.queued.load(Ordering::Acquire))
    }

    /// Says whether it has yet to write a value.
    pub fn owes_up_to(&self, value: u64) -> bool {
        // Acquire: with the Release of `prove`.
        value > self.passed.load(Ordering::Acquire)
    }

    /// Notes that a value is queued.
    pub fn queue(&self, value: u64) {
        self.queued.fetch_max(value, Ordering::Release);
    }

    /// Notes that a value is written.
    pub fn prove(&self, value: u64) {
        // Release: the words may be unmapped by who reads it.
        self.passed.fetch_max(value, Ordering::Release);
    }

    /// Has the next share record an event.
    pub fn want_proof(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    /// Says whether a departed participant waits for an event.
    pub fn is_proof_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Notes that an event is recorded behind all that is queued.
    pub fn note_proof(&self) {
        self.wanted.store(false, Ordering::Relaxed);
    }

    /// Returns what is owed at this moment.
    pub fn debt(self: &Arc<Progress>) -> Option<Debt> {
        self.owes().then(|| Debt {
            of: self.clone(),
            value: self.queued.load(Ordering::Acquire),
        })
    }
}

/// What a stream owes at one moment: settled when an event that was recorded after that moment has
/// passed.
#[derive(Debug)]
pub(crate) struct Debt {
    pub(super) of: Arc<Progress>,
    pub(super) value: u64,
}

impl Debt {
    /// Says whether it is not settled.
    pub(super) fn is_open(&self) -> bool {
        self.of.owes_up_to(self.value)
    }

    /// Notes that all of it is written.
    pub fn settle(&self) {
        self.of.prove(self.value);
    }
}
