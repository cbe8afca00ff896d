//! The benchmarks that TensorFlow's allocator has, by their names: `cargo bench --profile dist -p
//! gpu-ipc-allocators --bench original`.

use std::sync::Barrier;
use std::time::Instant;

use allocators::{Bfc, BfcOptions, Growth, Pool, PoolOptions, Request, Simulated};
use divan::Bencher;

fn main() {
    divan::main();
}

fn bfc() -> Bfc<Simulated> {
    Bfc::new(
        BfcOptions::new("bfc").limit(64 << 30).growth(Growth::Whole),
        Simulated::new(),
    )
}

/// The ten sizes of `BM_Allocation`: 256 B to 2 GB.
const SIZES: [u64; 10] = [
    256,
    4096,
    16_384,
    524_288,
    512,
    1_048_576,
    10_485_760,
    104_857_600,
    1_048_576_000,
    2_048_576_000,
];

#[divan::bench(sample_size = 1000)]
fn bm_alloc_and_free(bencher: Bencher<'_, '_>) {
    let bfc = bfc();
    bencher.bench_local(|| {
        let placed = bfc.alloc(Request::new(4096)).expect("room");
        bfc.free(placed.address)
    });
}

#[divan::bench(sample_size = 1000)]
fn bm_allocation(bencher: Bencher<'_, '_>) {
    let bfc = bfc();
    let mut at = 0;
    bencher.bench_local(|| {
        at = (at + 1) % SIZES.len();
        let placed = bfc.alloc(Request::new(SIZES[at])).expect("room");
        bfc.free(placed.address)
    });
}

#[divan::bench(args = [100, 1000])]
fn bm_alloc_batch_then_free(bencher: Bencher<'_, '_>, batch: usize) {
    let bfc = bfc();
    let mut held = Vec::with_capacity(batch);
    bencher
        .counter(divan::counter::ItemsCount::new(batch))
        .bench_local(|| {
            held.extend((0..batch).map(|at| {
                bfc.alloc(Request::new(256 << (at % 8)))
                    .expect("room")
                    .address
            }));
            held.drain(..)
                .for_each(|address| bfc.free(address).expect("in use"));
        });
}

/// Each allocation is freed only after this many more were made.
#[divan::bench(args = [1, 10, 100, 1000], sample_size = 1000)]
fn bm_allocation_delayed(bencher: Bencher<'_, '_>, delay: usize) {
    let bfc = bfc();
    let mut held = vec![0; delay];
    let mut at = 0;
    bencher.bench_local(|| {
        at += 1;
        let place = at % delay;
        if held[place] != 0 {
            bfc.free(held[place]).expect("in use");
        }
        held[place] = bfc
            .alloc(Request::new(SIZES[at % 6]))
            .expect("room")
            .address;
    });
}

/// Threads, each a pair at a time: the rate is that of one thread's pairs.
#[divan::bench(args = [1, 2])]
fn bm_alloc_and_free_under_contention(bencher: Bencher<'_, '_>, threads: usize) {
    const PAIRS: usize = 20_000;
    let bfc = bfc();
    bencher
        .counter(divan::counter::ItemsCount::new(PAIRS))
        .bench_local(|| {
            let barrier = Barrier::new(threads);
            let nanos: u128 = std::thread::scope(|scope| {
                let work = || {
                    barrier.wait();
                    let start = Instant::now();
                    for at in 0..PAIRS {
                        let placed = bfc.alloc(Request::new(256 << (at % 8))).expect("room");
                        bfc.free(placed.address).expect("in use");
                    }
                    start.elapsed().as_nanos()
                };
                let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
                work()
                    + others
                        .into_iter()
                        .map(|other| other.join().expect("no panic"))
                        .sum::<u128>()
            });
            divan::black_box(nanos / (PAIRS * threads) as u128)
        });
}

#[divan::bench(sample_size = 1000)]
fn pool_hit(bencher: Bencher<'_, '_>) {
    let pool = Pool::new(PoolOptions::new("pool"), bfc()).expect("a pool");
    bencher.bench_local(|| {
        use allocators::Allocator;
        let placed = pool.alloc(Request::new(4096)).expect("room");
        pool.free(placed.address)
    });
}
