//! The protocol of [`questions`](super) and [`told`](crate::producer::roster::told), under a
//! channel that loses, delays and repeats: the code that ships, driven by random histories of two
//! claimants, a thread that unmaps, and a producer whose leases end and come again, and who gives
//! regions back and makes others of the same number. Blocks lie in one region or across several,
//! which a claim asks for one after the other while it uses those that it has.
//!
//! Deposits are of this participant too, and it fetches them.
//!
//! After each step: what is mapped is pinned and is what the producer has there, nothing is granted
//! twice, and a claim finds a ticket's lease taken back only if the ticket was abandoned. At the end
//! of each history the channel is mended, and then: every claim that still waits is answered; when
//! nobody wants anything any more, nothing is pinned, no row is left, and of a ticket that was
//! abandoned last no lease is granted; a deposit that was answered is kept or was fetched once, and one
//! that gave up is neither kept nor given; and the goodbye is heard.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use gpu_api::{Access, BackendKind, DevicePtr, DeviceUuid, ParticipantId};
use proptest::prelude::*;
use transport::shared::slot::Generation;
use transport::wire::descriptor::{Descriptor, Fields, GrantKind, SealKey, Sealer, SessionId};
use transport::wire::message::{
    Extent, Granted, Heir, NUMBERS, RefusalCode, RegionPlace, ReportPage, TicketAnswer, TicketId,
    ToParticipant,
};

use super::*;
use crate::producer::deposits::Table;
use crate::producer::roster::told::{Told, Wish};

/// The participant.
const SELF: ParticipantId = ParticipantId(1);
const CLAIMANTS: usize = 2;
const REGIONS: u64 = 3;
/// The regions that the block of each lease lies in.
const LYING: [&[u64]; LEASES as usize] = [&[0], &[0], &[1], &[1, 2], &[0, 1], &[0, 1, 2]];
const LEASES: u32 = 6;
/// The ticket that is a broadcast.
const BROADCAST: u32 = 2;
/// Names of deposits.
const DEPOSITS: u8 = 1;
/// Counter files that there are; one more is asked for.
const FILES: u32 = 1;

/// One step of a history; what cannot be done at its time does nothing.
#[derive(Clone, Debug)]
enum Step {
    /// As in the code that ships, what is due is sent at once.
    Claim(usize, Want, Fate),
    Look(usize),
    /// The driver's call of a claimant that took an answer ends.
    Open(usize, bool),
    /// The claim's deadline passes, or it is told that it would have to wait.
    GiveUp(usize, bool, Fate),
    Abandon(Want),
    AskAhead(Want),
    Unmap(u64),
    Unmapped(u64),
    /// The producer gives a region back that nothing pins and no lease lies in, and makes another
    /// there.
    Renew(u64),
    Pass(u64),
    Send(Fate),
    ToProducer(Fate),
    ToParticipant(Fate),
    /// A lease ends, or one like it is granted.
    Lease(u32, bool),
}

/// What a claimant wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Want {
    Lease(u32),
    Ticket(u32),
    Broadcast,
    File(u32),
    Forward,
    Deposit(u8),
    Fetch(u8),
    Report,
    Snapshot,
}

/// What becomes of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Arrives,
    Lost,
    Twice,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![4 => Just(Fate::Arrives), 2 => Just(Fate::Lost), 1 => Just(Fate::Twice)]
}

fn want() -> impl Strategy<Value = Want> {
    prop_oneof![
        5 => (0..2u32).prop_map(Want::Lease),
        5 => (2..LEASES).prop_map(Want::Lease),
        6 => (0..2u32).prop_map(Want::Ticket),
        2 => Just(Want::Broadcast),
        1 => (0..=FILES).prop_map(Want::File),
        1 => Just(Want::Forward),
        4 => (0..DEPOSITS).prop_map(Want::Deposit),
        4 => (0..DEPOSITS).prop_map(Want::Fetch),
        1 => Just(Want::Report),
        1 => Just(Want::Snapshot),
    ]
}

fn lies_in(lease: u32, region: u64) -> bool {
    LYING[lease as usize].contains(&region)
}

