//! What every allocator can do, so that wrappers stack and a process can hold any of them.

// Tests: `crates/allocators/tests/suite.rs`.

use std::fmt;
use std::sync::{Arc, Weak};

use gpu_api::{Error, Result};

use crate::upstream::no_memory;
use crate::{AllocatorStats, Bfc, Memory, Placed, Request, Snapshot, SubAllocator, Trim, Work};

/// An allocator of addresses in device or host memory.
///
/// # Safety
///
/// For implementors. Wrappers such as [`Guard`](crate::Guard) read and write what an allocator
/// hands out, from safe code:
///
/// - What `alloc` hands out, [`Placed::bytes`] from [`Placed::address`] on, overlaps nothing that
///   was handed out and not taken back since.
/// - If `memory` succeeds, it can be read and written through that until it is taken back.
pub unsafe trait Allocator: fmt::Debug + Send + Sync + 'static {
    /// Returns what reports call it.
    fn name(&self) -> &str;

    /// Allocates.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`](gpu_api::Error::OutOfMemory) after everything that it can do about
    /// it, [`Error::Invalid`](gpu_api::Error::Invalid) for no bytes or an alignment that is not a
    /// power of two, [`Error::Forked`](gpu_api::Error::Forked) in a forked child.
    fn alloc(&self, request: Request) -> Result<Placed>;

    /// Takes an allocation back: its bytes may be used again at once.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](gpu_api::Error::Invalid) for an address that is not handed out; nothing
    /// changes then.
    fn free(&self, address: u64) -> Result<()>;

    /// Takes an allocation back whose bytes may be used again once all of this work, and what was
    /// [noted](Allocator::record_work) before, has finished. When a single stream's work is left,
    /// that stream may use them at once, in its order ([`Request::on`]).
    ///
    /// Work stands for what was queued before this call.
    ///
    /// # Errors
    ///
    /// As [`free`](Allocator::free), and [`Error::Unsupported`] of an allocator that gives the
    /// memory away at once.
    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        if work.is_empty() {
            return self.free(address);
        }
        Err(no_patience(self.name()))
    }

    /// Notes work that touches an allocation, such as that of a second stream: after its free,
    /// whatever that says, its bytes are not used again before this work has finished, but by its
    /// own stream.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address that is not handed out, and [`Error::Unsupported`] as
    /// [`free_after`](Allocator::free_after).
    #[doc(alias = "record_stream")]
    fn record_work(&self, address: u64, work: Work) -> Result<()> {
        let _ = (address, work);
        Err(no_patience(self.name()))
    }

    /// Returns whether a request waits for memory of it. Keepers of free memory then return it.
    fn is_wanted(&self) -> bool {
        false
    }

    /// Adds a keeper of free memory of it, which is asked to return it before a request fails or
    /// waits.
    fn register_keeper(&self, keeper: Weak<dyn Trim>) {
        let _ = keeper;
    }

    /// Returns what is known of an allocation; `None` for an address that is not handed out.
    fn get(&self, address: u64) -> Option<Placed>;

    /// Finds the allocation that an address lies in, at its start or anywhere. It may look through
    /// all of them.
    fn find(&self, address: u64) -> Option<Placed> {
        self.get(address)
    }

    /// Returns what it counts.
    fn stats(&self) -> AllocatorStats;

    /// Starts counting anew: no allocations, the peak is what is in use.
    fn clear_stats(&self);

    /// Gives back to its upstream what nobody uses, and says how many bytes. May block.
    ///
    /// # Errors
    ///
    /// What the driver gave; the memory is leaked then, never freed twice.
    fn trim(&self) -> Result<u64>;

    /// Says how the memory is read and written from here.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](gpu_api::Error::Unsupported) for addresses without memory behind
    /// them.
    fn memory(&self) -> Result<Arc<dyn Memory>> {
        Err(no_memory())
    }

    /// Lists every region and chunk; `None` for an allocator that has no regions.
    fn snapshot(&self) -> Option<Snapshot> {
        None
    }

    /// Fails in a forked child of the process that made it.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`](gpu_api::Error::Forked).
    fn check_owner(&self) -> Result<()> {
        Ok(())
    }
}

/// Makes the error of an allocator that keeps nothing until work is done.
#[cold]
fn no_patience(name: &str) -> Error {
    Error::unsupported(
        "freeing memory that is still worked on",
        format!("{name} cannot keep it until then"),
        "synchronise the stream, then free it",
    )
}

