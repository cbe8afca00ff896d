//! Blocks that this process produces.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::num::NonZeroU32;

use crate::boundary::{array, call, out, put, timeout, value_or};
use crate::contents;
use crate::descriptor::gpu_ipc_descriptor;
use crate::engine::{After, Claims, ParticipantId, SentBlock, ShareOptions, To};
use crate::failure::{Failure, Outcome, null};
use crate::kinds::{gpu_ipc_block, gpu_ipc_session, gpu_ipc_stream};
use crate::sized::{self, sized_struct};

/// How a lease is granted; all zero is a good choice.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_share_options {
    /// `sizeof(gpu_ipc_share_options)`.
    pub size: usize,
    /// How long the grant can be claimed, in nanoseconds: 0 for what the session was opened with,
    /// below 0 for ever.
    pub time_to_live_ns: i64,
    /// Bytes of the user's own that travel in the descriptor: shape, type, frame number.
    pub user: [u8; 64],
    /// 1: the block is granted to be read only. The participant maps it so that a write faults, on a
    /// GPU in a way that breaks the context, and what it forwards is read-only too. `UNSUPPORTED` for
    /// memory that other processes open by a handle, and on a device that maps nothing read-only.
    pub read_only: u32,
    /// Zero.
    pub reserved: u32,
}
sized_struct!(gpu_ipc_share_options of 80 { size, time_to_live_ns, user, read_only, reserved });

/// In place of a number of claims: every participant that asks, as often as there are, as long as
/// the block is not closed.
pub const GPU_IPC_EVERYBODY: u32 = 0xFFFF_FFFF;

/// One of several grants. All zero is a grant to no participant, which is refused.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_grant {
    /// The block.
    pub block: *mut gpu_ipc_block,
    /// The participant's number; 0 for a ticket.
    pub participant: u64,
    /// How often the ticket can be claimed, or `GPU_IPC_EVERYBODY`; 0 for a participant.
    pub claims: u32,
    /// Zero.
    pub reserved: u32,
}

/// Grants a lease on a block to one participant, and writes the descriptor by which it is claimed:
/// plain bytes for any transport.
///
/// The contents may be read after what is queued on `after` at this moment; null says that all work
/// on the block is done. `options` may be null.
///
/// Keeps: the stream, until that work is done. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
/// `PARTICIPANT_GONE`, `CLOSING`, `FORKED`, `CAPTURING`, `MISMATCH` for a stream of another device,
/// `EXHAUSTED`, `DRIVER`. After an error nothing is granted.
///
/// # Safety
///
/// `options` is null, or has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_share(
    block: *mut gpu_ipc_block,
    participant: u64,
    after: *mut gpu_ipc_stream,
    options: *const gpu_ipc_share_options,
    descriptor: Option<&mut MaybeUninit<gpu_ipc_descriptor>>,
) -> i32 {
    // SAFETY: `grant` asks for what this function asks for.
    unsafe {
        grant(
            block,
            || Ok(To::Participant(ParticipantId(participant))),
            after,
            options,
            descriptor,
        )
    }
}

/// Grants leases on a block to the first that ask: a ticket that can be claimed `claims` times,
/// each time by another participant; with `GPU_IPC_EVERYBODY` by all, as long as the block is not
/// closed.
///
/// Otherwise as `gpu_ipc_share`. Each claim asks the producer.
///
/// Keeps: the stream, until that work is done. Thread: any. Blocks: no. Errors: as `gpu_ipc_share`,
/// and `INVALID` for 0 claims.
///
/// # Safety
///
/// `options` is null, or has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_share_ticket(
    block: *mut gpu_ipc_block,
    claims: u32,
    after: *mut gpu_ipc_stream,
    options: *const gpu_ipc_share_options,
    descriptor: Option<&mut MaybeUninit<gpu_ipc_descriptor>>,
) -> i32 {
    // SAFETY: `grant` asks for what this function asks for.
    unsafe { grant(block, || ticket(claims), after, options, descriptor) }
}

