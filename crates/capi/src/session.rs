//! Sessions: what a producer opens.

use gpu_ipc::Gone;
use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::time::Duration;

use crate::boundary::{
    array, call, copy_of, out, out_handle, put, put_text, text, timeout, value_or,
};
use crate::callback::Callback;
use crate::engine::{DevicePtr, Error, ParticipantId, Session};
use crate::failure::{Failure, null};
use crate::kinds::{gpu_ipc_block, gpu_ipc_device, gpu_ipc_session};
use crate::opened::OpenSession;
use crate::sized::{self, sized_struct};
use crate::stats::{gpu_ipc_collected, gpu_ipc_stats};
use crate::stream::gpu_ipc_callback;

/// What a session is opened with; all zero is a good choice.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_session_options {
    /// `sizeof(gpu_ipc_session_options)`.
    pub size: usize,
    /// The path to listen on; null for one in the runtime directory of this user.
    pub socket: *const c_char,
    /// Users that may connect besides this process' own.
    pub uids: *const u32,
    /// How many they are.
    pub uid_count: usize,
    /// Bytes of a region of the session's own memory; 0 for 32 MiB.
    pub region_bytes: u64,
    /// How long a grant can be claimed, in nanoseconds: 0 for 5 minutes, below 0 for ever.
    pub time_to_live_ns: i64,
    /// How long after the proof of a participant's death its blocks are kept from reuse, in
    /// nanoseconds; 0 for 100 ms.
    pub quarantine_ns: u64,
    /// The most leases of one participant, at least 8,192; 0 for 2,097,152.
    pub max_leases: u64,
    /// Not 0: the session's own memory grows in place where the device can, so that blocks lie
    /// across regions.
    pub grows_in_place: u64,
}
sized_struct!(gpu_ipc_session_options of 72 { size, socket, uids, uid_count, region_bytes, time_to_live_ns, quarantine_ns, max_leases, grows_in_place });

/// Opens a session: binds its socket and starts its thread.
///
/// Keeps: nothing; texts are copied. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID` when
/// somebody listens on the path already, `UNSUPPORTED` on a device that shares no memory, `SYSTEM`.
///
/// # Safety
///
/// `options` is null, or has as many bytes as its `size` says and good pointers in them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_session_open(
    device: *mut gpu_ipc_device,
    options: *const gpu_ipc_session_options,
    session: Option<&mut MaybeUninit<*mut gpu_ipc_session>>,
) -> i32 {
    call(|process| {
        let session = out_handle(session, "session")?;
        // SAFETY: `read` asks for what this function asks for.
        let options = unsafe { sized::read(options) }?;
        let mut builder = Session::builder(process.get(device)?.clone());
        if !options.socket.is_null() {
            // SAFETY: `text` asks for what this function asks for.
            builder = builder.socket(unsafe { text(options.socket, "the path of a socket") }?);
        }
        // SAFETY: `array` asks for what this function asks for.
        let uids = unsafe { array(options.uids, options.uid_count, "uids") }?;
        builder = builder.allow_uids(uids.iter().copied());
        if options.region_bytes > 0 {
            builder = builder.region_bytes(options.region_bytes);
        }
        if options.time_to_live_ns != 0 {
            builder = builder.time_to_live(timeout(options.time_to_live_ns));
        }
        if options.quarantine_ns > 0 {
            builder = builder.quarantine(Duration::from_nanos(options.quarantine_ns));
        }
        if options.max_leases > 0 {
            builder = builder.max_slots(options.max_leases);
        }
        builder = builder.grows_in_place(options.grows_in_place != 0);
        session.set(process.open(OpenSession::of(builder.open()?))?);
        Ok(())
    })
}

/// Writes the path of a session's socket, with a zero byte behind.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID` for a buffer that is
/// too small: 4,096 bytes are always enough.
///
/// # Safety
///
/// `buffer` has `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_session_path(
    session: *mut gpu_ipc_session,
    buffer: *mut c_char,
    capacity: usize,
) -> i32 {
    call(|process| {
        let open = process.get(session)?;
        let path = open.session.socket_path().to_str();
        let path =
            path.ok_or_else(|| Failure::invalid("the path of a socket", "not UTF-8", "UTF-8"))?;
        // SAFETY: `put_text` asks for what this function asks for.
        unsafe { put_text(path, buffer, capacity) }
    })
}

