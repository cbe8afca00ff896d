//! The thread for driver calls that may block while any stream of the process waits: close,
//! unregister.
//!
//! It is started by the first such call, and ends when its owner has gone and the last call is
//! done. When the process may start no thread at a moment, what is to be called waits, and the
//! owner tries again: one refusal loses nothing.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};

type Job = Box<dyn FnOnce() + Send>;

/// Sends calls to the thread.
#[derive(Default)]
pub struct Blocking {
    jobs: Option<Sender<Job>>,
    /// Calls that found no thread.
    waiting: VecDeque<Job>,
}

impl Blocking {
    /// Runs `job` on the thread, after those that were sent before. One that panics ends alone.
    pub fn run(&mut self, job: impl FnOnce() + Send + 'static) {
        self.waiting.push_back(Box::new(job));
        self.retry();
    }

    /// Sends what waits for a thread, if there may be one.
    pub fn retry(&mut self) {
        while let Some(job) = self.waiting.pop_front() {
            let Some(jobs) = self.thread() else {
                return self.waiting.push_front(job);
            };
            if let Err(unsent) = jobs.send(job) {
                // It ended, which it does not by itself.
                self.jobs = None;
                self.waiting.push_front(unsent.0);
            }
        }
    }

    /// Says whether something waits for a thread: [`retry`](Blocking::retry) in a while.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn thread(&mut self) -> Option<&Sender<Job>> {
        if self.jobs.is_none() {
            let (sender, receiver) = channel::<Job>();
            let run = move || {
                for job in receiver {
                    if catch_unwind(AssertUnwindSafe(job)).is_err() {
                        tracing::error!(
                            "a call that may block panicked; what it would give back is leaked"
                        );
                    }
                }
            };
            match gpu_api::thread::start("gpu-ipc-blocking", run) {
                Ok(_) => self.jobs = Some(sender),
                Err(error) => {
                    tracing::debug!(%error, "no thread for blocking calls at this moment")
                }
            }
        }
        self.jobs.as_ref()
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        // What found no thread to the end is leaked with what it holds: what it would give back
        // stays taken, which is safe.
        if !self.waiting.is_empty() {
            tracing::warn!(
                calls = self.waiting.len(),
                "no thread for blocking calls; what they would give back is leaked"
            );
            self.waiting.drain(..).for_each(std::mem::forget);
        }
    }
}

impl fmt::Debug for Blocking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocking")
            .field("started", &self.jobs.is_some())
            .field("waiting", &self.waiting.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_panics_takes_no_other_with_it() {
        let mut blocking = Blocking::default();
        let (done, heard) = channel();
        blocking.run(|| panic!("a driver's wrapper may"));
        blocking.run(move || done.send(()).expect("the test waits"));
        heard.recv().expect("the second call ran");
        assert!(!blocking.is_waiting());
    }
}
