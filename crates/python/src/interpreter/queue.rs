//! The queue of what other threads leave to Python: references to drop, lines to log, adopted
//! memory to give back.
//!
//! A thread of the library, or one that drops an array, may hold locks that a Python thread waits
//! for; if it waited for the interpreter's lock, both would wait for ever. So it puts what it gives
//! up here, and the [`keeper`] empties it.
//!
//! [`keeper`]: super::keeper

use std::any::Any;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use std::{mem, ptr};

use gpu_ipc::Error;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// How often storages that are lent are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long references and lines may gather before the thread takes them.
const BURST: Duration = Duration::from_millis(2);

/// Lines kept for a thread that does not come; what is logged on top is dropped.
const MOST_LINES: usize = 1024;

/// A line to log.
pub(crate) struct Line {
    /// As Python numbers levels.
    pub level: u8,
    pub text: String,
}

/// A session, as the keeper sees it.
pub(crate) trait Lender: Send + Sync {
    /// Reads its notices. Asked without the interpreter's lock; what it returns is dropped with it.
    fn hear(&self) -> Box<dyn Any + Send>;

    /// Looks at some of the storages that are lent, and reports those that were freed under their
    /// leases.
    fn look_for_freed(&self, py: Python<'_>);

    /// Says whether storages of PyTorch's are lent, which may be resized under their leases.
    fn lends_storages(&self) -> bool;

    /// Says whether every adopted memory is its owner's again.
    fn lends_nothing(&self) -> bool;
}

/// A session that is listened to.
struct Watched {
    /// Of its notices; it stays open for the poll when the session goes meanwhile.
    fd: Arc<OwnedFd>,
    session: Weak<dyn Lender>,
    /// Keeps the session while it has something adopted.
    lender: Option<Arc<dyn Lender>>,
}

#[derive(Default)]
struct Inside {
    garbage: Vec<Box<dyn Send>>,
    lines: Vec<Line>,
    watched: Vec<Watched>,
    /// Readable when there is something to do.
    wake: Option<Arc<OwnedFd>>,
    is_stopped: bool,
}

impl Inside {
    fn wake(&self) {
        if let Some(wake) = &self.wake {
            // The only failure is a counter that is full: then it is readable, which is all that is
            // wanted.
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }
}

/// What the keeper does next.
#[derive(Default)]
pub(crate) struct Work {
    pub garbage: Vec<Box<dyn Send>>,
    pub lines: Vec<Line>,
    /// Sessions with notices.
    pub heard: Vec<Arc<dyn Lender>>,
    /// Sessions whose lent storages are to be looked at.
    pub lenders: Vec<Arc<dyn Lender>>,
}

/// The queue of a process.
#[derive(Default)]
pub(crate) struct Queue(Mutex<Inside>);

impl Queue {
    /// Leaves what holds references to be dropped. Takes no lock but the queue's.
    pub fn drop_later(&self, object: Box<dyn Send>) {
        let mut queue = self.lock();
        if queue.is_stopped {
            // Nobody can drop it any more: the interpreter is going, and takes it along.
            mem::forget(object);
            return;
        }
        queue.garbage.push(object);
        // Where there is more already, the thread has been woken and has not taken it.
        if queue.garbage.len() == 1 {
            queue.wake();
        }
    }

    /// Leaves a line to be logged.
    pub fn log(&self, line: Line) {
        let mut queue = self.lock();
        if !queue.is_stopped && queue.lines.len() < MOST_LINES {
            queue.lines.push(line);
            queue.wake();
        }
    }

    /// Listens to a session's notices, which make `notices` readable, until it is gone.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn watch(&self, notices: BorrowedFd<'_>, session: Weak<dyn Lender>) -> Result<(), Error> {
        let fd = notices.try_clone_to_owned();
        let fd = Arc::new(fd.map_err(|error| {
            Error::system("dup", "raise RLIMIT_NOFILE or close descriptors", error)
        })?);
        let mut queue = self.lock();
        if !queue.is_stopped {
            queue.watched.push(Watched {
                fd,
                session,
                lender: None,
            });
            queue.wake();
        }
        Ok(())
    }

    /// Keeps a session until all that it adopted is its owner's again.
    pub fn look_after(&self, lender: Arc<dyn Lender>) {
        let mut queue = self.lock();
        let is_it =
            |watched: &&mut Watched| ptr::addr_eq(watched.session.as_ptr(), Arc::as_ptr(&lender));
        if let Some(watched) = queue.watched.iter_mut().find(is_it)
            && watched.lender.is_none()
        {
            watched.lender = Some(lender);
            queue.wake();
        }
    }

