//! An arena that grows in place, on the host backend's memory.

use std::sync::Arc;

use allocators::{Arena, ArenaOptions, Budget, Growth};
use allocators::{Export, Piece, RegionSource};
use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu, Sharing};

const PIECE: u64 = 1 << 20;

fn gpu(bytes: u64) -> Gpu {
    let config = HostConfig::default().bytes_per_device(bytes);
    Gpu::new(HostBackend::new(config).expect("it opens"), DeviceId(0)).expect("a device")
}

fn options() -> ArenaOptions {
    ArenaOptions::default()
        .growth(Growth::Fixed(PIECE))
        .grows_in_place(true)
}

fn arena(gpu: &Gpu, options: ArenaOptions) -> Arc<Arena> {
    Arena::new(gpu.clone(), options).expect("an arena")
}

fn take(arena: &Arena, len: u64) -> Piece {
    arena.take(len, 1).expect("room")
}

/// Maps this number of pieces, and leaves them free.
fn grow(arena: &Arena, pieces: usize) {
    let taken: Vec<Piece> = (0..pieces).map(|_| take(arena, PIECE)).collect();
    taken.into_iter().for_each(|piece| arena.give_back(piece));
}

#[test]
fn a_block_lies_across_pieces_and_names_the_one_that_it_begins_in() {
    let arena = arena(&gpu(64 << 20), options());
    grow(&arena, 3);
    let half = take(&arena, PIECE / 2);
    let across = take(&arena, 2 * PIECE);
    assert_eq!(arena.usage().reserved, 3 * PIECE);
    assert_eq!(
        (across.region.id(), across.offset),
        (half.region.id(), PIECE / 2)
    );
    let regions = arena.regions(&across);
    assert_eq!(regions.len(), 3);
    for pair in regions.windows(2) {
        let spot = pair[0].spot().expect("a piece");
        assert_eq!(spot.behind, pair[1].id());
        assert_eq!(pair[0].base().0 + pair[0].len(), pair[1].base().0);
        assert!(matches!(pair[1].export(), Export::Fd(_)));
    }
    assert_eq!(arena.regions(&half).len(), 1);
    arena.give_back(across);
    arena.give_back(half);
    assert_eq!(arena.usage().in_use, 0);
}

#[test]
fn the_tail_goes_back_up_to_the_last_piece_that_somebody_maps_and_places_keep_their_numbers() {
    let arena = arena(&gpu(64 << 20), options());
    grow(&arena, 4);
    let whole = take(&arena, 4 * PIECE);
    let regions = arena.regions(&whole);
    let numbers: Vec<_> = regions.iter().map(|region| region.id()).collect();
    arena.give_back(whole);
    regions[1].pin();
    assert_eq!(
        (arena.usage().pinned, arena.stats().exported),
        (PIECE, PIECE)
    );
    assert_eq!(
        arena.trim().expect("the driver takes it"),
        2 * PIECE,
        "the two behind it"
    );
    assert_eq!(arena.usage().regions, 2);
    drop(regions);
    // What is mapped there again has the same number, and the same neighbour.
    let again = take(&arena, 4 * PIECE);
    let now: Vec<_> = arena
        .regions(&again)
        .iter()
        .map(|region| region.id())
        .collect();
    assert_eq!(now[..2], numbers[..2]);
    assert_eq!(now[2], numbers[2], "one piece in the place of two");
    assert_eq!(
        arena.regions(&again)[1].spot().expect("a piece").behind,
        numbers[2]
    );
}

#[test]
fn without_memory_for_the_next_piece_it_says_so_and_loses_nothing() {
    let gpu = gpu(4 * PIECE);
    let budget = Arc::new(Budget::new(3 * PIECE));
    let arena = arena(&gpu, options().budget(budget.clone()));
    let held: Vec<Piece> = (0..3).map(|_| take(&arena, PIECE)).collect();
    assert!(matches!(
        arena.take(PIECE, 1),
        Err(Error::OutOfMemory { .. })
    ));
    held.into_iter().for_each(|piece| arena.give_back(piece));
    // All of the budget, in one block across what is there.
    let all = take(&arena, 3 * PIECE);
    assert_eq!(arena.regions(&all).len(), 3);
    arena.give_back(all);
    drop(arena);
    assert_eq!(budget.used(), 0);
    // A device without room behind the budget.
    let arena = self::arena(&gpu, options());
    let held: Vec<Piece> = (0..4).map(|_| take(&arena, PIECE)).collect();
    assert!(matches!(
        arena.take(PIECE, 1),
        Err(Error::OutOfMemory { .. })
    ));
    held.into_iter().for_each(|piece| arena.give_back(piece));
    take(&arena, 4 * PIECE);
}

#[test]
fn where_it_cannot_grow_in_place_regions_are_on_their_own() {
    let gpu = gpu(64 << 20);
    let by_handle = arena(&gpu, options().sharing(Sharing::Handle));
    let piece = take(&by_handle, 1);
    assert!(piece.region.spot().is_none() && matches!(piece.region.export(), Export::Handle(_)));
    // No process has that number of addresses.
    let config = HostConfig::default().bytes_per_device(1 << 62);
    let huge =
        Gpu::new(HostBackend::new(config).expect("it opens"), DeviceId(0)).expect("a device");
    let piece = take(&arena(&huge, options()), 1);
    assert!(piece.region.spot().is_none() && matches!(piece.region.export(), Export::Fd(_)));
    // But of a limit it has.
    assert!(
        take(&arena(&huge, options().limit(64 << 20)), 1)
            .region
            .spot()
            .is_some()
    );
}
