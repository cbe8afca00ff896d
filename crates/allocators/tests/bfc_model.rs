//! The allocator against a plain list of chunks: the same addresses, the same sizes, whatever is
//! asked.

mod random;

use allocators::snapshot::ChunkState;
use allocators::{Bfc, BfcOptions, Growth, Request, Simulated, Snapshot};
use gpu_api::{Error, StreamIdentity};
use proptest::prelude::*;
use random::Random;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

const REGION: u64 = 64 << 10;
const LIMIT: u64 = 40 * REGION;

#[derive(Clone, Debug)]
enum Op {
    Alloc {
        bytes: u64,
        align: u64,
    },
    Free(prop::sample::Index),
    /// Of an address that lies anywhere near a live one, or was live.
    FreeForeign(prop::sample::Index, u64),
    Trim,
}

fn op() -> impl Strategy<Value = Op> {
    let bytes = prop_oneof![4 => 1u64..3000, 2 => 1u64..20_000, 1 => REGION / 2..3 * REGION];
    let align = prop_oneof![6 => Just(1u64), 2 => (0u32..14).prop_map(|bits| 1 << bits)];
    prop_oneof![
        10 => (bytes, align).prop_map(|(bytes, align)| Op::Alloc { bytes, align }),
        9 => any::<prop::sample::Index>().prop_map(Op::Free),
        1 => (any::<prop::sample::Index>(), 0u64..2000).prop_map(|(near, by)| Op::FreeForeign(near, by)),
        1 => Just(Op::Trim),
    ]
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    address: u64,
    len: u64,
    used: bool,
}

/// Regions as lists of chunks, with the rules written as plainly as they can be.
#[derive(Default)]
struct Model {
    regions: Vec<Vec<Chunk>>,
    next: u64,
    /// Eighths of what is needed from which on slack is cut off.
    eighths: u64,
}

impl Model {
    fn reserved(&self) -> u64 {
        self.regions.iter().flatten().map(|chunk| chunk.len).sum()
    }

    fn find(&self, len: u64, align: u64) -> Option<(usize, usize)> {
        let places = self
            .regions
            .iter()
            .enumerate()
            .flat_map(|(r, chunks)| (0..chunks.len()).map(move |c| (r, c)));
        places
            .filter(|&(r, c)| {
                let chunk = self.regions[r][c];
                let start = chunk.address.next_multiple_of(align);
                !chunk.used && start + len <= chunk.address + chunk.len
            })
            .min_by_key(|&(r, c)| (self.regions[r][c].len, self.regions[r][c].address))
    }

    fn alloc(&mut self, bytes: u64, align: u64) -> Option<(u64, u64)> {
        let len = bytes.next_multiple_of(256);
        let align = align.max(256);
        let place = self.find(len, align).or_else(|| {
            let room = LIMIT - self.reserved().min(LIMIT);
            if len > room {
                return None;
            }
            let asked = if len > REGION / 2 { len } else { REGION };
            let asked = asked.max(len + align - 256).min(room);
            let address = (Simulated::BASE + self.next).next_multiple_of(align) - Simulated::BASE;
            self.next = address + asked + 256;
            self.regions.push(vec![Chunk {
                address: Simulated::BASE + address,
                len: asked,
                used: false,
            }]);
            self.find(len, align)
        })?;
        let chunks = &mut self.regions[place.0];
        let mut at = place.1;
        let prefix = chunks[at].address.next_multiple_of(align) - chunks[at].address;
        if prefix > 0 {
            Model::cut(chunks, at, prefix);
            at += 1;
        }
        let slack = chunks[at].len - len;
        if slack > 0 && 8 * slack >= self.eighths * len {
            Model::cut(chunks, at, len);
        }
        chunks[at].used = true;
        Some((chunks[at].address, chunks[at].len))
    }

