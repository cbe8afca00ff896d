//! Calls of the runtime that another process holds up, on threads that can be left to them.
//!
//! Where memory is handed out by a thread of the exporter's runtime, an open waits for that thread:
//! 10 s for one that has gone, and without end where the exporter dies meanwhile (rocr,
//! `IPCRecvHandle`; ROCm/rocm-systems#9827). An export waits for it too, while a consumer that was
//! stopped does not confirm what it opened. Neither call can be cut short. So each runs on a thread
//! of its own, which is left when the exporter has died or the call has taken too long.
//!
//! | | the call returns in time | it is left |
//! |---|---|---|
//! | who takes what it made | the waiting thread | the call's own thread, which undoes it |
//! | the exporter's turn | ends with the call | ends with the call; until then [`Left::Stuck`] |
//!
//! [`Slot`] changes under its lock only, so that exactly one of the two takes what was made.
//!
//! Such a thread has all signals blocked, and the runtime's thread inherits that. Neither side's
//! writes to a broken socket then end the process by SIGPIPE, for which the runtime does nothing
//! (rocr, `IPCSendHandle`, `IPCSocketWrite`).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use gpu_api::Result;
use gpu_api::lock::{Acquire, AwaitChange};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::Timespec;

/// What a call may take: the runtime itself waits 10 s for a server.
pub(crate) const MAX_CALL: Duration = Duration::from_secs(12);

/// The time between two looks at the exporter.
const LOOK: Duration = Duration::from_millis(10);

/// A process whose memory is exported or opened.
#[derive(Debug, Default)]
pub(crate) struct Exporter {
    /// Held over each call: the runtime does not stand an export and an open of one allocation at
    /// once.
    turn: Mutex<()>,
    /// Calls that were left and have not returned.
    left: AtomicUsize,
}

/// Why a call was left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Left {
    /// The exporter has died.
    Died,
    /// It took too long.
    Slow,
    /// An earlier call about this exporter was left, and has not returned.
    Stuck,
}

impl Left {
    /// Says what happened, and what to do about it.
    pub(crate) const fn meaning(self) -> &'static str {
        match self {
            Left::Died => "the exporting process has died",
            Left::Slow => {
                "the runtime of the exporting process does not answer: a process that opens its memory was stopped or \
                 killed meanwhile (ROCm/rocm-systems#9827); let that go on or end, or share by file descriptor"
            }
            Left::Stuck => {
                "an earlier call about this process's memory has not returned (ROCm/rocm-systems#9827); start this \
                 process again, or share by file descriptor"
            }
        }
    }
}

/// Where a call puts what it made.
enum Slot<T> {
    Running,
    Made(T),
    Left,
}

impl Exporter {
    /// Waits for the calls of other threads about this exporter.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.acquire()
    }

    /// Runs `call` in its turn and waits for it, as long as `process` lives and [`MAX_CALL`] allows.
    /// `undo` gets what a call made that was left.
    ///
    /// # Errors
    ///
    /// [`Error::System`](gpu_api::Error::System) where no thread can be started.
    pub(crate) fn run<T: Send + 'static>(
        self: &Arc<Exporter>,
        process: Option<u32>,
        call: impl FnOnce() -> T + Send + 'static,
        undo: impl FnOnce(T) + Send + 'static,
    ) -> Result<std::result::Result<T, Left>> {
        if self.left.load(Ordering::Relaxed) > 0 {
            return Ok(Err(Left::Stuck));
        }
        let process = process.and_then(Life::of);
        if process.as_ref().is_some_and(Life::has_ended) {
            return Ok(Err(Left::Died));
        }
        let shared = Arc::new((Mutex::new(Slot::Running), Condvar::new()));
        let (exporter, theirs) = (Arc::clone(self), Arc::clone(&shared));
        let run = move || {
            let turn = exporter.turn();
            let made = call();
            let mut slot = theirs.0.acquire();
            if matches!(*slot, Slot::Running) {
                *slot = Slot::Made(made);
                theirs.1.notify_one();
                return;
            }
            drop(slot);
            undo(made);
            drop(turn);
            exporter.left.fetch_sub(1, Ordering::Relaxed);
        };
        gpu_api::thread::start("gpu-ipc-hip-ipc", run)?;
        let until = Instant::now() + MAX_CALL;
        let mut slot = shared.0.acquire();
        loop {
            if let Slot::Made(made) = std::mem::replace(&mut *slot, Slot::Running) {
                return Ok(Ok(made));
            }
            let why = if process.as_ref().is_some_and(Life::has_ended) {
                Left::Died
            } else if Instant::now() > until {
                Left::Slow
            } else {
                slot = shared.1.await_change(slot, Some(LOOK));
                continue;
            };
            *slot = Slot::Left;
            self.left.fetch_add(1, Ordering::Relaxed);
            return Ok(Err(why));
        }
    }
}