fn question_about(region: u64, lease: u32) -> (Key, Question) {
    (
        Key::Region(RegionId(region)),
        Question::Map {
            access: Access::ReadWrite,
            lease: address(lease),
        },
    )
}

fn address(lease: u32) -> LeaseAddress {
    LeaseAddress {
        file: 0,
        slot: lease,
        generation: Generation::ZERO,
    }
}

fn ticket(number: u32) -> TicketId {
    TicketId {
        number,
        generation: Generation::ZERO,
    }
}

fn deposit_id(number: u8) -> DepositId {
    DepositId([number; 16])
}

/// A file that is deposited. Nothing looks at it.
fn null_file() -> File {
    let file = std::fs::File::open("/dev/null").expect("it opens");
    File(std::sync::Arc::new(file.into()))
}

fn declined(request: u64) -> ToParticipant {
    ToParticipant::Declined {
        request,
        code: RefusalCode::Deposit,
        why: String::new(),
    }
}

/// Where a ticket's bytes lie.
const PLACE: Extent = Extent {
    region: RegionId(0),
    offset: 0,
    len: 1,
};

fn descriptor(slot: u32) -> Descriptor {
    let fields = Fields {
        backend: BackendKind::Host,
        kind: GrantKind::Ticket,
        device: DeviceUuid([0; 16]),
        session: SessionId([0; 16]),
        participant: ParticipantId(0),
        file: 0,
        slot,
        generation: 1,
        region: RegionId(0),
        offset: 0,
        len: 1,
        fence: None,
    };
    Sealer::new(&SealKey::from_bytes([0; 16]), &fields.names()).encode(&fields, &[0; 64])
}

fn page() -> ReportPage {
    ReportPage {
        session: SessionId([0; 16]),
        device: DeviceUuid([0; 16]),
        backend: BackendKind::Host,
        pid: 1,
        age_ms: 0,
        numbers: [0; NUMBERS],
        next: None,
        holders: Vec::new(),
    }
}

fn step() -> impl Strategy<Value = Step> {
    let who = || 0..CLAIMANTS;
    prop_oneof![
        5 => (who(), want(), fate()).prop_map(|(who, want, fate)| Step::Claim(who, want, fate)),
        4 => who().prop_map(Step::Look),
        2 => (who(), any::<bool>()).prop_map(|(who, good)| Step::Open(who, good)),
        3 => (who(), proptest::bool::weighted(0.2), fate()).prop_map(|(who, kept, fate)| Step::GiveUp(who, kept, fate)),
        1 => want().prop_map(Step::Abandon),
        1 => want().prop_map(Step::AskAhead),
        2 => (0..REGIONS).prop_map(Step::Unmap),
        2 => (0..REGIONS).prop_map(Step::Unmapped),
        1 => (0..REGIONS).prop_map(Step::Renew),
        2 => prop_oneof![Just(5u64), Just(100), Just(1000), Just(31_000)].prop_map(Step::Pass),
        2 => fate().prop_map(Step::Send),
        6 => fate().prop_map(Step::ToProducer),
        6 => fate().prop_map(Step::ToParticipant),
        1 => (0..LEASES, any::<bool>()).prop_map(|(lease, granted)| Step::Lease(lease, granted)),
    ]
}

#[derive(Debug)]
struct Claimant {
    want: Want,
    interest: Interest,
    /// The regions of its block that it uses, from the first on.
    entered: usize,
    /// It took a region's answer, of this making, and is in the driver's call.
    opens: Option<u64>,
    /// The lease of a broadcast that another claim was faster with.
    lost: Option<u32>,
}

impl Claimant {
    /// Returns the number of its wish.
    fn wish(&self) -> u64 {
        match self.interest.key {
            Key::Wish(number) => number,
            key => panic!("{key:?} is no wish"),
        }
    }

    /// Lists the regions that it uses, and the one that it wants next.
    fn regions(&self) -> (&'static [u64], Option<u64>) {
        let Want::Lease(lease) = self.want else {
            return (&[], None);
        };
        let (used, wanted) = LYING[lease as usize].split_at(self.entered);
        (used, wanted.first().copied())
    }
}

