//! The segments that PyTorch has, and the sessions that they came from.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::engine::{SentBlock, Session};

/// The sessions that PyTorch allocates from, by device.
#[derive(Default)]
pub(crate) struct Pools(Mutex<HashMap<c_int, Pool>>);

/// A session, and its segments.
pub(crate) struct Pool {
    pub session: Session,
    /// By address.
    pub segments: HashMap<usize, SentBlock>,
}

impl Pools {
    pub fn lock(&self) -> MutexGuard<'_, HashMap<c_int, Pool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    pub fn of(session: Session) -> Pool {
        Pool {
            session,
            segments: HashMap::new(),
        }
    }
}
