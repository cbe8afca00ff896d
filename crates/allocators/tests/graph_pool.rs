//! Memory that belongs to a graph: who gets what was freed under capture, and when the program has
//! it back.

mod random;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use allocators::*;
use gpu_api::{Error, StreamIdentity};
use random::Random;

const MIB: u64 = 1 << 20;
const FIRST: StreamIdentity = StreamIdentity(1);
const SECOND: StreamIdentity = StreamIdentity(2);

fn program(limit: u64) -> Arc<Bfc<Simulated>> {
    Arc::new(Bfc::new(
        BfcOptions::new("program").limit(limit),
        Simulated::new(),
    ))
}

fn take(pool: &GraphPool, bytes: u64, stream: StreamIdentity) -> u64 {
    pool.alloc(Request::new(bytes).on(stream))
        .expect("room")
        .address
}

#[test]
fn what_is_freed_under_capture_is_its_own_streams_again_and_nobody_elses() {
    let program = program(64 * MIB);
    let pool = GraphPool::new("graph", program.clone());
    let first = take(&pool, 2 * MIB, FIRST);
    pool.free(first).expect("in use");
    assert!(pool.free(first).is_err(), "it is freed already");
    assert_ne!(
        take(&pool, 2 * MIB, SECOND),
        first,
        "the other stream may run at once"
    );
    assert_ne!(
        program.alloc(Request::new(2 * MIB)).expect("room").address,
        first,
        "the graph is launched later"
    );
    // Cut and merged in the stream's order.
    let parts = [take(&pool, MIB, FIRST), take(&pool, MIB, FIRST)];
    assert_eq!(parts, [first, first + MIB]);
    parts
        .into_iter()
        .for_each(|part| pool.free(part).expect("in use"));
    assert_eq!(take(&pool, 2 * MIB, FIRST), first);
}

#[test]
fn the_program_has_nothing_back_before_the_graph_is_gone() {
    let program = program(64 * MIB);
    let pool = GraphPool::new("graph", program.clone());
    let address = take(&pool, 5 * MIB, FIRST);
    pool.free(address).expect("in use");
    assert_eq!(
        (
            pool.trim().expect("nothing fails"),
            program.stats().bytes_in_use
        ),
        (0, 5 * MIB)
    );
    assert_eq!(pool.release(vec![]).expect("nothing fails"), 5 * MIB);
    assert_eq!(
        (program.stats().bytes_in_use, pool.stats().bytes_reserved),
        (0, 0)
    );
    let error = pool
        .alloc(Request::new(1).on(FIRST))
        .expect_err("the graph is gone");
    assert!(
        error.to_string().contains("before the graph is gone"),
        "{error}"
    );
    assert_eq!(pool.release(vec![]).expect("twice is no error"), 0);
}

#[test]
fn a_launch_under_way_is_waited_for_without_the_host() {
    let program = program(4 * MIB);
    let pool = GraphPool::new("graph", program.clone());
    let address = take(&pool, 4 * MIB, FIRST);
    pool.free(address).expect("in use");
    let done = Arc::new(AtomicBool::new(false));
    let launched = {
        let done = done.clone();
        Work::on(FIRST, move || done.load(Ordering::Acquire))
    };
    pool.release(vec![launched]).expect("it does not wait");
    assert!(
        matches!(
            program.alloc(Request::new(MIB)),
            Err(Error::OutOfMemory { .. })
        ),
        "the graph still runs"
    );
    done.store(true, Ordering::Release);
    program.alloc(Request::new(4 * MIB)).expect("it is done");
}

#[test]
fn an_aborted_capture_gives_everything_back() {
    let program = program(8 * MIB);
    let pool = GraphPool::new("graph", program.clone());
    let held = [take(&pool, MIB, FIRST), take(&pool, MIB, SECOND)];
    pool.free(held[0]).expect("in use");
    // The capture fails here: nothing will ever be launched.
    pool.release(vec![]).expect("nothing fails");
    let left = program.stats().bytes_in_use;
    assert!(left > 0 && left <= 2 * MIB, "what is in use stays: {left}");
    pool.free(held[1]).expect("in use");
    assert_eq!(program.stats().bytes_in_use, 0);
}

