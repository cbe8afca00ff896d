//! PyTorch's counter file: 10,000 counters in shared memory, behind a count of who has it mapped.
//!
//! | bytes | content |
//! |---|---|
//! | 0..4 | how many processes have it mapped; the one that takes it to 0 unlinks the file |
//! | 4..64 | unused |
//! | 64.. | 10,000 counters of 8 bytes: 1 for what was sent and not yet let go |
//!
//! Who sends writes 1 *before* anybody receives; who receives subtracts 1, once, when it is done.
//! Nobody ever adds.
//!
//! # Orderings
//!
//! | step | who | operation |
//! |---|---|---|
//! | grant | sender | store 1, Release |
//! | release | receiver | subtract 1 unless it is 0 or less, `AcqRel` |
//! | collect | sender | load, Acquire |
//!
//! A release pairs with the load that sees it, so what the receiver did before happens before the
//! sender's reuse. It does not order GPU work: the receiver waits for its own first. PyTorch itself
//! subtracts without an atomic operation; on the machines where GPUs are this is one instruction on
//! a word that nobody else writes.
//!
//! # What it does not cover
//!
//! A counter does not say who holds it, so what a killed receiver held stays counted. The file
//! cannot be sealed (PyTorch's own would not be either): a process of the same user that truncates
//! it makes everybody who touches it fault.
//!
//! Checked by the tests below, by `tests/processes`, and against PyTorch's own code by the
//! workspace's `tests/torch`.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU64, Ordering};

