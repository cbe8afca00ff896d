//! Claiming: from a descriptor's bytes to a block.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_api::{Error, RegionId, StreamOp};

use crate::consumer::connection::asking::{Asking, Patience};
use crate::consumer::connection::link::{File, Link};
use crate::consumer::connection::questions::{Key, Look, No, Question};
use crate::consumer::leases::lease::{Held, Lease};
use crate::consumer::mappings::mapping_cache::NotMapped;
use crate::consumer::received_block::ReceivedBlock;
use crate::stream::Stream;
use channel::shared::counter_file::{TIMELINES, timeline_word};
use channel::shared::slot::{Claim, Generation};
use channel::shared::timeline;
use channel::trace_point;
use channel::wire::descriptor::{Fence, Fields, GrantKind, View};
use channel::wire::lease_address::LeaseAddress;
use channel::wire::message::{RefusalCode, TicketId};

/// How a claim waits for the producer's work on the block.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Wait<'a> {
    /// Not at all: the caller asks [`ReceivedBlock::state`].
    None,
    /// On this thread, under the claim's deadline.
    Host,
    /// On this stream of the participant's device, which counts as [used](ReceivedBlock::used_on): nothing is queued if
    /// the CPU sees that the work is done. The calling thread's default stream (handle 2) waits, but does not count: its
    /// later work has to be over before the block is dropped.
    Stream(&'a Stream),
}

/// Why a claim gave no block. Closed, so that callers handle each.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The call would have to wait, and was asked not to.
    #[error("the claim would have to wait; try again when the participant's descriptor is readable")]
    WouldBlock,
    /// The producer took the grant back: cancelled, not claimed in time, or it went away.
    #[error("the grant was taken back by its producer; ask it to share again")]
    Revoked,
    /// The descriptor was claimed before: a lease once, a ticket as often as it says. Who claimed it clones the block; others
    /// have it shared again.
    #[error(
        "the descriptor was claimed before, as often as it can be; clone the block that its claim gave, or have it shared again"
    )]
    AlreadyClaimed,
    /// The lease ended long ago, and its slot serves another.
    #[error("the descriptor is stale: its lease has ended; ask the producer to share again")]
    Stale,
    /// The producer is dead or has closed its session.
    #[error("the producer is gone; connect to its successor")]
    ProducerGone,
    /// The stream is being captured into a graph, which may run more than once.
    #[error("the stream is being captured into a graph; claim before the capture")]
    Capturing,
    /// This is a forked child of the process that connected.
    #[error("the participant belongs to the parent process; connect anew in the child")]
    Forked,
    /// The descriptor is not for this participant.
    #[error("{why}; {remedy}")]
    Refused {
        /// Both sides of what differs.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The descriptor is malformed, the deadline passed, or the driver or the system failed. Nothing is held. The same claim
    /// can be tried again, unless the driver refused the wait on a stream, which comes last: that ends the lease.
    #[error(transparent)]
    Backend(Error),
}

impl ClaimError {
    /// Returns a number that stays the same in every version, for other languages. What is an [`Error`] too has its number.
    pub fn code(&self) -> i32 {
        match self {
            ClaimError::WouldBlock => 101,
            ClaimError::Revoked => 102,
            ClaimError::AlreadyClaimed => 103,
            ClaimError::Stale => 104,
            ClaimError::Refused { .. } => 105,
            ClaimError::ProducerGone => 12,
            ClaimError::Forked => 14,
            ClaimError::Capturing => 15,
            ClaimError::Backend(error) => error.code(),
        }
    }
}

impl From<Error> for ClaimError {
    fn from(error: Error) -> ClaimError {
        match error {
            Error::ProducerGone { .. } => ClaimError::ProducerGone,
            Error::Capturing { .. } => ClaimError::Capturing,
            Error::Forked { .. } => ClaimError::Forked,
            error => ClaimError::Backend(error),
        }
    }
}

/// Where a block lies.
#[derive(Clone, Copy, Debug)]
struct SlotGroups {
    region: RegionId,
    offset: u64,
    len: u64,
}

impl SlotGroups {
    #[inline(always)]
    fn of(fields: &Fields) -> SlotGroups {
        SlotGroups { region: fields.region, offset: fields.offset, len: fields.len }
    }
}

