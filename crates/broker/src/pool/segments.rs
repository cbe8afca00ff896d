//! Places in a part of a pool, for an allocator that takes whole segments.

use std::collections::BTreeMap;

use gpu_api::DevicePtr;

/// What the start of each segment is a multiple of: what CUDA's own allocations have at least.
const ALIGNMENT: u64 = 512;

/// Places in a range of a pool, for an allocator that takes whole segments, such as PyTorch's.
///
/// A segment gets the lowest gap that it fits into. So the same segments, taken and given back in the
/// same order, lie at the same offsets for every holder: a successor that allocates as the holder
/// before it did finds the bytes of that one in its own tensors.
///
/// # Examples
///
/// ```
/// use broker::pool::Segments;
/// use gpu_api::DevicePtr;
///
/// let mut segments = Segments::of(DevicePtr(1 << 20), 8_192);
/// let first = segments.take(4_096).expect("room");
/// let second = segments.take(4_096).expect("room");
/// assert_eq!((first, second, segments.take(1)), (DevicePtr(1 << 20), first.offset(4_096), None));
/// assert!(segments.give(first));
/// assert_eq!(segments.take(512), Some(first));
/// ```
#[derive(Debug)]
pub struct Segments {
    start: u64,
    end: u64,
    /// Those that are taken: from where to where.
    taken: BTreeMap<u64, u64>,
}

impl Segments {
    /// Begins with none taken, in so many bytes from an address on.
    pub fn of(start: DevicePtr, bytes: u64) -> Segments {
        Segments {
            start: start.0,
            end: start.0.saturating_add(bytes),
            taken: BTreeMap::new(),
        }
    }

    /// Takes a segment; `None` without a gap that is large enough, and for 0 bytes.
    pub fn take(&mut self, bytes: u64) -> Option<DevicePtr> {
        let gaps_end = self.taken.keys().copied().chain([self.end]);
        let gaps_start = [self.start].into_iter().chain(self.taken.values().copied());
        let (start, end) = gaps_start.zip(gaps_end).find_map(|(start, gap_end)| {
            let start = start.checked_next_multiple_of(ALIGNMENT)?;
            let end = start.checked_add(bytes)?;
            (end <= gap_end).then_some((start, end))
        })?;
        if bytes == 0 {
            return None;
        }
        self.taken.insert(start, end);
        Some(DevicePtr(start))
    }

    /// Gives a segment back, once no work is queued on it; says whether there is one at this address.
    pub fn give(&mut self, start: DevicePtr) -> bool {
        self.taken.remove(&start.0).is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_segment_lies_in_the_lowest_gap() {
        let mut segments = Segments::of(DevicePtr(256), 10 * ALIGNMENT);
        let first = DevicePtr(ALIGNMENT);
        assert_eq!(segments.take(0), None);
        assert_eq!(segments.take(1), Some(first));
        assert_eq!(segments.take(2 * ALIGNMENT), Some(first.offset(ALIGNMENT)));
        assert_eq!(segments.take(ALIGNMENT), Some(first.offset(3 * ALIGNMENT)));
        assert!(segments.give(first.offset(ALIGNMENT)) && !segments.give(first.offset(ALIGNMENT)));
        assert_eq!(
            segments.take(3 * ALIGNMENT),
            Some(first.offset(4 * ALIGNMENT))
        );
        assert_eq!(segments.take(ALIGNMENT + 1), Some(first.offset(ALIGNMENT)));
        // The range does not begin at a multiple, so its last one is cut short.
        assert_eq!(segments.take(2 * ALIGNMENT + 257), None);
        assert_eq!(segments.take(u64::MAX), None);
        assert_eq!(
            segments.take(2 * ALIGNMENT + 256),
            Some(first.offset(7 * ALIGNMENT))
        );
    }

    proptest! {
        #[test]
        fn segments_lie_apart_and_the_same_steps_give_the_same_places(
            steps in prop::collection::vec((any::<bool>(), 0u64..5_000, any::<prop::sample::Index>()), 1..200),
            base in (1u64..1 << 30).prop_map(|page| page * 4_096),
        ) {
            const BYTES: u64 = 64 << 10;
            let mut here = Segments::of(DevicePtr(base), BYTES);
            let mut there = Segments::of(DevicePtr(1 << 40), BYTES);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (gives, bytes, which) in steps {
                if gives && !taken.is_empty() {
                    let (offset, _) = taken.swap_remove(which.index(taken.len()));
                    prop_assert!(here.give(DevicePtr(base + offset)));
                    prop_assert!(there.give(DevicePtr((1 << 40) + offset)));
                    continue;
                }
                let place = here.take(bytes).map(|at| at.0 - base);
                prop_assert_eq!(place, there.take(bytes).map(|at| at.0 - (1 << 40)));
                let Some(offset) = place else { continue };
                prop_assert!(bytes > 0 && offset.is_multiple_of(ALIGNMENT) && offset + bytes <= BYTES);
                for &(other, len) in &taken {
                    prop_assert!(offset + bytes <= other || other + len <= offset);
                }
                taken.push((offset, bytes));
            }
        }
    }
}
