//! A participant's counter files: its slots, and the words that fences are written to.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_api::{Error, Gpu, Result, WordPtr};

use crate::consumer::leases::record::Record;
use transport::shared::counter_file::{CounterFile, GROUP, MOST_SLOTS, TIMELINES};
use transport::shared::slot::Claim;
use transport::shared::timeline;
use transport::wire::descriptor;
use transport::wire::lease_address::LeaseAddress;

/// A counter file, as its participant has it.
#[derive(Debug)]
pub(crate) struct File {
    /// What the holders of each slot's lease share, by group, made when they are first needed.
    records: Box<[OnceLock<Box<[Record; GROUP as usize]>>]>,
    pub counters: CounterFile,
    /// Where streams see it; `None` on a device without stream words.
    pub registered: Option<WordPtr>,
}

impl File {
    fn new(counters: CounterFile, registered: Option<WordPtr>) -> File {
        let records = (0..counters.slot_count() / GROUP)
            .map(|_| OnceLock::new())
            .collect();
        File {
            records,
            counters,
            registered,
        }
    }

    /// Returns what the holders of a slot's lease share.
    ///
    /// # Panics
    ///
    /// If there is no such slot: the claim has checked.
    #[inline(always)]
    pub fn record(&self, slot: u32) -> &Record {
        let group = self.records[(slot / GROUP) as usize]
            .get_or_init(|| Box::new([const { Record::new() }; GROUP as usize]));
        &group[(slot % GROUP) as usize]
    }
}

/// The most counter files of a participant: 2^28 leases.
const MOST_FILES: u64 = 4096;

/// What a word said when its poisoner looked: nothing yet.
const NOT_POISONED: u64 = u64::MAX;

/// The files, by number. Once there one stays.
#[derive(Debug)]
pub(crate) struct Files {
    files: Box<[OnceLock<File>]>,
    /// What each word had reached when it was poisoned.
    reached: Box<[AtomicU64]>,
}

impl Files {
    /// Makes places for as many files as the quota takes, and a few for the smaller first ones;
    /// each place is 40 bytes.
    pub fn new(max_slots: u64) -> Files {
        let places = (max_slots / u64::from(MOST_SLOTS)).min(MOST_FILES) as usize + 4;
        Files {
            files: (0..places).map(|_| OnceLock::new()).collect(),
            reached: (0..TIMELINES)
                .map(|_| AtomicU64::new(NOT_POISONED))
                .collect(),
        }
    }

    /// Takes in a counter file that came by the socket. One that is there already was asked for
    /// when it was on its way.
    pub fn take(&self, gpu: &Gpu, index: u32, slots: u32, fd: Option<OwnedFd>) -> Result<()> {
        let Some(fd) = fd.filter(|_| self.get(index).is_none()) else {
            return Ok(());
        };
        self.add(gpu, index, CounterFile::open(fd, slots)?)
    }

    /// Adds a counter file. Called by the thread whose turn it is to read the socket.
    pub fn add(&self, gpu: &Gpu, index: u32, counters: CounterFile) -> Result<()> {
        let place = self.files.get(index as usize).ok_or_else(|| {
            Error::invalid(
                "a counter file's number",
                index,
                "within the quota of the welcome",
            )
        })?;
        // SAFETY: `register` asks for a file that stays mapped until `unregister_words`: the files
        // stay here, and are unregistered before they go, or leaked.
        let registered = unsafe { counters.register(gpu) }?;
        // One thread at a time reads the socket, so the place is still free.
        let _ = place.set(File::new(counters, registered));
        Ok(())
    }

    /// Ends the registrations of the files, after the last write.
    ///
    /// # Safety
    ///
    /// No operation on their words is unfinished, and this is called once.
    pub unsafe fn unregister(&self, gpu: &Gpu) -> Result<()> {
        for file in self
            .files
            .iter()
            .filter_map(OnceLock::get)
            .filter(|file| file.registered.is_some())
        {
            // SAFETY: `unregister_words` asks for
            // - a registration that was not ended: every file is registered once, and this is
            //   called once;
            // - no unfinished operation on its words: the caller says so.
            unsafe { gpu.backend().unregister_words(file.counters.start()) }?;
        }
        Ok(())
    }

    /// Returns how many files there can be.
    pub fn most(&self) -> usize {
        self.files.len()
    }

    /// Returns a file.
    #[inline]
    pub fn get(&self, index: u32) -> Option<&File> {
        self.files.get(index as usize)?.get()
    }

    /// Says what a claim of a lease would find; `None` where there is no such slot.
    pub fn peek(&self, lease: LeaseAddress) -> Option<Claim> {
        let file = self
            .get(lease.file)
            .filter(|file| lease.slot < file.counters.slot_count())?;
        Some(file.counters.slot(lease.slot).peek(lease.generation))
    }

    /// Completes every wait of this participant's, and keeps what each word had reached.
    pub fn poison(&self) {
        let Some(first) = self.get(0) else { return };
        for (index, reached) in (0..).zip(&self.reached) {
            if let Some(value) = first.counters.timeline(index).poison() {
                // The first poisoning tells what had been reached; a later one meets only what came
                // too late.
                let _ = reached.compare_exchange(
                    NOT_POISONED,
                    value,
                    Ordering::Release,
                    Ordering::Relaxed,
                );
            }
        }
    }

    /// Says where a fence stands, told apart by what had been reached before a poisoning.
    pub fn look(&self, fence: &descriptor::Fence) -> timeline::Fence {
        let Some(file) = self.get(fence.file) else {
            return timeline::Fence::Pending;
        };
        match file.counters.timeline(fence.word).look(fence.value) {
            timeline::Fence::Poisoned => {
                match self.reached[fence.word as usize].load(Ordering::Acquire) {
                    NOT_POISONED => timeline::Fence::Poisoned,
                    reached if reached >= fence.value => timeline::Fence::Reached,
                    _ => timeline::Fence::Poisoned,
                }
            }
            seen => seen,
        }
    }
}
