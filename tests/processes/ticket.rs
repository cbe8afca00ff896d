//! Tickets: readers that the producer does not know.

use std::num::NonZeroU32;
use std::time::Duration;

use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Claims, Error, ParticipantId, SentBlock, To};

use crate::agent::{Agent, hex, number};
use crate::{Case, Producer, wait_until};

pub const CASES: &[Case] = &[
    ("ticket::the_first_who_asks_gets_it", first_who_asks),
    ("ticket::so_many_get_it_and_the_block_waits_for_all", so_many),
    ("ticket::an_unlimited_one_ends_with_its_block", unlimited),
    ("ticket::asked_again_it_gives_the_same_lease", same_answer),
    ("ticket::one_that_nobody_claims_lapses", lapses),
    ("ticket::a_cancelled_one_cannot_be_claimed", cancelled),
    ("ticket::a_used_one_is_remembered_and_then_stale", remembered),
    ("ticket::the_contents_wait_for_the_producers_stream", after_stream),
    ("ticket::a_stuck_stream_makes_no_queue_longer", stuck_stream),
    ("ticket::many_are_claimed_in_one_round_trip", many),
    ("ticket::a_batch_has_one_fence_and_all_or_nothing", batch),
    ("ticket::a_claimant_that_dies_leaves_nothing", claimant_dies),
    ("ticket::a_producer_that_dies_is_told", producer_dies),
];

fn ticket(block: &SentBlock, claims: Claims) -> String {
    hex(block.share(To::Ticket(claims), After::Done).expect("a ticket").as_bytes())
}

fn times(n: u32) -> Claims {
    Claims::Times(NonZeroU32::new(n).expect("not zero"))
}

fn connected(producer: &Producer, count: usize) -> Vec<Agent> {
    let mut agents: Vec<Agent> = (0..count).map(|_| Agent::start()).collect();
    for agent in &mut agents {
        agent.connect(&producer.session);
    }
    agents
}

fn first_who_asks() {
    let producer = Producer::new();
    let mut consumers = connected(&producer, 2);
    let block = producer.block(9);
    let ticket = ticket(&block, Claims::Once);
    assert_eq!((block.outstanding(), producer.session.stats().tickets), (1, 1));
    drop(block);
    let index = consumers[0].must(&format!("claim {ticket}"))[0].clone();
    assert_eq!(consumers[0].must(&format!("stamp {index}")), ["9"]);
    assert_eq!(producer.session.stats().tickets, 0);
    for consumer in &mut consumers {
        assert_eq!(consumer.ask(&format!("claim {ticket}"))[..2], ["error", "AlreadyClaimed"]);
    }
    consumers[0].must("drop-all");
    producer.wait_for_nothing_held();
    assert_eq!(producer.session.stats().live_blocks, 0);
}

fn so_many() {
    let producer = Producer::new();
    let mut consumers = connected(&producer, 4);
    let block = producer.block(3);
    let ticket = ticket(&block, times(3));
    drop(block);
    for consumer in &mut consumers[..3] {
        assert_eq!(producer.session.stats().limbo_blocks, 1);
        let index = consumer.must(&format!("claim {ticket}"))[0].clone();
        assert_eq!(consumer.must(&format!("stamp {index}")), ["3"]);
        consumer.must("drop-all");
    }
    assert_eq!(consumers[3].ask(&format!("claim {ticket}"))[..2], ["error", "AlreadyClaimed"]);
    producer.wait_for_nothing_held();
}

fn unlimited() {
    let producer = Producer::new();
    let mut consumers = connected(&producer, 5);
    let block = producer.block(4);
    let ticket = ticket(&block, Claims::Unlimited);
    assert_eq!(block.outstanding(), 0, "an unlimited ticket holds nothing");
    for consumer in &mut consumers[..4] {
        let index = consumer.must(&format!("claim {ticket}"))[0].clone();
        assert_eq!(consumer.must(&format!("stamp {index}")), ["4"]);
    }
    assert_eq!(block.outstanding(), 4);
    drop(block);
    assert_eq!(producer.session.stats().tickets, 0);
    assert_eq!(consumers[4].ask(&format!("claim {ticket}"))[..2], ["error", "Revoked"]);
    for consumer in &mut consumers {
        consumer.must("drop-all");
    }
    producer.wait_for_nothing_held();
}

