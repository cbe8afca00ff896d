//! Handles of plain memory (`hipMalloc`) that were exported.
//!
//! An exported handle is kept: an allocation is exported once, before anything can open it, because
//! the runtime stands no export of an allocation that is being opened, and each export may pin the
//! memory again. Only where the runtime's server has gone, and with it every handle of the process,
//! is what was kept exported again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use gpu_api::lock::{Acquire, AwaitChange};
use gpu_api::{DeviceId, DevicePtr, MemHandle};

use crate::exporter::Exporter;

/// A handle that was exported.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    pub(crate) handle: MemHandle,
    pub(crate) device: DeviceId,
}

/// What was exported of this process, and whose memory was opened.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    kept: Mutex<HashMap<u64, Kept>>,
    /// The allocation that is being exported again: it is not freed meanwhile.
    again: Mutex<Option<u64>>,
    was_exported: Condvar,
    /// How the last export of everything went.
    pub(crate) renewal: Renewal,
    exporters: Mutex<HashMap<u32, Arc<Exporter>>>,
}

/// Whether everything is being exported again.
#[derive(Debug, Default)]
pub(crate) struct Renewal(AtomicU8);

const IDLE: u8 = 0;
const RUNNING: u8 = 1;
const FAILED: u8 = 2;

impl Renewal {
    /// Begins one; `false` where one runs.
    pub(crate) fn begin(&self) -> bool {
        self.0.swap(RUNNING, Ordering::Relaxed) != RUNNING
    }

    pub(crate) fn end(&self, succeeded: bool) {
        let state = if succeeded { IDLE } else { FAILED };
        self.0.store(state, Ordering::Relaxed);
    }

    /// Says whether the last one failed: the next would too.
    pub(crate) fn has_failed(&self) -> bool {
        self.0.load(Ordering::Relaxed) == FAILED
    }
}

impl Handles {
    /// Returns the handle that was exported of an allocation.
    pub(crate) fn get(&self, base: DevicePtr) -> Option<MemHandle> {
        self.kept.acquire().get(&base.0).map(|kept| kept.handle)
    }

    /// Keeps the handle of an allocation that is alive.
    pub(crate) fn keep(&self, base: DevicePtr, handle: MemHandle, device: DeviceId) {
        self.kept.acquire().insert(base.0, Kept { handle, device });
    }

    /// Forgets the handle of what has left the table, before its address can be handed out again.
    pub(crate) fn forget(&self, base: DevicePtr) {
        self.kept.acquire().remove(&base.0);
        let mut again = self.again.acquire();
        while *again == Some(base.0) {
            again = self.was_exported.await_change(again, None);
        }
    }

    /// Runs `export` with each kept handle whose allocation is alive, and stays so for the call.
    pub(crate) fn export_again(&self, mut export: impl FnMut(DevicePtr, Kept) -> bool) -> bool {
        let mut all: Vec<u64> = self.kept.acquire().keys().copied().collect();
        all.sort_unstable();
        all.into_iter().all(|base| {
            *self.again.acquire() = Some(base);
            // Looked at once more: from here on a free waits.
            let kept = self.kept.acquire().get(&base).copied();
            let done = kept.is_none_or(|kept| export(DevicePtr(base), kept));
            *self.again.acquire() = None;
            self.was_exported.notify_all();
            done
        })
    }

    /// Returns the process of a number, whose calls have a turn of their own.
    pub(crate) fn exporter(&self, process: u32) -> Arc<Exporter> {
        let mut all = self.exporters.acquire();
        // One that no call holds is of no use: a process that died does not stay in the table.
        all.retain(|of, exporter| *of == process || Arc::strong_count(exporter) > 1);
        Arc::clone(all.entry(process).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::mpsc;

    #[test]
    fn an_open_of_one_process_memory_holds_up_no_other() {
        let handles = Handles::default();
        let one = handles.exporter(7);
        let _held = one.turn();
        let (done, is_done) = mpsc::channel();
        let other = handles.exporter(8);
        std::thread::spawn(move || {
            drop(other.turn());
            done.send(()).expect("the test waits");
        });
        is_done.recv().expect("it has its turn");
        assert!(Arc::ptr_eq(&one, &handles.exporter(7)), "one a process");
    }

    #[test]
    fn a_process_goes_with_its_last_call() {
        let handles = Handles::default();
        drop(handles.exporter(7));
        let _other = handles.exporter(8);
        assert_eq!(handles.exporters.lock().expect("no panic").len(), 1);
    }

    const BASE: DevicePtr = DevicePtr(0x10000);
    const GPU: DeviceId = DeviceId(0);

    #[test]
    fn a_handle_goes_with_its_memory() {
        let handles = Handles::default();
        handles.keep(BASE, MemHandle([1; 64]), GPU);
        assert_eq!(handles.get(BASE).map(|handle| handle.0), Some([1; 64]));
        handles.forget(BASE);
        let exported_again = handles.export_again(|_, _| false);
        assert!(handles.get(BASE).is_none() && exported_again);
    }

    #[test]
    fn memory_is_not_freed_while_it_is_exported_again() {
        let handles = Arc::new(Handles::default());
        handles.keep(BASE, MemHandle([1; 64]), GPU);
        let (freed, is_freed) = mpsc::channel();
        let theirs = Arc::clone(&handles);
        handles.export_again(|base, _| {
            let (theirs, freed) = (Arc::clone(&theirs), freed.clone());
            std::thread::spawn(move || {
                theirs.forget(base);
                freed.send(()).expect("the test waits");
            });
            // It is forgotten at once, and waits then.
            while handles.get(base).is_some() {
                std::thread::yield_now();
            }
            assert!(is_freed.try_recv().is_err(), "freed under the call");
            true
        });
        is_freed.recv().expect("it goes on");
    }
}
