//! From the last write to the epoch.
//!
//! The releases of the write leases are queued behind the streams that wrote; the thread waits for
//! them, unmaps, and only then asks the broker, which reads the same words. So an object that is
//! visible is one whose writes have ended.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use gpu_api::lock::{Acquire, AwaitChange};
use gpu_api::{Error, EventKind, ForkGuard, Gpu, RawEvent, RawStream, StreamOp};
use ipc_rc::Stream;

use super::connection::Words;
use crate::error::{ObjectError, Result};
use crate::memory::range::Range;
use crate::object::identity::{Epoch, Identity};
use crate::wire::LeaseSlot;
use transport::shared::counter_file::slot_word;
use transport::shared::slot::released_word;

/// The outcome of a commit, for the threads that wait for it.
#[derive(Debug, Default)]
pub(super) struct CommitCell {
    done: Mutex<Option<Result<Epoch>>>,
    changed: Condvar,
}

impl CommitCell {
    pub(super) fn set(&self, done: Result<Epoch>) {
        self.done.acquire().get_or_insert(done);
        self.changed.notify_all();
    }
}

/// A commit on its way.
///
/// Dropping it changes nothing: the commit goes on.
#[derive(Debug)]
pub struct Commit {
    pub(super) cell: Arc<CommitCell>,
    pub(super) identity: Identity,
    pub(super) fork: ForkGuard,
}

impl Commit {
    /// Returns the number by which [`Client::outcome`](crate::Client::outcome) tells what became of
    /// it: the object's identity.
    pub fn id(&self) -> Identity {
        self.identity
    }

    /// Waits until the object is visible, and returns its epoch.
    ///
    /// # Errors
    ///
    /// [`ObjectError::Conflict`] when the name has another epoch than was expected,
    /// [`ObjectError::WriterLost`] when the broker died before it was asked,
    /// [`ObjectError::Refused`] when the keeper does not take the object, [`Error::Forked`] in a
    /// forked child.
    pub fn wait(self) -> Result<Epoch> {
        self.wait_until(None)
    }

    /// As [`wait`](Commit::wait), for so long at most; the commit goes on all the same.
    ///
    /// # Errors
    ///
    /// As [`wait`](Commit::wait), and [`Error::Deadline`].
    pub fn wait_for(self, time: Duration) -> Result<Epoch> {
        self.wait_until(Some(Instant::now() + time))
    }

    fn wait_until(self, deadline: Option<Instant>) -> Result<Epoch> {
        // The thread that finishes it is the parent's.
        self.fork.check("this commit")?;
        let mut done = self.cell.done.acquire();
        loop {
            if let Some(done) = done.take() {
                return done;
            }
            let left = deadline.map_or(Duration::from_secs(3_600), |at| {
                at.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Err(Error::deadline("the commit").into());
            }
            done = self.cell.changed.await_change(done, Some(left));
        }
    }
}

/// A commit that waits for its releases.
#[derive(Debug)]
pub(super) struct Pending {
    pub cell: Arc<CommitCell>,
    pub identity: Identity,
    pub words: Arc<Words>,
    pub leases: Vec<LeaseSlot>,
    pub range: Option<Range>,
    /// What the releases are queued on, until they have happened.
    pub _lane: Option<Lane>,
    pub lost: bool,
}

impl Pending {
    /// Unmaps when the writes have ended. Returns nothing while they have not, and then what to ask
    /// the broker, if there is still one to ask.
    pub(super) fn go_on(&mut self) -> Option<Option<(Arc<CommitCell>, Identity)>> {
        let ended = |lease: &LeaseSlot| {
            self.words
                .file
                .slot(lease.slot)
                .is_released(lease.generation)
        };
        if !self.leases.iter().all(ended) {
            return None;
        }
        transport::trace_point!("commit.released");
        if let Some(range) = self.range.take() {
            // SAFETY: `release` asks that no work touches the range: the leases were released
            // behind every stream that wrote, and the writer, who could queue more, has gone into
            // this commit.
            unsafe { range.release() };
        }
        Some((!self.lost).then(|| (self.cell.clone(), self.identity)))
    }

    /// Learns that the broker has gone before it was asked.
    pub(super) fn lose(&mut self) {
        self.lost = true;
        self.cell.set(Err(ObjectError::WriterLost {
            identity: self.identity,
        }));
    }
}

/// A stream of our own that releases wait on, so that they cost the application's streams nothing.
#[derive(Debug)]
pub(super) struct Lane {
    gpu: Gpu,
    _stream: Stream,
    events: Vec<RawEvent>,
}

impl Lane {
    /// Queues the end of all leases behind the work on the streams.
    ///
    /// # Errors
    ///
    /// The driver's error, and [`Error::Capturing`]: then no lease ends.
    pub(super) fn release_behind(
        gpu: &Gpu,
        words: &Words,
        leases: &[LeaseSlot],
        streams: &[Stream],
    ) -> Result<Option<Lane>> {
        let Some(registered) = words.registered else {
            for stream in streams {
                stream.synchronize()?;
            }
            release_now(words, leases);
            return Ok(None);
        };
        if streams.is_empty() {
            release_now(words, leases);
            return Ok(None);
        }
        let mut lane = Lane {
            gpu: gpu.clone(),
            _stream: Stream::create(gpu)?,
            events: Vec::new(),
        };
        let mut behind: Vec<(RawEvent, RawStream)> = Vec::with_capacity(streams.len());
        for stream in streams {
            let event = gpu.backend().create_event(gpu.device(), EventKind::Local)?;
            lane.events.push(event);
            behind.push((event, stream.raw()));
        }
        let slots = words.file.slot_count();
        let write = |lease: &LeaseSlot| StreamOp::Write {
            word: registered.word(slot_word(slots, lease.slot)),
            value: released_word(lease.generation),
        };
        let ops: Vec<StreamOp> = leases.iter().map(write).collect();
        // SAFETY: `batch_behind` asks for live streams and events of one device, and for words in a
        // registration that outlives the operations: `lane` keeps its stream and events and the
        // caller its own, which were checked to be of this device, and the pending commit keeps
        // `words` until the releases have happened.
        unsafe {
            gpu.backend()
                .batch_behind(lane._stream.raw(), &behind, &ops)
        }?;
        Ok(Some(lane))
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        for &event in &self.events {
            // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: it is this
            // lane's own, and waits that were queued for it stay good.
            let _ = unsafe { self.gpu.backend().destroy_event(event) };
        }
    }
}

fn release_now(words: &Words, leases: &[LeaseSlot]) {
    leases
        .iter()
        .for_each(|lease| words.file.slot(lease.slot).release(lease.generation));
}
