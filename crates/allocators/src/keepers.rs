//! Keepers of free memory of an allocator, which return it on request.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use gpu_api::Result;
use gpu_api::lock::Acquire;

/// An allocator that can give idle memory back to the driver.
pub trait Trim: Send + Sync + 'static {
    /// Gives back what nobody uses, and says how many bytes. May block.
    ///
    /// # Errors
    ///
    /// What the driver gave; the memory is leaked then.
    fn trim(&self) -> Result<u64>;
}

/// The keepers of free memory of one allocator, by weak references.
#[derive(Default)]
pub(crate) struct Keepers {
    keepers: Mutex<Vec<Weak<dyn Trim>>>,
}

impl Keepers {
    pub(crate) fn add(&self, keeper: Weak<dyn Trim>) {
        let mut keepers = self.keepers.acquire();
        keepers.retain(|other| other.strong_count() > 0);
        keepers.push(keeper);
    }

    /// Has everybody give back what they keep; says how many bytes. To be called with no lock held.
    pub(crate) fn ask(&self) -> u64 {
        let keepers: Vec<Arc<dyn Trim>> = self
            .keepers
            .acquire()
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let trim = |keeper: &Arc<dyn Trim>| {
            keeper.trim().unwrap_or_else(|error| {
                tracing::warn!(%error, "a buffer is leaked");
                0
            })
        };
        keepers.iter().map(trim).sum()
    }
}

impl fmt::Debug for Keepers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keepers")
            .field("known", &self.keepers.acquire().len())
            .finish()
    }
}
