//! What the tests of TensorFlow's allocator verify, with their figures, on addresses without
//! memory.

mod random;

use allocators::{Bfc, BfcOptions, Growth, Placed, Request, Simulated, Snapshot};
use gpu_api::Error;
use random::Random;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// One region of the limit, as the original's tests have it unless they say otherwise.
fn bfc(limit: u64) -> Bfc<Simulated> {
    Bfc::new(
        BfcOptions::new("bfc").limit(limit).growth(Growth::Whole),
        Simulated::new(),
    )
}

fn growing(limit: u64) -> Bfc<Simulated> {
    Bfc::new(BfcOptions::new("bfc").limit(limit), Simulated::new())
}

fn take(bfc: &Bfc<Simulated>, bytes: u64) -> Placed<()> {
    bfc.alloc(Request::new(bytes)).expect("room")
}

fn is_out_of_memory(result: gpu_api::Result<Placed<()>>) -> bool {
    matches!(result, Err(Error::OutOfMemory { .. }))
}

/// The order of the original's `CheckStats`: allocations, bytes in use, their peak, the largest.
fn figures(bfc: &Bfc<Simulated>) -> (u64, u64, u64, u64) {
    let stats = bfc.stats();
    (
        stats.num_allocs,
        stats.bytes_in_use,
        stats.peak_bytes_in_use,
        stats.largest_alloc_size,
    )
}

fn assert_apart(bfc: &Bfc<Simulated>, mut addresses: Vec<u64>) {
    addresses.sort_unstable();
    for pair in addresses.windows(2) {
        let lower = bfc.get(pair[0]).expect("in use");
        assert!(
            lower.asked > 0 && pair[0] + lower.asked <= pair[1],
            "{pair:x?} overlap"
        );
    }
}

#[test]
fn no_dups() {
    let bfc = bfc(GIB);
    assert_eq!(figures(&bfc), (0, 0, 0, 0));
    let addresses: Vec<u64> = (1..1024).map(|bytes| take(&bfc, bytes).address).collect();
    assert_eq!(figures(&bfc), (1023, 654_336, 654_336, 1024));
    assert_apart(&bfc, addresses.clone());
    addresses
        .iter()
        .for_each(|&address| bfc.free(address).expect("in use"));
    assert_eq!(figures(&bfc), (1023, 0, 654_336, 1024));
}

#[test]
fn allocations_and_deallocations() {
    let bfc = bfc(GIB);
    let mut random = Random::new(123);
    let mut some = |count: usize| -> Vec<u64> {
        (0..count)
            .map(|_| take(&bfc, random.below(MIB).max(100)).address)
            .collect()
    };
    let first = some(255);
    let mut kept = Vec::new();
    for (at, address) in first.into_iter().enumerate() {
        if at % 2 == 1 {
            bfc.free(address).expect("in use")
        } else {
            kept.push(address)
        }
    }
    assert!(is_out_of_memory(bfc.alloc(Request::new(2 * GIB))));
    kept.extend(some(255));
    assert_apart(&bfc, kept.clone());
    kept.into_iter()
        .for_each(|address| bfc.free(address).expect("in use"));
    assert_eq!(bfc.stats().bytes_in_use, 0);
}

#[test]
fn allocations_and_deallocations_with_growth() {
    let bfc = growing(2 * GIB);
    let mut random = Random::new(17);
    let first: Vec<u64> = (0..9)
        .map(|_| take(&bfc, random.below(128 * MIB).max(100)).address)
        .collect();
    let mut kept = Vec::new();
    for (at, address) in first.into_iter().enumerate() {
        if at % 2 == 1 {
            bfc.free(address).expect("in use")
        } else {
            kept.push(address)
        }
    }
    kept.extend((0..9).map(|_| take(&bfc, random.below(64 * MIB).max(100)).address));
    assert_apart(&bfc, kept.clone());
    kept.into_iter()
        .for_each(|address| bfc.free(address).expect("in use"));
}

