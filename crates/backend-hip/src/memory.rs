//! The table of what this backend allocated, opened and imported.
//!
//! The runtime's calls differ by where memory came from, and it does not tell well: the table does. Nothing is
//! counted in it but how often one handle was opened, because the runtime counts that too. An exported handle is kept:
//! an allocation is exported once, before anybody can open it, because the runtime stands no export of an allocation
//! that is being opened, and each export may pin the memory anew.

use std::collections::{BTreeMap, HashMap, btree_map};
use std::ffi::c_int;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_api::{Access, AddressRange, DeviceId, DevicePtr, Error, MemHandle, Result};

/// Where memory came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// `hipMalloc`, shared by handle.
    Plain,
    /// `hipMalloc` by other code of this process, which vouched for it: exported, never freed.
    Adopted,
    /// `hipMalloc`, shared as a dma-buf.
    DmaBuf,
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

impl Origin {
    /// Says whether this process allocated it: it is freed, not closed.
    pub(crate) fn is_own(self) -> bool {
        matches!(self, Origin::Plain | Origin::DmaBuf | Origin::Virtual { .. })
    }
}

/// One allocation or mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) len: u64,
    pub(crate) device: DeviceId,
    pub(crate) origin: Origin,
    /// A free or close of it failed: nobody knows what is left, and nothing touches it again.
    pub(crate) leaked: bool,
}

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

    /// Closes it, unless the runtime has: its manual does not say, and of the runtimes that were read none does. A file
    /// that another thread opened at the number meanwhile is another one.
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

/// Everything that has not been given back, by its base.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    entries: Mutex<BTreeMap<u64, Entry>>,
    handles: Mutex<HashMap<u64, MemHandle>>,
    /// Descriptors that the runtime has by their numbers, by the base of what was imported from them.
    given: Mutex<HashMap<u64, Given>>,
    /// Held while a handle is exported or opened: the runtime does not stand both at once for one allocation.
    pub(crate) sharing: Mutex<()>,
}

impl Memory {
    /// Notes an allocation or mapping.
    pub(crate) fn insert(&self, base: u64, entry: Entry) {
        self.lock().insert(base, entry);
    }

    /// Notes that a handle was opened, perhaps once more.
    pub(crate) fn opened(&self, base: u64, len: u64, device: DeviceId) {
        let mut entries = self.lock();
        match entries.get_mut(&base) {
            Some(Entry { origin: Origin::Opened { times }, leaked: false, .. }) => *times += 1,
            _ => {
                entries.insert(base, Entry { len, device, origin: Origin::Opened { times: 1 }, leaked: false });
            }
        }
    }

    /// Finds what an address lies in.
    pub(crate) fn find(&self, ptr: DevicePtr) -> Option<(AddressRange, Entry)> {
        let entries = self.lock();
        let (&base, &entry) = entries.range(..=ptr.0).next_back()?;
        (ptr.0 - base < entry.len).then_some((AddressRange { base: DevicePtr(base), len: entry.len }, entry))
    }

    /// Takes out what is about to be given back: `own` for a free, else for a close.
    ///
    /// It is taken out before the driver is called, because the driver may hand the same address out again before
    /// that call has returned to us.
    pub(crate) fn take(&self, base: DevicePtr, own: bool) -> Result<Entry> {
        let must =
            if own { "the base of what `alloc` gave" } else { "the base of what `open_handle` or `import_fd` gave" };
        let refused = |got: String| Error::Invalid { what: "the address", got, must };
        let mut entries = self.lock();
        let entry = entries
            .get_mut(&base.0)
            .ok_or_else(|| refused(format!("{base}, which is not the base of an allocation")))?;
        if entry.leaked {
            return Err(refused(format!("{base}, which an earlier error leaked")));
        }
        if entry.origin == Origin::Adopted {
            return Err(refused(format!("{base}, which another library allocated")));
        }
        if entry.origin.is_own() != own {
            let whose = if own { "another process'" } else { "this process' own" };
            return Err(refused(format!("{base}, which is {whose} memory")));
        }
        let taken = *entry;
        match &mut entry.origin {
            Origin::Opened { times } if *times > 1 => *times -= 1,
            _ => {
                entries.remove(&base.0);
                // Before the address can be handed out again.
                self.handles().remove(&base.0);
            }
        }
        Ok(taken)
    }

    /// Takes out what was adopted; says whether it was there.
    pub(crate) fn disown(&self, base: DevicePtr) -> bool {
        let mut entries = self.lock();
        let adopted = entries.get(&base.0).is_some_and(|entry| entry.origin == Origin::Adopted);
        if adopted {
            entries.remove(&base.0);
            self.handles().remove(&base.0);
        }
        adopted
    }

    /// Keeps a descriptor for as long as what was imported from it stays.
    pub(crate) fn keep_descriptor(&self, base: u64, given: Given) {
        self.given.lock().unwrap_or_else(PoisonError::into_inner).insert(base, given);
    }

