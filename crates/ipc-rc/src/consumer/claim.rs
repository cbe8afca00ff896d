//! Claiming: from a descriptor's bytes to a block.

// Tests: `crates/ipc-rc/tests/altered.rs`, `tests/processes/ticket.rs`.

use std::sync::Arc;
use std::time::Instant;

use gpu_api::Error;

use crate::consumer::claim_error::ClaimError;
use crate::consumer::connection::asking::{Asking, Patience};
use crate::consumer::connection::files::File;
use crate::consumer::connection::link::Link;
use crate::consumer::connection::question::{Key, No, Question};
use crate::consumer::connection::questions::Look;
use crate::consumer::leases::holdings::{Held, Holdings};
use crate::consumer::leases::lease::Lease;
use crate::consumer::leases::release_queue::Ends;
use crate::consumer::mappings::mapping::Entered;
use crate::consumer::mappings::mapping_cache::NotMapped;
use crate::consumer::received_block::ReceivedBlock;
use crate::consumer::wait::Wait;
use transport::shared::counter_file::TIMELINES;
use transport::shared::slot::{Claim, Generation};
use transport::shared::timeline;
use transport::trace_point;
use transport::wire::descriptor::{Fence, Fields, GrantKind, View};
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{Extent, RefusalCode, TicketId};

impl Holdings {
    /// Claims what a descriptor grants.
    pub(crate) fn claim(
        self: &Arc<Holdings>,
        bytes: &[u8],
        wait: Wait<'_>,
        patience: Patience,
    ) -> Result<ReceivedBlock, ClaimError> {
        let link = &self.link;
        if link.guard.is_child() {
            return Err(ClaimError::Forked);
        }
        // Until it has opened, nothing that a carrier can write is acted on.
        let Some(view) = link.seals.open(bytes) else {
            return Err(link.why_not_opened(bytes));
        };
        let fields = view.fields();
        if link.is_gone() {
            return Err(ClaimError::ProducerGone);
        }
        link.check_stream(wait)?;
        let generation = Generation::new(fields.generation).ok_or(ClaimError::Stale)?;
        if fields.kind == GrantKind::Addressed {
            let lease = LeaseAddress {
                file: fields.file,
                slot: fields.slot,
                generation,
            };
            let place = Extent {
                region: fields.region,
                offset: fields.offset,
                len: fields.len,
            };
            return self.take(place, lease, fields.fence, wait, patience);
        }
        self.claim_ticket(
            TicketId {
                number: fields.slot,
                generation,
            },
            wait,
            patience,
        )
    }

    #[inline(never)]
    fn claim_ticket(
        self: &Arc<Holdings>,
        ticket: TicketId,
        wait: Wait<'_>,
        patience: Patience,
    ) -> Result<ReceivedBlock, ClaimError> {
        let mut asking = self.link.ask_for(ticket, patience);
        let mut last = None;
        loop {
            let granted = self.link.redeem(&mut asking, patience)?;
            // By the answer: any participant of the session could have written the descriptor.
            let taken = self.take(granted.place, granted.lease, granted.fence, wait, patience);
            // Claims of one broadcast that wait at once are told of one lease: one has it, and the
            // others ask for theirs. A producer that names the same lease again is broken.
            let used_up = matches!(taken, Err(ClaimError::AlreadyClaimed | ClaimError::Stale));
            if granted.again && used_up && last.replace(granted.lease) != Some(granted.lease) {
                asking.renew();
                continue;
            }
            // After a deadline the same claim can be made again, and finds the answer if it was to
            // be kept.
            asking.kept &= matches!(taken, Err(ClaimError::Backend(Error::Deadline { .. })));
            return taken;
        }
    }

    /// Takes a lease of this participant's own, once the producer's work is done or waited for.
    // Inlined, so that the fields stay in registers: read back from memory as they were not written
    // they cost more than an atomic operation.
    #[inline(always)]
    fn take(
        self: &Arc<Holdings>,
        part: Extent,
        entry: LeaseAddress,
        fence: Option<Fence>,
        wait: Wait<'_>,
        patience: Patience,
    ) -> Result<ReceivedBlock, ClaimError> {
        let link = &self.link;
        let file = link.await_file(entry, patience)?;
        if let Some(fence) = fence {
            link.check_fence(&fence)?;
            if link.waits_on_host(&fence, wait) {
                // Before the claim, so that a deadline that passes loses nothing.
                link.wait_on_host(&fence, patience)?;
            }
        }
        // The mapping too comes before the claim: a grant that is not claimed holds its region as
        // well as one that is.
        let mapping = match self.mappings.enter(part.region) {
            Some(mapping) => mapping,
            None => match self.mappings.map(self, part.region, entry, patience) {
                Ok(mapping) => mapping,
                Err(NotMapped::Failed(error)) => return Err(error.into()),
                Err(_) => return Err(link.why_not_leased(entry)),
            },
        };
        let held = Held { mapping, entry };
        // The sum does not overflow: the descriptor was checked, and so was a ticket's answer.
        if part.offset + part.len > held.mapping.len() {
            // By values that fit into registers: what is passed by address is kept in memory by
            // every claim.
            return self.take_across(
                (part.offset, part.len),
                held.mapping,
                entry,
                fence,
                wait,
                patience,
            );
        }
        self.take_held((part.offset, part.len), held, file, fence, wait)
    }

