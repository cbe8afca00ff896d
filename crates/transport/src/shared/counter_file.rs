//! The counter file: one participant's slots, dirty words and timeline words, shared by the
//! producer and it alone.
//!
//! ```text
//! 0                 header, 4,096 bytes: magic, version, slots (for people with a debugger; no code relies on it)
//! 4,096             512 timeline words
//! 8,192             a dirty word for each group of 64 slots, padded to 4,096 bytes
//! 8,192 + padded    the slots, 8 bytes each
//! ```
//!
//! The file is a memfd sealed against shrinking, growing and further seals, so that neither side
//! can make the other fault by truncating it. Pages that no slot of was ever granted take no
//! memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use gpu_api::{Error, Gpu, HostPtr, Result, WordPtr};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::SealFlags;

use crate::shared::dirty::Dirty;
use crate::shared::sealed_file;
use crate::shared::slot::Slot;
use crate::shared::timeline::Timeline;
use crate::shared::word::Word;

/// Slots that share a dirty word.
pub const GROUP: u32 = 64;
/// Timeline words in a file.
pub const TIMELINES: u32 = 512;
/// Slots in a participant's first file.
pub const FIRST_SLOTS: u32 = 8_192;
/// Slots in its largest.
pub const MOST_SLOTS: u32 = 65_536;

const PAGE: usize = 4_096;
const MAGIC: u64 = u64::from_le_bytes(*b"GIPCcnt1");

/// Where slots and dirty words lie: in shared memory, or in a test's own.
pub trait SlotFile {
    /// The atomic that they are made of.
    type Word: Word;
    /// Returns the slots: a multiple of [`GROUP`] of them.
    fn slots(&self) -> &[Slot<Self::Word>];
    /// Returns the dirty words, one for each group of slots.
    fn dirty(&self) -> &[Dirty<Self::Word>];
}

/// A counter file, mapped.
#[derive(Debug)]
pub struct CounterFile {
    map: MmapRaw,
    file: OwnedFd,
    slots: u32,
    /// The first slot's word, and how many words there are: asked for at every step of a lease.
    first_slot: usize,
    words: usize,
}

