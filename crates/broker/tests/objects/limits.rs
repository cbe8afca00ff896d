//! Every limit of `docs/WIRE.md` and of a broker, tried over its socket: what is one too many is
//! refused by name, and costs nobody else anything.

use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use broker::wire::{RefusalCode, Selector, Standing, ToBroker, ToClient};
use broker::{CreateOptions, Epoch, Identity, Layout, PartSpec};
use transport::shared::sealed_file;

use crate::agent::{Agent, Dir, client, layout, put, seed_of, serving, started};
use crate::bad_input::{create, draft, file_of};
use crate::raw::{Raw, hello};
use crate::{Case, until};

pub const CASES: &[Case] = &[
    (
        "limits::a_manifest_one_beyond_each_limit_is_refused",
        a_manifest_one_beyond_each_limit_is_refused,
    ),
    (
        "limits::a_manifest_at_each_limit_is_taken",
        a_manifest_at_each_limit_is_taken,
    ),
    (
        "limits::texts_are_at_most_512_bytes",
        texts_are_at_most_512_bytes,
    ),
    (
        "limits::a_packet_beyond_4096_bytes_silences_its_sender_alone",
        a_long_packet_silences_its_sender_alone,
    ),
    (
        "limits::a_participant_has_at_most_64_unfinished_objects",
        a_participant_has_at_most_64_unfinished_objects,
    ),
    (
        "limits::silent_connections_keep_nobody_out",
        silent_connections_keep_nobody_out,
    ),
    (
        "limits::participants_beyond_the_most_are_refused",
        participants_beyond_the_most_are_refused,
    ),
    (
        "limits::a_flood_of_one_keeps_no_other_waiting",
        a_flood_of_one_keeps_no_other_waiting,
    ),
    (
        "limits::a_sum_costs_the_same_however_many_objects_there_are",
        a_sum_costs_the_same,
    ),
    (
        "limits::as_many_descriptors_as_the_kernel_passes_harm_nobody",
        many_descriptors_harm_nobody,
    ),
];

/// Says why a broker refuses a draft of these bytes.
fn refused(raw: &Raw, bytes: &[u8]) -> String {
    let file = sealed_file::create("draft", bytes).expect("a memfd");
    raw.say(&create(7, Identity([1; 16])), &[file.as_fd()]);
    match raw.hear() {
        Some((
            ToClient::Declined {
                request: 7,
                refusal: RefusalCode::Layout,
                why,
            },
            _,
        )) => why,
        answer => panic!("{answer:?}"),
    }
}

/// Where the second part's offset is in the bytes of a draft of `layout(1)`: behind the header, one
/// region's bytes, the name, the user bytes, the first part of 42 bytes, and 8 bytes of the second.
const SECOND_OFFSET: usize = 96 + 8 + "model".len() + 8 + 42 + 8;

/// A draft of which some bytes were changed, with the checksum that belongs to it: what only a
/// participant that lies sends.
fn forged(at: usize, with: &[u8]) -> Vec<u8> {
    let mut bytes = draft(Identity([1; 16]), "model", layout(1))
        .encode()
        .expect("bytes");
    bytes[at..at + with.len()].copy_from_slice(with);
    let sum = crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..]);
    bytes[12..16].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn a_manifest_one_beyond_each_limit_is_refused() {
    let (dir, _keeper) = started();
    let (raw, _file) = Raw::greeted(&dir);
    for (what, bytes, why) in [
        (
            "64 MiB and a byte",
            vec![0; (64 << 20) + 1],
            "at most 64 MiB",
        ),
        ("17 regions", forged(58, &[17]), ""),
        ("17 uids", forged(59, &[17]), ""),
        (
            "1,000,001 parts",
            forged(72, &1_000_001u32.to_le_bytes()),
            "",
        ),
        ("a name of 256 bytes", forged(76, &256u32.to_le_bytes()), ""),
        (
            "user bytes beyond 64 bits",
            forged(80, &u64::MAX.to_le_bytes()),
            "",
        ),
        (
            "a part over another",
            forged(SECOND_OFFSET, &0u64.to_le_bytes()),
            "no two parts share a byte",
        ),
        (
            "a part outside",
            forged(SECOND_OFFSET, &(1u64 << 40).to_le_bytes()),
            "inside its region",
        ),
        (
            "a part beyond 64 bits",
            forged(SECOND_OFFSET, &(u64::MAX - 255).to_le_bytes()),
            "inside its region",
        ),
        (
            "a part at no multiple of 256",
            forged(SECOND_OFFSET, &8u64.to_le_bytes()),
            "at a multiple of 256",
        ),
    ] {
        let text = refused(&raw, &bytes);
        assert!(text.contains(why) && !text.is_empty(), "{what}: {text}");
    }
    raw.say(
        &create(8, Identity([1; 16])),
        &[file_of(&draft(Identity([1; 16]), "model", layout(1))).as_fd()],
    );
    assert!(
        matches!(raw.hear(), Some((ToClient::Created { request: 8, .. }, _))),
        "a good one is taken after all"
    );
}

