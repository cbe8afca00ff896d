//! Tickets: readers that the producer does not know.

use std::num::NonZeroU32;
use std::time::Duration;

use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Claims, Descriptor, Error, Gone, ParticipantId, SentBlock, To};
use harness::wait_until;

use crate::agent::{Agent, claim, claim_many};
use crate::words::{Command, Contents, Done, Step, Waits, Why};
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    ("ticket::the_first_who_asks_gets_it", first_who_asks),
    (
        "ticket::so_many_get_it_and_the_block_waits_for_all",
        so_many,
    ),
    ("ticket::an_unlimited_one_ends_with_its_block", unlimited),
    ("ticket::asked_again_it_gives_the_same_lease", same_answer),
    ("ticket::one_that_nobody_claims_lapses", lapses),
    ("ticket::a_cancelled_one_cannot_be_claimed", cancelled),
    (
        "ticket::a_used_one_is_remembered_and_then_stale",
        remembered,
    ),
    (
        "ticket::the_contents_wait_for_the_producers_stream",
        after_stream,
    ),
    ("ticket::a_stuck_stream_makes_no_queue_longer", stuck_stream),
    ("ticket::many_are_claimed_in_one_round_trip", many),
    ("ticket::a_batch_has_one_fence_and_all_or_nothing", batch),
    ("ticket::a_claimant_that_dies_leaves_nothing", claimant_dies),
    ("ticket::a_producer_that_dies_is_told", producer_dies),
];

fn ticket(block: &SentBlock, claims: Claims) -> Descriptor {
    block
        .share(To::Ticket(claims), After::Done)
        .expect("a ticket")
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
    assert_eq!(
        (block.outstanding(), producer.session.stats().tickets),
        (1, 1)
    );
    drop(block);
    let index = consumers[0].claim(&ticket);
    assert_eq!(consumers[0].stamp(index), 9);
    assert_eq!(producer.session.stats().tickets, 0);
    for consumer in &mut consumers {
        assert_eq!(consumer.cannot_claim(&ticket), Why::AlreadyClaimed);
    }
    consumers[0].let_go_of_all();
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
        let index = consumer.claim(&ticket);
        assert_eq!(consumer.stamp(index), 3);
        consumer.let_go_of_all();
    }
    assert_eq!(consumers[3].cannot_claim(&ticket), Why::AlreadyClaimed);
    producer.wait_for_nothing_held();
}

fn unlimited() {
    let producer = Producer::new();
    let mut consumers = connected(&producer, 5);
    let block = producer.block(4);
    let ticket = ticket(&block, Claims::Unlimited);
    assert_eq!(block.outstanding(), 0, "an unlimited ticket holds nothing");
    for consumer in &mut consumers[..4] {
        let index = consumer.claim(&ticket);
        assert_eq!(consumer.stamp(index), 4);
    }
    assert_eq!(block.outstanding(), 4);
    drop(block);
    assert_eq!(producer.session.stats().tickets, 0);
    assert_eq!(consumers[4].cannot_claim(&ticket), Why::Revoked);
    for consumer in &mut consumers {
        consumer.let_go_of_all();
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
    consumer.prefetch(&ticket);
    wait_until("the ticket to be redeemed", || {
        producer.session.stats().in_flight == 1
    });
    let index = consumer.claim(&ticket);
    assert_eq!(consumer.stamp(index), 8);
    // One lease and the ticket's other claim.
    assert_eq!(block.outstanding(), 2);
    assert_eq!(consumer.cannot_claim(&ticket), Why::AlreadyClaimed);
    assert_eq!(block.outstanding(), 2, "asking again took another claim");
}

fn lapses() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    consumer.connect(&producer.session);
    let block = producer.block(1);
    let options = ShareOptions::default().time_to_live(Some(Duration::from_millis(20)));
    let once = block
        .share_with(To::Ticket(Claims::Once), After::Done, &options)
        .expect("a ticket");
    let open = block
        .share_with(To::Ticket(Claims::Unlimited), After::Done, &options)
        .expect("a ticket");
    wait_until("the tickets to lapse", || {
        producer.session.stats().expired == 2
    });
    // They are counted before what they held is let go.
    wait_until("what they held", || {
        (block.outstanding(), producer.session.stats().tickets) == (0, 0)
    });
    for ticket in [once, open] {
        assert_eq!(consumer.cannot_claim(&ticket), Why::Revoked);
    }
}