#[test]
fn exercise_coalescing() {
    let bfc = bfc(GIB);
    let first = take(&bfc, 4096).address;
    bfc.free(first).expect("in use");
    assert_eq!(figures(&bfc), (1, 0, 4096, 4096));
    let sizes = [1024 * 4, 1_048_576 * 8, 2048 * 8, 10_485_760 * 4];
    for _ in 0..1024 {
        let held = sizes.map(|bytes| take(&bfc, bytes).address);
        held.into_iter()
            .for_each(|address| bfc.free(address).expect("in use"));
    }
    assert_eq!(figures(&bfc), (4097, 0, sizes.iter().sum(), 10_485_760 * 4));
    assert_eq!(take(&bfc, 4096).address, first);
}

#[test]
fn allocate_zero_bytes() {
    let bfc = bfc(GIB);
    let error = bfc.alloc(Request::new(0)).expect_err("nothing to hand out");
    assert_eq!(
        error.to_string(),
        "size is 0 bytes, but must be at least 1 byte"
    );
    assert_eq!(figures(&bfc), (0, 0, 0, 0));
    assert_eq!(bfc.upstream().calls(), 0);
}

#[test]
fn tracks_sizes() {
    let bfc = bfc(GIB);
    let placed = [take(&bfc, 1), take(&bfc, 300)];
    assert_eq!(
        placed.map(|placed| bfc.get(placed.address)),
        placed.map(Some)
    );
    assert_eq!(placed.map(|placed| placed.number), [1, 2]);
    bfc.free(placed[0].address).expect("in use");
    assert_eq!(bfc.get(placed[0].address), None);
}

#[test]
fn allocated_against_requested() {
    let bfc = bfc(GIB);
    let placed = take(&bfc, 4);
    assert_eq!((placed.asked, placed.bytes), (4, 256));
}

#[test]
fn custom_memory_limit() {
    let bfc = bfc(2 * MIB);
    let first = take(&bfc, 256).address;
    assert!(is_out_of_memory(bfc.alloc(Request::new(8 * MIB))));
    bfc.free(first).expect("in use");
    assert_eq!(bfc.stats().bytes_limit, Some(2 * MIB));
}

#[test]
fn the_limit_is_exact() {
    let bfc = bfc(MIB);
    take(&bfc, MIB);
    assert!(is_out_of_memory(bfc.alloc(Request::new(1))));
    assert_eq!(bfc.stats().bytes_reservable_limit, Some(0));
}

#[test]
fn growth_doubles_from_two_mebibytes() {
    let bfc = growing(GIB);
    let regions = |bfc: &Bfc<Simulated>| -> Vec<u64> {
        bfc.snapshot().regions.iter().map(|r| r.len / MIB).collect()
    };
    take(&bfc, 1);
    assert_eq!(regions(&bfc), [2]);
    take(&bfc, 2 * MIB);
    assert_eq!(regions(&bfc), [2, 4]);
    take(&bfc, 30 * MIB);
    assert_eq!(regions(&bfc), [2, 4, 32]);
    take(&bfc, 30 * MIB);
    assert_eq!(
        regions(&bfc),
        [2, 4, 32, 32],
        "what was raised for a request is not doubled on top"
    );
    take(&bfc, 30 * MIB);
    assert_eq!(regions(&bfc), [2, 4, 32, 32, 64]);
}

#[test]
fn a_request_that_failed_raises_nothing_that_comes_later() {
    let bfc = Bfc::new(BfcOptions::new("bfc"), Simulated::new().capacity(40 * MIB));
    take(&bfc, 1);
    assert!(is_out_of_memory(bfc.alloc(Request::new(60 * MIB))));
    take(&bfc, 2 * MIB);
    assert_eq!(
        bfc.stats().bytes_reserved,
        6 * MIB,
        "2 and 4, not all that there is"
    );
}

#[test]
fn without_growth_the_first_request_takes_the_limit() {
    let bfc = Bfc::new(
        BfcOptions::new("bfc").limit(GIB).growth(Growth::Whole),
        Simulated::new(),
    );
    take(&bfc, 1);
    assert_eq!(bfc.stats().bytes_reserved, GIB);
    assert_eq!(bfc.upstream().calls(), 1);
    assert!(is_out_of_memory(bfc.alloc(Request::new(GIB))));
    assert_eq!(bfc.upstream().calls(), 1);
}

