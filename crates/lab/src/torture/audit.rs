//! Looks over a session's shoulder: which bytes it takes and which it gives back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_ipc::allocators::{Arena, ArenaOptions, Growth};
use gpu_ipc::backend::{Piece, Region, RegionSource, SourceUsage};
use gpu_ipc::{BackendKind, Error, Gpu};

use super::shared_stats::{Board, Count};

/// A source of regions that counts what is taken twice or given back twice, and that overwrites what is given back
/// where it can reach it: a holder that it was taken from too early sees that at once.
#[derive(Debug)]
pub struct Audit {
    source: Arc<Arena>,
    board: &'static Board,
    reachable: bool,
    /// Lengths of what is taken, by region and offset.
    taken: Mutex<BTreeMap<(u64, u64), u64>>,
}

/// What freed memory contains.
const FREED: u8 = 0xdd;

impl Audit {
    /// Makes one on an arena of its own.
    pub fn new(gpu: Gpu, region_bytes: u64, board: &'static Board) -> Result<Arc<Audit>, Error> {
        let reachable = gpu.kind() == BackendKind::Host;
        let source = Arena::new(gpu, ArenaOptions::default().growth(Growth::Fixed(region_bytes)))?;
        Ok(Arc::new(Audit { source, board, reachable, taken: Mutex::default() }))
    }

    /// Returns how many pieces are taken and not given back.
    pub fn outstanding(&self) -> usize {
        self.taken().len()
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<(u64, u64), u64>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RegionSource for Audit {
    fn take(&self, len: u64, align: u64) -> Result<Piece, Error> {
        let piece = self.source.take(len, align)?;
        let (region, start, end) = (piece.region.id().0, piece.offset, piece.offset + piece.len);
        let mut taken = self.taken();
        let before = taken.range((region, 0)..(region, end)).next_back();
        if before.is_some_and(|(&(_, offset), &len)| offset + len > start) {
            self.board.count(Count::EarlyReuse);
        }
        taken.insert((region, start), piece.len);
        Ok(piece)
    }

    fn give_back(&self, piece: Piece) {
        if self.taken().remove(&(piece.region.id().0, piece.offset)) != Some(piece.len) {
            self.board.count(Count::DoubleRetire);
        }
        if self.reachable {
            let len = usize::try_from(piece.len).unwrap_or(0);
            // SAFETY: `write_bytes` asks for writable bytes that nobody has a reference to: the host backend maps a
            // region until it is freed, which the piece keeps it from, and a piece that is given back is its source's.
            unsafe { (piece.ptr().0 as *mut u8).write_bytes(FREED, len) };
        }
        self.source.give_back(piece);
    }

    fn regions(&self, piece: &Piece) -> Vec<Arc<Region>> {
        self.source.regions(piece)
    }

    fn trim(&self) -> Result<u64, Error> {
        self.source.trim()
    }

    fn usage(&self) -> SourceUsage {
        self.source.usage()
    }
}
