//! Ranges of addresses that pieces of the producer's memory are mapped on, so that a block across
//! them is contiguous.
//!
//! # States of a piece
//!
//! | at the producer | at a participant | ends |
//! |---|---|---|
//! | not there | not there | the producer maps one: free |
//! | free or in use, not pinned | not asked for | a claim asks by its lease, and the block is in use: pinned |
//! | pinned | asked, mapped or being unmapped: a row of the questions, or an open mapping | `Unmapped` is noted, or the participant's death is proven |
//! | given back | not there | the place is free for another piece, with the same number |
//!
//! The producer gives a piece back when no block lies in it and nothing pins it. A question for a
//! piece names a lease whose block lies in it, so the piece is in use when the question is right,
//! and when it is not the answer is no: a piece never goes while a question for it is answered.
//! Whatever a participant has mapped at a place is therefore what lies there, and it need not
//! compare what it is told twice.
//!
//! Pieces are mapped and unmapped one by one in any order. The range itself stays reserved until
//! the participant has left: addresses cost nothing, and the place of a piece that failed to unmap
//! must never be used again.
//!
//! A place is *taken* from before the driver's call that maps until after the one that unmaps, so
//! no lock is held while either runs. What the producer says is input: a place that is taken, or
//! beyond the range, is refused.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard};

use gpu_api::lock::Acquire;
use gpu_api::{Access, AddressRange, DevicePtr, Error, Gpu, Result, Spot};

/// The ranges of one producer.
#[derive(Debug, Default)]
pub(crate) struct Ranges(Mutex<HashMap<u64, Range>>);

#[derive(Debug)]
struct Range {
    addresses: AddressRange,
    /// What the producer says of its bytes: the reservation may be longer.
    len: u64,
    /// The lengths of pieces by their offsets.
    taken: BTreeMap<u64, u64>,
}

impl Range {
    /// Takes the place of a piece, if nothing is there.
    fn take(&mut self, offset: u64, len: u64) -> bool {
        let end = offset.checked_add(len).filter(|&end| end <= self.len);
        let Some(end) = end else { return false };
        let before = self.taken.range(..end).next_back();
        if before.is_some_and(|(&start, &len)| start + len > offset) {
            return false;
        }
        self.taken.insert(offset, len);
        true
    }
}

impl Ranges {
    fn table(&self) -> MutexGuard<'_, HashMap<u64, Range>> {
        self.0.acquire()
    }

    /// Maps a piece at its place, reserving the range if it is the first.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a place that cannot be; what the kernel or the driver refuses.
    pub fn map(
        &self,
        gpu: &Gpu,
        fd: BorrowedFd<'_>,
        len: u64,
        spot: Spot,
        access: Access,
    ) -> Result<DevicePtr> {
        let granularity = gpu.caps().granularity.max(1);
        if ![len, spot.offset, spot.range_len]
            .iter()
            .all(|number| number.is_multiple_of(granularity))
        {
            return Err(invalid(
                len,
                spot,
                "of multiples of the device's granularity",
            ));
        }
        let (device, backend) = (gpu.device(), gpu.backend());
        let memory = backend.import_memory(device, fd, len)?;
        let at = self.take(gpu, len, spot);
        let mapped = at.and_then(|at| {
            // SAFETY: `map_memory` asks for
            // - memory that is not yet released: it was imported just now;
            // - a place within one range, at a multiple of the granularity, with nothing mapped on
            //   it: checked above, and `take` gives a place to one at a time.
            unsafe { backend.map_memory(at, memory, access) }
                .map(|()| at)
                .inspect_err(|_| self.give_back(at))
        });
        // The mapping keeps the memory; without one nothing does.
        // SAFETY: `release_memory` asks for memory that is not yet released: imported above, once.
        if let Err(error) = unsafe { backend.release_memory(memory) } {
            tracing::warn!(%error, "a handle of imported memory is leaked");
        }
        mapped
    }

    fn take(&self, gpu: &Gpu, len: u64, spot: Spot) -> Result<DevicePtr> {
        let mut table = self.table();
        let range = match table.get_mut(&spot.range) {
            Some(range) => range,
            None => {
                let addresses = gpu
                    .backend()
                    .reserve_range(gpu.device(), spot.range_len, None)?;
                table.entry(spot.range).or_insert(Range {
                    addresses,
                    len: spot.range_len,
                    taken: BTreeMap::new(),
                })
            }
        };
        if range.len != spot.range_len || !range.take(spot.offset, len) {
            return Err(invalid(
                len,
                spot,
                "within the range, where nothing else is",
            ));
        }
        Ok(range.addresses.base.offset(spot.offset))
    }

    /// Unmaps a piece. May block. After an error its place stays taken.
    ///
    /// # Safety
    ///
    /// `at` is what [`map`](Ranges::map) gave and is not yet unmapped, and no unfinished GPU work
    /// touches the piece.
    pub unsafe fn unmap(&self, gpu: &Gpu, at: DevicePtr) -> Result<()> {
        // SAFETY: `unmap_memory` asks for the same as this.
        unsafe { gpu.backend().unmap_memory(at) }?;
        self.give_back(at);
        Ok(())
    }

    fn give_back(&self, at: DevicePtr) {
        for range in self.table().values_mut() {
            if let Some(offset) =
                at.0.checked_sub(range.addresses.base.0)
                    .filter(|&offset| offset < range.len)
            {
                range.taken.remove(&offset);
            }
        }
    }

    /// Gives back the addresses of ranges that nothing is mapped on: the participant has left.
    pub fn release(&self, gpu: &Gpu) {
        for (_, range) in self.table().extract_if(|_, range| range.taken.is_empty()) {
            // SAFETY: `release_range` asks for what `reserve_range` gave, once, with nothing mapped
            // on it: its places are not taken, and it is taken out of the table.
            if let Err(error) = unsafe { gpu.backend().release_range(range.addresses) } {
                tracing::warn!(%error, "a range of addresses is leaked");
            }
        }
    }
}

fn invalid(len: u64, spot: Spot, must: &'static str) -> Error {
    let got = format!("{len} bytes at {} of {}", spot.offset, spot.range_len);
    Error::invalid("the place of a region in its range", got, must)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_given_to_one_piece_at_a_time() {
        let addresses = AddressRange {
            base: DevicePtr(1 << 20),
            len: 100,
        };
        let mut range = Range {
            addresses,
            len: 100,
            taken: BTreeMap::new(),
        };
        assert!(range.take(20, 20) && range.take(40, 10) && range.take(0, 20));
        for (offset, len) in [
            (20, 20),
            (19, 1),
            (0, 1),
            (45, 10),
            (10, 80),
            (30, 5),
            (91, 10),
            (u64::MAX, 2),
        ] {
            assert!(!range.take(offset, len), "{len} at {offset}");
        }
        range.taken.remove(&20);
        assert!(!range.take(20, 21), "the one behind is there");
        assert!(range.take(20, 5) && range.take(25, 15) && range.take(50, 50));
    }
}
