//! What is not theirs: another's lease, another's session, a descriptor twice, a ticket that was
//! never sent, another process' death.

use std::hash::Hasher;

use gpu_ipc::backend::RegionId;
use gpu_ipc::{
    After, ClaimError, Claims, Descriptor, Error, Participant, ParticipantId, SentBlock, To, Wait,
};
use harness::{WATCHDOG, wait_until};
use siphasher::sip::SipHasher13;

use crate::stranger::{
    CLAIM_TICKETS, DECLINED, FORWARD, HELLO, Idler, MAP_REGION, NO_REGION, REFUSED, REGION,
    Stranger, TICKETS, hear, hello, lease, map_region, say,
};
use crate::{Case, Stage};

pub const CASES: &[Case] = &[
    ("forged::another_participants_lease", another_lease),
    (
        "forged::another_participants_descriptor",
        another_descriptor,
    ),
    ("forged::a_descriptor_that_is_replayed", replayed),
    ("forged::a_session_id", session_id),
    (
        "forged::a_descriptor_sealed_with_ones_own_key",
        sealed_with_its_own_key,
    ),
    ("forged::a_ticket_sealed_by_a_participant", sealed_ticket),
    ("forged::a_part_outside_the_block", part_outside),
    ("forged::a_ticket_that_was_guessed", guessed_ticket),
    ("forged::another_process_death", another_death),
    ("forged::a_hello_with_what_is_no_process", no_process),
];

/// Every lease that exists, and many that do not, named by somebody whose they are not.
fn another_lease() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let heard = stranger.ask(MAP_REGION, &map_region(&stage.theirs));
    assert_eq!((heard.number, heard.fds.len()), (NO_REGION, 0));
    assert!(
        heard.text(8).contains("no lease of yours"),
        "{:?}",
        heard.text(8)
    );
    let forward = |lease: &[u8], kind: u8, to: u64| {
        let claims = u32::from(kind == 2);
        let body = [
            &[0; 8],
            lease,
            &stage.theirs.as_bytes()[72..88],
            &[kind, 0, 0, 0],
            &claims.to_le_bytes(),
            &to.to_le_bytes(),
            &[0; 64],
        ]
        .concat();
        stranger.ask(FORWARD, &body)
    };
    for (kind, to) in [(1, stranger.id), (1, stage.honest.id().0), (2, 0)] {
        let heard = forward(&lease(&stage.theirs), kind, to);
        assert_eq!(heard.number, DECLINED);
        assert!(
            heard.text(0).contains("the lease to forward"),
            "{:?}",
            heard.text(0)
        );
    }
    // Guessing: each slot of the first file and beyond it, in its first generations.
    for file in [0u32, 1, u32::MAX] {
        for slot in (0..8192u32).step_by(509).chain([8192, u32::MAX]) {
            for generation in [0u64, 1, 2, (1 << 61) - 1] {
                let lease = [
                    &file.to_le_bytes()[..],
                    &slot.to_le_bytes(),
                    &generation.to_le_bytes(),
                ]
                .concat();
                let region = &stage.theirs.as_bytes()[64..72];
                let heard = stranger.ask(MAP_REGION, &[region, &[0; 8], &lease].concat());
                assert_eq!(
                    (heard.number, heard.fds.len()),
                    (NO_REGION, 0),
                    "file {file} slot {slot}"
                );
            }
        }
    }
    drop(stranger);
    stage.end();
}