fn a_manifest_at_each_limit_is_taken() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    let groups = (0..16).map(|n| [PartSpec::bytes(format!("p{n}"), 1).expect("a part")]);
    let sixteen = Layout::pack_groups(groups, &vec![7; 63 << 20]).expect("16 regions");
    let name = "n".repeat(255);
    let writer = client
        .create(&name, sixteen)
        .expect("16 regions, 63 MiB of manifest and a name of 255 bytes");
    assert_eq!(
        writer
            .commit(&[])
            .expect("queued")
            .wait()
            .expect("a commit"),
        Epoch(1)
    );
    let reader = client.open(&name).expect("an object");
    assert_eq!(
        (
            reader.layout().regions().len(),
            reader.layout().user().len()
        ),
        (16, 63 << 20)
    );
    let parts = (0..1_000_000).map(|n| PartSpec::bytes(format!("{n}"), 0).expect("a part"));
    let writer = client
        .create("parts", Layout::pack(parts, b"").expect("a layout"))
        .expect("a million parts");
    writer
        .commit(&[])
        .expect("queued")
        .wait()
        .expect("a commit");
    assert_eq!(
        client
            .open("parts")
            .expect("an object")
            .layout()
            .parts()
            .len(),
        1_000_000
    );
}

/// A `Watch` as bytes, whose name has this many bytes.
fn watch(request: u64, name: usize) -> Vec<u8> {
    let header = [&b"GO\x01\0\x08\0\0\0"[..], &request.to_le_bytes(), &[0; 8]].concat();
    [
        header,
        (name as u16).to_le_bytes().to_vec(),
        vec![b'n'; name],
    ]
    .concat()
}

fn texts_are_at_most_512_bytes() {
    let (dir, _keeper) = started();
    let (raw, _file) = Raw::greeted(&dir);
    // A good watch is answered when there is something, and the question behind it at once.
    raw.say_bytes(&watch(1, 512), &[]);
    raw.say(&ToBroker::List { request: 2 }, &[]);
    assert!(matches!(
        raw.hear(),
        Some((ToClient::Listing { request: 2, .. }, _))
    ));
    let (long_watch, _file) = Raw::greeted(&dir);
    long_watch.say_bytes(&watch(1, 513), &[]);
    long_watch.say(&ToBroker::List { request: 2 }, &[]);
    raw.say(&ToBroker::List { request: 3 }, &[]);
    assert!(matches!(
        raw.hear(),
        Some((ToClient::Listing { request: 3, .. }, _))
    ));
    assert!(
        long_watch.hear_until(Some(Instant::now())).is_err(),
        "it is read again"
    );
    let long = Selector::Latest("x".repeat(512));
    raw.say(
        &ToBroker::Open {
            request: 4,
            selector: long,
        },
        &[],
    );
    let Some((
        ToClient::Declined {
            request: 4,
            refusal: RefusalCode::NotFound,
            why,
        },
        _,
    )) = raw.hear()
    else {
        panic!("a name that no object can have");
    };
    assert_eq!(why, "it was never committed");
    // A hello's name is cut by a good client, and refused from a bad one.
    let bad = Raw::connect(&dir);
    let name = [&600u16.to_le_bytes()[..], &[b'n'; 600]].concat();
    let hello = [
        &b"GO\x01\0\x01\0\x01\0\0\0\0\0\0\0\0\0\x01\0\x01\0\0\0\0\0"[..],
        &name,
    ]
    .concat();
    bad.say_bytes(
        &hello,
        &[transport::os::process::own_pidfd()
            .expect("a pidfd")
            .as_fd()],
    );
    let Some((
        ToClient::Refused {
            refusal: RefusalCode::Protocol,
            why,
            ..
        },
        _,
    )) = bad.hear()
    else {
        panic!("no refusal")
    };
    assert!(
        why.contains("the text's length is 600, but must be at most 512"),
        "{why}"
    );
}

