//! What a backend allocated, opened and imported, by its base.
//!
//! A driver's calls differ by where memory came from, and the driver does not tell well: the table
//! does. Nothing is counted in it but how often one handle was opened, because drivers count that
//! too.

use std::collections::{BTreeMap, btree_map};
use std::sync::Mutex;

use crate::calls::MemoryHandle;
use gpu_api::lock::Acquire;
use gpu_api::{Access, AddressRange, DeviceId, DevicePtr, Error, Result};

/// Where memory came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// `malloc`, shared by handle.
    Plain,
    /// `malloc` by other code of this process, which vouched for it: exported, never freed.
    Adopted,
    /// `malloc`, shared as a dma-buf.
    DmaBuf,
    /// `pool_alloc`.
    Pool,
    /// Managed memory.
    Managed,
    /// Physical memory that was made, and mapped on addresses of its own.
    Virtual {
        /// Its handle, where the driver wants that kept.
        handle: Option<MemoryHandle>,
    },
    /// `handle_open`, this many times.
    Opened {
        /// The driver unmaps at the last close.
        times: u32,
    },
    /// Physical memory from file descriptors, mapped on addresses of its own.
    Imported {
        /// Its handle, where the driver wants that kept.
        handle: Option<MemoryHandle>,
        /// What this process' devices may do with it.
        access: Access,
        /// Bytes of each mapping: all of them, or one piece of several side by side.
        piece: u64,
    },
    /// Plain memory from a dma-buf.
    External {
        /// What the mapping rests on, as an address.
        object: usize,
    },
    /// A piece of a range that the caller reserved.
    Piece {
        /// What this process' devices may do with it.
        access: Access,
    },
}

impl Origin {
    /// Says how it is given back.
    pub fn way(&self) -> Way {
        match self {
            Origin::Plain | Origin::DmaBuf | Origin::Virtual { .. } | Origin::Managed => Way::Free,
            Origin::Opened { .. } | Origin::Imported { .. } | Origin::External { .. } => Way::Close,
            Origin::Piece { .. } => Way::Unmap,
            Origin::Pool => Way::Return,
            Origin::Adopted => Way::Never,
        }
    }

    /// Borrows how often it was opened, if it was opened by a handle.
    fn times(&mut self) -> Option<&mut u32> {
        if let Origin::Opened { times } = self {
            Some(times)
        } else {
            None
        }
    }

    /// Says what this process' devices may do with it, if it is mapped for each of them by name.
    fn mapped(&self) -> Option<Access> {
        match *self {
            Origin::Virtual { .. } => Some(Access::ReadWrite),
            Origin::Imported { access, .. } | Origin::Piece { access } => Some(access),
            _ => None,
        }
    }
}

/// How memory is given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// `free`: what `alloc` gave.
    Free,
    /// `close`: what `open_handle`, `import_fd` or `import_fds` gave.
    Close,
    /// `unmap_memory`: what `map_memory` mapped.
    Unmap,
    /// `pool_free`: what `pool_alloc` gave.
    Return,
    /// Not by this backend: other code allocated it.
    Never,
}

/// One allocation or mapping.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its bytes.
    pub len: u64,
    /// The device that it was made for.
    pub device: DeviceId,
    /// Where it came from.
    pub origin: Origin,
    /// A free or close of it failed: nobody knows what is left, and nothing touches it again.
    pub leaked: bool,
}

impl Entry {
    fn new(len: u64, device: DeviceId, origin: Origin) -> Entry {
        Entry {
            len,
            device,
            origin,
            leaked: false,
        }
    }
}

/// Everything that has not been given back.
#[derive(Debug, Default)]
pub struct MemoryTable(Mutex<BTreeMap<u64, Entry>>);

impl MemoryTable {
    /// Notes an allocation or mapping.
    pub fn insert(&self, base: u64, len: u64, device: DeviceId, origin: Origin) {
        self.0
            .acquire()
            .insert(base, Entry::new(len, device, origin));
    }

    /// Notes that a handle was opened, perhaps once more.
    pub fn opened(&self, base: u64, len: u64, device: DeviceId) {
        let mut entries = self.0.acquire();
        let times = entries
            .get_mut(&base)
            .filter(|entry| !entry.leaked)
            .and_then(|entry| entry.origin.times());
        match times {
            Some(times) => *times += 1,
            None => {
                entries.insert(base, Entry::new(len, device, Origin::Opened { times: 1 }));
            }
        }
    }

    /// Finds what an address lies in.
    pub fn find(&self, ptr: DevicePtr) -> Option<(AddressRange, Entry)> {
        let entries = self.0.acquire();
        let (&base, &entry) = entries.range(..=ptr.0).next_back()?;
        (ptr.0 - base < entry.len).then_some((
            AddressRange {
                base: DevicePtr(base),
                len: entry.len,
            },
            entry,
        ))
    }

    /// Takes out what is about to be given back.
    ///
    /// It is taken out before the driver is called, because the driver may hand the same address
    /// out again before that call has returned to us.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address that is no base in the table, for memory that is given
    /// back in another way, and for what leaked.
    pub fn take(&self, base: DevicePtr, way: Way) -> Result<Entry> {
        let must = match way {
            Way::Free => "the base of what `alloc` gave",
            Way::Close => "the base of what `open_handle` or `import_fd` gave",
            Way::Unmap => "where `map_memory` mapped a piece",
            Way::Return => "what `pool_alloc` gave",
            Way::Never => "the base of what other code allocated",
        };
        let refused = |got: String| Error::invalid("the address", got, must);
        let mut entries = self.0.acquire();
        let entry = entries
            .get_mut(&base.0)
            .ok_or_else(|| refused(format!("{base}, which is not the base of an allocation")))?;
        if entry.leaked {
            return Err(refused(format!("{base}, which an earlier error leaked")));
        }
        if entry.origin.way() != way {
            let what = match entry.origin.way() {
                Way::Free => "is this process' own memory",
                Way::Close => "is another process' memory",
                Way::Unmap => "is a piece of a range",
                Way::Return => "is memory of a pool",
                Way::Never => "another library allocated",
            };
            return Err(refused(format!("{base}, which {what}")));
        }
        let taken = *entry;
        match entry.origin.times() {
            Some(times) if *times > 1 => *times -= 1,
            _ => {
                entries.remove(&base.0);
            }
        }
        Ok(taken)
    }

