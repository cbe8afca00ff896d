//! An upstream that does everything an upstream may do, and some that it may not.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use allocators::{Extent, Simulated, SubAllocator};
use gpu_api::{BackendKind, DeviceId, DriverError, Error, Result};

use crate::random::Random;

/// How many extents it fails to take back at most: each counts against a limit for ever.
const LEAKS: u64 = 6;

/// Addresses that are refused at times, come at odd places, or are more or less than was asked for;
/// that may not go back at times, and that at times cannot.
#[derive(Debug)]
pub struct Hostile {
    inner: Simulated,
    state: Mutex<Books>,
    asked: AtomicU64,
}

#[derive(Debug)]
struct Books {
    random: Random,
    /// What is out, and what of the inner upstream's it is.
    out: HashMap<u64, (Extent, Extent)>,
    leaks: u64,
    leaked: u64,
}

impl Hostile {
    pub fn new(seed: u64) -> Hostile {
        let state = Books {
            random: Random::new(!seed),
            out: HashMap::new(),
            leaks: 0,
            leaked: 0,
        };
        Hostile {
            inner: Simulated::new(),
            state: Mutex::new(state),
            asked: AtomicU64::new(0),
        }
    }

    /// Asserts that all went back but what it failed to take.
    pub fn at_end(&self) {
        let state = self.state();
        assert!(state.out.is_empty(), "{:x?} is out", state.out);
        assert_eq!(self.inner.live_bytes(), state.leaked);
    }

    fn state(&self) -> MutexGuard<'_, Books> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failure(call: &'static str) -> Error {
        let source = DriverError {
            backend: BackendKind::Host,
            code: 700,
            name: "made to fail".into(),
        };
        Error::Driver {
            call,
            device: DeviceId(0),
            source,
        }
    }
}

// SAFETY: `SubAllocator` asks that extents overlap nothing that is out: each lies in one of its own
// of the inner upstream's. It gives no `memory`.
unsafe impl SubAllocator for Hostile {
    type Token = ();

    fn alloc(&self, len: u64, align: u64) -> Result<(Extent, ())> {
        let mut state = self.state();
        let more = state.random.below(1 << 16);
        let (before, given) = match state.random.below(16) {
            0 => {
                let free = state.random.below(len);
                return Err(Error::OutOfMemory {
                    device: DeviceId(0),
                    asked: len,
                    free,
                    hint: "not now".into(),
                });
            }
            1 => return Err(Hostile::failure("alloc")),
            2..=4 => (0, len + more),
            5..=7 => (1 + more, len + more),
            8 => (0, len - 1 - more % len.min(1 << 10)),
            _ => (0, len),
        };
        let (inner, ()) = self.inner.alloc(before + given.max(1), align)?;
        let extent = Extent {
            base: inner.base + before,
            len: given,
        };
        state.out.insert(extent.base, (extent, inner));
        Ok((extent, ()))
    }

    fn free(&self, extent: Extent, (): ()) -> Result<()> {
        let mut state = self.state();
        let (given, inner) = state
            .out
            .remove(&extent.base)
            .unwrap_or_else(|| panic!("{extent:x?} is not out"));
        assert_eq!(given, extent, "not as it was given");
        if state.leaks < LEAKS && state.random.one_in(32) {
            state.leaks += 1;
            state.leaked += inner.len;
            return Err(Hostile::failure("free"));
        }
        self.inner.free(inner, ())
    }

    fn may_free(&self, (): &()) -> bool {
        !self.asked.fetch_add(1, Ordering::Relaxed).is_multiple_of(8)
    }
}
