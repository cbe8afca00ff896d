//! Questions whose answers are lost, late or wrong: between a participant and its session stands a
//! relay that passes packets on as a test wants it.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use allocators::{Arena, ArenaOptions, Growth};
use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu};
use ipc_rc::{
    After, ClaimError, Claims, Departure, DepositId, Descriptor, Notice, Participant,
    ReceivedBlock, SentBlock, Session, SessionNotice, To, Wait,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg,
    socket_with, socketpair,
};

/// Long enough for the slowest machine; a test that waits longer hangs.
const WATCHDOG: Duration = Duration::from_secs(120);

/// The bytes of a piece of a range.
const PIECE: u64 = 1 << 20;

const MAP_REGION: u16 = 2;
const CLAIM_TICKETS: u16 = 5;
const UNMAPPED: u16 = 3;
const BYE: u16 = 4;
const GIVE_BACK: u16 = 10;
const DEPOSIT: u16 = 11;
const FETCH: u16 = 12;
const END_DEPOSIT: u16 = 13;
const COUNTER_FILE: u16 = 131;
const REGION: u16 = 132;
const TICKETS: u16 = 136;
const FORWARDED: u16 = 137;
const NOTED: u16 = 142;
const FETCHED: u16 = 143;

/// What becomes of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Passes,
    Lost,
    /// Not before the rule says otherwise, and all behind it likewise.
    Waits,
    /// With its last byte of the device's number changed.
    Altered,
    /// The connection ends before it, and both sides live.
    Ends,
}

type Rule = Box<dyn FnMut(u16) -> Fate + Send>;

/// The relay's rule, asked for each packet by its type.
#[derive(Clone)]
struct Relay(Arc<Mutex<Rule>>);

impl Relay {
    /// Connects a participant of `gpu` through a relay.
    fn connect(
        gpu: &Gpu,
        path: &Path,
        rule: impl FnMut(u16) -> Fate + Send + 'static,
    ) -> (Participant, Relay) {
        let pair = || {
            socketpair(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC,
                None,
            )
        };
        let (near, far) = pair().expect("a socket pair");
        let up = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a socket");
        rustix::net::connect(&up, &SocketAddrUnix::new(path).expect("a path")).expect("it listens");
        let relay = Relay(Arc::new(Mutex::new(Box::new(rule))));
        let passed_on = relay.clone();
        std::thread::spawn(move || passed_on.run(&near, &up));
        (
            Participant::builder(gpu.clone())
                .connect_by(far)
                .expect("connected"),
            relay,
        )
    }

    fn rule(&self, rule: impl FnMut(u16) -> Fate + Send + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(rule);
    }

    fn run(&self, near: &OwnedFd, up: &OwnedFd) {
        let mut waiting: [VecDeque<(Vec<u8>, Vec<OwnedFd>)>; 2] = Default::default();
        loop {
            let mut fds = [
                PollFd::new(near, PollFlags::IN),
                PollFd::new(up, PollFlags::IN),
            ];
            let tick = rustix::event::Timespec {
                tv_sec: 0,
                tv_nsec: 1_000_000,
            };
            poll(&mut fds, Some(&tick)).expect("poll");
            for (side, (from, to)) in [(near, up), (up, near)].into_iter().enumerate() {
                while let Some(packet) = receive(from) {
                    if packet.0.is_empty() {
                        return;
                    }
                    waiting[side].push_back(packet);
                }
                while let Some((bytes, _)) = waiting[side].front_mut() {
                    let number = u16::from_le_bytes([bytes[4], bytes[5]]);
                    let fate = self.0.lock().unwrap_or_else(PoisonError::into_inner)(number);
                    if fate == Fate::Waits {
                        break;
                    }
                    if fate == Fate::Ends {
                        return;
                    }
                    if fate == Fate::Altered {
                        bytes[47] ^= 1;
                    }
                    let (bytes, fds) = waiting[side].pop_front().expect("it was just there");
                    if fate != Fate::Lost {
                        send(to, &bytes, &fds);
                    }
                }
            }
        }
    }
}

