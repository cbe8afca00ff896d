//! The ledger: which slot stands for which block. Private to the producer; the slots alone are
//! shared.
//!
//! One ledger for each participant. It is cut into shards, each with its own lock and its own
//! slots, so that threads that share different blocks with one participant do not wait for each
//! other: a thread takes the first shard that is free, beginning with its own.
//!
//! A row holds a block for as long as its lease may be in use; the block comes back from
//! [`Ledger::collect`] and its siblings exactly once, and the caller drops it *after* the shard's
//! lock is released.
//!
//! A grant and the burial of its addressee meet at the shard's lock: a grant is either seen by the
//! burial or refused.
//!
//! A call that grants to many participants locks a shard of each ledger first ([`Ledger::begin`]).
//! It only tries these locks, and lets go of all of them before it waits for any: so no two such
//! calls wait for each other.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use gpu_api::lock::Acquire;
use gpu_api::{Access, ParticipantId};

use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::grants::slot_group::{Effort, SlotGroups, Terms};
use crate::shard::{SHARDS, own_shard};
use transport::os::clock::Tick;
use transport::shared::counter_file::{FIRST_SLOTS, GROUP, MOST_SLOTS, SlotFile};
use transport::shared::slot::Seen;
use transport::wire::descriptor::{KeptSealer, Sealer};
use transport::wire::lease_address::LeaseAddress;

/// Why a grant was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The participant is dead or gone.
    Gone,
    /// Every slot of every file is in use: add a file.
    Full,
}

/// What a ledger counts, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Granted, not claimed.
    pub in_flight: u64,
    /// Claimed.
    pub held: u64,
    /// With a word that makes no sense.
    pub corrupt: u64,
    /// Bytes of the blocks behind them all.
    pub bytes: u64,
    /// The age of the oldest.
    pub oldest: Duration,
}

/// The participant that leases are granted to.
#[derive(Debug)]
struct Owner {
    id: ParticipantId,
    /// Each shard has its own, so that a thread that grants finds it under the one lock that it
    /// takes.
    sealer: KeptSealer,
}

/// A lease, and what seals its descriptor.
pub type Granted = (LeaseAddress, Sealer);

#[derive(Debug)]
struct Shard<B, F> {
    parts: Vec<SlotGroups<B, F>>,
    /// The participant of these leases; `None` before the first, and once it is granted no more.
    owner: Option<Owner>,
    /// No part before this one has a free slot.
    first_free: usize,
    cursor: usize,
    /// No row lapses before this.
    first_lapse: Tick,
}

impl<B, F> Default for Shard<B, F> {
    fn default() -> Shard<B, F> {
        Shard {
            parts: Vec::new(),
            owner: None,
            first_free: 0,
            cursor: 0,
            first_lapse: Tick::NEVER,
        }
    }
}

/// A shard and its lock, kept off its neighbours' cache lines.
#[derive(Debug)]
#[repr(align(128))]
struct Locked<B, F> {
    /// Some lease is outstanding. Written under the lock; read without it, to pass over a shard
    /// that has nothing to look at: an old `false` misses a lease that was granted at the same
    /// moment, and so not yet released.
    busy: AtomicBool,
    /// The shard that the threads whose own this is found room in last. Theirs while it has room;
    /// when it is full they do not try it, and all after it, each time anew.
    room: AtomicUsize,
    shard: Mutex<Shard<B, F>>,
}

impl<B, F: SlotFile> Locked<B, F> {
    fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    /// Brings `busy` up to date before the lock is let go.
    fn note(&self, shard: &Shard<B, F>) {
        let busy = shard.parts.iter().any(SlotGroups::has_leases);
        if busy != self.is_busy() {
            self.busy.store(busy, Ordering::Relaxed);
        }
    }
}

/// One participant's leases.
#[derive(Debug)]
pub struct Ledger<B, F> {
    shards: [Locked<B, F>; SHARDS],
    corrupt_words: AtomicUsize,
}

impl<B: Clone, F: SlotFile> Ledger<B, F> {
    /// Makes an empty ledger without a participant.
    pub fn new() -> Ledger<B, F> {
        Ledger {
            shards: std::array::from_fn(|n| Locked {
                busy: AtomicBool::new(false),
                room: AtomicUsize::new(n),
                shard: Mutex::default(),
            }),
            corrupt_words: AtomicUsize::new(0),
        }
    }

    /// Gives the ledger to a participant. It is empty: never used, or [left](Ledger::leave).
    pub fn open(&self, owner: ParticipantId, sealer: Sealer) {
        for locked in &self.shards {
            let mut shard = locked.shard.acquire();
            debug_assert!(
                shard.owner.is_none() && !locked.is_busy(),
                "somebody else's"
            );
            // A thread that was adding a file when the last owner left may have come too late: its
            // numbers were that owner's.
            shard.parts.clear();
            shard.owner = Some(Owner {
                id: owner,
                sealer: sealer.into(),
            });
        }
        self.corrupt_words.store(0, Ordering::Relaxed);
    }

