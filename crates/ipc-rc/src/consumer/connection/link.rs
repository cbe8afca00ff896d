//! What a participant's handles, blocks and thread share: its link to one producer.

use std::collections::HashSet;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use gpu_api::{Access, BackendKind, Error, ForkGuard, Gpu, ParticipantId, RegionId, Result, WordPtr};

use crate::consumer::connection::asking::Table;
use crate::consumer::leases::lease::Record;
use crate::consumer::leases::release_queue::ReleaseQueues;
use crate::consumer::mappings::mapping_cache::{Cache, Mappings};
use crate::consumer::notice::Notice;
use crate::notices::Notices;
use channel::os::poller::Poller;
use channel::os::process;
use channel::os::waker::Waker;
use channel::shared::counter_file::{CounterFile, GROUP, MOST_SLOTS, TIMELINES};
use channel::shared::timeline;
use channel::wire::descriptor::{self, SessionId};

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
        let records = (0..counters.slot_count() / GROUP).map(|_| OnceLock::new()).collect();
        File { records, counters, registered }
    }

    /// Returns what the holders of a slot's lease share.
    ///
    /// # Panics
    ///
    /// If there is no such slot: the claim has checked.
    #[inline(always)]
    pub fn record(&self, slot: u32) -> &Record {
        let group =
            self.records[(slot / GROUP) as usize].get_or_init(|| Box::new([const { Record::new() }; GROUP as usize]));
        &group[(slot % GROUP) as usize]
    }
}

/// The most counter files of a participant: 2^28 leases.
const MOST_FILES: u64 = 4096;

/// The key of the producer's socket in the poller.
pub(crate) const SOCKET: u64 = 0;

/// What a word said when its poisoner looked: nothing yet.
const NOT_POISONED: u64 = u64::MAX;

/// A participant's state. Its handles, mappings and thread each hold one [`Arc`] of it.
pub(crate) struct Link {
    pub gpu: Gpu,
    /// The device's vendor: asked for by every claim.
    pub backend: BackendKind,
    pub access: Access,
    pub guard: ForkGuard,
    pub session: SessionId,
    pub id: ParticipantId,
    pub producer_pid: u32,
    pub producer_pidfd: OwnedFd,
    /// The producer is this process.
    own_process: bool,
    pub socket: OwnedFd,
    files: Box<[OnceLock<File>]>,
    pub mappings: Mappings,
    pub cache: Cache,
    pub lanes: ReleaseQueues,
    pub(super) table: Mutex<Table>,
    pub(super) changed: Condvar,
    /// The producer has noted that this participant goes.
    pub farewell: AtomicBool,
    pub waker: Waker,
    pub poller: Poller,
    /// Whose turn it is to read the socket.
    pub hearing: Mutex<()>,
    pub notices: Notices<Notice>,
    /// Somebody was told `WouldBlock`.
    pub tries: AtomicBool,
    /// Fences that they wait for.
    watched: Mutex<Vec<descriptor::Fence>>,
    /// The producer is dead, or has closed the session.
    pub gone: AtomicBool,
    /// The last handle was dropped.
    pub closing: AtomicBool,
    /// Somebody waits for mappings to become idle.
    pub wants_idle: AtomicBool,
    /// Regions that the producer would like unmapped.
    asked: Mutex<HashSet<RegionId>>,
    reached: Box<[AtomicU64]>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Participant")
            .field("id", &self.id)
            .field("session", &format_args!("{}", self.session))
            .field("producer_pid", &self.producer_pid)
            .field("is_producer_gone", &self.is_gone())
            .finish_non_exhaustive()
    }
}

/// What a [`Link`] starts from.
#[derive(Debug)]
pub(crate) struct Welcome {
    pub gpu: Gpu,
    pub access: Access,
    pub session: SessionId,
    pub id: ParticipantId,
    pub producer_pid: u32,
    pub producer_pidfd: OwnedFd,
    pub socket: OwnedFd,
    pub file: CounterFile,
    pub max_slots: u64,
    pub cache: Cache,
}

impl Link {
    pub fn new(welcome: Welcome) -> Result<Link> {
        // As many files as the quota takes, and a few for the smaller first ones; each place is 40 bytes.
        let places = (welcome.max_slots / u64::from(MOST_SLOTS)).min(MOST_FILES) as usize + 4;
        let link = Link {
            lanes: ReleaseQueues::new(welcome.gpu.clone()),
            backend: welcome.gpu.kind(),
            gpu: welcome.gpu,
            access: welcome.access,
            guard: ForkGuard::new()?,
            session: welcome.session,
            id: welcome.id,
            producer_pid: welcome.producer_pid,
            own_process: process::same_process(welcome.producer_pidfd.as_fd())?,
            producer_pidfd: welcome.producer_pidfd,
            socket: welcome.socket,
            files: (0..places).map(|_| OnceLock::new()).collect(),
            mappings: Mappings::default(),
            cache: welcome.cache,
            table: Mutex::default(),
            changed: Condvar::new(),
            farewell: AtomicBool::new(false),
            notices: Notices::new()?,
            tries: AtomicBool::new(false),
            watched: Mutex::default(),
            waker: Waker::new()?,
            poller: Poller::new()?,
            hearing: Mutex::default(),
            asked: Mutex::default(),
            gone: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            wants_idle: AtomicBool::new(false),
            reached: (0..TIMELINES).map(|_| AtomicU64::new(NOT_POISONED)).collect(),
        };
        link.add_file(0, welcome.file)?;
        Ok(link)
    }