/// Takes a packet, if there is one; an empty one at the end.
fn receive(from: &OwnedFd) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(
        from,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        flags,
    );
    let len = match got {
        Ok(got) => got.bytes,
        Err(rustix::io::Errno::AGAIN) => return None,
        Err(_) => 0,
    };
    bytes.truncate(len);
    let fds = control.drain().filter_map(|m| {
        if let RecvAncillaryMessage::ScmRights(fds) = m {
            Some(fds)
        } else {
            None
        }
    });
    Some((bytes, fds.flatten().collect()))
}

fn send(to: &OwnedFd, bytes: &[u8], fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
    // Who has gone hears nothing.
    let _ = sendmsg(
        to,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    );
}

/// Loses the first packet of each of these types.
fn loses_first(types: &[u16]) -> impl FnMut(u16) -> Fate + Send + 'static {
    let mut left = types.to_vec();
    move |number| match left.iter().position(|&first| first == number) {
        Some(at) => {
            left.remove(at);
            Fate::Lost
        }
        None => Fate::Passes,
    }
}

struct Stage {
    gpu: Gpu,
    session: Session,
    _dir: tempfile::TempDir,
}

impl Stage {
    fn new() -> Stage {
        Stage::of(ArenaOptions::default())
    }

    /// A session whose blocks come from an arena like this.
    fn of(options: ArenaOptions) -> Stage {
        let dir = tempfile::tempdir().expect("a directory");
        let backend = HostBackend::new(HostConfig::default()).expect("it opens");
        let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
        let arena = Arena::new(gpu.clone(), options).expect("an arena");
        let session = Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .arena(&arena);
        Stage {
            gpu,
            session: session.open().expect("a session"),
            _dir: dir,
        }
    }

    /// Three pieces of one range, and a block across them.
    fn of_pieces() -> (Stage, SentBlock) {
        let stage = Stage::of(
            ArenaOptions::default()
                .growth(Growth::Fixed(PIECE))
                .grows_in_place(true),
        );
        let pieces = [(); 3].map(|()| stage.session.alloc(PIECE).expect("there is room"));
        drop(pieces);
        let block = stage
            .session
            .alloc(3 * PIECE)
            .expect("three pieces are free");
        assert_eq!(stage.session.stats().source.regions, 3);
        (stage, block)
    }

    fn connect(&self, rule: impl FnMut(u16) -> Fate + Send + 'static) -> (Participant, Relay) {
        Relay::connect(&self.gpu, self.session.socket_path(), rule)
    }

