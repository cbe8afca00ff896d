//! Participants: what a consumer opens.

use std::ffi::{c_char, c_int, c_void};
use std::io::ErrorKind;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::boundary::{array, call, copy_of, out_handle, text, timeout, value_or};
use crate::descriptor::gpu_ipc_descriptor;
use crate::engine::{Error, Participant, ParticipantBuilder, ReceivedBlock, Wait};
use crate::failure::{Failure, GPU_IPC_OK, Outcome, null};
use crate::kinds::{gpu_ipc_device, gpu_ipc_participant, gpu_ipc_received, gpu_ipc_stream};
use crate::opened::OpenStream;
use crate::sized::{self, sized_struct};

/// Wait for the producer's work on the calling thread, or queue the wait on the stream that is
/// given.
pub const GPU_IPC_WAIT: u32 = 0;
/// Do not wait for the producer's work: ask `gpu_ipc_received_state`, or call
/// `gpu_ipc_received_wait`.
pub const GPU_IPC_NO_WAIT: u32 = 1;

/// What a participant connects with; all zero is a good choice.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_connect_options {
    /// `sizeof(gpu_ipc_connect_options)`.
    pub size: usize,
    /// What it calls itself, for people; null for the command that this process runs. 32 bytes
    /// count.
    pub name: *const c_char,
    /// How long to wait for the producer's welcome, in nanoseconds: 0 for 30 seconds, below 0 for
    /// ever.
    pub timeout_ns: i64,
    /// The most bytes that stay mapped without being used; 0 for as many as the device has.
    pub cache_bytes: u64,
    /// The most regions that stay mapped without being used; 0 for 1,024.
    pub cache_regions: u64,
    /// 1 to map memory so that a write faults; `UNSUPPORTED` where the device cannot.
    pub read_only: u32,
    /// Zero.
    pub reserved: u32,
    /// How long to wait for a producer that does not listen yet, in nanoseconds: 0 not at all,
    /// below 0 for ever. `gpu_ipc_connect` alone.
    pub wait_for_producer_ns: i64,
}
sized_struct!(gpu_ipc_connect_options of 48 { size, name, timeout_ns, cache_bytes, cache_regions, read_only, reserved, wait_for_producer_ns });

/// Connects to a producer's session by the path of its socket, and starts the participant's thread.
///
/// Keeps: nothing; texts are copied. Thread: any. Blocks: for the producer to listen and for its
/// welcome, as the options say. Errors: `BAD_HANDLE`, `CONNECT`, `REFUSED` with the producer's reason, `DEADLINE`,
/// `MISMATCH` for another version, `UNSUPPORTED`, `INVALID`, `SYSTEM`.
///
/// # Safety
///
/// `path` ends with a zero byte; `options` is null, or has as many bytes as its `size` says and
/// good pointers in them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_connect(
    device: *mut gpu_ipc_device,
    path: *const c_char,
    options: *const gpu_ipc_connect_options,
    participant: Option<&mut MaybeUninit<*mut gpu_ipc_participant>>,
) -> i32 {
    call(|process| {
        let participant = out_handle(participant, "participant")?;
        // SAFETY: `text` asks for what this function asks for.
        let path = unsafe { text(path, "the path of a socket") }?;
        let builder = Participant::builder(process.get(device)?.clone());
        // SAFETY: `with_options` asks for what this function asks for.
        let (builder, patience) = unsafe { with_options(builder, options) }?;
        participant.set(process.open(connect_within(&builder, path, patience)?)?);
        Ok(())
    })
}

/// Joins a session by a connection that somebody else made: one end of a socket pair
/// (`SOCK_SEQPACKET`) whose other end the session accepted, or what another process passed on.
///
/// Every other copy of it must be closed, this one by the caller after the call: as long as one is
/// open this process' death is not proven.
///
/// Keeps: nothing; the library has a copy of its own. Thread: any. Blocks: as `gpu_ipc_connect`.
/// Errors: as `gpu_ipc_connect`.
///
/// # Safety
///
/// `connection` is open, and nobody closes it during the call; `options` is as for
/// `gpu_ipc_connect`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_connect_by(
    device: *mut gpu_ipc_device,
    connection: c_int,
    options: *const gpu_ipc_connect_options,
    participant: Option<&mut MaybeUninit<*mut gpu_ipc_participant>>,
) -> i32 {
    call(|process| {
        let participant = out_handle(participant, "participant")?;
        let builder = Participant::builder(process.get(device)?.clone());
        // SAFETY: `with_options` asks for what this function asks for.
        let (builder, _) = unsafe { with_options(builder, options) }?;
        // SAFETY: `copy_of` asks for what this function asks for.
        let copy = unsafe { copy_of(connection) }?;
        participant.set(process.open(builder.connect_by(copy)?)?);
        Ok(())
    })
}

