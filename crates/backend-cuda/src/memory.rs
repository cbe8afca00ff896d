//! The table of what this backend allocated, opened and imported.
//!
//! The driver's calls differ by where memory came from, and it does not tell well: the table does. Nothing is
//! counted in it but how often one handle was opened, because the driver counts that too.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_api::{Access, AddressRange, DeviceId, DevicePtr, Error, Result};

/// Where memory came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemCreate`, reserved and mapped.
    Virtual,
    /// `cuIpcOpenMemHandle`, this many times.
    Opened {
        /// The driver unmaps at the last close.
        times: u32,
    },
    /// Imported from file descriptors, reserved and mapped.
    Imported {
        /// What this process' devices may do with it.
        access: Access,
        /// Bytes of each mapping: all of them, or one piece of several side by side.
        piece: u64,
    },
    /// `cuMemAllocFromPoolAsync`.
    Pool,
    /// `cuMemAllocManaged`.
    Managed,
    /// A piece of a range that the caller reserved.
    Piece {
        /// What this process' devices may do with it.
        access: Access,
    },
}

/// How memory is given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// `free`: what `alloc` gave.
    Free,
    /// `close`: what `open_handle`, `import_fd` or `import_fds` gave.
    Close,
    /// `unmap_memory`: what `map_memory` mapped.
    Unmap,
    /// `pool_free`: what `pool_alloc` gave.
    Return,
}

impl Origin {
    /// Says whether this process allocated it, so that its base can be exported.
    pub(crate) fn is_own(self) -> bool {
        self.way() == Way::Free
    }

    fn way(self) -> Way {
        match self {
            Origin::Plain | Origin::Virtual | Origin::Managed => Way::Free,
            Origin::Opened { .. } | Origin::Imported { .. } => Way::Close,
            Origin::Piece { .. } => Way::Unmap,
            Origin::Pool => Way::Return,
        }
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

/// Everything that has not been given back, by its base.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    entries: Mutex<BTreeMap<u64, Entry>>,
    /// The pools that were not destroyed.
    pools: Mutex<BTreeSet<u64>>,
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

    /// Takes out what is about to be given back.
    ///
    /// It is taken out before the driver is called, because the driver may hand the same address out again before
    /// that call has returned to us.
    pub(crate) fn take(&self, base: DevicePtr, way: Way) -> Result<Entry> {
        let must = match way {
            Way::Free => "the base of what `alloc` gave",
            Way::Close => "the base of what `open_handle` or `import_fd` gave",
            Way::Unmap => "where `map_memory` mapped a piece",
            Way::Return => "what `pool_alloc` gave",
        };
        let refused = |got: String| Error::Invalid { what: "the address", got, must };
        let mut entries = self.lock();
        let entry = entries
            .get_mut(&base.0)
            .ok_or_else(|| refused(format!("{base}, which is not the base of an allocation")))?;
        if entry.leaked {
            return Err(refused(format!("{base}, which an earlier error leaked")));
        }
        if entry.origin.way() != way {
            let whose = match entry.origin.way() {
                Way::Free => "this process' own memory",
                Way::Close => "another process' memory",
                Way::Unmap => "a piece of a range",
                Way::Return => "memory of a pool",
            };
            return Err(refused(format!("{base}, which is {whose}")));
        }
        let taken = *entry;
        match &mut entry.origin {
            Origin::Opened { times } if *times > 1 => *times -= 1,
            _ => {
                entries.remove(&base.0);
            }
        }
        Ok(taken)
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
            Origin::Virtual => Some((base, entry.len, Access::ReadWrite)),
            Origin::Imported { access, .. } | Origin::Piece { access } => Some((base, entry.len, access)),
            Origin::Plain | Origin::Opened { .. } | Origin::Pool | Origin::Managed => None,
        })
        .collect()
    }

    /// Says whether everything was given back.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty() && self.pools().is_empty()
    }

    /// Notes a pool, which is of a context.
    pub(crate) fn pool_made(&self, pool: u64) {
        self.pools().insert(pool);
    }

    /// Forgets a pool.
    pub(crate) fn pool_gone(&self, pool: u64) {
        self.pools().remove(&pool);
    }

    fn pools(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
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
        memory.insert(0x10000, entry(Origin::Virtual));
        memory.insert(0x20000, entry(Origin::Imported { access: Access::ReadOnly, piece: 0x1000 }));
        assert!(memory.take(DevicePtr(0x10000), Way::Close).is_err());
        assert!(memory.take(DevicePtr(0x20000), Way::Free).is_err());
        assert!(memory.take(DevicePtr(0x10000), Way::Free).is_ok());
        assert!(memory.take(DevicePtr(0x10000), Way::Free).is_err());
        assert!(memory.take(DevicePtr(0x20000), Way::Close).is_ok());
        assert!(memory.is_empty());
    }

    #[test]
    fn a_handle_opened_twice_is_closed_twice() {
        let memory = Memory::default();
        memory.opened(0x10000, 0x1000, DeviceId(0));
        memory.opened(0x10000, 0x1000, DeviceId(0));
        assert!(memory.take(DevicePtr(0x10000), Way::Close).is_ok());
        assert!(memory.take(DevicePtr(0x10000), Way::Close).is_ok());
        assert!(memory.take(DevicePtr(0x10000), Way::Close).is_err());
    }

    #[test]
    fn what_leaked_stays_and_is_never_taken_again() {
        let memory = Memory::default();
        memory.insert(0x10000, entry(Origin::Plain));
        let taken = memory.take(DevicePtr(0x10000), Way::Free).expect("it is there");
        memory.leak(DevicePtr(0x10000), taken);
        assert!(memory.take(DevicePtr(0x10000), Way::Free).is_err());
        assert!(!memory.is_empty());
        assert!(memory.find(DevicePtr(0x10000)).is_some_and(|(_, entry)| entry.leaked));
    }
}