#[test]
fn bin_debug_info() {
    let bfc = bfc(GIB);
    let sizes = (0..5).flat_map(|at| [256 << at; 2]);
    let held: Vec<u64> = sizes.map(|bytes| take(&bfc, bytes).address).collect();
    let snapshot = bfc.snapshot();
    assert_eq!(snapshot.chunks().count(), 1 + 5 * 2);
    for (at, bin) in snapshot.bins().into_iter().enumerate() {
        let (chunks, bytes) = if at < 5 { (2, 2 * (256 << at)) } else { (0, 0) };
        assert_eq!(
            (bin.chunks_in_use, bin.bytes_in_use, bin.asked_bytes),
            (chunks, bytes, bytes),
            "bin {at}"
        );
        match at {
            20 => assert_eq!((bin.chunks, bin.bytes), (1, GIB - 2 * (256 << 5) + 512)),
            _ => assert_eq!((bin.chunks, bin.bytes), (chunks, bytes), "bin {at}"),
        }
    }
    held.iter()
        .skip(1)
        .step_by(2)
        .for_each(|&address| bfc.free(address).expect("in use"));
    for (at, bin) in bfc.snapshot().bins().into_iter().enumerate() {
        let (chunks, bytes) = if at < 5 { (1, 256 << at) } else { (0, 0) };
        assert_eq!(
            (bin.chunks_in_use, bin.bytes_in_use, bin.asked_bytes),
            (chunks, bytes, bytes),
            "bin {at}"
        );
        assert!(bin.chunks >= chunks && bin.bytes >= bytes);
    }
}

/// 128 blocks of 4 MiB within 512 MiB, all but the last freed: then one of 508 MiB.
fn ask_for_what_is_free_in_pieces(upstream: Simulated) -> (Bfc<Simulated>, bool) {
    let options = BfcOptions::new("bfc")
        .limit(512 * MIB)
        .collect_regions(false);
    let bfc = Bfc::new(options, upstream);
    let held: Vec<u64> = (0..128).map(|_| take(&bfc, 4 * MIB).address).collect();
    held[..127]
        .iter()
        .for_each(|&address| bfc.free(address).expect("in use"));
    let fits = bfc.alloc(Request::new(508 * MIB)).is_ok();
    (bfc, fits)
}

#[test]
fn virtual_allocator_promotes_reuse() {
    let (bfc, fits) = ask_for_what_is_free_in_pieces(Simulated::new().merging());
    assert!(fits);
    assert_eq!(bfc.snapshot().regions.len(), 1);
}

#[test]
fn physical_allocator_ooms_fragmentation() {
    let (bfc, fits) = ask_for_what_is_free_in_pieces(Simulated::new());
    assert!(!fits);
    assert!(bfc.snapshot().fragmentation() > 0.4);
}

fn all_but_the_last(upstream: Simulated) -> Bfc<Simulated> {
    let bfc = Bfc::new(BfcOptions::new("bfc").limit(2 * GIB), upstream);
    let held: Vec<u64> = (0..128).map(|_| take(&bfc, 4 * MIB).address).collect();
    held[..127]
        .iter()
        .for_each(|&address| bfc.free(address).expect("in use"));
    bfc
}

#[test]
fn region_deallocation() {
    let bfc = all_but_the_last(Simulated::new());
    let before = bfc.snapshot();
    assert!(before.regions.len() > 1);
    let freed = bfc.trim().expect("upstream takes them");
    let after = bfc.snapshot();
    assert_eq!(after.regions.len(), 1);
    assert_eq!(
        freed,
        before.stats.bytes_reserved - after.stats.bytes_reserved
    );
    assert_eq!(bfc.upstream().live_bytes(), after.stats.bytes_reserved);
    let free = |snapshot: &Snapshot| snapshot.chunks().filter(|chunk| chunk.asked == 0).count();
    assert_eq!(free(&after), 1);
}

#[test]
fn no_region_deallocation() {
    let bfc = all_but_the_last(Simulated::new().merging());
    assert_eq!(bfc.snapshot().regions.len(), 1);
    assert_eq!(bfc.trim().expect("nothing to do"), 0);
    assert_eq!(bfc.snapshot().regions.len(), 1);
}