    /// Takes the lease of a block whose memory is held.
    #[inline(always)]
    fn take_held(
        self: &Arc<Holdings>,
        (offset, len): (u64, u64),
        held: Held,
        file: &File,
        fence: Option<Fence>,
        wait: Wait<'_>,
    ) -> Result<ReceivedBlock, ClaimError> {
        let (link, entry) = (&self.link, held.entry);
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
        let block = ReceivedBlock::new(Lease::new(held, record, fence), offset, len);
        if let Wait::Stream(stream) = wait {
            let ahead = stream.ahead()?;
            block.note_use(ahead);
            if let Some(fence) = fence
                && link.files.look(&fence) == timeline::Fence::Pending
            {
                link.queue_wait(ahead, &fence)?;
                stream.follow(ahead)?;
            }
        }
        Ok(block)
    }
}

impl Holdings {
    /// Takes the lease of a block that goes on behind its region. Apart, so that other claims keep
    /// their registers.
    #[cold]
    #[inline(never)]
    fn take_across(
        self: &Arc<Holdings>,
        (offset, len): (u64, u64),
        first: Entered<Holdings>,
        entry: LeaseAddress,
        fence: Option<Fence>,
        wait: Wait<'_>,
        patience: Patience,
    ) -> Result<ReceivedBlock, ClaimError> {
        match self
            .mappings
            .enter_across(self, first, offset + len, entry, patience)
        {
            Ok(mapping) => {
                let file = self
                    .link
                    .files
                    .get(entry.file)
                    .expect("the claim found it, and a link never loses one");
                self.take_held((offset, len), Held { mapping, entry }, file, fence, wait)
            }
            Err(NotMapped::Beyond(region)) => Err(beyond(offset, len, region)),
            Err(NotMapped::NotLeased) => Err(self.link.why_not_leased(entry)),
            Err(NotMapped::Failed(error)) => Err(error.into()),
        }
    }

    /// Withdraws the questions of a claim that would have had to wait.
    pub(crate) fn abandon(&self, bytes: &[u8]) {
        let link = &self.link;
        if link.guard.is_child() {
            return;
        }
        let Some(fields) = link.own_fields(bytes) else {
            return;
        };
        let regions = self
            .mappings
            .asked_across(fields.region, fields.offset.saturating_add(fields.len));
        let (mut table, now) = (link.table(), Instant::now());
        let keys = link
            .ticket_of(&fields)
            .into_iter()
            .chain(regions.into_iter().map(Key::Region));
        keys.for_each(|key| table.abandon(key, now));
        table.hand_over();
    }
}

impl Link {
    /// Asks for what the claims of these descriptors will need, without waiting: one message for 64
    /// tickets. Descriptors that need nothing, or are none, are passed over.
    pub(crate) fn prefetch(&self, descriptors: &[impl AsRef<[u8]>]) -> Result<(), ClaimError> {
        self.guard.check("this participant")?;
        if self.is_gone() {
            return Err(ClaimError::ProducerGone);
        }
        self.ask_ahead(descriptors.iter().filter_map(|bytes| {
            let ticket = self.ticket_of(&self.seals.open_ticket(bytes.as_ref())?.fields())?;
            Some((ticket, Question::Ticket))
        }));
        Ok(())
    }

    /// Reads a descriptor for this participant.
    fn own_fields(&self, bytes: &[u8]) -> Option<Fields> {
        Some(self.seals.open(bytes)?.fields())
    }

    /// Names the question about a descriptor's ticket, if it is one.
    fn ticket_of(&self, fields: &Fields) -> Option<Key> {
        let generation =
            Generation::new(fields.generation).filter(|_| fields.kind == GrantKind::Ticket)?;
        Some(Key::Ticket(TicketId {
            number: fields.slot,
            generation,
        }))
    }

