//! The arena as a session's source of regions, on a device of numbers.

mod fake;
mod random;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use allocators::{Arena, ArenaOptions, Growth};
use allocators::{Export, Holder, Piece, Reclaim, Reclaimed, Region, RegionSource, SourceUsage};
use fake::Fake;
use gpu_api::{Error, Gpu, MemHandle, ParticipantId, RegionId, Sharing};
use proptest::prelude::*;
use random::Random;

const REGION: u64 = 64 << 10;

fn options() -> ArenaOptions {
    ArenaOptions::default()
        .sharing(Sharing::Handle)
        .growth(Growth::Fixed(REGION))
}

fn arena(fake: &Arc<Fake>) -> Arc<Arena> {
    Arena::new(fake.gpu(), options()).expect("an arena")
}

fn take(arena: &Arena, len: u64) -> Piece {
    arena.take(len, 1).expect("room")
}

#[test]
fn many_blocks_share_one_region() {
    let fake = Fake::new(1 << 20);
    let arena = arena(&fake);
    let pieces: Vec<Piece> = (0..64).map(|_| take(&arena, 1000)).collect();
    assert_eq!(fake.state().allocs, 1);
    let mut places: Vec<u64> = pieces.iter().map(|piece| piece.ptr().0).collect();
    places.sort_unstable();
    assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= 1000));
    assert!(
        pieces
            .iter()
            .all(|piece| piece.len == 1000 && Arc::ptr_eq(&piece.region, &pieces[0].region))
    );
    assert_eq!(
        arena.usage(),
        SourceUsage {
            regions: 1,
            reserved: REGION,
            in_use: 64 * 1024,
            pinned: 0
        }
    );
    pieces.into_iter().for_each(|piece| arena.give_back(piece));
    assert_eq!(arena.usage().in_use, 0);
}

#[test]
fn blocks_above_half_a_region_get_all_of_a_device() {
    // Of one region each, blocks of 17 MiB would lose 15 MiB in 32: a device of 1 GiB would be full
    // after 32.
    const MIB: u64 = 1 << 20;
    let fake = Fake::new(1 << 30);
    let arena =
        Arena::new(fake.gpu(), ArenaOptions::default().sharing(Sharing::Handle)).expect("an arena");
    let pieces: Vec<Piece> = (0..60).map(|_| take(&arena, 17 * MIB)).collect();
    assert_eq!(arena.usage().reserved, 60 * 17 * MIB);
    assert!(arena.take(17 * MIB, 1).is_err(), "4 MiB are left");
    pieces.into_iter().for_each(|piece| arena.give_back(piece));
    assert_eq!(arena.trim().expect("the driver takes it"), 60 * 17 * MIB);
    let halves = [(); 2].map(|()| take(&arena, 16 * MIB));
    assert_eq!(
        arena.usage().reserved,
        32 * MIB,
        "two halves share a region"
    );
    halves.into_iter().for_each(|piece| arena.give_back(piece));
}

#[test]
fn a_region_comes_with_its_export() {
    let fake = Fake::new(1 << 20);
    let piece = take(&arena(&fake), 1);
    let Export::Handle(MemHandle(bytes)) = piece.region.export() else {
        panic!("no handle")
    };
    assert_eq!(bytes[..8], piece.region.base().0.to_le_bytes());
    let by_fd = Arena::new(fake.gpu(), options().sharing(Sharing::Fd)).expect("an arena");
    assert!(matches!(take(&by_fd, 1).region.export(), Export::Fd(_)));
}

#[test]
fn nonsense_is_refused_and_changes_nothing() {
    let fake = Fake::new(1 << 20);
    let arena = arena(&fake);
    let refused = |len, align| arena.take(len, align).expect_err("nonsense").to_string();
    assert_eq!(
        refused(0, 1),
        "block size is 0 bytes, but must be at least 1 byte"
    );
    assert_eq!(refused(1, 0), "alignment is 0, but must be a power of two");
    assert_eq!(refused(1, 3), "alignment is 3, but must be a power of two");
    for (len, align) in [
        (u64::MAX, 1),
        (u64::MAX - 255, 1),
        (u64::MAX - 300, 1),
        (1, 1 << 63),
        (1 << 63, 1 << 63),
    ] {
        let error = arena.take(len, align).expect_err("more than there is");
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    }
    assert_eq!(fake.state().allocs, 0);
    assert_eq!(arena.usage(), SourceUsage::default());
}

