//! Where this backend's memory came from, and what is kept beside the table of it.
//!
//! An exported handle is kept: an allocation is exported once, before anybody can open it, because
//! the runtime stands no export of an allocation that is being opened, and each export may pin the
//! memory anew.

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_api::vendor::memory_table::{self, MemoryTable, Way};
use gpu_api::{Access, AddressRange, DeviceId, DevicePtr, MemHandle, Result};

/// Where memory came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// `hipMalloc`, shared by handle.
    Plain,
    /// `hipMalloc` by other code of this process, which vouched for it: exported, never freed.
    Adopted,
    /// `hipMalloc`, shared as a dma-buf.
    DmaBuf,
    /// `hipMallocFromPoolAsync`.
    Pool,
    /// `hipMemCreate`, reserved and mapped.
    Virtual {
        /// The physical memory's handle, as an address.
        handle: usize,
    },
    /// `hipIpcOpenMemHandle`, this many times.
    Opened {
        /// The runtime unmaps at the last close.
        times: u32,
    },
    /// Imported from a file descriptor, reserved and mapped.
    Imported {
        /// The physical memory's handle, as an address.
        handle: usize,
        /// What this process' devices may do with it.
        access: Access,
    },
    /// Imported from a dma-buf.
    External {
        /// The runtime's object, as an address.
        object: usize,
    },
}

impl memory_table::Origin for Origin {
    fn way(&self) -> Way {
        match self {
            Origin::Plain | Origin::DmaBuf | Origin::Virtual { .. } => Way::Free,
            Origin::Opened { .. } | Origin::Imported { .. } | Origin::External { .. } => Way::Close,
            Origin::Pool => Way::Return,
            Origin::Adopted => Way::Never,
        }
    }

    fn times(&mut self) -> Option<&mut u32> {
        if let Origin::Opened { times } = self {
            Some(times)
        } else {
            None
        }
    }

    fn mapped(&self) -> Option<Access> {
        match *self {
            Origin::Virtual { .. } => Some(Access::ReadWrite),
            Origin::Imported { access, .. } => Some(access),
            _ => None,
        }
    }
}

/// One allocation or mapping.
pub(crate) type Entry = memory_table::Entry<Origin>;

/// A descriptor that the runtime was given, and the file that it is.
#[derive(Debug)]
pub(crate) struct Given {
    fd: OwnedFd,
    file: Option<(u64, u64)>,
}

impl Given {
    pub(crate) fn new(fd: OwnedFd) -> Given {
        let file = named(&fd);
        Given { fd, file }
    }

    pub(crate) fn number(&self) -> c_int {
        self.fd.as_raw_fd()
    }

    /// Closes it, unless the runtime has: its manual does not say, and of the runtimes that were
    /// read none does. A file that another thread opened at the number meanwhile is another one.
    pub(crate) fn give_back(self) {
        if self.file.is_none() || named(&self.fd) != self.file {
            let _ = self.fd.into_raw_fd();
        }
    }
}

fn named(fd: &OwnedFd) -> Option<(u64, u64)> {
    let found = std::fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    Some((found.dev(), found.ino()))
}

/// Everything that has not been given back, and what the runtime must be given or asked once for
/// it.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    table: MemoryTable<Origin>,
    /// What was exported of allocations in the table; held while one is taken out or a handle is
    /// kept.
    handles: Mutex<HashMap<u64, MemHandle>>,
    /// Descriptors that the runtime has by their numbers, by the base of what was imported from
    /// them.
    given: Mutex<HashMap<u64, Given>>,
    /// Held while a handle is exported or opened: the runtime does not stand both at once for one
    /// allocation.
    pub(crate) sharing: Mutex<()>,
}

impl Memory {
    /// Notes an allocation or mapping.
    pub(crate) fn insert(&self, base: u64, len: u64, device: DeviceId, origin: Origin) {
        self.table.insert(base, len, device, origin);
    }

