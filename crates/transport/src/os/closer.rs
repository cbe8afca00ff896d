//! Closing what other processes sent.
//!
//! A close can take as long as the maker of the file likes: a TCP socket that lingers, a file of a
//! user-space file system. So nothing that was received is closed on a session's thread: dropping a
//! [`Foreign`] hands it to threads that do nothing else, as many as there are closes that take
//! long, up to `MOST_THREADS`.
//!
//! All sessions of a process share these threads, so that a burst of sessions does not start some
//! for each. The closes of one session take up at most `MOST_OF_ONE` of them: a participant that
//! sends what takes long to close delays the closes of other sessions no further than that of its
//! own.
//!
//! A forked child has none of its parent's threads, and begins with a pool of its own.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use gpu_api::lock::Acquire;
use gpu_api::{ForkGuard, Result, thread};

/// Closes under way at once, at most. A descriptor's number is free when its close begins.
const MOST_THREADS: usize = 64;
/// Closes of one session under way at once, at most.
const MOST_OF_ONE: usize = 32;
/// Descriptors of one session that wait, from which on no more should be taken in.
const CROWDED: usize = 256;
/// How long a thread waits for the next before it ends.
const IDLE: Duration = Duration::from_secs(1);
/// A thread only closes.
const STACK: usize = 64 << 10;

/// The pool of this process, once a session was opened. Not behind a lock: a child may be forked
/// while another thread has it.
static POOL: ArcSwapOption<Pool> = ArcSwapOption::const_empty();

/// Closes descriptors of one session on the process' threads, made when they are needed. Cheap to
/// clone.
#[derive(Clone, Debug)]
pub struct Closer {
    pool: Arc<Pool>,
    owner: Arc<Owner>,
}

/// What one session has given to close. Changed under the pool's lock.
#[derive(Debug, Default)]
struct Owner {
    waiting: AtomicUsize,
    closing: AtomicUsize,
}

#[derive(Debug)]
struct Pool {
    guard: ForkGuard,
    state: Mutex<Queue>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(OwnedFd, Arc<Owner>)>,
    threads: usize,
    /// Of those, how many wait for something to close.
    idle: usize,
}

impl Closer {
    /// Makes one for a session of this process.
    ///
    /// # Errors
    ///
    /// [`Error::System`](gpu_api::Error::System) without memory for a page.
    pub fn new() -> Result<Closer> {
        if let Some(pool) = POOL.load_full().filter(|pool| !pool.guard.is_child()) {
            return Ok(Closer::of(pool));
        }
        let new = Arc::new(Pool::new()?);
        // Of two threads that come here at once, both take the pool of the first.
        POOL.rcu(|there| match there {
            Some(there) if !there.guard.is_child() => there.clone(),
            _ => new.clone(),
        });
        Ok(Closer::of(POOL.load_full().unwrap_or(new)))
    }

    fn of(pool: Arc<Pool>) -> Closer {
        Closer {
            pool,
            owner: Arc::default(),
        }
    }

    /// Takes charge of a descriptor that came from elsewhere.
    pub fn guard(&self, fd: OwnedFd) -> Foreign {
        Foreign {
            fd: ManuallyDrop::new(fd),
            closer: self.clone(),
        }
    }

    /// Returns whether too many descriptors of the session wait for their close to take in more.
    pub fn is_crowded(&self) -> bool {
        self.owner.waiting.load(Ordering::Relaxed) >= CROWDED
    }

    fn close(&self, fd: OwnedFd) {
        let mut state = self.pool.state.acquire();
        self.owner.waiting.fetch_add(1, Ordering::Relaxed);
        state.waiting.push_back((fd, self.owner.clone()));
        if state.idle > 0 {
            self.pool.more.notify_one();
        } else {
            self.pool.start_one(&mut state);
        }
    }
}

impl Queue {
    /// Finds what is closed next: the first whose session does not take up its share of threads.
    fn next(&self) -> Option<usize> {
        let has_share = |owner: &Owner| owner.closing.load(Ordering::Relaxed) < MOST_OF_ONE;
        self.waiting.iter().position(|(_, owner)| has_share(owner))
    }
}

