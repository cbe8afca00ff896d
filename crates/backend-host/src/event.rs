//! Events: a few words, in this process or in a page that others can open.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_api::{Access, DeviceId, EventHandle, EventKind, Result};
use memmap2::MmapRaw;

use crate::memory::{self, Handle};

const PAGE: u64 = 4096;

/// Words of an event: the first counts the recordings, the others say which are done.
const WORDS: usize = 64;

#[derive(Debug)]
enum Storage {
    Local(Box<[AtomicU64; WORDS]>),
    /// The words at the start of a page that several processes map.
    Shared {
        map: MmapRaw,
        file: OwnedFd,
    },
}

/// An event. Each recording has a number and, of a ring of words, one that says whether its work is
/// done: a later recording on another stream may be done first, and must not end a wait for an
/// earlier one. The stores are Release and the loads Acquire, so that a thread that sees a
/// recording done sees the work before it. An event of a process that died keeps what it had: it
/// never completes, as on a GPU.
///
/// A recording counts as done when the one that is 63 later is; nobody here records so far ahead of
/// a wait.
#[derive(Debug)]
pub struct Event {
    place: Storage,
}

impl Event {
    /// Makes an event.
    pub fn new(kind: EventKind) -> Result<Event> {
        Ok(Event {
            place: match kind {
                EventKind::Local => {
                    Storage::Local(Box::new(std::array::from_fn(|_| AtomicU64::new(0))))
                }
                EventKind::Interprocess => {
                    let file = memory::shared_file(PAGE)?;
                    Storage::Shared {
                        map: memory::map(&file, PAGE, Access::ReadWrite)?,
                        file,
                    }
                }
            },
        })
    }

    /// Opens another process' event.
    pub fn open(device: DeviceId, handle: &EventHandle) -> Result<Event> {
        let (file, _) = Handle::open("open_event", device, &handle.0)?;
        Ok(Event {
            place: Storage::Shared {
                map: memory::map(&file, PAGE, Access::ReadWrite)?,
                file,
            },
        })
    }

    /// Returns its handle; `None` for a local event.
    pub fn handle(&self) -> Option<Result<EventHandle>> {
        match &self.place {
            Storage::Local(_) => None,
            Storage::Shared { file, .. } => Some(Handle::of(file, PAGE).map(Handle::event)),
        }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        match &self.place {
            Storage::Local(words) => &words[index],
            Storage::Shared { map, .. } => {
                assert!(index < WORDS);
                // SAFETY: `add` asks for an offset within one allocation: a page has 512 words.
                let word = unsafe { map.as_ptr().cast::<AtomicU64>().add(index) };
                // SAFETY: `&*` of an `AtomicU64`: a mapping of a page is aligned, lives as long as
                // `self`, and every process touches its words as atomics.
                unsafe { &*word }
            }
        }
    }

    /// Returns the word that says whether a recording is done.
    fn done(&self, number: u64) -> &AtomicU64 {
        self.word(1 + (number % (WORDS as u64 - 1)) as usize)
    }

    /// Counts a recording and returns its number.
    pub fn record(&self) -> u64 {
        self.word(0).fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Says that the work of a recording is done.
    pub fn complete(&self, number: u64) {
        self.done(number).fetch_max(number, Ordering::AcqRel);
    }

    /// Returns the last recording's number.
    pub fn last(&self) -> u64 {
        self.word(0).load(Ordering::Acquire)
    }

    /// Says whether the work of a recording is done.
    pub fn is_complete(&self, number: u64) -> bool {
        self.done(number).load(Ordering::Acquire) >= number
    }
}
