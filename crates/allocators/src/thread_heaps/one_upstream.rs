//! One upstream for several heaps, which keep to one limit together.

use std::fmt;
use std::sync::{Arc, Weak};

use gpu_api::{DeviceId, Error, Result};

use crate::sync::{Acquire, Mutex, MutexGuard};
use crate::upstream::{RoomListener, RoomListeners, answer_as};
use crate::{BfcOptions, Extent, Memory, SubAllocator};

/// What several heaps take their regions from, one call at a time.
pub(super) struct OneUpstream<U> {
    shared: Arc<Shared<U>>,
}

struct Shared<U> {
    upstream: U,
    device: DeviceId,
    limit: u64,
    /// Locked while upstream is called.
    taken: Mutex<Taken>,
    /// The heaps: a region that one gives back is room for the others.
    heaps: RoomListeners,
}

#[derive(Default)]
struct Taken {
    reserved: u64,
    peak_reserved: u64,
    leaked: u64,
}

impl<U> OneUpstream<U> {
    pub(super) fn new(upstream: U, options: &BfcOptions) -> OneUpstream<U> {
        let (taken, heaps) = (Mutex::new(Taken::default()), RoomListeners::default());
        let shared = Shared {
            upstream,
            device: options.device,
            limit: options.limit,
            taken,
            heaps,
        };
        OneUpstream {
            shared: Arc::new(shared),
        }
    }

    pub(super) fn another(&self) -> OneUpstream<U> {
        OneUpstream {
            shared: self.shared.clone(),
        }
    }

    pub(super) fn upstream(&self) -> &U {
        &self.shared.upstream
    }

    /// Returns the most bytes that all heaps together had from there, at any time.
    pub(super) fn peak_reserved(&self) -> u64 {
        self.taken().peak_reserved
    }

    /// Starts counting anew.
    pub(super) fn clear_peak(&self) {
        let mut taken = self.taken();
        taken.peak_reserved = taken.reserved;
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.shared.taken.acquire()
    }
}

// SAFETY: as the upstream beneath, whose extents these are.
unsafe impl<U: SubAllocator> SubAllocator for OneUpstream<U> {
    type Token = U::Token;

    fn alloc(&self, len: u64, align: u64) -> Result<(Extent, U::Token)> {
        let mut taken = self.taken();
        let free = self
            .shared
            .limit
            .saturating_sub(taken.reserved + taken.leaked);
        if len > free {
            let hint = format!("{free} bytes are left below the limit of all heaps");
            return Err(Error::OutOfMemory {
                device: self.shared.device,
                asked: len,
                free,
                hint,
            });
        }
        let (extent, token) = self.shared.upstream.alloc(len, align)?;
        taken.reserved += extent.len;
        taken.peak_reserved = taken.peak_reserved.max(taken.reserved);
        Ok((extent, token))
    }

    fn free(&self, extent: Extent, token: U::Token) -> Result<()> {
        let mut taken = self.taken();
        taken.reserved -= extent.len;
        let freed = self.shared.upstream.free(extent, token);
        if freed.is_err() {
            taken.leaked += extent.len;
        }
        drop(taken);
        if freed.is_ok() {
            self.shared.heaps.tell();
        }
        freed
    }

    fn subscribe(&self, listener: Weak<dyn RoomListener>) {
        self.shared.heaps.add(listener.clone());
        self.shared.upstream.subscribe(listener);
    }

    answer_as!(self => self.shared.upstream);
}

impl<U: fmt::Debug> fmt::Debug for OneUpstream<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.upstream.fmt(f)
    }
}
