//! The ledger against a map: whatever happens in whatever order, a block's count is the number of its outstanding
//! slots, every lease is retired exactly once, and nothing is retired while a living process holds it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use channel::shared::counter_file::HeapFile;
use channel::shared::slot::{Claim, Slot, State, encode};

type Block = Arc<u32>;

const OWNER: ParticipantId = ParticipantId(1);

/// What a participant does with a lease, as the test's map has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stands {
    InFlight,
    Held,
    Released,
    Corrupt,
}

#[derive(Clone, Debug)]
enum Step {
    Grant { block: usize, lapses: bool },
    Claim { lease: usize },
    Release { lease: usize, marked: bool },
    Revoke { lease: usize },
    Corrupt { lease: usize, word: u64 },
    Collect { everything: bool },
    Glance { shard: usize },
    Expire,
    Die,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..6usize, any::<bool>()).prop_map(|(block, lapses)| Step::Grant { block, lapses }),
        6 => (0..64usize).prop_map(|lease| Step::Claim { lease }),
        5 => (0..64usize, prop::bool::weighted(0.8)).prop_map(|(lease, marked)| Step::Release { lease, marked }),
        2 => (0..64usize).prop_map(|lease| Step::Revoke { lease }),
        1 => (0..64usize, any::<u64>()).prop_map(|(lease, word)| Step::Corrupt { lease, word }),
        4 => any::<bool>().prop_map(|everything| Step::Collect { everything }),
        2 => (0..16usize).prop_map(|shard| Step::Glance { shard }),
        1 => Just(Step::Expire),
        1 => Just(Step::Die),
    ]
}

struct Lease {
    entry: LeaseAddress,
    block: usize,
    stands: Stands,
    marked: bool,
    lapses: bool,
}

struct World {
    ledger: Ledger<Block, HeapFile>,
    file: Arc<HeapFile>,
    blocks: Vec<Block>,
    leases: BTreeMap<usize, Lease>,
    serial: usize,
    now: Tick,
}

impl World {
    fn new() -> World {
        let start = Tick::default();
        let ledger = Ledger::new();
        ledger.open(OWNER);
        // As few slots as have a group in some shards and none in others.
        let file = Arc::new(HeapFile::new(5 * GROUP));
        ledger.add_file(&file);
        World { ledger, file, blocks: (0..6).map(Arc::new).collect(), leases: BTreeMap::new(), serial: 0, now: start }
    }

    fn pick(&self, n: usize) -> Option<usize> {
        if self.leases.is_empty() { None } else { self.leases.keys().nth(n % self.leases.len()).copied() }
    }

    /// Takes leases out of the map for the blocks that came back, preferring `likely`; a block that the map does not
    /// expect is an early or a double retirement.
    fn returned(&mut self, mut out: ReclaimedBlocks<Block>, likely: impl Fn(&Lease) -> bool) {
        for block in out.drain() {
            let found = self.leases.iter().find(|(_, l)| l.block == *block as usize && likely(l)).map(|(&key, _)| key);
            let key = found.expect("a block came back that nobody has let go of");
            self.leases.remove(&key);
        }
    }

