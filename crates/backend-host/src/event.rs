//! Events: two numbers, in this process or in a page that others can open.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_api::{Access, DeviceId, EventHandle, EventKind, Result};
use memmap2::MmapRaw;

use crate::memory::{self, Handle};

const PAGE: u64 = 4096;

#[derive(Debug)]
struct Counters {
    recorded: AtomicU64,
    completed: AtomicU64,
}

#[derive(Debug)]
enum Place {
    Local(Counters),
    /// The two words at the start of a page that several processes map.
    Shared {
        map: MmapRaw,
        file: OwnedFd,
    },
}

/// An event. `recorded` counts the recordings, `completed` is the last of them whose work is done: who waits compares
/// the two. The stores are Release and the loads Acquire, so that who sees an event complete sees the work before it.
/// An event of a process that died keeps the numbers that it had: it never completes, as on a GPU.
#[derive(Debug)]
pub struct Event {
    place: Place,
}

impl Event {
    /// Makes an event.
    pub fn new(kind: EventKind) -> Result<Event> {
        Ok(Event {
            place: match kind {
                EventKind::Local => {
                    Place::Local(Counters { recorded: AtomicU64::new(0), completed: AtomicU64::new(0) })
                }
                EventKind::Interprocess => {
                    let file = memory::shared_file(PAGE)?;
                    Place::Shared { map: memory::map(&file, PAGE, Access::ReadWrite)?, file }
                }
            },
        })
    }

    /// Opens another process' event.
    pub fn open(device: DeviceId, handle: &EventHandle) -> Result<Event> {
        let (file, _) = Handle::open("open_event", device, &handle.0)?;
        Ok(Event { place: Place::Shared { map: memory::map(&file, PAGE, Access::ReadWrite)?, file } })
    }

    /// Returns its handle; `None` for a local event.
    pub fn handle(&self) -> Option<Result<EventHandle>> {
        match &self.place {
            Place::Local(_) => None,
            Place::Shared { file, .. } => Some(Handle::of(file, PAGE).map(Handle::event)),
        }
    }

    fn recorded(&self) -> &AtomicU64 {
        match &self.place {
            Place::Local(counters) => &counters.recorded,
            Place::Shared { map, .. } => {
                // SAFETY: `&*` of an `AtomicU64`: a mapping of a page is aligned and long enough for two, lives as long
                // as `self`, and every process touches its words as atomics.
                unsafe { &*map.as_ptr().cast::<AtomicU64>() }
            }
        }
    }

    fn completed(&self) -> &AtomicU64 {
        match &self.place {
            Place::Local(counters) => &counters.completed,
            Place::Shared { map, .. } => {
                // SAFETY: `add` asks for an offset within one allocation: the second word of a page.
                let word = unsafe { map.as_ptr().cast::<AtomicU64>().add(1) };
                // SAFETY: as in `recorded`.
                unsafe { &*word }
            }
        }
    }

    /// Counts a recording and returns its number.
    pub fn record(&self) -> u64 {
        self.recorded().fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Says that the work of a recording is done.
    pub fn complete(&self, number: u64) {
        self.completed().fetch_max(number, Ordering::AcqRel);
    }

    /// Returns the last recording's number.
    pub fn last(&self) -> u64 {
        self.recorded().load(Ordering::Acquire)
    }

    /// Says whether the work of a recording is done.
    pub fn is_complete(&self, number: u64) -> bool {
        self.completed().load(Ordering::Acquire) >= number
    }
}
