//! Who runs a session's or participant's service: a thread of the library's own, or the application (manual mode).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use gpu_api::{Error, Result};

use channel::os::poller::Poller;
use channel::os::waker::Waker;

/// What goes on in the background of a session or participant.
pub(crate) trait Service: Send + 'static {
    /// The name of its thread, which the kernel cuts after 15 bytes.
    const THREAD: &'static str;

    /// Waits for something to do, at most `patience`, and does it.
    fn turn(&mut self, patience: Option<Duration>);
    /// Says after what time there may be something to do that no descriptor tells of; `None` for never.
    fn time_to_sleep(&mut self) -> Option<Duration>;
    /// Says whether nothing is left to do, ever.
    fn is_finished(&self) -> bool;
    /// Gives up what the service keeps: it is finished.
    fn end(&mut self);
    /// Returns what its turns wait on.
    fn poller(&self) -> &Poller;
    /// Returns what others wake it with.
    fn waker(&self) -> &Waker;

    /// Runs to the end.
    fn run(&mut self) {
        while !self.is_finished() {
            self.turn(None);
        }
        self.end();
    }

    /// Takes a turn for the application, and makes the poller's descriptor readable when the next is due.
    fn turn_by_hand(&mut self, patience: Duration) {
        self.turn(Some(patience));
        // From here on whoever makes work makes the descriptor readable.
        self.waker().doze();
        let due = self.time_to_sleep();
        self.poller().arm(due);
    }
}

/// Runs a service on a thread of its own.
///
/// # Errors
///
/// [`Error::System`] when the process may start no more threads.
pub(crate) fn start<S: Service>(mut service: S) -> Result<()> {
    spawn::<S>(move || service.run())
}

fn spawn<S: Service>(run: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(S::THREAD.into()).spawn(run);
    thread.map(drop).map_err(|e| Error::system("starting a thread", "raise RLIMIT_NPROC", e))
}

/// Where those who wait find a service that the application turns, to turn it themselves.
pub(crate) type Driver<S> = OnceLock<Weak<Mutex<S>>>;

/// Turns a service that is in manual mode and that nobody turns at this moment; says whether it did.
pub(crate) fn drive<S: Service>(driver: &Driver<S>, patience: Duration) -> bool {
    let Some(service) = driver.get().and_then(Weak::upgrade) else { return false };
    let Ok(mut service) = service.try_lock() else { return false };
    service.turn_by_hand(patience);
    true
}

/// A service that the application turns.
#[derive(Debug)]
pub(crate) struct Manual<S> {
    service: Arc<Mutex<S>>,
    /// A copy of the poller's, which is behind the lock.
    fd: OwnedFd,
}

impl<S: Service> Manual<S> {
    /// Takes a service, and tells `driver` of it.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when no descriptor is left.
    pub fn new(mut service: S, driver: &Driver<S>) -> Result<Manual<S>> {
        service.turn_by_hand(Duration::ZERO);
        let fd = service.poller().fd().try_clone_to_owned();
        let fd = fd.map_err(|e| Error::system("dup", "raise RLIMIT_NOFILE or close descriptors", e))?;
        let service = Arc::new(Mutex::new(service));
        let _ = driver.set(Arc::downgrade(&service));
        Ok(Manual { service, fd })
    }

    /// Does what there is to do at this moment.
    pub fn turn(&self) {
        self.service.lock().unwrap_or_else(PoisonError::into_inner).turn_by_hand(Duration::ZERO);
    }

    /// Ends the service when nobody turns it any more: at once, or on a thread while something is left to do.
    pub fn finish(self) {
        let finished = {
            let mut service = self.service.lock().unwrap_or_else(PoisonError::into_inner);
            service.turn_by_hand(Duration::ZERO);
            let finished = service.is_finished();
            if finished {
                service.end();
            }
            finished
        };
        if finished {
            return;
        }
        let rest = self.service.clone();
        if let Err(error) = spawn::<S>(move || rest.lock().unwrap_or_else(PoisonError::into_inner).run()) {
            tracing::warn!(%error, "what is still held is leaked");
            std::mem::forget(self.service);
        }
    }
}

impl<S> AsFd for Manual<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Refuses a turn where a thread takes them.
pub(crate) fn not_manual(what: &'static str, must: &'static str) -> Error {
    Error::Invalid { what, got: "one with a thread of its own".into(), must }
}
