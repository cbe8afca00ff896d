//! The producer's own unfinished work on blocks that it dropped.
//!
//! A dropped block waits for an event on each stream that the producer used it on. Events of one
//! stream complete in order, so only the first of each stream is ever asked about; a block on
//! several streams moves from one queue to the next, and a stream that is stuck holds up nobody who
//! does not depend on it.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpu_api::lock::Acquire;
use gpu_api::{Error, Gpu, Result};

use crate::gpu_event::GpuEvent;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::fences::progress::Debt;
use crate::stream::{Stream, StreamKey};

/// Events kept for use again.
const SPARE_EVENTS: usize = 256;

/// An event on a stream, and what the stream owed to participants' words before it.
#[derive(Debug)]
pub(crate) struct Proof {
    stream: StreamKey,
    event: GpuEvent,
    debt: Option<Debt>,
}

impl Proof {
    /// Records an event on a stream; `debt` was taken before.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn record(stream: &Stream, debt: Option<Debt>) -> Result<Proof> {
        let event = GpuEvent::new(stream.gpu())?;
        event.record(stream)?;
        Ok(Proof {
            stream: stream.key(),
            event,
            debt,
        })
    }

    /// Says whether the work before it is done, and settles what it proves.
    pub fn is_passed(&self) -> bool {
        // An error means that nobody knows.
        let is_passed = self.event.is_passed().unwrap_or(false);
        if is_passed && let Some(debt) = &self.debt {
            debt.settle();
        }
        is_passed
    }
}

#[derive(Debug)]
struct Waiting<B> {
    proof: Proof,
    block: B,
    rest: Vec<Proof>,
}

#[derive(Debug)]
struct WorkState<B> {
    queues: HashMap<StreamKey, VecDeque<Waiting<B>>>,
    spare: Vec<GpuEvent>,
    /// Blocks that have streams without an event.
    unmarked: Vec<Unmarked<B>>,
}

/// A block, the events that it waits for, and streams on which none could be recorded.
#[derive(Debug)]
pub struct Unmarked<B> {
    block: B,
    proofs: Vec<Proof>,
    streams: Vec<Stream>,
}

/// Blocks that wait for the producer's own work.
#[derive(Debug)]
pub struct PendingWork<B> {
    gpu: Gpu,
    state: Mutex<WorkState<B>>,
    /// Blocks in the queues. Changed under the lock, read without it.
    waiting: AtomicUsize,
    /// Of those, blocks that have streams without an event.
    unmarked: AtomicUsize,
}

impl<B> PendingWork<B> {
    /// Makes an empty list.
    pub fn new(gpu: Gpu) -> PendingWork<B> {
        PendingWork {
            gpu,
            state: Mutex::new(WorkState {
                queues: HashMap::new(),
                spare: Vec::new(),
                unmarked: Vec::new(),
            }),
            waiting: AtomicUsize::new(0),
            unmarked: AtomicUsize::new(0),
        }
    }

