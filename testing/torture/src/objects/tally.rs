//! What all processes of a run see: counts, and the highest epoch of each name that was answered as
//! committed.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::contents::NAMES;
use crate::shared_stats::{Shared, map};

/// Processes at a time, at most.
pub const MOST_MEMBERS: usize = 64;

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub enum Count {
    /// Commits that were answered with an epoch.
    Commits,
    /// Commits that were asked for before the writes had ended.
    Hasty,
    /// Commits of objects that took a part over from the epoch before.
    Taken,
    /// Objects that were opened and compared.
    Opens,
    /// Advances to another epoch, compared.
    Advances,
    /// Sleeps that woke, compared.
    Wakes,
    /// Objects with other contents than their stamp's.
    Mixed,
    /// Committed epochs that were not there.
    Lost,
    /// Readers that advanced to an older epoch, or whose addresses moved.
    Backwards,
    /// Pools adopted.
    Adoptions,
    /// Of these, after a death.
    Heirs,
    /// Blocks that were sealed and waited for.
    Seals,
    /// Listed blocks that a holder compared.
    Compared,
    /// Blocks that a reader compared, whole all along.
    Looks,
    /// Blocks that were given up while a reader copied them.
    Torn,
    /// Children forked of holders.
    Children,
    /// Holders that killed themselves, with a child or work left.
    Deaths,
    /// Pools that a process adopted while another one that lives held it.
    Doubled,
}
const COUNTS: usize = Count::Doubled as usize + 1;

/// What all processes see. All zeroes is a run in which nothing has happened.
#[derive(Debug)]
#[repr(C)]
pub struct Tally {
    ends: AtomicU32,
    pad: AtomicU32,
    counts: [AtomicU64; COUNTS],
    highest: [AtomicU64; NAMES],
    beats: [AtomicU64; MOST_MEMBERS],
    /// The serial of the last process of a slot that killed itself.
    dead: [AtomicU64; MOST_MEMBERS],
}

// SAFETY: its fields are atomic integers and arrays of them, and it is `repr(C)`.
unsafe impl Shared for Tally {}

impl Tally {
    /// Makes a file for one, or opens the one that is there.
    ///
    /// # Errors
    ///
    /// The system's error.
    pub fn open(path: &Path) -> io::Result<&'static Tally> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        file.set_len(size_of::<Tally>() as u64)?;
        map(&file)
    }

    /// Counts something once.
    pub fn count(&self, what: Count) {
        self.counts[what as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Says how often something was counted.
    pub fn counted(&self, what: Count) -> u64 {
        self.counts[what as usize].load(Ordering::Relaxed)
    }

    /// Notes that an epoch was answered as committed.
    pub fn committed(&self, name: usize, epoch: u64) {
        self.highest[name].fetch_max(epoch, Ordering::AcqRel);
    }

    /// Returns the highest epoch that was answered as committed: a later open must find it, or a
    /// newer one.
    pub fn highest(&self, name: usize) -> u64 {
        self.highest[name].load(Ordering::Acquire)
    }

    /// Rises while a process works.
    pub fn beat(&self, slot: usize) {
        self.beats[slot].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how often a process has shown that it works.
    pub fn beats(&self, slot: usize) -> u64 {
        self.beats[slot].load(Ordering::Relaxed)
    }

    /// Notes that a process kills itself.
    pub fn dies(&self, slot: usize, serial: u64) {
        self.dead[slot].store(serial, Ordering::Release);
    }

    /// Says whether a process killed itself.
    pub fn is_dead(&self, slot: usize, serial: u64) -> bool {
        self.dead[slot].load(Ordering::Acquire) == serial
    }

    /// Tells everybody to end.
    pub fn end(&self) {
        self.ends.store(1, Ordering::Release);
    }

    /// Says whether everybody is to end.
    pub fn ends(&self) -> bool {
        self.ends.load(Ordering::Acquire) != 0
    }
}