    fn cut(chunks: &mut Vec<Chunk>, at: usize, len: u64) {
        let whole = chunks[at];
        chunks[at].len = len;
        chunks.insert(
            at + 1,
            Chunk {
                address: whole.address + len,
                len: whole.len - len,
                used: false,
            },
        );
    }

    fn free(&mut self, address: u64) -> bool {
        for chunks in &mut self.regions {
            let Some(at) = chunks
                .iter()
                .position(|chunk| chunk.address == address && chunk.used)
            else {
                continue;
            };
            chunks[at].used = false;
            if at + 1 < chunks.len() && !chunks[at + 1].used {
                chunks[at].len += chunks.remove(at + 1).len;
            }
            if at > 0 && !chunks[at - 1].used {
                chunks[at - 1].len += chunks.remove(at).len;
            }
            return true;
        }
        false
    }

    fn trim(&mut self) -> u64 {
        let before = self.reserved();
        self.regions
            .retain(|chunks| chunks.iter().any(|chunk| chunk.used));
        before - self.reserved()
    }

    fn chunks(&self) -> Vec<(u64, u64, bool)> {
        self.regions
            .iter()
            .flatten()
            .map(|chunk| (chunk.address, chunk.len, chunk.used))
            .collect()
    }
}

fn chunks(snapshot: &Snapshot) -> Vec<(u64, u64, bool)> {
    snapshot
        .chunks()
        .map(|chunk| (chunk.address, chunk.len, chunk.state == ChunkState::Used))
        .collect()
}

/// What holds for every heap at every time.
fn check(snapshot: &Snapshot) {
    for region in &snapshot.regions {
        let mut at = region.base;
        for chunk in &region.chunks {
            assert_eq!(chunk.address, at, "chunks lie side by side");
            assert!(
                chunk.address.is_multiple_of(256) && chunk.len.is_multiple_of(256) && chunk.len > 0
            );
            assert!(chunk.asked <= chunk.len);
            at += chunk.len;
        }
        assert_eq!(at, region.base + region.len);
        for pair in region.chunks.windows(2) {
            assert!(
                pair.iter().any(|chunk| chunk.state != ChunkState::Free),
                "free neighbours merge"
            );
        }
    }
    for pair in snapshot.regions.windows(2) {
        assert!(
            pair[0].base + pair[0].len <= pair[1].base,
            "regions in order and apart"
        );
    }
    let used: u64 = snapshot
        .chunks()
        .filter(|chunk| chunk.state == ChunkState::Used)
        .map(|chunk| chunk.len)
        .sum();
    let asked: u64 = snapshot
        .chunks()
        .filter(|chunk| chunk.state == ChunkState::Used)
        .map(|chunk| chunk.asked)
        .sum();
    let free = snapshot
        .chunks()
        .filter(|chunk| chunk.state == ChunkState::Free)
        .map(|chunk| chunk.len)
        .max();
    assert_eq!(
        (snapshot.stats.bytes_in_use, snapshot.asked_bytes),
        (used, asked)
    );
    assert_eq!(snapshot.stats.largest_free_block_bytes, free.unwrap_or(0));
}