/// Returns the number under which the producer shares with a participant; 0 after an error.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_participant_id(participant: *mut gpu_ipc_participant) -> u64 {
    value_or(0, |process| Ok(process.get(participant)?.id().0))
}

/// Returns the descriptor that is readable while the participant has a notice; -1 after an error.
///
/// It belongs to the participant and is good until that is closed: nobody else closes it.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_participant_fd(participant: *mut gpu_ipc_participant) -> c_int {
    value_or(-1, |process| Ok(process.get(participant)?.as_raw_fd()))
}

/// Claims what a descriptor grants.
///
/// `wait` says what happens to the producer's work on the block: `GPU_IPC_WAIT` waits for it, on
/// `stream` if there is one (which counts as used, so that the lease ends behind it), else on this
/// thread; `GPU_IPC_NO_WAIT` does not.
///
/// Keeps: the stream, until the work that the block was used for is done. Thread: any. Blocks: up
/// to `timeout_ns`, below 0 for ever: for the producer's answer when the descriptor is a ticket or
/// its region is not mapped yet, and for its work. Errors: `BAD_HANDLE`, `BAD_DESCRIPTOR`,
/// `NOT_ADDRESSEE`, `REVOKED`, `ALREADY_CLAIMED`, `STALE`, `PRODUCER_GONE`, `CAPTURING`,
/// `MISMATCH`, `FORKED`, `DRIVER`, and `DEADLINE`, after which the same claim can be made again.
///
/// # Safety
///
/// There are `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_claim(
    participant: *mut gpu_ipc_participant,
    descriptor: *const c_void,
    len: usize,
    wait: u32,
    stream: *mut gpu_ipc_stream,
    timeout_ns: i64,
    received: Option<&mut MaybeUninit<*mut gpu_ipc_received>>,
) -> i32 {
    let by = |participant: &Participant, bytes: &[u8], wait: Wait<'_>| {
        participant.claim(bytes, wait, timeout(timeout_ns))
    };
    // SAFETY: `claim` asks for what this function asks for.
    unsafe { claim(participant, descriptor, len, wait, stream, received, by) }
}

/// Claims what a descriptor grants if that needs no waiting; otherwise asks for what it needs and
/// answers `WOULD_BLOCK`. When it may have come, the participant has the notice
/// `GPU_IPC_NOTICE_TRY_AGAIN`.
///
/// Keeps: as `gpu_ipc_claim`; what was asked for, 30 seconds or until
/// `gpu_ipc_participant_abandon`. Thread: any. Blocks: no. Errors: `WOULD_BLOCK`, and those of
/// `gpu_ipc_claim` but `DEADLINE`.
///
/// # Safety
///
/// There are `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_try_claim(
    participant: *mut gpu_ipc_participant,
    descriptor: *const c_void,
    len: usize,
    wait: u32,
    stream: *mut gpu_ipc_stream,
    received: Option<&mut MaybeUninit<*mut gpu_ipc_received>>,
) -> i32 {
    // SAFETY: `claim` asks for what this function asks for.
    unsafe {
        claim(
            participant,
            descriptor,
            len,
            wait,
            stream,
            received,
            Participant::try_claim,
        )
    }
}

