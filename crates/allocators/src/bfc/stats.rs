//! What an allocator counts.

// Tests: `crates/allocators/tests/suite.rs`, `crates/allocators/tests/loom_peak.rs`.

use serde::{Deserialize, Serialize};

/// What an allocator has done and holds, under TensorFlow's names so that dashboards need no
/// translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AllocatorStats {
    /// Allocations since the start or the last [`clear_stats`](crate::Bfc::clear_stats).
    pub num_allocs: u64,
    /// Bytes of chunks that are handed out.
    pub bytes_in_use: u64,
    /// The most of them at any time.
    pub peak_bytes_in_use: u64,
    /// Bytes of the largest chunk ever handed out.
    pub largest_alloc_size: u64,
    /// The most bytes that may be taken from upstream, if there is a limit.
    pub bytes_limit: Option<u64>,
    /// Bytes taken from upstream.
    pub bytes_reserved: u64,
    /// The most of them at any time.
    pub peak_bytes_reserved: u64,
    /// The most bytes handed out at any time.
    pub peak_allocated_bytes: u64,
    /// Bytes that may yet be taken from upstream, if there is a limit.
    pub bytes_reservable_limit: Option<u64>,
    /// Bytes of the largest free chunk.
    pub largest_free_block_bytes: u64,
    /// Bytes of the pool, for allocators that have one.
    pub pool_bytes: Option<u64>,
    /// The most of them at any time.
    pub peak_pool_bytes: Option<u64>,
}

/// What changes with every allocation; kept small, because it is written under the lock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) allocs: u64,
    pub(crate) in_use: u64,
    pub(crate) peak_in_use: u64,
    pub(crate) largest: u64,
    pub(crate) reserved: u64,
    pub(crate) peak_reserved: u64,
    /// Bytes that were asked for, of what is handed out.
    pub(crate) asked: u64,
    /// Bytes of regions that upstream failed to take back.
    pub(crate) leaked: u64,
}

impl Counters {
    #[inline]
    pub(crate) fn allocated(&mut self, bytes: u64, asked: u64) {
        self.allocs += 1;
        self.in_use += bytes;
        self.asked += asked;
        self.peak_in_use = self.peak_in_use.max(self.in_use);
        self.largest = self.largest.max(bytes);
    }

    #[inline]
    pub(crate) fn freed(&mut self, bytes: u64, asked: u64) {
        self.in_use -= bytes;
        self.asked -= asked;
    }

    /// Adds what another heap counts; the peaks, which are no sums, stay.
    pub(crate) fn add(&mut self, other: &Counters) {
        self.allocs += other.allocs;
        self.in_use += other.in_use;
        self.largest = self.largest.max(other.largest);
        self.reserved += other.reserved;
        self.asked += other.asked;
        self.leaked += other.leaked;
    }

    /// Returns the bytes that the limit counts: upstream has not got back what leaked.
    pub(crate) fn taken(&self) -> u64 {
        self.reserved + self.leaked
    }

    pub(crate) fn grown(&mut self, bytes: u64) {
        self.reserved += bytes;
        self.peak_reserved = self.peak_reserved.max(self.reserved);
    }

    /// Starts counting anew: the peak is what is in use.
    pub(crate) fn clear(&mut self) {
        (self.allocs, self.largest) = (0, 0);
        self.peak_in_use = self.in_use;
        self.peak_reserved = self.reserved;
    }

    pub(crate) fn stats(&self, limit: u64, largest_free: u64) -> AllocatorStats {
        let limit = (limit != u64::MAX).then_some(limit);
        AllocatorStats {
            num_allocs: self.allocs,
            bytes_in_use: self.in_use,
            peak_bytes_in_use: self.peak_in_use,
            largest_alloc_size: self.largest,
            bytes_limit: limit,
            bytes_reserved: self.reserved,
            peak_bytes_reserved: self.peak_reserved,
            peak_allocated_bytes: self.peak_in_use,
            bytes_reservable_limit: limit.map(|limit| limit.saturating_sub(self.taken())),
            largest_free_block_bytes: largest_free,
            pool_bytes: Some(self.reserved),
            peak_pool_bytes: Some(self.peak_reserved),
        }
    }
}

