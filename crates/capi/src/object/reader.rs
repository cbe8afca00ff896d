//! An object that is mapped.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

use crate::boundary::{call, out_handle, put, room, text};
use crate::engine::{Reader, Selector};
use crate::failure::Outcome;
use crate::kinds::{gpu_ipc_reader, gpu_ipc_scratch, gpu_ipc_stream, gpu_ipc_writer};
use crate::object::client::{identity_of, selector};
use crate::object::part::{
    GPU_IPC_NAME_BYTES, gpu_ipc_identity, gpu_ipc_part, name_into, user_into, write_part,
    write_part_at,
};
use crate::object::writer::with as with_writer;
use crate::process::Process;
use crate::sized::{self, sized_struct};

/// What a reader has mapped.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_reader_info {
    /// `sizeof(gpu_ipc_reader_info)`.
    pub size: usize,
    /// The epoch that the addresses reach.
    pub epoch: u64,
    /// The identity of the object that they reach.
    pub identity: gpu_ipc_identity,
    /// How many parts it has.
    pub part_count: u64,
    /// How many bytes of the user's own it has; `gpu_ipc_reader_user` copies them.
    pub user_len: u64,
    /// 1 while the reader sleeps.
    pub asleep: u32,
    /// Zero.
    pub reserved: u32,
    /// The object's name, with a zero byte behind.
    pub name: [c_char; GPU_IPC_NAME_BYTES],
}
sized_struct!(gpu_ipc_reader_info of 312 { size, epoch, identity, part_count, user_len, asleep, reserved, name });

/// Runs a call with a reader, one at a time.
fn with<T>(
    process: &'static Process,
    reader: *mut gpu_ipc_reader,
    run: impl FnOnce(&mut Reader) -> Outcome<T>,
) -> Outcome<T> {
    let open = process.get(reader)?;
    let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
    run(&mut open)
}

/// Describes the object that a reader has mapped.
///
/// Keeps: nothing. Thread: any. Blocks: while another call is in this reader. Errors: `BAD_HANDLE`,
/// `INVALID`.
///
/// # Safety
///
/// `info` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_reader_get_info(
    reader: *mut gpu_ipc_reader,
    info: *mut gpu_ipc_reader_info,
) -> i32 {
    call(|process| {
        let ours = with(process, reader, |reader| {
            let mut ours = sized::zeroed::<gpu_ipc_reader_info>();
            (ours.epoch, ours.identity) = (
                reader.epoch().0,
                gpu_ipc_identity {
                    bytes: reader.identity().0,
                },
            );
            ours.part_count = reader.layout().parts().len() as u64;
            ours.user_len = reader.layout().user().len() as u64;
            ours.asleep = u32::from(reader.is_asleep());
            name_into(&mut ours.name, reader.name());
            Ok(ours)
        })?;
        // SAFETY: `write` asks for what this function asks for.
        unsafe { sized::write(info, &ours) }
    })
}

/// Copies the bytes that the writer put beside the parts; as many as fit into `capacity`.
///
/// Keeps: nothing. Thread: any. Blocks: while another call is in this reader. Errors: `BAD_HANDLE`,
/// `INVALID`.
///
/// # Safety
///
/// There is room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_reader_user(
    reader: *mut gpu_ipc_reader,
    bytes: *mut c_void,
    capacity: usize,
) -> i32 {
    call(|process| {
        with(process, reader, |reader| {
            // SAFETY: `user_into` asks for what this function asks for.
            unsafe { user_into(reader.layout(), bytes, capacity) }
        })
    })
}

/// Describes a part and its address, which stays the same for the reader's life, at every epoch.
///
/// It is read-only: a kernel that writes there ends its context. Work on it is named with
/// `gpu_ipc_reader_used_on`; work on a stream that was not named, and that is not finished when the
/// reader advances, sleeps or is closed, is undefined behaviour.
///
/// Keeps: nothing. Thread: any. Blocks: while another call is in this reader. Errors: `BAD_HANDLE`,
/// `INVALID`.
///
/// # Safety
///
/// `name` ends with a zero byte; `part` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_reader_get_part(
    reader: *mut gpu_ipc_reader,
    name: *const c_char,
    part: *mut gpu_ipc_part,
) -> i32 {
    call(|process| {
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a part") }?;
        with(process, reader, |reader| {
            // SAFETY: `write_part` asks for what this function asks for.
            unsafe { write_part(reader.layout(), name, reader.device_ptr(name), part) }
        })
    })
}

/// Describes a part by its number: from 0 to below the count of parts, in the order of their names.
///
/// Keeps: nothing. Thread: any. Blocks: while another call is in this reader. Errors: `BAD_HANDLE`,
/// `INVALID`.
///
/// # Safety
///
/// `part` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_reader_get_part_at(
    reader: *mut gpu_ipc_reader,
    number: usize,
    part: *mut gpu_ipc_part,
) -> i32 {
    call(|process| {
        with(process, reader, |reader| {
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
    })
}

/// Copies `len` bytes of a part from `offset` on to the host.
///
/// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
/// `INVALID` beyond the part's end, `ASLEEP`, `POISONED`, `DRIVER`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte; there is room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_reader_read(
    reader: *mut gpu_ipc_reader,
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
        with(process, reader, |reader| {
            Ok(reader.read_at(name, offset, bytes)?)
        })
    })
}

