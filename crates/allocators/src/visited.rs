//! Telling others of regions that come and go.

// Tests: `crates/allocators/tests/suite.rs`.

use std::fmt;
use std::sync::{Arc, Weak};

use gpu_api::Result;

use crate::upstream::{RoomListener, answer_as};
use crate::{Extent, Memory, SubAllocator};

/// Is told of every region of an allocator, such as to register it with a network card.
pub trait RegionVisitor: Send + Sync + 'static {
    /// Takes note of a region that nobody uses yet. Called while growth is locked: it must not
    /// allocate from there.
    fn region_came(&self, region: Extent);

    /// Takes note that a region is about to go back: nobody uses it any more. As `region_came`.
    fn region_goes(&self, region: Extent);
}

/// An upstream that reports its regions to visitors.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use allocators::{Bfc, BfcOptions, Extent, RegionVisitor, Request, Simulated, Visited};
///
/// #[derive(Default)]
/// struct Registered(AtomicU64);
///
/// impl RegionVisitor for Registered {
///     fn region_came(&self, region: Extent) {
///         self.0.fetch_add(region.len, Ordering::Relaxed);
///     }
///     fn region_goes(&self, region: Extent) {
///         self.0.fetch_sub(region.len, Ordering::Relaxed);
///     }
/// }
///
/// let registered = Arc::new(Registered::default());
/// let bfc = Bfc::new(BfcOptions::new("bfc"), Visited::new(Simulated::new(), registered.clone()));
/// bfc.alloc(Request::new(100))?;
/// assert_eq!(registered.0.load(Ordering::Relaxed), 2 << 20);
/// # Ok::<(), gpu_api::Error>(())
/// ```
pub struct Visited<U> {
    inner: U,
    visitor: Option<Arc<dyn RegionVisitor>>,
}

impl<U: SubAllocator> Visited<U> {
    /// Tells a visitor of what comes from there.
    pub fn new(inner: U, visitor: Arc<dyn RegionVisitor>) -> Visited<U> {
        Visited {
            inner,
            visitor: Some(visitor),
        }
    }

    /// Tells a visitor if there is one.
    pub(crate) fn maybe(inner: U, visitor: Option<Arc<dyn RegionVisitor>>) -> Visited<U> {
        Visited { inner, visitor }
    }
}

// SAFETY: as the upstream beneath, whose extents these are.
unsafe impl<U: SubAllocator> SubAllocator for Visited<U> {
    type Token = U::Token;

    fn alloc(&self, len: u64, align: u64) -> Result<(Extent, U::Token)> {
        let came = self.inner.alloc(len, align)?;
        if let Some(visitor) = &self.visitor {
            visitor.region_came(came.0);
        }
        Ok(came)
    }

    fn free(&self, extent: Extent, token: U::Token) -> Result<()> {
        if let Some(visitor) = &self.visitor {
            visitor.region_goes(extent);
        }
        self.inner.free(extent, token)
    }

    fn subscribe(&self, listener: Weak<dyn RoomListener>) {
        self.inner.subscribe(listener);
    }

    answer_as!(self => self.inner);
}

impl<U: fmt::Debug> fmt::Debug for Visited<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Visited")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}