/// Shares several blocks of a session after the same work, each with the participant that it names:
/// one fence for each participant. The descriptors come in the order of the grants.
///
/// Keeps: the stream, until that work is done. Thread: any. Blocks: no. Errors: as `gpu_ipc_share`,
/// `MISMATCH` for a block of another session, and `INVALID` for a grant to no participant. After an
/// error nothing is granted.
///
/// # Safety
///
/// There are `count` grants, and room for as many descriptors; `options` is null, or has as many
/// bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_share_many(
    session: *mut gpu_ipc_session,
    grants: *const gpu_ipc_grant,
    count: usize,
    after: *mut gpu_ipc_stream,
    options: *const gpu_ipc_share_options,
    descriptors: *mut gpu_ipc_descriptor,
) -> i32 {
    call(|process| {
        // SAFETY: `array` asks for what this function asks for.
        let grants = unsafe { array(grants, count, "grants") }?;
        if descriptors.is_null() && count > 0 {
            return Err(null("descriptors"));
        }
        // SAFETY: `share_options` asks for what this function asks for.
        let options = unsafe { share_options(options) }?;
        let open = process.get(session)?;
        let stream = process.get_opt(after)?;
        let after = stream
            .as_ref()
            .map_or(After::Done, |open| After::Stream(&open.stream));
        let blocks = grants
            .iter()
            .map(|grant| process.get(grant.block))
            .collect::<Outcome<Vec<_>>>()?;
        let pairs = blocks
            .iter()
            .zip(grants)
            .map(|(block, grant)| {
                if grant.reserved != 0 {
                    let why = "its field `reserved` is not zero".to_owned();
                    return Err(sized::later("gpu_ipc_grant", why));
                }
                Ok((&**block, whom(grant.participant, grant.claims)?))
            })
            .collect::<Outcome<Vec<(&SentBlock, To)>>>()?;
        let made = open.session.share_many(&pairs, after, &options)?;
        for (at, descriptor) in made.iter().enumerate() {
            // SAFETY: `add` asks to stay inside: there are as many descriptors as grants.
            let place = unsafe { descriptors.add(at) };
            // SAFETY: `write` asks for a place that may be written: room for `count`.
            unsafe {
                place.write(gpu_ipc_descriptor {
                    bytes: *descriptor.as_bytes(),
                })
            };
        }
        Ok(())
    })
}

/// Takes back an unclaimed grant of the block, as `gpu_ipc_session_revoke` does; `cancelled` says
/// whether there was something, and may be null.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `BAD_DESCRIPTOR`, `MISMATCH` for
/// one of another session or block, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_block_cancel(
    block: *mut gpu_ipc_block,
    descriptor: Option<&gpu_ipc_descriptor>,
    cancelled: Option<&mut MaybeUninit<bool>>,
) -> i32 {
    call(|process| {
        let block = process.get(block)?;
        let did = block.cancel(&descriptor.ok_or_else(|| null("descriptor"))?.decode()?)?;
        put(cancelled, did);
        Ok(())
    })
}

/// Returns the address of a block's first byte in this process; null after an error. On the host
/// backend the CPU may use it.
///
/// Streams whose queued work touches the block are named with `gpu_ipc_block_used_on` before it is
/// closed, unless the block was shared after that work.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_block_ptr(block: *mut gpu_ipc_block) -> *mut c_void {
    value_or(std::ptr::null_mut(), |process| {
        Ok(std::ptr::with_exposed_provenance_mut(
            process.get(block)?.device_ptr().0 as usize,
        ))
    })
}

/// Returns a block's bytes; 0 after an error.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_block_len(block: *mut gpu_ipc_block) -> u64 {
    value_or(0, |process| Ok(process.get(block)?.len()))
}

/// Names a stream of this process whose queued work touches the block: it is not used again before
/// that is done.
///
/// Keeps: the stream, until that work is done. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
/// `INVALID` for the per-thread default stream, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_block_used_on(
    block: *mut gpu_ipc_block,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    call(|process| Ok(process.get(block)?.used_on(&process.get(stream)?.stream)?))
}

/// Waits until no lease on the block is outstanding, so that it can be written again. With 0 it
/// asks; when the answer is no, the session's notice `GPU_IPC_NOTICE_TRY_AGAIN` says when to ask
/// again.
///
/// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
/// `DEADLINE`, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_block_wait_released(block: *mut gpu_ipc_block, timeout_ns: i64) -> i32 {
    call(|process| Ok(process.get(block)?.wait_released(timeout(timeout_ns))?))
}

/// Counts the leases that are granted or held; `SIZE_MAX` after an error, so that a block is not
/// taken for free. A ticket that can still be claimed counts as one, an unlimited one as none.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_block_outstanding(block: *mut gpu_ipc_block) -> usize {
    value_or(usize::MAX, |process| Ok(process.get(block)?.outstanding()))
}