/// Where the slot of a lease stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stands {
    Granted,
    Claimed,
    Revoked,
}

/// Both sides and what is between them.
struct World {
    now: Instant,
    questions: Questions,
    /// The making of what is mapped, and of what is being unmapped.
    mapped: BTreeMap<u64, u64>,
    unmapping: BTreeMap<u64, u64>,
    claimants: [Option<Claimant>; CLAIMANTS],
    to_producer: VecDeque<ToProducer>,
    to_participant: VecDeque<ToParticipant>,
    told: Told<(), Result<Option<u32>, ()>>,
    /// Descriptors by numbers of their own; which each deposit brought, and which each fetch was given.
    deposits: Table<u32>,
    brought: BTreeMap<u64, u32>,
    given: BTreeMap<u64, u32>,
    /// Those whose deposit was answered, those that were fetched, and deposits that gave up.
    noted: BTreeSet<u32>,
    fetched: BTreeSet<u32>,
    gave_up: BTreeSet<u64>,
    /// How often each region was made anew.
    makings: [u64; REGIONS as usize],
    leases: BTreeSet<u32>,
    /// What each ticket gave, and where its slot stands; what each wish gave.
    tickets: BTreeMap<u32, (u32, Stands)>,
    /// How many leases the broadcast gave, those that were claimed, and those that were taken back.
    broadcast: u32,
    claimed: BTreeSet<u32>,
    taken_back: BTreeSet<u32>,
    wishes: BTreeMap<u64, u32>,
    files: BTreeSet<u32>,
    farewell: bool,
    /// Tickets that were ever abandoned, and those that no claim has wanted since.
    abandoned: BTreeSet<u32>,
    given_up: BTreeSet<u32>,
}

impl World {
    fn new() -> World {
        World {
            now: Instant::now(),
            questions: Questions::default(),
            mapped: BTreeMap::new(),
            unmapping: BTreeMap::new(),
            claimants: [const { None }; CLAIMANTS],
            to_producer: VecDeque::new(),
            to_participant: VecDeque::new(),
            told: Told::default(),
            deposits: Table::default(),
            brought: BTreeMap::new(),
            given: BTreeMap::new(),
            noted: BTreeSet::new(),
            fetched: BTreeSet::new(),
            gave_up: BTreeSet::new(),
            makings: [0; REGIONS as usize],
            leases: (0..LEASES).collect(),
            tickets: BTreeMap::new(),
            broadcast: 0,
            claimed: BTreeSet::new(),
            taken_back: BTreeSet::new(),
            wishes: BTreeMap::new(),
            files: BTreeSet::new(),
            farewell: false,
            abandoned: BTreeSet::new(),
            given_up: BTreeSet::new(),
        }
    }

    fn question(want: Want) -> (Key, Question) {
        match want {
            Want::Lease(lease) => question_about(LYING[lease as usize][0], lease),
            Want::Ticket(number) => (Key::Ticket(ticket(number)), Question::Ticket),
            Want::Broadcast => (Key::Ticket(ticket(BROADCAST)), Question::Ticket),
            Want::File(index) => (Key::File(index), Question::File),
            Want::Report => (Key::Report(0), Question::Report),
            Want::Snapshot => (Key::Snapshot, Question::Snapshot),
            Want::Forward | Want::Deposit(_) | Want::Fetch(_) => {
                panic!("a wish has a key of its own")
            }
        }
    }

    fn claim(&mut self, who: usize, want: Want) {
        if self.claimants[who].is_some() {
            return;
        }
        let (key, question) = match want {
            Want::Forward => {
                let heir = Heir::Ticket(None);
                (
                    self.questions.wish_key(),
                    Question::Forward {
                        lease: address(0),
                        part: (0, 1),
                        heir,
                        user: Box::new([0; 64]),
                    },
                )
            }
            Want::Deposit(number) => {
                let file = null_file();
                let id = deposit_id(number);
                (self.questions.wish_key(), Question::Deposit { id, file })
            }
            Want::Fetch(number) => {
                let id = deposit_id(number);
                (self.questions.wish_key(), Question::Fetch { id })
            }
            want => World::question(want),
        };
        if let Want::Ticket(number) = want {
            self.given_up.remove(&number);
        }
        let interest = Interest::new(key, question);
        self.claimants[who] = Some(Claimant {
            want,
            interest,
            entered: 0,
            opens: None,
            lost: None,
        });
        self.look(who);
    }

