//! An object that is being filled.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::sync::PoisonError;

use crate::boundary::{array, call, out, text, timeout};
use crate::engine::Writer;
use crate::failure::{Failure, Outcome};
use crate::kinds::{gpu_ipc_stream, gpu_ipc_writer};
use crate::object::part::{gpu_ipc_identity, gpu_ipc_part, write_part};
use crate::process::Process;

/// Runs a call with a writer, one at a time.
pub(super) fn with<T>(
    process: &'static Process,
    writer: *mut gpu_ipc_writer,
    run: impl FnOnce(&mut Writer) -> Outcome<T>,
) -> Outcome<T> {
    let open = process.get(writer)?;
    let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
    run(open.as_mut().ok_or_else(committed)?)
}

fn committed() -> Failure {
    Failure::handle("a writer was committed; create the object anew".into())
}

/// Describes a part and its address. The GPU, and on the host backend the CPU, may write there
/// until the commit.
///
/// Work on it is named with `gpu_ipc_writer_used_on` or at the commit: work on a stream that was
/// not named is undefined behaviour.
///
/// Keeps: nothing. Thread: any. Blocks: while another call is in this writer. Errors: `BAD_HANDLE`,
/// `INVALID`.
///
/// # Safety
///
/// `name` ends with a zero byte; `part` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_writer_get_part(
    writer: *mut gpu_ipc_writer,
    name: *const c_char,
    part: *mut gpu_ipc_part,
) -> i32 {
    call(|process| {
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a part") }?;
        with(process, writer, |writer| {
            // SAFETY: `write_part` asks for what this function asks for.
            unsafe { write_part(writer.layout(), name, writer.device_ptr(name), part) }
        })
    })
}

/// Writes the identity of the object, by which `gpu_ipc_object_outcome` tells of its commit.
///
/// Keeps: nothing. Thread: any. Blocks: while another call is in this writer. Errors: `BAD_HANDLE`,
/// `INVALID`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_writer_identity(
    writer: *mut gpu_ipc_writer,
    identity: Option<&mut MaybeUninit<gpu_ipc_identity>>,
) -> i32 {
    call(|process| {
        let identity = out(identity, "identity")?;
        let bytes = with(process, writer, |writer| Ok(writer.identity().0))?;
        identity.set(gpu_ipc_identity { bytes });
        Ok(())
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
pub unsafe extern "C" fn gpu_ipc_writer_write(
    writer: *mut gpu_ipc_writer,
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
        with(process, writer, |writer| {
            Ok(writer.write_part(name, offset, bytes)?)
        })
    })
}

/// Names a stream whose work touches the object: the commit waits for it.
///
/// Keeps: the stream, until that work is done. Thread: any. Blocks: while another call is in this
/// writer. Errors: `BAD_HANDLE`, `MISMATCH` for a stream of another device.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_writer_used_on(
    writer: *mut gpu_ipc_writer,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        let open = process.get(stream)?;
        with(process, writer, |writer| Ok(writer.used_on(&open.stream)?))
    })
}

/// Commits an object: it becomes visible, whole, once all that is queued on these streams, and on
/// those that were named before, has finished. The handle is closed, whatever the call returns.
///
/// With `epoch` it waits until the object is visible, and says its epoch. Without it returns at
/// once: the commit goes on, and `gpu_ipc_object_outcome` tells what became of it.
///
/// Keeps: the streams, until that work is done. Thread: any. Blocks: with `epoch` up to
/// `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`; `CAPTURING` and `MISMATCH` for a stream:
/// nothing is committed; `CONFLICT`, `WRITER_LOST`, `REFUSED`; `DEADLINE`: the commit goes on.
///
/// # Safety
///
/// There are `count` streams.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_writer_commit(
    writer: *mut gpu_ipc_writer,
    streams: *const *mut gpu_ipc_stream,
    count: usize,
    timeout_ns: i64,
    epoch: Option<&mut MaybeUninit<u64>>,
) -> i32 {
    call(|process| {
        // SAFETY: `array` asks for what this function asks for.
        let given = unsafe { array(streams, count, "streams") }?;
        let open = process.get(writer)?;
        let taken = open.lock().unwrap_or_else(PoisonError::into_inner).take();
        process.close(writer)?;
        let taken = taken.ok_or_else(committed)?;
        let streams = given
            .iter()
            .map(|&stream| process.get(stream))
            .collect::<Outcome<Vec<_>>>()?;
        let streams: Vec<_> = streams.iter().map(|open| &open.stream).collect();
        let commit = taken.commit(&streams)?;
        let Some(epoch) = epoch else { return Ok(()) };
        let committed = match timeout(timeout_ns) {
            Some(time) => commit.wait_for(time)?,
            None => commit.wait()?,
        };
        epoch.write(committed.0);
        Ok(())
    })
}

/// Closes a writer that was not committed: nobody ever sees the object. Null is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_writer_close(writer: *mut gpu_ipc_writer) -> i32 {
    call(|process| process.close(writer))
}
