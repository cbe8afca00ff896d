//! What the tests of TensorFlow's pool verify, with their figures.

mod fake;

use std::sync::Arc;

use allocators::*;
use fake::Fake;
use gpu_api::{Error, HostMemory};

/// Each request is one of the fake's.
fn direct(fake: &Arc<Fake>) -> Direct<HostPages> {
    Direct::new(
        "direct",
        HostPages::new(fake.gpu(), HostMemory::default()).expect("pages"),
    )
}

fn pool(options: PoolOptions) -> (Arc<Fake>, Pool<Direct<HostPages>>) {
    let fake = Fake::new(1 << 20);
    let cpu = direct(&fake);
    (fake, Pool::new(options, cpu).expect("a pool"))
}

fn plain(buffers: usize) -> PoolOptions {
    PoolOptions::new("pool").buffers(buffers).auto_resize(false)
}

fn take(pool: &Pool<Direct<HostPages>>, bytes: u64) -> u64 {
    pool.alloc(Request::new(bytes).align(4))
        .expect("room")
        .address
}

/// From the pool, allocated, put, evicted.
fn figures(pool: &Pool<Direct<HostPages>>) -> (u64, u64, u64, u64) {
    let counts = pool.counts();
    (
        counts.from_pool,
        counts.allocated,
        counts.put,
        counts.evicted,
    )
}

#[test]
fn zero_size_buffers() {
    let (_fake, pool) = pool(plain(2));
    assert!(matches!(
        pool.alloc(Request::new(0)),
        Err(Error::Invalid { .. })
    ));
    assert!(pool.free(0).is_err());
    assert_eq!(figures(&pool), (0, 0, 0, 0));
}

#[test]
fn zero_size_pool() {
    let (fake, pool) = pool(plain(0));
    for bytes in 1..17 {
        let address = take(&pool, bytes);
        pool.free(address).expect("in use");
    }
    assert_eq!(
        (
            pool.counts().from_pool,
            pool.counts().put,
            pool.counts().evicted
        ),
        (0, 0, 0)
    );
    assert_eq!(fake.state().host_live(), 0, "everything passes through");
}

#[test]
fn alignment() {
    let (_fake, pool) = pool(plain(0));
    for bits in 0..16 {
        let placed = pool
            .alloc(Request::new(111).align(1 << bits))
            .expect("room");
        assert!(
            placed.address.is_multiple_of(1 << bits),
            "{:#x} at {}",
            placed.address,
            1 << bits
        );
        pool.free(placed.address).expect("in use");
    }
}

#[test]
fn a_buffer_of_lesser_alignment_is_not_reused() {
    let (_fake, pool) = pool(plain(8));
    let address = take(&pool, 100);
    pool.free(address).expect("in use");
    assert!(
        pool.alloc(Request::new(100).align(4096))
            .expect("room")
            .address
            .is_multiple_of(4096)
    );
    assert_eq!(pool.counts().from_pool, 0);
}

#[test]
fn auto_resize() {
    let (_fake, pool) = pool(PoolOptions::new("pool").buffers(2));
    let round = || {
        for at in 0..10 {
            let address = take(&pool, 64 << at);
            pool.free(address).expect("in use");
        }
    };
    round();
    assert_eq!(figures(&pool), (0, 10, 10, 8));
    assert_eq!(pool.limit(), 2, "2 stays 2 after 10");
    (0..120).for_each(|_| round());
    assert_eq!(pool.limit(), 100, "100 after 1,200");
}

#[test]
fn a_pool_whose_requests_hit_does_not_grow() {
    let (_fake, pool) = pool(PoolOptions::new("pool").buffers(2));
    for _ in 0..5000 {
        let held = [take(&pool, 64), take(&pool, 64)];
        held.into_iter()
            .for_each(|address| pool.free(address).expect("in use"));
    }
    assert_eq!(pool.limit(), 2);
    assert_eq!(figures(&pool), (9998, 2, 10_000, 0));
}

#[test]
fn lru_order() {
    let (_fake, pool) = pool(plain(2));
    let p16 = take(&pool, 16);
    assert_eq!(figures(&pool), (0, 1, 0, 0));
    pool.free(p16).expect("in use");
    assert_eq!(figures(&pool), (0, 1, 1, 0));
    assert_eq!(take(&pool, 16), p16, "the same size comes from the pool");
    assert_eq!(figures(&pool), (1, 1, 1, 0));
    let p4 = take(&pool, 4);
    let p2 = take(&pool, 2);
    assert_eq!(figures(&pool), (1, 3, 1, 0));
    // Of three that are put into a pool of two the first has to go.
    [p16, p4, p2]
        .into_iter()
        .for_each(|address| pool.free(address).expect("in use"));
    assert_eq!(figures(&pool), (1, 3, 4, 1));
    assert_eq!((take(&pool, 4), take(&pool, 2)), (p4, p2));
    assert_eq!(figures(&pool), (3, 3, 4, 1));
    take(&pool, 16);
    assert_eq!(figures(&pool), (3, 4, 4, 1), "16 was evicted");
}

#[test]
fn clear_gives_everything_back() {
    let (fake, pool) = pool(plain(8));
    let held: Vec<u64> = (1..6).map(|at| take(&pool, 64 * at)).collect();
    held.into_iter()
        .for_each(|address| pool.free(address).expect("in use"));
    let used = take(&pool, 1000);
    assert_eq!(pool.stats().pool_bytes, Some(64 * 15));
    assert_eq!(pool.clear().expect("upstream takes it"), 64 * 15);
    assert_eq!(fake.state().host_live(), 1);
    assert_eq!(pool.stats().pool_bytes, Some(0));
    pool.free(used).expect("in use");
    drop(pool);
    assert_eq!(fake.state().host_live(), 0);
}

