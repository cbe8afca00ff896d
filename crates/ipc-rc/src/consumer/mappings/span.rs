//! Spans: a block that lies across several pieces of a range, as one mapping.
//!
//! A lease uses one mapping. The lease of a block across pieces uses a *span*, which looks like a
//! mapping to it and is a use of each piece. It belongs to that lease alone: it is in no table, so
//! nobody else enters it, and its cells are watched from the beginning, so the end of its only use
//! comes by the way that may touch the home. That end ends the uses of the pieces, in whatever
//! thread it happens; so a claim inside one piece pays nothing for spans.
//!
//! The memory of a span is the home's, and is used again for spans only.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use gpu_api::lock::Acquire;
use gpu_api::{Error, RegionId, Result};

use crate::consumer::mappings::mapping::{Entered, Home, Mapping, Opened};

/// The spans of a participant.
pub(crate) struct Spans<H>(Mutex<Table<H>>);

struct Table<H> {
    /// By number.
    made: Vec<Span<H>>,
    /// The numbers of those that are closed.
    spare: Vec<u64>,
}

struct Span<H> {
    mapping: Arc<Mapping<H>>,
    /// The uses that it stands for, while it is open.
    pieces: Vec<Entered<H>>,
}

/// Pieces that are entered one after another, each behind the one before. They are left when this
/// goes.
pub(crate) struct Pieces<H: Home> {
    entered: Vec<Entered<H>>,
    len: u64,
}

impl<H: Home> Pieces<H> {
    /// Begins with a piece that is entered.
    pub fn new(first: Entered<H>) -> Pieces<H> {
        let len = first.len();
        Pieces {
            entered: vec![first],
            len,
        }
    }

    /// Returns their bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the number of the region that would be next; `None` behind a region on its own.
    pub fn next(&self) -> Option<RegionId> {
        self.entered.last().and_then(|last| last.behind())
    }

    /// Adds the next, which must begin where the last one ends.
    pub fn push(&mut self, piece: Entered<H>) -> Result<()> {
        let (base, end) = (
            piece.base().0,
            self.entered[0].base().0.checked_add(self.len),
        );
        let len = self.len.checked_add(piece.len());
        self.entered.push(piece);
        match len {
            Some(len) if end == Some(base) => {
                self.len = len;
                Ok(())
            }
            _ => Err(Error::invalid(
                "the region behind another",
                format!("one at {base:#x}"),
                "where the other one ends",
            )),
        }
    }
}

impl<H: Home> Drop for Pieces<H> {
    fn drop(&mut self) {
        self.entered.drain(..).for_each(Entered::leave);
    }
}

impl<H: Home> Spans<H> {
    /// Makes a table without any.
    pub fn new() -> Spans<H> {
        Spans(Mutex::new(Table {
            made: Vec::new(),
            spare: Vec::new(),
        }))
    }

    fn table(&self) -> MutexGuard<'_, Table<H>> {
        self.0.acquire()
    }

    /// Makes one mapping of several pieces, entered by a cell.
    pub fn open(&self, home: &Arc<H>, mut pieces: Pieces<H>, by: usize) -> Entered<H> {
        let (region, base) = (pieces.entered[0].region(), pieces.entered[0].base());
        let opened = Opened {
            region,
            base,
            len: pieces.len,
            local: pieces.entered[0].is_local(),
            behind: None,
        };
        let mut table = self.table();
        let number = table.spare.pop().unwrap_or_else(|| {
            let number = table.made.len() as u64;
            let mapping = Arc::new(Mapping::closed(home, Some(number)));
            table.made.push(Span {
                mapping,
                pieces: Vec::new(),
            });
            number
        });
        let span = &mut table.made[number as usize];
        span.pieces = std::mem::take(&mut pieces.entered);
        span.mapping.open(home.clone(), opened, by);
        span.mapping.watch(true);
        Entered::new(NonNull::from(&*span.mapping), by)
    }

    /// Ends the uses that a span stood for: its own has ended. The caller keeps the home.
    pub fn end(&self, number: u64) {
        let (pieces, keeper) = {
            let mut table = self.table();
            let span = &mut table.made[number as usize];
            let is_closed = span.mapping.close();
            debug_assert!(is_closed, "a span has one use");
            let ended = (
                std::mem::take(&mut span.pieces),
                span.mapping.keeper().take(),
            );
            table.spare.push(number);
            ended
        };
        // With no lock held: a leave may wake the thread.
        pieces.into_iter().for_each(Entered::leave);
        drop(keeper);
    }
}