    fn leave(&mut self, who: usize, kept: bool) {
        if let Some(claimant) = self.claimants[who].take() {
            claimant.interest.leave(&mut self.questions, kept, self.now);
        }
    }

    /// A claimant uses the region that it wanted, and wants the one behind.
    fn enter(&mut self, who: usize) {
        let Some(claimant) = &mut self.claimants[who] else {
            return;
        };
        let Want::Lease(lease) = claimant.want else {
            return self.leave(who, false);
        };
        claimant.entered += 1;
        claimant.opens = None;
        match claimant.regions().1 {
            Some(behind) => {
                claimant
                    .interest
                    .leave(&mut self.questions, false, self.now);
                let (key, question) = question_about(behind, lease);
                claimant.interest = Interest::new(key, question);
                self.look(who);
            }
            None => self.leave(who, false),
        }
    }

    fn look(&mut self, who: usize) {
        let Some(claimant) = &mut self.claimants[who] else {
            return;
        };
        if claimant.opens.is_some() {
            return;
        }
        let there = match claimant.want {
            Want::Lease(_) => claimant
                .regions()
                .1
                .is_some_and(|region| self.mapped.contains_key(&region)),
            Want::File(index) => self.files.contains(&index),
            _ => false,
        };
        if there {
            return self.enter(who);
        }
        match (
            claimant.interest.look(&mut self.questions, self.now),
            claimant.want,
        ) {
            (Look::Wait, _) => {}
            (Look::Take(Answer::Region { len, .. }), Want::Lease(_)) => {
                claimant.opens = Some(len - 1)
            }
            (Look::Take(Answer::Forwarded(_)), Want::Forward) => self.leave(who, false),
            (Look::Take(Answer::Done), Want::Deposit(_)) => {
                self.noted.insert(self.brought[&claimant.wish()]);
                self.leave(who, false);
            }
            (Look::Take(Answer::Fetched(_)), Want::Fetch(_)) => {
                let file = self.given[&claimant.wish()];
                assert!(self.fetched.insert(file), "a deposit is fetched twice");
                self.leave(who, false);
            }
            (Look::Ticket(Outcome::Granted(_)), Want::Ticket(number)) => {
                // The slot is in memory that both sides have.
                let (_, stands) = self.tickets.get_mut(&number).expect("it was granted");
                match stands {
                    Stands::Granted => *stands = Stands::Claimed,
                    Stands::Claimed => {}
                    Stands::Revoked => assert!(
                        self.abandoned.contains(&number),
                        "the lease of a claim that was not given up is taken back"
                    ),
                }
                self.leave(who, false);
            }
            (Look::Ticket(Outcome::Granted(granted)), Want::Broadcast) => {
                assert!(
                    !self.taken_back.contains(&granted.lease.slot),
                    "a lease that was given back is given again"
                );
                // What the compare-and-swap of the slot decides.
                if self.claimed.insert(granted.lease.slot) {
                    return self.leave(who, false);
                }
                let lost = claimant.lost.replace(granted.lease.slot);
                assert_ne!(lost, claimant.lost, "a claimed lease is given again");
                claimant.interest.renew(&mut self.questions, self.now);
            }
            (Look::Refused(_, asked), Want::Lease(lease))
                if asked != Some(address(lease)) && self.leases.contains(&lease) =>
            {
                claimant.interest.ask_anew(&mut self.questions, self.now);
            }
            (Look::Take(Answer::Report(_)), Want::Report) => self.leave(who, false),
            (Look::Take(Answer::Snapshot { .. }), Want::Snapshot) => self.leave(who, false),
            (
                Look::Refused(..),
                Want::Lease(_) | Want::Forward | Want::Deposit(_) | Want::Fetch(_) | Want::Snapshot,
            ) => self.leave(who, false),
            (Look::Refused(..), Want::File(index)) => {
                assert!(index >= FILES, "a file that there is, is refused");
                self.leave(who, false);
            }
            (seen, want) => panic!("{want:?} is answered {seen:?}"),
        }
    }

