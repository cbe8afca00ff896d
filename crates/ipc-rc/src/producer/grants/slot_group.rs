//! One shard's part of one counter file: the rows behind its slots, in groups of as many slots as a
//! dirty word stands for.
//!
//! A part is only ever touched under its shard's lock. Two summaries say which groups have a free
//! slot and which a lease, so that neither a grant nor a collect walks over rows that do not
//! concern it.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use gpu_api::Access;

use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::shard::SHARDS;
use transport::os::clock::Tick;
use transport::shared::counter_file::{GROUP, SlotFile};
use transport::shared::slot::{Generation, Revoke, Seen, Slot};

/// How hard a collect looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effort {
    /// At groups that are marked dirty.
    Marked,
    /// At every outstanding slot.
    Everything,
}

/// What a lease is granted with.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    granted: Tick,
    /// [`Tick::NEVER`] for a grant without a time to live.
    lapses: Tick,
    access: Access,
}

impl Terms {
    /// Grants from now on, for so long if it is not claimed.
    #[inline]
    pub fn new(now: Tick, time_to_live: Option<Duration>, access: Access) -> Terms {
        Terms {
            granted: now,
            lapses: time_to_live.map_or(Tick::NEVER, |time| now.after(time)),
            access,
        }
    }

    /// Returns when the grant lapses.
    pub fn lapses(&self) -> Tick {
        self.lapses
    }
}

/// What a slot stands for.
#[derive(Debug)]
pub struct Row<B> {
    pub block: Option<B>,
    pub generation: Generation,
    pub granted: Tick,
    /// [`Tick::NEVER`] for a grant without a time to live, and once it is claimed.
    lapses: Tick,
}

#[derive(Debug)]
struct Group<B> {
    free: u64,
    /// Outstanding and not barred.
    out: u64,
    /// Outstanding with a corrupt word: only a burial ends them.
    barred: u64,
    /// Granted to be read only; means nothing for free slots.
    read_only: u64,
    rows: Box<[Row<B>]>,
}

impl<B> Group<B> {
    fn new() -> Group<B> {
        let row = || Row {
            block: None,
            generation: Generation::ZERO,
            granted: Tick::default(),
            lapses: Tick::NEVER,
        };
        Group {
            free: u64::MAX,
            out: 0,
            barred: 0,
            read_only: 0,
            rows: (0..GROUP).map(|_| row()).collect(),
        }
    }

    /// Ends the lease in a slot and returns its block.
    fn retire(&mut self, bit: u32) -> Option<B> {
        let mask = 1 << bit;
        self.out &= !mask;
        self.barred &= !mask;
        self.free |= mask;
        self.rows[bit as usize].block.take()
    }
}

/// Up to 64 groups, made when they are first needed.
#[derive(Debug)]
pub struct SlotGroups<B, F> {
    file: Arc<F>,
    first_group: u32,
    groups: Vec<Group<B>>,
    /// How many groups there can be.
    capacity: u32,
    with_free: u64,
    /// Groups with a lease, barred ones too.
    with_out: u64,
}

impl<B: Clone, F: SlotFile> SlotGroups<B, F> {
    /// Writes a block down in a free slot and grants it; `None` when there is none.
    #[inline]
    pub fn grant(&mut self, block: &B, terms: Terms) -> Option<(u32, Generation)> {
        if self.with_free == 0 {
            return None;
        }
        let index = self.with_free.trailing_zeros();
        while self.groups.len() <= index as usize {
            self.groups.push(Group::new());
        }
        let group = &mut self.groups[index as usize];
        let bit = group.free.trailing_zeros();
        group.free &= !(1 << bit);
        group.out |= 1 << bit;
        group.read_only &= !(1 << bit);
        group.read_only |= u64::from(terms.access == Access::ReadOnly) << bit;
        if group.free == 0 {
            self.with_free &= !(1 << index);
        }
        self.with_out |= 1 << index;
        let row = &mut group.rows[bit as usize];
        row.block = Some(block.clone());
        row.generation = row.generation.next();
        (row.granted, row.lapses) = (terms.granted, terms.lapses);
        let slot = (self.first_group + index) * GROUP + bit;
        self.file.slots()[slot as usize].grant(row.generation);
        Some((slot, row.generation))
    }

