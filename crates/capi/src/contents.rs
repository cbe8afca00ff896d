//! Copies between the host and a block, whichever side has it.

use std::ffi::c_void;
use std::ops::Range;

use crate::boundary::{array, call, room};
use crate::engine::{Contents, ReceivedBlock, Result, SentBlock, SentSlice};
use crate::failure::{Failure, Outcome};
use crate::kinds::{Kind, gpu_ipc_stream};

/// A block of which a part can be copied.
pub(crate) trait Whole {
    type Part<'a>: Contents
    where
        Self: 'a;

    fn part(&self, range: Range<u64>) -> Result<Self::Part<'_>>;
}

impl Whole for SentBlock {
    type Part<'a> = SentSlice<'a>;

    fn part(&self, range: Range<u64>) -> Result<SentSlice<'_>> {
        self.slice(range)
    }
}

impl Whole for ReceivedBlock {
    type Part<'a> = ReceivedBlock;

    fn part(&self, range: Range<u64>) -> Result<ReceivedBlock> {
        self.slice(range)
    }
}

/// Copies bytes of C's into a block.
///
/// # Safety
///
/// There are `len` bytes.
pub(crate) unsafe fn write<K: Kind<Value: Whole>>(
    block: *mut K,
    offset: u64,
    bytes: *const c_void,
    len: usize,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        // SAFETY: `array` asks for what this function asks for.
        let bytes = unsafe { array(bytes.cast::<u8>(), len, "bytes") }?;
        let (block, open) = (process.get(block)?, process.get(stream)?);
        if bytes.is_empty() {
            return Ok(());
        }
        Ok(open
            .stream
            .write(&block.part(offset..end(offset, len)?)?, bytes)?)
    })
}

/// Copies bytes of a block into a buffer of C's.
///
/// # Safety
///
/// There is room for `len` bytes.
pub(crate) unsafe fn read<K: Kind<Value: Whole>>(
    block: *mut K,
    offset: u64,
    bytes: *mut c_void,
    len: usize,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        let (block, open) = (process.get(block)?, process.get(stream)?);
        // SAFETY: `room` asks for what this function asks for.
        let bytes = unsafe { room(bytes, len) }?;
        if bytes.is_empty() {
            return Ok(());
        }
        Ok(open
            .stream
            .read(&block.part(offset..end(offset, len)?)?, bytes)?)
    })
}

fn end(offset: u64, len: usize) -> Outcome<u64> {
    offset.checked_add(len as u64).ok_or_else(|| {
        Failure::invalid(
            "a range of bytes",
            format!("{len} at {offset}"),
            "inside the block",
        )
    })
}
