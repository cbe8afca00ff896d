//! Blocks out of regions, for sessions that were given no allocator.
//!
//! 1. `chunks`: which bytes of which region are free: numbers only.
//! 2. Here: where regions come from and when they go back.
//! 3. `snapshot`: all of it as JSON, for whoever looks from outside.
//!
//! # Locks
//!
//! `growth` before `chunks`. No call of the driver is made under `chunks`, so giving back never waits for one; one
//! region at a time is made under `growth`.

mod chunks;
#[cfg(test)]
mod fake;
mod snapshot;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_api::{
    Allocation, Error, Export, ForkGuard, Gpu, Piece, Reclaim, Region, RegionId, RegionSource, Result, Sharing,
    SourceUsage,
};

use chunks::{Chunks, STEP};
use snapshot::Listed;

/// A region source that carves pieces out of a few large regions: best fit, neighbours merged when given back.
///
/// A region is allocated and exported once and holds many blocks, so most blocks cost no call of the driver. It goes
/// back to the driver by [`trim`](RegionSource::trim), or when the carver is dropped, and only whole and unpinned.
///
/// Pieces are rounded up to 256 bytes within their region; [`Piece::len`] is what was asked for.
///
/// # Dropping
///
/// Frees the regions that nobody uses and nothing pins, which may block. Others stay until the process ends, and so
/// does everything in a forked child.
pub struct Carver {
    gpu: Gpu,
    sharing: Sharing,
    region_bytes: u64,
    fork: ForkGuard,
    /// The next region's number.
    growth: Mutex<u64>,
    chunks: Mutex<Chunks>,
}

impl Carver {
    /// The bytes of a region when nobody says: a few of them hold thousands of small blocks, and one is mapped by a
    /// participant in well under a millisecond.
    pub const DEFAULT_REGION_BYTES: u64 = 32 << 20;

    /// Makes a carver that has no region yet.
    ///
    /// Regions have `region_bytes`, or more for a larger piece, or just what a piece needs when the device has no
    /// room for that many.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for regions of no bytes, [`Error::System`] when the kernel has no page for the fork guard.
    pub fn new(gpu: Gpu, sharing: Sharing, region_bytes: u64) -> Result<Carver> {
        if region_bytes == 0 {
            return Err(Error::Invalid { what: "region size", got: "0 bytes".into(), must: "at least 1 byte" });
        }
        let fork = ForkGuard::new()?;
        Ok(Carver { gpu, sharing, region_bytes, fork, growth: Mutex::new(0), chunks: Mutex::default() })
    }

    /// Returns the bytes of regions whose free failed. They are neither used nor freed again.
    pub fn leaked_bytes(&self) -> u64 {
        self.chunks().leaked
    }

    fn chunks(&self) -> MutexGuard<'_, Chunks> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_owner(&self) -> Result<()> {
        if self.fork.is_child() { Err(Error::Forked { what: "this source of memory" }) } else { Ok(()) }
    }

    /// Allocates a region with room for `need` bytes.
    fn allocate(&self, need: u64) -> Result<Allocation> {
        let (backend, device) = (self.gpu.backend(), self.gpu.device());
        let asked = need.max(self.region_bytes);
        match backend.alloc(device, asked, self.sharing) {
            Err(Error::OutOfMemory { .. }) if asked > need => backend.alloc(device, need, self.sharing),
            other => other,
        }
    }

    fn export(&self, allocation: Allocation) -> Result<Export> {
        match self.sharing {
            Sharing::Handle => self.gpu.backend().export_handle(allocation.base).map(Export::Handle),
            Sharing::Fd => self.gpu.backend().export_fd(allocation.base).map(Export::Fd),
            other => Err(Error::Unsupported {
                what: "carving blocks out of regions",
                why: format!("the carver knows no {other:?} regions"),
                remedy: "choose `Sharing::Fd` or `Sharing::Handle`",
            }),
        }
    }

    /// Makes a region with room for `need` bytes, and numbers it.
    fn grow(&self, next: &mut u64, need: u64) -> Result<Region> {
        let allocation = self.allocate(need)?;
        let export = match check_alignment(allocation).and_then(|()| self.export(allocation)) {
            Ok(export) => export,
            Err(error) => {
                // Nobody has seen the allocation yet. That it could not be shared is what the caller can mend.
                let _ = self.free(allocation);
                return Err(error);
            }
        };
        let id = RegionId(*next);
        *next += 1;
        Ok(Region::new(id, self.gpu.device(), allocation.base, allocation.len, export))
    }

    /// Gives an allocation back to the driver that no piece lies in and no process has mapped.
    fn free(&self, allocation: Allocation) -> Result<()> {
        // SAFETY: `GpuBackend::free` asks for
        // - a base from `alloc`, not yet freed: callers pass what `allocate` returned and drop it here, or a region that
        //   they have just taken out of `chunks`, where it was once;
        // - no GPU work that touches it: whoever gave back the last piece said that its bytes may be used again;
        // - no process with its handle open: the region was never published, or is not pinned.
        let freed = unsafe { self.gpu.backend().free(allocation.base) };
        if freed.is_err() {
            // Nobody knows whether it is free: CUDA reports older failures here, too.
            self.chunks().leaked += allocation.len;
        }
        freed
    }

    fn never_fits(&self, asked: u64) -> Error {
        let free = self.gpu.backend().memory_info(self.gpu.device()).map_or(0, |info| info.free_bytes);
        let hint = "no region can be that large, ask for less".into();
        Error::OutOfMemory { device: self.gpu.device(), asked, free, hint }
    }
}