    /// Reads the row and the slot of the next grant, so that they are near by then.
    #[inline]
    pub fn look_ahead(&self) {
        let index = self.with_free.trailing_zeros();
        let Some(group) = self.groups.get(index as usize) else {
            return;
        };
        let bit = group.free.trailing_zeros();
        let slot = (self.first_group + index) * GROUP + bit;
        black_box(group.rows[bit as usize].generation);
        let _ = black_box(self.file.slots()[slot as usize].peek(Generation::ZERO));
    }
}

impl<B, F: SlotFile> SlotGroups<B, F> {
    /// Makes the part of a file that belongs to the shard of this number.
    pub fn new(file: &Arc<F>, shard: u32) -> SlotGroups<B, F> {
        let groups = file.slots().len() as u32 / GROUP;
        let share = groups.div_ceil(SHARDS as u32);
        let first_group = (shard * share).min(groups);
        let capacity = share.min(groups - first_group);
        SlotGroups {
            file: file.clone(),
            first_group,
            groups: Vec::new(),
            capacity,
            with_free: if capacity == 0 {
                0
            } else {
                u64::MAX >> (64 - capacity)
            },
            with_out: 0,
        }
    }

    /// Returns how many groups there can be: of the first shard's part, how many slots' groups go
    /// to each shard.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Says whether a lease is outstanding.
    #[inline]
    pub fn has_leases(&self) -> bool {
        self.with_out != 0
    }

    /// Returns the first group from `from` on that has a lease.
    #[inline]
    pub fn next_with_leases(&self, from: u32) -> Option<u32> {
        let groups = self.with_out & (u64::MAX << from);
        (groups != 0).then(|| groups.trailing_zeros())
    }

    /// Says whether a group's dirty word is marked.
    #[inline]
    pub fn is_marked(&self, index: u32) -> bool {
        self.file.dirty()[(self.first_group + index) as usize].is_marked()
    }

    /// Looks for released leases in every group that has any, or in those that are marked. Returns
    /// whether it looked anywhere, and how many words were newly found corrupt.
    #[inline]
    pub fn collect(&mut self, effort: Effort, out: &mut ReclaimedBlocks<B>) -> (bool, usize) {
        let mut groups = self.with_out;
        if effort == Effort::Marked {
            let words = &self.file.dirty()[self.first_group as usize..][..self.groups.len()];
            groups &= (0..).zip(words).fold(0, |marked, (index, word)| {
                marked | u64::from(word.is_marked()) << index
            });
        }
        let (looked, mut corrupt) = (groups != 0, 0);
        while groups != 0 {
            let index = groups.trailing_zeros();
            groups &= groups - 1;
            corrupt += self.sweep(index, effort, out);
        }
        (looked, corrupt)
    }

    /// Looks for released leases in a group, and returns how many words were newly found corrupt.
    pub fn sweep(&mut self, index: u32, effort: Effort, out: &mut ReclaimedBlocks<B>) -> usize {
        let group_number = self.first_group + index;
        let first_slot = group_number * GROUP;
        // The mark is taken before the slots are read, whatever the effort: `dirty` says why.
        let marked = self.file.dirty()[group_number as usize].take();
        if !marked && effort == Effort::Marked {
            return 0;
        }
        let slots = &self.file.slots()[first_slot as usize..][..GROUP as usize];
        let group = &mut self.groups[index as usize];
        let mut corrupt = 0;
        let mut bits = group.out;
        while bits != 0 {
            let bit = bits.trailing_zeros();
            bits &= bits - 1;
            match slots[bit as usize].read(group.rows[bit as usize].generation) {
                Seen::Granted | Seen::Held => {}
                Seen::Released => out.extend(group.retire(bit)),
                Seen::Corrupt(word) => {
                    group.out &= !(1 << bit);
                    group.barred |= 1 << bit;
                    corrupt += 1;
                    tracing::warn!(
                        slot = first_slot + bit,
                        word,
                        "a slot holds nothing that the protocol writes"
                    );
                }
            }
        }
        self.note(index);
        corrupt
    }

    /// Takes back the grant of exactly this generation if it is unclaimed, and returns its block
    /// then.
    pub fn revoke(&mut self, slot: u32, generation: Generation) -> Option<B> {
        let (index, bit) = self.find(slot, generation)?;
        match self.file.slots()[slot as usize].revoke(generation) {
            Revoke::Revoked => {}
            Revoke::TooLate => return None,
        }
        let block = self.groups[index as usize].retire(bit);
        self.note(index);
        block
    }