fn another_descriptor() {
    let stage = Stage::new();
    let other = Participant::builder(stage.gpu.clone())
        .connect(stage.session.socket_path())
        .expect("connected");
    let block = stage.block();
    let descriptor = block
        .share(To::Participant(stage.honest.id()), After::Done)
        .expect("shared");
    let claim = |bytes: &[u8]| {
        other
            .claim(bytes, Wait::Host, Some(WATCHDOG))
            .expect_err("it is not its own")
    };
    let error = claim(descriptor.as_bytes());
    assert!(
        matches!(&error, ClaimError::Refused { why, .. } if why.contains("participant")),
        "{error}"
    );
    // Even where it says that it is: it was not sealed by its key.
    let error = claim(&altered(&descriptor, 40, &other.id().0.to_le_bytes()));
    assert!(is_altered(&error), "{error}");
    drop(block);
    stage
        .honest
        .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("it is still there to be claimed");
    drop(other);
    stage.end();
}

fn replayed() {
    let stage = Stage::new();
    let claim = |bytes: &[u8]| stage.honest.claim(bytes, Wait::Host, Some(WATCHDOG));
    let block = stage.block();
    let share = || {
        block
            .share(To::Participant(stage.honest.id()), After::Done)
            .expect("shared")
    };
    let first = share();
    let held = claim(first.as_bytes()).expect("its own");
    assert!(matches!(
        claim(first.as_bytes()),
        Err(ClaimError::AlreadyClaimed)
    ));
    drop(held);
    wait_until("the lease to end", || {
        stage.session.collect();
        block.outstanding() == 0
    });
    assert!(matches!(
        claim(first.as_bytes()),
        Err(ClaimError::AlreadyClaimed | ClaimError::Stale)
    ));
    // Until its slot is granted again, to the same participant: the old descriptor does not take
    // the new lease.
    let again = loop {
        let again = share();
        if again.as_bytes()[48..56] == first.as_bytes()[48..56] {
            break again;
        }
        assert!(
            block.outstanding() < 8192,
            "the slot is never granted again"
        );
    };
    assert!(matches!(claim(first.as_bytes()), Err(ClaimError::Stale)));
    claim(again.as_bytes()).expect("the new lease is untouched");
    // A ticket, too, is claimed as often as it says.
    let ticket = block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("shared");
    let other = Participant::builder(stage.gpu.clone())
        .connect(stage.session.socket_path())
        .expect("connected");
    let held = other
        .claim(ticket.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("the first who asks");
    assert!(matches!(
        claim(ticket.as_bytes()),
        Err(ClaimError::AlreadyClaimed)
    ));
    drop((held, other, block));
    stage.end();
}

fn session_id() {
    let (stage, other) = (Stage::new(), Stage::new());
    let block = other.block();
    let descriptor = block
        .share(To::Participant(other.honest.id()), After::Done)
        .expect("shared");
    let claim = |bytes: &[u8]| {
        stage
            .honest
            .claim(bytes, Wait::Host, Some(WATCHDOG))
            .expect_err("it is another's")
    };
    let error = claim(descriptor.as_bytes());
    assert!(
        matches!(&error, ClaimError::Refused { why, .. } if why.contains("session")),
        "{error}"
    );
    // With this session's number written over.
    let ours = &stage.theirs.as_bytes()[24..48];
    let error = claim(&altered(&descriptor, 24, ours));
    assert!(is_altered(&error), "{error}");
    drop(block);
    stage.end();
    other.end();
}

/// A participant has two keys. Neither makes a descriptor for another.
fn sealed_with_its_own_key() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let (block, neighbour) = (stage.block(), stage.block());
    let share = |block: &SentBlock| {
        block
            .share(To::Participant(stage.honest.id()), After::Done)
            .expect("shared")
    };
    let (true_one, other) = (share(&block), share(&neighbour));
    for key in stranger.keys {
        let forged = sealed(&key, &true_one, 72, &other.as_bytes()[72..80]);
        let error = stage
            .honest
            .claim(&forged, Wait::Host, Some(WATCHDOG))
            .expect_err("it is sealed with another's key");
        assert!(is_altered(&error), "{error}");
    }
    stage
        .honest
        .claim(true_one.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("the true one is still there to be claimed");
    drop((stranger, block, neighbour));
    stage.end();
}

/// A participant can seal tickets. What is granted is what the producer says, whatever they name.
fn sealed_ticket() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let (block, neighbour) = (stage.block(), stage.block());
    let far = |value: u64| value.to_le_bytes().to_vec();
    let other = neighbour
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("shared");
    let fence = [&[3, 0, 0, 0], &[0; 4], &(1u64 << 60).to_le_bytes()[..]].concat();
    let cases: [(usize, Vec<u8>); 7] = [
        (72, other.as_bytes()[72..80].to_vec()),
        (80, far(256)),
        (80, far(16 << 20)),
        (64, far(u64::MAX - 7)),
        (72, far(1 << 40)),
        (88, fence),
        (112, vec![7; 64]),
    ];
    for (at, value) in cases {
        let ticket = block
            .share(To::Ticket(Claims::Once), After::Done)
            .expect("shared");
        let forged = sealed(&stranger.keys[1], &ticket, at, &value);
        let held = stage
            .honest
            .claim(&forged, Wait::Host, Some(WATCHDOG))
            .unwrap_or_else(|e| panic!("{at}: {e}"));
        assert_eq!(
            (held.device_ptr(), held.len(), held.region()),
            (
                block.device_ptr(),
                block.len(),
                RegionId(region_of(&ticket))
            ),
            "{at}"
        );
    }
    drop((stranger, block, neighbour));
    stage.end();
}