    /// Keeps a block until all that is queued on `streams` at this moment has finished, and what
    /// `proofs` stand for. `owed` says what a stream owes to participants' words.
    ///
    /// Says whether streams have to be [waited for](PendingWork::take_unmarked) by a thread that
    /// may block, because no event could be recorded on them.
    ///
    /// # Errors
    ///
    /// The block, and [`Error::Capturing`]: what is captured may run more than once, so the caller
    /// leaks the block.
    pub fn wait_for<'a>(
        &self,
        block: B,
        mut proofs: Vec<Proof>,
        streams: impl Iterator<Item = &'a Stream>,
        owed: impl Fn(&Stream) -> Option<Debt>,
    ) -> Result<bool, (B, Error)> {
        let mut unmarked = Vec::new();
        for stream in streams {
            let debt = owed(stream);
            match self.record(stream) {
                Ok(event) => proofs.push(Proof {
                    stream: stream.key(),
                    event,
                    debt,
                }),
                Err(error @ Error::Capturing { .. }) => return Err((block, error)),
                Err(error) => {
                    tracing::debug!(%error, "no event marks a dropped block's work; its stream is synchronised");
                    unmarked.push(stream.clone());
                }
            }
        }
        if !unmarked.is_empty() {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            self.unmarked.fetch_add(1, Ordering::Relaxed);
            self.state.acquire().unmarked.push(Unmarked {
                block,
                proofs,
                streams: unmarked,
            });
            return Ok(true);
        }
        // Without any, the block may be the last of its kind, and its drop gives it back: not under
        // the lock.
        if let Some(proof) = proofs.pop() {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            self.state
                .acquire()
                .queues
                .entry(proof.stream)
                .or_default()
                .push_back(Waiting {
                    proof,
                    block,
                    rest: proofs,
                });
        }
        Ok(false)
    }

    /// Takes the blocks whose streams have to be [synchronised](PendingWork::synchronize). They
    /// still count as waiting.
    pub fn take_unmarked(&self) -> Vec<Unmarked<B>> {
        if self.waiting() == 0 {
            return Vec::new();
        }
        std::mem::take(&mut self.state.acquire().unmarked)
    }

    /// Waits for the streams on which no event could be recorded, on the calling thread, and then
    /// for what events there are.
    ///
    /// # Errors
    ///
    /// The block, and the driver's error: the end of the work is unknown, so the caller leaks the
    /// block.
    pub fn synchronize(&self, unmarked: Unmarked<B>) -> Result<(), (B, Error)> {
        let Unmarked {
            block,
            proofs,
            streams,
        } = unmarked;
        let passed = streams.iter().try_for_each(|stream| {
            stream.refuse_capture("drop the block after the capture ended")?;
            stream.synchronize()
        });
        // Its streams are done or broken. Statistics that show the block gone must not show it
        // waiting here.
        self.unmarked.fetch_sub(1, Ordering::Relaxed);
        let kept = match passed {
            Ok(()) => self
                .wait_for(block, proofs, std::iter::empty(), |_| None)
                .map(|_| ()),
            Err(error) => Err((block, error)),
        };
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        kept
    }

    fn record(&self, stream: &Stream) -> Result<GpuEvent> {
        stream.refuse_capture("drop the block after the capture ended")?;
        let spare = self
            .state
            .acquire()
            .spare
            .pop_if(|spare| spare.gpu() == stream.gpu());
        let event = spare.map_or_else(|| GpuEvent::new(stream.gpu()), Ok)?;
        event.record(stream).map(|()| event)
    }

    /// Moves blocks whose work has finished to `out`. The driver is asked with no lock held: what
    /// another thread is asking about at this moment is left to it.
    pub fn poll(&self, out: &mut ReclaimedBlocks<B>) {
        if self.waiting() == 0 {
            return;
        }
        let mut taken = Taken {
            of: self,
            queues: std::mem::take(&mut self.state.acquire().queues),
        };
        let queues = &mut taken.queues;
        let mut passed = Vec::new();
        let streams: Vec<StreamKey> = queues.keys().copied().collect();
        for stream in streams {
            while let Some(entry) = queues.get_mut(&stream).and_then(|queue| {
                if queue.front()?.proof.is_passed() {
                    queue.pop_front()
                } else {
                    None
                }
            }) {
                passed.push(entry.proof.event);
                let mut rest = entry.rest;
                match rest.pop() {
                    Some(proof) => {
                        let entry = Waiting {
                            proof,
                            block: entry.block,
                            rest,
                        };
                        queues
                            .entry(entry.proof.stream)
                            .or_default()
                            .push_back(entry);
                    }
                    None => {
                        self.waiting.fetch_sub(1, Ordering::Relaxed);
                        out.push(entry.block);
                    }
                }
            }
        }
        drop(taken);
        let mut state = self.state.acquire();
        let room = SPARE_EVENTS.saturating_sub(state.spare.len());
        state.spare.extend(
            passed
                .into_iter()
                .filter(|event| *event.gpu() == self.gpu)
                .take(room),
        );
    }

    /// Counts the blocks that wait for streams without an event.
    pub fn unmarked(&self) -> usize {
        self.unmarked.load(Ordering::Relaxed)
    }

    /// Counts the blocks that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// Queues that a thread asks the driver about. They go back when this goes, also because the driver
/// panics: their blocks must wait on.
struct Taken<'a, B> {
    of: &'a PendingWork<B>,
    queues: HashMap<StreamKey, VecDeque<Waiting<B>>>,
}

impl<B> Drop for Taken<'_, B> {
    fn drop(&mut self) {
        let mut state = self.of.state.acquire();
        for (stream, mut queue) in self.queues.drain().filter(|(_, queue)| !queue.is_empty()) {
            let come = state.queues.entry(stream).or_default();
            queue.append(come);
            *come = queue;
        }
    }
}
