//! Closing what other processes sent.
//!
//! A close can take as long as the maker of the file likes: a TCP socket that lingers, a file of a
//! user-space file system. So nothing that was received is closed on a session's thread: dropping a
//! [`Foreign`] hands it to threads that do nothing else, as many as there are closes that take
//! long.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpu_api::thread;

/// Closes under way at once, at most. A descriptor's number is free when its close begins.
const MOST_THREADS: usize = 64;
/// Descriptors that wait, from which on no more should be taken in.
const CROWDED: usize = 256;
/// How long a thread waits for the next before it ends.
const IDLE: Duration = Duration::from_secs(1);
/// A thread only closes.
const STACK: usize = 64 << 10;

/// Closes descriptors on threads of its own, made when they are needed. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Closer(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<Queue>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<OwnedFd>,
    threads: usize,
    /// Of those, how many wait for something to close.
    idle: usize,
}

impl Closer {
    /// Takes charge of a descriptor that came from elsewhere.
    pub fn guard(&self, fd: OwnedFd) -> Foreign {
        Foreign {
            fd: ManuallyDrop::new(fd),
            closer: self.clone(),
        }
    }

    /// Returns whether too many descriptors wait for their close to take in more.
    pub fn is_crowded(&self) -> bool {
        self.0.state().waiting.len() >= CROWDED
    }

    fn close(&self, fd: OwnedFd) {
        let mut state = self.0.state();
        state.waiting.push_back(fd);
        if state.idle >= state.waiting.len() {
            self.0.more.notify_one();
            return;
        }
        if state.threads >= MOST_THREADS {
            return;
        }
        state.threads += 1;
        drop(state);
        let shared = self.0.clone();
        let started = thread::start_with_stack("gpu-ipc-closer", STACK, move || shared.run());
        if let Err(error) = started {
            // It stays open until the next is closed: too late is safe.
            tracing::warn!(%error, "no thread to close a descriptor");
            self.0.state().threads -= 1;
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, Queue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.state();
        loop {
            while let Some(fd) = state.waiting.pop_front() {
                drop(state);
                drop(fd);
                state = self.state();
            }
            state.idle += 1;
            let (after, wait) = self
                .more
                .wait_timeout(state, IDLE)
                .unwrap_or_else(PoisonError::into_inner);
            state = after;
            state.idle -= 1;
            if wait.timed_out() && state.waiting.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

/// A descriptor that came from another process. Its drop never blocks.
#[derive(Debug)]
pub struct Foreign {
    fd: ManuallyDrop<OwnedFd>,
    closer: Closer,
}

impl AsFd for Foreign {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: `ManuallyDrop::take` asks that the value is not used again: this is its owner's
        // drop.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        self.closer.close(fd);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use super::*;

    /// A TCP connection whose close takes a minute: its peer reads nothing, and much is unsent.
    fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut ours =
            TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
        let (theirs, _) = listener.accept().expect("accepted");
        rustix::net::sockopt::set_socket_linger(&ours, Some(Duration::from_secs(60)))
            .expect("it lingers");
        ours.set_nonblocking(true).expect("not blocking");
        while ours.write(&[0; 65_536]).is_ok() {}
        (ours.into(), theirs)
    }

    #[test]
    fn a_close_that_takes_long_keeps_no_other() {
        let closer = Closer::default();
        let slow: Vec<_> = (0..8).map(|_| lingering()).collect();
        let mut readers = Vec::new();
        for (fd, theirs) in slow {
            drop(closer.guard(fd));
            readers.push(theirs);
        }
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let start = Instant::now();
        drop(closer.guard(writer.into()));
        assert_eq!(reader.read(&mut [0]).expect("the pipe's end"), 0);
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "it was closed after the slow ones"
        );
        drop(readers);
    }

    #[test]
    fn threads_end_when_nothing_is_left() {
        let closer = Closer::default();
        for _ in 0..100 {
            let (_, writer) = std::io::pipe().expect("a pipe");
            drop(closer.guard(writer.into()));
        }
        while closer.0.state().threads > 0 {
            std::thread::yield_now();
        }
        assert!(closer.0.state().waiting.is_empty() && !closer.is_crowded());
    }
}
