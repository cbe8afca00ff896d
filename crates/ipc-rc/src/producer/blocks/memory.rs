//! What the drop of a block needs of its session: where its bytes go, and the counts.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use allocators::{Piece, Region, RegionSource};
use gpu_api::{ForkGuard, Result};

use crate::producer::blocks::adopted::FIRST_ADOPTED;
use crate::producer::blocks::count::Count;
use crate::producer::blocks::tokens::{AdoptToken, ReturnedTokens};
use crate::producer::wakeups::Wakeups;
use transport::wire::descriptor::SessionId;

/// A session's memory.
pub(crate) struct Memory {
    session: SessionId,
    pub guard: ForkGuard,
    pub source: Arc<dyn RegionSource>,
    wakeups: Arc<Wakeups>,
    /// Blocks that exist.
    pub live: Count,
    /// Blocks that were dropped and still exist.
    pub limbo: Count,
    /// Blocks that are kept for ever.
    pub leaked: Count,
    pub tokens: ReturnedTokens,
}

impl Memory {
    /// Makes the memory of a session that has no block yet.
    ///
    /// # Errors
    ///
    /// [`Error::System`](gpu_api::Error::System) without memory for a page.
    pub fn new(
        session: SessionId,
        source: Arc<dyn RegionSource>,
        wakeups: Arc<Wakeups>,
    ) -> Result<Memory> {
        let (live, limbo, leaked) = (Count::default(), Count::default(), Count::default());
        let (guard, tokens) = (ForkGuard::new()?, ReturnedTokens::default());
        Ok(Memory {
            session,
            guard,
            source,
            wakeups,
            live,
            limbo,
            leaked,
            tokens,
        })
    }

    /// Says whether no block is left but those that are kept for ever.
    pub fn is_only_leaked(&self) -> bool {
        // What is leaked stays live: the other order would be as good.
        let leaked = self.leaked.sum().blocks;
        self.live.sum().blocks <= leaked
    }

    /// Asks the source of regions something; `None` when that panics.
    pub fn ask_source<T>(&self, ask: impl FnOnce(&dyn RegionSource) -> T) -> Option<T> {
        let answer = catch_unwind(AssertUnwindSafe(|| ask(&*self.source)));
        answer
            .inspect_err(|_| tracing::error!(session = %self.session, "the session's source of regions panicked"))
            .ok()
    }

    /// Lists the regions that a piece which is out lies in. With no lock held.
    pub fn regions(&self, piece: &Piece) -> Vec<Arc<Region>> {
        if piece.offset + piece.len <= piece.region.len() {
            return vec![piece.region.clone()];
        }
        self.ask_source(|source| source.regions(piece))
            .unwrap_or_default()
    }

    /// Keeps an adopted block's token until a collect. It waits for the unmapping of the piece that
    /// comes with it.
    pub fn return_token(&self, token: AdoptToken, piece: Option<Piece>) {
        self.tokens.push(token, piece);
        // The thread has the region unmapped and tells.
        self.wakeups.thread.nudge();
    }

    /// Tells the source of regions that the last participant has unmapped.
    pub fn note_unpinned(&self, regions: &[Arc<Region>]) {
        let own = regions.iter().filter(|region| region.id() < FIRST_ADOPTED);
        own.filter(|region| !region.is_pinned())
            .for_each(|region| self.source.unpinned(region));
    }
}
