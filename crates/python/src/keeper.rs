//! What other threads leave to Python: references to drop, lines to log, adopted memory to give back.
//!
//! A thread of the library, or one that drops an array, may hold locks that a Python thread waits for; if it waited for
//! the interpreter's lock, both would wait for ever. So it puts what it gives up into a queue, and one Python thread,
//! `gpu-ipc`, empties it. The thread is a daemon that `atexit` stops; what is given up after that is leaked.
//!
//! The thread sleeps in one `poll`: on a descriptor of the queue, and on that of each session's notices, which says
//! when adopted memory is its owner's again. Nothing says when somebody resizes a storage that is lent, so while
//! PyTorch's storages are, it looks at them once a second.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use gpu_ipc::Error;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::errors::OrRaise;
use crate::logging::{self, Line};
use crate::process::process;
use crate::shared::Shared;

/// How often storages that are lent are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long references and lines may gather before the thread takes them.
const BURST: Duration = Duration::from_millis(2);

/// Lines kept for a thread that does not come; what is logged on top is dropped.
const MOST_LINES: usize = 1024;

/// A session that is listened to.
struct Watched {
    /// Of its notices; it stays open for the poll when the session goes meanwhile.
    fd: Arc<OwnedFd>,
    session: Weak<Shared>,
    /// Keeps the session while it has something adopted.
    lender: Option<Arc<Shared>>,
}

#[derive(Default)]
struct Queue {
    garbage: Vec<Py<PyAny>>,
    lines: Vec<Line>,
    watched: Vec<Watched>,
    /// Readable when there is something to do.
    wake: Option<Arc<OwnedFd>>,
    is_stopped: bool,
}

impl Queue {
    fn wake(&self) {
        if let Some(wake) = &self.wake {
            // The only failure is a counter that is full: then it is readable, which is all that is wanted.
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }
}

/// What the thread does next.
struct Work {
    garbage: Vec<Py<PyAny>>,
    lines: Vec<Line>,
    /// Sessions with notices.
    heard: Vec<Arc<Shared>>,
    /// Sessions whose lent storages are to be looked at.
    lenders: Vec<Arc<Shared>>,
}

/// The queue of a process.
#[derive(Default)]
pub(crate) struct Keeper {
    queue: Mutex<Queue>,
}

impl Keeper {
    /// Leaves a reference to be dropped. Takes no lock but the queue's.
    pub fn drop_later(&self, object: Py<PyAny>) {
        let mut queue = self.lock();
        if queue.is_stopped {
            // Nobody can drop it any more: the interpreter is going, and takes it along.
            std::mem::forget(object);
            return;
        }
        queue.garbage.push(object);
        queue.wake();
    }

    /// Leaves a line to be logged.
    pub fn log(&self, line: Line) {
        let mut queue = self.lock();
        if !queue.is_stopped && queue.lines.len() < MOST_LINES {
            queue.lines.push(line);
            queue.wake();
        }
    }

    /// Listens to a session's notices until it is gone.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn watch(&self, session: &Arc<Shared>) -> Result<(), Error> {
        let fd = session.session.as_fd().try_clone_to_owned();
        let fd = Arc::new(fd.map_err(|error| Error::system("dup", "raise RLIMIT_NOFILE or close descriptors", error))?);
        let mut queue = self.lock();
        if !queue.is_stopped {
            queue.watched.push(Watched { fd, session: Arc::downgrade(session), lender: None });
            queue.wake();
        }
        Ok(())
    }

    /// Keeps a session until all that it adopted is its owner's again.
    pub fn look_after(&self, lender: &Arc<Shared>) {
        let mut queue = self.lock();
        let known = queue.watched.iter_mut().find(|watched| watched.session.as_ptr() == Arc::as_ptr(lender));
        if let Some(watched) = known
            && watched.lender.is_none()
        {
            watched.lender = Some(lender.clone());
            queue.wake();
        }
    }

    /// Stops listening to sessions that are gone.
    pub fn forget_gone(&self) {
        let mut queue = self.lock();
        let gone = queue.watched.extract_if(.., |watched| watched.session.strong_count() == 0).collect::<Vec<_>>();
        queue.wake();
        drop(queue);
        drop(gone);
    }