    /// Notes that a handle was opened, perhaps once more.
    pub(crate) fn opened(&self, base: u64, len: u64, device: DeviceId) {
        self.table
            .opened(base, len, device, Origin::Opened { times: 1 });
    }

    /// Finds what an address lies in.
    pub(crate) fn find(&self, ptr: DevicePtr) -> Option<(AddressRange, Entry)> {
        self.table.find(ptr)
    }

    /// Takes out what is about to be given back, and its handle, before the address can be handed
    /// out again.
    pub(crate) fn take(&self, base: DevicePtr, way: Way) -> Result<Entry> {
        let mut handles = self.handles();
        let taken = self.table.take(base, way)?;
        handles.remove(&base.0);
        Ok(taken)
    }

    /// Takes out what was adopted; says whether it was there.
    pub(crate) fn disown(&self, base: DevicePtr) -> bool {
        self.take(base, Way::Never).is_ok()
    }

    /// Puts back what could not be given back, for good.
    pub(crate) fn leak(&self, base: DevicePtr, taken: Entry) {
        self.table.leak(base, taken);
    }

    /// Lists live virtual memory on a device, own and imported: the bases, the lengths, and what
    /// may be done with each.
    pub(crate) fn mapped_on(&self, device: DeviceId) -> Vec<(u64, u64, Access)> {
        self.table.mapped_on(device)
    }

    /// Keeps a descriptor for as long as what was imported from it stays.
    pub(crate) fn keep_descriptor(&self, base: u64, given: Given) {
        self.given
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(base, given);
    }

    /// Takes out a descriptor whose import is about to go.
    pub(crate) fn take_descriptor(&self, base: u64) -> Option<Given> {
        self.given
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&base)
    }

    /// Returns the handle that was exported of an allocation.
    pub(crate) fn handle(&self, base: DevicePtr) -> Option<MemHandle> {
        self.handles().get(&base.0).copied()
    }

    /// Keeps the handle of an allocation that is in the table.
    pub(crate) fn keep_handle(&self, base: DevicePtr, handle: MemHandle) {
        let mut handles = self.handles();
        if self
            .table
            .find(base)
            .is_some_and(|(range, _)| range.base == base)
        {
            handles.insert(base.0, handle);
        }
    }

    /// Taken before the table where both are.
    fn handles(&self) -> MutexGuard<'_, HashMap<u64, MemHandle>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: DevicePtr = DevicePtr(0x10000);

    fn memory(origin: Origin) -> Memory {
        let memory = Memory::default();
        memory.insert(BASE.0, 0x1000, DeviceId(0), origin);
        memory
    }

    #[test]
    fn a_handle_goes_with_its_memory() {
        let memory = Memory::default();
        memory.keep_handle(BASE, MemHandle([1; 64]));
        assert!(
            memory.handle(BASE).is_none(),
            "kept for memory that is not there"
        );
        for (origin, way) in [(Origin::Plain, Way::Free), (Origin::Adopted, Way::Never)] {
            memory.insert(BASE.0, 0x1000, DeviceId(0), origin);
            memory.keep_handle(BASE, MemHandle([1; 64]));
            assert_eq!(memory.handle(BASE).map(|handle| handle.0), Some([1; 64]));
            assert!(memory.take(BASE, way).is_ok());
            assert!(
                memory.handle(BASE).is_none(),
                "a later allocation at the address would get it"
            );
        }
    }

    #[test]
    fn what_was_adopted_is_neither_freed_nor_closed() {
        let memory = memory(Origin::Adopted);
        assert!(memory.take(BASE, Way::Free).is_err() && memory.take(BASE, Way::Close).is_err());
        assert!(memory.disown(BASE) && !memory.disown(BASE));
    }

    #[test]
    fn only_what_was_adopted_is_disowned() {
        let memory = memory(Origin::Plain);
        memory.keep_handle(BASE, MemHandle([1; 64]));
        assert!(!memory.disown(BASE) && memory.handle(BASE).is_some());
    }
}