/// What was allocated and freed while a [`Scope`] was the innermost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScopeStats {
    /// Allocations.
    pub allocs: u64,
    /// Frees.
    pub frees: u64,
    /// Bytes allocated, whether freed since or not.
    pub total_bytes: u64,
    /// Bytes allocated less bytes freed: below zero when more was freed.
    pub bytes: i64,
    /// The most that `bytes` was.
    pub peak_bytes: i64,
}

impl ScopeStats {
    fn allocated(&mut self, bytes: u64) {
        self.allocs += 1;
        self.total_bytes += bytes;
        self.bytes += bytes as i64;
        self.peak_bytes = self.peak_bytes.max(self.bytes);
    }

    fn freed(&mut self, bytes: u64) {
        self.frees += 1;
        self.bytes -= bytes as i64;
    }

    /// Adds what a scope of another heap counted at the same time.
    pub(crate) fn beside(self, other: ScopeStats) -> ScopeStats {
        ScopeStats {
            allocs: self.allocs + other.allocs,
            frees: self.frees + other.frees,
            total_bytes: self.total_bytes + other.total_bytes,
            bytes: self.bytes + other.bytes,
            peak_bytes: self.peak_bytes + other.peak_bytes,
        }
    }

    /// Adds what an inner scope counted.
    fn absorb(&mut self, inner: ScopeStats) {
        self.peak_bytes = self.peak_bytes.max(self.bytes + inner.peak_bytes);
        self.allocs += inner.allocs;
        self.frees += inner.frees;
        self.total_bytes += inner.total_bytes;
        self.bytes += inner.bytes;
    }
}

/// Scopes that are open, the innermost last.
#[derive(Debug, Default)]
pub(crate) struct Scopes {
    open: Vec<(u64, ScopeStats)>,
    next: u64,
}

impl Scopes {
    #[inline]
    pub(crate) fn allocated(&mut self, bytes: u64) {
        if let Some((_, scope)) = self.open.last_mut() {
            scope.allocated(bytes);
        }
    }

    #[inline]
    pub(crate) fn freed(&mut self, bytes: u64) {
        if let Some((_, scope)) = self.open.last_mut() {
            scope.freed(bytes);
        }
    }

    pub(crate) fn open(&mut self) -> u64 {
        self.next += 1;
        self.open.push((self.next, ScopeStats::default()));
        self.next
    }

    /// Closes a scope; the one around it counts what it counted.
    pub(crate) fn close(&mut self, scope: u64) -> ScopeStats {
        let Some(at) = self.open.iter().position(|&(other, _)| other == scope) else {
            return ScopeStats::default();
        };
        let (_, stats) = self.open.remove(at);
        if let Some((_, around)) = at
            .checked_sub(1)
            .and_then(|around| self.open.get_mut(around))
        {
            around.absorb(stats);
        }
        stats
    }
}

/// Counts what is allocated and freed from [`Bfc::scope`](crate::Bfc::scope) or
/// [`ThreadHeaps::scope`](crate::ThreadHeaps::scope) on until it is finished or dropped.
///
/// Scopes nest: an inner one counts for itself, and the one around it counts the same once the
/// inner one has ended.
#[must_use = "a scope counts until it is dropped"]
pub struct Scope<'a> {
    pub(crate) close: Option<Box<dyn FnOnce() -> ScopeStats + 'a>>,
}

impl Scope<'_> {
    /// Ends it and says what it counted.
    pub fn finish(mut self) -> ScopeStats {
        self.close
            .take()
            .map_or_else(ScopeStats::default, |close| close())
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        if let Some(close) = self.close.take() {
            close();
        }
    }
}

impl std::fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").finish_non_exhaustive()
    }
}