/// Allocates a block of `len` bytes, aligned to 256.
///
/// Before the device is asked for more, what leases have ended is collected; when it has no more,
/// participants are asked to unmap what they do not use.
///
/// Keeps: nothing. Thread: any. Blocks: in the driver, and up to 100 ms for participants when
/// memory is short; with `timeout_ns` above 0 up to that long for room. Errors: `BAD_HANDLE`,
/// `OUT_OF_MEMORY` with who holds it, `INVALID` for 0 bytes, `CLOSING`, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_alloc(
    session: *mut gpu_ipc_session,
    len: u64,
    timeout_ns: i64,
    block: Option<&mut MaybeUninit<*mut gpu_ipc_block>>,
) -> i32 {
    call(|process| {
        let block = out_handle(block, "block")?;
        let open = process.get(session)?;
        let made = match timeout(timeout_ns) {
            Some(time) if time.is_zero() => open.session.alloc(len)?,
            Some(time) => open.session.alloc_within(len, time)?,
            None => open.session.alloc_within(len, Duration::MAX)?,
        };
        block.set(process.open(made)?);
        Ok(())
    })
}

/// Takes in memory of another allocator, so that it can be shared: `len` bytes at `memory` that lie
/// in one allocation.
///
/// The memory stays allocated, and no other block overlaps it, until `returned` was called, or the
/// process ends. That is when the block was dropped, its last lease has ended, and nobody maps it.
///
/// Keeps: the memory, `returned` and `context`, until `returned` is called: once, inside a
/// `gpu_ipc_session_collect` or `gpu_ipc_session_shutdown` of this session, on the thread of that
/// call and with no lock held, so that it may call any function. A notice
/// `GPU_IPC_NOTICE_TOKENS_RETURNED` says that a collect would. Thread: any. Blocks: no. Errors:
/// `BAD_HANDLE`, `UNSUPPORTED` for memory that cannot be shared, with what to change; `INVALID`,
/// `CLOSING`, `FORKED`. After an error `returned` is not called.
///
/// # Safety
///
/// The memory stays allocated, and overlaps no other block, as said above; `returned` may be called
/// with `context` on the threads named.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_adopt(
    session: *mut gpu_ipc_session,
    memory: *mut c_void,
    len: u64,
    returned: gpu_ipc_callback,
    context: *mut c_void,
    block: Option<&mut MaybeUninit<*mut gpu_ipc_block>>,
) -> i32 {
    call(|process| {
        let block = out_handle(block, "block")?;
        let open = process.get(session)?;
        let function = returned.ok_or_else(|| null("returned"))?;
        let token = open.expect(Callback { function, context });
        // SAFETY: `adopt` asks that the memory stays allocated until a collect returned the token,
        // and that no other block overlaps it: so does this function, which tells of the token by
        // `returned`.
        let made = unsafe {
            open.session
                .adopt(DevicePtr(memory.addr() as u64), len, token)
        };
        let made = made
            .map_err(Failure::from)
            .and_then(|made| Ok(process.open(made)?));
        if made.is_err() {
            open.expect_no_more(token);
        }
        block.set(made?);
        Ok(())
    })
}

/// Looks for leases that have ended, gives back what nothing holds any more, and calls `returned`
/// of adopted memory that is its owner's again. The session's own thread collects too, but calls
/// nothing back.
///
/// Keeps: nothing. `collected` may be null. Thread: any. Blocks: no, but for the callbacks. Errors:
/// `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// `collected` is null, or has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_session_collect(
    session: *mut gpu_ipc_session,
    collected: *mut gpu_ipc_collected,
) -> i32 {
    call(|process| {
        let (blocks, bytes, returned) = process.get(session)?.collect();
        if collected.is_null() {
            return Ok(());
        }
        let ours = gpu_ipc_collected {
            size: 0,
            blocks,
            bytes,
            returned,
        };
        // SAFETY: `write` asks for what this function asks for.
        unsafe { sized::write(collected, &ours) }
    })
}

/// Fills in a session's counts; in a forked child they are 0.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// `stats` has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_session_get_stats(
    session: *mut gpu_ipc_session,
    stats: *mut gpu_ipc_stats,
) -> i32 {
    call(|process| {
        let ours = gpu_ipc_stats::of(&process.get(session)?.session.stats());
        // SAFETY: `write` asks for what this function asks for.
        unsafe { sized::write(stats, &ours) }
    })
}