#[test]
fn idle_regions_go_back_when_that_makes_room() {
    let run = |collect| {
        let options = BfcOptions::new("bfc")
            .limit(16 * MIB)
            .collect_regions(collect);
        let bfc = Bfc::new(options, Simulated::new());
        let small = [
            take(&bfc, 2 * MIB),
            take(&bfc, 4 * MIB),
            take(&bfc, 8 * MIB),
        ];
        small
            .iter()
            .for_each(|placed| bfc.free(placed.address).expect("in use"));
        (
            bfc.alloc(Request::new(12 * MIB)).is_ok(),
            bfc.upstream().free_calls(),
        )
    };
    assert_eq!(run(false), (false, 0));
    assert_eq!(run(true), (true, 3));
}

#[test]
fn default_alignment() {
    let bfc = bfc(MIB);
    for _ in 0..100 {
        assert!(take(&bfc, 1).address.is_multiple_of(256));
    }
}

#[test]
fn respects_requested_alignment() {
    for align in [32, 64, 128, 256, 512, 1024, 2048, 4096] {
        let bfc = bfc(MIB);
        take(&bfc, 256);
        let held: Vec<u64> = (0..8)
            .map(|_| {
                bfc.alloc(Request::new(256).align(align))
                    .expect("room")
                    .address
            })
            .inspect(|address| assert!(address.is_multiple_of(align), "{address:#x} at {align}"))
            .collect();
        held.into_iter()
            .for_each(|address| bfc.free(address).expect("in use"));
    }
}

#[test]
fn alignment_with_an_upstream_that_ignores_it() {
    for upstream in [1, 32, 256] {
        let bfc = Bfc::new(
            BfcOptions::new("bfc").limit(MIB),
            Simulated::new().align(upstream).gap(17),
        );
        take(&bfc, 256);
        for align in [256, 512, 1024, 4096] {
            for _ in 0..8 {
                let placed = bfc.alloc(Request::new(256).align(align)).expect("room");
                assert!(placed.address.is_multiple_of(align));
                bfc.free(placed.address).expect("in use");
            }
        }
    }
}

#[test]
fn rejects_a_size_whose_rounding_overflows() {
    let bfc = bfc(MIB);
    for bytes in [
        u64::MAX,
        u64::MAX - 1,
        u64::MAX - 255,
        u64::MAX - 256,
        1 << 40,
    ] {
        assert!(is_out_of_memory(bfc.alloc(Request::new(bytes))), "{bytes}");
    }
    assert!(is_out_of_memory(
        bfc.alloc(Request::new(256).align(1 << 63))
    ));
    let error = bfc
        .alloc(Request::new(1).align(3))
        .expect_err("no power of two");
    assert_eq!(
        error.to_string(),
        "alignment is 3, but must be a power of two"
    );
    assert_eq!(bfc.stats().num_allocs, 0);
}

#[test]
fn extend_terminates_when_upstream_always_fails() {
    let bfc = Bfc::new(
        BfcOptions::new("bfc").limit(2048).growth(Growth::Whole),
        Simulated::new().failing_at(0),
    );
    assert!(is_out_of_memory(bfc.alloc(Request::new(100))));
    assert!(
        bfc.upstream().calls() <= 8,
        "{} calls",
        bfc.upstream().calls()
    );
    let bfc = Bfc::new(
        BfcOptions::new("bfc").limit(1 << 40),
        Simulated::new().failing_at(0),
    );
    assert!(is_out_of_memory(bfc.alloc(Request::new(100))));
    assert!(
        bfc.upstream().calls() < 200,
        "{} calls",
        bfc.upstream().calls()
    );
}

#[test]
fn backpedals_to_what_upstream_has() {
    let bfc = Bfc::new(
        BfcOptions::new("bfc").growth(Growth::Doubling(64 * MIB)),
        Simulated::new().capacity(10 * MIB),
    );
    take(&bfc, MIB);
    let reserved = bfc.stats().bytes_reserved;
    assert!((9 * MIB..=10 * MIB).contains(&reserved), "{reserved}");
    let exact = Bfc::new(BfcOptions::new("bfc"), Simulated::new().capacity(MIB + 256));
    take(&exact, MIB + 1);
    assert_eq!(exact.stats().bytes_reserved, MIB + 256);
}

