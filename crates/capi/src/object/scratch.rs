//! Memory of a broker that goes with the process that asked for it.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

use crate::boundary::{array, call, out_handle, room, text};
use crate::engine::Scratch;
use crate::failure::Outcome;
use crate::kinds::{gpu_ipc_client, gpu_ipc_scratch, gpu_ipc_stream};
use crate::object::part::{gpu_ipc_part, gpu_ipc_part_spec, layout_of, write_part};
use crate::process::Process;

/// Runs a call with scratch memory, one at a time.
fn with<T>(
    process: &'static Process,
    scratch: *mut gpu_ipc_scratch,
    run: impl FnOnce(&mut Scratch) -> Outcome<T>,
) -> Outcome<T> {
    let open = process.get(scratch)?;
    let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
    run(&mut open)
}

/// Makes memory that is never committed: it counts against the broker's limits, and goes with this
/// process. `name` is what the broker's listing calls it.
///
/// Keeps: nothing; what describes the parts is copied. Thread: any. Blocks: for the broker, which
/// may scrub memory first. Errors: `BAD_HANDLE`, `OUT_OF_MEMORY`, `REFUSED` for a limit, `INVALID`,
/// `DEADLINE`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte; there are `count` parts with good pointers in them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_object_scratch(
    client: *mut gpu_ipc_client,
    name: *const c_char,
    parts: *const gpu_ipc_part_spec,
    count: usize,
    scratch: Option<&mut MaybeUninit<*mut gpu_ipc_scratch>>,
) -> i32 {
    call(|process| {
        let scratch = out_handle(scratch, "scratch")?;
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of scratch memory") }?;
        // SAFETY: `layout_of` asks for what this function asks for, and for no groups and no bytes
        // of the user's.
        let layout = unsafe { layout_of(parts, count, std::ptr::null(), std::ptr::null(), 0) }?;
        let made = process.get(client)?.scratch(name, layout)?;
        scratch.set(process.open(Mutex::new(made))?);
        Ok(())
    })
}

/// Describes a part and its address. The GPU, and on the host backend the CPU, may write there
/// until the close.
///
/// Work on it is named with `gpu_ipc_scratch_used_on`: work on a stream that was not named, and
/// that is not finished at the close, is undefined behaviour.
///
/// Keeps: nothing. Thread: any. Blocks: while another call is in this memory. Errors: `BAD_HANDLE`,
/// `INVALID`.
///
/// # Safety
///
/// `name` ends with a zero byte; `part` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_scratch_get_part(
    scratch: *mut gpu_ipc_scratch,
    name: *const c_char,
    part: *mut gpu_ipc_part,
) -> i32 {
    call(|process| {
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a part") }?;
        with(process, scratch, |scratch| {
            // SAFETY: `write_part` asks for what this function asks for.
            unsafe { write_part(scratch.layout(), name, scratch.device_ptr(name), part) }
        })
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
pub unsafe extern "C" fn gpu_ipc_scratch_write(
    scratch: *mut gpu_ipc_scratch,
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
        with(process, scratch, |scratch| {
            Ok(scratch.write_part(name, offset, bytes)?)
        })
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
pub unsafe extern "C" fn gpu_ipc_scratch_read(
    scratch: *mut gpu_ipc_scratch,
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
        with(process, scratch, |scratch| {
            Ok(scratch.read_at(name, offset, bytes)?)
        })
    })
}

/// Names a stream whose work touches the memory: the close waits for it.
///
/// Keeps: the stream, until that work is done. Thread: any. Blocks: while another call is in this
/// memory. Errors: `BAD_HANDLE`, `MISMATCH` for a stream of another device.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_scratch_used_on(
    scratch: *mut gpu_ipc_scratch,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        let open = process.get(stream)?;
        with(process, scratch, |scratch| {
            Ok(scratch.used_on(&open.stream)?)
        })
    })
}

/// Gives scratch memory up; it goes when the work on the named streams is done. Null is passed
/// over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_scratch_close(scratch: *mut gpu_ipc_scratch) -> i32 {
    call(|process| process.close(scratch))
}
