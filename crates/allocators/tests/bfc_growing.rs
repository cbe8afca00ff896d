//! Growth in place, on the host backend's memory: what is free in several pieces serves one
//! request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use allocators::snapshot::{ChunkSnapshot, ChunkState};
use allocators::{
    Bfc, BfcOptions, Budget, DeviceMemory, GrowingMemory, Growth, Request, Simulated, Snapshot,
    SubAllocator,
};
use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const PIECE: u64 = 2 * MIB;
/// The granularity of the host backend, and pieces of several.
const GRAIN: u64 = 64 << 10;
const SMALL: u64 = 4 * GRAIN;

fn gpu(bytes: u64) -> Gpu {
    let config = HostConfig::default().bytes_per_device(bytes);
    Gpu::new(HostBackend::new(config).expect("it opens"), DeviceId(0)).expect("a device")
}

fn options() -> BfcOptions {
    BfcOptions::new("bfc")
        .growth(Growth::Fixed(PIECE))
        .limit(64 * MIB)
}

fn growing(gpu: &Gpu) -> Bfc<GrowingMemory> {
    Bfc::new(
        options(),
        GrowingMemory::new(gpu.clone()).expect("it has ranges"),
    )
}

/// Holds 32 blocks, gives 31 back, and asks for the largest that would fit; returns whether it got
/// it.
fn fragmented<U: SubAllocator>(bfc: &Bfc<U>) -> bool {
    let held: Vec<u64> = (0..32)
        .map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address)
        .collect();
    let kept = held[0];
    held[1..]
        .iter()
        .for_each(|&address| bfc.free(address).expect("in use"));
    let whole = bfc.alloc(Request::new(31 * PIECE));
    match whole {
        Ok(placed) => {
            assert!(placed.address > kept, "behind the one that is kept");
            bfc.free(placed.address).expect("in use");
            true
        }
        Err(Error::OutOfMemory { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn what_fragments_regions_does_not_fragment_memory_that_grows_in_place() {
    let options = options().collect_regions(false);
    let apart = Bfc::new(
        options.clone(),
        DeviceMemory::new(gpu(64 * MIB)).expect("memory"),
    );
    assert!(!fragmented(&apart), "no region is large enough");
    let bfc = Bfc::new(
        options,
        GrowingMemory::new(gpu(64 * MIB)).expect("it has ranges"),
    );
    assert!(fragmented(&bfc));
    assert_eq!(
        (bfc.snapshot().regions.len(), bfc.stats().bytes_reserved),
        (1, 64 * MIB)
    );
}

/// Counts how many blocks of 1.5 MiB fit into 64 MiB, in regions of 4 MiB, whatever is given back
/// in between.
fn fill<U: SubAllocator>(upstream: U) -> usize {
    let bfc = Bfc::new(options().growth(Growth::Fixed(4 * MIB)), upstream);
    let mut held = Vec::new();
    while let Ok(placed) = bfc.alloc(Request::new(3 * MIB / 2)) {
        held.push(placed.address);
    }
    held.len()
}

#[test]
fn blocks_that_fit_no_region_evenly_get_all_of_a_device() {
    // Two in each of 16 regions, which leaves a quarter of the device to nobody; without ends 42.
    assert_eq!(fill(DeviceMemory::new(gpu(64 * MIB)).expect("memory")), 32);
    assert_eq!(
        fill(GrowingMemory::new(gpu(64 * MIB)).expect("it has ranges")),
        42
    );
}

#[test]
fn the_tail_goes_back_and_comes_again() {
    let bfc = growing(&gpu(64 * MIB));
    let held: Vec<u64> = (0..8)
        .map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address)
        .collect();
    for &address in &held[2..] {
        bfc.free(address).expect("in use");
    }
    assert_eq!(
        bfc.trim().expect("the driver takes it"),
        6 * PIECE,
        "the last six pieces"
    );
    assert_eq!(bfc.stats().bytes_reserved, 2 * PIECE);
    let again = bfc.alloc(Request::new(PIECE)).expect("room");
    assert_eq!(again.address, held[2], "the addresses are the same");
    // A piece in the middle stays, since what lies behind it is in use.
    bfc.free(held[1]).expect("in use");
    assert_eq!(bfc.trim().expect("nothing at the end"), 0);
    bfc.free(held[0]).expect("in use");
    bfc.free(again.address).expect("in use");
    assert_eq!(bfc.trim().expect("all of it"), 3 * PIECE);
    assert_eq!(bfc.snapshot().regions.len(), 0);
    bfc.alloc(Request::new(1)).expect("room");
}

#[test]
fn a_tail_makes_room_for_a_request_across_pieces() {
    // All of the limit is taken, half of it by one block at the front: the tail goes back and comes
    // again as one piece.
    let bfc = Bfc::new(
        options().limit(8 * PIECE),
        GrowingMemory::new(gpu(64 * MIB)).expect("it has ranges"),
    );
    let held: Vec<u64> = (0..8)
        .map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address)
        .collect();
    held[4..]
        .iter()
        .for_each(|&address| bfc.free(address).expect("in use"));
    assert_eq!(
        bfc.alloc(Request::new(4 * PIECE))
            .expect("four pieces are free")
            .address,
        held[4]
    );
}

#[test]
fn where_room_is_short_it_grows_by_what_is_missing() {
    // Seven pieces and a half are in use. The rest of the eighth and one piece more are all that
    // the limit leaves.
    let bfc = Bfc::new(
        options().limit(9 * PIECE),
        GrowingMemory::new(gpu(64 * MIB)).expect("it has ranges"),
    );
    let held: Vec<u64> = (0..7)
        .map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address)
        .collect();
    let half = bfc.alloc(Request::new(PIECE / 2)).expect("room").address;
    let across = bfc
        .alloc(Request::new(PIECE / 2 * 3))
        .expect("half a piece is there, and one is added")
        .address;
    assert_eq!(
        (across, bfc.stats().bytes_reserved),
        (half + PIECE / 2, 9 * PIECE)
    );
    assert!(matches!(
        bfc.alloc(Request::new(256)),
        Err(Error::OutOfMemory { .. })
    ));
    for address in held.into_iter().chain([half, across]) {
        bfc.free(address).expect("in use");
    }
    assert_eq!(bfc.trim().expect("the driver takes it"), 9 * PIECE);
    // The same where it is the device that is full.
    let bfc = Bfc::new(
        options(),
        GrowingMemory::new(gpu(3 * PIECE)).expect("it has ranges"),
    );
    bfc.alloc(Request::new(PIECE / 2 * 3)).expect("room");
    bfc.alloc(Request::new(PIECE / 2)).expect("a piece");
    bfc.alloc(Request::new(PIECE))
        .expect("half a piece is there, and the device has another half");
    assert!(matches!(
        bfc.alloc(Request::new(256)),
        Err(Error::OutOfMemory { .. })
    ));
}