    fn open(&mut self, who: usize, good: bool) {
        let Some(claimant) = &self.claimants[who] else {
            return;
        };
        let (Some(making), Some(region)) = (claimant.opens, claimant.regions().1) else {
            return;
        };
        if good {
            assert!(
                self.mapped.insert(region, making).is_none(),
                "a region is mapped twice"
            );
            self.questions.mapped(RegionId(region));
            self.enter(who);
        } else {
            self.questions.unmapped(RegionId(region), self.now);
            self.leave(who, false);
        }
    }

    /// Unmaps a region that no claimant uses.
    fn unmap(&mut self, region: u64) {
        let is_used = self
            .claimants
            .iter()
            .flatten()
            .any(|claimant| claimant.regions().0.contains(&region));
        if is_used || !self.mapped.contains_key(&region) {
            return;
        }
        if self.questions.begin_unmap(RegionId(region), self.now) {
            let making = self.mapped.remove(&region).expect("it is mapped");
            self.unmapping.insert(region, making);
        }
    }

    fn unmapped(&mut self, region: u64) {
        if self.unmapping.remove(&region).is_some() {
            self.questions.unmapped(RegionId(region), self.now);
        }
    }

    fn send(&mut self, fate: Fate) {
        let out = &mut self.to_producer;
        self.questions.send_due(self.now, |message, _| match fate {
            // No room, or no memory.
            Fate::Lost => Err(Unsent),
            _ => {
                out.push_back(message.clone());
                Ok(())
            }
        });
    }

