//! A pool that this process holds.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;

use crate::boundary::{array, call, out_handle, room, text};
use crate::engine::{Key, Pool, Previous};
use crate::failure::{Failure, Outcome};
use crate::kinds::{gpu_ipc_client, gpu_ipc_pool, gpu_ipc_stream};
use crate::object::client::{gpu_ipc_create_options, readers_of};
use crate::object::part::{
    gpu_ipc_part, gpu_ipc_part_spec, layout_of, user_into, write_part, write_part_at,
};
use crate::object::sealed::{
    GPU_IPC_PREVIOUS_CLOSED, GPU_IPC_PREVIOUS_DIED, GPU_IPC_PREVIOUS_NEVER, gpu_ipc_key,
    gpu_ipc_pool_info, gpu_ipc_region, gpu_ipc_seal, gpu_ipc_sealed, key_of, list, write_info,
};
use crate::process::Process;
use crate::sized;

/// Makes a pool, memory that stays writable and outlives its holder, and holds it. Of the options
/// `user`, `uids`, `readers` and `groups` are for pools, groups at most 15.
///
/// Contents come in blocks, whatever the application calls so. A block is given up by
/// `gpu_ipc_pool_invalidate`, then filled by work on streams, then sealed behind that work by
/// `gpu_ipc_pool_seal`. What is sealed is whole, and `gpu_ipc_pool_sealed` lists it, also for the
/// next holder after this process died. `journal_bytes` is what `gpu_ipc_journal_bytes` says.
///
/// Keeps: nothing; what describes the parts is copied. Thread: any. Blocks: for the broker, which
/// may scrub memory first. Errors: `BAD_HANDLE`, `OUT_OF_MEMORY`, `REFUSED` for a limit and for a
/// name that is there already, `INVALID`, `DEADLINE`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte; there are `count` parts with good pointers in them; `options` is
/// null, or has as many bytes as its `size` says and good pointers in them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_create(
    client: *mut gpu_ipc_client,
    name: *const c_char,
    parts: *const gpu_ipc_part_spec,
    count: usize,
    journal_bytes: u64,
    options: *const gpu_ipc_create_options,
    pool: Option<&mut MaybeUninit<*mut gpu_ipc_pool>>,
) -> i32 {
    call(|process| {
        let pool = out_handle(pool, "pool")?;
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a pool") }?;
        // SAFETY: `read` asks for what this function asks for.
        let given = unsafe { sized::read(options) }?;
        if given.expect != 0 || given.replace != 0 || given.unchanged_count != 0 {
            return Err(Failure::invalid(
                "the options of a pool",
                "`expect`, `replace` or `unchanged`",
                "zero there: a pool has one epoch",
            ));
        }
        // SAFETY: `layout_of` asks for what this function asks for.
        let layout = unsafe { layout_of(parts, count, given.groups, given.user, given.user_len) }?;
        // SAFETY: `readers_of` asks for what this function asks for.
        let readers = unsafe { readers_of(&given) }?;
        let client = process.get(client)?;
        let made = client.create_pool_for(name, layout, journal_bytes, readers)?;
        pool.set(process.open(made)?);
        Ok(())
    })
}

/// Holds a pool: maps it writable, with the bytes that its last holder left. With
/// `at_same_addresses` where that one had it, so that pointers in it stay good.
///
/// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `NOT_FOUND`,
/// `REFUSED` while another process holds it, with the names of both, and for another user's;
/// `INVALID` when the same addresses are in use here; `MISMATCH`, `DEADLINE`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_adopt(
    client: *mut gpu_ipc_client,
    name: *const c_char,
    at_same_addresses: bool,
    pool: Option<&mut MaybeUninit<*mut gpu_ipc_pool>>,
) -> i32 {
    call(|process| {
        let pool = out_handle(pool, "pool")?;
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a pool") }?;
        let made = process.get(client)?.adopt(name, at_same_addresses)?;
        pool.set(process.open(made)?);
        Ok(())
    })
}