fn options() -> BfcOptions {
    BfcOptions::new("bfc")
        .limit(LIMIT)
        .growth(Growth::Fixed(REGION))
        .collect_regions(false)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn it_does_what_a_plain_list_does(ops in prop::collection::vec(op(), 1..300), eighths in 0u64..=8) {
        let bfc = Bfc::new(options().max_slack_share(eighths as f64 / 8.0), Simulated::new().gap(256));
        let mut model = Model { eighths, ..Model::default() };
        let mut live: Vec<u64> = Vec::new();
        for op in ops {
            match op {
                Op::Alloc { bytes, align } => {
                    let expected = model.alloc(bytes, align);
                    match bfc.alloc(Request::new(bytes).align(align)) {
                        Ok(placed) => {
                            prop_assert_eq!(Some((placed.address, placed.bytes)), expected);
                            prop_assert_eq!(placed.asked, bytes);
                            live.push(placed.address);
                        }
                        Err(Error::OutOfMemory { .. }) => prop_assert_eq!(expected, None),
                        Err(error) => prop_assert!(false, "{}", error),
                    }
                }
                Op::Free(which) if !live.is_empty() => {
                    let address = live.swap_remove(which.index(live.len()));
                    prop_assert!(model.free(address));
                    bfc.free(address).expect("in use");
                }
                Op::FreeForeign(near, by) if !live.is_empty() => {
                    let address = live[near.index(live.len())] + by;
                    if !live.contains(&address) {
                        prop_assert!(bfc.free(address).is_err());
                    }
                }
                Op::Trim => prop_assert_eq!(bfc.trim().expect("upstream takes it"), model.trim()),
                Op::Free(_) | Op::FreeForeign(..) => {}
            }
        }
        let snapshot = bfc.snapshot();
        check(&snapshot);
        prop_assert_eq!(chunks(&snapshot), model.chunks());
        for address in live {
            bfc.free(address).expect("in use");
        }
        let snapshot = bfc.snapshot();
        check(&snapshot);
        prop_assert!(snapshot.regions.iter().all(|region| region.chunks.len() == 1), "all of it merged");
        bfc.trim().expect("upstream takes it");
        prop_assert_eq!(bfc.upstream().live_bytes(), 0);
    }

    #[test]
    fn chunks_that_are_pending_are_nobody_elses(
        ops in prop::collection::vec((1u64..5000, 0u64..4, any::<prop::sample::Index>(), 0u64..6), 1..300),
    ) {
        // Streams finish their work in order: `done[s]` of what was queued on stream `s` has
        // finished.
        let done: Arc<[AtomicU64; 4]> = Arc::default();
        let mut queued = [0u64; 4];
        let bfc = Bfc::new(options(), Simulated::new().gap(256));
        let mut live: Vec<(u64, u64)> = Vec::new();
        let mut busy: Vec<(u64, u64, u64, u64)> = Vec::new();
        for (bytes, stream, which, what) in ops {
            let identity = StreamIdentity(stream);
            match what {
                0..=2 => {
                    let Ok(placed) = bfc.alloc(Request::new(bytes).on(identity)) else { continue };
                    let end = placed.address + placed.bytes;
                    prop_assert!(live.iter().all(|&(a, e)| end <= a || e <= placed.address));
                    busy.retain(|&(a, e, s, n)| {
                        let overlaps = a < end && placed.address < e;
                        assert!(
                            !overlaps || s == stream || done[s as usize].load(Ordering::SeqCst) >= n,
                            "bytes that stream {s} still works on went to stream {stream}"
                        );
                        !overlaps
                    });
                    live.push((placed.address, end));
                }
                3 | 4 if !live.is_empty() => {
                    let (address, end) = live.swap_remove(which.index(live.len()));
                    queued[stream as usize] += 1;
                    let number = queued[stream as usize];
                    let done = done.clone();
                    let is_done = move || done[stream as usize].load(Ordering::SeqCst) >= number;
                    bfc.free_after(address, identity, is_done).expect("in use");
                    prop_assert!(bfc.free(address).is_err());
                    busy.push((address, end, stream, number));
                }
                _ => {
                    let at = done[stream as usize].load(Ordering::SeqCst);
                    done[stream as usize].store(queued[stream as usize].min(at + 3), Ordering::SeqCst);
                    bfc.settle();
                }
            }
            check(&bfc.snapshot());
        }
        for (done, queued) in done.iter().zip(queued) {
            done.store(queued, Ordering::SeqCst);
        }
        bfc.settle();
        prop_assert_eq!(bfc.snapshot().pending_bytes, 0);
        for (address, _) in live {
            bfc.free(address).expect("in use");
        }
        let snapshot = bfc.snapshot();
        check(&snapshot);
        prop_assert!(snapshot.regions.iter().all(|region| region.chunks.len() == 1), "all of it merged");
    }
}