/// Copies a part into the part of the same name of an object that is being filled, on the device.
///
/// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
/// `INVALID` for a part that either has not, of another length, or taken over; `MISMATCH` for a
/// writer on another device; `ASLEEP`, `POISONED`, `DRIVER`, `FORKED`.
///
/// # Safety
///
/// `name` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_reader_copy_part(
    reader: *mut gpu_ipc_reader,
    name: *const c_char,
    writer: *mut gpu_ipc_writer,
) -> i32 {
    call(|process| {
        // SAFETY: `text` asks for what this function asks for.
        let name = unsafe { text(name, "the name of a part") }?;
        with(process, reader, |reader| {
            with_writer(
                process,
                writer,
                |writer| Ok(reader.copy_part(name, writer)?),
            )
        })
    })
}

/// Copies the whole object into memory of this process alone, which may be written to: scratch
/// memory of the broker, which counts against its limits. The reader stays as it is.
///
/// Keeps: nothing. Thread: any. Blocks: for the broker and until the copy has finished. Errors:
/// `BAD_HANDLE`, `ASLEEP`, `POISONED`, `OUT_OF_MEMORY`, `REFUSED`, `DRIVER`, `DEADLINE`, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_reader_writable_copy(
    reader: *mut gpu_ipc_reader,
    scratch: Option<&mut MaybeUninit<*mut gpu_ipc_scratch>>,
) -> i32 {
    call(|process| {
        let scratch = out_handle(scratch, "scratch")?;
        let made = with(process, reader, |reader| Ok(reader.writable_copy()?))?;
        scratch.set(process.open(Mutex::new(made))?);
        Ok(())
    })
}

/// Names a stream whose work touches the object: advance, sleep and close wait for it.
///
/// Keeps: the stream, until the reader is closed. Thread: any. Blocks: while another call is in
/// this reader. Errors: `BAD_HANDLE`, `MISMATCH` for a stream of another device.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_reader_used_on(
    reader: *mut gpu_ipc_reader,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| {
        let open = process.get(stream)?;
        with(process, reader, |reader| Ok(reader.used_on(&open.stream)?))
    })
}

/// Moves to an epoch of the name, with 0 to the newest, at the same addresses; `moved` says whether
/// it was another one, and may be null.
///
/// Waits for the streams that were named. The caller launches nothing meanwhile that touches the
/// addresses; what was registered with them elsewhere (NCCL, RDMA) is registered anew.
///
/// Keeps: nothing. Thread: any. Blocks: for the broker and the streams. Errors: `BAD_HANDLE`;
/// `LAYOUT_DIFFERS`, `NOT_FOUND`, `ASLEEP`: nothing changed; `POISONED`: open the object anew;
/// `DRIVER`, `DEADLINE`, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_reader_advance(
    reader: *mut gpu_ipc_reader,
    epoch: u64,
    moved: Option<&mut MaybeUninit<bool>>,
) -> i32 {
    call(|process| {
        let did = with(process, reader, |reader| {
            Ok(reader.advance_to(&selector(reader.name(), epoch))?)
        })?;
        put(moved, did);
        Ok(())
    })
}

/// Moves to the object of an identity, as `gpu_ipc_reader_advance` does to an epoch.
///
/// Keeps: nothing. Thread: any. Blocks: as `gpu_ipc_reader_advance`. Errors: as
/// `gpu_ipc_reader_advance`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_reader_advance_identity(
    reader: *mut gpu_ipc_reader,
    identity: Option<&gpu_ipc_identity>,
    moved: Option<&mut MaybeUninit<bool>>,
) -> i32 {
    call(|process| {
        let to = Selector::Identity(identity_of(identity)?);
        let did = with(process, reader, |reader| Ok(reader.advance_to(&to)?))?;
        put(moved, did);
        Ok(())
    })
}

/// Gives the mapping up, and keeps the addresses; with `release` the lease too, so that a sole
/// reader's memory goes.
///
/// Keeps: nothing. Thread: any. Blocks: for the streams that were named. Errors: `BAD_HANDLE`,
/// `DRIVER`, `POISONED`, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_reader_sleep(reader: *mut gpu_ipc_reader, release: bool) -> i32 {
    call(|process| with(process, reader, |reader| Ok(reader.sleep(release)?)))
}

/// Maps the same object again, at the same addresses.
///
/// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `NOT_FOUND` when the
/// lease was released and the object has gone, `POISONED`, `DRIVER`, `DEADLINE`, `FORKED`; the
/// reader sleeps on.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_reader_wake(reader: *mut gpu_ipc_reader) -> i32 {
    call(|process| with(process, reader, |reader| Ok(reader.wake()?)))
}

/// Maps an epoch of the name, with 0 the newest, at the same addresses. One that does not sleep
/// advances.
///
/// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: as `gpu_ipc_reader_wake`, and
/// `LAYOUT_DIFFERS`; the reader sleeps on.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_reader_wake_to(reader: *mut gpu_ipc_reader, epoch: u64) -> i32 {
    call(|process| {
        with(process, reader, |reader| {
            Ok(reader.wake_to(&selector(reader.name(), epoch))?)
        })
    })
}

/// Closes a reader; its addresses are given back when the work on the named streams is done. Null
/// is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_reader_close(reader: *mut gpu_ipc_reader) -> i32 {
    call(|process| process.close(reader))
}
