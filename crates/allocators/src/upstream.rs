//! Where regions come from.

// Tests: `crates/allocators/tests/suite.rs`.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use gpu_api::lock::Acquire;
use gpu_api::{Error, Result};

use crate::Memory;

/// What upstream gave: `len` bytes from the address `base` on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Extent {
    /// The first byte's address.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

impl Extent {
    /// Returns the address after the last byte.
    pub fn end(&self) -> u64 {
        self.base.saturating_add(self.len)
    }
}

/// Is told that an upstream may have room that it had not.
pub trait RoomListener: Send + Sync + 'static {
    /// Takes note. Called with no lock of the caller's held.
    fn room_came(&self);
}

/// The visitors, by weak references.
#[derive(Default)]
pub(crate) struct RoomListeners {
    listeners: Mutex<Vec<Weak<dyn RoomListener>>>,
}

impl RoomListeners {
    pub(crate) fn add(&self, listener: Weak<dyn RoomListener>) {
        let mut listeners = self.listeners();
        listeners.retain(|other| other.strong_count() > 0);
        listeners.push(listener);
    }

    /// Tells everybody. To be called with no lock held.
    pub(crate) fn tell(&self) {
        let listeners: Vec<Arc<dyn RoomListener>> =
            self.listeners().iter().filter_map(Weak::upgrade).collect();
        listeners.iter().for_each(|listener| listener.room_came());
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<Weak<dyn RoomListener>>> {
        self.listeners.acquire()
    }
}

/// Where a [`Bfc`](crate::Bfc) takes its regions from, and gives them back to.
///
/// It is called with no lock of the `Bfc` held, one call at a time; only `may_free` and
/// `check_owner` are called under its lock.
///
/// # Safety
///
/// For implementors. Wrappers such as [`Guard`](crate::Guard) read and write what an allocator
/// hands out, from safe code:
///
/// - An extent overlaps nothing that is not yet freed.
/// - If `memory` succeeds, an extent can be read and written through it until it is freed.
pub unsafe trait SubAllocator: fmt::Debug + Send + Sync + 'static {
    /// What is kept with an extent and handed out with every piece of it.
    type Token: Clone + Send + 'static;

    /// Allocates at least `len` bytes that overlap nothing that is not yet freed.
    ///
    /// The address is a multiple of `align`, a power of two, where upstream can; where it cannot,
    /// the `Bfc` looks for aligned bytes within.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`](gpu_api::Error::OutOfMemory) when there is no room; then the `Bfc`
    /// asks for less.
    fn alloc(&self, len: u64, align: u64) -> Result<(Extent, Self::Token)>;

    /// Takes an extent back, exactly as `alloc` gave it and once. May block.
    ///
    /// # Errors
    ///
    /// What the driver said. The extent is leaked then, never freed again.
    fn free(&self, extent: Extent, token: Self::Token) -> Result<()>;

    /// Says whether an extent that nobody uses may be freed: not while another process has it
    /// mapped, for instance. Must not block, and must not call back.
    fn may_free(&self, token: &Self::Token) -> bool {
        let _ = token;
        true
    }

    /// Says whether extents that lie side by side may be used as one.
    fn merges(&self) -> bool {
        false
    }

    /// Returns what `alloc` rounds lengths up to, so that a limit is kept to the byte.
    fn granularity(&self) -> u64 {
        1
    }

    /// Returns the most bytes that there could ever be, whatever anybody gives back.
    fn capacity(&self) -> u64 {
        u64::MAX
    }

    /// Adds a listener that is called whenever room may have come from elsewhere, for instance from
    /// others that share a limit.
    fn subscribe(&self, listener: Weak<dyn RoomListener>) {
        let _ = listener;
    }

    /// Says how extents are read and written from here.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](gpu_api::Error::Unsupported) for addresses without memory behind
    /// them.
    fn memory(&self) -> Result<Arc<dyn Memory>> {
        Err(no_memory())
    }

    /// Fails in a forked child of the process that made it. Must not block, and must not call back.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`](gpu_api::Error::Forked).
    fn check_owner(&self) -> Result<()> {
        Ok(())
    }
}

/// Implements what a layer over another upstream answers as that one does: all but `alloc`, `free`
/// and `subscribe`.
macro_rules! answer_as {
    ($self:ident => $beneath:expr) => {
        fn may_free(&$self, token: &Self::Token) -> bool {
            $beneath.may_free(token)
        }

        fn merges(&$self) -> bool {
            $beneath.merges()
        }

        fn granularity(&$self) -> u64 {
            $beneath.granularity()
        }

        fn capacity(&$self) -> u64 {
            $beneath.capacity()
        }

        fn memory(&$self) -> Result<Arc<dyn Memory>> {
            $beneath.memory()
        }

        fn check_owner(&$self) -> Result<()> {
            $beneath.check_owner()
        }
    };
}
pub(crate) use answer_as;

// SAFETY: as the upstream in the box, whose extents these are.
unsafe impl<U: SubAllocator + ?Sized> SubAllocator for Box<U> {
    type Token = U::Token;

    fn alloc(&self, len: u64, align: u64) -> Result<(Extent, U::Token)> {
        U::alloc(self, len, align)
    }

    fn free(&self, extent: Extent, token: U::Token) -> Result<()> {
        U::free(self, extent, token)
    }

    fn subscribe(&self, listener: Weak<dyn RoomListener>) {
        U::subscribe(self, listener);
    }

    answer_as!(self => (**self));
}

/// Makes the error for addresses that nothing can be read from.
pub(crate) fn no_memory() -> Error {
    Error::unsupported(
        "reading what an allocator handed out",
        "its addresses have no memory behind them",
        "put the wrapper over an allocator of memory",
    )
}
