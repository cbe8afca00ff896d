//! Which bytes of which region are free, as numbers.
//!
//! Every operation costs the logarithm of the number of chunks, but for those that look at each region.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpu_api::{Region, RegionId, SourceUsage};

use super::snapshot::Row;

/// Pieces start and end at multiples of this many bytes: what drivers align their own allocations to.
pub(super) const STEP: u64 = 256;

/// How many chunks that are large enough are tried one by one for a start that is aligned, before one is taken that
/// is large enough for any start.
const LOOKS: usize = 8;

/// The free and the used chunks of all regions.
///
/// No two free chunks of a region touch, so a region without a used chunk has exactly one free one.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    regions: BTreeMap<RegionId, Carved>,
    /// Every free chunk: length, region, offset. The first that is long enough is the best fit, of equals the one in
    /// the oldest region, so that younger ones empty.
    by_len: BTreeSet<(u64, RegionId, u64)>,
    in_use: u64,
    /// Bytes of regions whose free failed.
    pub(super) leaked: u64,
}

#[derive(Debug)]
struct Carved {
    region: Arc<Region>,
    /// Length by offset.
    free: BTreeMap<u64, u64>,
    /// Length by offset.
    used: BTreeMap<u64, u64>,
}

impl Chunks {
    /// Adds a region, all of it free.
    pub(super) fn insert(&mut self, region: Arc<Region>) {
        let (id, len) = (region.id(), region.len());
        let carved = Carved { region, free: BTreeMap::from([(0, len)]), used: BTreeMap::new() };
        let before = self.regions.insert(id, carved);
        debug_assert!(before.is_none(), "{id:?} was used twice");
        self.by_len.insert((len, id, 0));
    }

    /// Takes `len` bytes whose address is a multiple of `align`.
    pub(super) fn take(&mut self, len: u64, align: u64) -> Option<(Arc<Region>, u64)> {
        let (chunk, id, at, start) = self.find(len, align)?;
        let carved = self.regions.get_mut(&id).expect("every free chunk is in a region");
        self.by_len.remove(&(chunk, id, at));
        carved.free.remove(&at);
        let rests = [(at, start - at), (start + len, at + chunk - (start + len))];
        for (offset, rest) in rests.into_iter().filter(|&(_, rest)| rest > 0) {
            carved.free.insert(offset, rest);
            self.by_len.insert((rest, id, offset));
        }
        carved.used.insert(start, len);
        self.in_use += len;
        Some((carved.region.clone(), start))
    }

    /// Finds a free chunk and the offset in it to start at: `(its length, its region, its offset, start)`.
    fn find(&self, len: u64, align: u64) -> Option<(u64, RegionId, u64, u64)> {
        let large_enough = |least: u64| self.by_len.range((least, RegionId(0), 0)..);
        let fits = |&(chunk, id, at): &(u64, RegionId, u64)| {
            let address = self.regions.get(&id)?.region.base().0 + at;
            let pad = address.checked_next_multiple_of(align)? - address;
            (pad.checked_add(len)? <= chunk).then_some((chunk, id, at, at + pad))
        };
        large_enough(len).take(LOOKS).find_map(fits).or_else(|| {
            // Every base and every chunk is aligned to a step, so a start is at most so far away.
            let any_start = len.checked_add(align.saturating_sub(STEP))?;
            large_enough(any_start).next().and_then(fits)
        })
    }

    /// Takes a chunk back and merges it with its free neighbours; `false` when no such chunk is out.
    #[must_use]
    pub(super) fn give_back(&mut self, region: &Arc<Region>, offset: u64, len: u64) -> bool {
        let id = region.id();
        let Some(carved) = self.regions.get_mut(&id).filter(|carved| Arc::ptr_eq(&carved.region, region)) else {
            return false;
        };
        if carved.used.get(&offset) != Some(&len) {
            return false;
        }
        carved.used.remove(&offset);
        self.in_use -= len;
        let (mut start, mut end) = (offset, offset + len);
        if let Some((&before, &len)) = carved.free.range(..start).next_back()
            && before + len == start
        {
            carved.free.remove(&before);
            self.by_len.remove(&(len, id, before));
            start = before;
        }
        if let Some(after) = carved.free.remove(&end) {
            self.by_len.remove(&(after, id, end));
            end += after;
        }
        carved.free.insert(start, end - start);
        self.by_len.insert((end - start, id, start));
        true
    }

