//! What stands behind a handle, where that is more than a value of the engine's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::callback::{Callback, Hold};
use crate::engine::{AdoptToken, Session, Stream};

/// A stream, and the application's hold on one that it lent: the library lets go of a stream sooner
/// when that has ended.
pub(crate) struct OpenStream {
    pub stream: Stream,
    pub _hold: Option<Arc<Hold>>,
}

/// A session, and the callbacks for adopted memory that is its owner's again.
pub(crate) struct OpenSession {
    pub session: Session,
    adopted: Mutex<Adopted>,
}

/// Callbacks by the token of their block.
#[derive(Default)]
struct Adopted {
    last: u64,
    waiting: HashMap<AdoptToken, Callback>,
}

impl OpenSession {
    pub fn of(session: Session) -> OpenSession {
        OpenSession {
            session,
            adopted: Mutex::default(),
        }
    }

    fn adopted(&self) -> MutexGuard<'_, Adopted> {
        self.adopted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the callback of memory that is about to be adopted, and returns the token to adopt it
    /// with.
    pub fn expect(&self, callback: Callback) -> AdoptToken {
        let mut adopted = self.adopted();
        adopted.last += 1;
        let token = AdoptToken(adopted.last);
        adopted.waiting.insert(token, callback);
        token
    }

    /// Forgets a callback: the memory was not adopted.
    pub fn expect_no_more(&self, token: AdoptToken) {
        self.adopted().waiting.remove(&token);
    }

    /// Collects, and calls back for what came home, on this thread and with no lock held. Returns
    /// the blocks, their bytes, and how many were adopted.
    pub fn collect(&self) -> (u64, u64, u64) {
        let collected = self.session.collect();
        let tokens = collected.tokens.len() as u64;
        let callbacks: Vec<Callback> = {
            let mut adopted = self.adopted();
            collected
                .tokens
                .iter()
                .filter_map(|token| adopted.waiting.remove(token))
                .collect()
        };
        callbacks.into_iter().for_each(Callback::run);
        (collected.blocks, collected.bytes, tokens)
    }
}
