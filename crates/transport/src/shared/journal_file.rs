//! The journal of a pool: a file of [entries](crate::shared::journal), one for each block.
//!
//! ```text
//! 0        magic
//! 8        the address at which the holder mapped the pool; 0 if there was none
//! 4,096    the entries, 32 bytes each
//! ```
//!
//! The file is a memfd sealed against shrinking, growing and further seals, so that no process that
//! has it can make another one fault.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_api::{Error, Gpu, HostPtr, Result, WordPtr};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::SealFlags;

use crate::shared::journal::{Entry, SEAL_WORD, WORDS};
use crate::shared::sealed_file;

const PAGE: u64 = 4_096;
const MAGIC: [u8; 8] = *b"GIPCjnl1";
const ENTRY_BYTES: u64 = WORDS as u64 * 8;

/// The least bytes of a journal: 128 blocks.
pub const LEAST_JOURNAL: u64 = 2 * PAGE;
/// The most bytes of a journal: 2,097,024 blocks.
pub const MOST_JOURNAL: u64 = 64 << 20;

/// Returns the bytes of a journal for so many blocks.
pub const fn bytes_for(blocks: u32) -> u64 {
    let entries = (blocks as u64 * ENTRY_BYTES).next_multiple_of(PAGE);
    PAGE + if entries < PAGE { PAGE } else { entries }
}

/// Returns how many blocks a journal of so many bytes has.
pub const fn blocks_of(bytes: u64) -> u32 {
    (bytes.saturating_sub(PAGE) / ENTRY_BYTES) as u32
}

/// Refuses a size that no journal has.
///
/// # Errors
///
/// [`Error::Invalid`] for less than two pages, more than 64 MiB, and for a part of a page.
pub fn check_bytes(bytes: u64) -> Result<()> {
    let fits = (LEAST_JOURNAL..=MOST_JOURNAL).contains(&bytes) && bytes.is_multiple_of(PAGE);
    if fits {
        return Ok(());
    }
    Err(Error::Invalid {
        what: "the bytes of a pool's journal",
        got: bytes.to_string(),
        must: "a multiple of 4,096 from 8,192 to 67,108,864",
    })
}

/// Makes a journal without a whole block.
///
/// # Errors
///
/// As [`check_bytes`]; [`Error::System`] when the kernel has no descriptor or no memory left.
pub fn create(bytes: u64) -> Result<OwnedFd> {
    check_bytes(bytes)?;
    let file = sealed_file::empty("gpu-ipc-journal")?;
    file.set_len(bytes)
        .and_then(|()| file.write_all_at(&MAGIC, 0))
        .map_err(|e| Error::system("writing a pool's journal", "free memory", e))?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(|e| Error::system("sealing a pool's journal", "use Linux 3.17 or later", e))?;
    Ok(file.into())
}

/// A journal, mapped.
#[derive(Debug)]
pub struct JournalFile {
    map: MmapRaw,
    file: OwnedFd,
    bytes: u64,
    writable: bool,
}

impl JournalFile {
    /// Maps a journal that a broker sent: writable for a holder, else only to be read.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a file of another size, or one that is not sealed.
    pub fn open(file: OwnedFd, bytes: u64, writable: bool) -> Result<JournalFile> {
        check_bytes(bytes)?;
        let invalid = |what, got: String, must| Error::Invalid { what, got, must };
        let size = rustix::fs::fstat(&file)
            .map_err(|e| Error::system("fstat of a pool's journal", "report this", e))?
            .st_size;
        if u64::try_from(size) != Ok(bytes) {
            return Err(invalid(
                "the size of a pool's journal",
                size.to_string(),
                "what its manifest says",
            ));
        }
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err(invalid(
                "a journal's seals",
                format!("{seals:?}"),
                "sealed against shrinking",
            ));
        }
        let mut options = MmapOptions::new();
        options.len(bytes as usize);
        let map = if writable {
            options.map_raw(&file)
        } else {
            options.map_raw_read_only(&file)
        };
        let map = map.map_err(|e| {
            Error::system(
                "mmap of a pool's journal",
                "raise RLIMIT_AS or vm.max_map_count",
                e,
            )
        })?;
        Ok(JournalFile {
            map,
            file,
            bytes,
            writable,
        })
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the first byte, to end its registration.
    pub fn start(&self) -> HostPtr {
        HostPtr(self.map.as_ptr() as usize)
    }

    /// Registers the file with the driver, so that streams may write its seals; `None` on a device
    /// whose streams cannot.
    ///
    /// # Errors
    ///
    /// The driver's error.
    ///
    /// # Safety
    ///
    /// The file stays mapped until `unregister_words` has ended the registration of its
    /// [`start`](JournalFile::start).
    pub unsafe fn register(&self, gpu: &Gpu) -> Result<Option<WordPtr>> {
        if !gpu.caps().stream_writes || !self.writable {
            return Ok(None);
        }
        // SAFETY: `register_words` asks for bytes that stay mapped until `unregister_words`: these
        // are the mapping's own, and the caller says that it stays.
        unsafe {
            gpu.backend()
                .register_words(self.start(), self.bytes as usize)
        }
        .map(Some)
    }