    /// Stops listening to sessions that are gone.
    pub fn forget_gone(&self) {
        let mut queue = self.lock();
        let gone = queue
            .watched
            .extract_if(.., |watched| watched.session.strong_count() == 0)
            .collect::<Vec<_>>();
        queue.wake();
        drop(queue);
        drop(gone);
    }

    /// Prepares the queue for the thread that empties it, and says whether that is to be started.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn open(&self) -> Result<bool, Error> {
        let mut queue = self.lock();
        if queue.wake.is_some() || queue.is_stopped {
            return Ok(false);
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
            Error::system("eventfd", "raise RLIMIT_NOFILE or close descriptors", error)
        })?;
        queue.wake = Some(Arc::new(wake));
        Ok(true)
    }

    /// Says that the thread could not be started; the next [`open`](Queue::open) asks for it again.
    pub fn abandon(&self) {
        self.lock().wake = None;
    }

    /// Ends the thread. What is given up from here on is leaked. The caller drops what it gets with
    /// the interpreter's lock.
    pub fn stop(&self) -> Work {
        let (work, watched) = {
            let mut queue = self.lock();
            queue.is_stopped = true;
            queue.wake();
            let (garbage, lines) = (mem::take(&mut queue.garbage), mem::take(&mut queue.lines));
            (
                Work {
                    garbage,
                    lines,
                    ..Work::default()
                },
                mem::take(&mut queue.watched),
            )
        };
        // Somebody may still read what they lent: the references in them are for the end of the
        // process.
        watched
            .into_iter()
            .for_each(|watched| mem::forget(watched.lender));
        work
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something to do; `None` when the thread is to end.
    pub fn next(&self) -> Option<Work> {
        loop {
            let (wake, watched, looks) = {
                let queue = self.lock();
                if queue.is_stopped {
                    return None;
                }
                if !queue.garbage.is_empty() || !queue.lines.is_empty() {
                    // What is given up comes in bursts, and each turn of this thread costs its
                    // caller the interpreter's lock: it takes its turn once for a burst.
                    drop(queue);
                    std::thread::sleep(BURST);
                    let mut queue = self.lock();
                    let (garbage, lines) =
                        (mem::take(&mut queue.garbage), mem::take(&mut queue.lines));
                    return Some(Work {
                        garbage,
                        lines,
                        ..Work::default()
                    });
                }
                let watched: Vec<_> = queue
                    .watched
                    .iter()
                    .map(|one| (one.fd.clone(), one.session.clone()))
                    .collect();
                let looks = queue
                    .watched
                    .iter()
                    .filter_map(|one| one.lender.as_ref())
                    .any(|one| one.lends_storages());
                (queue.wake.clone()?, watched, looks)
            };
            let mut fds = vec![PollFd::new(&*wake, PollFlags::IN)];
            fds.extend(
                watched
                    .iter()
                    .map(|(fd, _)| PollFd::new(&**fd, PollFlags::IN)),
            );
            let time = Timespec::try_from(LOOK_EVERY).ok().filter(|_| looks);
            let ready = poll(&mut fds, time.as_ref());
            if ready == Ok(0) {
                let lenders = self
                    .lock()
                    .watched
                    .iter()
                    .filter_map(|one| one.lender.clone())
                    .collect();
                return Some(Work {
                    lenders,
                    ..Work::default()
                });
            }
            let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            if is_ready(&fds[0]) {
                // Emptied before the queue is looked at again.
                let _ = rustix::io::read(&wake, &mut [0; 8]);
            }
            let heard = fds[1..].iter().zip(&watched).filter(|(fd, _)| is_ready(fd));
            let heard: Vec<_> = heard
                .filter_map(|(_, (_, session))| session.upgrade())
                .collect();
            if !heard.is_empty() {
                return Some(Work {
                    heard,
                    ..Work::default()
                });
            }
        }
    }

    /// Gives up the hold on sessions that have nothing lent any more.
    pub fn let_go(&self) -> Vec<Arc<dyn Lender>> {
        let mut queue = self.lock();
        let done = |watched: &&mut Watched| {
            watched
                .lender
                .as_ref()
                .is_some_and(|lender| lender.lends_nothing())
        };
        queue
            .watched
            .iter_mut()
            .filter(done)
            .filter_map(|watched| watched.lender.take())
            .collect()
    }
}
