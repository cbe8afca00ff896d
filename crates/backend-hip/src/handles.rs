//! Handles of plain memory (`hipMalloc`) that were exported.
//!
//! An exported handle is kept: an allocation is exported once, before anything can open it, because
//! the runtime stands no export of an allocation that is being opened, and each export may pin the
//! memory again.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use driver::memory_table::MemoryTable;
use gpu_api::{DevicePtr, MemHandle};

/// What was exported of allocations in the table.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    kept: Mutex<HashMap<u64, MemHandle>>,
    /// Held while a handle is exported or opened: the runtime does not stand both at once for one
    /// allocation.
    sharing: Mutex<()>,
}

impl Handles {
    /// Returns the handle that was exported of an allocation.
    pub(crate) fn get(&self, base: DevicePtr) -> Option<MemHandle> {
        self.kept().get(&base.0).copied()
    }

    /// Keeps the handle of an allocation that is in the table.
    pub(crate) fn keep(&self, memory: &MemoryTable, base: DevicePtr, handle: MemHandle) {
        let mut kept = self.kept();
        if memory
            .find(base)
            .is_some_and(|(range, _)| range.base == base)
        {
            kept.insert(base.0, handle);
        }
    }

    /// Forgets the handle of what has left the table, before its address can be handed out again.
    pub(crate) fn forget(&self, base: DevicePtr) {
        self.kept().remove(&base.0);
    }

    pub(crate) fn exporting(&self) -> MutexGuard<'_, ()> {
        self.sharing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<u64, MemHandle>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use driver::memory_table::{Origin, Way};
    use gpu_api::DeviceId;

    const BASE: DevicePtr = DevicePtr(0x10000);

    #[test]
    fn a_handle_goes_with_its_memory() {
        let (memory, handles) = (MemoryTable::default(), Handles::default());
        handles.keep(&memory, BASE, MemHandle([1; 64]));
        assert!(
            handles.get(BASE).is_none(),
            "kept for memory that is not there"
        );
        for (origin, way) in [(Origin::Plain, Way::Free), (Origin::Adopted, Way::Never)] {
            memory.insert(BASE.0, 0x1000, DeviceId(0), origin);
            handles.keep(&memory, BASE, MemHandle([1; 64]));
            assert_eq!(handles.get(BASE).map(|handle| handle.0), Some([1; 64]));
            assert!(memory.take(BASE, way).is_ok());
            handles.forget(BASE);
            assert!(
                handles.get(BASE).is_none(),
                "a later allocation at the address would get it"
            );
        }
    }
}