/// The life of a process.
struct Life(rustix::fd::OwnedFd);

impl Life {
    /// Finds a process by its number; `None` where this PID namespace has none of that number: the
    /// exporter may be in another.
    fn of(process: u32) -> Option<Life> {
        let pid = Pid::from_raw(process.cast_signed())?;
        pidfd_open(pid, PidfdFlags::empty()).ok().map(Life)
    }

    fn has_ended(&self) -> bool {
        let mut ended = [PollFd::new(&self.0, PollFlags::IN)];
        matches!(poll(&mut ended, Some(&Timespec::default())), Ok(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::process::{Command, Stdio};
    use std::sync::mpsc;

    /// A call that is held up by a process that dies is left, and what it makes later is undone.
    #[test]
    fn a_call_that_outlives_the_exporter_is_left_and_undone() {
        let mut process = Command::new("cat");
        let process = process.stdin(Stdio::piped()).spawn();
        let mut process = process.expect("it starts");
        let exporter = Arc::new(Exporter::default());
        let (go, gate) = mpsc::channel::<()>();
        let (undone, was_undone) = mpsc::channel();
        let (begun, has_begun) = mpsc::channel();
        let number = process.id();
        let (theirs, undo) = (Arc::clone(&exporter), move |made| {
            undone.send(made).expect("the test waits");
        });
        let waiting = std::thread::spawn(move || {
            let call = move || {
                begun.send(()).expect("the test waits");
                let _ = gate.recv();
                7
            };
            theirs.run(Some(number), call, undo)
        });
        has_begun.recv().expect("it begins");
        process.kill().expect("it is alive");
        process.wait().expect("it ends");
        let left = waiting.join().expect("no panic").expect("a thread starts");
        assert_eq!(left, Err(Left::Died));
        // The turn is that call's still.
        let next = exporter.run(None, || 8, |_| ());
        assert_eq!(next.expect("it is asked"), Err(Left::Stuck));
        drop(go);
        assert_eq!(was_undone.recv(), Ok(7));
        while exporter.left.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let next = exporter.run(None, || 8, |_| ());
        assert_eq!(next.expect("a thread starts"), Ok(8));
    }

    #[test]
    fn a_process_that_has_ended_is_asked_for_nothing() {
        let mut process = Command::new("true").spawn().expect("it starts");
        let life = Life::of(process.id()).expect("it is a child");
        process.wait().expect("it ends");
        assert!(life.has_ended());
    }

    /// What the runtime starts or writes to in a call cannot end the process by SIGPIPE.
    #[test]
    fn a_call_has_every_signal_blocked() {
        let call = || {
            let status = std::fs::read_to_string("/proc/thread-self/status");
            let status = status.expect("it is there");
            let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
            u64::from_str_radix(mask.expect("a mask").trim(), 16).expect("hexadecimal")
        };
        let exporter = Arc::new(Exporter::default());
        let mask = exporter.run(None, call, |_| ()).expect("a thread starts");
        assert_ne!(mask.expect("it returns") & 1 << (libc::SIGPIPE - 1), 0);
    }
}