    /// Says whether the header is a journal's.
    pub fn is_sound(&self) -> bool {
        self.word(0).load(Ordering::Relaxed) == u64::from_le_bytes(MAGIC)
    }

    /// Makes it a journal without a whole block, whatever it was.
    ///
    /// # Panics
    ///
    /// If it is mapped only to be read.
    pub fn reset(&self) {
        assert!(self.writable, "a reader's journal");
        for word in 0..(self.bytes / 8) as usize {
            self.word(word).store(0, Ordering::Relaxed);
        }
        self.word(0)
            .store(u64::from_le_bytes(MAGIC), Ordering::Relaxed);
    }

    /// Returns the address at which the last holder mapped the pool; 0 for none.
    pub fn address(&self) -> u64 {
        self.word(1).load(Ordering::Relaxed)
    }

    /// Notes the address at which the pool is mapped.
    ///
    /// # Panics
    ///
    /// If it is mapped only to be read.
    pub fn set_address(&self, address: u64) {
        assert!(self.writable, "a reader's journal");
        self.word(1).store(address, Ordering::Relaxed);
    }

    /// Returns the entries. Those of a reader's mapping may be looked at alone.
    pub fn entries(&self) -> &[Entry<AtomicU64>] {
        let first: *const AtomicU64 = self.word(PAGE as usize / 8);
        let count = blocks_of(self.bytes) as usize;
        // SAFETY: `from_raw_parts` asks for `count` valid, aligned values, shared only as their type
        // allows, for as long as `self`: an `Entry` is `repr(C)` over four `AtomicU64`, the file has
        // room for as many (a test of `blocks_of` says so), and `word` says the rest.
        unsafe { std::slice::from_raw_parts(first.cast::<Entry<AtomicU64>>(), count) }
    }

    /// Points at a 64-bit word: inside the mapping, which lives as long as `self`; aligned, because
    /// mappings start at a page; and touched as an atomic by everyone, the other process included.
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!((index as u64) < self.bytes / 8);
        // SAFETY: `add` asks for an offset within one allocation: just asserted.
        let word = unsafe { self.map.as_ptr().cast::<AtomicU64>().add(index) };
        // SAFETY: `&*` of an `AtomicU64` that is valid and aligned, as said above, and shared only
        // as an atomic.
        unsafe { &*word }
    }
}

/// Returns the index of a block's seal from the start of the file, in words.
pub const fn seal_word(block: u32) -> usize {
    PAGE as usize / 8 + block as usize * WORDS + SEAL_WORD
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::journal::Key;

    fn pair(blocks: u32) -> (JournalFile, JournalFile) {
        let file = create(bytes_for(blocks)).expect("a memfd");
        let again = rustix::io::dup(&file).expect("a descriptor");
        let open = |file, writable| JournalFile::open(file, bytes_for(blocks), writable);
        (
            open(file, true).expect("a journal"),
            open(again, false).expect("a journal"),
        )
    }

    #[test]
    fn both_mappings_of_a_journal_are_one() {
        let (holder, reader) = pair(200);
        assert!(reader.is_sound() && reader.entries().len() >= 200);
        let (entry, last) = (&holder.entries()[199], &reader.entries()[199]);
        entry.invalidate(1);
        entry.seal_here(entry.key(199, 1, Key([3; 16])));
        assert_eq!(last.look(199).map(|found| found.key), Some(Key([3; 16])));
        assert_eq!(
            holder.word(seal_word(199)).load(Ordering::Relaxed),
            1,
            "the word that a stream writes"
        );
        holder.set_address(77);
        assert_eq!(reader.address(), 77);
        holder.reset();
        assert!(holder.is_sound() && last.look(199).is_none() && reader.address() == 0);
    }

    #[test]
    fn the_entries_fit_into_the_file() {
        for blocks in [0, 1, 127, 128, 129, 1 << 16] {
            let bytes = bytes_for(blocks);
            assert!(blocks_of(bytes) >= blocks);
            assert!(PAGE + u64::from(blocks_of(bytes)) * ENTRY_BYTES <= bytes);
            check_bytes(bytes).expect("a journal's size");
        }
        assert_eq!(blocks_of(MOST_JOURNAL), 2_097_024);
        assert_eq!(blocks_of(0), 0);
    }

    #[test]
    fn a_file_that_is_no_journal_is_refused_by_name() {
        for bytes in [0, PAGE, LEAST_JOURNAL + 1, MOST_JOURNAL + PAGE] {
            let error = create(bytes).expect_err("no journal's size").to_string();
            assert!(error.contains("multiple of 4,096"), "{error}");
        }
        let other = create(LEAST_JOURNAL).expect("a memfd");
        let error = JournalFile::open(other, 2 * LEAST_JOURNAL, true).expect_err("shorter");
        assert!(error.to_string().contains("what its manifest says"));
        let open = sealed_file::empty("open").expect("a memfd");
        open.set_len(LEAST_JOURNAL).expect("room");
        let error = JournalFile::open(open.into(), LEAST_JOURNAL, true).expect_err("not sealed");
        assert!(error.to_string().contains("sealed against shrinking"));
    }
}