    /// The producer hears a message, and answers; by the code of `answer.rs`, without its ledgers.
    fn hear_at_producer(&mut self, message: &ToProducer) {
        let answer = match message {
            ToProducer::MapRegion {
                request,
                region,
                access,
                lease,
            } => {
                if self.leases.contains(&lease.slot) && lies_in(lease.slot, region.0) {
                    self.told.note_mapping(*region, || ());
                    let (request, region, access) = (*request, *region, *access);
                    let (device, place) = (DeviceUuid([0; 16]), RegionPlace::Local(DevicePtr(1)));
                    let len = self.makings[region.0 as usize] + 1;
                    ToParticipant::Region {
                        request,
                        region,
                        len,
                        device,
                        access,
                        place,
                    }
                } else {
                    let (request, region, why) = (*request, *region, String::new());
                    ToParticipant::NoRegion {
                        request,
                        region,
                        code: RefusalCode::Region,
                        why,
                    }
                }
            }
            ToProducer::Unmapped { request, region } => {
                self.told.note_unmapping(*region);
                ToParticipant::Noted { request: *request }
            }
            ToProducer::ClaimTickets { request, tickets } => {
                let mut answer = |&ticket: &TicketId| {
                    let again = ticket.number == BROADCAST;
                    if again {
                        // Another lease once the last one is claimed, or was given back.
                        let last = self.broadcast.checked_sub(1);
                        let is_over = |last: u32| {
                            self.claimed.contains(&last) || self.taken_back.contains(&last)
                        };
                        if last.is_none_or(is_over) {
                            self.broadcast += 1;
                        }
                        let granted = (self.broadcast - 1, Stands::Granted);
                        self.tickets.insert(BROADCAST, granted);
                    }
                    let next = self.tickets.len() as u32;
                    let granted = (next, Stands::Granted);
                    let lease = address(self.tickets.entry(ticket.number).or_insert(granted).0);
                    TicketAnswer {
                        ticket,
                        outcome: Outcome::Granted(Granted {
                            lease,
                            place: PLACE,
                            fence: None,
                            again,
                        }),
                    }
                };
                ToParticipant::Tickets {
                    request: *request,
                    answers: tickets.iter().map(&mut answer).collect(),
                }
            }
            ToProducer::GiveBack { request, ticket } if ticket.number == BROADCAST => {
                let last = self.broadcast.checked_sub(1);
                self.taken_back
                    .extend(last.filter(|last| !self.claimed.contains(last)));
                ToParticipant::Noted { request: *request }
            }
            ToProducer::GiveBack { request, ticket } => {
                if let Some((_, stands @ Stands::Granted)) = self.tickets.get_mut(&ticket.number) {
                    *stands = Stands::Revoked;
                }
                ToParticipant::Noted { request: *request }
            }
            ToProducer::AskFile { request, index } if *index < FILES => {
                ToParticipant::CounterFile {
                    request: *request,
                    index: *index,
                    slots: 64,
                }
            }
            ToProducer::AskFile { request, .. } => ToParticipant::Declined {
                request: *request,
                code: RefusalCode::Lease,
                why: String::new(),
            },
            ToProducer::Forward {
                request, settled, ..
            } => {
                let grant = match self.told.wish(*request, *settled) {
                    Wish::Again(grant) => grant.ok().flatten().expect("it was forwarded"),
                    Wish::New => {
                        let grant = self.wishes.len() as u32;
                        assert!(
                            self.wishes.insert(*request, grant).is_none(),
                            "a wish is granted twice"
                        );
                        self.told.remember(*request, Ok(Some(grant)));
                        grant
                    }
                    Wish::Settled => return,
                    Wish::TooMany => panic!("few wish"),
                };
                ToParticipant::Forwarded {
                    request: *request,
                    descriptor: descriptor(grant),
                }
            }
            ToProducer::Deposit {
                request,
                settled,
                id,
            } => {
                let kept = match self.told.wish(*request, *settled) {
                    Wish::Again(kept) => kept,
                    Wish::New => {
                        let file = self.brought.len() as u32;
                        let kept = self.deposits.keep(*id, Some((SELF, *request)), file);
                        if kept.is_ok() {
                            let before = self.brought.insert(*request, file);
                            assert!(before.is_none(), "a deposit is kept twice");
                        }
                        let kept = kept.map(|()| None).map_err(drop);
                        self.told.remember(*request, kept);
                        kept
                    }
                    Wish::Settled => return,
                    Wish::TooMany => panic!("few wish"),
                };
                match kept {
                    Ok(_) => ToParticipant::Noted { request: *request },
                    Err(()) => declined(*request),
                }
            }
            ToProducer::Fetch { request, id } => match self.deposits.give(*id, (SELF, *request)) {
                Ok(file) => {
                    let before = self.given.insert(*request, *file);
                    assert!(before.is_none_or(|before| before == *file));
                    ToParticipant::Fetched {
                        request: *request,
                        id: *id,
                    }
                }
                Err(_) => declined(*request),
            },
            ToProducer::EndDeposit {
                request,
                id,
                of,
                returns,
            } => {
                drop(self.deposits.end(*id, (SELF, *of), *returns));
                ToParticipant::Noted { request: *request }
            }
            ToProducer::Inspect { request, .. } => ToParticipant::Report {
                request: *request,
                page: Box::new(page()),
            },
            ToProducer::TakeSnapshot { request } if self.leases.contains(&0) => {
                ToParticipant::Snapshot {
                    request: *request,
                    len: 1,
                }
            }
            ToProducer::TakeSnapshot { request } => ToParticipant::Declined {
                request: *request,
                code: RefusalCode::Snapshot,
                why: String::new(),
            },
            ToProducer::Bye { request } => ToParticipant::Noted { request: *request },
            other => panic!("{other:?}"),
        };
        self.to_participant.push_back(answer);
    }