    fn check(&self) {
        for (n, block) in self.blocks.iter().enumerate() {
            let outstanding = self.leases.values().filter(|lease| lease.block == n).count();
            assert_eq!(Arc::strong_count(block) - 1, outstanding, "the count of block {n}");
        }
        let tally = self.ledger.tally(self.now, |_| 1);
        assert_eq!(tally.bytes, self.leases.len() as u64);
        assert_eq!(self.ledger.is_empty(), self.leases.is_empty());
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Grant { block, lapses } => {
                let ttl = lapses.then_some(Duration::from_secs(10));
                match self.ledger.grant(OWNER, &self.blocks[block], self.now, ttl) {
                    Ok(entry) => {
                        assert!(self.leases.values().all(|l| l.entry.slot != entry.slot), "a slot was granted twice");
                        let lease = Lease { entry, block, stands: Stands::InFlight, marked: false, lapses };
                        self.leases.insert(self.serial, lease);
                        self.serial += 1;
                    }
                    Err(Refusal::Full) => assert_eq!(self.leases.len(), 5 * GROUP as usize),
                    Err(Refusal::Gone) => panic!("nobody died"),
                }
            }
            Step::Claim { lease } => {
                let Some(key) = self.pick(lease) else { return };
                let lease = self.leases.get_mut(&key).expect("picked");
                let claim = self.file.slots()[lease.entry.slot as usize].claim(lease.entry.generation);
                match lease.stands {
                    Stands::InFlight => {
                        assert_eq!(claim, Claim::Held);
                        lease.stands = Stands::Held;
                    }
                    Stands::Held | Stands::Released => assert_eq!(claim, Claim::AlreadyClaimed),
                    Stands::Corrupt => {}
                }
            }
            Step::Release { lease, marked } => {
                let Some(key) = self.pick(lease) else { return };
                let lease = self.leases.get_mut(&key).expect("picked");
                if lease.stands == Stands::Held {
                    self.file.slots()[lease.entry.slot as usize].release(lease.entry.generation);
                    lease.stands = Stands::Released;
                    if marked {
                        self.file.dirty()[(lease.entry.slot / GROUP) as usize].mark();
                        lease.marked = true;
                    }
                }
            }
            Step::Revoke { lease } => {
                let Some(key) = self.pick(lease) else { return };
                let (entry, stands) = (self.leases[&key].entry, self.leases[&key].stands);
                let taken = self.ledger.revoke(entry);
                if stands != Stands::Corrupt {
                    assert_eq!(taken.is_some(), stands == Stands::InFlight);
                }
                if let Some(block) = taken {
                    assert_eq!(*block as usize, self.leases[&key].block);
                    self.leases.remove(&key);
                    assert_eq!(self.ledger.revoke(entry), None, "revoked twice");
                }
            }
            Step::Corrupt { lease, word } => {
                let Some(key) = self.pick(lease) else { return };
                let lease = self.leases.get_mut(&key).expect("picked");
                let g = lease.entry.generation;
                let legal = [State::Granted, State::Held, State::Released].map(|s| encode(s, g));
                if !legal.contains(&word) && lease.stands != Stands::Released {
                    poke(&self.file.slots()[lease.entry.slot as usize], word);
                    self.file.dirty()[(lease.entry.slot / GROUP) as usize].mark();
                    lease.stands = Stands::Corrupt;
                }
            }
            Step::Collect { everything } => {
                let mut out = ReclaimedBlocks::new();
                let effort = if everything { Effort::Everything } else { Effort::Marked };
                self.ledger.collect(effort, &mut out);
                self.returned(out, |lease| lease.stands == Stands::Released);
                assert!(
                    !self.leases.values().any(|l| l.stands == Stands::Released && (everything || l.marked)),
                    "a collect missed a release"
                );
            }
            Step::Glance { shard } => {
                let mut out = ReclaimedBlocks::new();
                self.ledger.glance(shard, 4, &mut out);
                self.returned(out, |lease| lease.stands == Stands::Released);
            }
            Step::Expire => {
                self.now = self.now.after(Duration::from_secs(11));
                let mut out = ReclaimedBlocks::new();
                let mut lapsed = Vec::new();
                self.ledger.expire(self.now, &mut out, &mut lapsed);
                assert_eq!(lapsed.len(), out.len(), "a lapse without its name");
                self.returned(out, |lease| lease.stands == Stands::InFlight && lease.lapses);
                assert!(!self.leases.values().any(|l| l.stands == Stands::InFlight && l.lapses), "one did not lapse");
            }
            Step::Die => {
                let mut out = ReclaimedBlocks::new();
                self.ledger.close(&mut out);
                self.returned(out, |lease| lease.stands == Stands::InFlight);
                assert_eq!(self.ledger.grant(OWNER, &self.blocks[0], self.now, None), Err(Refusal::Gone));
                self.check();
                let mut out = ReclaimedBlocks::new();
                self.ledger.bury(&mut out);
                self.returned(out, |_| true);
                assert!(self.leases.is_empty(), "a burial left leases");
                let mut again = ReclaimedBlocks::new();
                self.ledger.bury(&mut again);
                assert!(again.is_empty(), "buried twice");
                // A dead participant's file is never granted from again: the next one has its own.
                let blocks = std::mem::take(&mut self.blocks);
                let now = self.now;
                *self = World::new();
                self.blocks = blocks;
                self.now = now;
            }
        }
    }
}

/// Writes what no method of a slot writes, as a hostile holder of the file can.
fn poke(slot: &Slot<std::sync::atomic::AtomicU64>, word: u64) {
    let word_ptr = std::ptr::from_ref(slot).cast::<std::sync::atomic::AtomicU64>();
    // SAFETY: `&*` of an `AtomicU64`: `Slot` is transparent over one, and the reference outlives the call.
    let atomic = unsafe { &*word_ptr };
    atomic.store(word, Ordering::Release);
}

