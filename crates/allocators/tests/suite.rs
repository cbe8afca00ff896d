//! What every allocator must do, whatever it is over and whatever is over it.

mod random;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use allocators::*;
use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu, HostMemory};
use random::Random;

const ROOM: u64 = 4 << 20;

/// A sixteenth of it.
const BLOCK: u64 = ROOM / 16;

type Make = fn() -> Arc<dyn Allocator>;
type Wrap = (&'static str, fn(Arc<dyn Allocator>) -> Arc<dyn Allocator>);

fn host() -> Gpu {
    let config = HostConfig::default().bytes_per_device(ROOM);
    Gpu::new(HostBackend::new(config).expect("it opens"), DeviceId(0)).expect("a device")
}

fn pages(pinned: bool) -> HostPages {
    HostPages::new(
        host(),
        HostMemory {
            pinned,
            numa_node: None,
        },
    )
    .expect("pages")
}

fn bfc<U: SubAllocator>(upstream: U) -> Bfc<U> {
    Bfc::new(BfcOptions::new("bfc").limit(ROOM), upstream)
}

fn limited<A: Allocator>(allocator: A) -> Arc<dyn Allocator> {
    Arc::new(Limit::new(allocator, Arc::new(Budget::new(ROOM))))
}

/// Every allocator that has memory behind it; each has room for `ROOM`.
const ALLOCATORS: &[(&str, Make)] = &[
    ("bfc over device memory", || {
        Arc::new(bfc(DeviceMemory::new(host()).expect("memory")))
    }),
    ("bfc over shareable memory", || {
        Arc::new(bfc(Shareable::new(
            DeviceMemory::new(host()).expect("memory"),
        )))
    }),
    ("bfc over plain host memory", || Arc::new(bfc(pages(false)))),
    ("bfc over pinned host memory", || Arc::new(bfc(pages(true)))),
    ("a heap for each thread", || {
        let memory = DeviceMemory::new(host()).expect("memory");
        Arc::new(ThreadHeaps::new(
            BfcOptions::new("heaps").limit(ROOM),
            NonZeroUsize::new(3).expect("three"),
            memory,
        ))
    }),
    ("the driver's pool", || {
        Arc::new(DriverPool::new("driver", host(), ROOM).expect("a pool"))
    }),
    ("the driver's pool with relief", || {
        let pool = DriverPool::new("driver", host(), u64::MAX).expect("a pool");
        Arc::new(
            pool.budget(Arc::new(Budget::new(ROOM)))
                .relief(Arc::new(Relief::new())),
        )
    }),
    ("bfc over managed memory", || {
        Arc::new(bfc(ManagedMemory::new(host()).expect("memory")))
    }),
    ("bfc with relief", || {
        Relieved::new(
            bfc(DeviceMemory::new(host()).expect("memory")),
            Arc::new(Relief::new()),
        )
    }),
    ("basic cpu", || {
        limited(BasicCpu::new(None).expect("memory"))
    }),
    ("pinned host", || {
        limited(PinnedHost::new(host(), None).expect("memory"))
    }),
    ("basic cpu of a node", || {
        limited(BasicCpu::new(Some(0)).expect("memory"))
    }),
    ("pool over bfc", || {
        Arc::new(Pool::new(PoolOptions::new("pool"), bfc(pages(false))).expect("a pool"))
    }),
    ("pool over basic cpu", || {
        let cpu = BasicCpu::new(None).expect("memory");
        limited(
            Pool::new(PoolOptions::new("pool").rounding(Rounding::PowerOfTwo), cpu)
                .expect("a pool"),
        )
    }),
];

const WRAPPERS: [Wrap; 5] = [
    ("tracking", |inner| Arc::new(Tracking::new(inner))),
    ("guard", |inner| {
        Arc::new(Guard::new(inner).expect("memory"))
    }),
    ("nan fill", |inner| {
        Arc::new(NanFill::new(inner).expect("memory"))
    }),
    ("limit", |inner| {
        Arc::new(Limit::new(inner, Arc::new(Budget::new(ROOM))))
    }),
    ("log", |inner| Arc::new(Log::new(inner, std::io::sink()))),
];

type Case = (&'static str, fn(&Arc<dyn Allocator>));

/// The suite: each case gets a fresh allocator.
const CASES: &[Case] = &[
    ("hands_out_apart_and_aligned", hands_out_apart_and_aligned),
    ("counts", counts),
    ("refuses_nonsense", refuses_nonsense),
    ("refuses_foreign_addresses", refuses_foreign_addresses),
    (
        "says_when_it_is_full_and_goes_on",
        says_when_it_is_full_and_goes_on,
    ),
    ("waits_as_long_as_it_may", waits_as_long_as_it_may),
    (
        "its_memory_keeps_what_is_written",
        its_memory_keeps_what_is_written,
    ),
    (
        "threads_get_bytes_of_their_own",
        threads_get_bytes_of_their_own,
    ),
    ("gives_everything_back", gives_everything_back),
];

fn run(name: &str, make: impl Fn() -> Arc<dyn Allocator>) {
    for (case, test) in CASES {
        let allocator = make();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&allocator)));
        assert!(result.is_ok(), "{name}: {case}");
    }
}