#[test]
fn pow2_rounder() {
    let (_fake, pool) = pool(plain(8).rounding(Rounding::PowerOfTwo));
    let sizes = [
        (1, 1),
        (2, 2),
        (3, 4),
        (4, 4),
        (5, 8),
        (9, 16),
        (1023, 1024),
        (1025, 2048),
    ];
    for (asked, rounded) in sizes {
        let placed = pool.alloc(Request::new(asked)).expect("room");
        assert_eq!((placed.asked, placed.bytes), (asked, rounded));
    }
    assert!(matches!(
        pool.alloc(Request::new((1 << 63) + 1)),
        Err(Error::OutOfMemory { .. })
    ));
    let steps = |step| Rounding::MultipleOf(step);
    let (_fake, pool) = pool_of(steps(4096));
    assert_eq!(pool.alloc(Request::new(1)).expect("room").bytes, 4096);
    let (_fake, pool) = pool_of(steps(0));
    assert_eq!(pool.alloc(Request::new(7)).expect("room").bytes, 7);
}

fn pool_of(rounding: Rounding) -> (Arc<Fake>, Pool<Direct<HostPages>>) {
    pool(plain(8).rounding(rounding))
}

/// How often upstream allocated and freed.
fn upstream(fake: &Fake) -> (usize, usize) {
    let state = fake.state();
    (state.host.len(), state.freed.len())
}

#[test]
fn upstream_is_called_for_each_buffer_once() {
    let (fake, pool) = pool(plain(2));
    let address = take(&pool, 16);
    assert_eq!(upstream(&fake), (1, 0));
    pool.free(address).expect("in use");
    assert_eq!(upstream(&fake), (1, 0), "it is kept");
    let held = [16, 4, 2].map(|bytes| take(&pool, bytes));
    assert_eq!(upstream(&fake), (3, 0));
    held.into_iter()
        .for_each(|address| pool.free(address).expect("in use"));
    assert_eq!(upstream(&fake), (3, 1), "one had to go");
    pool.clear().expect("upstream takes it");
    assert_eq!(upstream(&fake), (3, 3));
    drop(pool);
    assert_eq!(upstream(&fake), (3, 3));
}

#[test]
fn the_cpu_counts_what_was_asked_for() {
    let cpu = direct(&Fake::new(1 << 20));
    let held: Vec<u64> = (1..1024)
        .map(|bytes| cpu.alloc(Request::new(bytes)).expect("room").address)
        .collect();
    let figures = || {
        let stats = cpu.stats();
        (
            stats.num_allocs,
            stats.bytes_in_use,
            stats.peak_bytes_in_use,
            stats.largest_alloc_size,
        )
    };
    assert_eq!(figures(), (1023, 523_776, 523_776, 1023));
    held.into_iter()
        .for_each(|address| cpu.free(address).expect("in use"));
    assert_eq!(figures(), (1023, 0, 523_776, 1023));
    cpu.clear_stats();
    assert_eq!(figures(), (0, 0, 0, 0));
}

#[test]
fn name() {
    assert_eq!(pool(plain(2)).1.name(), "pool");
}

#[test]
fn bytes_are_limited_too() {
    let (fake, pool) = pool(plain(100).bytes(1000));
    let held = [400, 401, 500, 1001].map(|bytes| take(&pool, bytes));
    held.into_iter()
        .for_each(|address| pool.free(address).expect("in use"));
    // 400 had to go for 500; 1001 never fits.
    assert_eq!(pool.stats().pool_bytes, Some(901));
    assert_eq!(figures(&pool), (0, 4, 3, 1));
    assert_eq!(fake.state().host_live(), 2);
}

#[test]
fn what_is_kept_goes_back_when_upstream_is_full() {
    let bfc = Bfc::new(BfcOptions::new("bfc").limit(4096), Simulated::new());
    let pool = Pool::new(plain(100), bfc).expect("a pool");
    let held: Vec<u64> = (0..16)
        .map(|_| pool.alloc(Request::new(256)).expect("room").address)
        .collect();
    held.into_iter()
        .for_each(|address| pool.free(address).expect("in use"));
    assert_eq!(pool.stats().pool_bytes, Some(4096));
    pool.alloc(Request::new(4096))
        .expect("the pool's buffers made room");
    assert!(matches!(
        pool.alloc(Request::new(256)),
        Err(Error::OutOfMemory { .. })
    ));
}

#[test]
fn a_pool_of_no_buffers_cannot_grow() {
    let refused = Pool::new(
        PoolOptions::new("pool").buffers(0),
        direct(&Fake::new(1 << 20)),
    );
    assert_eq!(
        refused.expect_err("it would keep nothing").to_string(),
        "the buffers of a pool that grows is 0, but must be at least 1, or `auto_resize(false)` to pass everything \
         through"
    );
}

#[test]
fn a_rounding_of_ones_own() {
    let thousands = Rounding::Custom(|bytes| bytes.checked_next_multiple_of(1000));
    let (_fake, pool) = pool(PoolOptions::new("pool").rounding(thousands));
    assert_eq!(pool.alloc(Request::new(1)).expect("room").bytes, 1000);
    let (_fake, shrinking) =
        self::pool(PoolOptions::new("pool").rounding(Rounding::Custom(|bytes| Some(bytes / 2))));
    assert!(
        shrinking.alloc(Request::new(100)).is_err(),
        "less than what is asked for is no rounding"
    );
}