    /// Takes out the regions of which nothing is used and that nothing pins.
    pub(super) fn remove_idle(&mut self) -> Vec<Arc<Region>> {
        // In this order: a pin is only ever taken for a piece that is out.
        let idle = |carved: &Carved| carved.used.is_empty() && !carved.region.is_pinned();
        let ids: Vec<RegionId> = self.regions.iter().filter(|(_, carved)| idle(carved)).map(|(&id, _)| id).collect();
        let remove = |id: RegionId| {
            let carved = self.regions.remove(&id)?;
            for (&offset, &len) in &carved.free {
                self.by_len.remove(&(len, id, offset));
            }
            Some(carved.region)
        };
        ids.into_iter().filter_map(remove).collect()
    }

    /// Lists every region with its chunks.
    pub(super) fn rows(&self) -> Vec<Row> {
        let row = |Carved { region, free, used }: &Carved| {
            let mut chunks: Vec<(u64, u64, bool)> = free.iter().map(|(&at, &len)| (at, len, false)).collect();
            chunks.extend(used.iter().map(|(&at, &len)| (at, len, true)));
            chunks.sort_unstable();
            Row { base: region.base().0, len: region.len(), pinned: region.is_pinned(), chunks }
        };
        self.regions.values().map(row).collect()
    }

    /// Returns the bytes of the largest free chunk.
    pub(super) fn largest_free(&self) -> u64 {
        self.by_len.last().map_or(0, |&(len, _, _)| len)
    }

