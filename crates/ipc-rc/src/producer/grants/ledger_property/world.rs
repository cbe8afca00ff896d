//! The ledger, and a map of what must be in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gpu_api::ParticipantId;

use super::racy_file::{Did, Meanwhile, RacyFile, interrupted};
use super::reach::Reach;
use super::{Race, Step};
use crate::fuzz::sealer_of;
use crate::producer::blocks::count::{Amount, Count};
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::grants::ledger::{Ledger, Refusal};
use crate::producer::grants::slot_group::Effort;
use transport::os::clock::Tick;
use transport::shared::counter_file::{GROUP, SlotFile};
use transport::shared::slot::{Claim, SlotState, encode};
use transport::wire::lease_address::LeaseAddress;

/// Groups in a ledger's two files: two in some shards, and one or none in others.
pub const GROUPS: usize = 20 + 5;
pub const SLOTS: usize = GROUPS * GROUP as usize;
const FILES: [u32; 2] = [20 * GROUP, 5 * GROUP];

/// A block, counted as a session counts its own.
#[derive(Debug)]
struct Block {
    number: usize,
    count: Arc<Count>,
}

impl Block {
    fn bytes_of(number: usize) -> u64 {
        256 + number as u64
    }

    fn new(number: usize, count: &Arc<Count>) -> Arc<Block> {
        count.add(Block::bytes_of(number));
        Arc::new(Block {
            number,
            count: count.clone(),
        })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.count.sub(Block::bytes_of(self.number));
    }
}

/// What a row holds: the block, and which lease it is.
#[derive(Clone, Debug)]
struct Lent {
    block: Arc<Block>,
    lease: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stands {
    InFlight,
    Held,
    Released,
    Corrupt,
}

#[derive(Clone, Debug)]
struct Lease {
    entry: LeaseAddress,
    block: usize,
    stands: Stands,
    marked: bool,
    /// When its time to live is over, in tenths of a second.
    over: Option<u64>,
}

pub struct World {
    ledger: Ledger<Lent, RacyFile>,
    owner: ParticipantId,
    files: Vec<Arc<RacyFile>>,
    count: Arc<Count>,
    blocks: Vec<Arc<Block>>,
    made: usize,
    leases: BTreeMap<usize, Lease>,
    /// Slots of outstanding leases.
    taken: BTreeSet<(u32, u32)>,
    /// What has ended, and what its slot says as long as it is not granted again.
    past: Vec<(LeaseAddress, Claim)>,
    serial: usize,
    /// In tenths of a second.
    now: u64,
    corrupted: usize,
    checks: usize,
    reach: Reach,
}

fn tick(tenths: u64) -> Tick {
    Tick::default().after(Duration::from_millis(100 * tenths))
}

impl World {
    pub fn new() -> World {
        let count = Arc::new(Count::default());
        let mut world = World {
            ledger: Ledger::new(),
            owner: ParticipantId(0),
            files: Vec::new(),
            blocks: (0..6).map(|number| Block::new(number, &count)).collect(),
            count,
            made: 6,
            leases: BTreeMap::new(),
            taken: BTreeSet::new(),
            past: Vec::new(),
            serial: 0,
            now: 0,
            corrupted: 0,
            checks: 0,
            reach: Reach::default(),
        };
        world.next_owner();
        world
    }

    /// Gives the ledger to another participant, who has files of its own.
    fn next_owner(&mut self) {
        self.owner = ParticipantId(self.owner.0 + 1);
        self.ledger.open(self.owner, sealer_of(self.owner));
        self.files.clear();
        self.past.clear();
        self.corrupted = 0;
        self.add_file();
    }

    fn add_file(&mut self) {
        self.files
            .push(Arc::new(RacyFile::new(FILES[self.files.len()])));
        self.ledger.add_file(self.files.last().expect("the one"));
    }

    /// Chooses a lease, and those that were granted after it.
    fn pick(&self, from: usize, times: usize) -> Vec<usize> {
        let all = self.leases.len();
        self.leases
            .keys()
            .cycle()
            .skip(from.checked_rem(all).unwrap_or(0))
            .take(times.min(all))
            .copied()
            .collect()
    }

