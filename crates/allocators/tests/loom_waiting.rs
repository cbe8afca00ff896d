//! Waiting for memory under a model checker:
//! `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test --release -p gpu-ipc-allocators --test loom_waiting`.
//!
//! No wait ends by its deadline here, so one whose wake-up is lost lasts for ever, which the
//! checker reports. Every way of giving memory back is here once: a waiter has to notice it
//! whenever it happens.
#![cfg(gpu_ipc_loom)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use allocators::{
    Allocator, Bfc, BfcOptions, Budget, Growth, Limit, Pool, PoolOptions, Request, Simulated, Work,
};
use gpu_api::StreamIdentity;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

const BLOCK: u64 = 4096;

/// Room for some blocks, each in a region of its own, which go back to upstream when they are told
/// to and not before.
fn room_for(blocks: u64) -> Bfc<Simulated> {
    let options = BfcOptions::new("bfc")
        .limit(blocks * BLOCK)
        .growth(Growth::Fixed(BLOCK))
        .collect_regions(false);
    Bfc::new(options, Simulated::new())
}

fn take(allocator: &dyn Allocator, bytes: u64) -> u64 {
    allocator.alloc(Request::new(bytes)).expect("room").address
}

/// Takes memory in a thread of its own, and waits for it as long as it takes.
fn wait_for(allocator: &Arc<impl Allocator>, bytes: u64) -> thread::JoinHandle<u64> {
    let allocator = allocator.clone();
    thread::spawn(move || {
        let patient = Request::new(bytes).wait_until(Instant::now() + Duration::from_secs(3600));
        allocator.alloc(patient).expect("it is given back").address
    })
}

#[test]
fn a_free_wakes_who_waits() {
    loom::model(|| {
        let bfc = Arc::new(room_for(1));
        let held = take(&*bfc, BLOCK);
        let waiter = wait_for(&bfc, BLOCK);
        bfc.free(held).expect("in use");
        assert_eq!(waiter.join().expect("no panic"), held);
    });
}

#[test]
fn a_free_wakes_everyone_who_waits() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let options = BfcOptions::new("bfc")
            .limit(2 * BLOCK)
            .growth(Growth::Whole);
        let bfc = Arc::new(Bfc::new(options, Simulated::new()));
        let held = [take(&*bfc, BLOCK), take(&*bfc, BLOCK)];
        let whole = wait_for(&bfc, 2 * BLOCK);
        let half = wait_for(&bfc, BLOCK);
        // Not enough for the one, who must not be the only one to hear of it.
        bfc.free(held[0]).expect("in use");
        bfc.free(half.join().expect("no panic")).expect("in use");
        bfc.free(held[1]).expect("in use");
        whole.join().expect("no panic");
    });
}

#[test]
fn a_trim_wakes_who_waits() {
    loom::model(|| {
        let bfc = Arc::new(room_for(2));
        let held = [take(&*bfc, BLOCK), take(&*bfc, BLOCK)];
        held.into_iter()
            .for_each(|address| bfc.free(address).expect("in use"));
        // Neither region is large enough, and there is no room for a third.
        let waiter = wait_for(&bfc, 2 * BLOCK);
        assert_eq!(bfc.trim().expect("upstream takes it"), 2 * BLOCK);
        waiter.join().expect("no panic");
    });
}

#[test]
fn work_that_is_seen_to_have_finished_wakes_who_waits() {
    loom::model(|| {
        let bfc = Arc::new(room_for(1));
        let done = Arc::new(AtomicBool::new(false));
        let held = take(&*bfc, BLOCK);
        let is_done = done.clone();
        let work = Work::on(StreamIdentity(1), move || is_done.load(Ordering::SeqCst));
        bfc.free_after(held, vec![work]).expect("in use");
        let waiter = wait_for(&bfc, BLOCK);
        done.store(true, Ordering::SeqCst);
        bfc.settle();
        assert_eq!(waiter.join().expect("no panic"), held);
    });
}

#[test]
fn a_budget_wakes_who_waits() {
    loom::model(|| {
        let limit = Arc::new(Limit::new(room_for(2), Arc::new(Budget::new(BLOCK))));
        let held = take(&*limit, BLOCK);
        let waiter = wait_for(&limit, BLOCK);
        limit.free(held).expect("in use");
        waiter.join().expect("no panic");
    });
}

#[test]
fn no_pool_keeps_anything_from_who_waits_at_another() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let bfc = Arc::new(room_for(1));
        let pool = || Arc::new(Pool::new(PoolOptions::new("pool"), bfc.clone()).expect("a pool"));
        let (one, other) = (pool(), pool());
        let held = take(&*one, BLOCK);
        let waiter = wait_for(&other, BLOCK / 2);
        one.free(held).expect("in use");
        waiter.join().expect("no panic");
    });
}

#[test]
fn a_pool_keeps_nothing_from_who_waits() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let pool = Arc::new(Pool::new(PoolOptions::new("pool"), room_for(1)).expect("a pool"));
        let held = take(&*pool, BLOCK);
        let waiter = wait_for(&pool, BLOCK / 2);
        pool.free(held).expect("in use");
        waiter.join().expect("no panic");
    });
}