impl CounterFile {
    /// Makes a file with `slots` slots (producer).
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the kernel has no descriptor or no memory left.
    pub fn create(slots: u32) -> Result<CounterFile> {
        debug_assert!(slots.is_multiple_of(GROUP) && slots <= MOST_SLOTS);
        let file = sealed_file::empty("gpu-ipc-counters")?;
        rustix::fs::ftruncate(&file, bytes_of(slots) as u64)
            .map_err(|e| Error::system("ftruncate of a counter file", "free memory", e))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| Error::system("sealing a counter file", "use Linux 3.17 or later", e))?;
        let counters = Self::map(file.into(), slots)?;
        counters
            .header(0)
            .store(MAGIC, std::sync::atomic::Ordering::Relaxed);
        counters
            .header(1)
            .store(u64::from(slots), std::sync::atomic::Ordering::Relaxed);
        Ok(counters)
    }

    /// Maps a file that the producer sent (consumer).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a file that is no counter file: of another size, or not sealed.
    pub fn open(file: OwnedFd, slots: u32) -> Result<CounterFile> {
        if slots == 0 || slots > MOST_SLOTS || !slots.is_multiple_of(GROUP) {
            return Err(Error::invalid(
                "the slot count of a counter file",
                slots,
                "a multiple of 64 up to 65,536",
            ));
        }
        let size = rustix::fs::fstat(&file)
            .map_err(|e| Error::system("fstat of a counter file", "report this", e))?
            .st_size;
        if size != bytes_of(slots) as i64 {
            return Err(Error::invalid(
                "the size of a counter file",
                size,
                "what its slots take",
            ));
        }
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::invalid(
                "a counter file's seals",
                format!("{seals:?}"),
                "sealed against shrinking",
            ));
        }
        Self::map(file, slots)
    }

    fn map(file: OwnedFd, slots: u32) -> Result<CounterFile> {
        let map = MmapOptions::new()
            .len(bytes_of(slots))
            .map_raw(&file)
            .map_err(|e| {
                Error::system(
                    "mmap of a counter file",
                    "raise RLIMIT_AS or vm.max_map_count",
                    e,
                )
            })?;
        Ok(CounterFile {
            map,
            file,
            slots,
            first_slot: slot_word(slots, 0),
            words: bytes_of(slots) / 8,
        })
    }

    /// Returns the descriptor, to send it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the first byte, to register the file with a driver.
    pub fn start(&self) -> HostPtr {
        HostPtr(self.map.as_ptr() as usize)
    }

    /// Registers the file with the driver, so that streams may write and await its words; `None` on
    /// a device whose streams cannot.
    ///
    /// # Errors
    ///
    /// The driver's error.
    ///
    /// # Safety
    ///
    /// The file stays mapped until `unregister_words` has ended the registration of its
    /// [`start`](CounterFile::start).
    pub unsafe fn register(&self, gpu: &Gpu) -> Result<Option<WordPtr>> {
        if !gpu.caps().stream_writes {
            return Ok(None);
        }
        let bytes = bytes_of(self.slots);
        // SAFETY: `register_words` asks for bytes that stay mapped until `unregister_words`: these
        // are the mapping's own, and the caller says that it stays.
        unsafe { gpu.backend().register_words(self.start(), bytes) }.map(Some)
    }

    /// Counts the slots.
    pub fn slot_count(&self) -> u32 {
        self.slots
    }

    /// Returns a slot.
    ///
    /// # Panics
    ///
    /// If there is no such slot: indices come from the private ledger or were checked.
    #[inline(always)]
    pub fn slot(&self, index: u32) -> &Slot<AtomicU64> {
        &self.slots()[index as usize]
    }

    /// Returns the dirty word of a slot's group.
    ///
    /// # Panics
    ///
    /// As [`slot`](CounterFile::slot).
    #[inline(always)]
    pub fn dirty_of(&self, slot: u32) -> &Dirty<AtomicU64> {
        &self.dirty()[(slot / GROUP) as usize]
    }

    /// Returns a timeline word.
    ///
    /// # Panics
    ///
    /// If `index` is not below [`TIMELINES`].
    pub fn timeline(&self, index: u32) -> &Timeline<AtomicU64> {
        assert!(index < TIMELINES);
        let word = self.word(timeline_word(index));
        // SAFETY: `&*` of a `Timeline<AtomicU64>`, which is transparent over the `AtomicU64` that
        // `word` points to; `word` says that it is valid, aligned, and shared only as atomics.
        unsafe { &*word.cast::<Timeline<AtomicU64>>() }
    }

    fn header(&self, index: usize) -> &AtomicU64 {
        let word = self.word(index);
        // SAFETY: `&*` of an `AtomicU64`; `word` says that it is valid, aligned, and shared only as
        // atomics.
        unsafe { &*word }
    }

    /// Points at a 64-bit word: inside the mapping, which lives as long as `self`; aligned, because
    /// mappings start at a page; and touched as an atomic by everyone, the other process included.
    fn word(&self, index: usize) -> *const AtomicU64 {
        assert!(index < self.words);
        // SAFETY: `add` asks for an offset within one allocation: just asserted.
        unsafe { self.map.as_ptr().cast::<AtomicU64>().add(index) }
    }
}

impl SlotFile for CounterFile {
    type Word = AtomicU64;

    #[inline(always)]
    fn slots(&self) -> &[Slot<AtomicU64>] {
        let first = self.word(self.first_slot).cast::<Slot<AtomicU64>>();
        // SAFETY: `from_raw_parts` asks for `slots` valid, aligned values, shared only as their
        // type allows, for as long as `self`: `Slot` is transparent over an `AtomicU64`, the file
        // is as long as its slots need (a test of `bytes_of` says so), `word` says the rest.
        unsafe { std::slice::from_raw_parts(first, self.slots as usize) }
    }

