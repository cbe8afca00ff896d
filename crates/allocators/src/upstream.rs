//! Where regions come from.

use std::fmt;

use gpu_api::Result;

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

/// Where a [`Bfc`](crate::Bfc) takes its regions from, and gives them back to.
///
/// It is called with no lock of the `Bfc` held, one call at a time; only `may_free` is called under its lock.
pub trait SubAllocator: fmt::Debug + Send + Sync + 'static {
    /// What is kept with an extent and handed out with every piece of it.
    type Token: Clone + Send + 'static;

    /// Allocates at least `len` bytes that overlap nothing that is not yet freed.
    ///
    /// The address is a multiple of `align`, a power of two, where upstream can; where it cannot, the `Bfc` looks for
    /// aligned bytes within.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`](gpu_api::Error::OutOfMemory) when there is no room; then the `Bfc` asks for less.
    fn alloc(&self, len: u64, align: u64) -> Result<(Extent, Self::Token)>;

    /// Takes an extent back, exactly as `alloc` gave it and once. May block.
    ///
    /// # Errors
    ///
    /// What the driver said. The extent is leaked then, never freed again.
    fn free(&self, extent: Extent, token: Self::Token) -> Result<()>;

    /// Says whether an extent that nobody uses may be freed: not while another process has it mapped, for instance.
    /// Must not block, and must not call back.
    fn may_free(&self, token: &Self::Token) -> bool {
        let _ = token;
        true
    }

    /// Says whether extents that lie side by side may be used as one.
    fn merges(&self) -> bool {
        false
    }
}