impl Link {
    /// Claims what a descriptor grants.
    pub(crate) fn claim(
        self: &Arc<Link>,
        bytes: &[u8],
        wait: Wait<'_>,
        patience: Patience,
    ) -> Result<ReceivedBlock, ClaimError> {
        if self.guard.is_child() {
            return Err(ClaimError::Forked);
        }
        let view = View::decode(bytes)?;
        let fields = view.fields();
        if !self.is_ours(&fields) {
            return Err(self.not_ours(&view.fields()));
        }
        if self.is_gone() {
            return Err(ClaimError::ProducerGone);
        }
        self.check_stream(wait)?;
        let generation = Generation::new(fields.generation).ok_or(ClaimError::Stale)?;
        if fields.kind == GrantKind::Addressed {
            let lease = LeaseAddress { file: fields.file, slot: fields.slot, generation };
            return self.take(SlotGroups::of(&fields), lease, fields.fence, wait, patience);
        }
        self.claim_ticket(SlotGroups::of(&fields), TicketId { number: fields.slot, generation }, wait, patience)
    }

    #[inline(never)]
    fn claim_ticket(
        self: &Arc<Link>,
        part: SlotGroups,
        ticket: TicketId,
        wait: Wait<'_>,
        patience: Patience,
    ) -> Result<ReceivedBlock, ClaimError> {
        let (granted, mut asking) = self.redeem(ticket, patience)?;
        let taken = self.take(part, granted.lease, granted.fence, wait, patience);
        // After a deadline the same claim can be made again, and finds the answer if it was to be kept.
        asking.kept &= matches!(taken, Err(ClaimError::Backend(Error::Deadline { .. })));
        taken
    }

    /// Takes a lease of this participant's own, once the producer's work is done or waited for.
    // Inlined, so that the fields stay in registers: read back from memory as they were not written they cost more than an
    // atomic operation.
    #[inline(always)]
    fn take(
        self: &Arc<Link>,
        part: SlotGroups,
        entry: LeaseAddress,
        fence: Option<Fence>,
        wait: Wait<'_>,
        patience: Patience,
    ) -> Result<ReceivedBlock, ClaimError> {
        let file = self.await_file(entry, patience)?;
        if let Some(fence) = fence {
            self.check_fence(&fence)?;
            if self.waits_on_host(&fence, wait) {
                // Before the claim, so that a deadline that passes loses nothing.
                self.wait_on_host(&fence, patience)?;
            }
        }
        // The mapping too comes before the claim: a grant that is not claimed holds its region as well as one that is.
        let mapping = match self.mappings.enter(part.region) {
            Some(mapping) => mapping,
            None => match self.mappings.map(self, part.region, entry, patience) {
                Ok(mapping) => mapping,
                Err(NotMapped::NotLeased) => return Err(self.why_not_leased(entry)),
                Err(NotMapped::Failed(error)) => return Err(error.into()),
            },
        };
        let held = Held { mapping, entry };
        // `decode` has seen that the sum does not overflow.
        if part.offset + part.len > held.mapping.len() {
            let region = held.mapping.len();
            held.leave();
            return Err(beyond(part, region));
        }
        let record = file.record(entry.slot);
        match file.counters.slot(entry.slot).claim(entry.generation) {
            // The slot's word is what orders the record's.
            Claim::Held if record.is_held() => {
                held.leave();
                return Err(twice_granted());
            }
            Claim::Held => {}
            other => {
                held.leave();
                return Err(match other {
                    Claim::Revoked => ClaimError::Revoked,
                    Claim::AlreadyClaimed => ClaimError::AlreadyClaimed,
                    _ => ClaimError::Stale,
                });
            }
        }
        trace_point!("claim");
        // From here on the drop of the lease ends it.
        let block = ReceivedBlock::new(Lease::new(held, record, fence), part.offset, part.len);
        if let Wait::Stream(stream) = wait {
            let ahead = stream.ahead()?;
            block.note_use(ahead);
            if let Some(fence) = fence
                && self.look(&fence) == timeline::Fence::Pending
            {
                self.queue_wait(ahead, &fence)?;
                stream.follow(ahead)?;
            }
        }
        Ok(block)
    }

    /// Asks for what the claims of these descriptors will need, without waiting: one message for 64 tickets. Descriptors
    /// that need nothing, or are none, are passed over.
    pub(crate) fn prefetch(&self, descriptors: &[impl AsRef<[u8]>]) -> Result<(), ClaimError> {
        if self.guard.is_child() {
            return Err(ClaimError::Forked);
        }
        if self.is_gone() {
            return Err(ClaimError::ProducerGone);
        }
        self.ask_ahead(descriptors.iter().filter_map(|bytes| match self.keys_of(bytes.as_ref())? {
            (Some(ticket), _) => Some((ticket, Question::Ticket)),
            _ => None,
        }));
        Ok(())
    }

    /// Gives up what was asked for on behalf of a claim that would have had to wait.
    pub(crate) fn abandon(&self, bytes: &[u8]) {
        if self.guard.is_child() {
            return;
        }
        let Some((ticket, region)) = self.keys_of(bytes) else { return };
        let (mut table, now) = (self.table(), Instant::now());
        ticket.into_iter().chain([region]).for_each(|key| table.abandon(key, now));
        table.hand_over();
    }