/// Every start and end is counted in steps, from a base that has to lie on one.
fn check_alignment(allocation: Allocation) -> Result<()> {
    if allocation.base.0.is_multiple_of(STEP) {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: "carving blocks out of regions",
        why: format!("the driver put a region at {}, which is no multiple of {STEP}", allocation.base),
        remedy: "give the session a region source of your own",
    })
}

impl RegionSource for Carver {
    fn take(&self, len: u64, align: u64) -> Result<Piece> {
        if len == 0 {
            return Err(Error::Invalid { what: "block size", got: "0 bytes".into(), must: "at least 1 byte" });
        }
        if !align.is_power_of_two() {
            return Err(Error::Invalid { what: "alignment", got: align.to_string(), must: "a power of two" });
        }
        self.check_owner()?;
        let align = align.max(STEP);
        let rounded = len.checked_next_multiple_of(STEP).ok_or_else(|| self.never_fits(len))?;
        let piece = |(region, offset)| Piece { region, offset, len };
        if let Some(found) = self.chunks().take(rounded, align) {
            return Ok(piece(found));
        }
        let mut next = self.growth.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever held the lock before may have brought a region with room for both.
        if let Some(found) = self.chunks().take(rounded, align) {
            return Ok(piece(found));
        }
        // Drivers align to 256 bytes at least; for more than that the region has room to choose.
        let slack = if align > STEP { align } else { 0 };
        let need = rounded.checked_add(slack).ok_or_else(|| self.never_fits(len))?;
        let region = self.grow(&mut next, need)?;
        let mut chunks = self.chunks();
        chunks.insert(Arc::new(region));
        let found = chunks.take(rounded, align).expect("a region that was made for a piece has room for it");
        Ok(piece(found))
    }

    fn give_back(&self, piece: Piece) {
        let rounded = piece.len.checked_next_multiple_of(STEP);
        let given = rounded.is_some_and(|rounded| self.chunks().give_back(&piece.region, piece.offset, rounded));
        if !given {
            // To believe it would hand out bytes twice.
            tracing::error!(region = piece.region.id().0, piece.offset, piece.len, "no such piece is out");
        }
    }

    fn trim(&self) -> Result<u64> {
        self.check_owner()?;
        let idle = self.chunks().remove_idle();
        let mut freed = 0;
        let mut failed = None;
        for region in idle {
            match self.free(Allocation { base: region.base(), len: region.len() }) {
                Ok(()) => freed += region.len(),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(freed), Err)
    }

    fn usage(&self) -> SourceUsage {
        self.chunks().usage()
    }

    fn snapshot(&self, asker: &dyn Reclaim, most: usize) -> Option<String> {
        let listed = Listed::of(&self.chunks());
        listed.json(&format!("carver of {}", self.gpu.device()), asker, most)
    }
}

impl Drop for Carver {
    fn drop(&mut self) {
        match self.trim() {
            Ok(_) | Err(Error::Forked { .. }) => {}
            Err(error) => tracing::warn!(%error, "a region is leaked"),
        }
    }
}

impl fmt::Debug for Carver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carver").field("sharing", &self.sharing).field("usage", &self.usage()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::fake::Fake;
    use super::*;
    use gpu_api::MemHandle;
    use std::io;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    const REGION: u64 = 64 << 10;