/// Copies `len` bytes into a block from `offset` on, after the work that is queued on the stream.
///
/// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
/// `INVALID` beyond the block's end, `MISMATCH` for a stream of another device, `CAPTURING`,
/// `DRIVER`.
///
/// # Safety
///
/// There are `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_block_write(
    block: *mut gpu_ipc_block,
    offset: u64,
    bytes: *const c_void,
    len: usize,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    // SAFETY: `write` asks for what this function asks for.
    unsafe { contents::write(block, offset, bytes, len, stream) }
}

/// Copies `len` bytes of a block from `offset` on to the host, after the work that is queued on the
/// stream.
///
/// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: as
/// `gpu_ipc_block_write`; then the bytes are as they were.
///
/// # Safety
///
/// There is room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_block_read(
    block: *mut gpu_ipc_block,
    offset: u64,
    bytes: *mut c_void,
    len: usize,
    stream: *mut gpu_ipc_stream,
) -> i32 {
    // SAFETY: `read` asks for what this function asks for.
    unsafe { contents::read(block, offset, bytes, len, stream) }
}

/// Closes a block: nobody can be granted a lease on it any more. It is given back when its last
/// lease has ended and the work on it is done. Null is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_block_close(block: *mut gpu_ipc_block) -> i32 {
    call(|process| process.close(block))
}

/// # Safety
///
/// `options` is null, or has as many bytes as its `size` says.
#[inline]
unsafe fn grant(
    block: *mut gpu_ipc_block,
    to: impl FnOnce() -> Outcome<To>,
    after: *mut gpu_ipc_stream,
    options: *const gpu_ipc_share_options,
    descriptor: Option<&mut MaybeUninit<gpu_ipc_descriptor>>,
) -> i32 {
    call(|process| {
        let descriptor = out(descriptor, "descriptor")?;
        // SAFETY: `share_options` asks for what this function asks for.
        let options = unsafe { share_options(options) }?;
        let block = process.get(block)?;
        let stream = process.get_opt(after)?;
        let after = stream
            .as_ref()
            .map_or(After::Done, |open| After::Stream(&open.stream));
        let to = to()?;
        // By reference, so that its bytes are copied once.
        match block.share_with(to, after, &options) {
            Ok(ref made) => {
                descriptor.set(gpu_ipc_descriptor {
                    bytes: *made.as_bytes(),
                });
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    })
}

/// # Safety
///
/// Null, or as many bytes as its `size` says.
#[inline]
pub(crate) unsafe fn share_options(given: *const gpu_ipc_share_options) -> Outcome<ShareOptions> {
    if given.is_null() {
        return Ok(ShareOptions::default());
    }
    // SAFETY: `read` asks for what this function asks for.
    let given = unsafe { sized::read(given) }?;
    let options = ShareOptions::default().user(given.user);
    let options = match given.read_only {
        0 => options,
        1 => options.read_only(),
        other => return Err(Failure::invalid("read_only", other.to_string(), "0 or 1")),
    };
    Ok(match given.time_to_live_ns {
        0 => options,
        time => options.time_to_live(timeout(time)),
    })
}

/// Reads an addressee. Zeros, which a program has that forgot one or asked a handle that is none
/// for its number, are none.
pub(crate) fn whom(participant: u64, claims: u32) -> Outcome<To> {
    match (participant, claims) {
        (0, claims) => ticket(claims),
        (participant, 0) => Ok(To::Participant(ParticipantId(participant))),
        (participant, claims) => Err(Failure::invalid(
            "the claims of a grant",
            format!("{claims} beside participant {participant}"),
            "0 for one participant, whose lease is claimed once",
        )),
    }
}

#[inline]
pub(crate) fn ticket(claims: u32) -> Outcome<To> {
    match NonZeroU32::new(claims) {
        None => Err(Failure::invalid(
            "the addressee of a grant",
            "participant 0 with 0 claims",
            "a participant's number, or the claims of a ticket: 1 or more, or GPU_IPC_EVERYBODY",
        )),
        Some(NonZeroU32::MIN) => Ok(To::Ticket(Claims::Once)),
        Some(NonZeroU32::MAX) => Ok(To::Ticket(Claims::Unlimited)),
        Some(claims) => Ok(To::Ticket(Claims::Times(claims))),
    }
}
