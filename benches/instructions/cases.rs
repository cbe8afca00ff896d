//! What is counted: one round of operations each.

use std::hint::black_box;

use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Claims, ReceivedBlock, To, Wait};

use crate::heap::{Heap, Subject};
use crate::pair::{BATCH, Before, CROWD, Pair};

/// Name, what is there, and one round of [`BATCH`] operations.
pub type Case = (&'static str, Before, fn(&mut Pair));

pub const CASES: &[Case] = &[
    ("share", Before::Block, share),
    ("claim", Before::Block, claim),
    ("drop_received", Before::Block, drop_received),
    ("collect", Before::Block, collect),
    ("collect_many", Before::Block, collect_many),
    ("collect_nothing", Before::Block, collect_nothing),
    ("cycle", Before::Block, cycle),
    ("share_many", Before::Block, share_many),
    ("fan_out", Before::Crowd, fan_out),
    ("claim_many", Before::Block, claim_many),
    ("claim_across", Before::Pieces, claim),
    ("drop_received_many", Before::Block, drop_received_many),
    ("ticket", Before::Block, ticket),
    ("cancel", Before::Block, cancel),
    ("alloc", Before::Block, alloc),
    ("drop_many", Before::Block, drop_sent),
    ("drop_in_limbo_0", Before::Block, drop_sent_held),
    (
        "drop_in_limbo_100000",
        Before::Limbo(100_000),
        drop_sent_held,
    ),
    ("heap_pair_10", Before::Block, |pair| heap_pairs(pair, 10)),
    ("heap_pair_1000", Before::Block, |pair| {
        heap_pairs(pair, 1_000)
    }),
    ("heap_pair_100000", Before::Block, |pair| {
        heap_pairs(pair, 100_000)
    }),
    ("thread_heaps_pair_10", Before::Block, |pair| {
        thread_heaps_pairs(pair, 10)
    }),
    ("thread_heaps_pair_1000", Before::Block, |pair| {
        thread_heaps_pairs(pair, 1_000)
    }),
    ("thread_heaps_pair_100000", Before::Block, |pair| {
        thread_heaps_pairs(pair, 100_000)
    }),
];

fn share(pair: &mut Pair) {
    let descriptors = pair.measure(vec![(); BATCH], |pair, ()| pair.share(&pair.block));
    descriptors
        .iter()
        .for_each(|descriptor| drop(pair.claim(descriptor)));
    pair.session.collect();
}

fn claim(pair: &mut Pair) {
    let descriptors = pair.descriptors();
    drop(pair.measure(descriptors, |pair, descriptor| pair.claim(&descriptor)));
    pair.session.collect();
}

fn drop_received(pair: &mut Pair) {
    let leases = pair.leases();
    pair.measure(leases, |_, received| drop(received));
    pair.session.collect();
}

/// One lease has ended.
fn collect(pair: &mut Pair) {
    for _ in 0..BATCH {
        drop(pair.claim(&pair.share(&pair.block)));
        pair.measure(vec![()], |pair, ()| pair.session.collect());
    }
}

/// As many have ended as a group has slots.
fn collect_many(pair: &mut Pair) {
    drop(pair.leases());
    pair.measure(vec![()], |pair, ()| {
        (0..pair.burden * BATCH as u64).for_each(|n| _ = black_box(n));
        pair.session.collect()
    });
}

fn collect_nothing(pair: &mut Pair) {
    let held = pair.claim(&pair.share(&pair.block));
    pair.measure(vec![(); BATCH], |pair, ()| pair.session.collect());
    drop(held);
    pair.session.collect();
}

/// Grant, claim, release, retire.
fn cycle(pair: &mut Pair) {
    pair.measure(vec![(); BATCH], |pair, ()| {
        drop(pair.claim(&pair.share(&pair.block)));
        pair.session.collect()
    });
}

fn share_many(pair: &mut Pair) {
    let many = pair.measure(vec![()], |pair, ()| {
        let grants = [(&pair.block, pair.to()); BATCH];
        (0..pair.burden * BATCH as u64).for_each(|n| _ = black_box(n));
        pair.session
            .share_many(&grants, After::Done, &ShareOptions::default())
            .expect("shared")
    });
    many.iter()
        .flatten()
        .for_each(|descriptor| drop(pair.claim(descriptor)));
    pair.session.collect();
}

/// One block for several participants at a time.
fn fan_out(pair: &mut Pair) {
    let shared = pair.measure(vec![(); BATCH / CROWD], |pair, ()| pair.share_all());
    shared
        .iter()
        .for_each(|descriptors| pair.claim_all(descriptors));
    pair.session.collect();
}

fn claim_many(pair: &mut Pair) {
    let descriptors = pair.descriptors();
    let claimed = pair.measure(vec![()], |pair, ()| {
        pair.participant.claim_many(&descriptors, Wait::None, None)
    });
    assert!(claimed.iter().flatten().all(Result::is_ok));
    drop(claimed);
    pair.session.collect();
}

fn drop_received_many(pair: &mut Pair) {
    let leases = pair.leases();
    pair.measure(vec![leases], |_, leases| ReceivedBlock::drop_many(leases));
    pair.session.collect();
}

/// A lease that any participant may claim; the claim is a question to the session's thread.
fn ticket(pair: &mut Pair) {
    let issued = pair.measure(vec![(); BATCH], |pair, ()| {
        pair.block
            .share(To::Ticket(Claims::Once), After::Done)
            .expect("issued")
    });
    assert!(
        issued
            .iter()
            .all(|ticket| pair.block.cancel(ticket).expect("it is ours"))
    );
}

fn cancel(pair: &mut Pair) {
    let descriptors = pair.descriptors();
    let cancelled = pair.measure(descriptors, |pair, descriptor| {
        pair.block.cancel(&descriptor).expect("it is ours")
    });
    assert!(cancelled.iter().all(|&is_cancelled| is_cancelled));
}

fn alloc(pair: &mut Pair) {
    pair.measure(vec![(); BATCH], |pair, ()| {
        pair.session.alloc(256).expect("there is room")
    });
}

/// Blocks that nobody holds.
fn drop_sent(pair: &mut Pair) {
    let blocks = pair.blocks();
    pair.measure(blocks, |_, block| drop(block));
}

/// Blocks that somebody holds.
fn drop_sent_held(pair: &mut Pair) {
    let blocks = pair.blocks();
    let held: Vec<ReceivedBlock> = blocks
        .iter()
        .map(|block| pair.claim(&pair.share(block)))
        .collect();
    pair.measure(blocks, |_, block| drop(block));
    drop(held);
    pair.session.collect();
}

/// A free and an allocation at random, among this many live chunks.
fn heap_pairs(pair: &mut Pair, live: usize) {
    let heap = pair.heap.take().unwrap_or_else(|| Heap::new(live));
    pair.heap = Some(heap_round(pair, heap));
}

/// The same by one of two heaps, each for a thread: only this one allocates.
fn thread_heaps_pairs(pair: &mut Pair, live: usize) {
    let heap = pair
        .thread_heaps
        .take()
        .unwrap_or_else(|| Heap::for_threads(live));
    pair.thread_heaps = Some(heap_round(pair, heap));
}

fn heap_round<A: Subject>(pair: &mut Pair, mut heap: Heap<A>) -> Heap<A> {
    pair.measure(heap.plan(BATCH), |_, planned| heap.pair(planned));
    heap
}