    #[inline]
    fn dirty(&self) -> &[Dirty<AtomicU64>] {
        let first = self.word(dirty_word(0)).cast::<Dirty<AtomicU64>>();
        // SAFETY: as in `slots`, with a dirty word for each group.
        unsafe { std::slice::from_raw_parts(first, (self.slots / GROUP) as usize) }
    }
}

/// Returns a timeline word's index from the start of the file, in words.
pub const fn timeline_word(index: u32) -> usize {
    PAGE / 8 + index as usize
}

/// Returns the index of the dirty word of a slot's group, in words.
pub const fn dirty_word(slot: u32) -> usize {
    2 * PAGE / 8 + (slot / GROUP) as usize
}

/// Returns a slot's index, in words.
pub const fn slot_word(slots: u32, index: u32) -> usize {
    2 * PAGE / 8 + dirty_bytes(slots) / 8 + index as usize
}

/// Returns a file's bytes: a multiple of the page size.
pub const fn bytes_of(slots: u32) -> usize {
    2 * PAGE + dirty_bytes(slots) + (slots as usize * 8).next_multiple_of(PAGE)
}

const fn dirty_bytes(slots: u32) -> usize {
    ((slots / GROUP) as usize * 8).next_multiple_of(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::slot::{Claim, Generation, Seen};

    #[test]
    fn both_mappings_of_a_file_are_one() {
        let ours = CounterFile::create(FIRST_SLOTS).expect("a memfd");
        let theirs = CounterFile::open(
            rustix::io::dup(ours.fd()).expect("a descriptor"),
            FIRST_SLOTS,
        )
        .expect("valid");
        let g = Generation::ZERO.next();
        ours.slot(8_191).grant(g);
        assert_eq!(theirs.slot(8_191).claim(g), Claim::Held);
        theirs.slot(8_191).release(g);
        theirs.dirty_of(8_191).mark();
        assert!(ours.dirty_of(8_128).take());
        assert_eq!(ours.slot(8_191).read(g), Seen::Released);
        ours.timeline(TIMELINES - 1).reach(9);
        assert_eq!(theirs.timeline(TIMELINES - 1).poison(), Some(9));
    }

    #[test]
    fn a_file_of_another_size_or_without_seals_is_refused() {
        let file = CounterFile::create(FIRST_SLOTS).expect("a memfd");
        let dup = || rustix::io::dup(file.fd()).expect("a descriptor");
        assert!(CounterFile::open(dup(), 64).is_err());
        assert!(CounterFile::open(dup(), 65).is_err());
        assert!(CounterFile::open(dup(), u32::MAX).is_err());
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let plain = rustix::fs::memfd_create("plain", flags).expect("a memfd");
        rustix::fs::ftruncate(&plain, bytes_of(64) as u64).expect("memory");
        let error = CounterFile::open(plain, 64).expect_err("unsealed");
        assert!(
            error.to_string().contains("sealed against shrinking"),
            "{error}"
        );
    }

    #[test]
    fn nobody_can_truncate_it() {
        let file = CounterFile::create(64).expect("a memfd");
        assert_eq!(
            rustix::fs::ftruncate(file.fd(), 0),
            Err(rustix::io::Errno::PERM)
        );
    }

    #[test]
    fn parts_do_not_overlap() {
        for slots in [64, FIRST_SLOTS, MOST_SLOTS] {
            assert_eq!(timeline_word(TIMELINES - 1) + 1, dirty_word(0));
            assert!(dirty_word(slots - 1) < slot_word(slots, 0));
            assert!(slot_word(slots, slots - 1) < bytes_of(slots) / 8);
            assert_eq!(bytes_of(slots) % 4096, 0);
        }
    }
}
