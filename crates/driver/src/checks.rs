//! Arguments that are refused before a driver sees them.

use gpu_api::{Error, HostPtr, MAX_BATCH, Result, StreamOp};

/// Refuses a range of words that is not made of whole pages.
///
/// # Errors
///
/// [`Error::Invalid`].
pub fn whole_pages(start: HostPtr, len: usize) -> Result<()> {
    let page = rustix::param::page_size();
    if start.0 != 0 && len != 0 && start.0.is_multiple_of(page) && len.is_multiple_of(page) {
        return Ok(());
    }
    let got = format!("{len} bytes at {start:?}");
    Err(Error::invalid("the range of words", got, "whole pages"))
}

/// Refuses a batch of no operations, and one of more than [`MAX_BATCH`].
///
/// # Errors
///
/// [`Error::Invalid`].
pub fn batch(ops: &[StreamOp]) -> Result<()> {
    if (1..=MAX_BATCH).contains(&ops.len()) {
        return Ok(());
    }
    Err(Error::invalid(
        "the number of operations",
        ops.len(),
        "1 to 255",
    ))
}
