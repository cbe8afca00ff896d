//! Ranges of bytes in a block.

use std::ops::{Bound, RangeBounds};

use gpu_api::{Error, Result};

/// Resolves a range of a block of `whole` bytes to an offset and a length.
///
/// # Errors
///
/// [`Error::Invalid`] for a range that is empty or does not lie in the block.
pub(crate) fn part_of(whole: u64, range: &impl RangeBounds<u64>) -> Result<(u64, u64)> {
    let from = match range.start_bound() {
        Bound::Included(&from) => Some(from),
        Bound::Excluded(&before) => before.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let to = match range.end_bound() {
        Bound::Included(&last) => last.checked_add(1),
        Bound::Excluded(&to) => Some(to),
        Bound::Unbounded => Some(whole),
    };
    match (from, to) {
        (Some(from), Some(to)) if from < to && to <= whole => Ok((from, to - from)),
        _ => Err(Error::invalid(
            "the range of a slice",
            format!(
                "{:?} to {:?} of {whole} bytes",
                range.start_bound(),
                range.end_bound()
            ),
            "inside the block, and not empty",
        )),
    }
}