    /// Puts back what could not be given back, for good.
    pub fn leak(&self, base: DevicePtr, mut taken: Entry) {
        match self.0.acquire().entry(base.0) {
            btree_map::Entry::Vacant(place) => {
                place.insert(Entry {
                    leaked: true,
                    ..taken
                });
            }
            // The other times that the same handle was opened.
            btree_map::Entry::Occupied(mut place)
                if taken.origin.times().is_some_and(|times| *times > 1) =>
            {
                place.get_mut().leaked = true;
            }
            // A younger allocation at an address that was given back after all.
            btree_map::Entry::Occupied(_) => {}
        }
    }

    /// Lists live memory of a device that each device must be named for: the bases, the lengths,
    /// and what may be done with each.
    pub fn mapped_on(&self, device: DeviceId) -> Vec<(u64, u64, Access)> {
        let entries = self.0.acquire();
        let live = entries
            .iter()
            .filter(|(_, entry)| entry.device == device && !entry.leaked);
        live.filter_map(|(&base, entry)| Some((base, entry.len, entry.origin.mapped()?)))
            .collect()
    }

    /// Says whether memory of a device is mapped from a dma-buf.
    pub fn has_external(&self, device: DeviceId) -> bool {
        let entries = self.0.acquire();
        entries
            .values()
            .any(|entry| entry.device == device && matches!(entry.origin, Origin::External { .. }))
    }

    /// Says whether everything was given back.
    pub fn is_empty(&self) -> bool {
        self.0.acquire().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: DevicePtr = DevicePtr(0x10000);
    const LEN: u64 = 0x1000;
    const DEVICE: DeviceId = DeviceId(0);

    fn table(origin: Origin) -> MemoryTable {
        let table = MemoryTable::default();
        table.insert(BASE.0, LEN, DEVICE, origin);
        table
    }

    #[test]
    fn an_address_is_found_inside_its_allocation_only() {
        let table = table(Origin::Plain);
        assert!(table.find(DevicePtr(0xffff)).is_none());
        assert_eq!(table.find(BASE).map(|(range, _)| range.base), Some(BASE));
        assert_eq!(
            table.find(DevicePtr(0x10fff)).map(|(range, _)| range.base),
            Some(BASE)
        );
        assert!(table.find(DevicePtr(0x11000)).is_none());
    }

    #[test]
    fn memory_is_given_back_in_its_own_way_and_once() {
        for (origin, way) in [
            (Origin::Plain, Way::Free),
            (Origin::Opened { times: 1 }, Way::Close),
        ] {
            let table = table(origin);
            for other in [Way::Free, Way::Close, Way::Unmap, Way::Return, Way::Never] {
                assert!(
                    other == way || table.take(BASE, other).is_err(),
                    "{origin:?} by {other:?}"
                );
            }
            assert!(table.take(BASE, way).is_ok());
            assert!(table.take(BASE, way).is_err());
            assert!(table.is_empty());
        }
    }

    #[test]
    fn what_other_code_allocated_is_neither_freed_nor_closed() {
        let table = table(Origin::Adopted);
        let refused = table.take(BASE, Way::Free).expect_err("another library's");
        assert!(
            refused.to_string().contains("another library allocated"),
            "{refused}"
        );
        assert!(table.take(BASE, Way::Close).is_err());
        assert!(table.take(BASE, Way::Never).is_ok() && table.is_empty());
    }

    #[test]
    fn a_handle_opened_twice_is_closed_twice() {
        let table = MemoryTable::default();
        for _ in 0..2 {
            table.opened(BASE.0, LEN, DEVICE);
        }
        assert!(table.take(BASE, Way::Close).is_ok());
        assert!(table.take(BASE, Way::Close).is_ok());
        assert!(table.take(BASE, Way::Close).is_err());
    }

    #[test]
    fn what_leaked_stays_and_is_never_taken_again() {
        let table = table(Origin::Virtual { handle: None });
        assert_eq!(table.mapped_on(DEVICE), [(BASE.0, LEN, Access::ReadWrite)]);
        let taken = table.take(BASE, Way::Free).expect("it is there");
        table.leak(BASE, taken);
        assert!(table.take(BASE, Way::Free).is_err());
        assert!(!table.is_empty() && table.mapped_on(DEVICE).is_empty());
        assert!(table.find(BASE).is_some_and(|(_, entry)| entry.leaked));
    }

    #[test]
    fn a_close_that_failed_leaks_the_other_times_too_but_no_younger_allocation() {
        let table = table(Origin::Opened { times: 2 });
        let taken = table.take(BASE, Way::Close).expect("opened twice");
        table.leak(BASE, taken);
        assert!(
            table.take(BASE, Way::Close).is_err(),
            "nobody knows how often it is open"
        );
        // Opened anew by the driver's word.
        table.opened(BASE.0, LEN, DEVICE);
        let taken = table.take(BASE, Way::Close).expect("once");
        table.insert(BASE.0, LEN, DEVICE, Origin::Plain);
        table.leak(BASE, taken);
        assert!(
            table.take(BASE, Way::Free).is_ok(),
            "a younger allocation is not leaked"
        );
    }
}
