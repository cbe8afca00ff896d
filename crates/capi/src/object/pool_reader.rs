//! A pool that another process holds, to be read.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;

use crate::boundary::{call, out, out_handle, room, text};
use crate::failure::null;
use crate::kinds::{gpu_ipc_client, gpu_ipc_pool_reader, gpu_ipc_stream};
use crate::object::part::{gpu_ipc_part, user_into, write_part, write_part_at};
use crate::object::sealed::{gpu_ipc_pool_info, gpu_ipc_sealed, list, write_info};

/// Maps a pool read-only, beside a holder that may write to it at any time.
///
/// What is read is a block's contents only if the block was whole before and after:
/// `gpu_ipc_pool_reader_read_whole` does both looks. Work on a stream is put between
/// `gpu_ipc_pool_reader_look` and `_is_still`, with a wait for it. `gpu_ipc_object_watch` of the
/// name, from the reader's generation on, waits for the next holder.
///
/// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `NOT_FOUND`,
/// `REFUSED`, `MISMATCH`, `INVALID`, `DEADLINE`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_open(
    client: *mut gpu_ipc_client,
    name: *const c_char,
    reader: Option<&mut MaybeUninit<*mut gpu_ipc_pool_reader>>,
) -> i32 {
    call(|process| {
        let reader = out_handle(reader, "reader")?;
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a pool") }?;
        let made = process.get(client)?.read_pool(name)?;
        reader.set(process.open(made)?);
        Ok(())
    })
}

/// Describes a pool that is read.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// `info` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_reader_get_info(
    reader: *mut gpu_ipc_pool_reader,
    info: *mut gpu_ipc_pool_info,
) -> i32 {
    call(|process| {
        let reader = process.get(reader)?;
        let object = (reader.name(), reader.identity(), reader.layout());
        // SAFETY: `write_info` asks for what this function asks for.
        unsafe { write_info(info, object, (reader.generation(), reader.blocks(), 0)) }
    })
}

/// Copies the bytes that were put beside the parts when the pool was made; as many as fit into
/// `capacity`.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// There is room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_reader_user(
    reader: *mut gpu_ipc_pool_reader,
    bytes: *mut c_void,
    capacity: usize,
) -> i32 {
    // SAFETY: `user_into` asks for what this function asks for.
    call(|process| unsafe { user_into(process.get(reader)?.layout(), bytes, capacity) })
}

/// Describes a part and its address, which may be read alone: a kernel that writes there ends its
/// context. Work on it is named with `gpu_ipc_pool_reader_used_on`.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// `name` ends with a zero byte; `part` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_reader_get_part(
    reader: *mut gpu_ipc_pool_reader,
    name: *const c_char,
    part: *mut gpu_ipc_part,
) -> i32 {
    call(|process| {
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a part") }?;
        let reader = process.get(reader)?;
        // SAFETY: `write_part` asks for what this function asks for.
        unsafe { write_part(reader.layout(), name, reader.device_ptr(name), part) }
    })
}

/// Describes a part by its number: from 0 to below the count of parts, in the order of their names.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// `part` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_reader_get_part_at(
    reader: *mut gpu_ipc_pool_reader,
    number: usize,
    part: *mut gpu_ipc_part,
) -> i32 {
    call(|process| {
        let reader = process.get(reader)?;
        // SAFETY: `write_part_at` asks for what this function asks for.
        unsafe {
            write_part_at(
                reader.layout(),
                number,
                |name| reader.device_ptr(name),
                part,
            )
        }
    })
}

/// Names a stream whose work touches the pool: the mapping stays until that is done.
///
/// Keeps: the stream, until the reader is closed. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
/// `MISMATCH` for a stream of another device, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_pool_reader_used_on(
    reader: *mut gpu_ipc_pool_reader,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        let (reader, open) = (process.get(reader)?, process.get(stream)?);
        Ok(reader.used_on(&open.stream)?)
    })
}

/// Lists the blocks that are whole at this moment, in the order of their numbers: as many as fit
/// into `capacity`, and how many there are. The holder may give any of them up meanwhile.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// `sealed` has room for `capacity` of them, or is null and `capacity` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_reader_sealed(
    reader: *mut gpu_ipc_pool_reader,
    sealed: *mut gpu_ipc_sealed,
    capacity: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> i32 {
    call(|process| {
        let found = process.get(reader)?.sealed();
        let found: Vec<_> = found.iter().map(gpu_ipc_sealed::of).collect();
        // SAFETY: `list` asks for what this function asks for.
        unsafe { list(&found, sealed, capacity, count) }
    })
}

/// Says whether a block is whole at this moment, and then what it holds.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_pool_reader_look(
    reader: *mut gpu_ipc_pool_reader,
    block: u32,
    whole: Option<&mut MaybeUninit<bool>>,
    sealed: Option<&mut MaybeUninit<gpu_ipc_sealed>>,
) -> i32 {
    call(|process| {
        let (whole, sealed) = (out(whole, "whole")?, out(sealed, "sealed")?);
        let found = process.get(reader)?.look(block);
        whole.set(found.is_some());
        if let Some(found) = found {
            sealed.set(gpu_ipc_sealed::of(&found));
        }
        Ok(())
    })
}

/// Says whether a block was whole all along since the look: what was copied from it between is what
/// the look found.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_pool_reader_is_still(
    reader: *mut gpu_ipc_pool_reader,
    sealed: Option<&gpu_ipc_sealed>,
    still: Option<&mut MaybeUninit<bool>>,
) -> i32 {
    call(|process| {
        let still = out(still, "still")?;
        let sealed = sealed.ok_or_else(|| null("sealed"))?;
        still.set(process.get(reader)?.is_still(&sealed.found()));
        Ok(())
    })
}

/// Copies `len` bytes of a block that is whole, from `offset` of a part on, to the host, and says
/// what the block holds. `whole` is false where it is not whole, or the holder gave it up meanwhile:
/// then the bytes are of no use.
///
/// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
/// `INVALID` beyond the part's end, `DRIVER`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte; there is room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_reader_read_whole(
    reader: *mut gpu_ipc_pool_reader,
    block: u32,
    name: *const c_char,
    offset: u64,
    bytes: *mut c_void,
    len: usize,
    whole: Option<&mut MaybeUninit<bool>>,
    sealed: Option<&mut MaybeUninit<gpu_ipc_sealed>>,
) -> i32 {
    call(|process| {
        let (whole, sealed) = (out(whole, "whole")?, out(sealed, "sealed")?);
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a part") }?;
        // SAFETY: `room` asks for what this function asks for.
        let bytes = unsafe { room(bytes, len) }?;
        let found = process
            .get(reader)?
            .read_whole(block, name, offset, bytes)?;
        whole.set(found.is_some());
        if let Some(found) = found {
            sealed.set(gpu_ipc_sealed::of(&found));
        }
        Ok(())
    })
}

/// Closes a reader; its addresses are given back when the work on the named streams is done. Null is
/// passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_pool_reader_close(reader: *mut gpu_ipc_pool_reader) -> i32 {
    call(|process| process.close(reader))
}