fn same_answer() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    consumer.connect(&producer.session);
    let block = producer.block(8);
    let ticket = ticket(&block, times(2));
    // The producer is asked, and its answer nobody waits for.
    consumer.must(&format!("prefetch {ticket}"));
    wait_until("the ticket to be redeemed", || producer.session.stats().in_flight == 1);
    let index = consumer.must(&format!("claim {ticket}"))[0].clone();
    assert_eq!(consumer.must(&format!("stamp {index}")), ["8"]);
    // One lease and the ticket's other claim.
    assert_eq!(block.outstanding(), 2);
    assert_eq!(consumer.ask(&format!("claim {ticket}"))[..2], ["error", "AlreadyClaimed"]);
    assert_eq!(block.outstanding(), 2, "asking again took another claim");
}

fn lapses() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    consumer.connect(&producer.session);
    let block = producer.block(1);
    let options = ShareOptions::default().time_to_live(Some(Duration::from_millis(20)));
    let once = block.share_with(To::Ticket(Claims::Once), After::Done, &options).expect("a ticket");
    let open = block.share_with(To::Ticket(Claims::Unlimited), After::Done, &options).expect("a ticket");
    wait_until("the tickets to lapse", || producer.session.stats().expired == 2);
    assert_eq!((block.outstanding(), producer.session.stats().tickets), (0, 0));
    for ticket in [once, open] {
        assert_eq!(consumer.ask(&format!("claim {}", hex(ticket.as_bytes())))[..2], ["error", "Revoked"]);
    }
}

fn cancelled() {
    let producer = Producer::new();
    let mut consumers = connected(&producer, 2);
    let (block, other) = (producer.block(1), producer.block(2));
    let ticket = block.share(To::Ticket(times(2)), After::Done).expect("a ticket");
    let claim = format!("claim {}", hex(ticket.as_bytes()));
    consumers[0].must(&claim);
    assert!(matches!(other.cancel(&ticket), Err(Error::Mismatch { .. })));
    assert!(block.cancel(&ticket).expect("it is ours"));
    assert!(!block.cancel(&ticket).expect("it is ours"), "cancelled twice");
    assert_eq!(consumers[1].ask(&claim)[..2], ["error", "Revoked"]);
    assert_eq!(block.outstanding(), 1, "a lease that the ticket gave stays");
}

fn remembered() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    consumer.connect(&producer.session);
    let block = producer.block(1);
    let first = ticket(&block, Claims::Once);
    consumer.must(&format!("claim {first}"));
    consumer.must("drop-all");
    assert_eq!(consumer.ask(&format!("claim {first}"))[..2], ["error", "AlreadyClaimed"]);
    for _ in 0..5_000 {
        let ticket = block.share(To::Ticket(Claims::Once), After::Done).expect("a ticket");
        assert!(block.cancel(&ticket).expect("it is ours"));
    }
    assert_eq!(consumer.ask(&format!("claim {first}"))[..2], ["error", "Stale"]);
}

fn after_stream() {
    let mut producer = Agent::start();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    producer.must(&format!("open {}", path.display()));
    let block = producer.must("alloc 4096 6")[0].clone();
    let mut consumer = Agent::start();
    consumer.must(&format!("connect {}", path.display()));
    producer.must("stick");
    let pending = producer.must(&format!("share-ticket-stream {block}"))[0].clone();
    let index = consumer.must(&format!("claim-none {pending}"))[0].clone();
    assert_eq!(consumer.must(&format!("state {index}")), ["Pending"]);
    producer.must("unstick");
    wait_until("the contents to be there", || consumer.must(&format!("state {index}")) == ["Ready"]);
    assert_eq!(consumer.must(&format!("stamp {index}")), ["6"]);
    // What is done when it is claimed needs no fence.
    producer.must("synchronize");
    let done = producer.must(&format!("share-ticket-stream {block}"))[0].clone();
    let index = consumer.must(&format!("claim-none {done}"))[0].clone();
    // The synchronisation is over before the event is seen done, by a moment: then there is a fence all the same.
    wait_until("the contents to be there", || consumer.must(&format!("state {index}")) == ["Ready"]);
}

/// More fences than one lane takes are asked for while the stream is stuck: they wait at the producer, not in the
/// driver's queue, and nobody else waits for them.
fn stuck_stream() {
    let mut producer = Agent::start();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    producer.must(&format!("open {}", path.display()));
    let block = producer.must("alloc 4096 6")[0].clone();
    let (mut consumer, mut other) = (Agent::start(), Agent::start());
    consumer.must(&format!("connect {}", path.display()));
    other.must(&format!("connect {}", path.display()));
    producer.must("stick");
    let tickets: Vec<String> =
        (0..300).map(|_| producer.must(&format!("share-ticket-stream {block}"))[0].clone()).collect();
    consumer.tell(&format!("claim-many {}", tickets.join(",")));
    for _ in 0..20 {
        let free = producer.must(&format!("share-ticket {block}"))[0].clone();
        other.must(&format!("claim {free}"));
    }
    producer.must("unstick");
    assert_eq!(consumer.answer().expect("it lives"), "ok 300 -");
}