    /// The participant hears a message; by the code of `hear.rs`.
    fn hear_at_participant(&mut self, message: ToParticipant) {
        let (request, key, said) = match message {
            ToParticipant::CounterFile { request, index, .. } => {
                self.files.insert(index);
                (request, None, Ok(Answer::Done))
            }
            ToParticipant::Region {
                request,
                region,
                len,
                device,
                place,
                ..
            } => (
                request,
                Some(Key::Region(region)),
                Ok(Answer::Region {
                    len,
                    device,
                    place,
                    fd: None,
                }),
            ),
            ToParticipant::NoRegion {
                request,
                region,
                code,
                why,
            } => (request, Some(Key::Region(region)), Err(No { code, why })),
            ToParticipant::Tickets { request, answers } => {
                for answer in answers {
                    let said = Ok(Answer::Ticket(answer.outcome));
                    self.questions
                        .hear(request, Key::Ticket(answer.ticket), said, self.now);
                }
                return;
            }
            ToParticipant::Forwarded {
                request,
                descriptor,
            } => {
                assert_eq!(
                    descriptor.fields().slot,
                    self.wishes[&request],
                    "another wish's descriptor"
                );
                (
                    request,
                    Some(Key::Wish(request)),
                    Ok(Answer::Forwarded(Box::new(descriptor))),
                )
            }
            ToParticipant::Fetched { request, .. } => {
                (request, Some(Key::Wish(request)), Ok(Answer::Fetched(None)))
            }
            ToParticipant::Report { request, page } => (request, None, Ok(Answer::Report(page))),
            ToParticipant::Snapshot { request, len } => {
                (request, None, Ok(Answer::Snapshot { len, file: None }))
            }
            ToParticipant::Noted { request } => (request, None, Ok(Answer::Done)),
            ToParticipant::Declined { request, code, why } => {
                (request, None, Err(No { code, why }))
            }
            other => panic!("{other:?}"),
        };
        if let Some(key) = key.or_else(|| self.questions.key_of(request)) {
            let passed_over = self.questions.hear(request, key, said, self.now);
            self.farewell |= key == Key::Goodbye && passed_over.is_none();
        }
    }

    fn deliver_to_producer(&mut self, fate: Fate) -> bool {
        let Some(message) = self.to_producer.pop_front() else {
            return false;
        };
        for _ in 0..times(fate) {
            self.hear_at_producer(&message);
        }
        true
    }

