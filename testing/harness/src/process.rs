//! A process of ours, whatever it runs.

use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, waitid,
};

use crate::{WATCHDOG, wait_until};

/// A process. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Process(pub Child);

impl Process {
    /// Starts a command.
    ///
    /// # Panics
    ///
    /// When it does not start.
    #[track_caller]
    pub fn start(command: &mut Command) -> Process {
        Process(
            command
                .spawn()
                .unwrap_or_else(|error| panic!("{command:?} does not start: {error}")),
        )
    }

    /// Returns its number.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it is a child of ours");
    }

    /// Stops it, and waits until all of its threads stand still. The signal alone comes to one of
    /// them, which stops the others once it runs.
    ///
    /// # Panics
    ///
    /// When it does not stop.
    #[track_caller]
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let (id, options) = (
            WaitId::Pid(Pid::from_child(&self.0)),
            WaitIdOptions::STOPPED | WaitIdOptions::NOHANG,
        );
        wait_until("a process to stop", || {
            waitid(id.clone(), options)
                .expect("it is a child of ours")
                .is_some()
        });
    }

    /// Waits until it is gone.
    ///
    /// # Panics
    ///
    /// When it does not go in time.
    #[track_caller]
    pub fn wait(&mut self, watchdog: Duration) -> ExitStatus {
        if let Ok(Some(status)) = self.0.try_wait() {
            return status;
        }
        assert!(
            goes_within(Pid::from_child(&self.0), watchdog),
            "process {} does not end",
            self.pid()
        );
        self.0.wait().expect("it is a child of ours")
    }

    /// Kills it at once, and waits until it is gone.
    #[track_caller]
    pub fn kill(&mut self) {
        self.0.kill().expect("it is a child of ours");
        self.wait(WATCHDOG);
    }
}

/// Waits for the end of a child of this process, and says whether it came in time.
#[track_caller]
pub(crate) fn goes_within(pid: Pid, time: Duration) -> bool {
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("it is a child of ours");
    let time = Timespec {
        tv_sec: time.as_secs().cast_signed(),
        tv_nsec: 0,
    };
    loop {
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&time)) {
            Err(rustix::io::Errno::INTR) => {}
            polled => return polled.is_ok_and(|ready| ready > 0),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