fn cancelled() {
    let producer = Producer::new();
    let mut consumers = connected(&producer, 2);
    let (block, other) = (producer.block(1), producer.block(2));
    let ticket = block
        .share(To::Ticket(times(2)), After::Done)
        .expect("a ticket");
    consumers[0].claim(&ticket);
    assert!(matches!(other.cancel(&ticket), Err(Error::Mismatch { .. })));
    assert!(block.cancel(&ticket).expect("it is ours"));
    assert!(
        !block.cancel(&ticket).expect("it is ours"),
        "cancelled twice"
    );
    assert_eq!(consumers[1].cannot_claim(&ticket), Why::Revoked);
    assert_eq!(block.outstanding(), 1, "a lease that the ticket gave stays");
}

fn remembered() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    consumer.connect(&producer.session);
    let block = producer.block(1);
    let first = ticket(&block, Claims::Once);
    consumer.claim(&first);
    consumer.let_go_of_all();
    assert_eq!(consumer.cannot_claim(&first), Why::AlreadyClaimed);
    for _ in 0..5_000 {
        let ticket = block
            .share(To::Ticket(Claims::Once), After::Done)
            .expect("a ticket");
        assert!(block.cancel(&ticket).expect("it is ours"));
    }
    assert_eq!(consumer.cannot_claim(&first), Why::Stale);
}

fn after_stream() {
    let mut producer = Agent::start();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    producer.open(&path);
    let block = producer.alloc(4096, 6);
    let mut consumer = Agent::start();
    consumer.connect_to(&path);
    producer.close_gate();
    let pending = producer.share_on_stream(block, To::Ticket(Claims::Once));
    let index = consumer.claim_unready(&pending);
    assert_eq!(consumer.contents(index), Contents::Pending);
    producer.open_gates();
    wait_until("the contents to be there", || {
        consumer.contents(index) == Contents::Ready
    });
    assert_eq!(consumer.stamp(index), 6);
    // What is done when it is claimed needs no fence.
    producer.synchronize();
    let done = producer.share_on_stream(block, To::Ticket(Claims::Once));
    let index = consumer.claim_unready(&done);
    // The synchronisation is over before the event is seen done, by a moment: then there is a fence
    // all the same.
    wait_until("the contents to be there", || {
        consumer.contents(index) == Contents::Ready
    });
}

/// More fences than one queue takes are asked for while the stream is stuck: they wait at the
/// producer, not in the driver's queue, and nobody else waits for them.
fn stuck_stream() {
    let mut producer = Agent::start();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    producer.open(&path);
    let block = producer.alloc(4096, 6);
    let (mut consumer, mut other) = (Agent::start(), Agent::start());
    consumer.connect_to(&path);
    other.connect_to(&path);
    producer.close_gate();
    let tickets: Vec<Descriptor> = (0..300)
        .map(|_| producer.share_on_stream(block, To::Ticket(Claims::Once)))
        .collect();
    consumer.tell(&claim_many(&tickets));
    for _ in 0..20 {
        let free = producer.share(block, To::Ticket(Claims::Once));
        other.claim(&free);
    }
    producer.open_gates();
    let claimed = consumer.answer().expect("it lives").expect("claimed");
    assert!(
        matches!(
            claimed,
            Done::Claimed {
                blocks: 300,
                refusal: None
            }
        ),
        "{claimed:?}"
    );
}

