//! An upstream of addresses without memory behind them.

// Tests: `crates/allocators/tests/suite.rs`.

use std::collections::BTreeMap;
use std::sync::Mutex;

use gpu_api::lock::Acquire;
use gpu_api::{DeviceId, Error, Result};

use crate::{Extent, SubAllocator};

/// An upstream that hands out addresses and nothing else: for tests, benchmarks, and to replay a
/// log against a device of another size.
///
/// # Examples
///
/// ```
/// use allocators::{Bfc, BfcOptions, Request, Simulated};
///
/// // Would 300 MiB fit on a device of 256 MiB?
/// let bfc = Bfc::new(BfcOptions::new("what if"), Simulated::new().capacity(256 << 20));
/// assert!(bfc.alloc(Request::new(300 << 20)).is_err());
/// ```
#[derive(Debug)]
pub struct Simulated {
    capacity: u64,
    align: Option<u64>,
    merges: bool,
    gap: u64,
    fails_at: Option<u64>,
    state: Mutex<SimulatedState>,
}

#[derive(Debug)]
struct SimulatedState {
    next: u64,
    calls: u64,
    live: BTreeMap<u64, u64>,
    free_calls: u64,
}

impl Simulated {
    /// The first address: far from any real one.
    pub const BASE: u64 = 1 << 40;

    /// The address behind the last: what a chunk can name.
    const END: u64 = 1 << 56;

    /// Makes an upstream without end, whose extents do not merge.
    pub fn new() -> Simulated {
        let state = SimulatedState {
            next: Simulated::BASE,
            calls: 0,
            live: BTreeMap::new(),
            free_calls: 0,
        };
        Simulated {
            capacity: u64::MAX,
            align: None,
            merges: false,
            gap: 0,
            fails_at: None,
            state: Mutex::new(state),
        }
    }

    /// Sets how many bytes there are.
    #[must_use]
    pub fn capacity(mut self, bytes: u64) -> Simulated {
        self.capacity = bytes;
        self
    }

    /// Aligns to this whatever is asked for.
    #[must_use]
    pub fn align(mut self, align: u64) -> Simulated {
        self.align = Some(align);
        self
    }

    /// Lets extents that lie side by side be used as one, as virtual memory management does.
    #[must_use]
    pub fn merging(mut self) -> Simulated {
        self.merges = true;
        self
    }

    /// Leaves this many bytes between extents.
    #[must_use]
    pub fn gap(mut self, bytes: u64) -> Simulated {
        self.gap = bytes;
        self
    }

    /// Fails the n-th call of `alloc`, counted from 1; 0 fails every one.
    #[must_use]
    pub fn failing_at(mut self, n: u64) -> Simulated {
        self.fails_at = Some(n);
        self
    }

    /// Counts the calls of `alloc`.
    pub fn calls(&self) -> u64 {
        self.state.acquire().calls
    }

    /// Counts the calls of `free`.
    pub fn free_calls(&self) -> u64 {
        self.state.acquire().free_calls
    }

    /// Returns the bytes that are out.
    pub fn live_bytes(&self) -> u64 {
        self.state.acquire().live.values().sum()
    }
}

impl Default for Simulated {
    fn default() -> Simulated {
        Simulated::new()
    }
}

// SAFETY: `SubAllocator` asks that extents overlap nothing that is out: addresses only rise. It
// gives no `memory`.
unsafe impl SubAllocator for Simulated {
    type Token = ();

    fn alloc(&self, len: u64, align: u64) -> Result<(Extent, ())> {
        let mut state = self.state.acquire();
        state.calls += 1;
        let free = self.capacity - state.live.values().sum::<u64>().min(self.capacity);
        if len > free || matches!(self.fails_at, Some(n) if n == 0 || n == state.calls) {
            let hint = "a simulated device".into();
            return Err(Error::OutOfMemory {
                device: DeviceId(0),
                asked: len,
                free,
                hint,
            });
        }
        // What addresses can say is a limit, too.
        let base = state
            .next
            .checked_next_multiple_of(self.align.unwrap_or(align));
        let end = base
            .and_then(|base| base.checked_add(len))
            .filter(|&end| end <= Simulated::END);
        let (Some(base), Some(end)) = (base, end) else {
            let free = Simulated::END.saturating_sub(state.next);
            let hint = "a simulated device has no more addresses".into();
            return Err(Error::OutOfMemory {
                device: DeviceId(0),
                asked: len,
                free,
                hint,
            });
        };
        state.next = end.saturating_add(self.gap);
        state.live.insert(base, len);
        Ok((Extent { base, len }, ()))
    }

    fn free(&self, extent: Extent, (): ()) -> Result<()> {
        let mut state = self.state.acquire();
        state.free_calls += 1;
        let freed = state.live.remove(&extent.base);
        if freed != Some(extent.len) {
            let got = format!("{extent:?}");
            return Err(Error::invalid("extent", got, "one that is out"));
        }
        Ok(())
    }

    fn merges(&self) -> bool {
        self.merges
    }
}