#[test]
fn every_allocator() {
    for (name, make) in ALLOCATORS {
        run(name, make);
    }
}

#[test]
fn every_wrapper_over_every_allocator() {
    for (name, make) in ALLOCATORS {
        for (wrapper, wrap) in WRAPPERS {
            run(&format!("{wrapper} over {name}"), || wrap(make()));
        }
    }
}

#[test]
fn the_wrappers_in_any_order() {
    let (_, make) = ALLOCATORS[2];
    let mut orders = 0;
    permute(&mut WRAPPERS.to_vec(), 0, &mut |order| {
        let names: Vec<&str> = order.iter().map(|(name, _)| *name).collect();
        run(&format!("{names:?}, the first beneath"), || {
            order.iter().fold(make(), |inner, (_, wrap)| wrap(inner))
        });
        orders += 1;
    });
    assert_eq!(orders, 120);
}

fn permute(wrappers: &mut Vec<Wrap>, from: usize, each: &mut impl FnMut(&[Wrap])) {
    if from == wrappers.len() {
        return each(wrappers);
    }
    for at in from..wrappers.len() {
        wrappers.swap(from, at);
        permute(wrappers, from + 1, each);
        wrappers.swap(from, at);
    }
}

fn take(allocator: &Arc<dyn Allocator>, bytes: u64) -> Placed {
    allocator.alloc(Request::new(bytes)).expect("room")
}

fn hands_out_apart_and_aligned(allocator: &Arc<dyn Allocator>) {
    let mut held: Vec<(u64, u64)> = Vec::new();
    for (at, bytes) in [1, 4, 100, 255, 256, 257, 4095, 4096, 4097, 100_000]
        .into_iter()
        .enumerate()
    {
        let align = 1 << at.min(12);
        let placed = allocator
            .alloc(Request::new(bytes).align(align))
            .expect("room");
        assert!(
            placed.address.is_multiple_of(align),
            "{:#x} at {align}",
            placed.address
        );
        assert!(placed.address > 0 && placed.bytes >= bytes && placed.asked == bytes);
        assert_eq!(allocator.get(placed.address), Some(placed));
        held.push((placed.address, placed.bytes));
    }
    held.sort_unstable();
    assert!(
        held.windows(2)
            .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0),
        "{held:x?}"
    );
    held.into_iter()
        .for_each(|(address, _)| allocator.free(address).expect("in use"));
}

fn counts(allocator: &Arc<dyn Allocator>) {
    assert!(!allocator.name().is_empty());
    allocator.check_owner().expect("our own");
    let held = [1000, 3000].map(|bytes| take(allocator, bytes));
    assert!(held[0].number < held[1].number);
    let stats = allocator.stats();
    assert_eq!(stats.num_allocs, 2);
    assert!(stats.bytes_in_use >= 4000 && stats.peak_bytes_in_use == stats.bytes_in_use);
    assert!(stats.largest_alloc_size >= 3000 && stats.bytes_reserved >= stats.bytes_in_use);
    allocator.free(held[1].address).expect("in use");
    let after = allocator.stats();
    assert!(
        after.bytes_in_use < stats.bytes_in_use
            && after.peak_bytes_in_use == stats.peak_bytes_in_use
    );
    allocator.clear_stats();
    let cleared = allocator.stats();
    assert_eq!(
        (cleared.num_allocs, cleared.peak_bytes_in_use),
        (0, after.bytes_in_use)
    );
    allocator.free(held[0].address).expect("in use");
    assert_eq!(allocator.stats().bytes_in_use, 0);
}

fn refuses_nonsense(allocator: &Arc<dyn Allocator>) {
    let refused = |request| allocator.alloc(request).expect_err("nonsense");
    for error in [
        refused(Request::new(0)),
        refused(Request::new(1).align(0)),
        refused(Request::new(1).align(3)),
    ] {
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
    }
    for bytes in [
        u64::MAX,
        u64::MAX - 255,
        u64::MAX - 256,
        u64::MAX - 600,
        1 << 63,
        1 << 50,
    ] {
        let error = refused(Request::new(bytes));
        assert!(
            matches!(error, Error::OutOfMemory { .. }),
            "{bytes}: {error}"
        );
    }
    assert_eq!(
        (allocator.stats().num_allocs, allocator.stats().bytes_in_use),
        (0, 0)
    );
}