proptest! {
    #[test]
    fn the_count_is_the_outstanding_slots_and_every_lease_ends_once(steps in prop::collection::vec(step(), 1..400)) {
        let mut world = World::new();
        for step in steps {
            world.take(step);
            world.check();
        }
    }
}

#[test]
fn a_full_ledger_says_so_and_goes_on_in_the_next_file() {
    let ledger = Ledger::<Block, HeapFile>::new();
    ledger.open(OWNER);
    let block = Arc::new(0);
    ledger.add_file(&Arc::new(HeapFile::new(GROUP)));
    for _ in 0..GROUP {
        ledger.grant(OWNER, &block, Tick::default(), None).expect("a free slot");
    }
    assert_eq!(ledger.grant(OWNER, &block, Tick::default(), None), Err(Refusal::Full));
    ledger.add_file(&Arc::new(HeapFile::new(2 * GROUP)));
    let entry = ledger.grant(OWNER, &block, Tick::default(), None).expect("a slot of the second file");
    assert_eq!(entry.file, 1);
    assert!(ledger.revoke(entry).is_some());
}

#[test]
fn threads_that_share_at_once_get_different_slots() {
    let ledger = Arc::new(Ledger::<Block, HeapFile>::new());
    ledger.open(OWNER);
    ledger.add_file(&Arc::new(HeapFile::new(FIRST_SLOTS)));
    let block = Arc::new(0);
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (ledger, block) = (ledger.clone(), block.clone());
            std::thread::spawn(move || {
                let grant = || ledger.grant(OWNER, &block, Tick::default(), None).expect("a free slot").slot;
                (0..1_000).map(|_| grant()).collect::<Vec<u32>>()
            })
        })
        .collect();
    let mut slots: Vec<u32> = threads.into_iter().flat_map(|t| t.join().expect("no panic")).collect();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), 8_000);
    assert_eq!(Arc::strong_count(&block), 8_001);
}

#[test]
fn threads_are_spread_over_the_shards_and_each_keeps_its_own() {
    let begin = || {
        std::thread::spawn(|| {
            let own = own_shard();
            assert!((0..100).all(|_| own_shard() == own));
            own
        })
    };
    let own: BTreeSet<usize> = (0..64).map(|_| begin().join().expect("no panic")).collect();
    assert!(own.len() > SHARDS / 2, "{own:?}");
}

#[test]
fn a_thread_leaves_its_shard_for_good_only_when_that_is_full() {
    let ledger = Ledger::new();
    ledger.open(OWNER);
    ledger.add_file(&Arc::new(HeapFile::new(FIRST_SLOTS)));
    let block: Block = Arc::new(0);
    let each = FIRST_SLOTS / SHARDS as u32;
    let shard = || ledger.grant(OWNER, &block, Tick::default(), None).expect("a free slot").slot / each;
    let own = shard();
    let locked = ledger.shards[own as usize].lock();
    assert_ne!(shard(), own, "somebody is in it at this moment");
    drop(locked);
    for _ in 1..each {
        assert_eq!(shard(), own);
    }
    let next = shard();
    assert_ne!(next, own, "it is full");
    assert_eq!(shard(), next);
}

#[test]
fn a_grant_that_races_a_burial_is_seen_by_it_or_refused() {
    for _ in 0..200 {
        let ledger = Arc::new(Ledger::<Block, HeapFile>::new());
        ledger.open(OWNER);
        ledger.add_file(&Arc::new(HeapFile::new(FIRST_SLOTS)));
        let block = Arc::new(0);
        let granting = {
            let (ledger, block) = (ledger.clone(), block.clone());
            std::thread::spawn(move || while ledger.grant(OWNER, &block, Tick::default(), None).is_ok() {})
        };
        let mut out = ReclaimedBlocks::new();
        ledger.close(&mut out);
        granting.join().expect("no panic");
        ledger.bury(&mut out);
        drop(out);
        assert!(ledger.is_empty());
        assert_eq!(Arc::strong_count(&block), 1, "a lease was granted to the dead and forgotten");
    }
}

#[test]
fn the_sizes_of_files_double_up_to_a_limit() {
    let sizes: Vec<u32> = (0..6).map(Ledger::<Block, HeapFile>::next_file_slots).collect();
    assert_eq!(sizes, [8_192, 16_384, 32_768, 65_536, 65_536, 65_536]);
    assert_eq!(Ledger::<Block, HeapFile>::next_file_slots(u32::MAX), MOST_SLOTS);
}