fn a_long_packet_silences_its_sender_alone() {
    let (dir, _keeper) = started();
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    let (raw, _file) = Raw::greeted(&dir);
    raw.say(
        &ToBroker::Open {
            request: 1,
            selector: Selector::Latest("model".into()),
        },
        &[],
    );
    assert!(matches!(raw.hear(), Some((ToClient::Opened { .. }, _))));
    let readers = || client.list().expect("it answers").objects[0].readers.len();
    assert_eq!(readers(), 1);
    for bytes in [&[b'G'; 4097][..], &[b'G'; 60_000]] {
        raw.say_bytes(bytes, &[]);
    }
    let stranger = Raw::connect(&dir);
    stranger.say_bytes(&[b'G'; 4097], &[]);
    assert!(matches!(
        stranger.hear(),
        Some((
            ToClient::Refused {
                refusal: RefusalCode::Protocol,
                ..
            },
            _
        ))
    ));
    assert!(
        stranger.hear().is_none(),
        "a connection that is no participant's ends"
    );
    assert_eq!(
        seed_of(&client.open("model").expect("others are served")),
        1
    );
    drop(raw);
    until("its hang-up is noticed all the same", || readers() == 0);
}

fn a_participant_has_at_most_64_unfinished_objects() {
    let (dir, _keeper) = started();
    let (raw, _file) = Raw::greeted(&dir);
    let identity = |n: u64| Identity([n as u8 + 1; 16]);
    let ask = |n: u64| {
        let draft = file_of(&draft(identity(n), &format!("n{n}"), layout(1)));
        raw.say(&create(n, identity(n)), &[draft.as_fd()]);
        raw.hear().expect("an answer").0
    };
    for n in 0..64 {
        let answer = ask(n);
        assert!(
            matches!(answer, ToClient::Created { .. }),
            "{n}: {answer:?}"
        );
    }
    let ToClient::Declined {
        refusal: RefusalCode::Limit,
        why,
        ..
    } = ask(64)
    else {
        panic!("the 65th")
    };
    assert_eq!(why, "the participant has 64 unfinished objects already");
    let other = client(&dir);
    put(&other, "model", 1, &CreateOptions::default()).expect("another participant has room");
    raw.say(
        &ToBroker::Abort {
            request: 100,
            identity: identity(0),
        },
        &[],
    );
    assert!(matches!(raw.hear(), Some((ToClient::Noted { .. }, _))));
    assert!(matches!(ask(65), ToClient::Created { .. }));
}

fn silent_connections_keep_nobody_out() {
    let (dir, _keeper) = started();
    let first = Raw::connect(&dir);
    // 256 may be silent at a time.
    let silent: Vec<Raw> = (0..300).map(|_| Raw::connect(&dir)).collect();
    let client = client(&dir);
    put(&client, "model", 1, &CreateOptions::default()).expect("a commit");
    assert!(
        first.hear().is_none(),
        "the one that was silent for longest went"
    );
    let last = silent.last().expect("one of 300");
    last.say(
        &hello(1, 1),
        &[transport::os::process::own_pidfd()
            .expect("a pidfd")
            .as_fd()],
    );
    assert!(
        matches!(last.hear(), Some((ToClient::Welcome { .. }, _))),
        "the last may still speak"
    );
}

