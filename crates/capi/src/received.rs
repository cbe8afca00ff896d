//! Blocks that this process received.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use crate::block::whom;
use crate::boundary::{array, call, out, out_handle, timeout, value_or};
use crate::contents;
use crate::descriptor::gpu_ipc_descriptor;
use crate::engine::{ReceivedBlock, State};
use crate::failure::{Failure, Outcome};
use crate::kinds::{gpu_ipc_received, gpu_ipc_stream};
use crate::participant::wait_of;

/// The producer's work on the block is not finished.
pub const GPU_IPC_STATE_PENDING: u32 = 1;
/// The contents are what the producer shared.
pub const GPU_IPC_STATE_READY: u32 = 2;
/// The contents are what the producer shared, and the producer is gone.
pub const GPU_IPC_STATE_READY_PRODUCER_GONE: u32 = 3;
/// The producer died or broke before its work was finished: the contents are garbage.
pub const GPU_IPC_STATE_POISONED: u32 = 4;

/// Returns the address of a received block's first byte in this process; null after an error. On
/// the host backend the CPU may use it.
///
/// Every stream whose work touches the block is named with `gpu_ipc_received_used_on` before the
/// block is closed (the one that the claim waited on is), and work of the CPU is over by then.
/// Otherwise the producer may use the bytes again meanwhile: undefined behaviour that no library
/// can see. The address means nothing in a forked child.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_received_ptr(received: *mut gpu_ipc_received) -> *mut c_void {
    value_or(std::ptr::null_mut(), |process| {
        Ok(std::ptr::with_exposed_provenance_mut(
            process.get(received)?.device_ptr().0 as usize,
        ))
    })
}

/// Returns a received block's bytes; 0 after an error.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_received_len(received: *mut gpu_ipc_received) -> u64 {
    value_or(0, |process| Ok(process.get(received)?.len()))
}

/// Returns the number of the region that a received block lies in, as `GPU_IPC_NOTICE_PLEASE_UNMAP`
/// names it; 0 after an error, and for the first region: `gpu_ipc_last_error` tells them apart after
/// `gpu_ipc_clear_error`.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_received_region(received: *mut gpu_ipc_received) -> u64 {
    value_or(0, |process| Ok(process.get(received)?.region().0))
}

/// Says whether a received block is only read: it was shared so, or the participant maps so. A write
/// to its address faults, on a GPU in a way that breaks the context.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_received_is_read_only(
    received: *mut gpu_ipc_received,
    read_only: Option<&mut MaybeUninit<bool>>,
) -> i32 {
    call(|process| {
        let read_only = out(read_only, "read_only")?;
        read_only.set(process.get(received)?.is_read_only());
        Ok(())
    })
}

/// Returns the state of the contents at this moment: `GPU_IPC_STATE_...`. After a wait on a stream,
/// call this after synchronising it.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_received_state(
    received: *mut gpu_ipc_received,
    state: Option<&mut MaybeUninit<u32>>,
) -> i32 {
    call(|process| {
        let state = out(state, "state")?;
        state.set(match process.get(received)?.state() {
            State::Pending => GPU_IPC_STATE_PENDING,
            State::Ready => GPU_IPC_STATE_READY,
            State::ReadyProducerGone => GPU_IPC_STATE_READY_PRODUCER_GONE,
            State::Poisoned => GPU_IPC_STATE_POISONED,
        });
        Ok(())
    })
}

/// Waits for the producer's work on a block after its claim: on this thread, or by queueing the
/// wait on a stream, which counts as used.
///
/// Keeps: the stream, until its work is done. Thread: any. Blocks: without a stream up to
/// `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`, `DEADLINE`, `CAPTURING`, `MISMATCH`,
/// `FORKED`. The block stays held.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_received_wait(
    received: *mut gpu_ipc_received,
    stream: *mut gpu_ipc_stream,
    timeout_ns: i64,
) -> i32 {
    call(|process| {
        let (block, stream) = (process.get(received)?, process.get_opt(stream)?);
        Ok(block.wait(wait_of(0, stream.as_deref())?, timeout(timeout_ns))?)
    })
}

/// Names a stream of this process whose work touches the block, of any device and vendor: the lease
/// ends behind it.
///
/// Keeps: the stream, until that work is done. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
/// `INVALID` for the per-thread default stream, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_received_used_on(
    received: *mut gpu_ipc_received,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        Ok(process
            .get(received)?
            .used_on(&process.get(stream)?.stream)?)
    })
}

/// Makes another handle for a part of a received block, under the same lease, which ends with the
/// last of them.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID` for a range that is
/// empty or not in the block.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_received_slice(
    received: *mut gpu_ipc_received,
    offset: u64,
    len: u64,
    part: Option<&mut MaybeUninit<*mut gpu_ipc_received>>,
) -> i32 {
    call(|process| {
        let part = out_handle(part, "part")?;
        let made = process
            .get(received)?
            .slice(offset..offset.saturating_add(len))?;
        part.set(process.open(made)?);
        Ok(())
    })
}

