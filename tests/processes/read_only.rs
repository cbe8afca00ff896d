//! Blocks that their producer shares to be read only.

use std::os::unix::process::ExitStatusExt;

use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Claims, Descriptor, SentBlock, To};
use harness::wait_until;

use crate::agent::Agent;
use crate::device::is_host;
use crate::words::{Command, Why};
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    ("read_only::a_write_faults", write_faults),
    (
        "read_only::a_mapping_cannot_be_made_writable",
        made_writable,
    ),
    (
        "read_only::one_that_holds_both_kinds_has_a_mapping_of_each",
        both_kinds,
    ),
    (
        "read_only::a_loan_a_ticket_and_a_broadcast_are_read_only_too",
        each_way,
    ),
    ("read_only::what_is_forwarded_stays_read_only", forwarded),
    (
        "read_only::one_that_dies_with_both_kinds_pins_neither",
        dies_with_both,
    ),
];

fn read_only() -> ShareOptions {
    ShareOptions::default().read_only()
}

fn share(block: &SentBlock, to: To) -> Descriptor {
    let descriptor = block
        .share_with(to, After::Done, &read_only())
        .expect("the device maps read-only");
    assert!(descriptor.is_read_only());
    descriptor
}

/// Checks that a block has its stamp and that the library does not write into it.
#[track_caller]
fn is_only_read(consumer: &mut Agent, block: u64, stamp: u64) {
    assert_eq!(consumer.stamp(block), stamp);
    assert!(consumer.is_read_only(block));
    let refused = consumer.write(block, !stamp).expect_err("it is only read");
    assert_eq!(refused.why, Why::AnotherCall);
    assert!(refused.text.contains("read-only"), "{refused:?}");
    assert_eq!(consumer.stamp(block), stamp);
}

fn write_faults() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(5);
    let held = consumer.claim(&share(&block, To::Participant(id)));
    is_only_read(&mut consumer, held, 5);
    let overwrite = Command::Overwrite {
        block: held,
        stamp: 6,
    };
    consumer.tell(&overwrite);
    match consumer.answer() {
        // A GPU's copy fails, and its context with it.
        Some(answer) => {
            assert!(!is_host(), "it wrote");
            let broken = answer.expect_err("it is only read");
            assert_eq!(broken.why, Why::AnotherCall, "{broken:?}");
            consumer.kill();
        }
        // The processor's faults: of the host backend, and of the library that stands in for HIP.
        None => assert_eq!(consumer.wait().signal(), Some(libc::SIGSEGV)),
    }
    assert_eq!(producer.stamp(&block), 5, "it was written");
    drop(block);
    producer.wait_for_nothing_held();
}

fn made_writable() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(5);
    let held = consumer.claim(&share(&block, To::Participant(id)));
    let refused = consumer.must_not(&Command::MakeWritable { block: held });
    assert!(
        refused.text.to_lowercase().contains("permission denied"),
        "{refused:?}"
    );
    // One that may write can: it is not the test that is refused.
    let written = consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    consumer.must(&Command::MakeWritable { block: written });
}

fn both_kinds() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let (block, other) = (producer.block(5), producer.block(7));
    let written = consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    assert_eq!(consumer.mappings(), 1);
    let read = consumer.claim(&share(&block, To::Participant(id)));
    let read_too = consumer.claim(&share(&other, To::Participant(id)));
    assert_eq!(consumer.mappings(), 2, "one mapping of each kind");
    is_only_read(&mut consumer, read, 5);
    is_only_read(&mut consumer, read_too, 7);
    assert!(!consumer.is_read_only(written));
    consumer.write(written, 6).expect("it may be written");
    is_only_read(&mut consumer, read, 6);
    // Each mapping ends by itself, and the producer learns of both ends.
    consumer.let_go(written);
    wait_until("the writable mapping to go", || {
        producer.session.collect();
        let _ = producer.session.trim();
        consumer.mappings() == 1
    });
    is_only_read(&mut consumer, read, 6);
    consumer.let_go_of_all();
    drop((block, other));
    producer.wait_for_nothing_held();
    wait_until("nothing to be pinned", || {
        let _ = producer.session.trim();
        producer.session.stats().source.reserved == 0
    });
    assert_eq!(consumer.mappings(), 0);
}

fn each_way() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let loan = producer
        .session
        .lend(producer.block(5), After::Stream(&producer.stream))
        .expect("lent");
    let lent = |to| loan.share_with(to, &read_only()).expect("shared");
    let broadcast = lent(To::Ticket(Claims::Unlimited));
    for descriptor in [
        lent(To::Participant(id)),
        lent(To::Ticket(Claims::Once)),
        broadcast,
        broadcast,
        share(&producer.block(5), To::Ticket(Claims::Once)),
    ] {
        let held = consumer.claim(&descriptor);
        is_only_read(&mut consumer, held, 5);
    }
    let many = producer
        .session
        .share_many(
            &[(loan.block(), To::Participant(id))],
            After::Stream(&producer.stream),
            &read_only(),
        )
        .expect("shared");
    let held = consumer.claim(&many[0]);
    is_only_read(&mut consumer, held, 5);
    // The next share of the same loan need not be.
    let held = consumer.claim(&loan.share(To::Participant(id)).expect("shared"));
    assert!(!consumer.is_read_only(held));
}

fn forwarded() {
    let producer = Producer::new();
    let (mut middle, mut third) = (Agent::start(), Agent::start());
    let (first, second) = (
        middle.connect(&producer.session),
        third.connect(&producer.session),
    );
    let block = producer.block(5);
    let held = middle.claim(&share(&block, To::Participant(first)));
    for to in [
        To::Participant(second),
        To::Ticket(Claims::Once),
        To::Ticket(Claims::Unlimited),
    ] {
        let descriptor = middle.forward(held, to).expect("forwarded");
        assert!(descriptor.is_read_only());
        let theirs = third.claim(&descriptor);
        is_only_read(&mut third, theirs, 5);
    }
    // What may be written is forwarded to be written.
    let held = middle.claim(
        &block
            .share(To::Participant(first), After::Done)
            .expect("shared"),
    );
    let descriptor = middle.forward(held, To::Participant(second));
    let theirs = third.claim(&descriptor.expect("forwarded"));
    third.write(theirs, 6).expect("it may be written");
}

fn dies_with_both() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(5);
    consumer.claim(&share(&block, To::Participant(id)));
    consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    assert_eq!(consumer.mappings(), 2);
    consumer.kill();
    drop(block);
    producer.wait_for_nothing_held();
    wait_until("nothing to be pinned", || {
        let _ = producer.session.trim();
        producer.session.stats().source.reserved == 0
    });
}