/// Returns regions that nobody uses or maps to the driver, and says how many bytes.
///
/// Keeps: nothing. `bytes` may be null. Thread: any. Blocks: in the driver. Errors: `BAD_HANDLE`,
/// `DRIVER`, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_session_trim(
    session: *mut gpu_ipc_session,
    bytes: Option<&mut MaybeUninit<u64>>,
) -> i32 {
    call(|process| {
        let trimmed = process.get(session)?.session.trim()?;
        put(bytes, trimmed);
        Ok(())
    })
}

/// Lists the participants that are connected: as many numbers as fit into `capacity`, and how many
/// there are. With a `least` above 0 it waits until that many are connected.
///
/// Keeps: nothing. Thread: any. Blocks: with `least` above 0 up to `timeout_ns`, below 0 for ever.
/// Errors: `BAD_HANDLE`, `DEADLINE`, `INVALID`, `FORKED`.
///
/// # Safety
///
/// `participants` has room for `capacity` numbers, or is null and `capacity` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_session_participants(
    session: *mut gpu_ipc_session,
    least: usize,
    timeout_ns: i64,
    participants: *mut u64,
    capacity: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> i32 {
    call(|process| {
        let count = out(count, "count")?;
        if participants.is_null() && capacity > 0 {
            return Err(null("participants"));
        }
        let open = process.get(session)?;
        let connected = match least {
            0 => open.session.participants(),
            least => open
                .session
                .wait_for_participants(least, timeout(timeout_ns))?,
        };
        count.set(connected.len());
        for (at, participant) in connected.iter().take(capacity).enumerate() {
            // SAFETY: `add` asks to stay inside: `at` is below the capacity.
            let place = unsafe { participants.add(at) };
            // SAFETY: `write` asks for a place that may be written: inside the capacity.
            unsafe { place.write(participant.0) };
        }
        Ok(())
    })
}

/// Writes what a participant calls itself, or else the command that it runs, with a zero byte
/// behind: of one that is connected, or that one of the last 64 notices of the session said has
/// left.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `PARTICIPANT_GONE`, `INVALID` for
/// a buffer that is too small: 256 bytes are always enough.
///
/// # Safety
///
/// `buffer` has `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_session_participant_name(
    session: *mut gpu_ipc_session,
    participant: u64,
    buffer: *mut c_char,
    capacity: usize,
) -> i32 {
    call(|process| {
        let participant = ParticipantId(participant);
        let name = process.get(session)?.participant_name(participant);
        let name = name.ok_or_else(|| Error::from(Gone::Participant(participant)))?;
        // SAFETY: `put_text` asks for what this function asks for.
        unsafe { put_text(&name.replace('\0', " "), buffer, capacity) }
    })
}

/// Takes in a connection that reached the application in another way than through the session's
/// socket: one end of a socket pair (`SOCK_SEQPACKET`), or what another process passed on.
///
/// Every other copy of it must be closed, this one by the caller after the call: as long as one is
/// open the participant's death is not proven.
///
/// Keeps: nothing; the library has a copy of its own. Thread: any. Blocks: no. Errors:
/// `BAD_HANDLE`, `INVALID` for what is no such socket, `CLOSING`, `FORKED`, `SYSTEM`.
///
/// # Safety
///
/// `connection` is open, and nobody closes it during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_session_accept(
    session: *mut gpu_ipc_session,
    connection: c_int,
) -> i32 {
    call(|process| {
        let open = process.get(session)?;
        // SAFETY: `copy_of` asks for what this function asks for.
        let copy = unsafe { copy_of(connection) }?;
        Ok(open.session.accept(copy)?)
    })
}

/// Returns the descriptor that is readable while the session has a notice; -1 after an error.
///
/// It belongs to the session and is good until that is closed: nobody else closes it.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_session_fd(session: *mut gpu_ipc_session) -> c_int {
    value_or(-1, |process| Ok(process.get(session)?.session.as_raw_fd()))
}

/// Shares nothing more, closes the socket, and waits until nothing is held or the time is over.
/// Calls `returned` of adopted memory that came home. Whatever is held after that stays safe; ask
/// `gpu_ipc_session_get_stats` what it is.
///
/// Can be called again to wait longer. The handle stays open.
///
/// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
/// `DEADLINE` while something is held, with what and by whom; `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_session_shutdown(session: *mut gpu_ipc_session, timeout_ns: i64) -> i32 {
    call(|process| {
        let open = process.get(session)?;
        let report = open
            .session
            .shutdown(timeout(timeout_ns).unwrap_or(Duration::MAX));
        open.collect();
        match report.clean {
            true => Ok(()),
            false => Err(Failure::held(report.to_string())),
        }
    })
}