/// Describes a pool that this process holds.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// `info` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_get_info(
    pool: *mut gpu_ipc_pool,
    info: *mut gpu_ipc_pool_info,
) -> i32 {
    call(|process| {
        let pool = process.get(pool)?;
        let previous = match pool.previous() {
            Previous::Never => GPU_IPC_PREVIOUS_NEVER,
            Previous::Closed => GPU_IPC_PREVIOUS_CLOSED,
            Previous::Died => GPU_IPC_PREVIOUS_DIED,
        };
        let object = (pool.name(), pool.identity(), pool.layout());
        // SAFETY: `write_info` asks for what this function asks for.
        unsafe { write_info(info, object, (pool.generation(), pool.blocks(), previous)) }
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
pub unsafe extern "C" fn gpu_ipc_pool_user(
    pool: *mut gpu_ipc_pool,
    bytes: *mut c_void,
    capacity: usize,
) -> i32 {
    // SAFETY: `user_into` asks for what this function asks for.
    call(|process| unsafe { user_into(process.get(pool)?.layout(), bytes, capacity) })
}

/// Describes a part and its address. The GPU, and on the host backend the CPU, may write there
/// until the hold ends.
///
/// Work on it is named by a seal, by `gpu_ipc_pool_used_on` or at `gpu_ipc_pool_end`: work on a
/// stream that was not named, and that is not finished when the hold ends, is undefined behaviour.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// `name` ends with a zero byte; `part` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_get_part(
    pool: *mut gpu_ipc_pool,
    name: *const c_char,
    part: *mut gpu_ipc_part,
) -> i32 {
    call(|process| {
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a part") }?;
        let pool = process.get(pool)?;
        // SAFETY: `write_part` asks for what this function asks for.
        unsafe { write_part(pool.layout(), name, pool.device_ptr(name), part) }
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
pub unsafe extern "C" fn gpu_ipc_pool_get_part_at(
    pool: *mut gpu_ipc_pool,
    number: usize,
    part: *mut gpu_ipc_part,
) -> i32 {
    call(|process| {
        let pool = process.get(pool)?;
        // SAFETY: `write_part_at` asks for what this function asks for.
        unsafe { write_part_at(pool.layout(), number, |name| pool.device_ptr(name), part) }
    })
}

/// Lists the regions, in which all parts lie: as many as fit into `capacity`, and how many there
/// are.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// `regions` has room for `capacity` of them, or is null and `capacity` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_regions(
    pool: *mut gpu_ipc_pool,
    regions: *mut gpu_ipc_region,
    capacity: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> i32 {
    call(|process| {
        let regions_of = process.get(pool)?.regions().into_iter();
        let found: Vec<gpu_ipc_region> = regions_of
            .map(|(start, len)| gpu_ipc_region {
                ptr: std::ptr::with_exposed_provenance_mut(start.0 as usize),
                len,
            })
            .collect();
        // SAFETY: `list` asks for what this function asks for.
        unsafe { list(&found, regions, capacity, count) }
    })
}

/// Copies `len` bytes from the host into a part from `offset` on.
///
/// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
/// `INVALID` beyond the part's end, `DRIVER`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte; there are `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_write(
    pool: *mut gpu_ipc_pool,
    name: *const c_char,
    offset: u64,
    bytes: *const c_void,
    len: usize,
) -> i32 {
    call(|process| {
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a part") }?;
        // SAFETY: `array` asks for what this function asks for.
        let bytes = unsafe { array(bytes.cast::<u8>(), len, "bytes") }?;
        Ok(process.get(pool)?.write_part(name, offset, bytes)?)
    })
}

/// Copies `len` bytes of a part from `offset` on to the host.
///
/// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
/// `INVALID` beyond the part's end, `DRIVER`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte; there is room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_read(
    pool: *mut gpu_ipc_pool,
    name: *const c_char,
    offset: u64,
    bytes: *mut c_void,
    len: usize,
) -> i32 {
    call(|process| {
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a part") }?;
        // SAFETY: `room` asks for what this function asks for.
        let bytes = unsafe { room(bytes, len) }?;
        Ok(process.get(pool)?.read_part(name, offset, bytes)?)
    })
}

/// Queues a fill: sets `len` bytes of a part from `offset` on to `byte`, after the work that is
/// queued on the stream.
///
/// Keeps: the stream, until the hold ends. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`
/// beyond the part's end, `MISMATCH` for a stream of another device, `CAPTURING`, `DRIVER`,
/// `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_fill(
    pool: *mut gpu_ipc_pool,
    name: *const c_char,
    offset: u64,
    len: u64,
    byte: u8,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a part") }?;
        let (pool, open) = (process.get(pool)?, process.get(stream)?);
        Ok(pool.fill(name, offset, len, byte, &open.stream)?)
    })
}

/// Names a stream whose work touches the pool: the end of the hold waits for it.
///
/// Keeps: the stream, until the hold ends. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
/// `MISMATCH` for a stream of another device, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_pool_used_on(
    pool: *mut gpu_ipc_pool,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        let (pool, open) = (process.get(pool)?, process.get(stream)?);
        Ok(pool.used_on(&open.stream)?)
    })
}

