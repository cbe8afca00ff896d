//! Forwarding: a consumer hands a block on to a third process.

use std::time::Duration;

use gpu_ipc::{After, Claims, ParticipantId, SentBlock, To};
use harness::wait_until;

use crate::agent::{Agent, descriptor};
use crate::words::{Command, Contents, Step, Why};
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    ("forward::the_third_has_a_lease_of_its_own", own_lease),
    ("forward::a_slice_stays_a_slice", slice),
    ("forward::to_the_first_that_asks", to_a_ticket),
    ("forward::after_the_producers_work", after_the_work),
    ("forward::what_cannot_be_forwarded_says_why", refused),
    ("forward::the_middle_process_dies_at_any_step", middle_dies),
    ("forward::the_producer_dies_at_the_wish", producer_dies),
];

/// A producer, a block that the first of two consumers holds, and the second's number.
fn three() -> (Producer, SentBlock, Agent, u64, Agent, ParticipantId) {
    let producer = Producer::new();
    let (mut middle, mut third) = (Agent::start(), Agent::start());
    let (first, second) = (
        middle.connect(&producer.session),
        third.connect(&producer.session),
    );
    let block = producer.block(5);
    let index = middle.claim(
        &block
            .share(To::Participant(first), After::Done)
            .expect("shared"),
    );
    (producer, block, middle, index, third, second)
}

fn own_lease() {
    let (producer, block, mut middle, index, mut third, id) = three();
    drop(block);
    let forwarded = middle
        .forward(index, To::Participant(id))
        .expect("forwarded");
    middle.let_go_of_all();
    wait_until("the middle's lease to end", || {
        producer.session.collect();
        let stats = producer.session.stats();
        (stats.held, stats.in_flight) == (0, 1)
    });
    middle.kill();
    let index = third.claim(&forwarded);
    assert_eq!(third.stamp(index), 5);
    assert_eq!(producer.session.stats().limbo_blocks, 1);
    third.let_go_of_all();
    producer.wait_for_nothing_held();
}

fn slice() {
    let (_producer, _block, mut middle, index, mut third, id) = three();
    let part = middle.slice(index, 256, 1024);
    let forwarded = middle
        .forward(part, To::Participant(id))
        .expect("forwarded");
    assert_eq!(forwarded.len(), 768);
    let index = third.claim(&forwarded);
    assert_eq!(third.len(index), 768);
}

fn to_a_ticket() {
    let (producer, block, mut middle, index, mut third, _) = three();
    let once = middle
        .forward(index, To::Ticket(Claims::Once))
        .expect("forwarded");
    let open = middle
        .forward(index, To::Ticket(Claims::Unlimited))
        .expect("forwarded");
    third.claim(&once);
    assert_eq!(middle.cannot_claim(&once), Why::AlreadyClaimed);
    third.claim(&open);
    drop(block);
    // An unlimited one ends with the producer's block, and cannot be made after.
    assert_eq!(middle.cannot_claim(&open), Why::Revoked);
    let refused = middle
        .forward(index, To::Ticket(Claims::Unlimited))
        .expect_err("its block is dropped");
    assert_eq!(refused.why, Why::Refused);
    assert!(
        refused.text.contains("name how many claims instead"),
        "{refused:?}"
    );
    middle.let_go_of_all();
    third.let_go_of_all();
    producer.wait_for_nothing_held();
}

fn after_the_work() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let (mut producer, mut middle, mut third) = (Agent::start(), Agent::start(), Agent::start());
    producer.open(&path);
    let first = middle.connect_to(&path);
    let second = third.connect_to(&path);
    let block = producer.alloc(4096, 6);
    producer.close_gate();
    let pending = producer.share_on_stream(block, To::Participant(first));
    let index = middle.claim_unready(&pending);
    middle.tell(&Command::Forward {
        block: index,
        to: To::Participant(second).into(),
    });
    producer.open_gates();
    let forwarded = descriptor(middle.answer().expect("it lives").expect("forwarded"));
    let index = third.claim_unready(&forwarded);
    assert_eq!(
        third.contents(index),
        Contents::Ready,
        "nothing is left to wait for"
    );
}

fn refused() {
    let (_producer, _block, mut middle, index, mut third, id) = three();
    third.kill();
    wait_until("the third to be gone", || {
        middle
            .forward(index, To::Participant(id))
            .is_err_and(|refusal| {
                assert_eq!(refusal.why, Why::Refused, "{refusal:?}");
                assert!(refusal.text.contains("; "), "no remedy: {refusal:?}");
                true
            })
    });
}

fn middle_dies() {
    for step in [Step::Forward, Step::Forwarded] {
        let producer =
            Producer::with(|builder| builder.time_to_live(Some(Duration::from_millis(50))));
        let (mut middle, mut third) = (Agent::start(), Agent::start());
        let (first, second) = (
            middle.connect(&producer.session),
            third.connect(&producer.session),
        );
        let block = producer.block(5);
        // The middle one may take its time; what it forwards lapses soon.
        let options = gpu_ipc::session::ShareOptions::default().time_to_live(None);
        let shared = block
            .share_with(To::Participant(first), After::Done, &options)
            .expect("shared");
        let index = middle.claim(&shared);
        drop(block);
        middle.die_at(step);
        middle.tell(&Command::Forward {
            block: index,
            to: To::Participant(second).into(),
        });
        assert!(middle.answer().is_none(), "it lives");
        // What was granted to the third, and never reached it, lapses.
        producer.wait_for_nothing_held();
        assert_eq!(producer.session.stats().live_blocks, 0, "died at {step:?}");
        assert_eq!(
            producer.session.stats().expired,
            u64::from(step == Step::Forwarded)
        );
    }
}

fn producer_dies() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let (mut producer, mut middle) = (Agent::start(), Agent::start());
    producer.open(&path);
    let id = middle.connect_to(&path);
    let block = producer.alloc(4096, 6);
    let descriptor = producer.share(block, To::Participant(id));
    let index = middle.claim(&descriptor);
    producer.die_at(Step::Forward);
    let refused = middle
        .forward(index, To::Participant(id))
        .expect_err("nobody grants");
    assert_eq!(refused.why, Why::ProducerGone);
    assert_eq!(middle.stamp(index), 6);
}