fn many() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    consumer.connect(&producer.session);
    let blocks: Vec<_> = (0..200).map(|n| producer.block(n)).collect();
    let mut tickets: Vec<Descriptor> = blocks
        .iter()
        .map(|block| ticket(block, Claims::Once))
        .collect();
    tickets.push(tickets[0]);
    assert_eq!(
        consumer.claim_many(&tickets),
        (200, Some(Why::AlreadyClaimed))
    );
    drop(blocks);
    consumer.let_go_of_all();
    producer.wait_for_nothing_held();
}

fn batch() {
    let producer = Producer::new();
    let mut consumers = [Agent::start(), Agent::start()];
    let ids: Vec<ParticipantId> = consumers
        .iter_mut()
        .map(|agent| agent.connect(&producer.session))
        .collect();
    let blocks: Vec<_> = (0..100).map(|n| producer.block(n)).collect();
    let mut grants = Vec::new();
    for block in &blocks {
        grants.extend(ids.iter().map(|&id| (block, To::Participant(id))));
        grants.push((block, To::Ticket(Claims::Once)));
    }
    let after = After::Stream(&producer.stream);
    let descriptors = producer
        .session
        .share_many(&grants, after, &ShareOptions::default())
        .expect("shared");
    for (n, three) in descriptors.chunks(3).enumerate() {
        for (consumer, descriptor) in [0, 1, 0].into_iter().zip(three) {
            let index = consumers[consumer].claim(descriptor);
            assert_eq!(consumers[consumer].stamp(index), n as u64);
        }
    }
    // One who is gone: nobody gets anything.
    let outstanding: Vec<usize> = blocks.iter().map(SentBlock::outstanding).collect();
    let nobody = (&blocks[0], To::Participant(ParticipantId(77)));
    let error = producer
        .session
        .share_many(&[grants[0], nobody], after, &ShareOptions::default());
    let gone = error.as_ref().err().and_then(Gone::of);
    assert!(matches!(gone, Some(Gone::Participant(_))), "{gone:?}");
    assert_eq!(
        blocks
            .iter()
            .map(SentBlock::outstanding)
            .collect::<Vec<_>>(),
        outstanding
    );
    let foreign = Producer::new();
    let theirs = foreign.block(1);
    let error = producer.session.share_many(
        &[(&theirs, grants[0].1)],
        After::Done,
        &ShareOptions::default(),
    );
    assert!(matches!(error, Err(Error::Mismatch { .. })));
}

fn claimant_dies() {
    for step in [Step::Ask, Step::Claim, Step::Use, Step::Release] {
        let producer = Producer::new();
        let mut consumer = Agent::start();
        consumer.connect(&producer.session);
        let block = producer.block(1);
        let ticket = ticket(&block, times(2));
        drop(block);
        consumer.die_at(step);
        consumer.tell(&claim(&ticket, Waits::OnTheHost));
        consumer.tell(&Command::Stamp { block: 1 });
        consumer.tell(&Command::LetGoOfAll);
        consumer.dies();
        // The claim that it did not use, if it died before it asked, is somebody else's.
        let mut heirs = connected(&producer, 2);
        let claimed = heirs
            .iter_mut()
            .filter_map(|heir| heir.ask(&claim(&ticket, Waits::OnTheHost)).ok())
            .count();
        assert_eq!(
            claimed,
            if step == Step::Ask { 2 } else { 1 },
            "died at {step:?}"
        );
        drop(heirs);
        producer.wait_for_nothing_held();
        assert_eq!(producer.session.stats().live_blocks, 0, "died at {step:?}");
    }
}

fn producer_dies() {
    let mut producer = Agent::start();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    producer.open(&path);
    let block = producer.alloc(4096, 6);
    let mut consumer = Agent::start();
    consumer.connect_to(&path);
    let ticket = producer.share(block, To::Ticket(Claims::Once));
    producer.die_at(Step::Redeem);
    assert_eq!(consumer.cannot_claim(&ticket), Why::ProducerGone);
    producer.wait();
    assert_eq!(consumer.mappings(), 0);
}