/// Allocates, frees every other one, allocates again; the errors are counted, and nothing else may
/// go wrong.
fn script(bfc: &Bfc<Simulated>) -> usize {
    let mut failures = 0;
    let mut live = Vec::new();
    for round in 0..4u64 {
        for step in 0..40u64 {
            let before = bfc.snapshot();
            match bfc.alloc(Request::new(1 + (step * 7919 + round * 104_729) % 50_000)) {
                Ok(placed) => live.push(placed.address),
                Err(Error::OutOfMemory { .. }) => {
                    failures += 1;
                    assert_eq!(bfc.snapshot(), before, "a failure changes nothing");
                }
                Err(error) => panic!("{error}"),
            }
        }
        let mut at = 0;
        live.retain(|&address| {
            at += 1;
            at % 2 == 0 || bfc.free(address).is_err()
        });
        check(&bfc.snapshot());
    }
    live.into_iter()
        .for_each(|address| bfc.free(address).expect("in use"));
    failures
}

#[test]
fn an_upstream_that_fails_once_costs_at_most_one_request() {
    let calls = {
        let bfc = Bfc::new(options(), Simulated::new());
        assert_eq!(script(&bfc), 0);
        bfc.upstream().calls()
    };
    assert!(calls > 10);
    for n in 1..=calls {
        let bfc = Bfc::new(options(), Simulated::new().failing_at(n));
        assert!(script(&bfc) <= 1, "call {n}");
        bfc.trim().expect("upstream takes it");
        assert_eq!(bfc.upstream().live_bytes(), 0, "call {n}");
        assert_eq!(bfc.stats().bytes_reserved, 0);
    }
}

#[test]
fn a_snapshot_taken_while_others_allocate_is_of_one_moment() {
    // With no limit: what is left free of regions can be too small for a block.
    let bfc = Bfc::new(options().limit(u64::MAX), Simulated::new().gap(256));
    thread::scope(|scope| {
        let users = [1u64, 2].map(|seed| {
            let bfc = &bfc;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                let mut held = Vec::new();
                for _ in 0..20_000 {
                    if held.len() > 40 || (random.one_in(3) && !held.is_empty()) {
                        bfc.free(random.take_one(&mut held)).expect("in use");
                    } else {
                        held.push(
                            bfc.alloc(Request::new(1 + random.below(20_000)))
                                .expect("room")
                                .address,
                        );
                    }
                    if random.one_in(500) {
                        bfc.trim().expect("upstream takes it");
                    }
                }
                held.into_iter()
                    .for_each(|address| bfc.free(address).expect("in use"));
            })
        });
        // A user that panics has ended, too.
        while !users.iter().all(|user| user.is_finished()) {
            let snapshot = bfc.snapshot();
            check(&snapshot);
            let reserved: u64 = snapshot.regions.iter().map(|region| region.len).sum();
            assert_eq!(snapshot.stats.bytes_reserved, reserved);
        }
    });
}

#[test]
fn many_free_chunks_of_one_size_stay_in_order() {
    let bfc = Bfc::new(
        BfcOptions::new("bfc").growth(Growth::Fixed(64 << 20)),
        Simulated::new(),
    );
    let held: Vec<u64> = (0..40_000)
        .map(|_| bfc.alloc(Request::new(256)).expect("room").address)
        .collect();
    let (free, kept): (Vec<_>, Vec<_>) = held.iter().enumerate().partition(|(at, _)| at % 2 == 0);
    free.iter()
        .rev()
        .for_each(|&(_, &address)| bfc.free(address).expect("in use"));
    for &(_, &address) in &free {
        assert_eq!(
            bfc.alloc(Request::new(1)).expect("room").address,
            address,
            "the lowest first"
        );
    }
    held.iter()
        .for_each(|&address| bfc.free(address).expect("in use"));
    assert_eq!(kept.len(), 20_000);
    check(&bfc.snapshot());
    assert_eq!(bfc.snapshot().chunks().count(), 1);
}