fn refuses_foreign_addresses(allocator: &Arc<dyn Allocator>) {
    let placed = take(allocator, 4096);
    for wrong in [
        0,
        1,
        placed.address - 256,
        placed.address + 1,
        placed.address + 256,
        placed.address + 4096,
        u64::MAX,
    ] {
        assert!(
            matches!(allocator.free(wrong), Err(Error::Invalid { .. })),
            "{wrong:#x}"
        );
        assert_eq!(allocator.get(wrong), None);
    }
    allocator.free(placed.address).expect("in use");
    assert!(allocator.free(placed.address).is_err(), "freed twice");
    assert_eq!(allocator.get(placed.address), None);
}

fn says_when_it_is_full_and_goes_on(allocator: &Arc<dyn Allocator>) {
    let mut held = Vec::new();
    let error = loop {
        match allocator.alloc(Request::new(BLOCK)) {
            Ok(placed) => held.push(placed.address),
            Err(error) => break error,
        }
        assert!(held.len() <= 16, "more than there is");
    };
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    assert!(held.len() >= 7, "{} blocks of 16", held.len());
    allocator.free(held.swap_remove(3)).expect("in use");
    held.push(take(allocator, BLOCK).address);
    held.into_iter()
        .for_each(|address| allocator.free(address).expect("in use"));
    assert_eq!(allocator.stats().bytes_in_use, 0);
}

fn waits_as_long_as_it_may(allocator: &Arc<dyn Allocator>) {
    let mut held = Vec::new();
    while let Ok(placed) = allocator.alloc(Request::new(BLOCK)) {
        held.push(placed.address);
    }
    assert!(held.len() >= 7, "{} blocks of 16", held.len());
    let wait = |bytes, time| allocator.alloc(Request::new(bytes).wait_until(Instant::now() + time));
    let early = Duration::from_millis(1);
    assert!(
        matches!(wait(BLOCK, early), Err(Error::OutOfMemory { .. })),
        "nobody frees"
    );
    thread::scope(|scope| {
        // Of another size, so that what was kept of the first one has to go.
        let waiter = scope.spawn(|| wait(BLOCK + BLOCK / 2, Duration::from_secs(600)));
        for address in held {
            allocator.free(address).expect("in use");
        }
        let placed = waiter
            .join()
            .expect("no panic")
            .expect("everything was given back");
        allocator.free(placed.address).expect("in use");
    });
    assert_eq!(allocator.stats().bytes_in_use, 0);
}

fn its_memory_keeps_what_is_written(allocator: &Arc<dyn Allocator>) {
    let memory = allocator.memory().expect("there is memory");
    let held = [300u64, 70_000, 1].map(|bytes| take(allocator, bytes));
    for (at, placed) in held.iter().enumerate() {
        let bytes = vec![at as u8 + 1; placed.asked as usize];
        // SAFETY: `write` asks for a range of one live allocation that nothing else uses: it is
        // this test's own.
        unsafe { memory.write(placed.address, &bytes) }.expect("it is written");
    }
    for (at, placed) in held.iter().enumerate() {
        let mut bytes = vec![0; placed.asked as usize];
        // SAFETY: as above.
        unsafe { memory.read(placed.address, &mut bytes) }.expect("it is read");
        assert!(bytes.iter().all(|&byte| byte == at as u8 + 1));
        allocator
            .free(placed.address)
            .expect("nothing was written beyond an end");
    }
}

fn threads_get_bytes_of_their_own(allocator: &Arc<dyn Allocator>) {
    thread::scope(|scope| {
        for seed in 1..4u64 {
            scope.spawn(move || {
                let mut random = Random::new(seed);
                let mut held = Vec::new();
                for _ in 0..150 {
                    if held.len() > 20 || (random.one_in(3) && !held.is_empty()) {
                        allocator.free(random.take_one(&mut held)).expect("in use");
                    } else {
                        held.push(take(allocator, 1 + random.below(9000)).address);
                    }
                }
                held.into_iter()
                    .for_each(|address| allocator.free(address).expect("in use"));
            });
        }
    });
    assert_eq!(allocator.stats().bytes_in_use, 0);
}

fn gives_everything_back(allocator: &Arc<dyn Allocator>) {
    let held: Vec<u64> = (0..64)
        .map(|at| take(allocator, 1 + 997 * at).address)
        .collect();
    held.into_iter()
        .for_each(|address| allocator.free(address).expect("in use"));
    allocator.trim().expect("upstream takes it");
    let stats = allocator.stats();
    assert_eq!((stats.bytes_in_use, stats.bytes_reserved), (0, 0));
    assert_eq!(allocator.trim().expect("nothing is left"), 0);
    take(allocator, 1000);
}