#[test]
fn a_full_device_gives_what_it_has_and_then_says_so() {
    let fake = Fake::new(REGION + 8192);
    let arena = arena(&fake);
    let first = take(&arena, REGION);
    let second = take(&arena, 5000);
    assert_eq!(second.region.len(), 8192);
    let error = arena.take(5000, 1).expect_err("the device is full");
    assert!(
        matches!(error, Error::OutOfMemory { asked: 5000, .. }),
        "{error}"
    );
    arena.give_back(second);
    take(&arena, 5000);
    arena.give_back(first);
}

#[test]
fn only_whole_regions_that_nothing_pins_go_back_to_the_driver() {
    let fake = Fake::new(1 << 20);
    let arena = arena(&fake);
    let pieces: Vec<Piece> = (0..3).map(|_| take(&arena, REGION)).collect();
    let regions: Vec<Arc<Region>> = pieces.iter().map(|piece| piece.region.clone()).collect();
    regions[1].pin();
    let mut pieces = pieces.into_iter();
    let used = pieces.next().expect("the first");
    pieces.for_each(|piece| arena.give_back(piece));
    assert_eq!(arena.usage().pinned, REGION);
    assert_eq!(arena.stats().exported, REGION);

    assert_eq!(arena.trim().expect("trim"), REGION);
    assert_eq!(
        fake.state().live.keys().copied().collect::<Vec<_>>(),
        [regions[0].base().0, regions[1].base().0]
    );
    assert_eq!(arena.trim().expect("trim"), 0);
    regions[1].unpin();
    arena.give_back(used);
    assert_eq!(arena.trim().expect("trim"), 2 * REGION);
    assert_eq!(arena.usage(), SourceUsage::default());
    assert_eq!(
        take(&arena, 1).region.id(),
        RegionId(3),
        "numbers are never used again"
    );
}

#[test]
fn a_region_whose_free_failed_is_leaked_and_not_freed_again() {
    let fake = Fake::new(1 << 20);
    let arena = arena(&fake);
    [take(&arena, REGION), take(&arena, REGION)]
        .into_iter()
        .for_each(|piece| arena.give_back(piece));
    fake.state().refuses_free = true;
    assert_eq!(
        arena.trim().expect_err("the driver refuses").to_string(),
        "free failed on device 0"
    );
    assert_eq!(arena.stats().leaked, 2 * REGION);
    assert_eq!(arena.usage(), SourceUsage::default());
    fake.state().refuses_free = false;
    assert_eq!(arena.trim().expect("trim"), 0);
    drop(arena);
    assert_eq!(fake.state().live.len(), 2);
}

#[test]
fn a_region_that_cannot_be_exported_is_freed() {
    let fake = Fake::new(1 << 20);
    let arena = arena(&fake);
    fake.state().refuses_export = true;
    assert_eq!(
        arena.take(1, 1).expect_err("no export").to_string(),
        "export failed on device 0"
    );
    assert_eq!(fake.state().allocs, 1);
    assert!(fake.state().live.is_empty());
}

/// Takes and gives back in a fixed order; returns how many takes failed.
fn script(fake: &Arc<Fake>) -> usize {
    let arena = arena(fake);
    let mut held: Vec<Piece> = Vec::new();
    let mut failures = 0;
    for at in 0..60u64 {
        match arena.take(1 + at * 7919 % (2 * REGION), 1) {
            Ok(piece) => held.push(piece),
            Err(Error::Driver { .. }) => failures += 1,
            Err(error) => panic!("{error}"),
        }
        if at % 3 == 2 {
            arena.give_back(held.swap_remove(at as usize % held.len()));
        }
        assert_eq!(arena.usage().reserved, fake.live_bytes());
        if at % 20 == 19 {
            arena.trim().expect("the driver takes it");
        }
    }
    held.into_iter().for_each(|piece| arena.give_back(piece));
    assert_eq!(arena.usage().in_use, 0);
    failures
}

#[test]
fn a_driver_that_fails_once_costs_one_take_and_leaks_nothing() {
    let room = 256 * REGION;
    let fake = Fake::new(room);
    assert_eq!(script(&fake), 0);
    let calls = fake.state().calls;
    assert!(calls > 20);
    for n in 1..=calls {
        let fake = Fake::new(room);
        fake.state().fails_at = n;
        assert_eq!(script(&fake), 1, "call {n}");
        assert_eq!(fake.live_bytes(), 0, "call {n}");
    }
}