    fn slot_of(
        &self,
        entry: LeaseAddress,
    ) -> &transport::shared::slot::Slot<super::racy_file::Racy> {
        &self.files[entry.file as usize].slots()[entry.slot as usize]
    }

    fn mark(&self, entry: LeaseAddress) {
        self.files[entry.file as usize].dirty()[(entry.slot / GROUP) as usize].mark();
    }

    /// Makes the consumer do its next step on a lease in the middle of `work`. Returns the lease.
    fn race<T>(&mut self, race: Race, work: impl FnOnce(&mut World) -> T) -> (T, Option<usize>) {
        let chosen = race.and_then(|(after, lease)| Some((after, *self.pick(lease, 1).first()?)));
        let meanwhile = chosen.and_then(|(after, key)| {
            let lease = &self.leases[&key];
            let releases = match lease.stands {
                Stands::InFlight => false,
                Stands::Held => true,
                Stands::Released | Stands::Corrupt => return None,
            };
            Some(Meanwhile {
                after,
                file: self.files[lease.entry.file as usize].clone(),
                entry: lease.entry,
                releases,
            })
        });
        let (done, did) = interrupted(meanwhile, || work(self));
        let Some(did) = did else { return (done, None) };
        let (_, key) = chosen.expect("something happened");
        let lease = self.leases.get_mut(&key).expect("not taken out yet");
        match did {
            Did::Released => {
                (lease.stands, lease.marked) = (Stands::Released, true);
                self.reach.raced[0] += 1;
            }
            Did::Claimed(Claim::Held) => {
                lease.stands = Stands::Held;
                self.reach.raced[1] += 1;
            }
            Did::Claimed(found) => assert_eq!(found, Claim::Revoked, "of a lease in flight"),
        }
        (done, Some(key))
    }

    /// Takes the leases out of the map that came back; one that may not is an early or a double
    /// retirement.
    fn returned(
        &mut self,
        mut out: ReclaimedBlocks<Lent>,
        found: Claim,
        may: impl Fn(&Lease) -> bool,
    ) {
        self.reach.most_at_once = self.reach.most_at_once.max(out.len());
        for lent in out.drain() {
            self.ended(&lent, found, &may);
        }
    }

    fn ended(&mut self, lent: &Lent, found: Claim, may: impl Fn(&Lease) -> bool) -> Lease {
        let lease = self
            .leases
            .remove(&lent.lease)
            .expect("a lease ended twice");
        assert!(may(&lease), "ended too early: {lease:?}");
        assert_eq!(lent.block.number, lease.block, "the block of another lease");
        self.taken.remove(&(lease.entry.file, lease.entry.slot));
        self.past.push((lease.entry, found));
        lease
    }

    pub fn check(&mut self) {
        let mut outstanding = BTreeMap::<usize, usize>::new();
        for lease in self.leases.values() {
            *outstanding.entry(lease.block).or_default() += 1;
        }
        for block in &self.blocks {
            let leases = outstanding.get(&block.number).copied().unwrap_or(0);
            assert_eq!(
                Arc::strong_count(block) - 1,
                leases,
                "the count of block {}",
                block.number
            );
            outstanding.entry(block.number).or_default();
        }
        let bytes = outstanding
            .keys()
            .map(|&number| Block::bytes_of(number))
            .sum();
        assert_eq!(
            self.count.sum(),
            Amount {
                blocks: outstanding.len() as u64,
                bytes
            }
        );
        assert_eq!(self.ledger.is_empty(), self.leases.is_empty());
        self.checks += 1;
        if self.checks.is_multiple_of(8) {
            self.check_tally();
        }
    }

    fn check_tally(&self) {
        let tally = self.ledger.tally(tick(self.now), |_| 1);
        let standing = |which: &[Stands]| {
            self.leases
                .values()
                .filter(|l| which.contains(&l.stands))
                .count() as u64
        };
        // One that has ended and waits for a collect counts for nothing.
        let ended = standing(&[Stands::Released]);
        assert_eq!(tally.bytes, self.leases.len() as u64 - ended);
        assert_eq!(tally.in_flight, standing(&[Stands::InFlight]));
        assert_eq!(tally.held, standing(&[Stands::Held]));
        assert_eq!(tally.corrupt, standing(&[Stands::Corrupt]));
    }

