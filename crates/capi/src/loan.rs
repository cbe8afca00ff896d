//! Loans, which are blocks that are shared again and again, and grants that are taken back.

use std::mem::MaybeUninit;

use crate::block::{gpu_ipc_share_options, share_options, ticket};
use crate::boundary::{call, out, out_handle, put, timeout, value_or};
use crate::descriptor::gpu_ipc_descriptor;
use crate::engine::{After, ParticipantId, To};
use crate::failure::{Failure, Outcome, null};
use crate::kinds::{gpu_ipc_block, gpu_ipc_loan, gpu_ipc_session, gpu_ipc_stream};
use crate::opened::OpenLoan;

/// Lends a block: until the loan is released it is shared any number of times, with any addressee.
/// The contents may be read after what is queued on `after` at this moment, which is marked once;
/// null says that all work on the block is done.
///
/// The block may be closed: the loan keeps its memory. On the block a loan counts as one lease, with
/// all that was shared from it.
///
/// Keeps: the block's memory, and the stream until that work is done. Thread: any. Blocks: no.
/// Errors: `BAD_HANDLE`, `CLOSING`, `FORKED`, `CAPTURING`, `MISMATCH` for a stream of another
/// device, `DRIVER`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_lend(
    block: *mut gpu_ipc_block,
    after: *mut gpu_ipc_stream,
    loan: Option<&mut MaybeUninit<*mut gpu_ipc_loan>>,
) -> i32 {
    call(|process| {
        let loan = out_handle(loan, "loan")?;
        let block = process.get(block)?;
        let stream = process.get_opt(after)?;
        let after = stream
            .as_ref()
            .map_or(After::Done, |open| After::Stream(&open.stream));
        loan.set(process.open(OpenLoan::of(block.lend(after)?))?);
        Ok(())
    })
}

/// Grants a lease on what is lent to one participant, as `gpu_ipc_share` does.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: as `gpu_ipc_share`, and `INVALID` for a loan
/// that was released.
///
/// # Safety
///
/// `options` is null, or has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_loan_share(
    loan: *mut gpu_ipc_loan,
    participant: u64,
    options: *const gpu_ipc_share_options,
    descriptor: Option<&mut MaybeUninit<gpu_ipc_descriptor>>,
) -> i32 {
    let to = || Ok(To::Participant(ParticipantId(participant)));
    // SAFETY: `grant` asks for what this function asks for.
    unsafe { grant(loan, to, options, descriptor) }
}

/// Grants leases on what is lent to the first that ask, as `gpu_ipc_share_ticket` does. A ticket for
/// `GPU_IPC_EVERYBODY` is a broadcast: every participant claims it as often as it likes until the
/// loan is released. No time to live ends a broadcast of a loan unless `options` ask for one.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: as `gpu_ipc_loan_share`.
///
/// # Safety
///
/// `options` is null, or has as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_ipc_loan_share_ticket(
    loan: *mut gpu_ipc_loan,
    claims: u32,
    options: *const gpu_ipc_share_options,
    descriptor: Option<&mut MaybeUninit<gpu_ipc_descriptor>>,
) -> i32 {
    // SAFETY: `grant` asks for what this function asks for.
    unsafe { grant(loan, || ticket(claims), options, descriptor) }
}

/// Counts the leases of a loan that are granted or held, as `gpu_ipc_block_outstanding` does: 0
/// once it is released, `SIZE_MAX` after an error.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_loan_outstanding(loan: *mut gpu_ipc_loan) -> usize {
    value_or(usize::MAX, |process| {
        let lent = process.get(loan)?.lent();
        Ok(lent.map_or(0, |loan| loan.block().outstanding()))
    })
}

/// Ends a loan: it can be shared no more, its broadcasts end, and what they granted and is unclaimed
/// is taken back. What is held stays good for its holders. A second release does nothing.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_loan_release(loan: *mut gpu_ipc_loan) -> i32 {
    call(|process| {
        process.get(loan)?.release();
        Ok(())
    })
}

/// Waits until the loan is released, by this thread or another, and nothing holds or can claim what
/// was lent, so that it can be written again.
///
/// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
/// `DEADLINE`, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_loan_wait_released(loan: *mut gpu_ipc_loan, timeout_ns: i64) -> i32 {
    call(|process| Ok(process.get(loan)?.wait_released(timeout(timeout_ns))?))
}

/// Releases a loan, and closes it. Null is passed over.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_loan_close(loan: *mut gpu_ipc_loan) -> i32 {
    call(|process| process.close(loan))
}

/// Takes back what a descriptor of the session grants and is unclaimed; `revoked` says whether there
/// was something, and may be null. When a claim comes at the same moment, one of the two wins.
///
/// A ticket loses the claims that are left, and what it granted and is unclaimed. Leases that were
/// claimed stay.
///
/// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `BAD_DESCRIPTOR`, `MISMATCH` for
/// one of another session, `FORKED`.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_ipc_session_revoke(
    session: *mut gpu_ipc_session,
    descriptor: Option<&gpu_ipc_descriptor>,
    revoked: Option<&mut MaybeUninit<bool>>,
) -> i32 {
    call(|process| {
        let open = process.get(session)?;
        let descriptor = descriptor.ok_or_else(|| null("descriptor"))?.decode()?;
        put(revoked, open.session.revoke(&descriptor)?);
        Ok(())
    })
}

/// # Safety
///
/// `options` is null, or has as many bytes as its `size` says.
unsafe fn grant(
    loan: *mut gpu_ipc_loan,
    to: impl FnOnce() -> Outcome<To>,
    options: *const gpu_ipc_share_options,
    descriptor: Option<&mut MaybeUninit<gpu_ipc_descriptor>>,
) -> i32 {
    call(|process| {
        let descriptor = out(descriptor, "descriptor")?;
        // SAFETY: `share_options` asks for what this function asks for.
        let options = unsafe { share_options(options) }?;
        let lent = process
            .get(loan)?
            .lent()
            .ok_or_else(|| Failure::invalid("a loan", "released", "one that was not released"))?;
        let made = lent.share_with(to()?, &options)?;
        descriptor.set(gpu_ipc_descriptor {
            bytes: *made.as_bytes(),
        });
        Ok(())
    })
}