/// Claims several descriptors, with one question for up to 56 tickets among them.
///
/// Each gives a handle, or null, in `received`, and a code in `codes`, in the same order; one that
/// fails does not touch the others. The call returns `GPU_IPC_OK` if all were claimed, else the
/// code of the first that was not, of which the error's text tells.
///
/// Keeps: as `gpu_ipc_claim`. Thread: any. Blocks: as `gpu_ipc_claim`, all of them together.
/// Errors: as `gpu_ipc_claim`.
///
/// # Safety
///
/// There are `count` descriptors, and room for as many handles and codes; `codes` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_claim_many(
    participant: *mut gpu_ipc_participant,
    descriptors: *const gpu_ipc_descriptor,
    count: usize,
    wait: u32,
    stream: *mut gpu_ipc_stream,
    timeout_ns: i64,
    received: *mut *mut gpu_ipc_received,
    codes: *mut i32,
) -> i32 {
    call(|process| {
        // SAFETY: `array` asks for what this function asks for.
        let descriptors = unsafe { array(descriptors, count, "descriptors") }?;
        if received.is_null() && count > 0 {
            return Err(null("received"));
        }
        for at in 0..count {
            // SAFETY: `add` asks to stay inside: there is room for `count` handles.
            let place = unsafe { received.add(at) };
            // SAFETY: `write` asks for a place that may be written: as above.
            unsafe { place.write(std::ptr::null_mut()) };
        }
        let participant = process.get(participant)?;
        let stream = process.get_opt(stream)?;
        let bytes: Vec<&[u8; 192]> = descriptors
            .iter()
            .map(|descriptor| &descriptor.bytes)
            .collect();
        let claimed = participant.claim_many(
            &bytes,
            wait_of(wait, stream.as_deref())?,
            timeout(timeout_ns),
        );
        let mut first = None;
        for (at, claim) in claimed.into_iter().enumerate() {
            let opened = claim
                .map_err(Failure::from)
                .and_then(|block| Ok(process.open::<gpu_ipc_received>(block)?));
            let code = opened.as_ref().map_or_else(Failure::code, |_| GPU_IPC_OK);
            if !codes.is_null() {
                // SAFETY: `add` asks to stay inside: there is room for `count` codes.
                let place = unsafe { codes.add(at) };
                // SAFETY: `write` asks for a place that may be written: as above.
                unsafe { place.write(code) };
            }
            match opened {
                Ok(handle) => {
                    // SAFETY: `add` asks to stay inside: there is room for `count` handles.
                    let place = unsafe { received.add(at) };
                    // SAFETY: `write` asks for a place that may be written: as above.
                    unsafe { place.write(handle) };
                }
                Err(failure) => drop(first.get_or_insert(failure)),
            }
        }
        first.map_or(Ok(()), Err)
    })
}

/// Asks ahead for what the claims of these descriptors will need, and does not wait for the
/// answers: a claim within 30 seconds finds them there. What is no ticket is passed over.
///
/// Keeps: what was asked for, 30 seconds. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
/// `PRODUCER_GONE`, `FORKED`.
///
/// # Safety
///
/// There are `count` descriptors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_participant_prefetch(
    participant: *mut gpu_ipc_participant,
    descriptors: *const gpu_ipc_descriptor,
    count: usize,
) -> i32 {
    call(|process| {
        // SAFETY: `array` asks for what this function asks for.
        let descriptors = unsafe { array(descriptors, count, "descriptors") }?;
        let bytes: Vec<&[u8; 192]> = descriptors
            .iter()
            .map(|descriptor| &descriptor.bytes)
            .collect();
        Ok(process.get(participant)?.prefetch(&bytes)?)
    })
}

/// Gives up a claim that ran out of time or answered `WOULD_BLOCK`, or a prefetch. What a ticket gave
/// goes back to the producer, and its claim is spent; a block that was claimed stays. What was granted
/// to this participant by name can be claimed later.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
///
/// # Safety
///
/// There are `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_participant_abandon(
    participant: *mut gpu_ipc_participant,
    descriptor: *const c_void,
    len: usize,
) -> i32 {
    call(|process| {
        // SAFETY: `array` asks for what this function asks for.
        let bytes = unsafe { array(descriptor.cast::<u8>(), len, "descriptor") }?;
        process.get(participant)?.abandon(bytes);
        Ok(())
    })
}

/// Closes a participant and waits until the producer has noted that: every block that it received
/// is closed and its work done, everything is unmapped, and goodbye is said and heard. Null is
/// passed over.
///
/// The handle is closed whatever the call returns; after `DEADLINE` the rest goes on by itself.
///
/// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
/// `DEADLINE` with what is still held, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_participant_leave(
    participant: *mut gpu_ipc_participant,
    timeout_ns: i64,
) -> i32 {
    call(|process| {
        if participant.is_null() {
            return Ok(());
        }
        let leaving = process.get(participant)?.clone();
        process.close(participant)?;
        Ok(leaving.close(timeout(timeout_ns))?)
    })
}

/// Closes a participant; blocks that it received stay good. It says goodbye when the last of them
/// is closed and its work done. Null is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_participant_close(participant: *mut gpu_ipc_participant) -> i32 {
    call(|process| process.close(participant))
}