    pub fn take(&mut self, step: &Step) {
        match *step {
            Step::Grant {
                block,
                tenths,
                times,
            } => {
                for _ in 0..times {
                    self.grant(block, tenths);
                }
            }
            Step::Claim { lease, times } => self
                .pick(lease, times)
                .into_iter()
                .for_each(|key| self.claim(key)),
            Step::Release {
                lease,
                times,
                marked,
            } => {
                self.pick(lease, times)
                    .into_iter()
                    .for_each(|key| self.release(key, marked));
            }
            Step::Revoke { lease, race } => self.revoke(lease, race),
            Step::Corrupt { lease, word } => self.corrupt(lease, word),
            Step::Collect { everything, race } => self.collect(everything, race),
            Step::Glance { shard, race } => {
                let mut out = ReclaimedBlocks::new();
                self.race(race, |world| world.ledger.glance(shard, 4, &mut out));
                self.returned(out, Claim::AlreadyClaimed, |lease| {
                    lease.stands == Stands::Released
                });
            }
            Step::Expire { tenths, race } => self.expire(tenths, race),
            Step::Past { lease } => self.look_back(lease),
            Step::Again { block, times } => self.again(block, times),
            Step::Replace { block } => {
                self.blocks[block] = Block::new(self.made, &self.count);
                self.made += 1;
            }
            Step::Die => self.die(),
        }
    }

    fn grant(&mut self, block: usize, tenths: Option<u64>) -> Option<usize> {
        let (ttl, lease) = (
            tenths.map(|tenths| Duration::from_millis(100 * tenths)),
            self.serial,
        );
        let lent = Lent {
            block: self.blocks[block].clone(),
            lease,
        };
        let other = ParticipantId(self.owner.0 + 1);
        match self.grant_by_turns(&lent, ttl) {
            Ok(entry) => {
                assert!(
                    self.taken.insert((entry.file, entry.slot)),
                    "a slot was granted twice"
                );
                self.reach.top_generation = self.reach.top_generation.max(entry.generation.get());
                let over = tenths.map(|tenths| self.now + tenths);
                let block = lent.block.number;
                self.leases.insert(
                    lease,
                    Lease {
                        entry,
                        block,
                        stands: Stands::InFlight,
                        marked: false,
                        over,
                    },
                );
                self.reach.most_leases = self.reach.most_leases.max(self.leases.len());
                self.serial += 1;
                Some(lease)
            }
            Err(Refusal::Full) => {
                let slots: u32 = FILES[..self.files.len()].iter().sum();
                assert_eq!(self.leases.len(), slots as usize, "full with room left");
                assert_eq!(
                    self.ledger.grant(other, &lent, tick(0), None),
                    Err(Refusal::Gone),
                    "another's"
                );
                self.reach.full += 1;
                if self.files.len() < FILES.len() {
                    self.add_file();
                }
                None
            }
            Err(Refusal::Gone) => panic!("nobody died"),
        }
    }

    /// Grants by a shard that is locked for several grants, if it has room, every other time.
    fn grant_by_turns(&self, lent: &Lent, ttl: Option<Duration>) -> Result<LeaseAddress, Refusal> {
        let now = tick(self.now);
        let begun = self
            .ledger
            .begin()
            .filter(|_| self.serial.is_multiple_of(2));
        let granted = begun.and_then(|mut shard| {
            shard.look_ahead();
            shard.grant(self.owner, lent, now, ttl).ok()
        });
        granted.map_or_else(|| self.ledger.grant(self.owner, lent, now, ttl), Ok)
    }

    fn claim(&mut self, key: usize) {
        let (entry, stands) = (self.leases[&key].entry, self.leases[&key].stands);
        assert!(
            self.ledger
                .with_block(entry, |lent| lent.lease == key)
                .expect("outstanding")
        );
        match stands {
            Stands::InFlight => {
                assert_eq!(self.slot_of(entry).claim(entry.generation), Claim::Held)
            }
            Stands::Held | Stands::Released => {
                assert_eq!(
                    self.slot_of(entry).claim(entry.generation),
                    Claim::AlreadyClaimed
                );
                return;
            }
            Stands::Corrupt => return,
        }
        self.leases.get_mut(&key).expect("picked").stands = Stands::Held;
    }

