//! The link to a producer: its process and socket, the questions to it, and the notices of it.
//!
//! Messages are sent under the table's lock, without blocking, so that they leave in the order in
//! which its rows changed.

use std::collections::HashSet;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

use gpu_api::lock::Acquire;
use gpu_api::{Access, BackendKind, ForkGuard, Gpu, ParticipantId, RegionId, Result};

use crate::consumer::connection::files::Files;
use crate::consumer::connection::question::{File, Key, Question};
use crate::consumer::connection::questions::Questions;
use crate::consumer::notice::Notice;
use crate::notices::Notices;
use transport::client::Unsent;
use transport::os::poller::Poller;
use transport::os::socket::{self, SendOutcome};
use transport::os::waker::Waker;
use transport::shared::counter_file::CounterFile;
use transport::shared::timeline;
use transport::wire::descriptor::{self, Seals, SessionId};
use transport::wire::message::{MOST_BYTES, ToProducer};

/// The key of the producer's socket in the poller.
pub(crate) const SOCKET: u64 = 0;

/// What never changes about a link.
#[derive(Debug)]
pub(crate) struct Facts {
    pub gpu: Gpu,
    /// The device's vendor: asked for by every claim.
    pub backend: BackendKind,
    pub access: Access,
    pub session: SessionId,
    pub id: ParticipantId,
    pub producer_pid: u32,
    pub producer_pidfd: OwnedFd,
    /// The producer is this process.
    pub is_own_process: bool,
}

impl Facts {
    /// Returns how a region of this number is mapped: its grant and the participant may each say
    /// that it is only read.
    pub fn access_to(&self, region: RegionId) -> Access {
        match region.access() {
            Access::ReadOnly => Access::ReadOnly,
            Access::ReadWrite => self.access,
        }
    }
}

/// How far the hearing of the producer has come.
#[derive(Debug, Default)]
pub(crate) struct Hearing {
    /// Nothing more is read: the socket's hang-up alone is awaited.
    pub is_over: bool,
}

/// A participant's link.
pub(crate) struct Link {
    pub facts: Facts,
    /// What the producer sealed opens with them.
    pub seals: Seals,
    pub guard: ForkGuard,
    pub files: Files,
    pub socket: OwnedFd,
    /// Whose turn it is to read the socket.
    pub hearing: Mutex<Hearing>,
    pub poller: Poller,
    table: Mutex<Table>,
    pub(super) changed: Condvar,
    pub waker: Waker,
    pub notices: Notices<Notice>,
    /// Somebody was told `WouldBlock`.
    pub tries: AtomicBool,
    /// Fences that they wait for.
    watched: Mutex<Vec<descriptor::Fence>>,
    /// Somebody waits for mappings to become idle.
    pub wants_idle: AtomicBool,
    /// Regions that the producer would like unmapped.
    asked: Mutex<HashSet<RegionId>>,
    /// The producer has noted that this participant goes.
    pub farewell: AtomicBool,
    /// The producer is dead, or has closed the session.
    pub gone: AtomicBool,
    /// The last handle was dropped.
    pub closing: AtomicBool,
}

/// What a [`Link`] starts from.
#[derive(Debug)]
pub(crate) struct Welcome {
    pub facts: Facts,
    pub seals: Seals,
    pub socket: OwnedFd,
    pub file: CounterFile,
    pub max_slots: u64,
}

/// The open questions, and when the thread looks next.
#[derive(Debug, Default)]
pub(crate) struct Table {
    questions: Questions,
    /// When the participant's thread looks for what is due; `None` for not by itself.
    thread_looks: Option<Instant>,
}

/// The table, locked.
pub(crate) struct Locked<'a> {
    pub(super) link: &'a Link,
    pub(super) table: MutexGuard<'a, Table>,
}

impl Deref for Locked<'_> {
    type Target = Questions;

    fn deref(&self) -> &Questions {
        &self.table.questions
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Questions {
        &mut self.table.questions
    }
}

impl Locked<'_> {
    /// Sends the messages that are due.
    pub fn send_due(&mut self) {
        let link = self.link;
        self.table
            .questions
            .send_due(Instant::now(), |message, file| link.send(message, file));
    }

    /// Sends the messages that are due, and has the thread repeat those that no caller waits for.
    pub fn hand_over(mut self) {
        self.send_due();
        let due = self.table.questions.next_due();
        let late = due.is_some_and(|due| self.table.thread_looks.is_none_or(|looks| due < looks));
        let waker = &self.link.waker;
        drop(self.table);
        if late {
            waker.nudge();
        }
    }

    /// Sends the messages that are due, and says when to look again (thread).
    pub fn plan(mut self) -> Option<Instant> {
        self.send_due();
        self.table.thread_looks = self.table.questions.next_due();
        self.table.thread_looks
    }
}