use gpu_api::{Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::shm;

/// The counters of a file.
pub const SLOTS: u32 = 10_000;
const HEADER: usize = 64;
const BYTES: usize = HEADER + SLOTS as usize * 8;

/// The release of a count, and what sees it.
const GRANT: Ordering = Ordering::Release;
const RELEASE: Ordering = Ordering::AcqRel;
const COLLECT: Ordering = Ordering::Acquire;

/// The prefix of counter files' names in every release of PyTorch. Other files in shared memory are
/// never touched, even if a message names them.
const PREFIX: &[u8] = b"/torch_";

/// The name of a counter file in shared memory: `/torch_` and then no other `/`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct CounterName(String);

impl CounterName {
    /// Checks a name.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for one that could name anything but a counter file in the directory of
    /// shared memory.
    pub fn new(bytes: &[u8]) -> Result<CounterName> {
        let good = bytes.strip_prefix(PREFIX).is_some_and(|rest| {
            !rest.is_empty()
                && rest.len() <= 240
                && rest.iter().all(|&b| b.is_ascii_graphic() && b != b'/')
        });
        if !good {
            return Err(Error::invalid(
                "the name of PyTorch's counter file",
                bytes[..bytes.len().min(64)].escape_ascii(),
                "/torch_ and up to 240 printable characters without a slash, such as /torch_4711_1804289383_0",
            ));
        }
        Ok(CounterName(bytes.iter().map(|&b| char::from(b)).collect()))
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for CounterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a release found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
#[non_exhaustive]
pub enum Released {
    /// The count went down by one.
    Yes,
    /// It was 0 or less already: somebody released what was not theirs, or one message was opened
    /// twice.
    NothingLeft,
}

/// A mapped counter file. Dropping it takes this process out of the file's count, and unlinks the
/// file with the last.
pub struct CounterFile {
    map: MmapRaw,
    name: CounterName,
    pid: u32,
    /// This process is in the file's count.
    joined: bool,
}

impl CounterFile {
    /// Makes a file whose counters are all 0, under a name of the form that PyTorch gives its own.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when shared memory or file descriptors have run out.
    pub fn create() -> Result<CounterFile> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let failed = |call, e: rustix::io::Errno| {
            Error::system(call, "free /dev/shm or raise RLIMIT_NOFILE", e)
        };
        loop {
            let mut random = [0; 4];
            rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
                .map_err(|e| failed("getrandom", e))?;
            let (pid, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
            let name = CounterName(format!(
                "/torch_{pid}_{}_{number}",
                u32::from_ne_bytes(random) >> 1
            ));
            let flags = shm::OFlags::CREATE | shm::OFlags::EXCL | shm::OFlags::RDWR;
            let file = match shm::open(name.as_str(), flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => file,
                // Left by a process of the same number that was killed.
                Err(rustix::io::Errno::EXIST) => continue,
                Err(e) => return Err(failed("shm_open of a counter file", e)),
            };
            // Allocated, not only extended: a full /dev/shm is an error here and not a fault at the
            // first count.
            let sized =
                rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, BYTES as u64)
                    .map_err(|e| failed("fallocate of a counter file", e))
                    .and_then(|()| CounterFile::map(&file, name.clone()));
            match sized {
                Ok(mut made) => {
                    made.header().store(1, GRANT);
                    made.joined = true;
                    return Ok(made);
                }
                Err(error) => {
                    let _ = shm::unlink(name.as_str());
                    return Err(error);
                }
            }
        }
    }

    /// Maps another process' file and joins its count.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when it cannot be opened: its maker ended, or its `/dev/shm` is another
    /// one or another user's. [`Error::Invalid`] when it is no counter file or its last user is
    /// leaving it.
    pub fn attach(name: &CounterName) -> Result<CounterFile> {
        let remedy = "let the sender live until everything was received, and share /dev/shm and the user between both";
        // Where the directory is everybody's, so is a link in it.
        let flags = shm::OFlags::RDWR | shm::OFlags::from_bits_retain(OFlags::NOFOLLOW.bits());
        let file = shm::open(name.as_str(), flags, Mode::empty())
            .map_err(|e| Error::system("shm_open of PyTorch's counter file", remedy, e))?;
        let stat = rustix::fs::fstat(&file)
            .map_err(|e| Error::system("fstat of PyTorch's counter file", remedy, e))?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !is_file || stat.st_size < BYTES as i64 {
            let got = format!("{} bytes long", stat.st_size);
            return Err(Error::invalid(
                "PyTorch's counter file",
                got,
                "a file of 80064 bytes",
            ));
        }
        // Its owner can truncate it, and an access then faults.
        let (owner, ours) = (stat.st_uid, rustix::process::geteuid().as_raw());
        if owner != ours {
            let got = format!("of the user {owner}");
            return Err(Error::invalid(
                "PyTorch's counter file",
                got,
                "of this process' own user",
            ));
        }
        let mut file = CounterFile::map(&file, name.clone())?;
        let before = file.header().fetch_add(1, RELEASE);
        if before <= 0 || before == i32::MAX {
            file.header().fetch_sub(1, RELEASE);
            let got = format!("mapped by {before} processes");
            return Err(Error::invalid(
                "PyTorch's counter file",
                got,
                "mapped by its maker at least",
            ));
        }
        file.joined = true;
        Ok(file)
    }

    /// Leaves the file's count, as PyTorch does after each decrease, and keeps the mapping.
    ///
    /// Who stayed in the count and were killed would leave the file behind for good. Who has it
    /// mapped does not need its name.
    #[must_use]
    pub fn leave(mut self) -> CounterFile {
        self.end();
        self
    }

    fn end(&mut self) {
        // A forked child has the parent's mapping, and never joined the count.
        if self.pid == std::process::id()
            && std::mem::take(&mut self.joined)
            && self.header().fetch_sub(1, RELEASE) == 1
        {
            // Gone already where somebody swept /dev/shm: that was the purpose.
            let _ = shm::unlink(self.name.as_str());
        }
    }

    fn map(file: &OwnedFd, name: CounterName) -> Result<CounterFile> {
        let map = MmapOptions::new().len(BYTES).map_raw(file).map_err(|e| {
            Error::system(
                "mmap of a counter file",
                "raise RLIMIT_AS or vm.max_map_count",
                e,
            )
        })?;
        Ok(CounterFile {
            map,
            name,
            pid: std::process::id(),
            joined: false,
        })
    }

    fn header(&self) -> &AtomicI32 {
        // SAFETY: `AtomicI32::from_ptr` asks for
        // - alignment: the mapping starts at a page;
        // - four bytes valid for as long as the reference: `self.map` has `BYTES` and is borrowed;
        // - no data race: every process touches this word with atomic operations alone.
        unsafe { AtomicI32::from_ptr(self.map.as_mut_ptr().cast()) }
    }

    fn word(&self, slot: u32) -> &AtomicI64 {
        assert!(slot < SLOTS, "a slot is checked where it comes in");
        // SAFETY: `add` asks for an offset inside the mapping: `HEADER + 8 * slot + 8 <= BYTES` for
        // every such slot.
        let at = unsafe { self.map.as_mut_ptr().add(HEADER + slot as usize * 8) };
        // SAFETY: `AtomicI64::from_ptr` asks for
        // - alignment: a page, 64 and a multiple of 8;
        // - eight bytes valid for as long as the reference: as above, and `self.map` is borrowed;
        // - no data race: we touch it with atomic operations alone. PyTorch subtracts by one
        //   instruction of its own, another process' access, which the language does not see.
        unsafe { AtomicI64::from_ptr(at.cast()) }
    }

    /// Returns its name.
    pub fn name(&self) -> &CounterName {
        &self.name
    }

    /// Returns how many have it mapped.
    pub fn users(&self) -> i32 {
        self.header().load(COLLECT)
    }

    /// Sets a counter to one send that nobody has let go of.
    ///
    /// # Panics
    ///
    /// If `slot` is not below [`SLOTS`], as in the others.
    pub fn grant(&self, slot: u32) {
        self.word(slot).store(1, GRANT);
    }

    /// Decreases a counter by one, unless nothing is left of it.
    pub fn release(&self, slot: u32) -> Released {
        let down = |count: i64| if count > 0 { Some(count - 1) } else { None };
        match self.word(slot).fetch_update(RELEASE, COLLECT, down) {
            Ok(_) => Released::Yes,
            Err(_) => Released::NothingLeft,
        }
    }

    /// Reads a counter.
    pub fn count(&self, slot: u32) -> i64 {
        self.word(slot).load(COLLECT)
    }
}

impl Drop for CounterFile {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for CounterFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CounterFile")
            .field("name", &self.name)
            .field("users", &self.users())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(file: &CounterName) -> std::path::PathBuf {
        std::path::Path::new("/dev/shm").join(&file.as_str()[1..])
    }

    #[test]
    fn a_name_names_one_file_of_shared_memory_or_is_refused() {
        for good in ["/torch_1_2_3", "/torch_1_2"] {
            assert_eq!(
                CounterName::new(good.as_bytes()).expect("good").as_str(),
                good
            );
        }
        for bad in [
            "",
            "/",
            "torch_1",
            "/torch_",
            "/torch_a/b",
            "/torch_../x",
            "/torch_a\0b",
            "/torch_a b",
            "//torch_1",
            "/sem.x",
        ] {
            assert!(CounterName::new(bad.as_bytes()).is_err(), "{bad:?}");
        }
        assert!(CounterName::new(&[&b"/torch_"[..], &[b'a'; 240]].concat()).is_ok());
        assert!(CounterName::new(&[&b"/torch_"[..], &[b'a'; 241]].concat()).is_err());
    }

    #[test]
    fn the_bytes_are_pytorchs() {
        let file = CounterFile::create().expect("room");
        file.grant(0);
        file.grant(SLOTS - 1);
        let bytes = std::fs::read(path(file.name())).expect("it is there");
        assert_eq!(bytes.len(), 80_064);
        assert_eq!(bytes[..4], 1i32.to_ne_bytes());
        assert_eq!(bytes[64..72], 1i64.to_ne_bytes());
        assert_eq!(bytes[80_056..], 1i64.to_ne_bytes());
        assert!(bytes[72..80_056].iter().all(|&b| b == 0));
    }

    #[test]
    fn the_last_to_leave_unlinks() {
        let file = CounterFile::create().expect("room");
        let name = file.name().clone();
        let other = CounterFile::attach(&name).expect("it is there");
        assert_eq!(file.users(), 2);
        drop(file);
        assert!(path(&name).exists());
        drop(other);
        assert!(!path(&name).exists());
        assert!(CounterFile::attach(&name).is_err());
    }

    #[test]
    fn who_left_still_counts_down_and_is_missed_by_nobody() {
        let file = CounterFile::create().expect("room");
        file.grant(7);
        let other = CounterFile::attach(file.name())
            .expect("it is there")
            .leave();
        assert_eq!(file.users(), 1);
        let name = file.name().clone();
        assert_eq!((other.release(7), file.count(7)), (Released::Yes, 0));
        drop(other);
        assert_eq!((file.users(), path(&name).exists()), (1, true));
        drop(file);
        assert!(!path(&name).exists());
    }

    #[test]
    fn a_count_goes_down_once_for_each_release_and_never_below_nothing() {
        let file = CounterFile::create().expect("room");
        file.grant(7);
        let other = CounterFile::attach(file.name()).expect("it is there");
        assert_eq!(other.release(7), Released::Yes);
        assert_eq!(file.count(7), 0);
        assert_eq!(other.release(7), Released::NothingLeft);
        assert_eq!(file.count(7), 0);
    }

    #[test]
    fn a_file_that_everybody_left_is_not_joined() {
        let file = CounterFile::create().expect("room");
        let name = file.name().clone();
        file.header().store(0, GRANT);
        assert!(CounterFile::attach(&name).is_err());
        assert_eq!(file.users(), 0);
        file.header().store(1, GRANT);
    }

    #[test]
    fn a_link_is_not_followed() {
        let file = CounterFile::create().expect("room");
        let name =
            CounterName::new(format!("{}_link", file.name().as_str()).as_bytes()).expect("good");
        std::os::unix::fs::symlink(path(file.name()), path(&name)).expect("room");
        let attached = CounterFile::attach(&name);
        std::fs::remove_file(path(&name)).expect("it is there");
        assert!(
            matches!(attached, Err(Error::System { .. })),
            "{attached:?}"
        );
        assert_eq!(file.users(), 1);
    }

    #[test]
    fn another_users_file_is_refused() {
        let file = CounterFile::create().expect("room");
        if let Err(error) = std::os::unix::fs::chown(path(file.name()), Some(65_534), None) {
            eprintln!(
                "ignored: only who may give files away can make one of another user's: {error}"
            );
            return;
        }
        let attached = CounterFile::attach(file.name());
        assert!(
            matches!(attached, Err(Error::Invalid { .. })),
            "{attached:?}"
        );
        assert_eq!(file.users(), 1);
    }

    #[test]
    fn a_short_file_is_refused() {
        let file = CounterFile::create().expect("room");
        let name =
            CounterName::new(format!("{}_short", file.name().as_str()).as_bytes()).expect("good");
        std::fs::write(path(&name), [1; 100]).expect("room");
        let attached = CounterFile::attach(&name);
        std::fs::remove_file(path(&name)).expect("it is there");
        assert!(
            matches!(attached, Err(Error::Invalid { .. })),
            "{attached:?}"
        );
    }
}