    fn release(&mut self, key: usize, marked: bool) {
        let entry = self.leases[&key].entry;
        if self.leases[&key].stands != Stands::Held {
            return;
        }
        self.slot_of(entry).release(entry.generation);
        if marked {
            self.mark(entry);
        }
        let lease = self.leases.get_mut(&key).expect("picked");
        (lease.stands, lease.marked) = (Stands::Released, marked);
    }

    fn revoke(&mut self, lease: usize, race: Race) {
        let Some(&key) = self.pick(lease, 1).first() else {
            return;
        };
        let entry = self.leases[&key].entry;
        // The race is for the lease that is taken back.
        let (taken, raced) = self.race(race.map(|(after, _)| (after % 3, lease)), |world| {
            world.ledger.revoke(entry)
        });
        let stands = self.leases[&key].stands;
        assert_eq!(
            taken.is_some(),
            stands == Stands::InFlight,
            "raced: {raced:?}"
        );
        if let Some(lent) = taken {
            assert_eq!(lent.lease, key);
            self.ended(&lent, Claim::Revoked, |_| true);
            assert!(self.ledger.revoke(entry).is_none(), "revoked twice");
        }
    }

    /// Writes what no method of a slot writes, as a hostile holder of the file can.
    fn corrupt(&mut self, lease: usize, word: u64) {
        let Some(&key) = self.pick(lease, 1).first() else {
            return;
        };
        let (entry, stands) = (self.leases[&key].entry, self.leases[&key].stands);
        let legal = [SlotState::Granted, SlotState::Held, SlotState::Released]
            .map(|state| encode(state, entry.generation));
        if legal.contains(&word) || matches!(stands, Stands::Released | Stands::Corrupt) {
            return;
        }
        self.slot_of(entry).scribble(word);
        self.mark(entry);
        self.leases.get_mut(&key).expect("picked").stands = Stands::Corrupt;
        self.corrupted += 1;
    }

    fn collect(&mut self, everything: bool, race: Race) {
        let effort = if everything {
            Effort::Everything
        } else {
            Effort::Marked
        };
        let mut out = ReclaimedBlocks::new();
        let due = |lease: &Lease| lease.stands == Stands::Released && (everything || lease.marked);
        let due: Vec<(usize, LeaseAddress)> = self
            .leases
            .iter()
            .filter(|(_, lease)| due(lease))
            .map(|(&key, lease)| (key, lease.entry))
            .collect();
        self.race(race, |world| world.ledger.collect(effort, &mut out));
        self.returned(out, Claim::AlreadyClaimed, |lease| {
            lease.stands == Stands::Released
        });
        for (key, entry) in due {
            assert!(
                !self.leases.contains_key(&key),
                "a collect missed a release: {:?}",
                self.leases[&key]
            );
            if !everything {
                self.reach.found(entry);
            }
        }
        assert_eq!(self.ledger.corrupt_words(), self.corrupted);
    }

    fn expire(&mut self, tenths: u64, race: Race) {
        self.now += tenths;
        let now = self.now;
        let (mut out, mut lapsed) = (ReclaimedBlocks::new(), Vec::new());
        let (again, _) = self.race(race, |world| {
            world.ledger.expire(tick(now), &mut out, &mut lapsed)
        });
        assert_eq!(lapsed.len(), out.len(), "a lapse without its name");
        self.reach.lapsed += lapsed.len();
        let entries: BTreeSet<(u32, u32)> = lapsed
            .iter()
            .map(|entry| (entry.file, entry.slot))
            .collect();
        self.returned(out, Claim::Revoked, |lease| {
            let is_over = lease.over.is_some_and(|over| over <= now);
            lease.stands == Stands::InFlight
                && is_over
                && entries.contains(&(lease.entry.file, lease.entry.slot))
        });
        let left = self
            .leases
            .values()
            .filter(|lease| lease.stands == Stands::InFlight);
        if let Some(first) = left.filter_map(|lease| lease.over).min() {
            assert!(first > now, "one did not lapse");
            assert!(again <= tick(first), "nobody would come again in time");
            self.reach.not_lapsed += 1;
        }
    }