fn region_of(descriptor: &Descriptor) -> u64 {
    u64::from_le_bytes(descriptor.as_bytes()[64..72].try_into().expect("8 bytes"))
}

/// What is forwarded lies in the block of the lease.
fn part_outside() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let blocks: Vec<SentBlock> = (0..3).map(|_| stage.block()).collect();
    let descriptor = blocks[1]
        .share(To::Participant(ParticipantId(stranger.id)), After::Done)
        .expect("shared");
    let (offset, len) = (place_of(&descriptor).0, blocks[1].len());
    let ask = |offset: u64, len: u64| {
        let body = [
            &[0; 8],
            &lease(&descriptor)[..],
            &offset.to_le_bytes(),
            &len.to_le_bytes(),
            &[1, 0, 0, 0],
            &[0; 4],
            &stage.honest.id().0.to_le_bytes(),
            &[0; 64],
        ]
        .concat();
        stranger.ask(FORWARD, &body)
    };
    for (offset, len) in [
        (offset - 1, len),
        (offset + 1, len),
        (offset, len + 1),
        (offset + len, 1),
        (offset, 0),
        (0, 1),
        (u64::MAX, 1),
        (offset, u64::MAX),
        (u64::MAX, u64::MAX),
    ] {
        let heard = ask(offset, len);
        assert_eq!(heard.number, DECLINED, "{len} bytes at {offset}");
        let text = heard.text(0);
        assert!(text.contains("the part to forward"), "{text}");
    }
    let heard = ask(offset + 1, len - 1);
    assert_eq!(heard.number, 137, "a part of the block");
    let onward = Descriptor::decode(&heard.body).expect("a descriptor");
    assert_eq!(place_of(&onward), (offset + 1, len - 1));
    drop((stranger, blocks));
    stage.end();
}

fn place_of(descriptor: &Descriptor) -> (u64, u64) {
    let number = |at: usize| {
        let bytes = &descriptor.as_bytes()[at..at + 8];
        u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
    };
    (number(72), number(80))
}

/// A participant may ask for any ticket: what it was not sent it has to guess, and a ticket that
/// never was is stale.
fn guessed_ticket() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    for number in [0u32, 1, 2, 63, 1 << 20, u32::MAX] {
        for generation in [0u64, 1, 2, (1 << 61) - 1] {
            let ticket = [
                &number.to_le_bytes()[..],
                &[0; 4],
                &generation.to_le_bytes(),
            ]
            .concat();
            let heard = stranger.ask(
                CLAIM_TICKETS,
                &[&1u32.to_le_bytes()[..], &[0; 4], &ticket].concat(),
            );
            assert_eq!(heard.number, TICKETS);
            assert_eq!(
                heard.body[12..16],
                3u32.to_le_bytes(),
                "ticket {number} is not stale"
            );
        }
    }
    drop(stranger);
    stage.end();
}