#[test]
fn a_ledger_that_was_left_is_its_next_owners_alone() {
    let ledger = Ledger::new();
    let block: Block = Arc::new(0);
    let next = ParticipantId(OWNER.0 + 1);
    assert_eq!(ledger.grant(OWNER, &block, Tick::default(), None), Err(Refusal::Gone), "nobody's");
    ledger.open(OWNER);
    ledger.add_file(&Arc::new(HeapFile::new(GROUP)));
    let first = ledger.grant(OWNER, &block, Tick::default(), None).expect("a free slot");
    assert_eq!(ledger.grant(next, &block, Tick::default(), None), Err(Refusal::Gone), "another's");
    let mut out = ReclaimedBlocks::new();
    ledger.close(&mut out);
    assert_eq!(out.len(), 1);
    out.drain().for_each(drop);
    ledger.leave();
    ledger.open(next);
    ledger.add_file(&Arc::new(HeapFile::new(GROUP)));
    assert_eq!(ledger.grant(OWNER, &block, Tick::default(), None), Err(Refusal::Gone), "it left");
    assert!(ledger.with_block(first, |_| ()).is_none(), "a lease of the one before");
    assert!(ledger.grant(next, &block, Tick::default(), None).is_ok());
}

#[test]
fn a_file_that_came_too_late_is_not_the_next_participants() {
    let ledger: Ledger<Block, HeapFile> = Ledger::new();
    ledger.open(OWNER);
    let mut out = ReclaimedBlocks::new();
    ledger.close(&mut out);
    ledger.bury(&mut out);
    ledger.leave();
    ledger.add_file(&Arc::new(HeapFile::new(GROUP)));
    let next = ParticipantId(2);
    ledger.open(next);
    let file = Arc::new(HeapFile::new(GROUP));
    ledger.add_file(&file);
    let entry = ledger.grant(next, &Arc::new(7), Tick::default(), None).expect("there is room");
    assert_eq!(entry.file, 0);
    assert_eq!(file.slots()[entry.slot as usize].claim(entry.generation), Claim::Held);
}

#[test]
fn a_grant_without_a_time_to_live_outlasts_every_clock() {
    let ledger = Ledger::<Block, HeapFile>::new();
    ledger.open(OWNER);
    let file = Arc::new(HeapFile::new(FIRST_SLOTS));
    ledger.add_file(&file);
    // 300 days after the clock began: more than 32 bits of 4 ms.
    let now = Tick::default().after(Duration::from_secs(300 * 86_400));
    let (forever, hour) = (Arc::new(1), Duration::from_secs(3_600));
    let kept = ledger.grant(OWNER, &forever, now, None).expect("a free slot");
    let brief = ledger.grant(OWNER, &Arc::new(2), now, Some(hour)).expect("a free slot");
    let (mut out, mut lapsed) = (ReclaimedBlocks::new(), Vec::new());
    assert_eq!(ledger.expire(now, &mut out, &mut lapsed), now.after(hour), "when to come again");
    assert!(lapsed.is_empty());
    assert_eq!(ledger.expire(now.after(hour), &mut out, &mut lapsed), Tick::NEVER);
    assert_eq!(lapsed, [brief]);
    assert_eq!(ledger.tally(now.after(hour), |_| 1).oldest, hour);
    assert_eq!(file.slots()[kept.slot as usize].claim(kept.generation), Claim::Held);
}

#[test]
fn a_claimed_lease_is_not_looked_at_again_for_its_time() {
    let ledger = Ledger::<Block, HeapFile>::new();
    ledger.open(OWNER);
    let file = Arc::new(HeapFile::new(FIRST_SLOTS));
    ledger.add_file(&file);
    let (now, time) = (Tick::default(), Duration::from_secs(1));
    let first = ledger.grant(OWNER, &Arc::new(1), now, Some(time)).expect("a free slot");
    let claimed = ledger.grant(OWNER, &Arc::new(2), now, Some(2 * time)).expect("a free slot");
    assert_eq!(file.slots()[claimed.slot as usize].claim(claimed.generation), Claim::Held);
    let (mut out, mut lapsed) = (ReclaimedBlocks::new(), Vec::new());
    assert_eq!(ledger.expire(now.after(time), &mut out, &mut lapsed), Tick::NEVER);
    assert_eq!(lapsed, [first]);
}
