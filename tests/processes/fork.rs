//! Forks: a child keeps its parent's device files and socket, and owns nothing.

use gpu_ipc::{After, To};
use harness::wait_until;
use rustix::process::{Signal, kill_process};

use crate::agent::{Agent, number};
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
    kill_process(*child, Signal::KILL).expect("it lives");
    producer.wait_for_nothing_held();
    assert_eq!(producer.session.stats().deaths, 2);
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
    assert_eq!(
        number(consumer.must(&Command::ForkAndCall)),
        0,
        "a call in the child did not say Forked"
    );
    producer.session.collect();
    assert_eq!(block.outstanding(), 1, "the child ended its parent's lease");
    assert_eq!(consumer.stamp(index), 1);
    consumer.let_go(index);
    wait_until("the parent's own end", || {
        producer.session.collect();
        block.outstanding() == 0
    });
}