#[test]
fn stress_alloc_free() {
    let bfc = bfc(16 * MIB);
    let mut specs: Vec<(u64, u64)> = [64, 256, 512, 1024, 4096]
        .into_iter()
        .flat_map(|align| [1, 128, 256, 700, 1024, 4096, 8192].map(|bytes| (align, bytes)))
        .flat_map(|spec| [spec; 10])
        .collect();
    assert_eq!(specs.len(), 350);
    let mut random = Random::new(42);
    for _ in 0..20 {
        random.shuffle(&mut specs);
        let mut held: Vec<u64> = specs
            .iter()
            .map(|&(align, bytes)| {
                let address = bfc
                    .alloc(Request::new(bytes).align(align))
                    .expect("room")
                    .address;
                assert!(address.is_multiple_of(align));
                address
            })
            .collect();
        assert_apart(&bfc, held.clone());
        random.shuffle(&mut held);
        held.into_iter()
            .for_each(|address| bfc.free(address).expect("in use"));
        assert!(
            bfc.snapshot()
                .regions
                .iter()
                .all(|region| region.chunks.len() == 1),
            "all of it merged again"
        );
    }
}

#[test]
fn get_and_clear_stats() {
    let bfc = bfc(256 * MIB);
    let figures = || {
        let stats = bfc.stats();
        (
            stats.num_allocs,
            stats.bytes_in_use,
            stats.peak_bytes_in_use,
            stats.peak_allocated_bytes,
        )
    };
    assert_eq!(figures(), (0, 0, 0, 0));
    take(&bfc, 1024);
    assert_eq!(figures(), (1, 1024, 1024, 1024));
    let second = take(&bfc, 2048).address;
    assert_eq!(figures(), (2, 3072, 3072, 3072));
    bfc.free(second).expect("in use");
    assert_eq!(figures(), (2, 1024, 3072, 3072));
    bfc.clear_stats();
    assert_eq!(figures(), (0, 1024, 1024, 1024));
    assert_eq!(bfc.stats().largest_alloc_size, 0);
}

#[test]
fn the_split_rule_keeps_slack_below_the_request() {
    let options = BfcOptions::new("bfc")
        .limit(GIB)
        .growth(Growth::Whole)
        .max_slack_share(1.0);
    let bfc = Bfc::new(options, Simulated::new());
    let hole = take(&bfc, 2048);
    let guard = take(&bfc, 256);
    bfc.free(hole.address).expect("in use");
    let kept = take(&bfc, 1280);
    assert_eq!(
        (kept.address, kept.bytes),
        (hole.address, 2048),
        "768 bytes of slack are less than the request"
    );
    bfc.free(kept.address).expect("in use");
    let cut = take(&bfc, 1024);
    assert_eq!(
        (cut.address, cut.bytes),
        (hole.address, 1024),
        "1024 are not"
    );
    bfc.free(guard.address).expect("in use");
}

#[test]
fn slack_is_below_the_share_that_is_set() {
    for (share, most) in [(0.0, 0), (0.125, 12), (0.5, 49), (1.0, 99)] {
        let options = BfcOptions::new("bfc")
            .limit(GIB)
            .growth(Growth::Whole)
            .max_slack_share(share);
        let bfc = Bfc::new(options, Simulated::new());
        // A hole of 100 units and more: the largest that is handed out whole for 100.
        let kept = (100..=200).filter(|&units| {
            let hole = take(&bfc, units * 256);
            let guard = take(&bfc, 256);
            bfc.free(hole.address).expect("in use");
            let placed = take(&bfc, 100 * 256);
            assert_eq!(placed.address, hole.address);
            bfc.free(placed.address).expect("in use");
            bfc.free(guard.address).expect("in use");
            placed.bytes == units * 256
        });
        assert_eq!(kept.max(), Some(100 + most), "{share}");
    }
}