    fn mappings(&self) -> u64 {
        self.session
            .stats()
            .holders
            .iter()
            .map(|holder| holder.mappings)
            .sum()
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WATCHDOG, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_lost_answer_is_asked_for_again() {
    let stage = Stage::new();
    let (participant, _relay) = stage.connect(loses_first(&[
        MAP_REGION, REGION, REGION, TICKETS, FORWARDED,
    ]));
    let block = stage.session.alloc(4096).expect("there is room");
    let ticket = block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("shared");
    let received = participant
        .claim(ticket.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    assert_eq!(
        block.outstanding(),
        1,
        "a ticket that was asked for twice was granted twice"
    );
    let onward = received
        .forward(To::Participant(participant.id()), Some(WATCHDOG))
        .expect("forwarded");
    assert_eq!(
        block.outstanding(),
        2,
        "a wish that was asked twice was granted twice"
    );
    participant
        .claim(onward.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
}

#[test]
fn a_lost_answer_about_a_broadcast_is_given_again_and_what_a_late_question_gets_is_given_back() {
    let stage = Stage::new();
    let (participant, relay) = stage.connect(loses_first(&[TICKETS]));
    let block = stage.session.alloc(4096).expect("there is room");
    let broadcast = block
        .share(To::Ticket(Claims::Unlimited), After::Done)
        .expect("shared");
    let claim = || {
        participant
            .claim(broadcast.as_bytes(), Wait::Host, Some(WATCHDOG))
            .expect("claimed")
    };
    let first = claim();
    assert_eq!(
        block.outstanding(),
        1,
        "what was asked twice was granted twice"
    );
    // The answer waits until the question was repeated, and the repeat until the claim is over.
    let repeated = Arc::new(AtomicBool::new(false));
    let asked = repeated.clone();
    let given_back = Arc::new(AtomicBool::new(false));
    let mut questions = 0;
    relay.rule(move |number| match number {
        CLAIM_TICKETS if questions > 0 => {
            asked.store(true, Ordering::Relaxed);
            Fate::Waits
        }
        CLAIM_TICKETS => {
            questions += 1;
            Fate::Passes
        }
        TICKETS if !asked.load(Ordering::Relaxed) => Fate::Waits,
        _ => Fate::Passes,
    });
    let second = claim();
    assert!(repeated.load(Ordering::Relaxed));
    let seen = given_back.clone();
    relay.rule(move |number| {
        seen.fetch_or(number == GIVE_BACK, Ordering::Relaxed);
        Fate::Passes
    });
    wait_until("the late question's lease to be given back", || {
        given_back.load(Ordering::Relaxed) && block.outstanding() == 2
    });
    let third = claim();
    assert_eq!(block.outstanding(), 3);
    drop((first, second, third));
    block
        .wait_released(Some(WATCHDOG))
        .expect("none is left over");
}

#[test]
fn a_connection_that_ends_without_a_goodbye_while_the_process_lives_is_no_death() {
    let stage = Stage::new();
    let block = stage.session.alloc(4096).expect("there is room");
    let ticket = block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("shared");
    let mut left = Vec::new();
    for (last, how) in [
        (Fate::Ends, Departure::ConnectionLost),
        (Fate::Passes, Departure::Goodbye),
    ] {
        let (participant, relay) = stage.connect(|_| Fate::Passes);
        let id = participant.id();
        let name = stage.session.participant_name(id).expect("it is here");
        relay.rule(move |_| last);
        // Something that crosses the relay.
        participant.prefetch(&[ticket.as_bytes()]).expect("asked");
        if last == Fate::Passes {
            participant.close(Some(WATCHDOG)).expect("it is heard");
        }
        wait_until("the notice of its end", || {
            left.extend(std::iter::from_fn(|| stage.session.next_notice()));
            matches!(left.last(), Some(SessionNotice::Left { .. }))
        });
        let participant = id;
        let notice = SessionNotice::Left {
            participant,
            name,
            how,
        };
        assert_eq!(left.pop(), Some(notice));
        assert_eq!(stage.session.participant_name(id), None);
    }
    assert_eq!(stage.session.stats().deaths, 0);
}

#[test]
fn a_counter_file_that_is_lost_is_asked_for_and_one_that_there_cannot_be_is_refused() {
    let stage = Stage::new();
    let (participant, _relay) = stage.connect(loses_first(&[COUNTER_FILE, COUNTER_FILE]));
    let block = stage.session.alloc(4096).expect("there is room");
    // The first file has 8,192 slots.
    let mut descriptors: Vec<_> = (0..8193)
        .map(|_| {
            block
                .share(To::Participant(participant.id()), After::Done)
                .expect("shared")
        })
        .collect();
    let last = descriptors.pop().expect("there are many");
    participant
        .claim(last.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
}

#[test]
fn a_claim_that_gives_up_pins_nothing() {
    let stage = Stage::new();
    // Nor does the producer hear at once that the claim has given up.
    let waits = |number| {
        if [REGION, UNMAPPED].contains(&number) {
            Fate::Waits
        } else {
            Fate::Passes
        }
    };
    let (participant, relay) = stage.connect(waits);
    let block = stage.session.alloc(4096).expect("there is room");
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    let claim = || {
        participant.claim(
            descriptor.as_bytes(),
            Wait::Host,
            Some(Duration::from_millis(1)),
        )
    };
    assert!(matches!(
        claim(),
        Err(ClaimError::Backend(Error::Deadline { .. }))
    ));
    // The answer was on its way.
    wait_until("the question to be heard", || stage.mappings() == 1);
    relay.rule(|_| Fate::Passes);
    wait_until("the region to be unpinned", || stage.mappings() == 0);
    // Nothing is lost.
    participant
        .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    assert_eq!(stage.mappings(), 1);
}

#[test]
fn a_try_keeps_its_question_until_it_is_abandoned() {
    let stage = Stage::new();
    let (participant, _relay) = stage.connect(|_| Fate::Passes);
    let block = stage.session.alloc(4096).expect("there is room");
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    let told = || {
        std::iter::from_fn(|| participant.next_notice()).any(|notice| notice == Notice::TryAgain)
    };
    match participant.try_claim(descriptor.as_bytes(), Wait::Host) {
        Err(ClaimError::WouldBlock) => wait_until("a notice", told),
        other => drop(other.expect("it is claimed, or would block")),
    }
    assert_eq!(stage.mappings(), 1);
    if participant.mappings() == 0 {
        participant.abandon(descriptor.as_bytes());
        wait_until("the region to be unpinned", || stage.mappings() == 0);
        participant
            .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
            .expect("claimed");
    }
}

/// A ticket of a block, and a claim of it that ran out of time after the producer granted it: the
/// answers of a relay wait until it is told otherwise.
fn claim_that_runs_out_of_time(
    stage: &Stage,
    claims: Claims,
) -> (Participant, Relay, SentBlock, Descriptor) {
    let (participant, relay) = stage.connect(|number| match number {
        TICKETS => Fate::Waits,
        _ => Fate::Passes,
    });
    let block = stage.session.alloc(4096).expect("there is room");
    let ticket = block
        .share(To::Ticket(claims), After::Done)
        .expect("a ticket");
    let late = participant.claim(
        ticket.as_bytes(),
        Wait::Host,
        Some(Duration::from_millis(1)),
    );
    assert!(
        matches!(late, Err(ClaimError::Backend(Error::Deadline { .. }))),
        "{late:?}"
    );
    wait_until("the grant", || stage.session.stats().in_flight == 1);
    (participant, relay, block, ticket)
}

#[test]
fn an_abandoned_claim_of_a_ticket_gives_its_block_back() {
    for losses in [&[][..], &[GIVE_BACK], &[NOTED], &[GIVE_BACK, NOTED]] {
        let stage = Stage::new();
        let (participant, relay, block, ticket) = claim_that_runs_out_of_time(&stage, Claims::Once);
        assert_eq!(block.outstanding(), 1);
        relay.rule(loses_first(losses));
        participant.abandon(ticket.as_bytes());
        block
            .wait_released(Some(WATCHDOG))
            .expect("it is held for its time to live");
        // The count follows the release.
        wait_until("it to be counted", || stage.session.stats().revoked == 1);
        // Twice is as good as once, and the claim is spent.
        participant.abandon(ticket.as_bytes());
        let error = participant
            .claim(ticket.as_bytes(), Wait::Host, Some(WATCHDOG))
            .expect_err("it was given up");
        assert!(
            matches!(error, ClaimError::Revoked | ClaimError::Stale),
            "{error}"
        );
        assert_eq!(stage.session.stats().revoked, 1);
    }
}

#[test]
fn an_unlimited_ticket_that_was_abandoned_can_be_claimed_again() {
    let stage = Stage::new();
    let (participant, relay, block, ticket) =
        claim_that_runs_out_of_time(&stage, Claims::Unlimited);
    // The answer to the first claim comes after the ticket was abandoned, and means nothing.
    participant.abandon(ticket.as_bytes());
    wait_until("its lease to be back", || block.outstanding() == 0);
    relay.rule(|_| Fate::Passes);
    let received = participant
        .claim(ticket.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("it is a broadcast");
    assert_eq!(block.outstanding(), 1);
    drop(received);
}

#[test]
fn what_was_claimed_or_never_granted_is_not_given_back() {
    let stage = Stage::new();
    let (participant, _relay) = stage.connect(|_| Fate::Passes);
    let (other, _its_relay) = stage.connect(|_| Fate::Passes);
    let block = stage.session.alloc(4096).expect("there is room");
    let share = || {
        block
            .share(To::Ticket(Claims::Once), After::Done)
            .expect("a ticket")
    };
    let claim = |participant: &Participant, ticket: &Descriptor| {
        participant.claim(ticket.as_bytes(), Wait::Host, Some(WATCHDOG))
    };
    let (claimed, unclaimed) = (share(), share());
    let received = claim(&participant, &claimed).expect("claimed");
    for ticket in [&claimed, &unclaimed] {
        participant.abandon(ticket.as_bytes());
    }
    // Heard by the producer before what follows on the same connection.
    let behind = claim(&participant, &share()).expect("claimed");
    assert_eq!(block.outstanding(), 3);
    drop((received, behind));
    claim(&other, &unclaimed).expect("nothing of it was spent");
    assert_eq!(stage.session.stats().revoked, 0);
}

#[test]
fn a_claim_that_is_made_again_before_the_producer_heard_of_the_end_of_the_first_has_the_lease() {
    let stage = Stage::new();
    let (participant, relay) = stage.connect(|number| match number {
        CLAIM_TICKETS | GIVE_BACK => Fate::Waits,
        _ => Fate::Passes,
    });
    let block = stage.session.alloc(4096).expect("there is room");
    let ticket = block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("a ticket");
    participant.prefetch(&[ticket.as_bytes()]).expect("asked");
    participant.abandon(ticket.as_bytes());
    // The first question and its end are lost together.
    relay.rule(loses_first(&[CLAIM_TICKETS, GIVE_BACK]));
    participant
        .claim(ticket.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("nothing was granted before");
}

#[test]
fn what_cannot_be_mapped_is_not_pinned_and_who_waits_beside_it_is_not_hurt() {
    let stage = Stage::new();
    let mut first = true;
    let (participant, _relay) = stage.connect(move |number| match number {
        REGION if std::mem::take(&mut first) => Fate::Altered,
        // What says so comes late, and behind the next question.
        UNMAPPED => Fate::Lost,
        _ => Fate::Passes,
    });
    let block = stage.session.alloc(4096).expect("there is room");
    let share = || {
        block
            .share(To::Participant(participant.id()), After::Done)
            .expect("shared")
    };
    let claims: Vec<_> = (0..8).map(|_| share()).collect();
    let results: Vec<_> = std::thread::scope(|scope| {
        let claim = |bytes| participant.claim(bytes, Wait::Host, Some(WATCHDOG));
        let threads: Vec<_> = claims
            .iter()
            .map(|d| scope.spawn(move || claim(d.as_bytes())))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect()
    });
    assert_eq!(
        results.iter().filter(|result| result.is_err()).count(),
        1,
        "{results:?}"
    );
    assert_eq!(
        (participant.mappings(), stage.mappings()),
        (1, 1),
        "held, and the producer knows of no mapping"
    );
}

#[test]
fn a_participant_that_is_closed_was_heard_and_is_no_death() {
    let stage = Stage::new();
    let block = stage.session.alloc(4096).expect("there is room");
    let (participant, relay) = stage.connect(loses_first(&[BYE, NOTED, UNMAPPED, NOTED]));
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    let received = participant
        .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    let error = participant
        .clone()
        .close(Some(Duration::ZERO))
        .expect_err("another handle is there");
    assert!(error.to_string().contains("other handles"), "{error}");
    let close = std::thread::spawn(move || participant.close(Some(WATCHDOG)));
    drop(received);
    close.join().expect("no panic").expect("heard");
    assert_eq!(stage.mappings(), 0);
    wait_until("it to be gone", || stage.session.stats().participants == 0);
    assert_eq!(stage.session.stats().deaths, 0);
    drop(relay);
}

#[test]
fn a_close_that_is_not_heard_says_what_it_waits_for() {
    let stage = Stage::new();
    let (participant, _relay) = stage.connect(|number| {
        if number == BYE {
            Fate::Lost
        } else {
            Fate::Passes
        }
    });
    let error = participant
        .close(Some(Duration::from_millis(1)))
        .expect_err("nobody hears it");
    assert!(
        error
            .to_string()
            .contains("the producer to hear the goodbye"),
        "{error}"
    );
}

#[test]
fn lost_answers_about_single_pieces_are_asked_for_again() {
    let (stage, block) = Stage::of_pieces();
    // Of the three the second's question and answer are lost, and the third's answer twice.
    let mut seen = 0;
    let (participant, _relay) = stage.connect(move |number| {
        seen += u32::from([MAP_REGION, REGION].contains(&number));
        if [3, 5, 8, 10].contains(&seen) && [MAP_REGION, REGION].contains(&number) {
            Fate::Lost
        } else {
            Fate::Passes
        }
    });
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    let claimed = participant
        .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    assert_eq!(
        (claimed.device_ptr(), claimed.len()),
        (block.device_ptr(), 3 * PIECE)
    );
    assert_eq!((participant.mappings(), stage.mappings()), (3, 3));
}

#[test]
fn a_claim_that_gives_up_between_pieces_pins_those_that_are_mapped_alone() {
    let (stage, block) = Stage::of_pieces();
    let (participant, relay) = stage.connect(|_| Fate::Passes);
    drop(block);
    let first = stage.session.alloc(PIECE / 2).expect("there is room");
    let block = stage
        .session
        .alloc(2 * PIECE)
        .expect("two and a half pieces are free");
    let share = |block: &SentBlock| {
        block
            .share(To::Participant(participant.id()), After::Done)
            .expect("shared")
    };
    let held = participant
        .claim(share(&first).as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    // Nor does the producer hear at once that the claim has given up.
    relay.rule(|number| {
        if [REGION, UNMAPPED].contains(&number) {
            Fate::Waits
        } else {
            Fate::Passes
        }
    });
    let descriptor = share(&block);
    let claim = |wait| participant.claim(descriptor.as_bytes(), Wait::Host, Some(wait));
    assert!(matches!(
        claim(Duration::from_millis(1)),
        Err(ClaimError::Backend(Error::Deadline { .. }))
    ));
    wait_until("the question for the second piece to be heard", || {
        stage.mappings() == 2
    });
    relay.rule(|_| Fate::Passes);
    wait_until("the second piece to be unpinned", || stage.mappings() == 1);
    assert_eq!(participant.mappings(), 1);
    // Nothing is lost.
    let claimed = claim(WATCHDOG).expect("claimed");
    assert_eq!(claimed.len(), 2 * PIECE);
    assert_eq!((participant.mappings(), stage.mappings()), (3, 3));
    drop(held);
}

/// Tries to claim until nothing has to be waited for.
fn try_until_claimed(participant: &Participant, descriptor: &Descriptor) -> ReceivedBlock {
    let mut claimed = None;
    wait_until("the block", || {
        match participant.try_claim(descriptor.as_bytes(), Wait::Host) {
            Ok(block) => {
                claimed = Some(block);
                true
            }
            Err(ClaimError::WouldBlock) => false,
            Err(error) => panic!("{error}"),
        }
    });
    claimed.expect("just claimed")
}

#[test]
fn a_try_goes_on_piece_by_piece_and_is_abandoned_with_all_of_them() {
    let (stage, block) = Stage::of_pieces();
    let (participant, relay) = stage.connect(|_| Fate::Passes);
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    let claimed = try_until_claimed(&participant, &descriptor);
    assert_eq!(claimed.len(), 3 * PIECE);
    drop(claimed);

    let (another, _relay) = stage.connect(|number| {
        if number == REGION {
            Fate::Lost
        } else {
            Fate::Passes
        }
    });
    drop((participant, relay));
    wait_until("the first to be gone", || stage.mappings() == 0);
    let descriptor = block
        .share(To::Participant(another.id()), After::Done)
        .expect("shared");
    assert!(matches!(
        another.try_claim(descriptor.as_bytes(), Wait::Host),
        Err(ClaimError::WouldBlock)
    ));
    wait_until("the question to be heard", || stage.mappings() == 1);
    another.abandon(descriptor.as_bytes());
    wait_until("the region to be unpinned", || stage.mappings() == 0);
}

#[test]
fn a_try_comes_to_an_end_across_more_pieces_than_the_cache_keeps() {
    const PIECES: u64 = 24;
    let stage = Stage::of(
        ArenaOptions::default()
            .growth(Growth::Fixed(PIECE))
            .grows_in_place(true),
    );
    let pieces: Vec<_> = (0..PIECES)
        .map(|_| stage.session.alloc(PIECE).expect("there is room"))
        .collect();
    drop(pieces);
    let block = stage
        .session
        .alloc(PIECES * PIECE)
        .expect("all of them are free");
    assert_eq!(stage.session.stats().source.regions, PIECES);
    let builder = Participant::builder(stage.gpu.clone()).mapping_cache(PIECE, 1);
    let participant = builder
        .connect(stage.session.socket_path())
        .expect("connected");
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    // If each try lost what an earlier one has mapped, this would take 16 million of them.
    let claimed = try_until_claimed(&participant, &descriptor);
    assert_eq!(participant.mappings() as u64, PIECES);
    drop(claimed);
    wait_until("the cache to keep no more than it may", || {
        participant.mappings() <= 1
    });
}

#[test]
fn claims_from_many_threads_map_each_piece_once() {
    let (stage, block) = Stage::of_pieces();
    let (participant, _relay) = stage.connect(|_| Fate::Passes);
    for _ in 0..20 {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let descriptor = block
                        .share(To::Participant(participant.id()), After::Done)
                        .expect("shared");
                    let claimed =
                        participant.claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG));
                    let claimed = claimed.expect("claimed");
                    assert_eq!(claimed.device_ptr(), block.device_ptr());
                    drop(claimed.clone());
                });
            }
        });
        assert_eq!((participant.mappings(), stage.mappings()), (3, 3));
    }
    wait_until("all leases to end", || {
        stage.session.collect();
        block.outstanding() == 0
    });
    drop(block);
    wait_until("all pieces to go back", || {
        stage.session.trim().expect("the driver takes them");
        stage.session.stats().source.reserved == 0
    });
}

/// A file that says when its last copy is closed.
fn watched() -> (OwnedFd, impl FnMut() -> bool) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    let is_closed = move || std::io::Write::write_all(&mut writer, b"x").is_err();
    (reader.into(), is_closed)
}

