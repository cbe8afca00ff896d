//! Collecting: blocks that nothing holds any more go back where they came from.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use allocators::{Holder, Lent, Reclaim, Reclaimed};

use crate::producer::blocks::block::Block;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::blocks::tokens::AdoptToken;
use crate::producer::core::Core;
use crate::producer::grants::slot_group::Effort;
use crate::shard::own_shard;
use transport::os::clock::Tick;
use transport::trace_point;

/// Every 4th drop checks 4 dirty words. Reading words that are in no near cache costs a drop as
/// much as all else.
const GLANCES: usize = 4;
const GLANCE: usize = 4;

impl Core {
    /// Looks for ended leases and finished work everywhere; the blocks found are given back if
    /// these were the last.
    pub fn collect(&self, effort: Effort) -> Reclaimed {
        let mut out = ReclaimedBlocks::new();
        self.roster
            .ledgers
            .all()
            .for_each(|ledger| ledger.collect(effort, &mut out));
        self.pending.poll(&mut out);
        // What was proven just now may be what the thread waits for.
        if self.settles.load(Ordering::Relaxed) {
            self.wakeups.thread.nudge();
        }
        if !out.is_empty() {
            trace_point!("collect");
        }
        self.retire(&mut out)
    }

    /// What every drop does for the blocks in limbo: looks at a few of them, and has the thread
    /// look at all, in a while.
    #[inline]
    pub fn look_on_drop(&self) {
        self.glance();
        self.wakeups.thread.remind();
    }

    /// Looks at a few dirty words, in one shard of one participant that is free.
    fn glance(&self) {
        let places = self.roster.ledgers.used();
        if places == 0 {
            return;
        }
        let own = own_shard();
        let counted = &self.drops[own].0;
        // Two threads that count at once may count one: it only says when and where to look.
        let drops = counted.load(Ordering::Relaxed).wrapping_add(1);
        counted.store(drops, Ordering::Relaxed);
        if !drops.is_multiple_of(GLANCES) {
            return;
        }
        let turn = drops / GLANCES;
        let Some(ledger) = self.roster.ledgers.get(turn % places) else {
            return;
        };
        let mut out = ReclaimedBlocks::new();
        ledger.glance(own.wrapping_add(turn / places), GLANCE, &mut out);
        self.retire(&mut out);
    }

    /// Drops what ledgers gave back, with no lock held, and counts the blocks of which these were
    /// the last.
    pub fn retire(&self, out: &mut ReclaimedBlocks<Arc<Block>>) -> Reclaimed {
        let mut reclaimed = Reclaimed::default();
        let found = !out.is_empty();
        for block in out.drain() {
            if let Some(block) = Arc::into_inner(block) {
                reclaimed.blocks += 1;
                reclaimed.bytes += block.len();
            }
        }
        if found && self.wakeups.has_waiters() {
            self.wakeups.announce_change();
        }
        reclaimed
    }

    /// Takes the tokens of adopted blocks that nothing holds any more and that nobody maps, and
    /// asks for the unmapping of the others.
    #[cold]
    pub fn take_tokens(&self) -> Vec<AdoptToken> {
        let tokens = self.memory.tokens.take(&self.notices);
        let kept = self.memory.tokens.regions();
        if !kept.is_empty() {
            self.roster
                .ask_to_unmap(|region| kept.binary_search(&region).is_ok());
        }
        tokens
    }

    /// Says whether something is out that only polling can find: leases, or the producer's own
    /// work.
    pub fn has_leases(&self) -> bool {
        self.pending.waiting() > 0
            || self.tickets.live() > 0
            || self.roster.ledgers.all().any(|ledger| !ledger.is_empty())
    }
}

impl Reclaim for Core {
    fn collect_all(&self) -> Reclaimed {
        if self.is_child() {
            Reclaimed::default()
        } else {
            self.collect(Effort::Everything)
        }
    }

    fn ask_to_unmap(&self) -> usize {
        if self.is_child() {
            return 0;
        }
        self.trims.store(true, Ordering::Relaxed);
        self.roster.ask_to_unmap(|_| true)
    }

    fn holders(&self) -> Vec<Holder> {
        if self.is_child() {
            return Vec::new();
        }
        let now = Tick::now();
        self.roster
            .peers()
            .iter()
            .flatten()
            .map(|peer| peer.holder(now))
            .collect()
    }

    fn limbo_bytes(&self) -> u64 {
        self.memory.limbo.sum().bytes
    }

    fn lent(&self, most: usize) -> Vec<Lent> {
        let mut lent = Vec::new();
        if self.is_child() {
            return lent;
        }
        for peer in self.roster.peers().iter().flatten() {
            peer.ledger.each(|block| {
                if lent.len() < most {
                    let (ptr, len, limbo) = (block.ptr(), block.len(), block.is_in_limbo());
                    lent.push(Lent {
                        ptr,
                        len,
                        participant: peer.id,
                        limbo,
                    });
                }
            });
        }
        lent
    }
}
