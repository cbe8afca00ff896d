//! The timeline words of one participant: which stream of ours writes each, and what it owes there.
//!
//! A word is a [`Cell`] with a lock of its own, held across a driver's call; so the session's
//! thread only ever tries it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use gpu_api::lock::Acquire;
use gpu_api::{Error, ParticipantId, Result, WordPtr};

use crate::gone::Gone;
use crate::producer::fences::progress::{Debt, Progress};
use transport::shared::counter_file::{CounterFile, TIMELINES};
use transport::shared::timeline;

/// One timeline word of one participant.
#[derive(Debug)]
pub(super) struct Cell {
    pub index: u32,
    /// The stream that writes it.
    pub owner: Arc<Progress>,
    /// The last value that its owner queued; 0 before the first.
    pub owed: u64,
    /// The last value that was queued for it, by whatever stream.
    pub last: u64,
}

impl Cell {
    /// Says whether its stream has yet to write it.
    fn owes(&self) -> bool {
        self.owner.owes_up_to(self.owed)
    }
}

/// The timeline words of one participant.
#[derive(Debug)]
pub struct Words {
    pub(super) file: Arc<CounterFile>,
    /// Where streams see the file; `None` on a device without stream words.
    pub(super) registered: Option<WordPtr>,
    /// Never locked across a driver's call.
    taken: Mutex<Taken>,
    /// No more is queued: the participant has gone. Read under a cell's lock.
    is_closed: AtomicBool,
}

/// The words ever taken of a participant.
#[derive(Debug, Default)]
struct Taken {
    cells: Vec<Arc<Mutex<Cell>>>,
    /// What streams owe to words that others have taken over. The participant's word alone said
    /// that it was written.
    former: Vec<Debt>,
}

impl Words {
    /// Takes the words of a participant's first file.
    pub fn new(file: Arc<CounterFile>, registered: Option<WordPtr>) -> Words {
        Words {
            file,
            registered,
            taken: Mutex::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Refuses every later value: the participant has gone.
    pub fn close(&self) {
        // Under the lock, so that a thread that takes a word is either seen by the looks that
        // follow or refused.
        let _taken = self.taken.acquire();
        self.is_closed.store(true, Ordering::Relaxed);
    }

    pub(super) fn check_open(&self, participant: ParticipantId) -> Result<()> {
        if self.is_closed.load(Ordering::Relaxed) {
            Err(Gone::Participant(participant).into())
        } else {
            Ok(())
        }
    }

    /// Finds a word for a stream: an unused one, or one whose stream owes it nothing.
    pub(super) fn cell_for(
        &self,
        stream: &Arc<Progress>,
        participant: ParticipantId,
    ) -> Result<Arc<Mutex<Cell>>> {
        let mut taken = self.taken.acquire();
        self.check_open(participant)?;
        let Taken { cells, former } = &mut *taken;
        let index = cells.len() as u32;
        if index < TIMELINES {
            let cell = Arc::new(Mutex::new(Cell {
                index,
                owner: stream.clone(),
                owed: 0,
                last: 0,
            }));
            cells.push(cell.clone());
            return Ok(cell);
        }
        for cell in cells.iter() {
            // A cell that its stream is using at this moment is not free.
            let Some(mut free) = cell.try_acquire() else {
                continue;
            };
            let is_free = !self.is_awaited(&free);
            if is_free {
                if free.owes() {
                    former.retain(Debt::is_open);
                    former.push(Debt {
                        of: free.owner.clone(),
                        value: free.owed,
                    });
                }
                free.owner = stream.clone();
                free.owed = 0;
                drop(free);
                return Ok(cell.clone());
            }
        }
        Err(Error::exhausted(
            "timeline words of a participant",
            u64::from(TIMELINES),
            "share after fewer streams at once, or after synchronising them (After::Done)",
        ))
    }

    /// Says whether a stream of ours has yet to write a word, by our own events alone. Never waits.
    pub fn are_owed(&self) -> bool {
        let taken = self.taken.acquire();
        taken.former.iter().any(Debt::is_open)
            || taken
                .cells
                .iter()
                .any(|cell| cell.try_acquire().is_none_or(|cell| cell.owes()))
    }

    /// Has the next share after each stream that owes a word record an event.
    pub fn want_proof(&self) {
        let taken = self.taken.acquire();
        let owing = taken
            .cells
            .iter()
            .filter_map(|cell| cell.try_acquire())
            .filter(|cell| cell.owes());
        owing.for_each(|cell| cell.owner.want_proof());
        let former = taken.former.iter().filter(|debt| debt.is_open());
        former.for_each(|debt| debt.of.want_proof());
    }

    /// Says whether a stream may wait for a value, as far as the shared words tell: what the
    /// participant writes there decides how soon a broken context is noticed for it, and nothing
    /// else. Never waits.
    pub fn are_awaited(&self) -> bool {
        self.taken
            .acquire()
            .cells
            .iter()
            .any(|cell| cell.try_acquire().is_none_or(|cell| self.is_awaited(&cell)))
    }

    fn is_awaited(&self, cell: &Cell) -> bool {
        cell.owes() && self.file.timeline(cell.index).look(cell.last) == timeline::Fence::Pending
    }

    /// Completes every wait for a value that will never come, because the producer's context is
    /// broken. One that is being queued at this moment is left to the next call.
    pub fn poison(&self) {
        for cell in self
            .taken
            .acquire()
            .cells
            .iter()
            .filter_map(|cell| cell.try_acquire())
        {
            if self.is_awaited(&cell) {
                self.file.timeline(cell.index).poison();
            }
        }
    }
}