    fn deliver_to_participant(&mut self, fate: Fate) -> bool {
        let Some(message) = self.to_participant.pop_front() else {
            return false;
        };
        for _ in 0..times(fate) {
            self.hear_at_participant(message.clone());
        }
        true
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Claim(who, want, fate) => {
                self.claim(who, want);
                self.send(fate);
            }
            Step::Look(who) => self.look(who),
            Step::Open(who, good) => self.open(who, good),
            Step::GiveUp(who, kept, fate) => {
                if self.claimants[who]
                    .as_ref()
                    .is_some_and(|claimant| claimant.opens.is_none())
                {
                    let claimant = self.claimants[who].as_ref();
                    let gave_up =
                        claimant.filter(|claimant| matches!(claimant.want, Want::Deposit(_)));
                    self.gave_up.extend(gave_up.map(Claimant::wish));
                    self.leave(who, kept);
                    self.send(fate);
                }
            }
            Step::Abandon(Want::Forward | Want::Deposit(_) | Want::Fetch(_))
            | Step::AskAhead(Want::Forward | Want::Deposit(_) | Want::Fetch(_) | Want::Lease(_)) => {
            }
            Step::Abandon(Want::Lease(lease)) => {
                for &region in LYING[lease as usize] {
                    self.questions
                        .abandon(Key::Region(RegionId(region)), self.now);
                }
            }
            Step::Abandon(want) => {
                let wants = |claimant: &Claimant| claimant.want == want;
                if let Want::Ticket(number) = want
                    && !self.claimants.iter().flatten().any(wants)
                {
                    self.abandoned.insert(number);
                    self.given_up.insert(number);
                }
                self.questions.abandon(World::question(want).0, self.now);
            }
            Step::AskAhead(want) => {
                if let Want::Ticket(number) = want {
                    self.given_up.remove(&number);
                }
                let (key, question) = World::question(want);
                self.questions.ask_ahead(key, question, self.now);
            }
            Step::Unmap(region) => self.unmap(region),
            Step::Unmapped(region) => self.unmapped(region),
            Step::Renew(region) => {
                let is_pinned = self.told.mapped().any(|pinned| pinned.0 == region);
                if !is_pinned && !self.leases.iter().any(|&lease| lies_in(lease, region)) {
                    self.makings[region as usize] += 1;
                }
            }
            Step::Pass(ms) => self.now += Duration::from_millis(ms),
            Step::Send(fate) => self.send(fate),
            Step::ToProducer(fate) => drop(self.deliver_to_producer(fate)),
            Step::ToParticipant(fate) => drop(self.deliver_to_participant(fate)),
            Step::Lease(lease, true) => drop(self.leases.insert(lease)),
            Step::Lease(lease, false) => drop(self.leases.remove(&lease)),
        }
    }

    fn check(&self) {
        let pinned: BTreeSet<u64> = self.told.mapped().map(|region| region.0).collect();
        let claimants = || self.claimants.iter().flatten();
        let opening =
            claimants().filter_map(|claimant| Some((claimant.regions().1?, claimant.opens?)));
        let mapped = self
            .mapped
            .iter()
            .chain(&self.unmapping)
            .map(|(&region, &making)| (region, making));
        for (region, making) in mapped.chain(opening) {
            assert!(
                pinned.contains(&region),
                "region {region} is mapped and not pinned"
            );
            assert_eq!(
                making, self.makings[region as usize],
                "what is mapped of region {region} is no more"
            );
        }
        for region in claimants().flat_map(|claimant| claimant.regions().0) {
            assert!(
                self.mapped.contains_key(region),
                "region {region} is used and not mapped"
            );
        }
    }

    /// Mends the channel and lets a second pass.
    fn mend(&mut self) {
        self.now += Duration::from_secs(1);
        (0..REGIONS).for_each(|region| self.unmapped(region));
        self.send(Fate::Arrives);
        while self.deliver_to_producer(Fate::Arrives) || self.deliver_to_participant(Fate::Arrives)
        {
        }
        self.check();
        for who in 0..CLAIMANTS {
            self.look(who);
            self.open(who, true);
            self.check();
        }
    }

    fn end(mut self) {
        // Of those who wait for one region with different leases, each round answers one at least;
        // and one region each.
        (0..2 * CLAIMANTS * REGIONS as usize).for_each(|_| self.mend());
        let waits: Vec<_> = self.claimants.iter().flatten().collect();
        assert!(
            waits.is_empty(),
            "nobody answers {waits:?}: {:?}",
            self.questions
        );
        for region in 0..REGIONS {
            self.unmap(region);
            self.unmapped(region);
        }
        self.now += KEPT;
        (0..3).for_each(|_| self.mend());
        for number in &self.given_up {
            let stands = self.tickets.get(number).map(|(_, stands)| *stands);
            assert!(
                stands != Some(Stands::Granted),
                "ticket {number} was abandoned, and its lease is granted: {:?}",
                self.questions
            );
        }
        let kept = self.deposits.kept();
        for (file, is_given) in &kept {
            assert!(
                !is_given,
                "a fetch of {file} does not end: {:?}",
                self.questions
            );
            assert!(
                !self.fetched.contains(file),
                "{file} was fetched, and is kept: {:?}",
                self.questions
            );
        }
        let is_kept = |file: &u32| kept.contains(&(*file, false));
        for number in &self.gave_up {
            let file = self.brought.get(number);
            assert!(
                !file.is_some_and(is_kept),
                "deposit {number} gave up, and is kept: {:?}",
                self.questions
            );
        }
        for file in &self.noted {
            assert!(
                is_kept(file) || self.fetched.contains(file),
                "{file} is lost: {:?}",
                self.questions
            );
        }
        let pinned: Vec<RegionId> = self.told.mapped().collect();
        assert!(
            pinned.is_empty(),
            "{pinned:?} are pinned, and nobody has them mapped: {:?}",
            self.questions
        );
        self.questions.say_goodbye(self.now);
        self.mend();
        assert!(self.farewell, "nobody hears the goodbye");
        assert!(
            self.questions.table.is_empty(),
            "left: {:?}",
            self.questions
        );
    }
}

fn times(fate: Fate) -> usize {
    match fate {
        Fate::Lost => 0,
        Fate::Arrives => 1,
        Fate::Twice => 2,
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 20 } else { 1_600 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn whatever_is_lost_what_is_mapped_is_pinned_and_every_question_ends(
        steps in proptest::collection::vec(step(), 1..100),
    ) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
            world.check();
        }
        world.end();
    }
}