/// Closes a session: its socket goes with the last use of it. Blocks that were allocated stay good,
/// with this process and with others. Adopted memory whose `returned` was not called stays lent
/// until the process ends: shut the session down first. Null is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_session_close(session: *mut gpu_ipc_session) -> i32 {
    call(|process| process.close(session))
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::block::gpu_ipc_block_close;
    use crate::device::{GPU_IPC_HOST, gpu_ipc_device_close, gpu_ipc_device_open};
    use gpu_ipc::backend::Sharing;

    use crate::engine::BackendKind;
    use crate::failure::GPU_IPC_OK;
    use crate::process::Process;

    static RETURNED: AtomicUsize = AtomicUsize::new(0);

    /// Collects again, in the middle of a collect, and closes the session.
    unsafe extern "C" fn returned(context: *mut c_void) {
        RETURNED.fetch_add(1, Ordering::Relaxed);
        let session = context.cast::<gpu_ipc_session>();
        // SAFETY: `gpu_ipc_session_collect` asks for null, or a structure with its size.
        let code = unsafe { gpu_ipc_session_collect(session, null_mut()) };
        assert_eq!(code, GPU_IPC_OK);
        assert_eq!(gpu_ipc_session_close(session), GPU_IPC_OK);
    }

    #[test]
    fn adopted_memory_is_told_of_once_and_its_callback_may_call_anything() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = std::ffi::CString::new(dir.path().join("s").to_str().expect("UTF-8"))
            .expect("no zero byte");
        let mut options = sized::zeroed::<gpu_ipc_session_options>();
        (options.size, options.socket) = (size_of::<gpu_ipc_session_options>(), path.as_ptr());
        let (mut device, mut session, mut block) = (
            MaybeUninit::new(null_mut()),
            MaybeUninit::new(null_mut()),
            MaybeUninit::new(null_mut()),
        );
        assert_eq!(
            gpu_ipc_device_open(GPU_IPC_HOST, 0, Some(&mut device)),
            GPU_IPC_OK
        );
        // SAFETY: `assume_init` asks for a value: null from the start.
        let device = unsafe { device.assume_init() };
        // SAFETY: `gpu_ipc_session_open` asks for options with their size and good pointers.
        let opened =
            unsafe { gpu_ipc_session_open(device, &raw const options, Some(&mut session)) };
        assert_eq!(opened, GPU_IPC_OK);
        // SAFETY: `assume_init` asks for a value: null from the start.
        let session = unsafe { session.assume_init() };
        let gpu = Process::current()
            .expect("a process")
            .device(BackendKind::Host, 0)
            .expect("a device");
        let pool = gpu
            .backend()
            .alloc(gpu.device(), 4096, Sharing::Fd)
            .expect("memory");
        let memory = std::ptr::with_exposed_provenance_mut(pool.base.0 as usize);
        // SAFETY: `gpu_ipc_adopt` asks that the memory stays until `returned` was called: it is
        // freed below.
        let adopted = unsafe {
            gpu_ipc_adopt(
                session,
                memory,
                4096,
                Some(returned),
                session.cast(),
                Some(&mut block),
            )
        };
        assert_eq!(adopted, GPU_IPC_OK);
        // SAFETY: `assume_init` asks for a value: null from the start.
        let block = unsafe { block.assume_init() };
        assert_eq!(gpu_ipc_block_close(block), GPU_IPC_OK);
        let mut collected = sized::zeroed::<gpu_ipc_collected>();
        collected.size = size_of::<gpu_ipc_collected>();
        // SAFETY: `gpu_ipc_session_collect` asks for null, or a structure with its size.
        let code = unsafe { gpu_ipc_session_collect(session, &raw mut collected) };
        assert_eq!(code, GPU_IPC_OK);
        assert_eq!(
            (collected.returned, RETURNED.load(Ordering::Relaxed)),
            (1, 1)
        );
        // SAFETY: `free` asks for memory of `alloc` that nothing touches and nobody has open: it
        // was returned.
        unsafe { gpu.backend().free(pool.base) }.expect("the memory is free");
        assert_ne!(
            gpu_ipc_session_close(session),
            GPU_IPC_OK,
            "the callback closed it"
        );
        assert_eq!(gpu_ipc_device_close(device), GPU_IPC_OK);
    }
}
