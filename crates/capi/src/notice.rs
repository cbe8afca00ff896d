//! What sessions and participants tell their application.

use std::mem::MaybeUninit;

use crate::boundary::{call, out};
use crate::engine::{Departure, Notice, SessionNotice};
use crate::kinds::{gpu_ipc_participant, gpu_ipc_session};

/// There is no notice.
pub const GPU_IPC_NOTICE_NONE: u32 = 0;
/// Of a session: the participant is connected.
pub const GPU_IPC_NOTICE_JOINED: u32 = 1;
/// Of a session: the participant is gone, as `how` says, and holds nothing any more. The others and
/// the session go on. `gpu_ipc_session_participant_name` still knows its name.
pub const GPU_IPC_NOTICE_LEFT: u32 = 2;
/// Of a session: the session itself failed, not a participant: its thread panicked, and nothing more
/// can be shared.
pub const GPU_IPC_NOTICE_FAILED: u32 = 3;
/// Of a session: a `gpu_ipc_session_collect` returns adopted memory.
pub const GPU_IPC_NOTICE_TOKENS_RETURNED: u32 = 4;
/// Of both: what answered `DEADLINE` or `WOULD_BLOCK` without waiting may give another answer.
pub const GPU_IPC_NOTICE_TRY_AGAIN: u32 = 5;
/// Of a participant: the producer is dead or has closed its session; what is held stays readable.
pub const GPU_IPC_NOTICE_PRODUCER_GONE: u32 = 6;
/// Of a participant: the producer is closing its session; what was granted can still be claimed.
pub const GPU_IPC_NOTICE_CLOSING: u32 = 7;
/// Of a participant: the producer is short of memory and would like the region unmapped, which
/// happens when no block of it is held.
pub const GPU_IPC_NOTICE_PLEASE_UNMAP: u32 = 8;
/// Of a participant: a grant was taken back before it was claimed.
pub const GPU_IPC_NOTICE_REVOKED: u32 = 9;
/// Something that this version has no number for.
pub const GPU_IPC_NOTICE_OTHER: u32 = 10;

/// It said goodbye: it was closed, or its program ended in order.
pub const GPU_IPC_DEPARTURE_GOODBYE: u32 = 1;
/// Its process has ended without a goodbye, which the kernel proves.
pub const GPU_IPC_DEPARTURE_DIED: u32 = 2;
/// Its connection has ended without a goodbye, and its process lives.
pub const GPU_IPC_DEPARTURE_CONNECTION_LOST: u32 = 3;

/// Something that an application may want to know at once.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_notice {
    /// `GPU_IPC_NOTICE_...`, or a number of a later version.
    pub kind: u32,
    /// `GPU_IPC_DEPARTURE_...` of a participant that left, or a number of a later version; 0 for
    /// others.
    pub how: u32,
    /// The participant that joined or left, or the region to unmap; 0 for others.
    pub number: u64,
}

/// Takes the oldest notice of a session that was not read yet; `GPU_IPC_NOTICE_NONE` when there is
/// none. While there is one, `gpu_ipc_session_fd` is readable; an event loop that tells of changes
/// only reads until there is none.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_session_next_notice(
    session: *mut gpu_ipc_session,
    notice: Option<&mut MaybeUninit<gpu_ipc_notice>>,
) -> i32 {
    call(|process| {
        let notice = out(notice, "notice")?;
        let next = process.get(session)?.next_notice();
        let how = match next {
            Some(SessionNotice::Left { how, .. }) => match how {
                Departure::Goodbye => GPU_IPC_DEPARTURE_GOODBYE,
                Departure::Died => GPU_IPC_DEPARTURE_DIED,
                Departure::ConnectionLost => GPU_IPC_DEPARTURE_CONNECTION_LOST,
                _ => 0,
            },
            _ => 0,
        };
        let (kind, number) = match next {
            None => (GPU_IPC_NOTICE_NONE, 0),
            Some(SessionNotice::Joined { participant }) => (GPU_IPC_NOTICE_JOINED, participant.0),
            Some(SessionNotice::Left { participant, .. }) => (GPU_IPC_NOTICE_LEFT, participant.0),
            Some(SessionNotice::Failed) => (GPU_IPC_NOTICE_FAILED, 0),
            Some(SessionNotice::TokensReturned) => (GPU_IPC_NOTICE_TOKENS_RETURNED, 0),
            Some(SessionNotice::TryAgain) => (GPU_IPC_NOTICE_TRY_AGAIN, 0),
            Some(_) => (GPU_IPC_NOTICE_OTHER, 0),
        };
        notice.set(gpu_ipc_notice { kind, how, number });
        Ok(())
    })
}

/// Takes the oldest notice of a participant that was not read yet; `GPU_IPC_NOTICE_NONE` when there
/// is none. While there is one, `gpu_ipc_participant_fd` is readable; an event loop that tells of
/// changes only reads until there is none.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_participant_next_notice(
    participant: *mut gpu_ipc_participant,
    notice: Option<&mut MaybeUninit<gpu_ipc_notice>>,
) -> i32 {
    call(|process| {
        let notice = out(notice, "notice")?;
        let (kind, number) = match process.get(participant)?.next_notice() {
            None => (GPU_IPC_NOTICE_NONE, 0),
            Some(Notice::ProducerGone) => (GPU_IPC_NOTICE_PRODUCER_GONE, 0),
            Some(Notice::Closing) => (GPU_IPC_NOTICE_CLOSING, 0),
            Some(Notice::PleaseUnmap { region }) => (GPU_IPC_NOTICE_PLEASE_UNMAP, region.0),
            Some(Notice::Revoked { .. }) => (GPU_IPC_NOTICE_REVOKED, 0),
            Some(Notice::TryAgain) => (GPU_IPC_NOTICE_TRY_AGAIN, 0),
            Some(_) => (GPU_IPC_NOTICE_OTHER, 0),
        };
        notice.set(gpu_ipc_notice {
            kind,
            how: 0,
            number,
        });
        Ok(())
    })
}