impl Pool {
    fn new() -> Result<Pool> {
        Ok(Pool {
            guard: ForkGuard::new()?,
            state: Mutex::default(),
            more: Condvar::new(),
        })
    }

    /// Starts a thread for what waits, if one may be started and has something to do.
    fn start_one(self: &Arc<Pool>, state: &mut Queue) {
        if state.threads >= MOST_THREADS || state.next().is_none() {
            return;
        }
        let pool = self.clone();
        match thread::start_with_stack("gpu-ipc-closer", STACK, move || pool.run()) {
            Ok(_) => state.threads += 1,
            // It stays open until the next is closed: too late is safe.
            Err(error) => tracing::warn!(%error, "no thread to close a descriptor"),
        }
    }

    fn run(self: Arc<Pool>) {
        let mut state = self.state.acquire();
        loop {
            while let Some((fd, owner)) = state.next().and_then(|at| state.waiting.remove(at)) {
                owner.waiting.fetch_sub(1, Ordering::Relaxed);
                owner.closing.fetch_add(1, Ordering::Relaxed);
                // This close may take long, and what waits behind it must not.
                if state.idle == 0 {
                    self.start_one(&mut state);
                }
                drop(state);
                drop(fd);
                state = self.state.acquire();
                owner.closing.fetch_sub(1, Ordering::Relaxed);
            }
            state.idle += 1;
            let (after, wait) = self
                .more
                .wait_timeout(state, IDLE)
                .unwrap_or_else(PoisonError::into_inner);
            state = after;
            state.idle -= 1;
            if wait.timed_out() && state.next().is_none() {
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
        let closer = Closer::of(Arc::new(Pool::new().expect("a page")));
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
        let closer = Closer::of(Arc::new(Pool::new().expect("a page")));
        for _ in 0..100 {
            let (_, writer) = std::io::pipe().expect("a pipe");
            drop(closer.guard(writer.into()));
        }
        while closer.pool.state.acquire().threads > 0 {
            std::thread::yield_now();
        }
        assert!(closer.pool.state.acquire().waiting.is_empty() && !closer.is_crowded());
    }

    #[test]
    fn sessions_of_one_process_share_a_bounded_number_of_threads() {
        let pool = Arc::new(Pool::new().expect("a page"));
        let mut most = 0;
        let closers: Vec<_> = (0..200).map(|_| Closer::of(pool.clone())).collect();
        let mut readers = Vec::new();
        for closer in &closers {
            for _ in 0..4 {
                let (reader, writer) = std::io::pipe().expect("a pipe");
                drop(closer.guard(writer.into()));
                readers.push(reader);
            }
            most = most.max(pool.state.acquire().threads);
        }
        for mut reader in readers {
            assert_eq!(reader.read(&mut [0]).expect("the pipe's end"), 0);
        }
        assert!((1..=MOST_THREADS).contains(&most), "{most} threads");
    }

    #[test]
    fn closes_of_one_session_that_take_long_leave_threads_for_another() {
        let pool = Arc::new(Pool::new().expect("a page"));
        let (one, other) = (Closer::of(pool.clone()), Closer::of(pool.clone()));
        let mut readers = Vec::new();
        for _ in 0..MOST_OF_ONE + 8 {
            let (fd, theirs) = lingering();
            drop(one.guard(fd));
            readers.push(theirs);
        }
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        drop(other.guard(writer.into()));
        assert_eq!(reader.read(&mut [0]).expect("the pipe's end"), 0);
        assert!(
            one.owner.closing.load(Ordering::Relaxed) <= MOST_OF_ONE,
            "one session takes up more than its share"
        );
        drop(readers);
    }

    #[test]
    fn closers_of_a_process_have_one_pool() {
        let [one, other] = [(); 2].map(|()| Closer::new().expect("a page"));
        assert!(Arc::ptr_eq(&one.pool, &other.pool) && !Arc::ptr_eq(&one.owner, &other.owner));
    }
}