    /// Takes in a counter file that came by the socket. One that is there already was asked for when it was on its way.
    pub fn take_file(&self, index: u32, slots: u32, fd: Option<OwnedFd>) -> Result<()> {
        let Some(fd) = fd.filter(|_| self.file(index).is_none()) else { return Ok(()) };
        self.add_file(index, CounterFile::open(fd, slots)?)
    }

    fn add_file(&self, index: u32, counters: CounterFile) -> Result<()> {
        let place = self.files.get(index as usize).ok_or_else(|| Error::Invalid {
            what: "a counter file's number",
            got: index.to_string(),
            must: "within the quota of the welcome",
        })?;
        let registered = if self.gpu.caps().stream_writes {
            // SAFETY: `register_words` asks for bytes that stay mapped until `unregister_words`: the link keeps its
            // files, and unregisters them before it lets go of them, or leaks them.
            Some(unsafe { self.gpu.backend().register_words(counters.start(), counters.bytes()) }?)
        } else {
            None
        };
        // Only who has the turn to read the socket adds files, so the place is still free.
        let _ = place.set(File::new(counters, registered));
        Ok(())
    }

    /// Ends the registrations of the counter files: nobody writes there any more.
    ///
    /// # Safety
    ///
    /// No operation on their words is unfinished, and this is called once.
    pub unsafe fn unregister_files(&self) -> Result<()> {
        for file in self.files().filter(|file| file.registered.is_some()) {
            // SAFETY: `unregister_words` asks for
            // - a registration that was not ended: every file is registered once, and this is called once;
            // - no unfinished operation on its words: the caller says so.
            unsafe { self.gpu.backend().unregister_words(file.counters.start()) }?;
        }
        Ok(())
    }

    /// Returns how many counter files there can be.
    pub fn most_files(&self) -> usize {
        self.files.len()
    }

    /// Returns a counter file. Once there it stays.
    #[inline]
    pub fn file(&self, index: u32) -> Option<&File> {
        self.files.get(index as usize)?.get()
    }

    /// Lists the counter files.
    pub fn files(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter_map(OnceLock::get)
    }

    /// Says whether the producer is this process.
    pub fn is_own_process(&self) -> bool {
        self.own_process
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Completes every wait of this participant's, and keeps what each word had reached.
    pub fn poison(&self) {
        let Some(first) = self.file(0) else { return };
        for (index, reached) in (0..).zip(&self.reached) {
            if let Some(value) = first.counters.timeline(index).poison() {
                // The first poisoning tells what had been reached; a later one meets only what came too late.
                let _ = reached.compare_exchange(NOT_POISONED, value, Ordering::Release, Ordering::Relaxed);
            }
        }
    }

    /// Says where a fence stands, told apart by what had been reached before a poisoning.
    pub fn look(&self, fence: &descriptor::Fence) -> timeline::Fence {
        let Some(file) = self.file(fence.file) else { return timeline::Fence::Pending };
        match file.counters.timeline(fence.word).look(fence.value) {
            timeline::Fence::Poisoned => match self.reached[fence.word as usize].load(Ordering::Acquire) {
                NOT_POISONED => timeline::Fence::Poisoned,
                reached if reached >= fence.value => timeline::Fence::Reached,
                _ => timeline::Fence::Poisoned,
            },
            seen => seen,
        }
    }

    fn asked(&self) -> MutexGuard<'_, HashSet<RegionId>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the producer would like a region unmapped.
    pub fn note_asked(&self, region: RegionId) {
        self.asked().insert(region);
    }

    /// Says whether it would.
    pub fn is_asked(&self, region: RegionId) -> bool {
        self.asked().contains(&region)
    }

    /// Forgets the regions that are not mapped, and says whether any is left.
    pub fn is_asked_for_any(&self) -> bool {
        let mapped: HashSet<RegionId> = self.mappings.all().iter().map(|mapping| mapping.region()).collect();
        let mut asked = self.asked();
        asked.retain(|region| mapped.contains(region));
        !asked.is_empty()
    }

    /// Tells the application when a fence that is pending is reached.
    pub fn watch_fence(&self, fence: descriptor::Fence) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if !watched.contains(&fence) {
            watched.push(fence);
        }
        drop(watched);
        self.waker.nudge();
    }

    /// Looks at the fences that are watched, and says whether any is still pending.
    pub fn look_at_watched(&self) -> bool {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let before = watched.len();
        watched.retain(|fence| self.look(fence) == timeline::Fence::Pending);
        let (left, reached) = (watched.len(), watched.len() < before);
        drop(watched);
        if reached {
            self.announce_change();
        }
        left > 0
    }

    /// Says whether a lease has yet to end.
    pub fn is_held(&self) -> bool {
        !self.lanes.are_dry() || !self.mappings.all().iter().all(|mapping| mapping.is_idle())
    }

    /// Says goodbye when the last handle was dropped and every lease has ended. Never blocks.
    ///
    /// The mappings may follow: the producer waits for them, or for the end of this process.
    pub fn say_goodbye(&self) {
        if !self.closing.load(Ordering::Relaxed) || self.is_gone() || self.is_held() {
            return;
        }
        let mut table = self.table();
        if !self.farewell.load(Ordering::Relaxed) {
            table.say_goodbye(Instant::now());
            table.hand_over();
        }
    }

    /// Says whether nothing is left to do: nothing is held or mapped, and the producer has noted that, or is gone.
    pub fn is_left(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
            && (self.farewell.load(Ordering::Relaxed) || self.is_gone())
            && self.lanes.are_dry()
            && self.mappings.is_empty()
            && self.table().is_at_rest()
    }
}