#[test]
fn where_nothing_aligned_is_free_at_the_end_it_does_not_ask_for_less() {
    let bfc = |align| {
        let bfc = Bfc::new(options().limit(PIECE / 2 * 3), Simulated::new().merging());
        bfc.alloc(Request::new(PIECE / 4)).expect("room");
        (bfc.alloc(Request::new(PIECE).align(align)), bfc)
    };
    let (placed, bfc_of_half) = bfc(PIECE / 2);
    assert_eq!(
        placed.expect("half of it is there").address,
        Simulated::BASE + PIECE / 2
    );
    assert_eq!(bfc_of_half.stats().bytes_reserved, PIECE / 2 * 3);
    // Only where the first piece ends, and half a piece more is too little.
    let (placed, bfc_of_none) = bfc(PIECE);
    assert!(matches!(placed, Err(Error::OutOfMemory { .. })));
    assert_eq!(
        (
            bfc_of_none.upstream().calls(),
            bfc_of_none.stats().bytes_reserved
        ),
        (1, PIECE)
    );
}

#[test]
fn what_came_elsewhere_and_is_too_little_goes_back() {
    let bfc = Bfc::new(
        options().limit(PIECE / 2 * 3),
        Simulated::new().merging().gap(256),
    );
    bfc.alloc(Request::new(PIECE / 2)).expect("room");
    let apart = bfc.alloc(Request::new(PIECE));
    assert!(matches!(apart, Err(Error::OutOfMemory { .. })));
    assert_eq!(
        (bfc.upstream().calls(), bfc.stats().bytes_reserved),
        (2, PIECE)
    );
    bfc.alloc(Request::new(PIECE / 2))
        .expect("what is there is whole");
}

