//! Handles of plain memory (`hipMalloc`) that were exported.
//!
//! An exported handle is kept: an allocation is exported once, before anything can open it, because
//! the runtime stands no export of an allocation that is being opened, and each export may pin the
//! memory again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use driver::memory_table::MemoryTable;
use gpu_api::{DevicePtr, MemHandle};

/// What was exported of allocations in the table.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    kept: Mutex<HashMap<u64, MemHandle>>,
    /// By the process whose memory it is; held while a handle of its memory is exported or opened:
    /// the runtime does not stand two of these at once for one allocation.
    exporters: Mutex<HashMap<u32, Arc<Mutex<()>>>>,
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

    /// Returns the lock of the memory of one process.
    pub(crate) fn of_exporter(&self, process: u32) -> Arc<Mutex<()>> {
        let mut all = self
            .exporters
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // One that no call holds is of no use: a process that died does not stay in the table.
        all.retain(|of, lock| *of == process || Arc::strong_count(lock) > 1);
        Arc::clone(all.entry(process).or_default())
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

    #[test]
    fn an_open_of_one_process_memory_holds_up_no_other() {
        let handles = Handles::default();
        let (one, other) = (handles.of_exporter(7), handles.of_exporter(8));
        let _held = one.lock().expect("no holder panicked");
        assert!(other.try_lock().is_ok());
        assert!(
            handles.of_exporter(7).try_lock().is_err(),
            "one lock a process"
        );
    }

    #[test]
    fn the_lock_of_a_process_goes_with_its_last_holder() {
        let handles = Handles::default();
        drop(handles.of_exporter(7));
        let _other = handles.of_exporter(8);
        assert_eq!(handles.exporters.lock().expect("no panic").len(), 1);
    }

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