fn many() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    consumer.connect(&producer.session);
    let blocks: Vec<_> = (0..200).map(|n| producer.block(n)).collect();
    let mut tickets: Vec<String> = blocks.iter().map(|block| ticket(block, Claims::Once)).collect();
    tickets.push(tickets[0].clone());
    let claimed = consumer.must(&format!("claim-many {}", tickets.join(",")));
    assert_eq!(claimed[..2], ["200", "AlreadyClaimed"], "{claimed:?}");
    drop(blocks);
    consumer.must("drop-all");
    producer.wait_for_nothing_held();
}

fn batch() {
    let producer = Producer::new();
    let mut consumers = [Agent::start(), Agent::start()];
    let ids: Vec<ParticipantId> = consumers.iter_mut().map(|agent| agent.connect(&producer.session)).collect();
    let blocks: Vec<_> = (0..100).map(|n| producer.block(n)).collect();
    let mut grants = Vec::new();
    for block in &blocks {
        grants.extend(ids.iter().map(|&id| (block, To::Participant(id))));
        grants.push((block, To::Ticket(Claims::Once)));
    }
    let after = After::Stream(&producer.stream);
    let descriptors = producer.session.share_many(&grants, after, &ShareOptions::default()).expect("shared");
    for (n, three) in descriptors.chunks(3).enumerate() {
        for (consumer, descriptor) in [0, 1, 0].into_iter().zip(three) {
            let index = consumers[consumer].claim(descriptor);
            assert_eq!(consumers[consumer].must(&format!("stamp {index}")), [n.to_string()]);
        }
    }
    // One who is gone: nobody gets anything.
    let outstanding: Vec<usize> = blocks.iter().map(SentBlock::outstanding).collect();
    let nobody = (&blocks[0], To::Participant(ParticipantId(77)));
    let error = producer.session.share_many(&[grants[0], nobody], after, &ShareOptions::default());
    assert!(matches!(error, Err(Error::ParticipantGone { .. })));
    assert_eq!(blocks.iter().map(SentBlock::outstanding).collect::<Vec<_>>(), outstanding);
    let foreign = Producer::new();
    let theirs = foreign.block(1);
    let error = producer.session.share_many(&[(&theirs, grants[0].1)], After::Done, &ShareOptions::default());
    assert!(matches!(error, Err(Error::Mismatch { .. })));
}

fn claimant_dies() {
    for step in ["ask", "claim", "use", "release"] {
        let producer = Producer::new();
        let mut consumer = Agent::start();
        consumer.connect(&producer.session);
        let block = producer.block(1);
        let ticket = ticket(&block, times(2));
        drop(block);
        consumer.must(&format!("die-at {step}"));
        consumer.tell(&format!("claim {ticket}"));
        consumer.tell("stamp 1");
        consumer.tell("drop-all");
        while consumer.answer().is_some() {}
        // The claim that it did not use, if it died before it asked, is somebody else's.
        let mut heirs = connected(&producer, 2);
        let claimed = heirs
            .iter_mut()
            .map(|heir| heir.ask(&format!("claim {ticket}")))
            .filter(|answer| answer[0] == "ok")
            .count();
        assert_eq!(claimed, if step == "ask" { 2 } else { 1 }, "died at {step}");
        drop(heirs);
        producer.wait_for_nothing_held();
        assert_eq!(producer.session.stats().live_blocks, 0, "died at {step}");
    }
}

fn producer_dies() {
    let mut producer = Agent::start();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    producer.must(&format!("open {}", path.display()));
    let block = producer.must("alloc 4096 6")[0].clone();
    let mut consumer = Agent::start();
    consumer.must(&format!("connect {}", path.display()));
    let ticket = producer.must(&format!("share-ticket {block}"))[0].clone();
    producer.must("die-at redeem");
    assert_eq!(consumer.ask(&format!("claim {ticket}"))[..2], ["error", "ProducerGone"]);
    producer.wait();
    assert_eq!(number::<u64>(&consumer.must("mappings")[0]), 0);
}