#[test]
fn a_refusal_as_it_grows_by_the_rest_loses_nothing() {
    for refused in 0..4 {
        let upstream = Simulated::new()
            .merging()
            .capacity(PIECE / 2 * 3)
            .failing_at(refused);
        let bfc = Bfc::new(options(), upstream);
        for bytes in [PIECE / 2, PIECE, PIECE / 2, PIECE] {
            match bfc.alloc(Request::new(bytes)) {
                Ok(_) | Err(Error::OutOfMemory { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            assert_eq!(bfc.stats().bytes_reserved, bfc.upstream().live_bytes());
        }
        let held: Vec<u64> = bfc
            .snapshot()
            .chunks()
            .filter(|chunk| chunk.asked > 0)
            .map(|chunk| chunk.address)
            .collect();
        assert_eq!(held.is_empty(), refused == 0, "every call is refused");
        held.into_iter()
            .for_each(|address| bfc.free(address).expect("in use"));
        bfc.trim().expect("upstream takes it");
        assert_eq!(bfc.upstream().live_bytes(), 0);
    }
}

#[test]
fn who_waits_grows_by_the_rest_when_the_end_is_freed() {
    let bfc = Bfc::new(
        options().limit(PIECE / 2 * 3),
        GrowingMemory::new(gpu(64 * MIB)).expect("it has ranges"),
    );
    let [_, end] = [(); 2].map(|()| bfc.alloc(Request::new(PIECE / 2)).expect("room").address);
    let waits = Instant::now() + Duration::from_secs(3600);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            bfc.alloc(Request::new(PIECE).wait_until(waits))
                .expect("it grows")
                .address
        });
        bfc.free(end).expect("in use");
        assert_eq!(waiter.join().expect("no panic"), end);
    });
    assert_eq!(bfc.stats().bytes_reserved, PIECE / 2 * 3);
}