    /// Names the questions that a descriptor's claim may ask: about its ticket, if it is one, and its region.
    fn keys_of(&self, bytes: &[u8]) -> Option<(Option<Key>, Key)> {
        let fields = View::decode(bytes).ok()?.fields();
        self.is_ours(&fields).then_some(())?;
        let ticket = || Some(TicketId { number: fields.slot, generation: Generation::new(fields.generation)? });
        let ticket = if fields.kind == GrantKind::Ticket { Some(Key::Ticket(ticket()?)) } else { None };
        Some((ticket, Key::Region(fields.region)))
    }

    /// Refuses a stream of another device, and one that is being captured.
    #[inline]
    pub(crate) fn check_stream(&self, wait: Wait<'_>) -> Result<(), ClaimError> {
        if let Wait::Stream(stream) = wait {
            stream.require(&self.gpu)?;
            if stream.is_capturing()? {
                return Err(ClaimError::Capturing);
            }
            // Made here, where a failure loses nothing.
            stream.ahead()?;
        }
        Ok(())
    }

    #[inline]
    fn is_ours(&self, fields: &Fields) -> bool {
        fields.backend == self.backend
            && fields.session == self.session
            && (fields.kind == GrantKind::Ticket || fields.participant == self.id)
    }

    #[cold]
    #[inline(never)]
    fn not_ours(&self, fields: &Fields) -> ClaimError {
        if fields.backend != self.backend {
            return Error::Mismatch {
                what: "the descriptor's backend",
                theirs: fields.backend.to_string(),
                ours: self.backend.to_string(),
                remedy: "claim with a participant of that backend",
            }
            .into();
        }
        if fields.session != self.session {
            return ClaimError::Refused {
                why: format!("the descriptor is of session {}, this participant's is {}", fields.session, self.session),
                remedy: "claim with a participant that is connected to that session",
            };
        }
        ClaimError::Refused {
            why: format!("the descriptor is for {}, this is {}", fields.participant, self.id),
            remedy: "claim where it is addressed to, or have it shared with this participant",
        }
    }

    /// Waits for the lease's counter file, if it was announced but has not arrived, and checks the slot.
    #[inline]
    fn await_file(&self, lease: LeaseAddress, patience: Patience) -> Result<&File, ClaimError> {
        match self.file(lease.file) {
            Some(file) if lease.slot < file.counters.slot_count() => Ok(file),
            _ => self.await_file_slowly(lease, patience),
        }
    }

    #[cold]
    #[inline(never)]
    fn await_file_slowly(&self, lease: LeaseAddress, patience: Patience) -> Result<&File, ClaimError> {
        let no_such = |what, got: u32, below: u64| -> ClaimError {
            Error::BadDescriptor { what, got: got.to_string(), must: format!("below {below}") }.into()
        };
        if lease.file as usize >= self.most_files() {
            return Err(no_such("counter file", lease.file, self.most_files() as u64));
        }
        let mut asking = Asking::new(self, Key::File(lease.file), Question::File, patience);
        let found = self.wait_for_answer(patience, |questions| match self.file(lease.file) {
            Some(file) => Some(Ok(file)),
            None if self.is_gone() => Some(Err(ClaimError::ProducerGone)),
            None => match asking.look(questions) {
                // The producer has no such file of this participant: the descriptor was altered.
                Look::Refused(No { code: RefusalCode::Lease, .. }, _) => {
                    let (got, must) = (lease.file.to_string(), "one of this participant's".into());
                    Some(Err(Error::BadDescriptor { what: "counter file", got, must }.into()))
                }
                Look::Refused(no, _) => Some(Err(ClaimError::Refused { why: no.why, remedy: no.code.remedy() })),
                _ => None,
            },
        });
        asking.kept &= found.is_none();
        let file = found.unwrap_or_else(|| Err(Error::Deadline { what: "a counter file" }.into()))?;
        let slots = file.counters.slot_count();
        if lease.slot >= slots {
            return Err(no_such("slot", lease.slot, slots.into()));
        }
        Ok(file)
    }

    fn check_fence(&self, fence: &Fence) -> Result<(), ClaimError> {
        if fence.file != 0 || fence.word >= TIMELINES {
            let got = format!("word {} of file {}", fence.word, fence.file);
            let must = format!("a word below {TIMELINES} of file 0");
            return Err(Error::BadDescriptor { what: "fence", got, must }.into());
        }
        Ok(())
    }