/// Gives a block's contents up: from here on it may be filled. To be called before the filling is
/// queued.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID` for a block that the
/// journal has no entry for, `EXHAUSTED` for one that was given up 2^32 - 1 times, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_pool_invalidate(pool: *mut gpu_ipc_pool, block: u32) -> i32 {
    call(|process| Ok(process.get(pool)?.invalidate(block)?))
}

/// Queues the seal of a block behind the work on a stream: once that has finished, the block is
/// whole, and listed under its key.
///
/// Keeps: the stream, until the hold ends. Thread: any. Blocks: no; until the stream is done on a
/// device whose streams write no words. Errors: as `gpu_ipc_pool_seal_many`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_pool_seal(
    pool: *mut gpu_ipc_pool,
    block: u32,
    key: Option<&gpu_ipc_key>,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        let (pool, open) = (process.get(pool)?, process.get(stream)?);
        Ok(pool.seal(block, key_of(key)?, &open.stream)?)
    })
}

/// Queues the seals of many blocks in one batch, as `gpu_ipc_pool_seal` does for one.
///
/// Keeps: the stream, until the hold ends. Thread: any. Blocks: as `gpu_ipc_pool_seal`. Errors:
/// `BAD_HANDLE`; `INVALID` for a block that was not invalidated since its last seal, is named twice
/// or has no entry, `MISMATCH` for a stream of another device, `CAPTURING`: then none is sealed;
/// `DRIVER`: then some may be; `FORKED`.
///
/// # Safety
///
/// There are `count` seals.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_seal_many(
    pool: *mut gpu_ipc_pool,
    seals: *const gpu_ipc_seal,
    count: usize,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        // SAFETY: `array` asks for what this function asks for.
        let seals = unsafe { array(seals, count, "seals") }?;
        let pairs: Vec<(u32, Key)> = seals
            .iter()
            .map(|seal| (seal.block, Key(seal.key.bytes)))
            .collect();
        let (pool, open) = (process.get(pool)?, process.get(stream)?);
        Ok(pool.seal_all(&pairs, &open.stream)?)
    })
}

/// Lists the blocks that are whole at this moment, in the order of their numbers: as many as fit
/// into `capacity`, and how many there are.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`, `FORKED`.
///
/// # Safety
///
/// `sealed` has room for `capacity` of them, or is null and `capacity` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_sealed(
    pool: *mut gpu_ipc_pool,
    sealed: *mut gpu_ipc_sealed,
    capacity: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> i32 {
    call(|process| {
        let found: Vec<_> = process
            .get(pool)?
            .sealed()?
            .iter()
            .map(gpu_ipc_sealed::of)
            .collect();
        // SAFETY: `list` asks for what this function asks for.
        unsafe { list(&found, sealed, capacity, count) }
    })
}

/// Ends the hold: waits for these streams and those that were named before, and until the broker has
/// noted it. Then another process may adopt the pool. Null is passed over.
///
/// The handle is closed, whatever the call returns.
///
/// Keeps: nothing. Thread: any. Blocks: for the streams and the broker. Errors: `BAD_HANDLE`;
/// `CAPTURING`, `MISMATCH` and `DRIVER` for a stream whose work cannot be waited for: the hold ends
/// with this process; `INVALID` while another call is in the pool, at whose end the hold ends as
/// after `gpu_ipc_pool_close`; `DEADLINE` while the broker is away, which is told when it is back;
/// `FORKED`.
///
/// # Safety
///
/// There are `count` streams.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_pool_end(
    pool: *mut gpu_ipc_pool,
    streams: *const *mut gpu_ipc_stream,
    count: usize,
) -> i32 {
    call(|process| {
        if pool.is_null() {
            return Ok(());
        }
        // SAFETY: `array` asks for what this function asks for.
        let given = unsafe { array(streams, count, "streams") }?;
        let held = taken(process, pool)?;
        let streams = given
            .iter()
            .map(|&stream| process.get(stream))
            .collect::<Outcome<Vec<_>>>()?;
        let streams: Vec<_> = streams.iter().map(|open| &open.stream).collect();
        Ok(held.close(&streams)?)
    })
}

/// Closes a pool: the hold ends when the work on the named streams is done. Null is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_pool_close(pool: *mut gpu_ipc_pool) -> i32 {
    call(|process| process.close(pool))
}

fn taken(process: &'static Process, pool: *mut gpu_ipc_pool) -> Outcome<Pool> {
    process.close_and_take(pool)?.ok_or_else(|| {
        Failure::invalid(
            "the pool to end",
            "in use by another call",
            "left by every call first; its hold ends with the last of them",
        )
    })
}