/// Hands on to the allocator beneath what a wrapper does not change.
macro_rules! hand_on {
    ($inner:tt: $($method:ident),*) => { $(crate::allocator::hand_on!(@$method $inner);)* };
    (@name $inner:tt) => {
        fn name(&self) -> &str {
            self.$inner.name()
        }
    };
    (@alloc $inner:tt) => {
        fn alloc(&self, request: crate::Request) -> gpu_api::Result<crate::Placed> {
            self.$inner.alloc(request)
        }
    };
    (@free $inner:tt) => {
        fn free(&self, address: u64) -> gpu_api::Result<()> {
            self.$inner.free(address)
        }
    };
    (@free_after $inner:tt) => {
        fn free_after(
            &self,
            address: u64,
            work: Vec<crate::Work>,
        ) -> gpu_api::Result<()> {
            self.$inner.free_after(address, work)
        }
    };
    (@record_work $inner:tt) => {
        fn record_work(&self, address: u64, work: crate::Work) -> gpu_api::Result<()> {
            self.$inner.record_work(address, work)
        }
    };
    (@is_wanted $inner:tt) => {
        fn is_wanted(&self) -> bool {
            self.$inner.is_wanted()
        }
    };
    (@register_keeper $inner:tt) => {
        fn register_keeper(&self, keeper: std::sync::Weak<dyn crate::Trim>) {
            self.$inner.register_keeper(keeper);
        }
    };
    (@get $inner:tt) => {
        fn get(&self, address: u64) -> Option<crate::Placed> {
            self.$inner.get(address)
        }
    };
    (@find $inner:tt) => {
        fn find(&self, address: u64) -> Option<crate::Placed> {
            self.$inner.find(address)
        }
    };
    (@stats $inner:tt) => {
        fn stats(&self) -> crate::AllocatorStats {
            self.$inner.stats()
        }
    };
    (@clear_stats $inner:tt) => {
        fn clear_stats(&self) {
            self.$inner.clear_stats();
        }
    };
    (@trim $inner:tt) => {
        fn trim(&self) -> gpu_api::Result<u64> {
            self.$inner.trim()
        }
    };
    (@memory $inner:tt) => {
        fn memory(&self) -> gpu_api::Result<std::sync::Arc<dyn crate::Memory>> {
            self.$inner.memory()
        }
    };
    (@snapshot $inner:tt) => {
        fn snapshot(&self) -> Option<crate::Snapshot> {
            self.$inner.snapshot()
        }
    };
    (@check_owner $inner:tt) => {
        fn check_owner(&self) -> gpu_api::Result<()> {
            self.$inner.check_owner()
        }
    };
}
pub(crate) use hand_on;

// Object-safe on purpose: wrappers stack in any order.
const _: Option<&dyn Allocator> = None;

// SAFETY: `Allocator` asks that what is handed out does not overlap: chunks of a heap do not, and
// upstream's extents do not (`SubAllocator`). `memory` is upstream's.
unsafe impl<U: SubAllocator> Allocator for Bfc<U> {
    fn name(&self) -> &str {
        &self.options().name
    }

    fn alloc(&self, request: Request) -> Result<Placed> {
        Bfc::alloc(self, request).map(|placed| placed.untied())
    }

    fn free(&self, address: u64) -> Result<()> {
        Bfc::free(self, address)
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.free_after_all(address, work)
    }

    fn record_work(&self, address: u64, work: Work) -> Result<()> {
        Bfc::record_work(self, address, work)
    }

    fn is_wanted(&self) -> bool {
        Bfc::is_wanted(self)
    }

    fn register_keeper(&self, keeper: Weak<dyn Trim>) {
        Bfc::register_keeper(self, keeper);
    }

    fn get(&self, address: u64) -> Option<Placed> {
        Bfc::get(self, address).map(|placed| placed.untied())
    }

    fn find(&self, address: u64) -> Option<Placed> {
        Bfc::find(self, address).map(|placed| placed.untied())
    }

    fn stats(&self) -> AllocatorStats {
        Bfc::stats(self)
    }

    fn clear_stats(&self) {
        Bfc::clear_stats(self);
    }

    fn trim(&self) -> Result<u64> {
        Bfc::trim(self)
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        self.upstream().memory()
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(Bfc::snapshot(self))
    }

    fn check_owner(&self) -> Result<()> {
        self.upstream().check_owner()
    }
}

// SAFETY: what it points to keeps the promises.
unsafe impl<A: Allocator + ?Sized> Allocator for Arc<A> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn alloc(&self, request: Request) -> Result<Placed> {
        (**self).alloc(request)
    }

    fn free(&self, address: u64) -> Result<()> {
        (**self).free(address)
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        (**self).free_after(address, work)
    }

    fn record_work(&self, address: u64, work: Work) -> Result<()> {
        (**self).record_work(address, work)
    }

    fn is_wanted(&self) -> bool {
        (**self).is_wanted()
    }

    fn register_keeper(&self, keeper: Weak<dyn Trim>) {
        (**self).register_keeper(keeper);
    }

    fn get(&self, address: u64) -> Option<Placed> {
        (**self).get(address)
    }

    fn find(&self, address: u64) -> Option<Placed> {
        (**self).find(address)
    }

    fn stats(&self) -> AllocatorStats {
        (**self).stats()
    }

    fn clear_stats(&self) {
        (**self).clear_stats();
    }

    fn trim(&self) -> Result<u64> {
        (**self).trim()
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        (**self).memory()
    }

    fn snapshot(&self) -> Option<Snapshot> {
        (**self).snapshot()
    }

    fn check_owner(&self) -> Result<()> {
        (**self).check_owner()
    }
}
