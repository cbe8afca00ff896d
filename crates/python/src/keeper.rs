//! What other threads leave to Python: references to drop, lines to log, adopted memory to give back.
//!
//! A thread of the library, or one that drops an array, may hold locks that a Python thread waits for; if it waited for
//! the interpreter's lock, both would wait for ever. So it puts what it gives up into a queue, and one Python thread,
//! `gpu-ipc`, empties it. The thread is a daemon that `atexit` stops; what is given up after that is leaked.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::logging::{self, Line};
use crate::process::process;
use crate::shared::Shared;

/// How often sessions are asked for adopted memory that is its owner's again, while some is lent.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Lines kept for a thread that does not come; what is logged on top is dropped.
const MOST_LINES: usize = 1024;

#[derive(Default)]
struct Queue {
    garbage: Vec<Py<PyAny>>,
    lines: Vec<Line>,
    lenders: Vec<Arc<Shared>>,
    is_running: bool,
    is_stopped: bool,
}

/// What the thread does next.
struct Work {
    garbage: Vec<Py<PyAny>>,
    lines: Vec<Line>,
    lenders: Vec<Arc<Shared>>,
}

/// The queue of a process.
#[derive(Default)]
pub(crate) struct Keeper {
    queue: Mutex<Queue>,
    more: Condvar,
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
        self.more.notify_one();
    }

    /// Leaves a line to be logged.
    pub fn log(&self, line: Line) {
        let mut queue = self.lock();
        if !queue.is_stopped && queue.lines.len() < MOST_LINES {
            queue.lines.push(line);
            self.more.notify_one();
        }
    }

    /// Looks after a session until all that it adopted is its owner's again.
    pub fn look_after(&self, lender: &Arc<Shared>) {
        let mut queue = self.lock();
        if !queue.is_stopped && !queue.lenders.iter().any(|known| Arc::ptr_eq(known, lender)) {
            queue.lenders.push(lender.clone());
            self.more.notify_one();
        }
    }

    /// Starts the thread, unless it runs.
    pub fn start(&self, py: Python<'_>) -> PyResult<()> {
        static START: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        {
            let mut queue = self.lock();
            if queue.is_running || queue.is_stopped {
                return Ok(());
            }
            queue.is_running = true;
        }
        let start = START.get_or_try_init(py, || py.import("gpu_ipc._threads")?.getattr("start").map(Bound::unbind))?;
        start.call0(py).map(drop)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something to do; `None` when the thread is to end.
    fn next(&self) -> Option<Work> {
        let mut queue = self.lock();
        loop {
            if queue.is_stopped {
                return None;
            }
            if !queue.garbage.is_empty() || !queue.lines.is_empty() {
                break;
            }
            if queue.lenders.is_empty() {
                queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let (woken, waited) = self.more.wait_timeout(queue, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            if waited.timed_out() {
                break;
            }
        }
        let (garbage, lines) = (std::mem::take(&mut queue.garbage), std::mem::take(&mut queue.lines));
        Some(Work { garbage, lines, lenders: queue.lenders.clone() })
    }

    /// Stops looking after the sessions that have nothing lent any more, and gives up its hold on them.
    fn forget(&self, done: impl Fn(&Shared) -> bool) -> Vec<Arc<Shared>> {
        let mut queue = self.lock();
        let (done, kept) = std::mem::take(&mut queue.lenders).into_iter().partition(|lender| done(lender));
        queue.lenders = kept;
        done
    }
}

/// Run the thread that empties the queue, until `_stop`.
#[pyfunction(name = "_keep")]
pub(crate) fn keep(py: Python<'_>) {
    let keeper = &process().keeper;
    loop {
        let Some(Work { garbage, lines, lenders }) = py.detach(|| keeper.next()) else { return };
        drop(garbage);
        lines.into_iter().for_each(|line| logging::tell(py, line));
        if lenders.is_empty() {
            continue;
        }
        // Asked without the interpreter's lock, dropped with it: a `__del__` may run here, and no lock of ours is held.
        let returned: Vec<_> = py.detach(|| lenders.iter().flat_map(|lender| lender.take_back()).collect());
        drop(returned);
        lenders.iter().for_each(|lender| lender.look_for_freed(py));
        let forgotten = py.detach(|| {
            drop(lenders);
            keeper.forget(|lender| lender.lends_nothing())
        });
        py.detach(|| drop(forgotten));
    }
}

/// Stop the thread. What is given up from here on is leaked.
#[pyfunction(name = "_stop")]
pub(crate) fn stop() {
    let keeper = &process().keeper;
    let (garbage, lines, lenders) = {
        let mut queue = keeper.lock();
        queue.is_stopped = true;
        keeper.more.notify_all();
        let queue = &mut *queue;
        (std::mem::take(&mut queue.garbage), std::mem::take(&mut queue.lines), std::mem::take(&mut queue.lenders))
    };
    drop((garbage, lines));
    // Somebody may still read what they lent: the references in them are for the end of the process.
    std::mem::forget(lenders);
}