    /// Lets go of the counter files: every lease has ended.
    pub fn leave(&self) {
        for locked in &self.shards {
            let mut shard = locked.shard.acquire();
            debug_assert!(!locked.is_busy(), "left with a lease");
            *shard = Shard::default();
        }
    }

    /// Adds a counter file; its number is how many there were before, the same in every shard.
    pub fn add_file(&self, file: &Arc<F>) {
        for (number, shard) in (0..).zip(&self.shards) {
            shard
                .shard
                .acquire()
                .parts
                .push(SlotGroups::new(file, number));
        }
    }

    /// Returns the size of the file that follows `files` files: each doubles the one before.
    pub fn next_file_slots(files: u32) -> u32 {
        FIRST_SLOTS
            .checked_shl(files)
            .filter(|&slots| slots != 0)
            .unwrap_or(MOST_SLOTS)
            .min(MOST_SLOTS)
    }

    /// Writes a lease of the ledger's owner down and grants its slot. The sealer is the owner's.
    ///
    /// # Errors
    ///
    /// [`Refusal::Gone`] after a burial began, or when the ledger is another's; [`Refusal::Full`]
    /// when no slot is free.
    #[inline]
    pub fn grant_sealed(
        &self,
        owner: ParticipantId,
        block: &B,
        terms: Terms,
    ) -> Result<Granted, Refusal> {
        let own = own_shard();
        let locked = self.with_room(own);
        let mut is_full = false;
        if let Ok(mut shard) = locked.shard.try_lock() {
            match Self::grant_in(locked, &mut shard, owner, block, terms) {
                Err(Refusal::Full) => is_full = true,
                done => return done,
            }
        }
        self.grant_elsewhere(own, is_full, owner, block, terms)
    }

    /// Grants as [`grant_sealed`](Ledger::grant_sealed) does, for whom no descriptor is wanted.
    ///
    /// # Errors
    ///
    /// As there.
    #[cfg(any(test, fuzzing))]
    pub fn grant(
        &self,
        owner: ParticipantId,
        block: &B,
        now: Tick,
        time_to_live: Option<Duration>,
    ) -> Result<LeaseAddress, Refusal> {
        self.grant_sealed(
            owner,
            block,
            Terms::new(now, time_to_live, Access::ReadWrite),
        )
        .map(|(lease, _)| lease)
    }

    /// Returns the shard that the threads of this one found room in last.
    #[inline]
    fn with_room(&self, own: usize) -> &Locked<B, F> {
        &self.shards[self.shards[own].room.load(Ordering::Relaxed) % SHARDS]
    }

