//! What a session holds and who holds it, as data.

use std::sync::atomic::Ordering;

use gpu_api::{Holder, Reclaim, SourceUsage};

use crate::clock::Tick;
use crate::producer::core::Core;
use crate::producer::ledger::Tally;

/// A session at one moment. Numbers are of blocks unless they say bytes; a sum taken while others work is a picture
/// of that moment, not a transaction.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Blocks that exist: with the producer, shared, or in limbo.
    pub live_blocks: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Blocks that the producer dropped and something still holds.
    pub limbo_blocks: u64,
    /// Their bytes.
    pub limbo_bytes: u64,
    /// Leases granted and not claimed.
    pub in_flight: u64,
    /// Leases claimed and not seen released.
    pub held: u64,
    /// Leases of participants that are dead or gone, until proof and quarantine are over.
    pub quarantined: u64,
    /// Bytes of the blocks behind those.
    pub quarantined_bytes: u64,
    /// Leases whose slot holds a word that makes no sense: their blocks are barred until the holder's death.
    pub poisoned: u64,
    /// Blocks that are never used again, because nobody can say when the work on them ends.
    pub leaked_blocks: u64,
    /// Their bytes.
    pub leaked_bytes: u64,
    /// Grants taken back by cancel, by the addressee's death or by its goodbye, so far.
    pub revoked: u64,
    /// Grants taken back because nobody claimed them in time, so far.
    pub expired: u64,
    /// Participants buried so far.
    pub deaths: u64,
    /// Words found corrupt so far.
    pub corrupt_words: u64,
    /// Participants, and what each holds.
    pub holders: Vec<Holder>,
    /// What the session's source of regions holds.
    pub source: SourceUsage,
}

/// What was still held when a shutdown's time was over.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Nothing was held any more.
    pub clean: bool,
    /// Blocks that still exist.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those who hold leases or mappings.
    pub holders: Vec<Holder>,
}

impl Core {
    pub(crate) fn stats(&self) -> Stats {
        let (live, limbo, leaked) = (self.live.sum(), self.limbo.sum(), self.leaked.sum());
        let now = Tick::now();
        let mut stats = Stats {
            live_blocks: live.blocks,
            live_bytes: live.bytes,
            limbo_blocks: limbo.blocks,
            limbo_bytes: limbo.bytes,
            leaked_blocks: leaked.blocks,
            leaked_bytes: leaked.bytes,
            revoked: self.revoked.load(Ordering::Relaxed),
            expired: self.expired.load(Ordering::Relaxed),
            deaths: self.deaths.load(Ordering::Relaxed),
            holders: self.holders(),
            source: self.source.usage(),
            ..Stats::default()
        };
        for peer in self.peers.load().iter().flatten() {
            let Tally { in_flight, held, corrupt, bytes, .. } = peer.ledger.tally(now, |block| block.len());
            stats.in_flight += in_flight;
            stats.held += held;
            stats.poisoned += corrupt;
            stats.corrupt_words += peer.ledger.corrupt_words() as u64;
            if peer.gone.load(Ordering::Relaxed) {
                stats.quarantined += in_flight + held + corrupt;
                stats.quarantined_bytes += bytes;
            }
        }
        stats
    }

    pub(crate) fn shutdown_report(&self) -> ShutdownReport {
        let live = self.live.sum();
        let holders: Vec<Holder> =
            self.holders().into_iter().filter(|holder| holder.leases > 0 || holder.mappings > 0).collect();
        ShutdownReport {
            clean: live.blocks == 0 && holders.is_empty(),
            blocks: live.blocks,
            bytes: live.bytes,
            holders,
        }
    }
}