#[test]
fn lost_questions_and_answers_about_deposits_are_repeated_and_nothing_is_kept_twice() {
    let stage = Stage::new();
    let lost = [DEPOSIT, NOTED, FETCH, FETCHED, FETCHED, END_DEPOSIT, NOTED];
    let (participant, _relay) = stage.connect(loses_first(&lost));
    let (file, mut is_closed) = watched();
    let id = DepositId([1; 16]);
    participant
        .deposit(id, file, Some(WATCHDOG))
        .expect("deposited");
    assert_eq!(stage.session.deposits(), 1);
    drop(participant.fetch(id, Some(WATCHDOG)).expect("fetched"));
    wait_until("the end of the fetch", || stage.session.deposits() == 0);
    wait_until("the last copy's end", &mut is_closed);
}

#[test]
fn a_deposit_that_gave_up_is_taken_back_however_late_it_comes() {
    let stage = Stage::new();
    let (participant, relay) = stage.connect(|_| Fate::Passes);
    relay.rule(|number| match number {
        DEPOSIT => Fate::Waits,
        _ => Fate::Passes,
    });
    let (file, mut is_closed) = watched();
    let id = DepositId([1; 16]);
    let late = participant.deposit(id, file, Some(Duration::from_millis(1)));
    assert!(
        matches!(late, Err(ClaimError::Backend(Error::Deadline { .. }))),
        "{late:?}"
    );
    relay.rule(|_| Fate::Passes);
    // Behind it came its end.
    wait_until("the last copy's end", &mut is_closed);
    assert_eq!(stage.session.deposits(), 0);
}

#[test]
fn a_fetch_that_gave_up_leaves_the_descriptor_however_late_its_answer_comes() {
    let stage = Stage::new();
    let (participant, relay) = stage.connect(|_| Fate::Passes);
    let (file, mut is_closed) = watched();
    let id = DepositId([1; 16]);
    stage.session.deposit(id, file).expect("deposited");
    relay.rule(|number| match number {
        FETCHED => Fate::Waits,
        _ => Fate::Passes,
    });
    let late = participant.fetch(id, Some(Duration::from_millis(1)));
    assert!(
        matches!(late, Err(ClaimError::Backend(Error::Deadline { .. }))),
        "{late:?}"
    );
    // Its end overtakes no question of it, and the session has it back before the answer arrives.
    let mut kept = None;
    wait_until("the fetch's end", || {
        kept = stage.session.fetch(id).ok();
        kept.is_some()
    });
    assert_eq!(stage.session.deposits(), 0);
    relay.rule(|_| Fate::Passes);
    drop(kept);
    wait_until("the end of the late copy", &mut is_closed);
}
