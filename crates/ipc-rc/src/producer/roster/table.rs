//! The table of participants, by place.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use arc_swap::{ArcSwap, Guard};
use gpu_api::lock::Acquire;
use gpu_api::{Access, ParticipantId, RegionId, Result};

use crate::gone::Gone;
use crate::producer::roster::ledger_table::LedgerTable;
use crate::producer::roster::outbox::Outbox;
use crate::producer::roster::peer::Peer;
use crate::producer::roster::place::{MOST_PARTICIPANTS, place_of};
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::ToParticipant;

/// Participants by place.
pub(crate) type Peers = Vec<Option<Arc<Peer>>>;

/// A session's participants, and the way to them.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    peers: ArcSwap<Peers>,
    /// Held from the moment a welcome is on the wire until its participant is in the table.
    seating: Mutex<()>,
    pub ledgers: LedgerTable,
    pub outbox: Outbox,
}

impl Roster {
    /// Returns the table.
    pub fn peers(&self) -> Guard<Arc<Peers>> {
        self.peers.load()
    }

    /// Finds a participant.
    pub fn find(&self, id: ParticipantId) -> Option<Arc<Peer>> {
        find(&self.peers(), id).cloned()
    }

    /// Finds a participant that can be granted something; one that is being seated at this moment
    /// is waited for.
    pub fn addressee(&self, id: ParticipantId) -> Result<Arc<Peer>> {
        seated(&self.peers(), id).cloned().or_else(|_| {
            self.await_seating();
            seated(&self.peers(), id).cloned()
        })
    }

    /// Waits until one that has read its welcome is in the table.
    #[cold]
    pub fn await_seating(&self) {
        drop(self.seating.acquire());
    }

    /// Says whether a participant is connected that may claim.
    pub fn has_claimants(&self) -> bool {
        let peers = self.peers();
        peers
            .iter()
            .flatten()
            .any(|peer| !peer.gone.load(Ordering::Relaxed))
    }

    /// Finds a place for one more participant (thread).
    pub fn vacant_place(&self) -> Option<usize> {
        let peers = self.peers();
        let is_free = |&place: &usize| {
            peers.get(place).is_none_or(Option::is_none) && self.ledgers.is_vacant(place)
        };
        (0..MOST_PARTICIPANTS).find(is_free)
    }

    /// Puts a participant into the table if it could be welcomed; `welcome` never blocks (thread).
    ///
    /// A participant that has read its welcome can be shared with: a lookup that misses waits for
    /// this lock and looks again.
    ///
    /// # Errors
    ///
    /// Those of `welcome`.
    pub fn seat(&self, peer: &Arc<Peer>, welcome: impl FnOnce() -> Result<()>) -> Result<()> {
        let _seating = self.seating.acquire();
        welcome()?;
        peer.open_ledger();
        let place = place_of(peer.id);
        self.ledgers.note_use(place);
        self.peers.rcu(|peers| {
            let mut peers = Vec::clone(peers);
            peers.resize(peers.len().max(place + 1), None);
            peers[place] = Some(peer.clone());
            peers
        });
        Ok(())
    }

    /// Takes a participant out of the table, if it is there, with its unsent messages (thread).
    pub fn unseat(&self, peer: &Peer) {
        self.outbox.forget(peer.id);
        let place = place_of(peer.id);
        self.peers.rcu(|peers| {
            let mut peers = Vec::clone(peers);
            if let Some(seat) = peers
                .get_mut(place)
                .filter(|seat| seat.as_ref().is_some_and(|it| it.id == peer.id))
            {
                *seat = None;
            }
            peers
        });
    }

    /// Takes all of them out (thread).
    pub fn take_all(&self) -> Arc<Peers> {
        self.peers.swap(Arc::default())
    }

    /// Sends the messages kept for participants, as far as they read (thread).
    pub fn flush(&self) {
        if self.outbox.is_waiting() {
            self.peers()
                .iter()
                .flatten()
                .for_each(|peer| self.outbox.flush(peer));
        }
    }

    /// Asks every participant that maps such a region to unmap it once it is unused, and counts the
    /// requests.
    pub fn ask_to_unmap(&self, is_unwanted: impl Fn(RegionId) -> bool) -> usize {
        let asked = |peer: &Arc<Peer>| {
            let unwanted = peer
                .mapped()
                .into_iter()
                .filter(|&region| is_unwanted(region.with_access(Access::ReadWrite)));
            unwanted
                .filter(|&region| self.ask_to_unmap_one(peer, region))
                .count()
        };
        self.peers().iter().flatten().map(asked).sum()
    }

    /// Asks a participant to unmap a region once it does not use it, and says whether it could be
    /// asked. One that hung up cannot; its death will end the mapping.
    pub fn ask_to_unmap_one(&self, peer: &Peer, region: RegionId) -> bool {
        self.outbox
            .push(peer, &ToParticipant::PleaseUnmap { region }, None)
            .is_ok()
    }

    /// Tells a participant that a grant to it was taken back, if it can be told; otherwise its
    /// claim tells.
    pub fn tell_revoked(&self, peer: &Peer, lease: LeaseAddress) {
        let _ = self
            .outbox
            .push(peer, &ToParticipant::Revoked { lease }, None);
    }
}

/// Finds a participant.
pub(crate) fn find(peers: &[Option<Arc<Peer>>], id: ParticipantId) -> Option<&Arc<Peer>> {
    peers
        .get(place_of(id))?
        .as_ref()
        .filter(|peer| peer.id == id)
}

/// Finds a participant that can be granted something.
pub(crate) fn seated(peers: &[Option<Arc<Peer>>], id: ParticipantId) -> Result<&Arc<Peer>> {
    find(peers, id)
        .filter(|peer| !peer.gone.load(Ordering::Relaxed))
        .ok_or_else(|| Gone::Participant(id).into())
}