fn participants_beyond_the_most_are_refused() {
    let dir = Dir::new();
    let _keeper = Agent::crowded(&dir, 2);
    until("the broker listens", || dir.join("broker").exists());
    let (first, second) = (Raw::greeted(&dir), Raw::greeted(&dir));
    let third = Raw::connect(&dir);
    third.say(
        &hello(1, 1),
        &[transport::os::process::own_pidfd()
            .expect("a pidfd")
            .as_fd()],
    );
    let Some((
        ToClient::Refused {
            refusal: RefusalCode::Limit,
            why,
            ..
        },
        _,
    )) = third.hear()
    else {
        panic!("no refusal")
    };
    assert_eq!(why, "the broker has 2 participants already");
    drop(first);
    until("there is room again", || {
        let next = Raw::connect(&dir);
        next.say(
            &hello(1, 1),
            &[transport::os::process::own_pidfd()
                .expect("a pidfd")
                .as_fd()],
        );
        matches!(next.hear(), Some((ToClient::Welcome { .. }, _)))
    });
    drop(second);
}

fn a_flood_of_one_keeps_no_other_waiting() {
    let (dir, _keeper) = started();
    let (raw, _file) = Raw::greeted(&dir);
    let client = client(&dir);
    let identity = Identity([9; 16]);
    // Never read: the broker's answers fill the socket and are dropped from there on.
    let flood = |from: u64| {
        for request in from..from + 2_000 {
            raw.say(&ToBroker::AskOutcome { request, identity }, &[]);
        }
    };
    for round in 0..10 {
        flood(1 + round * 2_000);
        let epoch = put(&client, "model", round, &CreateOptions::default()).expect("a commit");
        assert_eq!(epoch, Epoch(round + 1));
    }
    let answer = raw.hear().expect("the first was answered").0;
    assert_eq!(
        answer,
        ToClient::Outcome {
            request: 1,
            standing: Standing::Unknown
        }
    );
}

fn many_descriptors_harm_nobody() {
    let (dir, _keeper) = started();
    let files: Vec<OwnedFd> = (0..201)
        .map(|_| std::io::pipe().expect("a pipe").0.into())
        .collect();
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let stranger = Raw::connect(&dir);
    let mut hello = hello(1, 1);
    if let ToBroker::Hello { descendants, .. } = &mut hello {
        *descendants = 200;
    }
    stranger.say(&hello, &fds);
    let Some((
        ToClient::Refused {
            refusal: RefusalCode::Protocol,
            why,
            ..
        },
        _,
    )) = stranger.hear()
    else {
        panic!("no refusal");
    };
    assert_eq!(why, "a descriptor of the hello is not a pidfd");
    let (raw, _file) = Raw::greeted(&dir);
    for request in 0..3 {
        raw.say(&ToBroker::List { request }, &fds);
    }
    client(&dir).list().expect("others are served");
    assert!(
        raw.hear_until(Some(Instant::now())).is_err(),
        "it is read again"
    );
    // A device's driver opens files of its own meanwhile.
    let link =
        |fd: &BorrowedFd<'_>| std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    let sent: HashSet<PathBuf> = fds.iter().map(|fd| link(fd).expect("it is open")).collect();
    until("what came with them is closed", || {
        descriptors(dir.broker()).all(|path| !sent.contains(&path))
    });
}

/// Lists what a process's descriptors are of.
fn descriptors(process: u32) -> impl Iterator<Item = PathBuf> {
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).expect("its descriptors");
    open.flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
}

/// What is sent is counted.
fn a_sum_costs_the_same() {
    let (_dir, _keeper, client) = serving();
    let names = 1_004;
    for n in 0..names {
        let name = format!("m{n:04}");
        put(&client, &name, 1, &CreateOptions::default()).expect("a commit");
    }
    let (sums, all) = (
        client.sums().expect("sums"),
        client.list().expect("a listing"),
    );
    assert_eq!((all.objects.len(), all.count()), (names, names as u64));
    assert_eq!((sums.objects.len(), sums.count()), (1_000, names as u64));
    assert_eq!(sums.objects[999].name, "m0999", "the first by name");
    assert_eq!((sums.bytes, sums.names), (all.bytes, all.names));
    assert_eq!(sums.shelf, all.shelf);
    assert!(sums.removed.is_empty());
}