    /// Takes every unclaimed grant back.
    pub fn revoke_all(&mut self, out: &mut ReclaimedBlocks<B>) {
        self.revoke_where(|_, _| true, out, |_, _| {});
    }

    /// Takes lapsed grants back, and returns when the next lapses.
    pub fn expire(
        &mut self,
        now: Tick,
        out: &mut ReclaimedBlocks<B>,
        lapsed: impl FnMut(u32, Generation),
    ) -> Tick {
        let mut next = Tick::NEVER;
        self.revoke_where(
            |row, slot| {
                if row.lapses > now && row.lapses != Tick::NEVER {
                    // A claimed lease needs no look at its time: only those that can lapse are
                    // counted.
                    match slot.read(row.generation) {
                        Seen::Granted => next = next.min(row.lapses),
                        _ => row.lapses = Tick::NEVER,
                    }
                }
                row.lapses <= now
            },
            out,
            lapsed,
        );
        next
    }

    fn revoke_where(
        &mut self,
        mut due: impl FnMut(&mut Row<B>, &Slot<F::Word>) -> bool,
        out: &mut ReclaimedBlocks<B>,
        mut revoked: impl FnMut(u32, Generation),
    ) {
        for index in 0..self.groups.len() as u32 {
            let first_slot = (self.first_group + index) * GROUP;
            let group = &mut self.groups[index as usize];
            let mut bits = group.out;
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let row = &mut group.rows[bit as usize];
                let slot = &self.file.slots()[(first_slot + bit) as usize];
                if !due(row, slot) {
                    continue;
                }
                match slot.revoke(row.generation) {
                    Revoke::Revoked => {
                        revoked(first_slot + bit, row.generation);
                        out.extend(group.retire(bit));
                    }
                    // Claimed: a lapse has no more meaning for it.
                    Revoke::TooLate => row.lapses = Tick::NEVER,
                }
            }
            self.note(index);
        }
    }

    /// Ends every lease, whatever its word says.
    pub fn bury(&mut self, out: &mut ReclaimedBlocks<B>) {
        for index in 0..self.groups.len() as u32 {
            let group = &mut self.groups[index as usize];
            let mut bits = group.out | group.barred;
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                out.extend(group.retire(bit));
            }
            self.note(index);
        }
    }

    /// Returns the block behind a lease at exactly this generation, and what may be done with it.
    pub fn block(&self, slot: u32, generation: Generation) -> Option<(&B, Access)> {
        let (index, bit) = self.find(slot, generation)?;
        let group = &self.groups[index as usize];
        let access = match group.read_only >> bit & 1 {
            0 => Access::ReadWrite,
            _ => Access::ReadOnly,
        };
        Some((group.rows[bit as usize].block.as_ref()?, access))
    }

    /// Says whether the lease in a slot is outstanding and unclaimed.
    pub fn is_unclaimed(&self, slot: u32, generation: Generation) -> bool {
        self.find(slot, generation).is_some()
            && self.file.slots()[slot as usize].read(generation) == Seen::Granted
    }

    /// Shows every outstanding block with its row, and what its word says; `None` for one that is
    /// barred.
    pub fn each(&self, mut show: impl FnMut(&B, &Row<B>, Option<Seen>)) {
        for (index, group) in (self.first_group..).zip(&self.groups) {
            for (bit, row) in (0..GROUP).zip(&group.rows) {
                let Some(block) = &row.block else { continue };
                let slot = &self.file.slots()[(index * GROUP + bit) as usize];
                let barred = group.barred & (1 << bit) != 0;
                show(block, row, (!barred).then(|| slot.read(row.generation)));
            }
        }
    }

    /// Brings the two summaries up to date after `index` changed.
    fn note(&mut self, index: u32) {
        let group = &self.groups[index as usize];
        let mask = 1 << index;
        self.with_free = if group.free != 0 {
            self.with_free | mask
        } else {
            self.with_free & !mask
        };
        self.with_out = if group.out | group.barred != 0 {
            self.with_out | mask
        } else {
            self.with_out & !mask
        };
    }

    fn find(&self, slot: u32, generation: Generation) -> Option<(u32, u32)> {
        let index = (slot / GROUP).checked_sub(self.first_group)?;
        let bit = slot % GROUP;
        let row = &self.groups.get(index as usize)?.rows[bit as usize];
        (row.block.is_some() && row.generation == generation).then_some((index, bit))
    }
}