/// A participant that names another process as itself is not taken for dead when that one dies,
/// while it is connected.
fn another_death() {
    let stage = Stage::new();
    let mut idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let block = stage.block();
    let descriptor = block
        .share(To::Participant(ParticipantId(stranger.id)), After::Done)
        .expect("shared");
    let heard = stranger.ask(MAP_REGION, &map_region(&descriptor));
    assert_eq!((heard.number, heard.fds.len()), (REGION, 1));
    // It claims: its own file is its to write.
    let file = stranger.files.last().expect("a counter file came");
    let (slot, generation) = (
        &descriptor.as_bytes()[52..56],
        &descriptor.as_bytes()[56..64],
    );
    let slot = u64::from(u32::from_le_bytes(slot.try_into().expect("4 bytes")));
    let held = u64::from_le_bytes(generation.try_into().expect("8 bytes")) << 3 | 2;
    let dirty_bytes = (8192u64 / 64 * 8).next_multiple_of(4096);
    rustix::io::pwrite(file, &held.to_le_bytes(), 8192 + dirty_bytes + slot * 8).expect("a memfd");
    drop(block);
    idler.kill();
    wait_until("the death to be noticed", || {
        stage
            .session
            .stats()
            .holders
            .iter()
            .any(|holder| holder.dying)
    });
    for _ in 0..100 {
        stage.session.collect();
        // The honest one's and its own.
        assert_eq!(
            stage.session.stats().limbo_blocks,
            2,
            "what is held was given away"
        );
    }
    drop(stranger);
    wait_until("its block to come back", || {
        stage.session.collect();
        stage.session.stats().limbo_blocks == 1
    });
    stage.end();
}

fn no_process() {
    use std::os::fd::AsFd;
    let stage = Stage::new();
    let file = std::fs::File::open("/dev/null").expect("a file");
    let idler = Idler::new();
    for fds in [vec![file.as_fd()], vec![idler.fd(), file.as_fd()]] {
        let socket = Stranger::connect(stage.session.socket_path()).expect("it listens");
        let body = hello(&stage.gpu, fds.len() as u16 - 1);
        say(&socket, HELLO, 0, &body, &fds).expect("said");
        let heard = hear(&socket).expect("it answers");
        assert_eq!(heard.number, REFUSED);
        assert!(heard.text(0).contains("not a pidfd"), "{:?}", heard.text(0));
    }
    assert_eq!(stage.session.stats().participants, 1);
    stage.end();
}

/// Returns a descriptor's bytes with some changed, as a producer could write them.
fn altered(descriptor: &Descriptor, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut altered = descriptor.as_bytes().to_vec();
    altered[at..at + bytes.len()].copy_from_slice(bytes);
    // Whether there are user bytes is in a flag of its own.
    altered[104] = u8::from(altered[112..176] != [0; 64]);
    altered
}

/// Returns a descriptor's bytes with some changed, sealed with a key.
fn sealed(key: &[u8; 16], descriptor: &Descriptor, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut sealed = altered(descriptor, at, bytes);
    let mut hash = SipHasher13::new_with_key(key);
    hash.write(&sealed[..if sealed[104] & 1 == 0 { 112 } else { 176 }]);
    sealed[184..].copy_from_slice(&hash.finish().to_le_bytes());
    sealed
}

/// Says whether a claim was refused because of the keyed checksum.
fn is_altered(error: &ClaimError) -> bool {
    matches!(
        error,
        ClaimError::Backend(Error::BadDescriptor {
            what: "the keyed checksum",
            ..
        })
    )
}
