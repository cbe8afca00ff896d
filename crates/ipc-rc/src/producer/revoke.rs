//! Taking back: what was shared and is not claimed yet.
//!
//! A claim and a revocation meet at the slot's word, where one compare-and-swap wins. A ticket is
//! ended first, so that it gives no further lease, and then each lease that it gave is revoked in
//! its slot: those that were claimed stay.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gpu_api::{Error, ParticipantId, Result};

use crate::producer::blocks::block::Block;
use crate::producer::core::Core;
use crate::producer::roster::table::find;
use transport::shared::slot::Generation;
use transport::trace_point;
use transport::wire::descriptor::{Descriptor, Fields, GrantKind};
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{Granted, TicketId};

impl Core {
    /// Takes back what a descriptor of this session grants, as far as it is unclaimed, and says
    /// whether there was something to take back. With a block, only a grant of that block.
    pub(crate) fn revoke(
        &self,
        descriptor: &Descriptor,
        block: Option<&Arc<Block>>,
    ) -> Result<bool> {
        self.check_fork()?;
        let fields = descriptor.fields();
        if fields.session != self.facts.id {
            return Err(foreign(
                "the descriptor's session",
                fields.session,
                self.facts.id,
            ));
        }
        let Some(generation) = Generation::new(fields.generation) else {
            return Ok(false);
        };
        if self.is_altered(&fields, descriptor) {
            return Err(Error::bad_descriptor(
                "the keyed checksum",
                "not this session's",
                "what `share` wrote",
            ));
        }
        match fields.kind {
            GrantKind::Ticket => self.revoke_ticket(
                TicketId {
                    number: fields.slot,
                    generation,
                },
                block,
            ),
            GrantKind::Addressed => self.revoke_lease(&fields, generation, block),
        }
    }

    /// Says whether a descriptor was not sealed by this session for the participant that it names.
    /// The key of one that has gone is wiped, and nothing granted to it is left to take back.
    fn is_altered(&self, fields: &Fields, descriptor: &Descriptor) -> bool {
        let bytes = descriptor.as_bytes();
        match fields.kind {
            GrantKind::Ticket => self.ticket_sealer.open(bytes).is_none(),
            GrantKind::Addressed => find(&self.roster.peers(), fields.participant)
                .is_some_and(|peer| peer.sealer.open(bytes).is_none()),
        }
    }

    fn revoke_ticket(&self, ticket: TicketId, block: Option<&Arc<Block>>) -> Result<bool> {
        match self.tickets.revoke(ticket, block) {
            Ok(ended) => {
                let was_live = u64::from(ended.was_live);
                self.tallies.revoked.fetch_add(was_live, Ordering::Relaxed);
                let taken = self.take_back(&ended.given);
                // Its block may be the last hold on it.
                drop(ended.block);
                Ok(ended.was_live || taken > 0)
            }
            Err(of) => {
                let of = of.map_or_else(|| "a block that is gone".into(), |of| place(&of));
                let ours = block.map_or_else(String::new, |block| place(block));
                Err(foreign("the descriptor's block", of, ours))
            }
        }
    }

    fn revoke_lease(
        &self,
        fields: &Fields,
        generation: Generation,
        block: Option<&Arc<Block>>,
    ) -> Result<bool> {
        let peers = self.roster.peers();
        let Some(peer) = find(&peers, fields.participant) else {
            return Ok(false);
        };
        let lease = LeaseAddress {
            file: fields.file,
            slot: fields.slot,
            generation,
        };
        if let Some(block) = block {
            match peer.ledger.with_block(lease, |leased| {
                (!Arc::ptr_eq(leased, block)).then(|| place(leased))
            }) {
                None => return Ok(false),
                Some(Some(other)) => {
                    return Err(foreign("the descriptor's block", other, place(block)));
                }
                Some(None) => {}
            }
        }
        let taken = peer.ledger.revoke(lease);
        if taken.is_some() {
            self.tallies.revoked.fetch_add(1, Ordering::Relaxed);
            self.roster.tell_revoked(peer, lease);
            trace_point!("cancel");
            self.wakeups.announce_change();
        }
        Ok(taken.is_some())
    }

    /// Ends the broadcasts of a block, and takes back what they gave and is unclaimed.
    pub(crate) fn end_broadcasts(&self, block: &Arc<Block>) {
        let given = self.tickets.end_of(block);
        self.take_back(&given);
    }

    /// Takes back leases that are unclaimed, and counts them. Their slots tell: nothing outside the
    /// participant knows their numbers.
    fn take_back(&self, given: &[(ParticipantId, Granted)]) -> usize {
        let peers = self.roster.peers();
        let taken = given
            .iter()
            .filter_map(|(id, granted)| find(&peers, *id)?.ledger.revoke(granted.lease));
        let taken = taken.count();
        if taken > 0 {
            self.wakeups.announce_change();
        }
        taken
    }
}

fn foreign(what: &'static str, theirs: impl ToString, ours: impl ToString) -> Error {
    Error::mismatch(
        what,
        theirs,
        ours,
        "revoke with the session, and cancel with the block, that the descriptor was made by",
    )
}

fn place(block: &Block) -> String {
    format!("region {} offset {}", block.region().id().0, block.offset())
}