    fn carver(fake: &Arc<Fake>) -> Carver {
        Carver::new(fake.gpu(), Sharing::Handle, REGION).expect("a carver")
    }

    #[test]
    fn many_blocks_share_one_region() {
        let fake = Fake::new(1 << 20);
        let carver = carver(&fake);
        let pieces: Vec<Piece> = (0..256).map(|_| carver.take(200, 1).expect("room")).collect();
        assert_eq!(fake.state().allocs, 1);
        assert!(pieces.iter().all(|piece| piece.len == 200 && piece.region.id() == RegionId(0)));
        assert_eq!(carver.usage(), SourceUsage { regions: 1, reserved: REGION, in_use: REGION, pinned: 0 });
        let more = carver.take(1, 1).expect("a second region");
        assert_eq!(more.region.id(), RegionId(1));
        pieces.into_iter().chain([more]).for_each(|piece| carver.give_back(piece));
        assert_eq!(carver.usage().in_use, 0);
        let whole = carver.take(REGION, 1).expect("the whole of a region that was given back in pieces");
        assert_eq!(fake.state().allocs, 2);
        carver.give_back(whole);
    }

    #[test]
    fn a_large_block_gets_a_region_of_its_own() {
        let fake = Fake::new(1 << 20);
        let carver = carver(&fake);
        let piece = carver.take(REGION + 1, 1).expect("room");
        assert_eq!((piece.offset, piece.region.len()), (0, REGION + 4096));
    }

    #[test]
    fn a_block_starts_where_it_was_asked_to() {
        let fake = Fake::new(1 << 30);
        let carver = carver(&fake);
        for align in (0..21).map(|bits| 1 << bits) {
            for len in [1, 257, REGION] {
                let piece = carver.take(len, align).expect("room");
                assert!(piece.ptr().0.is_multiple_of(align.max(256)), "{:?} at {align}", piece.ptr());
                assert!(piece.offset + len <= piece.region.len());
            }
        }
    }

    #[test]
    fn regions_are_exported_once_and_as_chosen() {
        let fake = Fake::new(1 << 20);
        let by_fd = Carver::new(fake.gpu(), Sharing::Fd, REGION).expect("a carver");
        let piece = by_fd.take(1, 1).expect("room");
        assert!(matches!(piece.region.export(), Export::Fd(_)));
        let piece = carver(&fake).take(1, 1).expect("room");
        let Export::Handle(MemHandle(bytes)) = piece.region.export() else { panic!("no handle") };
        assert_eq!(bytes[..8], piece.region.base().0.to_le_bytes());
    }

    #[test]
    fn nonsense_is_refused_and_changes_nothing() {
        let fake = Fake::new(1 << 20);
        let carver = carver(&fake);
        let refused = |len, align| carver.take(len, align).expect_err("nonsense").to_string();
        assert_eq!(refused(0, 1), "block size is 0 bytes, but must be at least 1 byte");
        assert_eq!(refused(1, 0), "alignment is 0, but must be a power of two");
        assert_eq!(refused(1, 3), "alignment is 3, but must be a power of two");
        for (len, align) in [(u64::MAX, 1), (u64::MAX - 255, 1), (u64::MAX - 300, 1), (1, 1 << 63), (1 << 63, 1 << 63)]
        {
            let error = carver.take(len, align).expect_err("more than there is");
            assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        }
        assert_eq!(
            refused(u64::MAX, 1),
            "out of memory on device 0: asked for 18446744073709551615 bytes, 1048576 are free; \
             no region can be that large, ask for less"
        );
        let none = Carver::new(fake.gpu(), Sharing::Fd, 0).expect_err("regions of no bytes");
        assert_eq!(none.to_string(), "region size is 0 bytes, but must be at least 1 byte");
        assert_eq!(fake.state().allocs, 0);
        assert_eq!(carver.usage(), SourceUsage::default());
    }

