//! Blocks that an application asked about while they were held: it is told of their release.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::producer::blocks::block::Block;
use gpu_api::lock::Acquire;

/// The blocks.
#[derive(Debug, Default)]
pub(crate) struct Releases {
    watched: Mutex<Vec<Weak<Block>>>,
    /// There are some. Changed under the lock, read without it.
    is_any: AtomicBool,
}

impl Releases {
    /// Says whether any is watched.
    pub fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    /// Adds one.
    pub fn watch(&self, block: &Arc<Block>) {
        let mut watched = self.watched.acquire();
        if !watched
            .iter()
            .any(|other| other.as_ptr() == Arc::as_ptr(block))
        {
            watched.push(Arc::downgrade(block));
        }
        self.is_any.store(true, Ordering::Relaxed);
    }

    /// Takes out those without a holder, and says whether there were any (thread).
    pub fn take(&self) -> bool {
        if !self.is_any() {
            return false;
        }
        let mut watched = self.watched.acquire();
        let before = watched.len();
        // The application's handle counts as one.
        watched.retain(|block| block.strong_count() > 1);
        self.is_any.store(!watched.is_empty(), Ordering::Relaxed);
        watched.len() < before
    }
}