/// Claims by a call of the engine's.
///
/// # Safety
///
/// There are `len` bytes.
#[inline]
unsafe fn claim<E: Into<Failure>>(
    participant: *mut gpu_ipc_participant,
    descriptor: *const c_void,
    len: usize,
    wait: u32,
    stream: *mut gpu_ipc_stream,
    received: Option<&mut MaybeUninit<*mut gpu_ipc_received>>,
    by: impl FnOnce(&Participant, &[u8], Wait<'_>) -> Result<ReceivedBlock, E>,
) -> i32 {
    call(|process| {
        let received = out_handle(received, "received")?;
        // SAFETY: `array` asks for what this function asks for.
        let bytes = unsafe { array(descriptor.cast::<u8>(), len, "descriptor") }?;
        let participant = process.get(participant)?;
        let stream = process.get_opt(stream)?;
        let block =
            by(&participant, bytes, wait_of(wait, stream.as_deref())?).map_err(Into::into)?;
        received.set(process.open(block)?);
        Ok(())
    })
}

/// Reads how to wait.
#[inline]
pub(crate) fn wait_of(wait: u32, stream: Option<&OpenStream>) -> Outcome<Wait<'_>> {
    match (wait, stream) {
        (GPU_IPC_WAIT, Some(open)) => Ok(Wait::Stream(&open.stream)),
        (GPU_IPC_WAIT, None) => Ok(Wait::Host),
        (GPU_IPC_NO_WAIT, None) => Ok(Wait::None),
        (GPU_IPC_NO_WAIT, Some(_)) => Err(Failure::invalid(
            "the stream of a claim without waiting",
            "given",
            "null: nothing is queued on it",
        )),
        (other, _) => Err(Failure::invalid(
            "the way to wait",
            other.to_string(),
            "GPU_IPC_WAIT or GPU_IPC_NO_WAIT",
        )),
    }
}

/// # Safety
///
/// Null, or as many bytes as its `size` says and good pointers in them.
unsafe fn with_options(
    mut builder: ParticipantBuilder,
    options: *const gpu_ipc_connect_options,
) -> Outcome<(ParticipantBuilder, Option<Duration>)> {
    // SAFETY: `read` asks for what this function asks for.
    let options = unsafe { sized::read(options) }?;
    if !options.name.is_null() {
        // SAFETY: `text` asks for what this function asks for.
        builder = builder.name(unsafe { text(options.name, "the name of a participant") }?);
    }
    if options.timeout_ns != 0 {
        builder = builder.timeout(timeout(options.timeout_ns));
    }
    if options.cache_bytes != 0 || options.cache_regions != 0 {
        let or = |given: u64, else_: u64| if given == 0 { else_ } else { given };
        let regions = usize::try_from(or(options.cache_regions, 1024)).unwrap_or(usize::MAX);
        builder = builder.mapping_cache(or(options.cache_bytes, u64::MAX), regions);
    }
    builder = match options.read_only {
        0 => builder,
        1 => builder.read_only(),
        other => return Err(Failure::invalid("read_only", other.to_string(), "0 or 1")),
    };
    Ok((builder, timeout(options.wait_for_producer_ns)))
}

/// The time between two looks for a producer that does not listen yet.
const LOOK: Duration = Duration::from_millis(10);

/// Connects, and again while nothing listens there, until the time is over; `None` is for ever.
fn connect_within(
    builder: &ParticipantBuilder,
    path: &str,
    patience: Option<Duration>,
) -> Result<Participant, Error> {
    let begun = Instant::now();
    loop {
        let error = match builder.clone().connect(path) {
            Err(Error::Connect {
                source: Some(error),
                path,
                why,
                remedy,
            }) if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            ) =>
            {
                let source = Some(error);
                Error::Connect {
                    path,
                    why,
                    remedy,
                    source,
                }
            }
            done => return done,
        };
        let left = patience.map(|patience| patience.saturating_sub(begun.elapsed()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(error);
        }
        std::thread::sleep(left.unwrap_or(LOOK).min(LOOK));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::GPU_IPC_INVALID;

    #[test]
    fn ways_to_wait_that_make_no_sense_are_refused() {
        assert!(matches!(wait_of(GPU_IPC_WAIT, None), Ok(Wait::Host)));
        assert!(matches!(wait_of(GPU_IPC_NO_WAIT, None), Ok(Wait::None)));
        assert_eq!(
            wait_of(2, None).err().map(|failure| failure.code()),
            Some(GPU_IPC_INVALID)
        );
    }
}