    /// Locks a shard for several grants by the calling thread, if it is free.
    pub fn begin(&self) -> Option<Granting<'_, B, F>> {
        let locked = self.with_room(own_shard());
        let shard = locked.shard.try_lock().ok()?;
        Some(Granting { locked, shard })
    }

    /// Looks for room in every shard: without waiting first, beginning with the thread's own; then
    /// with.
    #[cold]
    #[inline(never)]
    fn grant_elsewhere(
        &self,
        own: usize,
        is_full: bool,
        owner: ParticipantId,
        block: &B,
        terms: Terms,
    ) -> Result<Granted, Refusal> {
        for n in (own..own + SHARDS).map(|n| n % SHARDS) {
            let locked = &self.shards[n];
            if let Ok(mut shard) = locked.shard.try_lock() {
                match Self::grant_in(locked, &mut shard, owner, block, terms) {
                    Err(Refusal::Full) => {}
                    done => {
                        // A shard that is only locked is left for one grant: threads that stayed
                        // where they met would all end up in one.
                        if is_full {
                            self.shards[own].room.store(n, Ordering::Relaxed);
                        }
                        return done;
                    }
                }
            }
        }
        for n in 0..SHARDS {
            let locked = &self.shards[(own + n) % SHARDS];
            match Self::grant_in(locked, &mut locked.shard.acquire(), owner, block, terms) {
                Err(Refusal::Full) => {}
                done => return done,
            }
        }
        Err(Refusal::Full)
    }

    #[inline]
    fn grant_in(
        locked: &Locked<B, F>,
        shard: &mut Shard<B, F>,
        owner: ParticipantId,
        block: &B,
        terms: Terms,
    ) -> Result<Granted, Refusal> {
        let sealer = match &shard.owner {
            Some(of) if of.id == owner => *of.sealer,
            _ => return Err(Refusal::Gone),
        };
        while let Some(part) = shard.parts.get_mut(shard.first_free) {
            let Some((slot, generation)) = part.grant(block, terms) else {
                shard.first_free += 1;
                continue;
            };
            shard.first_lapse = shard.first_lapse.min(terms.lapses());
            if !locked.is_busy() {
                locked.busy.store(true, Ordering::Relaxed);
            }
            let lease = LeaseAddress {
                file: shard.first_free as u32,
                slot,
                generation,
            };
            return Ok((lease, sealer));
        }
        Err(Refusal::Full)
    }

    /// Looks for released leases and moves their blocks to `out`.
    pub fn collect(&self, effort: Effort, out: &mut ReclaimedBlocks<B>) {
        for locked in self.shards.iter().filter(|locked| locked.is_busy()) {
            let mut shard = locked.shard.acquire();
            for number in 0..shard.parts.len() {
                let (looked, corrupt) = shard.parts[number].collect(effort, out);
                if looked {
                    self.swept(&mut shard, number, corrupt);
                }
            }
            locked.note(&shard);
        }
    }

    /// Notes what a sweep of a part may have changed: that it has room again, and words that make
    /// no sense.
    #[inline]
    fn swept(&self, shard: &mut Shard<B, F>, number: usize, corrupt: usize) {
        shard.first_free = shard.first_free.min(number);
        if corrupt > 0 {
            self.corrupt_words.fetch_add(corrupt, Ordering::Relaxed);
        }
    }

    /// Looks at no more than `words` dirty words, going on where the last call stopped, in one
    /// shard that is free.
    pub fn glance(&self, shard: usize, words: usize, out: &mut ReclaimedBlocks<B>) {
        let locked = &self.shards[shard % SHARDS];
        if !locked.is_busy() {
            return;
        }
        let Ok(mut shard) = locked.shard.try_lock() else {
            return;
        };
        let mut left = words;
        let parts = shard.parts.len();
        // A part without a lease counts as a word: so does its part of the walk.
        while left > 0 && parts > 0 {
            let (number, from) = (shard.cursor / 64 % parts, (shard.cursor % 64) as u32);
            let part = &mut shard.parts[number];
            left -= 1;
            let Some(index) = part.next_with_leases(from) else {
                shard.cursor = (number + 1) % parts * 64;
                continue;
            };
            let corrupt = part
                .is_marked(index)
                .then(|| part.sweep(index, Effort::Marked, out));
            shard.cursor = number * 64 + index as usize + 1;
            if let Some(corrupt) = corrupt {
                self.swept(&mut shard, number, corrupt);
                locked.note(&shard);
            }
        }
    }

    /// Takes an unclaimed grant back, and returns its block then.
    pub fn revoke(&self, entry: LeaseAddress) -> Option<B> {
        let locked = self.shard_of(entry)?;
        let mut shard = locked.shard.acquire();
        let block = shard
            .parts
            .get_mut(entry.file as usize)?
            .revoke(entry.slot, entry.generation)?;
        shard.first_free = shard.first_free.min(entry.file as usize);
        locked.note(&shard);
        Some(block)
    }

    /// Says whether a lease is outstanding and unclaimed at this moment.
    pub fn is_unclaimed(&self, entry: LeaseAddress) -> bool {
        let Some(locked) = self.shard_of(entry) else {
            return false;
        };
        let shard = locked.shard.acquire();
        let part = shard.parts.get(entry.file as usize);
        part.is_some_and(|part| part.is_unclaimed(entry.slot, entry.generation))
    }

    /// Looks at the block behind an outstanding lease, without holding it: a block's count stays
    /// exact.
    pub fn with_block<T>(&self, entry: LeaseAddress, look: impl FnOnce(&B) -> T) -> Option<T> {
        self.with_lease(entry, |block, _| look(block))
    }

    /// Looks at the block behind an outstanding lease, and at what its holder may do with it.
    pub fn with_lease<T>(
        &self,
        entry: LeaseAddress,
        look: impl FnOnce(&B, Access) -> T,
    ) -> Option<T> {
        let shard = self.shard_of(entry)?.shard.acquire();
        let part = shard.parts.get(entry.file as usize)?;
        let (block, access) = part.block(entry.slot, entry.generation)?;
        Some(look(block, access))
    }

    /// Takes back every grant whose time to live has passed unclaimed, names it in `lapsed`, and
    /// says when to come again.
    pub fn expire(
        &self,
        now: Tick,
        out: &mut ReclaimedBlocks<B>,
        lapsed: &mut Vec<LeaseAddress>,
    ) -> Tick {
        let mut next = Tick::NEVER;
        for locked in self.shards.iter().filter(|locked| locked.is_busy()) {
            let mut shard = locked.shard.acquire();
            if shard.first_lapse <= now {
                let mut first = Tick::NEVER;
                for (file, part) in (0..).zip(&mut shard.parts) {
                    first = first.min(part.expire(now, out, |slot, generation| {
                        lapsed.push(LeaseAddress {
                            file,
                            slot,
                            generation,
                        });
                    }));
                }
                shard.first_lapse = first;
                shard.first_free = 0;
                locked.note(&shard);
            }
            next = next.min(shard.first_lapse);
        }
        next
    }

    /// Refuses every later grant, and takes unclaimed ones back. Held leases stay.
    pub fn close(&self, out: &mut ReclaimedBlocks<B>) {
        for locked in &self.shards {
            let mut shard = locked.shard.acquire();
            shard.owner = None;
            for part in &mut shard.parts {
                part.revoke_all(out);
            }
            locked.note(&shard);
        }
    }

    /// Ends every lease, whatever its word says: the participant is proven dead and the quarantine
    /// is over.
    pub fn bury(&self, out: &mut ReclaimedBlocks<B>) {
        for locked in &self.shards {
            let mut shard = locked.shard.acquire();
            debug_assert!(shard.owner.is_none(), "buried before it was closed");
            for part in &mut shard.parts {
                part.bury(out);
            }
            locked.note(&shard);
        }
    }

    /// Says whether no lease is outstanding. Without a lock: an answer about the moment.
    pub fn is_empty(&self) -> bool {
        !self.shards.iter().any(Locked::is_busy)
    }

    /// Counts how many words were found corrupt.
    pub fn corrupt_words(&self) -> usize {
        self.corrupt_words.load(Ordering::Relaxed)
    }

    /// Counts every outstanding lease by where it stands. One that has ended and is not collected
    /// counts for nothing.
    pub fn tally(&self, now: Tick, mut bytes_of: impl FnMut(&B) -> u64) -> Tally {
        let mut tally = Tally::default();
        for locked in &self.shards {
            let shard = locked.shard.acquire();
            for part in &shard.parts {
                part.each(|block, row, seen| {
                    match seen {
                        Some(Seen::Granted) => tally.in_flight += 1,
                        Some(Seen::Held) => tally.held += 1,
                        Some(Seen::Released) => return,
                        Some(Seen::Corrupt(_)) | None => tally.corrupt += 1,
                    }
                    tally.bytes += bytes_of(block);
                    tally.oldest = tally.oldest.max(now.since(row.granted));
                });
            }
        }
        tally
    }

    /// Shows every block that a lease is outstanding on, once for each lease. Called under a
    /// shard's lock.
    pub fn each(&self, mut show: impl FnMut(&B)) {
        for locked in &self.shards {
            let shard = locked.shard.acquire();
            shard
                .parts
                .iter()
                .for_each(|part| part.each(|block, _, _| show(block)));
        }
    }

    /// Finds the shard that a slot belongs to. The first shard's part is as large as any, so it
    /// tells the division.
    fn shard_of(&self, entry: LeaseAddress) -> Option<&Locked<B, F>> {
        let share = self.shards[0]
            .shard
            .acquire()
            .parts
            .get(entry.file as usize)?
            .capacity();
        self.shards
            .get((entry.slot / GROUP).checked_div(share)? as usize)
    }
}

