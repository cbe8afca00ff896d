//! The way of counting that PyTorch has, in our own words: what a release and a drop cost without a
//! ledger.
//!
//! A counter for each send lies in a file that is known by name. The consumer opens it by name at
//! every release, maps it, takes one off, and unmaps it. The producer puts what is still counted
//! into limbo, and looks through all of limbo at every drop.

use crate::failure::Result;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicI64, Ordering};

use rustix::fs::{Mode, OFlags, open};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Counters in a file.
const COUNTERS: usize = 10_000;
const BYTES: usize = COUNTERS * 8;

/// A file of counters.
#[derive(Debug)]
struct Counters {
    path: PathBuf,
    start: *mut AtomicI64,
}

/// What was sent, as its producer has it.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    file: usize,
    counter: usize,
}

/// A producer.
#[derive(Debug)]
pub struct Baseline {
    files: Vec<Counters>,
    next: usize,
    limbo: Vec<Sent>,
}

impl Counters {
    fn create(number: usize) -> io::Result<Counters> {
        // Shared memory by name, as `shm_open` has it.
        let path = PathBuf::from(format!(
            "/dev/shm/gpu-ipc-bench-{}-{number}",
            std::process::id()
        ));
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)?;
        file.set_len(BYTES as u64)?;
        Ok(Counters {
            start: map(&file)?,
            path,
        })
    }

    fn counter(&self, index: usize) -> &AtomicI64 {
        // SAFETY: `add` asks for an index inside the mapping: `share` counts to `COUNTERS`.
        let counter = unsafe { self.start.add(index) };
        // SAFETY: the mapping is aligned, zeroed at first, and lives as long as `self`; all reach
        // it by atomics.
        unsafe { &*counter }
    }
}

fn map(file: impl std::os::fd::AsFd) -> io::Result<*mut AtomicI64> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: `mmap` of a null address takes free addresses only.
    let start = unsafe {
        mmap(
            ptr::null_mut(),
            BYTES,
            protection,
            MapFlags::SHARED,
            file,
            0,
        )
    }?;
    Ok(start.cast())
}

impl Drop for Counters {
    fn drop(&mut self) {
        // What cannot be removed stays until the next start of the machine.
        let _ = fs::remove_file(&self.path);
        // SAFETY: `munmap` asks for a mapping that nothing uses: its counters are borrowed from
        // `self`.
        let _ = unsafe { munmap(self.start.cast(), BYTES) };
    }
}

impl Baseline {
    /// Begins with nothing sent.
    pub fn new() -> Baseline {
        Baseline {
            files: Vec::new(),
            next: 0,
            limbo: Vec::new(),
        }
    }

    /// Counts one send.
    pub fn share(&mut self) -> Result<Sent> {
        let (file, counter) = (self.next / COUNTERS, self.next % COUNTERS);
        if file == self.files.len() {
            self.files
                .push(Counters::create(file).map_err(|e| format!("a counter file: {e}"))?);
        }
        self.next += 1;
        self.files[file]
            .counter(counter)
            .store(1, Ordering::Relaxed);
        Ok(Sent { file, counter })
    }

    /// Ends what was received, as another process does it: by the file's name.
    pub fn release(&self, sent: Sent) -> Result<()> {
        let path = &self.files[sent.file].path;
        let file = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| format!("open: {e}"))?;
        let start = map(&file).map_err(|e| format!("mmap: {e}"))?;
        let mapped = Counters {
            path: PathBuf::new(),
            start,
        };
        mapped.counter(sent.counter).fetch_sub(1, Ordering::AcqRel);
        Ok(())
    }

    /// Drops what was sent: into limbo, if it is still counted. Then all of limbo is looked
    /// through.
    pub fn drop_sent(&mut self, sent: Sent) {
        if self.is_held(sent) {
            self.limbo.push(sent);
        }
        self.collect();
    }

    /// Puts something that is never released into limbo, without looking through it.
    pub fn put_into_limbo(&mut self) -> Result<()> {
        let sent = self.share()?;
        self.limbo.push(sent);
        Ok(())
    }

    /// Looks through limbo.
    pub fn collect(&mut self) {
        let files = &self.files;
        self.limbo.retain(|sent| {
            files[sent.file]
                .counter(sent.counter)
                .load(Ordering::Acquire)
                > 0
        });
    }

    fn is_held(&self, sent: Sent) -> bool {
        self.files[sent.file]
            .counter(sent.counter)
            .load(Ordering::Acquire)
            > 0
    }

    /// Counts what is in limbo.
    #[cfg(test)]
    pub fn in_limbo(&self) -> usize {
        self.limbo.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_stays_in_limbo_until_it_is_released() {
        let mut baseline = Baseline::new();
        let sent: Vec<Sent> = (0..3)
            .map(|_| baseline.share().expect("there is shared memory"))
            .collect();
        baseline.release(sent[0]).expect("its file is there");
        sent.iter().for_each(|&sent| baseline.drop_sent(sent));
        assert_eq!(baseline.in_limbo(), 2);
        baseline.release(sent[2]).expect("its file is there");
        baseline.collect();
        assert_eq!(baseline.in_limbo(), 1);
    }
}