    fn look_back(&mut self, n: usize) {
        let Some(&(entry, found)) = n.checked_rem(self.past.len()).map(|n| &self.past[n]) else {
            return;
        };
        let claim = self.slot_of(entry).claim(entry.generation);
        let again = self
            .leases
            .values()
            .any(|l| (l.entry.file, l.entry.slot) == (entry.file, entry.slot));
        let later = self.past.iter().any(|(p, _)| {
            (p.file, p.slot) == (entry.file, entry.slot) && p.generation > entry.generation
        });
        if again || later {
            // Unless its word was written over by somebody.
            assert!(
                !matches!(claim, Claim::Held | Claim::Revoked | Claim::AlreadyClaimed),
                "{claim:?} of {entry:?}"
            );
            self.reach.stale_claims += 1;
        } else {
            assert_eq!(claim, found);
        }
        assert!(
            self.ledger.revoke(entry).is_none(),
            "a lease that has ended was revoked"
        );
        assert!(
            self.ledger.with_block(entry, |_| ()).is_none(),
            "a lease that has ended has a block"
        );
    }

    fn again(&mut self, block: usize, times: usize) {
        for _ in 0..times {
            let Some(key) = self.grant(block, None) else {
                return;
            };
            self.claim(key);
            self.release(key, true);
            self.collect(false, None);
            assert!(!self.leases.contains_key(&key));
        }
    }

    fn die(&mut self) {
        self.reach.deaths += 1;
        let mut out = ReclaimedBlocks::new();
        self.ledger.close(&mut out);
        self.returned(out, Claim::Revoked, |lease| {
            lease.stands == Stands::InFlight
        });
        assert!(
            !self
                .leases
                .values()
                .any(|lease| lease.stands == Stands::InFlight),
            "one is still granted"
        );
        let lent = Lent {
            block: self.blocks[0].clone(),
            lease: usize::MAX,
        };
        assert_eq!(
            self.ledger.grant(self.owner, &lent, tick(self.now), None),
            Err(Refusal::Gone),
            "it is dead"
        );
        let begun = self
            .ledger
            .begin()
            .map(|mut shard| shard.grant(self.owner, &lent, tick(self.now), None));
        assert_eq!(begun, Some(Err(Refusal::Gone)), "it is dead");
        drop(lent);
        self.check_tally();
        self.reach.buried_barred += self
            .leases
            .values()
            .filter(|lease| lease.stands == Stands::Corrupt)
            .count();
        let mut out = ReclaimedBlocks::new();
        self.ledger.bury(&mut out);
        self.returned(out, Claim::AlreadyClaimed, |_| true);
        assert!(self.leases.is_empty(), "a burial left leases");
        let mut again = ReclaimedBlocks::new();
        self.ledger.bury(&mut again);
        assert!(again.is_empty(), "buried twice");
        self.ledger.leave();
        self.next_owner();
    }

    /// Buries what is left, and adds what was reached to what others reached.
    pub fn end(mut self, all: &mut Reach) {
        self.die();
        self.check();
        self.blocks.clear();
        assert_eq!(
            self.count.sum(),
            Amount::default(),
            "blocks are counted that are gone"
        );
        let mine = self.reach;
        all.most_leases = all.most_leases.max(mine.most_leases);
        all.groups.extend(mine.groups);
        all.places.extend(mine.places);
        all.top_generation = all.top_generation.max(mine.top_generation);
        all.most_at_once = all.most_at_once.max(mine.most_at_once);
        all.full += mine.full;
        all.stale_claims += mine.stale_claims;
        all.lapsed += mine.lapsed;
        all.not_lapsed += mine.not_lapsed;
        all.buried_barred += mine.buried_barred;
        all.deaths += mine.deaths - 1;
        (0..2).for_each(|n| all.raced[n] += mine.raced[n]);
    }
}
