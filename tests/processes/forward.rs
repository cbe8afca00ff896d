//! Forwarding: a consumer hands a block on to a third process.

use std::time::Duration;

use gpu_ipc::{After, Descriptor, ParticipantId, SentBlock, To};

use crate::agent::{Agent, unhex};
use crate::{Case, Producer, wait_until};

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
fn three() -> (Producer, SentBlock, Agent, String, Agent, ParticipantId) {
    let producer = Producer::new();
    let (mut middle, mut third) = (Agent::start(), Agent::start());
    let (first, second) = (middle.connect(&producer.session), third.connect(&producer.session));
    let block = producer.block(5);
    let index = middle.claim(&block.share(To::Participant(first), After::Done).expect("shared"));
    (producer, block, middle, index.to_string(), third, second)
}

fn own_lease() {
    let (producer, block, mut middle, index, mut third, id) = three();
    drop(block);
    let forwarded = middle.must(&format!("forward {index} {}", id.0))[0].clone();
    middle.must("drop-all");
    wait_until("the middle's lease to end", || {
        producer.session.collect();
        let stats = producer.session.stats();
        (stats.held, stats.in_flight) == (0, 1)
    });
    middle.kill();
    let index = third.must(&format!("claim {forwarded}"))[0].clone();
    assert_eq!(third.must(&format!("stamp {index}")), ["5"]);
    assert_eq!(producer.session.stats().limbo_blocks, 1);
    third.must("drop-all");
    producer.wait_for_nothing_held();
}

fn slice() {
    let (_producer, _block, mut middle, index, mut third, id) = three();
    let part = middle.must(&format!("slice {index} 256 1024"))[0].clone();
    let forwarded = middle.must(&format!("forward {part} {}", id.0))[0].clone();
    let descriptor = Descriptor::decode(&unhex(&forwarded)).expect("a descriptor");
    assert_eq!(descriptor.len(), 768);
    let index = third.must(&format!("claim {forwarded}"))[0].clone();
    assert_eq!(third.must(&format!("len {index}")), ["768"]);
}

fn to_a_ticket() {
    let (producer, block, mut middle, index, mut third, _) = three();
    let once = middle.must(&format!("forward-ticket {index} 1"))[0].clone();
    let open = middle.must(&format!("forward-ticket {index} 0"))[0].clone();
    third.must(&format!("claim {once}"));
    assert_eq!(middle.ask(&format!("claim {once}"))[..2], ["error", "AlreadyClaimed"]);
    third.must(&format!("claim {open}"));
    drop(block);
    // An unlimited one ends with the producer's block, and cannot be made after.
    assert_eq!(middle.ask(&format!("claim {open}"))[..2], ["error", "Revoked"]);
    let refused = middle.ask(&format!("forward-ticket {index} 0"));
    assert_eq!(refused[..2], ["error", "Refused"]);
    assert!(refused.join(" ").contains("name how many claims instead"), "{refused:?}");
    middle.must("drop-all");
    third.must("drop-all");
    producer.wait_for_nothing_held();
}

fn after_the_work() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let (mut producer, mut middle, mut third) = (Agent::start(), Agent::start(), Agent::start());
    producer.must(&format!("open {}", path.display()));
    let first = middle.must(&format!("connect {}", path.display()))[0].clone();
    let second = third.must(&format!("connect {}", path.display()))[0].clone();
    let block = producer.must("alloc 4096 6")[0].clone();
    producer.must("stick");
    let pending = producer.must(&format!("share-stream {block} {first}"))[0].clone();
    let index = middle.must(&format!("claim-none {pending}"))[0].clone();
    middle.tell(&format!("forward {index} {second}"));
    producer.must("unstick");
    let answer = middle.answer().expect("it lives");
    let forwarded = answer.strip_prefix("ok ").expect("forwarded");
    let index = third.must(&format!("claim-none {forwarded}"))[0].clone();
    assert_eq!(third.must(&format!("state {index}")), ["Ready"], "nothing is left to wait for");
}

fn refused() {
    let (_producer, _block, mut middle, index, mut third, id) = three();
    third.kill();
    wait_until("the third to be gone", || {
        let answer = middle.ask(&format!("forward {index} {}", id.0));
        answer[0] == "error" && {
            assert_eq!(answer[1], "Refused", "{answer:?}");
            assert!(answer.join(" ").contains("; "), "no remedy: {answer:?}");
            true
        }
    });
}

fn middle_dies() {
    for step in ["forward", "forwarded"] {
        let producer = Producer::with(|builder| builder.time_to_live(Some(Duration::from_millis(50))));
        let (mut middle, mut third) = (Agent::start(), Agent::start());
        let (first, second) = (middle.connect(&producer.session), third.connect(&producer.session));
        let block = producer.block(5);
        let index = middle.claim(&block.share(To::Participant(first), After::Done).expect("shared"));
        drop(block);
        middle.must(&format!("die-at {step}"));
        middle.tell(&format!("forward {index} {}", second.0));
        assert!(middle.answer().is_none(), "it lives");
        // What was granted to the third, and never reached it, lapses.
        producer.wait_for_nothing_held();
        assert_eq!(producer.session.stats().live_blocks, 0, "died at {step}");
        assert_eq!(producer.session.stats().expired, u64::from(step == "forwarded"));
    }
}

fn producer_dies() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let (mut producer, mut middle) = (Agent::start(), Agent::start());
    producer.must(&format!("open {}", path.display()));
    let id = middle.must(&format!("connect {}", path.display()))[0].clone();
    let block = producer.must("alloc 4096 6")[0].clone();
    let descriptor = producer.must(&format!("share {block} {id}"))[0].clone();
    let index = middle.must(&format!("claim {descriptor}"))[0].clone();
    producer.must("die-at forward");
    assert_eq!(middle.ask(&format!("forward {index} {id}"))[..2], ["error", "ProducerGone"]);
    assert_eq!(middle.must(&format!("stamp {index}")), ["6"]);
}