    pub(super) fn usage(&self) -> SourceUsage {
        let regions = || self.regions.values().map(|carved| &carved.region);
        SourceUsage {
            regions: self.regions.len() as u64,
            reserved: regions().map(|region| region.len()).sum(),
            in_use: self.in_use,
            pinned: regions().filter(|region| region.is_pinned()).map(|region| region.len()).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu_api::{DeviceId, DevicePtr, Export, MemHandle};
    use proptest::prelude::*;

    fn region(id: u64, base: u64, len: u64) -> Arc<Region> {
        Arc::new(Region::new(RegionId(id), DeviceId(0), DevicePtr(base), len, Export::Handle(MemHandle([0; 64]))))
    }

    #[test]
    fn the_tightest_chunk_is_taken_and_of_equals_the_oldest() {
        let mut chunks = Chunks::default();
        let first = region(0, 0x10000, 4096);
        chunks.insert(first.clone());
        chunks.insert(region(1, 0x20000, 1024));
        let take = |chunks: &mut Chunks, len| {
            let (region, offset) = chunks.take(len, STEP).expect("room");
            (region.id().0, offset)
        };
        assert_eq!(take(&mut chunks, 768), (1, 0));
        assert_eq!(take(&mut chunks, 256), (1, 768));
        assert_eq!(take(&mut chunks, 512), (0, 0));
        assert_eq!(take(&mut chunks, 1024), (0, 512));
        assert_eq!(take(&mut chunks, 512), (0, 1536));
        assert!(chunks.give_back(&first, 0, 512));
        assert!(chunks.give_back(&first, 1536, 512));
        assert_eq!(take(&mut chunks, 512), (0, 0), "512 bytes fit before the 2560 that were merged");
        assert!(chunks.take(4096, STEP).is_none());
    }

    #[test]
    fn an_aligned_start_is_found_behind_many_that_are_not() {
        let mut chunks = Chunks::default();
        // Twenty chunks of 4096 bytes of which none holds an aligned start, and a large one that does.
        for id in 0..20 {
            chunks.insert(region(id, 0x10_0000 * (id + 1) + 256, 4096));
        }
        assert!(chunks.take(4096, 4096).is_none());
        chunks.insert(region(20, 0x1000_0100, 8192));
        let (found, offset) = chunks.take(4096, 4096).expect("room");
        assert_eq!((found.id().0, offset), (20, 4096 - 256));
        assert!(chunks.take(256, u64::MAX / 2 + 1).is_none());
    }

    #[test]
    fn what_is_not_out_is_not_taken_back() {
        let mut chunks = Chunks::default();
        let one = region(0, 0x10000, 4096);
        chunks.insert(one.clone());
        let (_, offset) = chunks.take(512, STEP).expect("room");
        assert!(!chunks.give_back(&one, offset, 256), "too short");
        assert!(!chunks.give_back(&one, offset + 256, 256), "not the start");
        assert!(!chunks.give_back(&region(0, 0x10000, 4096), offset, 512), "another source's");
        assert!(!chunks.give_back(&region(9, 0x10000, 4096), offset, 512), "no such region");
        assert!(chunks.give_back(&one, offset, 512));
        assert!(!chunks.give_back(&one, offset, 512), "twice");
        assert_eq!(chunks.usage().in_use, 0);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Insert { base: u64, steps: u64 },
        Take { steps: u64, align: u32 },
        GiveBack { which: usize },
        Pin { which: usize },
        Unpin,
        RemoveIdle,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            1 => (0..16u64, 1..64u64).prop_map(|(base, steps)| Op::Insert { base, steps }),
            6 => (1..40u64, 8..13u32).prop_map(|(steps, align)| Op::Take { steps, align }),
            4 => any::<usize>().prop_map(|which| Op::GiveBack { which }),
            1 => any::<usize>().prop_map(|which| Op::Pin { which }),
            1 => Just(Op::Unpin),
            1 => Just(Op::RemoveIdle),
        ]
    }

    /// The bytes that are free, as a plain set of steps.
    type Model = BTreeMap<RegionId, (Arc<Region>, BTreeSet<u64>)>;

    fn fits_somewhere(model: &Model, len: u64, align: u64) -> bool {
        model.values().any(|(region, free)| {
            let starts = free.iter().filter(|&&start| (region.base().0 + start).is_multiple_of(align));
            starts.into_iter().any(|&start| (start..start + len).step_by(STEP as usize).all(|at| free.contains(&at)))
        })
    }

    /// A chunk that is large enough for any start is found for certain, others if they are among the first.
    fn must_fit(model: &Model, len: u64, align: u64) -> bool {
        fits_somewhere(model, (len + align - STEP).next_multiple_of(STEP), STEP)
    }

    proptest! {
        #[test]
        fn no_byte_is_handed_out_twice_and_all_come_back(ops in proptest::collection::vec(op(), 1..200)) {
            let mut chunks = Chunks::default();
            let mut model = Model::new();
            let mut out: Vec<(Arc<Region>, u64, u64)> = Vec::new();
            let mut pinned: Vec<Arc<Region>> = Vec::new();
            let mut next = 0;
            for op in ops {
                match op {
                    Op::Insert { base, steps } => {
                        let made = region(next, ((next + 1) << 32) + base * STEP, steps * STEP);
                        model.insert(made.id(), (made.clone(), (0..steps).map(|step| step * STEP).collect()));
                        chunks.insert(made);
                        next += 1;
                    }
                    Op::Take { steps, align } => {
                        let (len, align) = (steps * STEP, 1 << align);
                        let Some((region, start)) = chunks.take(len, align) else {
                            prop_assert!(!must_fit(&model, len, align), "{} bytes at {} would fit", len, align);
                            continue;
                        };
                        prop_assert!((region.base().0 + start).is_multiple_of(align));
                        let (_, free) = model.get_mut(&region.id()).expect("a region that was not removed");
                        for at in (start..start + len).step_by(STEP as usize) {
                            prop_assert!(free.remove(&at), "{} is handed out twice or outside", at);
                        }
                        out.push((region, start, len));
                    }
                    Op::GiveBack { which } if !out.is_empty() => {
                        let (region, start, len) = out.swap_remove(which % out.len());
                        prop_assert!(chunks.give_back(&region, start, len));
                        let (_, free) = model.get_mut(&region.id()).expect("a region with a chunk out");
                        free.extend((start..start + len).step_by(STEP as usize));
                    }
                    Op::Pin { which } if !out.is_empty() => {
                        let region = &out[which % out.len()].0;
                        region.pin();
                        pinned.push(region.clone());
                    }
                    Op::Unpin => {
                        if let Some(region) = pinned.pop() {
                            region.unpin();
                        }
                    }
                    Op::RemoveIdle => {
                        let removed: BTreeSet<_> = chunks.remove_idle().iter().map(|region| region.id()).collect();
                        let idle = |(region, free): &(Arc<Region>, BTreeSet<u64>)| {
                            free.len() as u64 * STEP == region.len() && pinned.iter().all(|p| p.id() != region.id())
                        };
                        let expected: BTreeSet<_> =
                            model.iter().filter(|(_, one)| idle(one)).map(|(&id, _)| id).collect();
                        prop_assert_eq!(&removed, &expected);
                        model.retain(|id, _| !removed.contains(id));
                    }
                    Op::GiveBack { .. } | Op::Pin { .. } => {}
                }
                prop_assert_eq!(chunks.usage().in_use, out.iter().map(|(_, _, len)| len).sum::<u64>());
                prop_assert_eq!(chunks.usage().regions, model.len() as u64);
            }
            for (region, start, len) in out {
                prop_assert!(chunks.give_back(&region, start, len));
            }
            let whole: BTreeSet<_> = model.values().map(|(region, _)| (region.len(), region.id(), 0)).collect();
            prop_assert_eq!(&chunks.by_len, &whole, "every region is one free chunk again");
            pinned.iter().for_each(|region| region.unpin());
            prop_assert_eq!(chunks.remove_idle().len(), model.len());
            prop_assert_eq!(chunks.usage(), SourceUsage::default());
            prop_assert!(chunks.by_len.is_empty());
        }
    }
}