    /// Says why bytes do not open. What they name is read for that alone.
    #[cold]
    #[inline(never)]
    fn why_not_opened(&self, bytes: &[u8]) -> ClaimError {
        let fields = match View::decode(bytes) {
            Ok(view) => view.fields(),
            Err(error) => return error.into(),
        };
        if fields.backend != self.facts.backend {
            return Error::mismatch(
                "the descriptor's backend",
                fields.backend,
                self.facts.backend,
                "claim with a participant of that backend",
            )
            .into();
        }
        if fields.session != self.facts.session {
            let (theirs, ours) = (fields.session, self.facts.session);
            return ClaimError::refused(
                format!("the descriptor is of session {theirs}, this participant's is {ours}"),
                "claim with a participant that is connected to that session",
            );
        }
        if fields.kind == GrantKind::Addressed && fields.participant != self.facts.id {
            let (theirs, ours) = (fields.participant, self.facts.id);
            return ClaimError::refused(
                format!("the descriptor is for {theirs}, this is {ours}"),
                "claim where it is addressed to, or have it shared with this participant",
            );
        }
        let device = self.facts.gpu.uuid();
        if fields.device != device {
            let must = format!("{device}, the session's");
            return Error::bad_descriptor("the device", fields.device, must).into();
        }
        // Not what it would have to be: that would be a way to forge.
        let (got, must) = ("not the producer's", "what the producer wrote");
        Error::bad_descriptor("the keyed checksum", got, must).into()
    }

    /// Waits for the lease's counter file, if it was announced but has not arrived, and checks the
    /// slot.
    #[inline(always)]
    fn await_file(&self, lease: LeaseAddress, patience: Patience) -> Result<&File, ClaimError> {
        match self.files.get(lease.file) {
            Some(file) if lease.slot < file.counters.slot_count() => Ok(file),
            _ => self.await_file_slowly(lease, patience),
        }
    }

    #[cold]
    #[inline(never)]
    fn await_file_slowly(
        &self,
        lease: LeaseAddress,
        patience: Patience,
    ) -> Result<&File, ClaimError> {
        let no_such = |what, got: u32, below: u64| -> ClaimError {
            Error::bad_descriptor(what, got, format!("below {below}")).into()
        };
        if lease.file as usize >= self.files.most() {
            return Err(no_such(
                "counter file",
                lease.file,
                self.files.most() as u64,
            ));
        }
        let mut asking = Asking::new(self, Key::File(lease.file), Question::File, patience);
        let found = self.wait_for_answer(patience, |questions| match self.files.get(lease.file) {
            Some(file) => Some(Ok(file)),
            None if self.is_gone() => Some(Err(ClaimError::ProducerGone)),
            None => match asking.look(questions) {
                // The producer has no such file of this participant: the descriptor was altered.
                Look::Refused(
                    No {
                        code: RefusalCode::Lease,
                        ..
                    },
                    _,
                ) => {
                    let (got, must) = (lease.file, "one of this participant's");
                    Some(Err(Error::bad_descriptor("counter file", got, must).into()))
                }
                Look::Refused(no, _) => Some(Err(no.into())),
                _ => None,
            },
        });
        asking.kept &= found.is_none();
        let file = found.unwrap_or_else(|| Err(Error::deadline("a counter file").into()))?;
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
            return Err(Error::bad_descriptor("fence", got, must).into());
        }
        Ok(())
    }

    /// The producer knows no such lease: the slot says why.
    fn why_not_leased(&self, entry: LeaseAddress) -> ClaimError {
        let Some(file) = self.files.get(entry.file) else {
            return ClaimError::Stale;
        };
        match file.counters.slot(entry.slot).peek(entry.generation) {
            Claim::Revoked => ClaimError::Revoked,
            Claim::AlreadyClaimed => ClaimError::AlreadyClaimed,
            Claim::Stale => ClaimError::Stale,
            Claim::Held => ClaimError::refused(
                "the descriptor's block does not lie in the region that it names",
                "pass the bytes of `share` on whole and unchanged",
            ),
        }
    }
}

#[cold]
#[inline(never)]
fn beyond(offset: u64, len: u64, region: u64) -> ClaimError {
    let got = format!("{len} bytes at offset {offset} of {region}");
    Error::bad_descriptor("the block", got, "inside its region").into()
}

#[cold]
#[inline(never)]
fn twice_granted() -> ClaimError {
    ClaimError::refused(
        "the descriptor's slot serves a lease that this participant still holds",
        "connect anew: the producer, or the counter file, is not in order",
    )
}