    /// Starts the thread, unless it runs.
    pub fn start(&self, py: Python<'_>) -> PyResult<()> {
        static START: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        {
            let mut queue = self.lock();
            if queue.wake.is_some() || queue.is_stopped {
                return Ok(());
            }
            let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|error| Error::system("eventfd", "raise RLIMIT_NOFILE or close descriptors", error));
            queue.wake = Some(Arc::new(wake.or_raise()?));
        }
        let start = START.get_or_try_init(py, || py.import("gpu_ipc._threads")?.getattr("start").map(Bound::unbind));
        let started = start.and_then(|start| start.call0(py));
        if started.is_err() {
            self.lock().wake = None;
        }
        started.map(drop)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something to do; `None` when the thread is to end.
    fn next(&self) -> Option<Work> {
        loop {
            let (wake, watched, looks) = {
                let queue = self.lock();
                if queue.is_stopped {
                    return None;
                }
                if !queue.garbage.is_empty() || !queue.lines.is_empty() {
                    // What is given up comes in bursts, and each turn of this thread costs its caller the interpreter's
                    // lock: it takes its turn once for a burst.
                    drop(queue);
                    std::thread::sleep(BURST);
                    let mut queue = self.lock();
                    let (garbage, lines) = (std::mem::take(&mut queue.garbage), std::mem::take(&mut queue.lines));
                    return Some(Work { garbage, lines, heard: Vec::new(), lenders: Vec::new() });
                }
                let watched: Vec<_> = queue.watched.iter().map(|one| (one.fd.clone(), one.session.clone())).collect();
                let looks = queue.watched.iter().filter_map(|one| one.lender.as_ref()).any(|one| one.lends_storages());
                (queue.wake.clone()?, watched, looks)
            };
            let mut fds = vec![PollFd::new(&*wake, PollFlags::IN)];
            fds.extend(watched.iter().map(|(fd, _)| PollFd::new(&**fd, PollFlags::IN)));
            let time = Timespec::try_from(LOOK_EVERY).ok().filter(|_| looks);
            let ready = poll(&mut fds, time.as_ref());
            if ready == Ok(0) {
                let lenders = self.lock().watched.iter().filter_map(|one| one.lender.clone()).collect();
                return Some(Work { garbage: Vec::new(), lines: Vec::new(), heard: Vec::new(), lenders });
            }
            let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            if is_ready(&fds[0]) {
                // Emptied before the queue is looked at again.
                let _ = rustix::io::read(&wake, &mut [0; 8]);
            }
            let heard = fds[1..].iter().zip(&watched).filter(|(fd, _)| is_ready(fd));
            let heard: Vec<_> = heard.filter_map(|(_, (_, session))| session.upgrade()).collect();
            if !heard.is_empty() {
                return Some(Work { garbage: Vec::new(), lines: Vec::new(), heard, lenders: Vec::new() });
            }
        }
    }

    /// Gives up the hold on sessions that have nothing lent any more.
    fn let_go(&self) -> Vec<Arc<Shared>> {
        let mut queue = self.lock();
        let done = |watched: &&mut Watched| watched.lender.as_ref().is_some_and(|lender| lender.lends_nothing());
        queue.watched.iter_mut().filter(done).filter_map(|watched| watched.lender.take()).collect()
    }
}

/// Run the thread that empties the queue, until `_stop`.
#[pyfunction(name = "_keep")]
pub(crate) fn keep(py: Python<'_>) {
    let keeper = &process().keeper;
    loop {
        let Some(Work { garbage, lines, heard, lenders }) = py.detach(|| keeper.next()) else { return };
        drop(garbage);
        lines.into_iter().for_each(|line| logging::tell(py, line));
        // Asked without the interpreter's lock, dropped with it: a `__del__` may run here, and no lock of ours is held.
        let returned: Vec<_> = py.detach(|| heard.iter().flat_map(|session| session.hear()).collect());
        drop(returned);
        lenders.iter().for_each(|lender| lender.look_for_freed(py));
        py.detach(|| {
            drop((heard, lenders));
            drop(keeper.let_go());
        });
    }
}

/// Stop the thread. What is given up from here on is leaked.
#[pyfunction(name = "_stop")]
pub(crate) fn stop() {
    let keeper = &process().keeper;
    let (garbage, lines, watched) = {
        let mut queue = keeper.lock();
        queue.is_stopped = true;
        queue.wake();
        let queue = &mut *queue;
        (std::mem::take(&mut queue.garbage), std::mem::take(&mut queue.lines), std::mem::take(&mut queue.watched))
    };
    drop((garbage, lines));
    // Somebody may still read what they lent: the references in them are for the end of the process.
    watched.into_iter().for_each(|watched| std::mem::forget(watched.lender));
}
