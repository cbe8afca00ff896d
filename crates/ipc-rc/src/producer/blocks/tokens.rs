//! Tokens of adopted memory without holders, until their owners take them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use allocators::Piece;
use gpu_api::RegionId;
use gpu_api::lock::Acquire;

use crate::notices::Notices;
use crate::producer::notice::SessionNotice;

/// What the owner of adopted memory chose to know it by;
/// [`Session::collect`](crate::Session::collect) returns it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct AdoptToken(pub u64);

/// What came back with one token: memory that is adopted again and again comes back as often, and
/// takes no more room for it.
#[derive(Debug)]
struct Back {
    /// The piece whose unmapping the token waits for.
    piece: Option<Piece>,
    times: u64,
}

type Returned = BTreeMap<AdoptToken, Back>;

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
        self.is_any().then(|| self.returned.acquire())
    }

    /// Adds one.
    pub fn push(&self, token: AdoptToken, piece: Option<Piece>) {
        let mut returned = self.returned.acquire();
        match returned.entry(token) {
            Entry::Occupied(back) => back.into_mut().times += 1,
            Entry::Vacant(place) => drop(place.insert(Back { piece, times: 1 })),
        }
        self.count.store(returned.len(), Ordering::Relaxed);
    }

    /// Tells the application of tokens that it can take, and lists the regions that keep the others
    /// (thread).
    pub fn tell(&self, notices: &Notices<SessionNotice>) -> Vec<RegionId> {
        let Some(returned) = self.lock() else {
            return Vec::new();
        };
        let pieces = returned.values().filter_map(|back| back.piece.as_ref());
        let mapped = pieces.filter(|piece| piece.region.is_pinned());
        let mapped: Vec<RegionId> = mapped.map(|piece| piece.region.id()).collect();
        if mapped.len() < returned.len() {
            notices.push(SessionNotice::TokensReturned);
        }
        in_order(mapped)
    }

    /// Takes the tokens of unmapped memory, each as often as it came back.
    pub fn take(&self, notices: &Notices<SessionNotice>) -> Vec<AdoptToken> {
        let mut tokens = Vec::new();
        let Some(mut returned) = self.lock() else {
            return tokens;
        };
        returned.retain(|token, back| {
            let is_mapped = back
                .piece
                .as_ref()
                .is_some_and(|piece| piece.region.is_pinned());
            if !is_mapped {
                tokens.extend((0..back.times).map(|_| *token));
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
                .values()
                .filter_map(|back| Some(back.piece.as_ref()?.region.id()))
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