/// A shard that is locked for several grants. Nobody waits for another lock while holding one.
#[derive(Debug)]
pub struct Granting<'a, B, F> {
    locked: &'a Locked<B, F>,
    shard: MutexGuard<'a, Shard<B, F>>,
}

impl<B: Clone, F: SlotFile> Granting<'_, B, F> {
    /// Reads what the next grant touches.
    #[inline]
    pub fn look_ahead(&self) {
        if let Some(part) = self.shard.parts.get(self.shard.first_free) {
            part.look_ahead();
        }
    }

    /// Grants as [`Ledger::grant_sealed`] does, in this shard alone.
    ///
    /// # Errors
    ///
    /// As there; another shard may have room.
    #[inline]
    pub fn grant_sealed(
        &mut self,
        owner: ParticipantId,
        block: &B,
        terms: Terms,
    ) -> Result<Granted, Refusal> {
        Ledger::grant_in(self.locked, &mut self.shard, owner, block, terms)
    }
}

#[cfg(test)]
impl<B: Clone, F: SlotFile> Granting<'_, B, F> {
    /// As [`Ledger::grant`].
    pub fn grant(
        &mut self,
        owner: ParticipantId,
        block: &B,
        now: Tick,
        time_to_live: Option<Duration>,
    ) -> Result<LeaseAddress, Refusal> {
        self.grant_sealed(
            owner,
            block,
            Terms::new(now, time_to_live, Access::ReadWrite),
        )
        .map(|(lease, _)| lease)
    }
}

#[cfg(test)]
#[path = "ledger_property/mod.rs"]
mod property;

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