impl Link {
    /// Makes the link of a participant that was welcomed.
    ///
    /// # Errors
    ///
    /// What the kernel or the driver refuses.
    pub fn new(welcome: Welcome) -> Result<Link> {
        let link = Link {
            guard: ForkGuard::new()?,
            files: Files::new(welcome.max_slots),
            facts: welcome.facts,
            seals: welcome.seals,
            socket: welcome.socket,
            hearing: Mutex::default(),
            poller: Poller::new()?,
            table: Mutex::default(),
            changed: Condvar::new(),
            waker: Waker::new()?,
            notices: Notices::new()?,
            tries: AtomicBool::new(false),
            watched: Mutex::default(),
            wants_idle: AtomicBool::new(false),
            asked: Mutex::default(),
            farewell: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        };
        // Last: nothing that fails after it would unregister the file.
        link.files.add(&link.facts.gpu, 0, welcome.file)?;
        Ok(link)
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Locks the table.
    pub fn table(&self) -> Locked<'_> {
        Locked {
            link: self,
            table: self.table.acquire(),
        }
    }

    fn send(&self, message: &ToProducer, file: Option<&File>) -> Result<(), Unsent> {
        let mut bytes = [0; MOST_BYTES];
        let len = message.encode(&mut bytes);
        let fd = file.map(File::as_fd);
        match socket::send(self.socket.as_fd(), &bytes[..len], fd.as_slice()) {
            Ok(SendOutcome::Sent) => Ok(()),
            // The thread sees the hang-up; what could not be sent for want of memory is sent again.
            Ok(SendOutcome::Full | SendOutcome::HungUp) | Err(_) => Err(Unsent),
        }
    }

    /// Asks ahead, for claims to come.
    pub fn ask_ahead(&self, questions: impl IntoIterator<Item = (Key, Question)>) {
        let (mut table, now) = (self.table(), Instant::now());
        questions
            .into_iter()
            .for_each(|(key, question)| table.ask_ahead(key, question, now));
        table.hand_over();
    }

    /// Tells threads that wait for something of this link to look again. Not to be called under the
    /// table's lock.
    pub fn announce_change(&self) {
        // A thread that looked before the change holds the lock until it waits.
        drop(self.table());
        self.changed.notify_all();
        if self.tries.load(Ordering::Relaxed) && self.tries.swap(false, Ordering::SeqCst) {
            self.notices.push(Notice::TryAgain);
        }
    }

    /// Notes that the producer would like a region unmapped.
    pub fn note_asked(&self, region: RegionId) {
        self.asked.acquire().insert(region);
        self.wants_idle.store(true, Ordering::Relaxed);
        self.waker.nudge();
    }

    /// Says whether it would.
    pub fn is_asked(&self, region: RegionId) -> bool {
        self.asked.acquire().contains(&region)
    }

    /// Forgets the regions that are not mapped, and says whether any is left.
    pub fn is_asked_for_any(&self, is_mapped: impl Fn(RegionId) -> bool) -> bool {
        let mut asked = self.asked.acquire();
        asked.retain(|region| is_mapped(*region));
        !asked.is_empty()
    }

    /// Tells the application when a fence that is pending is reached.
    pub fn watch_fence(&self, fence: descriptor::Fence) {
        let mut watched = self.watched.acquire();
        if !watched.contains(&fence) {
            watched.push(fence);
        }
        drop(watched);
        self.waker.nudge();
    }

    /// Looks at the fences that are watched, and says whether any is still pending.
    pub fn look_at_watched(&self) -> bool {
        let mut watched = self.watched.acquire();
        let before = watched.len();
        watched.retain(|fence| self.files.look(fence) == timeline::Fence::Pending);
        let (left, reached) = (watched.len(), watched.len() < before);
        drop(watched);
        if reached {
            self.announce_change();
        }
        left > 0
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Participant")
            .field("id", &self.facts.id)
            .field("session", &format_args!("{}", self.facts.session))
            .field("producer_pid", &self.facts.producer_pid)
            .field("is_producer_gone", &self.is_gone())
            .finish_non_exhaustive()
    }
}
