//! What participants say, and the answers: regions, tickets, forwarding, reports.

use std::os::fd::AsFd;
use std::sync::Arc;

use arrayvec::ArrayVec;
use gpu_api::{Access, Error, Export, ParticipantId, RegionId};

use crate::producer::peer::Peer;
use crate::producer::service::Service;
use crate::producer::share::To;
use crate::producer::ticket::Claims;
use channel::os::socket::{self, ReceiveOutcome};
use channel::trace_point;
use channel::wire::lease_address::LeaseAddress;
use channel::wire::message::{
    Heir, MOST_BYTES, MOST_TICKETS, Outcome, Place, RefusalCode, TicketAnswer, TicketId, ToParticipant, ToProducer,
};

/// Packets read from one participant before the others get their turn.
const PACKETS_A_TURN: usize = 64;

/// Questions about tickets that are kept for one participant until there is room for their fences: more than its threads
/// can be waiting for, and few enough that one who only asks costs nothing.
const MOST_CROWDED: usize = 64;

impl Service {
    pub(super) fn hear(&mut self, key: u64, id: ParticipantId) {
        let Some(peer) = self.peer(id) else { return };
        for _ in 0..PACKETS_A_TURN {
            let mut bytes = [0; MOST_BYTES];
            let mut fds = Vec::new();
            let said = match socket::receive(peer.socket.as_fd(), &mut bytes, &mut fds) {
                Ok(ReceiveOutcome::Empty) => return,
                Ok(ReceiveOutcome::HungUp) => None,
                Ok(ReceiveOutcome::Packet(len)) => match ToProducer::decode(&bytes[..len], fds.len()) {
                    Ok(message) => Some(message),
                    Err(error) => {
                        tracing::warn!(participant = %id, %error, "a participant speaks nonsense; it is granted nothing more");
                        self.close(&peer);
                        continue;
                    }
                },
                Err(error) => {
                    tracing::warn!(participant = %id, %error, "a participant cannot be read");
                    self.close(&peer);
                    return;
                }
            };
            match said {
                None => {
                    self.note(key, id, |peer| peer.proof().hung_up = true);
                    return;
                }
                Some(ToProducer::MapRegion { request, region, access, lease }) => {
                    self.map(&peer, request, region, access, lease);
                }
                Some(ToProducer::ClaimTickets { request, tickets }) => self.redeem(&peer, request, tickets),
                Some(ToProducer::Forward { request, lease, heir, user }) => {
                    self.forward(&peer, request, lease, heir, user);
                }
                Some(ToProducer::Inspect { request, from }) => {
                    self.tell(&peer, &self.core.report(request, from));
                }
                Some(ToProducer::TakeSnapshot { request }) => {
                    let why = "a participant has no right to a snapshot; ask on a connection of its own".into();
                    self.tell(&peer, &ToParticipant::Declined { request, code: RefusalCode::Protocol, why });
                }
                Some(ToProducer::Unmapped { region }) => {
                    let unmapped = peer.note_unmapping(region);
                    self.unmapped |= unmapped.is_some();
                    self.core.note_unpinned(unmapped.as_slice());
                    self.core.announce_change();
                }
                Some(ToProducer::Bye) => {
                    peer.proof().farewell = true;
                    self.close(&peer);
                }
                Some(ToProducer::Hello { .. }) => self.close(&peer),
            }
        }
    }

    /// Tells a participant how to map a region, and notes that it may. The lease that it names proves its right.
    fn map(&self, peer: &Arc<Peer>, request: u64, region: RegionId, access: Access, lease: LeaseAddress) {
        let mut noted = false;
        // Under the ledger's lock, so that the pin is taken while the block is certainly in use.
        let leased = peer.ledger.with_block(lease, |block| {
            let leased = block.region();
            (leased.id() == region).then(|| {
                noted = peer.note_mapping(leased);
                leased.clone()
            })
        });
        let leased = leased.flatten();
        let answer = match &leased {
            None => ToParticipant::NoRegion {
                request,
                region,
                code: RefusalCode::Region,
                why: "no lease of yours lies in this region; it was revoked or has ended".into(),
            },
            Some(leased) => {
                let place = match leased.export() {
                    _ if peer.local => Place::Local(leased.base()),
                    Export::Handle(handle) => Place::Handle(*handle),
                    Export::Fd(_) => Place::Fd,
                };
                ToParticipant::Region {
                    request,
                    region,
                    len: leased.len(),
                    device: self.core.gpu.uuid(),
                    access,
                    place,
                }
            }
        };
        let fd = match (&answer, leased.as_ref().map(|leased| leased.export())) {
            (ToParticipant::Region { place: Place::Fd, .. }, Some(Export::Fd(fd))) => Some(fd.as_fd()),
            _ => None,
        };
        if let Err(error) = self.core.outbox.push(peer, &answer, fd) {
            tracing::warn!(participant = %peer.id, %error, "an answer is lost");
            // It may have mapped the region after an earlier question.
            if noted {
                peer.note_unmapping(region);
            }
        }
    }

    /// Answers claims of tickets; all of them again at a later turn when one finds no room for its fence. What was
    /// granted meanwhile is answered the same then.
    fn redeem(&mut self, peer: &Arc<Peer>, request: u64, tickets: ArrayVec<TicketId, MOST_TICKETS>) {
        let mut answers = ArrayVec::new();
        for &ticket in &tickets {
            match self.core.redeem(peer, ticket) {
                Some(outcome) => answers.push(TicketAnswer { ticket, outcome }),
                None if self.crowded.iter().filter(|(id, ..)| *id == peer.id).count() < MOST_CROWDED => {
                    self.crowded.push((peer.id, request, tickets));
                    return;
                }
                None => answers.push(TicketAnswer { ticket, outcome: Outcome::Limit }),
            }
        }
        self.tell(peer, &ToParticipant::Tickets { request, answers });
    }

    pub(super) fn redeem_crowded(&mut self) {
        for (id, request, tickets) in std::mem::take(&mut self.crowded) {
            if let Some(peer) = self.peer(id) {
                self.redeem(&peer, request, tickets);
            }
        }
    }

    fn forward(&mut self, peer: &Arc<Peer>, request: u64, lease: LeaseAddress, heir: Heir, user: [u8; 64]) {
        let to = match heir {
            Heir::Participant(id) => To::Participant(id),
            Heir::Ticket(None) => To::Ticket(Claims::Unlimited),
            Heir::Ticket(Some(claims)) => To::Ticket(Claims::Times(claims)),
        };
        let answer = match self.core.forward(peer, lease, to, user) {
            Ok(descriptor) => ToParticipant::Forwarded { request, descriptor },
            Err(error) => {
                let code = match &error {
                    Error::Invalid { what: "the lease to forward", .. } => RefusalCode::Lease,
                    Error::Invalid { .. } => RefusalCode::Protocol,
                    Error::ParticipantGone { .. } => RefusalCode::Addressee,
                    Error::Exhausted { .. } => RefusalCode::Limit,
                    Error::Closing => RefusalCode::Closing,
                    _ => RefusalCode::Failed,
                };
                ToParticipant::Declined { request, code, why: error.to_string() }
            }
        };
        trace_point!("forward");
        self.tell(peer, &answer);
    }

    /// Sends an answer.
    fn tell(&self, peer: &Peer, answer: &ToParticipant) {
        if let Err(error) = self.core.outbox.push(peer, answer, None) {
            tracing::warn!(participant = %peer.id, %error, "an answer is lost");
        }
    }
}