#[test]
fn a_dropped_arena_frees_what_nobody_uses_or_maps() {
    let fake = Fake::new(1 << 20);
    let arena = arena(&fake);
    let [kept, pinned, back] = [(); 3].map(|()| take(&arena, REGION));
    pinned.region.pin();
    let bases = [kept.region.base().0, pinned.region.base().0];
    arena.give_back(pinned);
    arena.give_back(back);
    drop(arena);
    assert_eq!(fake.state().live.keys().copied().collect::<Vec<_>>(), bases);
    drop(kept);
}

#[test]
fn what_is_given_back_twice_is_not_handed_out_twice() {
    let fake = Fake::new(1 << 20);
    let arena = arena(&fake);
    let piece = take(&arena, 512);
    arena.give_back(piece.clone());
    let again = take(&arena, 256);
    assert_eq!(again.offset, piece.offset);
    arena.give_back(piece.clone());
    arena.give_back(Piece {
        len: u64::MAX,
        ..piece.clone()
    });
    arena.give_back(Piece {
        offset: u64::MAX,
        ..piece.clone()
    });
    let elsewhere = Region::new(
        RegionId(9),
        again.region.device(),
        again.region.base(),
        REGION,
        Export::Handle(MemHandle([0; 64])),
    );
    arena.give_back(Piece {
        region: Arc::new(elsewhere),
        ..again.clone()
    });
    assert_eq!(arena.usage().in_use, 256);
    assert_ne!(take(&arena, 256).offset, again.offset);
}

#[test]
fn threads_get_bytes_of_their_own() {
    let fake = Fake::new(1 << 30);
    let arena = arena(&fake);
    thread::scope(|scope| {
        for seed in 1..5u64 {
            let arena = &arena;
            scope.spawn(move || {
                let mut held = Vec::new();
                let mut random = Random::new(seed);
                for _ in 0..2000 {
                    if held.len() > 50 || (random.one_in(3) && !held.is_empty()) {
                        arena.give_back(random.take_one(&mut held));
                    } else {
                        held.push(
                            arena
                                .take(1 + random.below(9000), 1 << random.below(14))
                                .expect("room"),
                        );
                    }
                }
                held.into_iter().for_each(|piece| arena.give_back(piece));
            });
        }
    });
    assert_eq!(arena.usage().in_use, 0);
    let reserved = arena.usage().reserved;
    assert_eq!(arena.trim().expect("trim"), reserved);
    assert!(fake.state().live.is_empty());
}

#[test]
fn a_forked_child_leaves_the_driver_alone() {
    let fake = Fake::new(1 << 20);
    let arena = arena(&fake);
    let piece = take(&arena, 1);
    arena.give_back(piece.clone());
    // SAFETY: `fork` in a process with threads lets the child do only what is safe in a signal
    // handler: the calls return before they lock or allocate anything.
    unsafe {
        harness::holds_in_a_fork(|| {
            let refused = matches!(arena.trim(), Err(Error::Forked { .. }))
                && matches!(arena.take(1, 1), Err(Error::Forked { .. }));
            arena.give_back(piece);
            refused
        });
    }
    assert_eq!(arena.trim().expect("trim"), REGION);
}

/// A session that gives back in `collect_all` what was put into its limbo, and unpins when asked to
/// unmap.
#[derive(Debug, Default)]
struct Peer {
    arena: Mutex<Weak<Arena>>,
    limbo: Mutex<Vec<Piece>>,
    idle: Mutex<Vec<Arc<Region>>>,
    collects: AtomicUsize,
    asks: AtomicUsize,
    /// How many looks it takes until an unmapping is done.
    slow: AtomicU64,
    held: AtomicU64,
}

impl Reclaim for Peer {
    fn collect_all(&self) -> Reclaimed {
        self.collects.fetch_add(1, Ordering::Relaxed);
        if self.asks.load(Ordering::Relaxed) > 0 && self.slow.fetch_sub(1, Ordering::Relaxed) <= 1 {
            self.idle
                .lock()
                .expect("no panic")
                .drain(..)
                .for_each(|region| region.unpin());
        }
        let arena = self
            .arena
            .lock()
            .expect("no panic")
            .upgrade()
            .expect("the arena asks");
        let limbo = std::mem::take(&mut *self.limbo.lock().expect("no panic"));
        let reclaimed = Reclaimed {
            blocks: limbo.len() as u64,
            bytes: limbo.iter().map(|piece| piece.len).sum(),
        };
        limbo.into_iter().for_each(|piece| arena.give_back(piece));
        reclaimed
    }