    pub(crate) fn wait_on_host(&self, fence: &Fence, patience: Patience) -> Result<(), ClaimError> {
        let mut pause = Duration::from_micros(1);
        for turn in 0u32.. {
            if self.look(fence) != timeline::Fence::Pending {
                return Ok(());
            }
            if patience.is_over() {
                self.watch_fence(*fence);
                return Err(Error::Deadline { what: "the producer's work on the block" }.into());
            }
            if turn < 100 {
                std::hint::spin_loop();
            } else {
                // A GPU's store wakes nobody, so there is nothing to wait for but time.
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Says whether a wait is this thread's: streams do not reach words that are not registered.
    fn waits_on_host(&self, fence: &Fence, wait: Wait<'_>) -> bool {
        let cannot_queue =
            || !self.gpu.caps().stream_waits || self.file(fence.file).is_none_or(|file| file.registered.is_none());
        matches!(wait, Wait::Host) || (matches!(wait, Wait::Stream(_)) && cannot_queue())
    }

    /// Waits for the producer's work on a block that is held.
    pub(crate) fn wait_after_claim(&self, fence: &Fence, wait: Wait<'_>, patience: Patience) -> Result<(), ClaimError> {
        if self.waits_on_host(fence, wait) {
            return self.wait_on_host(fence, patience);
        }
        if let Wait::Stream(stream) = wait
            && self.look(fence) == timeline::Fence::Pending
        {
            let ahead = stream.ahead()?;
            self.queue_wait(ahead, fence)?;
            stream.follow(ahead)?;
        }
        Ok(())
    }

    fn queue_wait(&self, stream: &Stream, fence: &Fence) -> Result<(), ClaimError> {
        let Some(base) = self.file(fence.file).and_then(|file| file.registered) else { return Ok(()) };
        let word = base.word(timeline_word(fence.word));
        // SAFETY: `stream_batch` asks for a live stream, which the caller keeps, and for a word in a registration that
        // outlives the operation: the block counts as used on the stream, so the link's files stay registered until
        // the wait is over.
        unsafe { self.gpu.backend().stream_batch(stream.raw(), &[StreamOp::WaitGeq { word, value: fence.value }]) }?;
        Ok(())
    }

    /// Says whether a lease can still be claimed.
    pub(crate) fn may_claim(&self, lease: LeaseAddress) -> bool {
        let file = self.file(lease.file).filter(|file| lease.slot < file.counters.slot_count());
        file.is_some_and(|file| file.counters.slot(lease.slot).peek(lease.generation) == Claim::Held)
    }

    /// The producer knows no such lease: the slot says why.
    fn why_not_leased(&self, entry: LeaseAddress) -> ClaimError {
        let Some(file) = self.file(entry.file) else { return ClaimError::Stale };
        match file.counters.slot(entry.slot).peek(entry.generation) {
            Claim::Revoked => ClaimError::Revoked,
            Claim::AlreadyClaimed => ClaimError::AlreadyClaimed,
            Claim::Stale => ClaimError::Stale,
            Claim::Held => ClaimError::Refused {
                why: "the descriptor's block does not lie in the region that it names".into(),
                remedy: "pass the bytes of `share` on whole and unchanged",
            },
        }
    }
}

#[cold]
#[inline(never)]
fn beyond(part: SlotGroups, region: u64) -> ClaimError {
    let got = format!("{} bytes at offset {} of {region}", part.len, part.offset);
    Error::BadDescriptor { what: "the block", got, must: "inside its region".into() }.into()
}

#[cold]
#[inline(never)]
fn twice_granted() -> ClaimError {
    ClaimError::Refused {
        why: "the descriptor's slot serves a lease that this participant still holds".into(),
        remedy: "connect anew: the producer, or the counter file, is not in order",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_says_what_to_do_and_no_number_changes() {
        let refused = ClaimError::Refused { why: "for another".into(), remedy: "claim it there" };
        let deadline = Error::Deadline { what: "the producer's answer" };
        for (error, code, text) in [
            (
                ClaimError::WouldBlock,
                101,
                "the claim would have to wait; try again when the participant's descriptor is readable",
            ),
            (ClaimError::Revoked, 102, "the grant was taken back by its producer; ask it to share again"),
            (
                ClaimError::AlreadyClaimed,
                103,
                "the descriptor was claimed before, as often as it can be; clone the block that its claim gave, or have it shared again",
            ),
            (ClaimError::Stale, 104, "the descriptor is stale: its lease has ended; ask the producer to share again"),
            (ClaimError::ProducerGone, 12, "the producer is gone; connect to its successor"),
            (ClaimError::Capturing, 15, "the stream is being captured into a graph; claim before the capture"),
            (ClaimError::Forked, 14, "the participant belongs to the parent process; connect anew in the child"),
            (refused, 105, "for another; claim it there"),
            (deadline.into(), 17, "the deadline passed while waiting for the producer's answer; ask again"),
        ] {
            assert_eq!((error.code(), error.to_string().as_str()), (code, text));
        }
    }
}