#[test]
fn slack_above_the_fraction_is_cut_off() {
    let options = || {
        BfcOptions::new("bfc")
            .limit(GIB)
            .growth(Growth::Whole)
            .max_slack_share(1.0)
    };
    let options_of_a_quarter = options().fragmentation_fraction(0.25);
    let bfc = Bfc::new(options_of_a_quarter, Simulated::new());
    assert_eq!(take(&bfc, 800 * MIB).bytes, GIB);
    let bfc = Bfc::new(options(), Simulated::new());
    assert_eq!(
        take(&bfc, 800 * MIB).bytes,
        800 * MIB,
        "128 MiB when nothing is said"
    );
}

#[test]
fn best_fit_and_of_several_the_lowest() {
    let bfc = bfc(GIB);
    let held: Vec<Placed<()>> = [4096, 256, 1024, 256, 1024, 256, 2048, 256]
        .map(|bytes| take(&bfc, bytes))
        .into();
    for at in [0, 2, 4, 6] {
        bfc.free(held[at].address).expect("in use");
    }
    assert_eq!(take(&bfc, 1024).address, held[2].address);
    assert_eq!(take(&bfc, 1000).address, held[4].address);
    assert_eq!(take(&bfc, 1024).address, held[6].address);
    assert_eq!(take(&bfc, 3000).address, held[0].address);
}

#[test]
fn a_foreign_address_is_an_error_and_changes_nothing() {
    let bfc = bfc(GIB);
    let placed = take(&bfc, 4096);
    let before = bfc.snapshot();
    let wrong = [
        0,
        1,
        placed.address - 256,
        placed.address + 1,
        placed.address + 256,
        placed.address + 4096,
        u64::MAX,
    ];
    for address in wrong {
        let error = bfc.free(address).expect_err("not handed out");
        assert_eq!(
            error.to_string(),
            format!(
                "address is {address:#x}, but must be one that this allocator handed out and that was not freed since"
            )
        );
        assert_eq!(bfc.get(address), None);
    }
    assert_eq!(bfc.snapshot(), before);
    bfc.free(placed.address).expect("in use");
    assert!(bfc.free(placed.address).is_err(), "freed twice");
}

#[test]
fn the_error_says_what_holds_the_memory() {
    let bfc = bfc(4 * MIB);
    for _ in 0..3 {
        take(&bfc, MIB);
    }
    let error = bfc.alloc(Request::new(2 * MIB)).expect_err("no room");
    assert_eq!(
        error.to_string(),
        "out of memory on device 0: asked for 2097152 bytes, 1048576 are free; bfc: the limit is reached; \
         limit 4194304, reserved 4194304, in use 3145728, largest free piece 1048576, fragmentation 0 %\n\
         \x20 from     1 MiB:       4 chunks,      4 MiB; in use       3,      3 MiB, asked for      3 MiB\n\
         \x20 0x010000000000     4 MiB  |************************************************________________|"
    );
}

#[test]
fn bookkeeping_is_at_most_a_hundredth_of_the_pool() {
    // Chunks of 4 KiB on the average, freed and allocated at random, at several sizes of the pool:
    // tables grow in steps, so that one size might be lucky.
    let shares = [0.125, 1.0];
    for (live, share) in [20_000usize, 30_000, 45_000, 70_000, 100_000]
        .into_iter()
        .flat_map(|n| shares.map(|s| (n, s)))
    {
        let options = BfcOptions::new("bfc")
            .growth(Growth::Fixed(8 * MIB))
            .max_slack_share(share);
        let bfc = Bfc::new(options, Simulated::new());
        let mut random = Random::new(5);
        let mut size = move || 256 * (1 + random.below(31));
        let mut held: Vec<u64> = (0..live).map(|_| take(&bfc, size()).address).collect();
        let mut random = Random::new(6);
        for _ in 0..2 * live {
            let at = random.below(live as u64) as usize;
            bfc.free(held[at]).expect("in use");
            held[at] = take(&bfc, size()).address;
        }
        let snapshot = bfc.snapshot();
        let chunks = snapshot.chunks().count() as u64;
        let part = snapshot.bookkeeping_bytes as f64 / (chunks * 4096) as f64;
        assert!(
            part <= 0.01,
            "{live} live: {} bytes for {chunks} chunks: {part}",
            snapshot.bookkeeping_bytes
        );
    }
}
