//! Growth in place, on the host backend's memory: what is free in several pieces serves one request.

use allocators::{Bfc, BfcOptions, Budget, DeviceMemory, GrowingMemory, Growth, Request, SubAllocator};
use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const PIECE: u64 = 2 * MIB;

fn gpu(bytes: u64) -> Gpu {
    let config = HostConfig::default().bytes_per_device(bytes);
    Gpu::new(HostBackend::new(config).expect("it opens"), DeviceId(0)).expect("a device")
}

fn options() -> BfcOptions {
    BfcOptions::new("bfc").growth(Growth::Fixed(PIECE)).limit(64 * MIB)
}

fn growing(gpu: &Gpu) -> Bfc<GrowingMemory> {
    Bfc::new(options(), GrowingMemory::new(gpu.clone()).expect("it has ranges"))
}

/// Holds 32 blocks, gives 31 back, and asks for the largest that would fit; returns whether it got it.
fn fragmented<U: SubAllocator>(bfc: &Bfc<U>) -> bool {
    let held: Vec<u64> = (0..32).map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address).collect();
    let kept = held[0];
    held[1..].iter().for_each(|&address| bfc.free(address).expect("in use"));
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
    let apart = Bfc::new(options.clone(), DeviceMemory::new(gpu(64 * MIB)).expect("memory"));
    assert!(!fragmented(&apart), "no region is large enough");
    let bfc = Bfc::new(options, GrowingMemory::new(gpu(64 * MIB)).expect("it has ranges"));
    assert!(fragmented(&bfc));
    assert_eq!((bfc.snapshot().regions.len(), bfc.stats().bytes_reserved), (1, 64 * MIB));
}

/// Counts how many blocks of 1.5 MiB fit into 64 MiB, in regions of 4 MiB, whatever is given back in between.
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
    assert_eq!(fill(GrowingMemory::new(gpu(64 * MIB)).expect("it has ranges")), 42);
}

#[test]
fn the_tail_goes_back_and_comes_again() {
    let bfc = growing(&gpu(64 * MIB));
    let held: Vec<u64> = (0..8).map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address).collect();
    for &address in &held[2..] {
        bfc.free(address).expect("in use");
    }
    assert_eq!(bfc.trim().expect("the driver takes it"), 6 * PIECE, "the last six pieces");
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
    // All of the limit is taken, half of it by one block at the front: the tail goes back and comes again as one piece.
    let bfc = Bfc::new(options().limit(8 * PIECE), GrowingMemory::new(gpu(64 * MIB)).expect("it has ranges"));
    let held: Vec<u64> = (0..8).map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address).collect();
    held[4..].iter().for_each(|&address| bfc.free(address).expect("in use"));
    assert_eq!(bfc.alloc(Request::new(4 * PIECE)).expect("four pieces are free").address, held[4]);
}

#[test]
fn what_is_written_across_pieces_is_read_again() {
    let bfc = growing(&gpu(64 * MIB));
    let held: Vec<u64> = (0..4).map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address).collect();
    held.into_iter().for_each(|address| bfc.free(address).expect("in use"));
    let placed = bfc.alloc(Request::new(4 * PIECE)).expect("four pieces");
    let memory = bfc.upstream().memory().expect("memory");
    let bytes: Vec<u8> = (0..4 * PIECE).map(|at| (at % 251) as u8).collect();
    let mut read = vec![0; bytes.len()];
    // SAFETY: `write` and `read` ask for a range of one allocation that nothing else uses: it is this test's own.
    unsafe { memory.write(placed.address, &bytes) }.expect("it is written");
    // SAFETY: as above.
    unsafe { memory.read(placed.address, &mut read) }.expect("it is read");
    assert!(bytes == read);
}

#[test]
fn a_device_that_is_full_says_so_and_loses_nothing() {
    let gpu = gpu(8 * PIECE);
    let budget = Arc::new(Budget::new(6 * PIECE));
    let memory = GrowingMemory::new(gpu.clone()).expect("it has ranges").budget(budget.clone());
    let bfc = Bfc::new(BfcOptions::new("bfc").growth(Growth::Fixed(PIECE)), memory);
    let held: Vec<u64> = (0..6).map(|_| bfc.alloc(Request::new(PIECE)).expect("room").address).collect();
    assert!(matches!(bfc.alloc(Request::new(PIECE)), Err(Error::OutOfMemory { .. })));
    held.into_iter().for_each(|address| bfc.free(address).expect("in use"));
    drop(bfc);
    assert_eq!(budget.used(), 0);
    let bfc = Bfc::new(BfcOptions::new("bfc"), GrowingMemory::new(gpu).expect("it has ranges"));
    bfc.alloc(Request::new(8 * PIECE)).expect("all of it came back");
}
