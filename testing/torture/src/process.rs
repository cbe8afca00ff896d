//! The processes of a run, as the one that torments them sees them.

use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use harness::program::{ends_well, start_unwatched};
use harness::surroundings::with_own_pids;
use rustix::process::{Pid, Signal, kill_process};

use super::shared_stats::{Board, MOST_MEMBERS, Member};

/// What a process does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Lends.
    Producer,
    /// Takes.
    Consumer,
    /// Connects, and does nothing with it.
    Visitor,
}

/// A process.
#[derive(Debug)]
pub struct Process {
    /// Its pid.
    pub pid: Pid,
    /// What it does.
    pub role: Role,
    /// Its number in the run.
    pub serial: u64,
    /// The serial of its producer; its own for a producer.
    pub producer: u64,
    /// Its place on the board.
    pub slot: usize,
    /// It runs under another one that makes a pid namespace, and only that one can be signalled.
    pub contained: bool,
    /// Since when it is stopped, and when it goes on.
    pub stopped: Option<(Instant, Instant)>,
    /// It lives for the whole run.
    pub lifelong: bool,
    /// It was told to end by itself.
    pub told_to_end: bool,
    /// The last beat that was seen, and when.
    seen: (u64, Instant),
}

impl Process {
    /// Starts a command as a process with a place on the board.
    pub fn start(
        mut command: Command,
        board: &Board,
        role: Role,
        (serial, producer, slot): (u64, u64, usize),
        contained: bool,
    ) -> Result<Process, String> {
        let member = board.member(slot);
        member.serial.store(0, Ordering::Relaxed);
        member.beat.store(0, Ordering::Relaxed);
        member.forked.store(0, Ordering::Relaxed);
        member.ending.store(0, Ordering::Release);
        let child = start_unwatched(command.stdin(Stdio::null()).stdout(Stdio::null()))?;
        // It is waited for by number, with the orphans that others leave behind.
        let pid = Pid::from_child(&child);
        let seen = (0, Instant::now());
        Ok(Process {
            pid,
            role,
            serial,
            producer,
            slot,
            contained,
            stopped: None,
            lifelong: false,
            told_to_end: false,
            seen,
        })
    }

    /// Sends it a signal; one that has just ended needs none.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(self.pid, signal);
    }

    /// Returns what it writes on the board.
    pub fn member<'a>(&self, board: &'a Board) -> &'a Member {
        board.member(self.slot)
    }

    /// Says whether it could be reached by others.
    pub fn is_up(&self, board: &Board) -> bool {
        self.member(board).serial.load(Ordering::Acquire) == self.serial
    }

    /// Says for how long it has done nothing.
    pub fn silence(&mut self, board: &Board) -> Duration {
        let beat = self.member(board).beat.load(Ordering::Relaxed);
        let now = Instant::now();
        if self.stopped.is_some() || beat != self.seen.0 {
            self.seen = (beat, now);
        }
        now - self.seen.1
    }
}

/// Finds a place on the board that no process has.
pub fn free_slot(processes: &[Process]) -> Result<usize, String> {
    let taken = |slot: &usize| processes.iter().any(|process| process.slot == *slot);
    (0..MOST_MEMBERS)
        .find(|slot| !taken(slot))
        .ok_or_else(|| "too many processes".to_owned())
}

/// Makes the command that runs this program, in a pid namespace of its own if that is wanted.
pub fn command(contained: bool) -> Result<Command, String> {
    let program =
        std::env::current_exe().map_err(|e| format!("the program cannot find itself: {e}"))?;
    if !contained {
        return Ok(Command::new(program));
    }
    let mut command = with_own_pids();
    command.arg(program);
    Ok(command)
}

/// Says whether processes can be started in a pid namespace of their own here.
pub fn can_be_contained() -> bool {
    ends_well(with_own_pids().arg("true"))
}
