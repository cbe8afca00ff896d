//! Wake-ups: of the session's thread, and of callers that wait for a change of the session.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use gpu_api::Result;
use gpu_api::lock::{Acquire, AwaitChange};

use transport::os::waker::Waker;

/// Threads that sleep until something happens.
#[derive(Debug)]
pub(crate) struct Wakeups {
    /// The session's thread.
    pub thread: Waker,
    /// Callers that wait for a change.
    waiters: AtomicUsize,
    changes: Mutex<Changes>,
    changed: Condvar,
}

/// How often something changed, and how many wait for the next time.
#[derive(Debug, Default)]
struct Changes {
    count: u64,
    waiting: u32,
}

impl Wakeups {
    /// Makes them.
    ///
    /// # Errors
    ///
    /// [`Error::System`](gpu_api::Error::System) when the process has no descriptor left.
    pub fn new() -> Result<Wakeups> {
        let (waiters, changes, changed) = (AtomicUsize::new(0), Mutex::default(), Condvar::new());
        Ok(Wakeups {
            thread: Waker::new()?,
            waiters,
            changes,
            changed,
        })
    }

    /// Says whether a caller waits. One that begins at this very moment and is not seen looks again
    /// within 100 ms.
    pub fn has_waiters(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) > 0
    }

    /// Tells the callers that wait to look again. Without one no system call.
    pub fn announce_change(&self) {
        let mut changes = self.changes.acquire();
        changes.count += 1;
        if changes.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Waits until `done` gives something, looking again at every change; `None` after so long.
    pub fn wait_for<T>(
        &self,
        timeout: Option<Duration>,
        done: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let value = self.wait_as_waiter(deadline, done);
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        value
    }

    fn wait_as_waiter<T>(
        &self,
        deadline: Option<Instant>,
        mut done: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        loop {
            let seen = self.changes.acquire().count;
            if let Some(value) = done() {
                return Some(value);
            }
            self.thread.nudge();
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            // The thread announces what it finds; the bound here is for a change that only the
            // caller could find.
            let wait = left
                .unwrap_or(Duration::MAX)
                .min(Duration::from_millis(100));
            if wait == Duration::ZERO {
                // Whatever has changed since the look: changes may never end.
                return None;
            }
            let mut changes = self.changes.acquire();
            if changes.count != seen {
                continue;
            }
            changes.waiting += 1;
            changes = self.changed.await_change(changes, Some(wait));
            changes.waiting -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_at_its_deadline_however_often_something_changes() {
        let wakeups = std::sync::Arc::new(Wakeups::new().expect("a descriptor"));
        let (done, ended) = std::sync::mpsc::channel();
        let waiter = wakeups.clone();
        std::thread::spawn(move || {
            // Something changes during each look.
            let look = || {
                waiter.announce_change();
                None::<()>
            };
            let _ = done.send(waiter.wait_for(Some(Duration::ZERO), look));
        });
        let waited = ended.recv_timeout(Duration::from_secs(120));
        assert_eq!(waited, Ok(None), "it looks for ever");
    }
}
