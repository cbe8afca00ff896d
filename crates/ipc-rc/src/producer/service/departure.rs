//! The way out: proofs of death, burials, and participants that wait for what streams of ours owe
//! to their words.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use gpu_api::ParticipantId;

use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::notice::{Departure, SessionNotice};
use crate::producer::roster::peer::Peer;
use crate::producer::service::state::Service;
use transport::os::socket::has_hung_up;
use transport::server::Proof;
use transport::trace_point;

impl Service {
    /// Acts on the tokens of the proof of death: grants nothing more to one that is lost, and begins
    /// the quarantine of one that is dead.
    pub(super) fn note_departure(&mut self, id: ParticipantId, proof: Proof) {
        let Some(peer) = self.core.roster.find(id) else {
            return;
        };
        if proof.exited || proof.hung_up {
            self.close(&peer);
        }
        let mut leaving = peer.leaving();
        // A process closes its sockets before its pidfd becomes readable; the event of the hang-up may
        // be read after that.
        leaving.is_outlived |= proof.exited && !proof.hung_up && !has_hung_up(&peer.seat.socket);
        if proof.hung_up {
            leaving.hung_up.get_or_insert_with(Instant::now);
        }
        if proof.is_complete() && leaving.proven.is_none() {
            leaving.proven = Some(Instant::now());
            trace_point!("death");
            tracing::debug!(participant = %id, pid = peer.seat.pid, "a participant is proven dead; the quarantine begins");
        }
    }

    /// Ends what the dead held, once the proof is complete and the quarantine over; and what the
    /// departed left.
    pub(super) fn bury(&mut self) {
        let now = Instant::now();
        let peers = self.core.roster.peers();
        for peer in peers.iter().flatten() {
            let (dead, hung_up, how) = {
                let mut leaving = peer.leaving();
                if leaving.proven.is_some() && peer.shows_life() {
                    // The driver's own sign is the last: the quarantine begins when it is gone.
                    leaving.proven = Some(now);
                }
                let quarantine = self.core.facts.quarantine_of(peer, &leaving);
                let over = leaving
                    .proven
                    .is_some_and(|proven| now.duration_since(proven) >= quarantine);
                let proof = peer.seat.proof();
                (
                    over,
                    proof.hung_up,
                    leaving.departure(proof, now, || peer.seat.is_exiting()),
                )
            };
            // Nobody speaks for it any more, and it has nothing: it needs no proof of its death,
            // and may not be dead. Whether it is becomes known in a moment.
            if hung_up && self.core.has_nothing(peer) {
                if let Some(how) = how {
                    self.let_go(peer);
                    self.tell_departure(peer, how);
                }
            } else if dead {
                let mut out = ReclaimedBlocks::new();
                peer.ledger.bury(&mut out);
                let grave = out.len();
                self.let_go(peer);
                // One that said goodbye has had its good end: only its mappings went with the
                // process.
                self.core.tallies.deaths.fetch_add(
                    u64::from(how != Some(Departure::Goodbye)),
                    Ordering::Relaxed,
                );
                if self.core.facts.gpu.caps().shared_context {
                    // In a shared context a process' death proves nothing about its GPU work.
                    out.drain().for_each(|block| block.leak());
                } else {
                    self.core.retire(&mut out);
                }
                trace_point!("bury");
                tracing::debug!(participant = %peer.id, leases = grave, "a dead participant's leases are ended");
                self.tell_departure(peer, how.unwrap_or(Departure::Died));
            }
        }
    }

    /// Tells the application who is gone, and how.
    fn tell_departure(&self, peer: &Peer, how: Departure) {
        self.core.notices.push(SessionNotice::Left {
            participant: peer.id,
            name: peer.name.clone(),
            how,
        });
        self.core.wakeups.announce_change();
    }

    /// The one way out: a participant's watches, kept messages, place and mappings go, and it stays
    /// among those that leave until no stream of ours owes it a word. Also for one whose welcome
    /// failed, which was in no table.
    pub(super) fn let_go(&mut self, peer: &Arc<Peer>) {
        peer.gone.store(true, Ordering::Relaxed);
        let unmapped = peer.forget_mappings();
        self.unmapped |= !unmapped.is_empty();
        self.core.memory.note_unpinned(&unmapped);
        self.door.forget(peer.id, &peer.seat);
        peer.words.close();
        peer.words.want_proof();
        self.core.fences.forget(peer.id);
        self.core
            .tallies
            .corrupt_words
            .fetch_add(peer.ledger.corrupt_words() as u64, Ordering::Relaxed);
        self.core.deposits.table().forget(peer.id);
        self.core.roster.unseat(peer);
        peer.ledger.leave();
        self.asked.retain(|id| *id != peer.id);
        self.leaving.push(peer.clone());
    }

    /// Lets go of participants into whose words no stream of ours writes any more.
    pub(super) fn leave(&mut self) {
        if self.leaving.is_empty() {
            return;
        }
        let core = &self.core;
        self.ticket_streams.settle(&core.fences);
        core.fences.look_at_proofs();
        let broken = self.broken;
        let (gone, stay) = std::mem::take(&mut self.leaving)
            .into_iter()
            .partition(|peer| broken || !peer.words.are_owed());
        self.leaving = stay;
        let gone: Vec<Arc<Peer>> = gone;
        for peer in gone {
            self.unregister(peer);
        }
        self.core
            .settles
            .store(!self.leaving.is_empty(), Ordering::Relaxed);
    }

    /// Ends the registrations of a participant that is gone, then drops its counter files.
    pub(super) fn unregister(&mut self, peer: Arc<Peer>) {
        let gpu = self.core.facts.gpu.clone();
        self.blocking.run(move || {
            for start in peer.take_registrations() {
                // SAFETY: `unregister_words` asks for
                // - a registration that was not ended: `take_registrations` gives each once;
                // - no unfinished operation on its words: a participant is let go only when every
                //   value that was queued for it has been reached, or can never be because the
                //   context is broken.
                if let Err(error) = unsafe { gpu.backend().unregister_words(start) } {
                    tracing::warn!(%error, "a counter file stays registered, and so mapped");
                    std::mem::forget(peer);
                    return;
                }
            }
        });
    }

    /// While a participant may wait for a word that a stream of ours has yet to write, asks whether
    /// the context still works. Once it does not, the waiting participants are told.
    pub(super) fn watch_context(&mut self) {
        let peers = self.core.roster.peers();
        let awaited = || {
            peers
                .iter()
                .flatten()
                .filter(|peer| peer.words.are_awaited())
        };
        if awaited().next().is_none() {
            return;
        }
        if !self.broken {
            let Err(error) = self.probe.is_passed() else {
                return;
            };
            self.broken = true;
            tracing::error!(
                %error,
                "the producer's context is broken; participants that wait for its streams are told"
            );
        }
        awaited().for_each(|peer| peer.words.poison());
    }
}