/// Returns the most bytes from an aligned start on that a heap in one region could come to: in a
/// free chunk, or from the end on with the rest of the limit behind it.
fn furthest(snapshot: &Snapshot, limit: u64, align: u64) -> u64 {
    assert!(snapshot.regions.len() <= 1, "all of it lies side by side");
    let rest = limit - snapshot.stats.bytes_reserved;
    let room = |start: u64, end: u64| end.saturating_sub(start.next_multiple_of(align));
    let ends = snapshot
        .regions
        .last()
        .map(|region| region.base + region.len);
    // Where a range begins that has nothing yet is the kernel's to say: at a page.
    let at_end = ends.map_or(if align <= 4096 { rest } else { 0 }, |end| {
        room(end, end + rest)
    });
    let in_chunk = |chunk: &ChunkSnapshot| {
        let end = chunk.address + chunk.len;
        room(
            chunk.address,
            if Some(end) == ends { end + rest } else { end },
        )
    };
    let free = snapshot
        .chunks()
        .filter(|chunk| chunk.state == ChunkState::Free);
    free.map(in_chunk).fold(at_end, u64::max)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Nothing overlaps, and a request fails only where the limit leaves no room for what is
    /// missing behind the end.
    #[test]
    fn a_request_fails_only_where_the_rest_of_the_limit_is_too_little(
        ops in prop::collection::vec((1u64..=3 * SMALL, 0u32..20, any::<prop::sample::Index>(), 0u32..8), 1..150),
        limit in 1u64..=8 * SMALL / GRAIN,
    ) {
        let limit = limit * GRAIN;
        let memory = GrowingMemory::new(gpu(64 * MIB)).expect("it has ranges");
        prop_assert_eq!(memory.granularity(), GRAIN);
        let bfc = Bfc::new(BfcOptions::new("bfc").growth(Growth::Fixed(SMALL)).limit(limit), memory);
        let mut live: Vec<(u64, u64)> = Vec::new();
        for (bytes, align, which, what) in ops {
            match what {
                0..=4 => match bfc.alloc(Request::new(bytes).align(1 << align)) {
                    Ok(placed) => {
                        let end = placed.address + placed.bytes;
                        prop_assert!(placed.address.is_multiple_of(1 << align) && placed.bytes >= bytes);
                        prop_assert!(live.iter().all(|&(start, other)| end <= start || other <= placed.address));
                        live.push((placed.address, end));
                    }
                    Err(Error::OutOfMemory { .. }) => {
                        let room = furthest(&bfc.snapshot(), limit, 256.max(1 << align));
                        prop_assert!(room < bytes.next_multiple_of(256), "{bytes} bytes fit into {room}");
                    }
                    Err(error) => prop_assert!(false, "{}", error),
                },
                5 | 6 if !live.is_empty() => {
                    let (address, _) = live.swap_remove(which.index(live.len()));
                    bfc.free(address).expect("in use");
                }
                7 => drop(bfc.trim().expect("the driver takes it")),
                _ => {}
            }
            prop_assert!(bfc.stats().bytes_reserved <= limit);
        }
        live.into_iter().for_each(|(address, _)| bfc.free(address).expect("in use"));
        bfc.trim().expect("the driver takes it");
        prop_assert_eq!(bfc.stats().bytes_reserved, 0);
    }
}

#[test]
fn what_is_written_across_pieces_is_read_again() {
    let bfc = growing(&gpu(64 * MIB));
    let held: Vec<u64> = (0..4)
        .map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address)
        .collect();
    held.into_iter()
        .for_each(|address| bfc.free(address).expect("in use"));
    let placed = bfc.alloc(Request::new(4 * PIECE)).expect("four pieces");
    let memory = bfc.upstream().memory().expect("memory");
    let bytes: Vec<u8> = (0..4 * PIECE).map(|at| (at % 251) as u8).collect();
    let mut read = vec![0; bytes.len()];
    // SAFETY: `write` and `read` ask for a range of one allocation that nothing else uses: it is
    // this test's own.
    unsafe { memory.write(placed.address, &bytes) }.expect("it is written");
    // SAFETY: as above.
    unsafe { memory.read(placed.address, &mut read) }.expect("it is read");
    assert!(bytes == read);
}

#[test]
fn a_device_that_is_full_says_so_and_loses_nothing() {
    let gpu = gpu(8 * PIECE);
    let budget = Arc::new(Budget::new(6 * PIECE));
    let memory = GrowingMemory::new(gpu.clone())
        .expect("it has ranges")
        .budget(budget.clone());
    let bfc = Bfc::new(BfcOptions::new("bfc").growth(Growth::Fixed(PIECE)), memory);
    let held: Vec<u64> = (0..6)
        .map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address)
        .collect();
    assert!(matches!(
        bfc.alloc(Request::new(PIECE)),
        Err(Error::OutOfMemory { .. })
    ));
    held.into_iter()
        .for_each(|address| bfc.free(address).expect("in use"));
    drop(bfc);
    assert_eq!(budget.used(), 0);
    let bfc = Bfc::new(
        BfcOptions::new("bfc"),
        GrowingMemory::new(gpu).expect("it has ranges"),
    );
    bfc.alloc(Request::new(8 * PIECE))
        .expect("all of it came back");
}
