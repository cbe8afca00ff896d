//! The recorded bytes of every message of each version: what an older side sends is read, and what
//! it reads is sent.
//!
//! A line is the message's name, its number of descriptors and its bytes. The bytes of version 1
//! were written by hand from the table of `docs/WIRE.md`, not by this crate; those of version 2 differ
//! in the version alone. Version 3 has more messages. A new version gets a file of its own, and the
//! old ones stay.

use transport::shared::slot::Generation;

use super::{LeaseSlot, MOST_BYTES, RefusalCode, Selector, Standing, ToBroker, ToClient, Wanted};
use crate::object::identity::{Epoch, Identity, Lineage};
use crate::pool::Previous;
use transport::wire::table;

/// Each version, and what was recorded of it.
const RECORDED: [(u16, &str); 3] = [
    (1, include_str!("../../tests/recorded/messages-1.txt")),
    (2, include_str!("../../tests/recorded/messages-2.txt")),
    (3, include_str!("../../tests/recorded/messages-3.txt")),
];

/// A line of a recording.
struct Recorded {
    name: &'static str,
    fds: usize,
    bytes: Vec<u8>,
}

fn read(recording: &'static str) -> Vec<Recorded> {
    let line = |line: &'static str| {
        let (name, rest) = line.split_once(": ").expect("a name");
        let (fds, hex) = rest.split_once(' ').expect("a number of descriptors");
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
        Recorded {
            name,
            fds: fds.parse().expect("a number"),
            bytes: (0..hex.len()).step_by(2).map(byte).collect(),
        }
    };
    recording.lines().map(line).collect()
}

const REQUEST: u64 = 5;

fn identity() -> Identity {
    Identity(std::array::from_fn(|byte| byte as u8))
}

/// Messages that came with version 3.
const NEWER_TO_BROKER: usize = 4;
const NEWER_TO_CLIENT: usize = 1;

fn to_broker() -> Vec<ToBroker> {
    let (request, identity, epoch, name) = (REQUEST, identity(), Epoch(7), || "model/é".to_owned());
    let open = |selector| ToBroker::Open { request, selector };
    vec![
        ToBroker::Hello {
            lowest: 1,
            highest: 3,
            shared_context: true,
            descendants: 1,
            name: "engine".into(),
        },
        ToBroker::Create {
            request,
            identity,
            wanted: Wanted {
                scratch: false,
                replace: true,
                expect: Some(epoch),
                taken: 0b101,
            },
        },
        ToBroker::Create {
            request,
            identity,
            wanted: Wanted {
                scratch: true,
                ..Wanted::default()
            },
        },
        ToBroker::Commit { request, identity },
        ToBroker::AskOutcome { request, identity },
        ToBroker::Abort { request, identity },
        open(Selector::Latest(name())),
        open(Selector::Epoch(name(), epoch)),
        open(Selector::Identity(identity)),
        ToBroker::Close { request, identity },
        ToBroker::Watch {
            request,
            seen: epoch,
            name: name(),
        },
        ToBroker::Remove {
            request,
            epoch,
            name: name(),
        },
        ToBroker::List { request },
        ToBroker::Sum { request },
        ToBroker::Adopt {
            request,
            token: identity,
            name: name(),
        },
        ToBroker::Release {
            request,
            token: identity,
            name: name(),
        },
        ToBroker::ReadPool {
            request,
            name: name(),
        },
    ]
}

fn to_client() -> Vec<ToClient> {
    let (request, identity, epoch, why) = (REQUEST, identity(), Epoch(7), || "no".to_owned());
    let lease = |slot, generation| {
        let generation = Generation::new(generation).expect("61 bits");
        LeaseSlot { slot, generation }
    };
    let outcome = |standing| ToClient::Outcome { request, standing };
    vec![
        ToClient::Welcome {
            lineage: Lineage(identity.0),
            participant: 8,
            pid: 9,
            slots: 8192,
        },
        ToClient::Refused {
            refusal: RefusalCode::Version,
            lowest: 2,
            highest: 3,
            why: why(),
        },
        ToClient::Created {
            request,
            granularity: 4096,
            leases: [lease(1, 2), lease(3, 4)].into_iter().collect(),
        },
        ToClient::Committed { request, epoch },
        outcome(Standing::Committed(epoch)),
        outcome(Standing::Unfinished),
        outcome(Standing::Unknown),
        ToClient::Noted { request },
        ToClient::Opened {
            request,
            identity,
            epoch,
            regions: 2,
        },
        ToClient::Newer {
            request,
            identity,
            epoch,
        },
        ToClient::Removed { request, epoch },
        ToClient::Listing {
            request,
            bytes: 4097,
        },
        ToClient::Declined {
            request,
            refusal: RefusalCode::Conflict,
            why: why(),
        },
        ToClient::Pool {
            request,
            identity,
            generation: 7,
            previous: Previous::Died,
            files: 2,
        },
    ]
}

#[test]
fn every_message_of_each_version_is_read_and_written_as_it_was_recorded() {
    for (version, recording) in RECORDED {
        check(version, recording);
    }
}

fn check(version: u16, recording: &'static str) {
    let recorded = read(recording);
    let (mut to_broker, mut to_client) = (to_broker(), to_client());
    if version < 3 {
        to_broker.truncate(to_broker.len() - NEWER_TO_BROKER);
        to_client.truncate(to_client.len() - NEWER_TO_CLIENT);
    }
    assert_eq!(
        recorded.len(),
        to_broker.len() + to_client.len(),
        "every message, and nothing else"
    );
    let mut packet = [0; MOST_BYTES];
    for (Recorded { name, fds, bytes }, message) in recorded.iter().zip(&to_broker) {
        assert_eq!(
            ToBroker::decode(bytes, *fds).as_ref(),
            Ok(message),
            "{name}"
        );
        let len = table::encode(message, &mut packet, version);
        assert_eq!(&packet[..len], bytes, "{name}");
    }
    for (Recorded { name, fds, bytes }, message) in
        recorded[to_broker.len()..].iter().zip(&to_client)
    {
        assert_eq!(
            ToClient::decode(bytes, *fds).as_ref(),
            Ok(message),
            "{name}"
        );
        let len = table::encode(message, &mut packet, version);
        assert_eq!(&packet[..len], bytes, "{name}");
    }
}

#[test]
fn a_recording_has_every_type_of_the_table() {
    let table = include_str!("mod.rs")
        .lines()
        .filter_map(|line| line.strip_prefix("//! | ")?.split_once(" | `"));
    let types: Vec<u16> = table
        .filter_map(|(number, _)| number.parse().ok())
        .collect();
    assert_eq!(types.len(), 26, "the table of messages");
    let (_, newest) = RECORDED[RECORDED.len() - 1];
    let recorded: Vec<u16> = read(newest)
        .iter()
        .map(|line| u16::from_le_bytes([line.bytes[4], line.bytes[5]]))
        .collect();
    for number in types {
        assert!(
            recorded.contains(&number),
            "no recorded bytes of type {number}"
        );
    }
}

#[test]
fn a_hello_and_a_refusal_of_any_version_can_be_read() {
    for Recorded {
        name,
        fds,
        mut bytes,
    } in read(RECORDED[0].1)
    {
        bytes[2..4].copy_from_slice(&9u16.to_le_bytes());
        let (to_broker, to_client) = (
            ToBroker::decode(&bytes, fds).is_ok(),
            ToClient::decode(&bytes, fds).is_ok(),
        );
        let expected = (name == "Hello", name == "Refused");
        assert_eq!((to_broker, to_client), expected, "{name}");
    }
}