    fn ask_to_unmap(&self) -> usize {
        self.asks.fetch_add(1, Ordering::Relaxed);
        self.idle.lock().expect("no panic").len()
    }

    fn holders(&self) -> Vec<Holder> {
        let bytes = self.held.load(Ordering::Relaxed);
        vec![Holder {
            participant: ParticipantId(7),
            pid: 4711,
            command: "trainer".into(),
            leases: u64::from(bytes > 0),
            bytes,
            mappings: 0,
            oldest: Duration::from_millis(1500),
            dying: false,
        }]
    }

    fn limbo_bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }
}

fn with_peer(gpu: Gpu, options: ArenaOptions) -> (Arc<Arena>, Arc<Peer>) {
    let arena = Arena::new(gpu, options).expect("an arena");
    let peer = Arc::new(Peer::default());
    *peer.arena.lock().expect("no panic") = Arc::downgrade(&arena);
    let weak: Weak<dyn Reclaim> = Arc::<Peer>::downgrade(&peer);
    arena.register(weak.clone());
    arena.register(weak);
    (arena, peer)
}

#[test]
fn limbo_is_collected_before_the_driver_is_asked() {
    let fake = Fake::new(1 << 20);
    let (arena, peer) = with_peer(fake.gpu(), options());
    let piece = take(&arena, REGION);
    let collected = peer.collects.load(Ordering::Relaxed);
    peer.limbo.lock().expect("no panic").push(piece);
    take(&arena, REGION);
    assert_eq!(
        peer.collects.load(Ordering::Relaxed),
        collected + 1,
        "registered twice, called once"
    );
    assert_eq!(
        (fake.state().allocs, peer.asks.load(Ordering::Relaxed)),
        (1, 0)
    );
}

#[test]
fn consumers_are_asked_to_unmap_only_when_the_driver_is_out() {
    let fake = Fake::new(2 * REGION);
    // What is free is in two regions, one of them mapped by somebody; neither is large enough.
    let (arena, peer) = with_peer(fake.gpu(), options().patience(Duration::from_secs(60)));
    let pieces = [take(&arena, REGION), take(&arena, REGION)];
    pieces[0].region.pin();
    peer.idle
        .lock()
        .expect("no panic")
        .push(pieces[0].region.clone());
    peer.slow.store(3, Ordering::Relaxed);
    assert_eq!(peer.asks.load(Ordering::Relaxed), 0);
    pieces.into_iter().for_each(|piece| arena.give_back(piece));
    let whole = take(&arena, 2 * REGION);
    assert_eq!(whole.region.len(), 2 * REGION);
    assert!(peer.asks.load(Ordering::Relaxed) > 0);
    assert_eq!(fake.live_bytes(), 2 * REGION);
}

#[test]
fn the_error_names_who_holds_the_memory() {
    let fake = Fake::new(2 * REGION);
    let (arena, peer) = with_peer(fake.gpu(), options());
    let _held = [take(&arena, REGION), take(&arena, REGION)];
    peer.held.store(2 * REGION, Ordering::Relaxed);
    let text = arena.take(4096, 1).expect_err("full").to_string();
    for part in [
        "out of memory on device 0: asked for 4096 bytes",
        "arena of device 0: upstream has no room",
        "no limit, reserved 131072, in use 131072, largest free piece 0, fragmentation 0 %",
        "in limbo 128 KiB",
        "process 4711 (trainer) holds 128 KiB in 1 leases and maps 0 regions, oldest 1.5 s",
        "from    64 KiB:       2 chunks,    128 KiB; in use       2,    128 KiB",
        "|****************************************************************|",
    ] {
        assert!(text.contains(part), "{part}\nnot in\n{text}");
    }
    let snapshot = arena.snapshot();
    assert_eq!(
        (snapshot.limbo_bytes, snapshot.holders[0].pid),
        (2 * REGION, 4711)
    );
    assert_eq!(arena.stats().limbo, 2 * REGION);
    let again: allocators::Snapshot =
        serde_json::from_str(&serde_json::to_string(&snapshot).expect("JSON")).expect("the same");
    assert_eq!(again, snapshot);
}