    /// Takes out a descriptor whose import is about to go.
    pub(crate) fn take_descriptor(&self, base: u64) -> Option<Given> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner).remove(&base)
    }

    /// Returns the handle that was exported of an allocation.
    pub(crate) fn handle(&self, base: DevicePtr) -> Option<MemHandle> {
        self.handles().get(&base.0).copied()
    }

    /// Keeps the handle of an allocation that is in the table.
    pub(crate) fn keep_handle(&self, base: DevicePtr, handle: MemHandle) {
        let entries = self.lock();
        if entries.contains_key(&base.0) {
            self.handles().insert(base.0, handle);
        }
    }

    /// Puts back what could not be given back, for good.
    pub(crate) fn leak(&self, base: DevicePtr, taken: Entry) {
        match self.lock().entry(base.0) {
            btree_map::Entry::Vacant(place) => {
                place.insert(Entry { leaked: true, ..taken });
            }
            // The other times that the same handle was opened.
            btree_map::Entry::Occupied(mut place) if matches!(taken.origin, Origin::Opened { times: 2.. }) => {
                place.get_mut().leaked = true;
            }
            // A younger allocation at an address that was given back after all.
            btree_map::Entry::Occupied(_) => {}
        }
    }

    /// Lists live virtual memory on a device, own and imported: the bases, the lengths, and what may be done with each.
    pub(crate) fn virtual_on(&self, device: DeviceId) -> Vec<(u64, u64, Access)> {
        let entries = self.lock();
        let live = entries.iter().filter(|(_, entry)| entry.device == device && !entry.leaked);
        live.filter_map(|(&base, entry)| match entry.origin {
            Origin::Virtual { .. } => Some((base, entry.len, Access::ReadWrite)),
            Origin::Imported { access, .. } => Some((base, entry.len, access)),
            _ => None,
        })
        .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Taken after the entries where both are.
    fn handles(&self) -> MutexGuard<'_, HashMap<u64, MemHandle>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(origin: Origin) -> Entry {
        Entry { len: 0x1000, device: DeviceId(0), origin, leaked: false }
    }

    #[test]
    fn an_address_is_found_inside_its_allocation_only() {
        let memory = Memory::default();
        memory.insert(0x10000, entry(Origin::Plain));
        assert!(memory.find(DevicePtr(0xffff)).is_none());
        assert_eq!(memory.find(DevicePtr(0x10000)).map(|(range, _)| range.base), Some(DevicePtr(0x10000)));
        assert_eq!(memory.find(DevicePtr(0x10fff)).map(|(range, _)| range.base), Some(DevicePtr(0x10000)));
        assert!(memory.find(DevicePtr(0x11000)).is_none());
    }

    #[test]
    fn memory_is_freed_by_free_and_closed_by_close() {
        let memory = Memory::default();
        memory.insert(0x10000, entry(Origin::Virtual { handle: 1 }));
        memory.insert(0x20000, entry(Origin::Imported { handle: 2, access: Access::ReadWrite }));
        assert!(memory.take(DevicePtr(0x10000), false).is_err());
        assert!(memory.take(DevicePtr(0x20000), true).is_err());
        assert!(memory.take(DevicePtr(0x10000), true).is_ok());
        assert!(memory.take(DevicePtr(0x10000), true).is_err());
        assert!(memory.take(DevicePtr(0x20000), false).is_ok());
        assert!(memory.find(DevicePtr(0x10000)).is_none() && memory.find(DevicePtr(0x20000)).is_none());
    }

    #[test]
    fn a_handle_opened_twice_is_closed_twice() {
        let memory = Memory::default();
        memory.opened(0x10000, 0x1000, DeviceId(0));
        memory.opened(0x10000, 0x1000, DeviceId(0));
        assert!(memory.take(DevicePtr(0x10000), false).is_ok());
        assert!(memory.take(DevicePtr(0x10000), false).is_ok());
        assert!(memory.take(DevicePtr(0x10000), false).is_err());
    }

    #[test]
    fn a_handle_goes_with_its_memory() {
        let memory = Memory::default();
        let base = DevicePtr(0x10000);
        memory.keep_handle(base, MemHandle([1; 64]));
        assert!(memory.handle(base).is_none(), "kept for memory that is not there");
        memory.insert(base.0, entry(Origin::Plain));
        memory.keep_handle(base, MemHandle([1; 64]));
        assert_eq!(memory.handle(base).map(|handle| handle.0), Some([1; 64]));
        assert!(memory.take(base, true).is_ok());
        assert!(memory.handle(base).is_none(), "a later allocation at the address would get it");
    }

    #[test]
    fn what_was_adopted_is_neither_freed_nor_closed() {
        let memory = Memory::default();
        let base = DevicePtr(0x10000);
        memory.insert(base.0, entry(Origin::Adopted));
        assert!(memory.take(base, true).is_err() && memory.take(base, false).is_err());
        assert!(memory.disown(base) && !memory.disown(base));
    }

    #[test]
    fn what_leaked_stays_and_is_never_taken_again() {
        let memory = Memory::default();
        memory.insert(0x10000, entry(Origin::Plain));
        let taken = memory.take(DevicePtr(0x10000), true).expect("it is there");
        memory.leak(DevicePtr(0x10000), taken);
        assert!(memory.take(DevicePtr(0x10000), true).is_err());
        assert!(memory.find(DevicePtr(0x10000)).is_some_and(|(_, entry)| entry.leaked));
    }
}
