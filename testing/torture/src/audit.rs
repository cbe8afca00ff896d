//! Looks over a session's shoulder: which bytes it takes and which it gives back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_ipc::allocators::{Arena, ArenaOptions, Growth};
use gpu_ipc::backend::{Export, Piece, Region, RegionSource, SourceUsage};
use gpu_ipc::{Error, Gpu};

use super::options::Control;
use super::shared_stats::{Board, Count};

/// A source of regions that counts what is taken twice or given back twice, and that overwrites
/// what is given back where it can reach it: a holder that it was taken from too early sees that at
/// once.
#[derive(Debug)]
pub struct Audit {
    source: Arc<Arena>,
    board: &'static Board,
    reachable: bool,
    control: Option<Control>,
    /// What is taken, by address, since it may lie across regions: its length, and the region that
    /// it begins in.
    taken: Mutex<BTreeMap<u64, (u64, Arc<Region>)>>,
}

/// What freed memory contains.
const FREED: u8 = 0xdd;

impl Audit {
    /// Makes one on an arena of its own with regions of this length, which are pieces of one range
    /// if it grows in place.
    pub fn new(
        gpu: Gpu,
        region_bytes: u64,
        in_place: bool,
        board: &'static Board,
        control: Option<Control>,
    ) -> Result<Arc<Audit>, Error> {
        let reachable = gpu.kind().in_host_memory();
        let options = ArenaOptions::default().growth(Growth::Fixed(region_bytes));
        let source = Arena::new(gpu, options.grows_in_place(in_place))?;
        Ok(Arc::new(Audit {
            source,
            board,
            reachable,
            control,
            taken: Mutex::default(),
        }))
    }

    /// Returns how many pieces are taken and not given back.
    pub fn outstanding(&self) -> usize {
        self.taken().len()
    }

    fn hides_pins(&self) -> bool {
        self.control == Some(Control::UnpinnedPiece)
    }

    /// As the control, puts a copy in a region's place, whose pins the source does not see.
    fn hide_pins(&self, region: &mut Arc<Region>) {
        if self.hides_pins()
            && let (Export::Fd(fd), Some(spot)) = (region.export(), region.spot())
            && let Ok(fd) = fd.try_clone()
        {
            let copy = Region::new(
                region.id(),
                region.device(),
                region.base(),
                region.len(),
                Export::Fd(fd),
            );
            *region = Arc::new(copy.with_spot(spot));
        }
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<u64, (u64, Arc<Region>)>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RegionSource for Audit {
    fn take(&self, len: u64, align: u64) -> Result<Piece, Error> {
        let mut piece = self.source.take(len, align)?;
        let (start, end) = (piece.ptr().0, piece.ptr().0 + piece.len);
        let mut taken = self.taken();
        let before = taken.range(..end).next_back();
        if before.is_some_and(|(&address, (len, _))| address + len > start) {
            self.board.count(Count::EarlyReuse);
        }
        taken.insert(start, (piece.len, piece.region.clone()));
        self.hide_pins(&mut piece.region);
        Ok(piece)
    }

    fn give_back(&self, mut piece: Piece) {
        match self.taken().remove(&piece.ptr().0) {
            Some((len, region)) if len == piece.len => {
                if self.hides_pins() {
                    piece.region = region;
                }
            }
            _ => self.board.count(Count::DoubleRetire),
        }
        if self.reachable {
            let len = usize::try_from(piece.len).unwrap_or(0);
            // SAFETY: `write_bytes` asks for writable bytes that nobody has a reference to: the
            // host backend maps a region until it is freed, which the piece keeps it from, and a
            // piece that is given back is its source's.
            unsafe { (piece.ptr().0 as *mut u8).write_bytes(FREED, len) };
        }
        self.source.give_back(piece);
        if self.hides_pins() {
            // At once, and without asking participants to unmap, as a session would.
            let _ = self.source.trim();
        }
    }

    fn regions(&self, piece: &Piece) -> Vec<Arc<Region>> {
        let mut regions = self.source.regions(piece);
        regions.iter_mut().for_each(|region| self.hide_pins(region));
        regions
    }

    fn trim(&self) -> Result<u64, Error> {
        self.source.trim()
    }

    fn usage(&self) -> SourceUsage {
        self.source.usage()
    }
}
