//! Tokens of adopted memory without holders, until their owners take them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_api::{Piece, RegionId};

use crate::notices::Notices;
use crate::producer::notice::SessionNotice;

/// What the owner of adopted memory chose to know it by;
/// [`Session::collect`](crate::Session::collect) returns it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct AdoptToken(pub u64);

type Returned = Vec<(AdoptToken, Option<Piece>)>;

/// A session's returned tokens. Each waits for the unmapping of the piece that came with it: the
/// owner may free the memory as soon as it has the token.
#[derive(Debug, Default)]
pub(crate) struct ReturnedTokens {
    returned: Mutex<Returned>,
    /// How many there are. Changed under the lock, read without it.
    count: AtomicUsize,
}

impl ReturnedTokens {
    /// Says whether there are any.
    #[inline]
    pub fn is_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    fn lock(&self) -> Option<MutexGuard<'_, Returned>> {
        self.is_any()
            .then(|| self.returned.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds one.
    pub fn push(&self, token: AdoptToken, piece: Option<Piece>) {
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        returned.push((token, piece));
        self.count.store(returned.len(), Ordering::Relaxed);
    }

    /// Tells the application of tokens that it can take, and lists the regions that keep the others
    /// (thread).
    pub fn tell(&self, notices: &Notices<SessionNotice>) -> Vec<RegionId> {
        let Some(returned) = self.lock() else {
            return Vec::new();
        };
        let pieces = returned.iter().filter_map(|(_, piece)| piece.as_ref());
        let mapped = pieces.filter(|piece| piece.region.is_pinned());
        let mapped: Vec<RegionId> = mapped.map(|piece| piece.region.id()).collect();
        if mapped.len() < returned.len() {
            notices.push(SessionNotice::TokensReturned);
        }
        in_order(mapped)
    }

    /// Takes the tokens of unmapped memory.
    pub fn take(&self, notices: &Notices<SessionNotice>) -> Vec<AdoptToken> {
        let mut tokens = Vec::new();
        let Some(mut returned) = self.lock() else {
            return tokens;
        };
        returned.retain(|(token, piece)| {
            let is_mapped = piece.as_ref().is_some_and(|piece| piece.region.is_pinned());
            if !is_mapped {
                tokens.push(*token);
            }
            is_mapped
        });
        self.count.store(returned.len(), Ordering::Relaxed);
        // Under the lock, as it was told: none is left to tell of.
        notices.withdraw(SessionNotice::TokensReturned);
        tokens
    }

    /// Lists the regions whose unmapping is all that tokens wait for, in order and each once.
    pub fn regions(&self) -> Vec<RegionId> {
        let Some(returned) = self.lock() else {
            return Vec::new();
        };
        in_order(
            returned
                .iter()
                .filter_map(|(_, piece)| Some(piece.as_ref()?.region.id()))
                .collect(),
        )
    }
}

/// Thousands of tokens may wait for a few regions.
fn in_order(mut regions: Vec<RegionId>) -> Vec<RegionId> {
    regions.sort_unstable();
    regions.dedup();
    regions
}