/// Copies `len` bytes into a received block from `offset` on, after the work that is queued on the
/// stream.
///
/// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
/// `INVALID` beyond the block's end and for a participant that maps read-only, `MISMATCH`,
/// `CAPTURING`, `DRIVER`.
///
/// # Safety
///
/// There are `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_received_write(
    received: *mut gpu_ipc_received,
    offset: u64,
    bytes: *const c_void,
    len: usize,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    // SAFETY: `write` asks for what this function asks for.
    unsafe { contents::write(received, offset, bytes, len, stream) }
}

/// Copies `len` bytes of a received block from `offset` on to the host, after the work that is
/// queued on the stream.
///
/// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
/// `INVALID`, `MISMATCH`, `CAPTURING`, `DRIVER`; then the bytes are as they were.
///
/// # Safety
///
/// There is room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_received_read(
    received: *mut gpu_ipc_received,
    offset: u64,
    bytes: *mut c_void,
    len: usize,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    // SAFETY: `read` asks for what this function asks for.
    unsafe { contents::read(received, offset, bytes, len, stream) }
}

/// Asks the producer for a descriptor of a received block for another participant: the one of that
/// number in the same session, or with 0 the first `claims` that ask (`GPU_IPC_EVERYBODY`: all).
/// The new lease does not depend on this one.
///
/// Waits for the producer's work on the block first. Work of this process on it must be done: the
/// receiver waits for none.
///
/// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
/// `INVALID` for no participant, `REFUSED` and `PARTICIPANT_GONE`, `PRODUCER_GONE`, `STALE` for
/// contents that are garbage, `DEADLINE`, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_received_forward(
    received: *mut gpu_ipc_received,
    participant: u64,
    claims: u32,
    timeout_ns: i64,
    descriptor: Option<&mut MaybeUninit<gpu_ipc_descriptor>>,
) -> i32 {
    call(|process| {
        let descriptor = out(descriptor, "descriptor")?;
        let to = whom(participant, claims)?;
        let received = process.get(received)?;
        let made = received.forward(to, timeout(timeout_ns))?;
        descriptor.set(gpu_ipc_descriptor {
            bytes: *made.as_bytes(),
        });
        Ok(())
    })
}

/// Asks the producer for a descriptor as `gpu_ipc_received_forward` does, with up to 64 bytes of the
/// user's own: those that the received descriptor has, which `gpu_ipc_descriptor_get_info` reads, or
/// others. Bytes that are left out are zero.
///
/// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: as
/// `gpu_ipc_received_forward`, and `INVALID` for more than 64 bytes.
///
/// # Safety
///
/// There are `user_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_received_forward_with(
    received: *mut gpu_ipc_received,
    participant: u64,
    claims: u32,
    user: *const u8,
    user_len: usize,
    timeout_ns: i64,
    descriptor: Option<&mut MaybeUninit<gpu_ipc_descriptor>>,
) -> i32 {
    call(|process| {
        let descriptor = out(descriptor, "descriptor")?;
        // SAFETY: `array` asks for what this function asks for.
        let given = unsafe { array(user, user_len, "user") }?;
        let mut user = [0; 64];
        let Some(place) = user.get_mut(..given.len()) else {
            let got = format!("{} bytes", given.len());
            return Err(Failure::invalid(
                "the bytes of the user's own",
                got,
                "at most 64",
            ));
        };
        place.copy_from_slice(given);
        let to = whom(participant, claims)?;
        let received = process.get(received)?;
        let made = received.forward_with(to, &user, timeout(timeout_ns))?;
        descriptor.set(gpu_ipc_descriptor {
            bytes: *made.as_bytes(),
        });
        Ok(())
    })
}

/// Closes a received block. The lease ends when its last handle is closed and all work on the
/// streams that were named is done. Null is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_received_close(received: *mut gpu_ipc_received) -> i32 {
    call(|process| process.close(received))
}

/// Closes many received blocks at the cost of a few: those that follow each other and were used on
/// the same streams wait for one event on each, and one batch of stores ends them. Nulls are passed
/// over.
///
/// Every handle that is good is closed, whatever the call returns.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE` if any of them was bad.
///
/// # Safety
///
/// There are `count` handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_received_close_many(
    received: *const *mut gpu_ipc_received,
    count: usize,
) -> i32 {
    call(|process| {
        // SAFETY: `array` asks for what this function asks for.
        let handles = unsafe { array(received, count, "received") }?;
        let mut first = Ok(());
        let mut note = |failure| {
            if first.is_ok() {
                first = Err(failure);
            }
        };
        let taken = handles
            .iter()
            .filter(|handle| !handle.is_null())
            .filter_map(|&handle| {
                let taken: Outcome<Option<ReceivedBlock>> = process.close_and_take(handle);
                taken.unwrap_or_else(|failure| {
                    note(failure);
                    None
                })
            });
        ReceivedBlock::drop_many(taken);
        first
    })
}