    #[test]
    fn a_full_device_gives_what_it_has_and_then_says_so() {
        let fake = Fake::new(REGION + 8192);
        let carver = carver(&fake);
        let first = carver.take(REGION, 1).expect("a region");
        let second = carver.take(5000, 1).expect("a region of just what is needed");
        assert_eq!(second.region.len(), 8192);
        let error = carver.take(5000, 1).expect_err("the device is full");
        assert!(matches!(error, Error::OutOfMemory { asked: 5120, free: 0, .. }), "{error}");
        carver.give_back(second);
        carver.take(5000, 1).expect("what was given back");
        carver.give_back(first);
    }

    #[test]
    fn only_whole_regions_that_nothing_pins_go_back_to_the_driver() {
        let fake = Fake::new(1 << 20);
        let carver = carver(&fake);
        let pieces: Vec<Piece> = (0..3).map(|_| carver.take(REGION, 1).expect("room")).collect();
        let regions: Vec<Arc<Region>> = pieces.iter().map(|piece| piece.region.clone()).collect();
        regions[1].pin();
        let mut pieces = pieces.into_iter();
        let used = pieces.next().expect("the first");
        pieces.for_each(|piece| carver.give_back(piece));
        assert_eq!(carver.usage().pinned, REGION);

        assert_eq!(carver.trim().expect("trim"), REGION);
        assert_eq!(fake.state().live.keys().copied().collect::<Vec<_>>(), [regions[0].base().0, regions[1].base().0]);
        assert_eq!(carver.trim().expect("trim"), 0);
        regions[1].unpin();
        carver.give_back(used);
        assert_eq!(carver.trim().expect("trim"), 2 * REGION);
        assert_eq!(carver.usage(), SourceUsage::default());
        assert_eq!(carver.take(1, 1).expect("room").region.id(), RegionId(3), "numbers are never used again");
    }

    #[test]
    fn a_region_whose_free_failed_is_leaked_and_not_freed_again() {
        let fake = Fake::new(1 << 20);
        let carver = carver(&fake);
        let pieces = [carver.take(REGION, 1), carver.take(REGION, 1)].map(|piece| piece.expect("room"));
        pieces.into_iter().for_each(|piece| carver.give_back(piece));
        fake.state().refuses_free = true;
        let error = carver.trim().expect_err("the driver refuses");
        assert_eq!(error.to_string(), "free failed on device 0");
        assert_eq!(carver.leaked_bytes(), 2 * REGION);
        assert_eq!(carver.usage(), SourceUsage::default());
        fake.state().refuses_free = false;
        assert_eq!(carver.trim().expect("trim"), 0);
        drop(carver);
        assert_eq!(fake.state().live.len(), 2);
    }

    #[test]
    fn a_region_that_cannot_be_exported_is_freed() {
        let fake = Fake::new(1 << 20);
        let carver = carver(&fake);
        fake.state().refuses_export = true;
        assert_eq!(carver.take(1, 1).expect_err("no export").to_string(), "export failed on device 0");
        assert_eq!(fake.state().allocs, 1);
        assert!(fake.state().live.is_empty());
        assert_eq!(carver.leaked_bytes(), 0);
        fake.state().refuses_free = true;
        assert_eq!(carver.take(1, 1).expect_err("no export").to_string(), "export failed on device 0");
        assert_eq!(carver.leaked_bytes(), REGION);
    }

    #[test]
    fn a_region_that_is_not_aligned_is_freed() {
        let fake = Fake::new(1 << 20);
        let carver = carver(&fake);
        fake.state().misaligned = true;
        assert_eq!(
            carver.take(1, 1).expect_err("a base between two steps").to_string(),
            "carving blocks out of regions is not supported: the driver put a region at 0x10000000040, \
             which is no multiple of 256; give the session a region source of your own"
        );
        assert!(fake.state().live.is_empty());
        assert_eq!(carver.usage(), SourceUsage::default());
    }

