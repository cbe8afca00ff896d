//! The thread for driver calls that may block while any stream of the process waits: close, unregister.
//!
//! It is started by the first such call, and ends when its owner has gone and the last call is done.

use std::fmt;
use std::sync::mpsc::{Sender, channel};

type Job = Box<dyn FnOnce() + Send>;

/// Sends calls to the thread.
#[derive(Default)]
pub struct Blocking {
    jobs: Option<Sender<Job>>,
}

impl Blocking {
    /// Runs `job` on the thread, after those that were sent before.
    ///
    /// Without a thread (the process may start no more) the job is leaked with what it holds: what it would give back
    /// stays taken, which is safe.
    pub fn run(&mut self, job: impl FnOnce() + Send + 'static) {
        let jobs = self.jobs.get_or_insert_with(|| {
            let (sender, receiver) = channel::<Job>();
            let thread = std::thread::Builder::new().name("gpu-ipc-blocking".into());
            let spawned = thread.spawn(move || receiver.into_iter().for_each(|job| job()));
            if let Err(error) = spawned {
                tracing::warn!(%error, "no thread for blocking calls; what they would give back is leaked");
            }
            sender
        });
        if let Err(unsent) = jobs.send(Box::new(job)) {
            std::mem::forget(unsent.0);
        }
    }
}

impl fmt::Debug for Blocking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocking").field("started", &self.jobs.is_some()).finish()
    }
}
