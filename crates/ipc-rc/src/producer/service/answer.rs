//! Answers to participants' questions: regions, counter files, tickets, forwarding, reports. What
//! is asked again is answered again: [`told`](crate::producer::roster::told).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use allocators::{Export, Region};
use arrayvec::ArrayVec;
use gpu_api::{Access, Error, RegionId};

use crate::gone::Gone;
use crate::producer::blocks::block::Block;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::fences::ticket_event::Await;
use crate::producer::grants::slot_group::Terms;
use crate::producer::grants::ticket::Claims;
use crate::producer::roster::peer::{Granting, Peer};
use crate::producer::roster::table::find;
use crate::producer::roster::told::Wish;
use crate::producer::service::state::Service;
use crate::producer::share::{To, Wanted};
use transport::os::clock::Tick;
use transport::os::closer::Foreign;
use transport::server::Refused;
use transport::trace_point;
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{
    DepositId, Granted, Heir, MOST_TICKETS, Outcome, RefusalCode, RegionPlace, TicketAnswer,
    TicketId, ToParticipant, ToProducer,
};

impl Service {
    /// Answers a message.
    ///
    /// # Errors
    ///
    /// Why no participant may send it.
    pub(super) fn answer(
        &mut self,
        peer: &Arc<Peer>,
        said: ToProducer,
        fds: Vec<Foreign>,
    ) -> Result<(), &'static str> {
        match said {
            ToProducer::MapRegion {
                request,
                region,
                access,
                lease,
            } => self.map(peer, request, region, access, lease),
            ToProducer::ClaimTickets { request, tickets } => {
                self.redeem_all(peer, request, tickets);
            }
            ToProducer::Forward {
                request,
                settled,
                lease,
                offset,
                len,
                heir,
                user,
            } => {
                let wanted = Wanted {
                    lease,
                    part: (offset, len),
                    user,
                };
                self.forward(peer, request, settled, &wanted, heir);
            }
            ToProducer::AskFile { request, index } => self.give_file(peer, request, index),
            ToProducer::GiveBack { request, ticket } => {
                self.take_back(peer, ticket);
                self.tell(peer, &ToParticipant::Noted { request });
            }
            ToProducer::Inspect { request, from } => {
                self.tell(peer, &self.core.report(request, from));
            }
            ToProducer::TakeSnapshot { request } => {
                let why =
                    "a participant has no right to a snapshot; ask on a connection of its own";
                self.decline(peer, request, (RefusalCode::Protocol, why.into()));
            }
            ToProducer::Unmapped { request, region } => {
                let unmapped = peer.note_unmapping(region);
                self.unmapped |= unmapped.is_some();
                self.core.memory.note_unpinned(unmapped.as_slice());
                self.core.wakeups.announce_change();
                self.tell(peer, &ToParticipant::Noted { request });
            }
            ToProducer::Deposit {
                request,
                settled,
                id,
            } => self.keep(peer, request, settled, id, fds),
            ToProducer::Fetch { request, id } => self.give(peer, request, id),
            ToProducer::EndDeposit {
                request,
                id,
                of,
                returns,
            } => {
                let ended = self.core.deposits.table().end(id, (peer.id, of), returns);
                drop(ended);
                self.tell(peer, &ToParticipant::Noted { request });
            }
            ToProducer::Bye { request } => {
                peer.leaving().said_goodbye = true;
                self.core.deposits.table().forget(peer.id);
                self.close(peer);
                self.tell(peer, &ToParticipant::Noted { request });
            }
            ToProducer::Hello { .. } => return Err("it said hello before"),
        }
        Ok(())
    }

    /// Tells a participant how to map a region, and notes that it may. The lease that it names
    /// proves its right, to what it was granted to do: [`access`](crate::producer::access).
    fn map(
        &self,
        peer: &Arc<Peer>,
        request: u64,
        region: RegionId,
        access: Access,
        lease: LeaseAddress,
    ) {
        let refuse = |code, why| {
            self.tell(
                peer,
                &ToParticipant::NoRegion {
                    request,
                    region,
                    code,
                    why,
                },
            );
        };
        let wanted = region.access();
        // Under the ledger's lock, so that the pin is taken while the block is certainly in use.
        let leased = peer.ledger.with_lease(lease, |block, granted| {
            let leased = block.region();
            if wanted != granted {
                return Err(None);
            }
            if leased.id().with_access(granted) != region {
                return Err(Some(block.clone()));
            }
            peer.note_mapping(leased, granted);
            Ok(leased.clone())
        });
        let leased = match leased {
            Some(Ok(leased)) => Some(leased),
            Some(Err(Some(block))) => self.pin_behind(peer, &block, region),
            Some(Err(None)) => {
                let why = "the lease was granted with another access to its region";
                return refuse(RefusalCode::Region, why.into());
            }
            None => None,
        };
        let Some(leased) = leased else {
            let why = "no lease of yours lies in this region; it was revoked or has ended";
            return refuse(RefusalCode::Region, why.into());
        };
        let spot = leased.spot().map(|spot| spot.with_access(wanted));
        let (place, fd) = match (leased.export(), spot) {
            (_, Some(spot)) if peer.seat.local => {
                (RegionPlace::LocalPiece(leased.base(), spot.behind), None)
            }
            (_, None) if peer.seat.local => (RegionPlace::Local(leased.base()), None),
            (Export::Handle(handle), _) => {
                // One that opens nowhere at present is not given out: the question comes again.
                // What cannot be asked is given out as it is, and the open says why it fails.
                let served = self.core.facts.gpu.backend().is_served(leased.base());
                if matches!(served, Ok(false)) {
                    return;
                }
                (RegionPlace::Handle(*handle), None)
            }
            (Export::Fd(fd), Some(spot)) => (RegionPlace::Piece(spot), Some(fd.as_fd())),
            (Export::Fd(fd), None) => (RegionPlace::Fd, Some(fd.as_fd())),
        };
        let narrowed = match self.core.narrowed(wanted, fd) {
            Ok(narrowed) => narrowed,
            Err(error) => {
                tracing::warn!(participant = %peer.id, %error, "a region cannot be given to be read");
                return refuse(RefusalCode::Failed, error.to_string());
            }
        };
        let fd = narrowed.as_ref().map(AsFd::as_fd).or(fd);
        let access = match wanted {
            Access::ReadOnly => Access::ReadOnly,
            Access::ReadWrite => access,
        };
        let (len, device) = (leased.len(), self.core.facts.gpu.uuid());
        self.tell_with(
            peer,
            &ToParticipant::Region {
                request,
                region,
                len,
                device,
                access,
                place,
            },
            fd,
        );
    }

    /// Pins a region behind the one that a block begins in, if the block reaches into it. With no
    /// lock held, since the source is asked; the block, which the caller keeps, is in use until the
    /// pin is taken.
    fn pin_behind(&self, peer: &Peer, block: &Block, region: RegionId) -> Option<Arc<Region>> {
        let behind = self
            .core
            .memory
            .regions(block.piece())
            .into_iter()
            .find(|behind| behind.id() == region.with_access(Access::ReadWrite))?;
        peer.note_mapping(&behind, region.access());
        Some(behind)
    }

    /// Sends a participant a counter file that it says is missing.
    fn give_file(&self, peer: &Arc<Peer>, request: u64, index: u32) {
        match peer.file(index) {
            Some(file) => {
                let answer = ToParticipant::CounterFile {
                    request,
                    index,
                    slots: file.slot_count(),
                };
                self.tell_with(peer, &answer, Some(file.fd()));
            }
            None => {
                let why = format!("there is no counter file {index} of yours");
                self.decline(peer, request, (RefusalCode::Lease, why));
            }
        }
    }

    /// Answers claims of tickets.
    fn redeem_all(
        &mut self,
        peer: &Arc<Peer>,
        request: u64,
        tickets: ArrayVec<TicketId, MOST_TICKETS>,
    ) {
        let answers = tickets
            .iter()
            .map(|&ticket| TicketAnswer {
                ticket,
                outcome: self.redeem(peer, ticket),
            })
            .collect();
        self.tell(peer, &ToParticipant::Tickets { request, answers });
    }

    /// Gives a connected claimant the lease that its ticket stands for.
    fn redeem(&mut self, peer: &Arc<Peer>, ticket: TicketId) -> Outcome {
        let plan = match self.core.tickets.look(peer.id, ticket) {
            Ok(plan) => plan,
            Err(outcome) => return outcome,
        };
        // A claim that was not answered, or has not come to its lease yet, is given it again.
        if let Some(last) = plan.last
            && peer.ledger.is_unclaimed(last.lease)
        {
            return Outcome::Granted(last);
        }
        let awaited = match &plan.point {
            None => Ok(Await::Nothing),
            Some(point) => {
                self.ticket_streams
                    .fence(point, &self.core.fences, peer.id, &peer.words)
            }
        };
        let fence = match awaited {
            Ok(Await::Nothing) => None,
            Ok(Await::Fence(fence)) => Some(fence),
            Ok(Await::Room) => return Outcome::Later,
            Err(error) => {
                tracing::warn!(participant = %peer.id, %error, "a ticket cannot be redeemed");
                return Outcome::Failed;
            }
        };
        let now = Tick::now();
        let terms = Terms::new(now, plan.time_to_live, plan.place.region.access());
        let lease = match self.core.grant(peer, &plan.block, terms) {
            Ok((lease, _)) => lease,
            Err(Error::Exhausted { .. }) => return Outcome::Limit,
            // It said goodbye, and claims all the same: as often as it likes, without a warning each.
            Err(error) if Gone::of(&error).is_some() => return Outcome::Failed,
            Err(error) => {
                tracing::warn!(participant = %peer.id, %error, "a ticket cannot be redeemed");
                return Outcome::Failed;
            }
        };
        if let Some(time) = plan.time_to_live {
            self.core.watch_lapse(now.after(time));
        }
        let granted = Granted {
            lease,
            place: plan.place,
            fence,
            again: plan.again,
        };
        let peers = self.core.roster.peers();
        match self
            .core
            .tickets
            .note(peer.id, ticket, granted, |id| find(&peers, id).is_some())
        {
            Ok(()) => {
                trace_point!("redeem");
                Outcome::Granted(granted)
            }
            Err(outcome) => {
                // Cancelled at this very moment. Nobody was told of the lease.
                drop(peer.ledger.revoke(lease));
                outcome
            }
        }
    }

    /// Takes back what a ticket gave a participant that abandoned its claim, unless it has claimed.
    fn take_back(&self, peer: &Arc<Peer>, ticket: TicketId) {
        let mut out = ReclaimedBlocks::new();
        let given = self.core.tickets.given(peer.id, ticket);
        out.extend(given.and_then(|lease| peer.ledger.revoke(lease)));
        if !out.is_empty() {
            self.core.tallies.revoked.fetch_add(1, Ordering::Relaxed);
            self.core.retire(&mut out);
        }
    }

    fn forward(
        &mut self,
        peer: &Arc<Peer>,
        request: u64,
        settled: u64,
        wanted: &Wanted,
        heir: Heir,
    ) {
        let to = match heir {
            Heir::Participant(id) => To::Participant(id),
            Heir::Ticket(None) => To::Ticket(Claims::Unlimited),
            Heir::Ticket(Some(claims)) => To::Ticket(Claims::Times(claims)),
        };
        self.grant_wish(peer, request, settled, || {
            let forwarded = self.core.forward(peer, wanted, to);
            trace_point!("forward");
            forwarded
                .map(|descriptor| Some(Box::new(descriptor)))
                .map_err(|error| {
                    let code = match (Gone::of(&error), &error) {
                        (Some(Gone::Participant(_)), _) => RefusalCode::Addressee,
                        (Some(_), _) => RefusalCode::Closing,
                        (
                            None,
                            Error::Invalid {
                                what: "the lease to forward",
                                ..
                            },
                        ) => RefusalCode::Lease,
                        (None, Error::Invalid { .. }) => RefusalCode::Protocol,
                        (None, Error::Exhausted { .. }) => RefusalCode::Limit,
                        _ => RefusalCode::Failed,
                    };
                    (code, error.to_string())
                })
        });
    }

    /// Keeps a descriptor that a participant deposits.
    fn keep(&self, peer: &Arc<Peer>, request: u64, settled: u64, id: DepositId, fds: Vec<Foreign>) {
        self.grant_wish(peer, request, settled, || {
            if let Err(error) = self.core.check_open() {
                return Err((RefusalCode::Closing, error.to_string()));
            }
            let mut table = self.core.deposits.table();
            for file in fds {
                table.keep(id, Some((peer.id, request)), file)?;
            }
            Ok(None)
        });
    }

    /// Sends a descriptor that is kept to the participant that fetches it.
    fn give(&self, peer: &Arc<Peer>, request: u64, id: DepositId) {
        let given = self.core.deposits.table().give(id, (peer.id, request));
        match given {
            Ok(file) => {
                let answer = ToParticipant::Fetched { request, id };
                self.tell_with(peer, &answer, Some(file.as_fd()));
            }
            Err(refused) => self.decline(peer, request, refused),
        }
    }

    /// Grants a wish once, and answers each of its repeats the same.
    fn grant_wish(
        &self,
        peer: &Arc<Peer>,
        request: u64,
        settled: u64,
        grant: impl FnOnce() -> Granting,
    ) {
        let wish = peer.told().wish(request, settled);
        let answer = match wish {
            Wish::Again(answer) => answer,
            Wish::Settled => return,
            Wish::TooMany => Err((
                RefusalCode::Limit,
                "too many wishes wait for their answers".into(),
            )),
            Wish::New => {
                let answer = grant();
                peer.told().remember(request, answer.clone());
                answer
            }
        };
        match answer {
            Ok(Some(descriptor)) => {
                let descriptor = *descriptor;
                self.tell(
                    peer,
                    &ToParticipant::Forwarded {
                        request,
                        descriptor,
                    },
                );
            }
            Ok(None) => self.tell(peer, &ToParticipant::Noted { request }),
            Err(refused) => self.decline(peer, request, refused),
        }
    }

    fn decline(&self, peer: &Peer, request: u64, (code, why): Refused) {
        self.tell(peer, &ToParticipant::Declined { request, code, why });
    }

    fn tell(&self, peer: &Peer, answer: &ToParticipant) {
        self.tell_with(peer, answer, None);
    }

    /// Sends an answer. One that cannot be sent is asked for again.
    fn tell_with(&self, peer: &Peer, answer: &ToParticipant, fd: Option<BorrowedFd<'_>>) {
        if let Err(error) = self.core.roster.outbox.push(peer, answer, fd) {
            tracing::debug!(participant = %peer.id, %error, "an answer is lost");
        }
    }
}