#[test]
fn what_two_streams_touch_and_what_has_none_is_nobodys_once_it_is_freed() {
    let program = program(64 * MIB);
    let pool = GraphPool::new("graph", program.clone());
    let both = take(&pool, 2 * MIB, FIRST);
    pool.record_stream(both, SECOND).expect("in use");
    pool.record_stream(both, FIRST)
        .expect("its own stream is no other");
    assert!(
        pool.record_stream(both + 1, SECOND).is_err(),
        "inside is another address"
    );
    pool.free(both).expect("in use");
    let none = pool.alloc(Request::new(2 * MIB)).expect("room").address;
    pool.free(none).expect("in use");
    let after = take(&pool, 2 * MIB, FIRST);
    pool.free_after(after, vec![Work::on(SECOND, || true)])
        .expect("in use");
    for stream in [Some(FIRST), Some(SECOND), None] {
        let request = Request::new(2 * MIB);
        let placed = pool
            .alloc(stream.map_or(request, |stream| request.on(stream)))
            .expect("room");
        assert!(![both, none, after].contains(&placed.address), "{stream:?}");
        pool.free(placed.address).expect("in use");
    }
    pool.release(vec![]).expect("nothing fails");
    assert_eq!(
        (program.stats().bytes_in_use, pool.stats().bytes_reserved),
        (0, 0)
    );
}

#[test]
fn out_of_memory_half_way_loses_nothing() {
    let program = program(8 * MIB);
    let pool = GraphPool::new("graph", program.clone());
    let mut held = Vec::new();
    let error = loop {
        match pool.alloc(Request::new(MIB).on(FIRST)) {
            Ok(placed) => held.push(placed.address),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(error, Error::OutOfMemory { .. }) && held.len() == 8,
        "{} of 8: {error}",
        held.len()
    );
    pool.free(held.swap_remove(3)).expect("in use");
    held.push(take(&pool, MIB, FIRST));
    held.into_iter()
        .for_each(|address| pool.free(address).expect("in use"));
    drop(pool);
    program
        .alloc(Request::new(8 * MIB))
        .expect("all of it came back");
}

/// Streams and the program allocate and free at random. While the graph lives, bytes that a stream
/// had are never another's; at the end nothing is missing.
#[test]
fn no_byte_of_a_graph_is_ever_anothers() {
    for seed in [1, 2, 3, 4] {
        let program = program(1 << 32);
        let pool = GraphPool::new("graph", program.clone());
        thread::scope(|scope| {
            let workers: Vec<_> = (0..3_u64)
                .map(|number| {
                    let (pool, program) = (&pool, &program);
                    scope.spawn(move || {
                        let stream = StreamIdentity(number);
                        let mut random = Random::new(seed * 10 + number);
                        let (mut held, mut ever, mut own) =
                            (Vec::new(), BTreeMap::new(), Vec::new());
                        for _ in 0..3000 {
                            if random.one_in(8) {
                                own.push(
                                    program
                                        .alloc(Request::new(1 + random.below(MIB)))
                                        .expect("room"),
                                );
                            } else if held.len() > 30 || (random.one_in(2) && !held.is_empty()) {
                                pool.free(random.take_one(&mut held)).expect("in use");
                            } else {
                                let request = Request::new(1 + random.below(MIB)).on(stream);
                                let placed = pool.alloc(request).expect("room");
                                ever.insert(placed.address, placed.address + placed.bytes);
                                held.push(placed.address);
                            }
                        }
                        held.into_iter()
                            .for_each(|address| pool.free(address).expect("in use"));
                        (ever, own)
                    })
                })
                .collect();
            let all: Vec<_> = workers
                .into_iter()
                .map(|worker| worker.join().expect("no panic"))
                .collect();
            // What each stream ever had, and what the program has, as stretches that must not meet.
            let mut stretches: Vec<(u64, u64, usize)> = Vec::new();
            for (who, (ever, own)) in all.iter().enumerate() {
                stretches.extend(ever.iter().map(|(&from, &to)| (from, to, who)));
                stretches.extend(
                    own.iter()
                        .map(|placed| (placed.address, placed.address + placed.bytes, 100 + who)),
                );
            }
            stretches.sort_unstable();
            let mut reach = [(0, usize::MAX); 2];
            for (from, to, who) in stretches {
                for (end, other) in reach {
                    assert!(
                        end <= from || other == who,
                        "{from:#x} of {who} reaches into what {other} had"
                    );
                }
                if to > reach[0].0 {
                    reach = if reach[0].1 == who {
                        [(to, who), reach[1]]
                    } else {
                        [(to, who), reach[0]]
                    };
                }
            }
            all.iter()
                .flat_map(|(_, own)| own)
                .for_each(|placed| program.free(placed.address).expect("in use"));
        });
        assert_eq!(pool.stats().bytes_in_use, 0);
        pool.release(vec![]).expect("nothing fails");
        assert_eq!(program.stats().bytes_in_use, 0);
    }
}