    #[test]
    fn a_dropped_carver_frees_what_nobody_uses() {
        let fake = Fake::new(1 << 20);
        let carver = carver(&fake);
        let [kept, back] = [carver.take(REGION, 1), carver.take(REGION, 1)].map(|piece| piece.expect("room"));
        carver.give_back(back);
        drop(carver);
        assert_eq!(fake.state().live.keys().copied().collect::<Vec<_>>(), [kept.region.base().0]);
    }

    #[test]
    fn what_is_given_back_twice_is_not_handed_out_twice() {
        let fake = Fake::new(1 << 20);
        let carver = carver(&fake);
        let piece = carver.take(512, 1).expect("room");
        carver.give_back(piece.clone());
        let again = carver.take(256, 1).expect("room");
        carver.give_back(piece.clone());
        carver.give_back(Piece { len: u64::MAX, ..piece });
        assert_eq!(carver.usage().in_use, 256);
        assert_ne!(carver.take(256, 1).expect("room").offset, again.offset);
    }

    #[test]
    fn giving_back_does_not_wait_for_the_driver() {
        let (reached, at_gate) = mpsc::sync_channel(0);
        let (open, gate) = mpsc::sync_channel::<()>(0);
        let gate = Mutex::new(gate);
        let wait = move || {
            reached.send(()).expect("the test waits for it");
            gate.lock().expect("one waiter").recv().expect("the test opens it");
        };
        let fake = Fake::with_gate(1 << 20, Some(Box::new(wait)));
        let carver = Arc::new(carver(&fake));
        let watchdog = Duration::from_secs(60);
        let large = thread::spawn({
            let carver = carver.clone();
            move || carver.take(REGION, 1)
        });
        at_gate.recv_timeout(watchdog).expect("the first region's alloc");
        open.send(()).expect("open");
        let piece = large.join().expect("no panic").expect("room");

        let stuck = thread::spawn({
            let carver = carver.clone();
            move || carver.take(REGION, 1)
        });
        at_gate.recv_timeout(watchdog).expect("the second region's alloc");
        let (done, finished) = mpsc::channel();
        thread::spawn({
            let carver = carver.clone();
            move || {
                carver.give_back(piece);
                done.send(carver.take(256, 1)).expect("the test waits for it");
            }
        });
        let taken = finished.recv_timeout(watchdog).expect("neither waits for the driver").expect("room");
        assert_eq!(taken.region.id(), RegionId(0));
        open.send(()).expect("open");
        stuck.join().expect("no panic").expect("room");
    }

    #[test]
    fn threads_get_bytes_of_their_own() {
        let fake = Fake::new(1 << 30);
        let carver = carver(&fake);
        thread::scope(|scope| {
            for seed in 1..5u64 {
                let carver = &carver;
                scope.spawn(move || {
                    let mut held = Vec::new();
                    let mut random = seed;
                    for _ in 0..2000 {
                        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        if held.len() > 50 || (random >> 33) % 3 == 0 && !held.is_empty() {
                            carver.give_back(held.swap_remove((random >> 40) as usize % held.len()));
                        } else {
                            held.push(
                                carver.take(1 + (random >> 45) % 9000, 1 << ((random >> 60) % 14)).expect("room"),
                            );
                        }
                    }
                    held.into_iter().for_each(|piece| carver.give_back(piece));
                });
            }
        });
        assert_eq!(carver.usage().in_use, 0);
        let reserved = carver.usage().reserved;
        assert_eq!(carver.trim().expect("trim"), reserved);
        assert!(fake.state().live.is_empty());
    }

    #[test]
    fn a_forked_child_leaves_the_driver_alone() {
        let fake = Fake::new(1 << 20);
        let carver = carver(&fake);
        let piece = carver.take(1, 1).expect("room");
        carver.give_back(piece);
        // SAFETY: `fork` in a process with threads lets the child do only what is safe in a signal handler: both calls
        // return before they lock or allocate anything, and `_exit` follows.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let refused = matches!(carver.trim(), Err(Error::Forked { .. }))
                && matches!(carver.take(1, 1), Err(Error::Forked { .. }));
            // SAFETY: `_exit` has no conditions.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        assert!(pid > 0, "fork: {}", io::Error::last_os_error());
        let mut status = 0;
        // SAFETY: `waitpid` asks for a place to write to: `status` lives on this frame.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0);
        assert_eq!(carver.trim().expect("trim"), REGION);
    }
}
