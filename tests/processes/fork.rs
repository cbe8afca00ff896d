//! Forks: a child keeps its parent's device files and socket, and owns nothing.

use std::time::{Duration, Instant};

use gpu_ipc::{After, To};
use harness::wait_until;
use rustix::process::{Signal, kill_process};

use crate::agent::Agent;
use crate::child;
use crate::words::Command;
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    (
        "fork::a_child_forked_after_connecting_keeps_the_blocks",
        || keeps_the_blocks(false),
    ),
    (
        "fork::a_child_forked_before_connecting_keeps_the_blocks",
        || keeps_the_blocks(true),
    ),
    (
        "fork::in_a_child_every_call_says_so_and_every_drop_does_nothing",
        calls_in_a_child,
    ),
    (
        "fork::every_call_that_can_fail_is_tried_in_a_child",
        no_call_is_missing,
    ),
];

/// A killed consumer's kernel runs on while a forked child keeps the driver's files; so nothing of
/// it is used again before the child is gone too.
fn keeps_the_blocks(before: bool) {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let mut child = before.then(|| consumer.fork());
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    drop(block);
    let child = child.get_or_insert_with(|| consumer.fork());
    consumer.kill();
    wait_until("the death to be noticed", || {
        producer.session.stats().quarantined == 1
    });
    // A whole other death, quarantine and burial pass.
    let mut other = Agent::start();
    let id = other.connect(&producer.session);
    let theirs = producer.block(2);
    other.claim(
        &theirs
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    drop(theirs);
    other.kill();
    wait_until("the other's burial", || {
        producer.session.stats().deaths == 1
    });
    // The first one's block alone is left, and stays: none would be left if it were used again.
    wait_until("the other's block alone to come back", || {
        producer.session.collect();
        let left = producer.session.stats().limbo_blocks;
        assert_ne!(left, 0, "used again while a forked child lives");
        left == 1
    });
    let killed = Instant::now();
    kill_process(*child, Signal::KILL).expect("it lives");
    producer.wait_for_nothing_held();
    assert_eq!(producer.session.stats().deaths, 2);
    // The hang-up of a child's copy comes before the driver stops its work.
    assert!(before || killed.elapsed() >= Duration::from_secs(2));
}

fn calls_in_a_child() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    consumer.open(&producer.dir.path().join("t"));
    consumer.alloc(4096, 3);
    let block = producer.block(1);
    let index = consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    // A call that takes a lock of the parent's hangs in a few children of a hundred.
    consumer.must(&Command::ForkAndCall { children: 100 });
    producer.session.collect();
    assert_eq!(block.outstanding(), 1, "a child ended its parent's lease");
    assert_eq!(consumer.stamp(index), 1);
    consumer.let_go(index);
    wait_until("the parent's own end", || {
        producer.session.collect();
        block.outstanding() == 0
    });
}

/// The text of a file of `ipc-rc`, which need not be where the tests run.
macro_rules! source {
    ($file:literal) => {
        include_str!(concat!("../../crates/ipc-rc/src/", $file))
    };
}

/// The types whose calls start from what a parent has, each with its files.
const TYPES: &[(&str, &[&str])] = &[
    ("Connecting", &[source!("consumer/connecting.rs")]),
    ("GraphBlocks", &[source!("consumer/graph.rs")]),
    ("Loan", &[source!("producer/loan.rs")]),
    ("Participant", &[source!("consumer/participant.rs")]),
    (
        "ParticipantBuilder",
        &[
            source!("consumer/builder.rs"),
            source!("consumer/connecting.rs"),
        ],
    ),
    (
        "ReceivedBlock",
        &[
            source!("consumer/received_block.rs"),
            source!("contents.rs"),
        ],
    ),
    ("Released", &[source!("producer/loan.rs")]),
    (
        "SentBlock",
        &[
            source!("producer/sent_block.rs"),
            source!("producer/loan.rs"),
            source!("contents.rs"),
        ],
    ),
    ("Session", &[source!("producer/session.rs")]),
    ("SessionBuilder", &[source!("producer/builder.rs")]),
    ("Stream", &[source!("stream.rs"), source!("contents.rs")]),
];

/// Looks only at a stream's number.
const DATA: &[&str] = &["Stream::refuse_per_thread"];

/// Compares the table of `child` with the sources.
fn no_call_is_missing() {
    let mut found = Vec::new();
    for (name, sources) in TYPES {
        let before = found.len();
        for source in *sources {
            let head = format!("\nimpl {name} {{\n");
            for body in source.split(&head).skip(1) {
                let body = body.split("\n}\n").next().expect("an end");
                for call in body.split("\n    pub ").skip(1) {
                    let signature = call.split(" {\n").next().expect("a body");
                    let Some((_, call)) = signature.split_once("fn ") else {
                        continue;
                    };
                    let call = call.split(['(', '<']).next().expect("a name");
                    let is_public = !signature.starts_with('(');
                    let can_fail = signature
                        .split_once("->")
                        .is_some_and(|(_, made)| made.contains("Result<"));
                    if is_public && can_fail {
                        found.push(format!("{name}::{call}"));
                    }
                }
            }
        }
        assert!(
            found.len() > before,
            "{name} has no call that can fail: it lives elsewhere by now"
        );
    }
    found.retain(|call| !DATA.contains(&call.as_str()));
    let missing: Vec<_> = found
        .iter()
        .filter(|call| !child::NAMES.contains(&call.as_str()))
        .collect();
    assert!(missing.is_empty(), "calls that no child tries: {missing:?}");
}