#[test]
fn an_error_of_very_many_chunks_draws_no_map() {
    let fake = Fake::new(32 << 20);
    let arena =
        Arena::new(fake.gpu(), options().growth(Growth::Fixed(32 << 20))).expect("an arena");
    let held: Vec<Piece> = (0..70_000).map(|_| take(&arena, 256)).collect();
    let text = arena.take(32 << 20, 1).expect_err("full").to_string();
    assert!(
        text.contains("in use 17920000")
            && text.contains("fragmentation 0 %")
            && !text.contains('|'),
        "{text}"
    );
    held.into_iter().for_each(|piece| arena.give_back(piece));
    // What was cut into many chunks is one again, but the table still has their places.
    take(&arena, 32 << 20);
}

#[test]
fn a_request_above_the_limit_bothers_nobody() {
    let fake = Fake::new(1 << 20);
    let (arena, peer) = with_peer(
        fake.gpu(),
        options().limit(REGION).wait(Duration::from_secs(600)),
    );
    assert!(matches!(
        arena.take(REGION + 1, 1),
        Err(Error::OutOfMemory { .. })
    ));
    let (unlimited, other) = with_peer(fake.gpu(), options().wait(Duration::from_secs(600)));
    assert!(
        matches!(
            unlimited.take((1 << 20) + 1, 1),
            Err(Error::OutOfMemory { .. })
        ),
        "more than the device has"
    );
    assert_eq!(other.asks.load(Ordering::Relaxed), 0);
    assert_eq!(peer.asks.load(Ordering::Relaxed), 0);
}

#[test]
fn it_waits_as_long_as_it_may() {
    let fake = Fake::new(REGION);
    // The longest wait that can be said has no end, and is no less for it.
    for wait in [Duration::from_secs(600), Duration::MAX] {
        let arena = Arena::new(fake.gpu(), options().wait(wait)).expect("an arena");
        let piece = take(&arena, REGION);
        let waiter = thread::spawn({
            let arena = arena.clone();
            move || arena.take(REGION, 1)
        });
        arena.give_back(piece);
        arena.give_back(waiter.join().expect("no panic").expect("it was given back"));
    }
}

#[derive(Clone, Debug)]
enum Op {
    Take(u64, u32),
    GiveBack(usize),
    Pin(usize),
    Unpin,
    Trim,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_region_that_is_used_or_pinned_stays_with_the_driver(ops in prop::collection::vec(prop_oneof![
        6 => (1u64..20_000, 0u32..13).prop_map(|(len, align)| Op::Take(len, align)),
        5 => any::<usize>().prop_map(Op::GiveBack),
        2 => any::<usize>().prop_map(Op::Pin),
        1 => Just(Op::Unpin),
        2 => Just(Op::Trim),
    ], 1..200)) {
        let fake = Fake::new(16 * REGION);
        let arena = arena(&fake);
        let mut out: Vec<Piece> = Vec::new();
        let mut pinned: Vec<Arc<Region>> = Vec::new();
        for op in ops {
            match op {
                Op::Take(len, align) => {
                    let Ok(piece) = arena.take(len, 1 << align) else { continue };
                    prop_assert!(piece.ptr().0.is_multiple_of(1 << align));
                    prop_assert!(piece.offset + len <= piece.region.len());
                    let apart = |other: &Piece| {
                        other.ptr().0 + other.len <= piece.ptr().0 || piece.ptr().0 + len <= other.ptr().0
                    };
                    prop_assert!(out.iter().all(apart));
                    out.push(piece);
                }
                Op::GiveBack(which) if !out.is_empty() => arena.give_back(out.swap_remove(which % out.len())),
                Op::Pin(which) if !out.is_empty() => {
                    let region = &out[which % out.len()].region;
                    region.pin();
                    pinned.push(region.clone());
                }
                Op::Unpin => pinned.pop().into_iter().for_each(|region| region.unpin()),
                Op::Trim => {
                    arena.trim().expect("the driver takes it");
                }
                Op::GiveBack(_) | Op::Pin(_) => {}
            }
            for region in out.iter().map(|piece| &piece.region).chain(&pinned) {
                prop_assert!(fake.state().live.contains_key(&region.base().0), "{:?} went back", region.id());
            }
            prop_assert_eq!(arena.usage().reserved, fake.live_bytes());
        }
        pinned.drain(..).for_each(|region| region.unpin());
        out.drain(..).for_each(|piece| arena.give_back(piece));
        arena.trim().expect("the driver takes it");
        prop_assert_eq!(fake.live_bytes(), 0);
    }
}
