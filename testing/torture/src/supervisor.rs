//! The supervisor: starts the other processes, kills them, stops them, and waits for the end.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::process::{Signal, WaitOptions, WaitStatus, getpid, set_child_subreaper, wait};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use super::directory::Dir;
use super::fork::KILLED;
use super::options::{Control, PATIENCE, TortureOptions};
use super::process::{Process, Role, can_be_contained, command, free_slot};
use super::report::Report;
use super::shared_stats::{Board, Count, Phase};
use super::visitor::can_be_nobody;
use gpu_ipc_cli::choice::Vendor;
use gpu_ipc_cli::output;
use harness::rng::{Dice, chosen_seed};

/// Producers at a time that are killed, or end. Two more live for the whole run, one of them on a
/// small device, each with a consumer that does.
const PRODUCERS: usize = 2;
/// Visitors at a time.
const VISITORS: usize = 2;
/// Between two looks.
const TICK: Duration = Duration::from_millis(5);
/// A process that does nothing for this long hangs. A claim that meets a stopped producer takes
/// seconds.
const SILENCE: Duration = Duration::from_secs(45);
/// Why a run ended that a signal asked to.
pub(super) const INTERRUPTED: &str = "it was interrupted, so nothing can be said of the run";
/// A host device so small that it is full at times.
const HOST_BYTES: &str = "1572864";

/// Runs until the time is over, or until a control's fault shows, and says what was found and which
/// process crashed.
pub fn run(
    options: &TortureOptions,
    backend: Vendor,
    device: &str,
    can_grow: bool,
) -> Result<(Report, Vec<String>), String> {
    // Whatever orphans are left behind become this process' to wait for.
    let _ = set_child_subreaper(Some(getpid()));
    let seed = options.seed.unwrap_or_else(chosen_seed);
    if !options.json {
        output::print(&format!("seed {seed}"))?;
    }
    let dir = Dir::new()?;
    let board =
        Board::open(&dir.0.join("board")).map_err(|e| format!("memory cannot be shared: {e}"))?;
    let mut torment = Torment {
        options,
        backend,
        device,
        dir: &dir.0,
        asked_to_end: end_when_asked()?,
        board,
        dice: Dice::new(seed, 0),
        seed,
        serial: 0,
        processes: Vec::new(),
        contained: options.control.is_none() && can_be_contained(),
        crashes: Vec::new(),
        report: Report {
            seconds: options.seconds,
            seed,
            can_grow,
            control: options.control,
            ..Report::default()
        },
    };
    if torment.options.control.is_none() {
        for small in [false, true] {
            torment.start(Role::Producer, None, Some(small))?;
        }
    }
    if let Err(why) = torment.work().and_then(|()| torment.end()) {
        torment.kill_everybody();
        return Err(why);
    }
    Ok((torment.finished(), std::mem::take(&mut torment.crashes)))
}

/// Notes the signals that ask for the end, so that the run's folder goes with it. A second one ends
/// it at once.
fn end_when_asked() -> Result<Arc<AtomicBool>, String> {
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register_conditional_default(signal, asked.clone())
            .and_then(|_| flag::register(signal, asked.clone()))
            .map_err(|error| format!("signals cannot be caught: {error}"))?;
    }
    Ok(asked)
}

struct Torment<'a> {
    options: &'a TortureOptions,
    backend: Vendor,
    device: &'a str,
    dir: &'a Path,
    asked_to_end: Arc<AtomicBool>,
    board: &'static Board,
    dice: Dice,
    seed: u64,
    serial: u64,
    processes: Vec<Process>,
    contained: bool,
    crashes: Vec<String>,
    report: Report,
}

impl Torment<'_> {
    fn work(&mut self) -> Result<(), String> {
        let end = Instant::now() + Duration::from_secs(self.options.seconds);
        while Instant::now() < end && !self.is_found() {
            self.refill()?;
            self.hurt();
            self.look_after()?;
            std::thread::sleep(TICK);
        }
        Ok(())
    }

    /// Says whether a control's fault shows already. The counter's shows at the end.
    fn is_found(&self) -> bool {
        let shows = matches!(
            self.options.control,
            Some(Control::BlindTimeout | Control::UnpinnedPiece)
        );
        shows && self.board.counted(Count::EarlyReuse) != 0
    }

    /// Starts what is missing.
    fn refill(&mut self) -> Result<(), String> {
        let mortal = |p: &&Process| p.role == Role::Producer && !p.told_to_end && !p.lifelong;
        for _ in self.processes.iter().filter(mortal).count()..PRODUCERS {
            self.start(Role::Producer, None, None)?;
        }
        let up = |p: &&Process| p.role == Role::Producer && !p.told_to_end && p.is_up(self.board);
        let hosts: Vec<u64> = self.processes.iter().filter(up).map(|p| p.serial).collect();
        let consumers = self
            .processes
            .iter()
            .filter(|p| p.role == Role::Consumer && !p.lifelong)
            .count();
        for _ in consumers..self.options.consumers as usize {
            let Some(&producer) = self.dice.one_of(&hosts) else {
                break;
            };
            self.start(Role::Consumer, Some(producer), None)?;
        }
        let visitors = self
            .processes
            .iter()
            .filter(|p| p.role == Role::Visitor)
            .count();
        for _ in visitors..if self.options.control.is_none() {
            VISITORS
        } else {
            0
        } {
            let Some(&producer) = self.dice.one_of(&hosts) else {
                break;
            };
            self.start(Role::Visitor, Some(producer), None)?;
        }
        let alone = |producer: &&Process| {
            let of = |p: &Process| {
                p.role == Role::Consumer && p.lifelong && p.producer == producer.serial
            };
            producer.lifelong && producer.is_up(self.board) && !self.processes.iter().any(of)
        };
        let producers = self.processes.iter().filter(|p| p.role == Role::Producer);
        for producer in producers
            .filter(alone)
            .map(|p| p.serial)
            .collect::<Vec<u64>>()
        {
            self.start(Role::Consumer, Some(producer), Some(false))?;
        }
        Ok(())
    }

    /// Starts a process. A producer that is `lifelong` lives for the whole run, on a small device
    /// if that is so.
    fn start(
        &mut self,
        role: Role,
        producer: Option<u64>,
        lifelong: Option<bool>,
    ) -> Result<(), String> {
        self.serial += 1;
        let (serial, slot) = (self.serial, free_slot(&self.processes)?);
        let producer = producer.unwrap_or(serial);
        let contained = role == Role::Consumer
            && lifelong.is_none()
            && self.contained
            && self.dice.in_thousand(100);
        let mut command = command(contained)?;
        let numbers = [serial, producer, self.seed, slot as u64].map(|number| number.to_string());
        command.args([
            "member",
            "--backend",
            self.backend.kind().name(),
            "--device",
            self.device,
            "--dir",
        ]);
        command.arg::<&OsStr>(self.dir.as_ref());
        for (name, number) in ["--serial", "--producer", "--seed", "--slot"]
            .iter()
            .zip(&numbers)
        {
            command.args([name, number.as_str()]);
        }
        if let Some(control) = self
            .options
            .control
            .and_then(|control| control.to_possible_value())
        {
            command.args(["--control", control.get_name()]);
        }
        if role == Role::Visitor {
            command.arg("--visitor");
        }
        if lifelong.is_some() {
            command.args(["--lasts", &self.options.seconds.to_string()]);
        }
        // Only the host's devices can be made small.
        if role == Role::Producer && lifelong != Some(false) && self.backend.kind().in_host_memory()
        {
            command.arg("--small").env("GPU_IPC_HOST_BYTES", HOST_BYTES);
        }
        let mut process = Process::start(
            command,
            self.board,
            role,
            (serial, producer, slot),
            contained,
        )?;
        process.lifelong = lifelong.is_some();
        self.processes.push(process);
        Ok(())
    }

    /// Kills, stops or ends somebody, or nobody.
    fn hurt(&mut self) {
        let now = Instant::now();
        for process in &mut self.processes {
            if let Some((since, until)) = process.stopped
                && until <= now
            {
                process.stopped = None;
                if process.role == Role::Producer {
                    // Participants that died meanwhile had to wait until it went on.
                    self.board.excuse_deaths(process.serial, since.elapsed());
                }
                process.signal(Signal::CONT);
            }
        }
        // Two hundred ticks a second.
        let control = self.options.control.is_some();
        if self.dice.in_thousand(20) {
            self.kill(Role::Consumer);
        }
        if self.dice.in_thousand(3) {
            self.kill(Role::Visitor);
        }
        if self.dice.in_thousand(40) {
            self.stop();
        }
        if !control && self.dice.in_thousand(3) {
            self.kill(Role::Producer);
        }
        if !control && self.dice.in_thousand(1) {
            let running: Vec<usize> =
                self.candidates(|p| p.role == Role::Producer && !p.told_to_end && !p.lifelong);
            if let Some(&place) = self.dice.one_of(&running) {
                self.processes[place].told_to_end = true;
                self.processes[place]
                    .member(self.board)
                    .ending
                    .store(1, Ordering::Release);
            }
        }
    }

    fn candidates(&self, which: impl Fn(&Process) -> bool) -> Vec<usize> {
        let is_one = |place: &usize| {
            let process = &self.processes[*place];
            process.is_up(self.board) && which(process)
        };
        (0..self.processes.len()).filter(is_one).collect()
    }

    fn kill(&mut self, role: Role) {
        let all = self.candidates(|p| p.role == role && !p.told_to_end && !p.lifelong);
        let Some(&place) = self.dice.one_of(&all) else {
            return;
        };
        let process = &self.processes[place];
        let member = process.member(self.board);
        match role {
            Role::Producer => self.board.end_deaths(process.serial),
            Role::Visitor => {}
            // The time to the return is that of a death alone: not while its producer stands still.
            Role::Consumer => {
                let ends = self
                    .processes
                    .iter()
                    .any(|p| p.serial == process.producer && p.told_to_end);
                if !ends && !process.contained && member.forked.load(Ordering::Acquire) == 0 {
                    self.board
                        .note_death(process.producer, member.participant.load(Ordering::Relaxed));
                }
            }
        }
        process.signal(Signal::KILL);
        member.serial.store(0, Ordering::Release);
    }

    fn stop(&mut self) {
        let producers = self.options.control.is_none() && self.dice.in_thousand(100);
        let all = self.candidates(|p| {
            (p.role == Role::Consumer || producers)
                && !p.contained
                && p.stopped.is_none()
                && !p.told_to_end
        });
        let Some(&place) = self.dice.one_of(&all) else {
            return;
        };
        let time = Duration::from_millis(10 + self.dice.below(1200));
        let process = &mut self.processes[place];
        process.signal(Signal::STOP);
        let now = Instant::now();
        process.stopped = Some((now, now + time));
        self.report.stops += 1;
    }

    /// Waits for processes that ended, and finds those that hang.
    fn look_after(&mut self) -> Result<(), String> {
        if self.asked_to_end.load(Ordering::Relaxed) {
            return Err(INTERRUPTED.into());
        }
        while let Some((pid, status)) = ended()? {
            // Others are orphans.
            let Some(place) = self.processes.iter().position(|process| process.pid == pid) else {
                continue;
            };
            let process = self.processes.swap_remove(place);
            process
                .member(self.board)
                .serial
                .store(0, Ordering::Release);
            if process.role == Role::Producer {
                self.board.end_deaths(process.serial);
            }
            match (status.terminating_signal(), process.role) {
                (Some(libc::SIGKILL), Role::Producer) => self.report.producer_kills += 1,
                (Some(libc::SIGKILL), Role::Consumer) => self.report.kills += 1,
                (Some(libc::SIGKILL), Role::Visitor) => {}
                (None, Role::Consumer) if status.exit_status() == Some(KILLED) => {
                    self.report.kills += 1
                }
                (None, _) if status.exit_status() == Some(0) => {}
                _ => self.crashes.push(format!(
                    "process {} ({:?}) ended by itself: {status:?}",
                    process.serial, process.role
                )),
            }
        }
        for process in &mut self.processes {
            let limit = if process.told_to_end {
                SILENCE + PATIENCE
            } else {
                SILENCE
            };
            if process.silence(self.board) > limit {
                self.report.hung += 1;
                output::complain(&format!(
                    "process {} ({:?}) did nothing for {} s and is killed",
                    process.serial,
                    process.role,
                    limit.as_secs()
                ));
                process.told_to_end = true;
                process.signal(Signal::KILL);
            }
        }
        Ok(())
    }

    /// Lets everybody come to an end: producers fall silent, consumers take what is on its way and
    /// let go, producers look whether anything is still held, consumers leave, and producers look
    /// what is left.
    fn end(&mut self) -> Result<(), String> {
        for process in &mut self.processes {
            if let Some((since, _)) = process.stopped.take() {
                if process.role == Role::Producer {
                    self.board.excuse_deaths(process.serial, since.elapsed());
                }
                process.signal(Signal::CONT);
            }
        }
        self.board.enter(Phase::Quiet);
        let producing = |torment: &Self, p: &Process| {
            p.role == Role::Producer && p.member(torment.board).ending.load(Ordering::Acquire) < 2
        };
        self.until_none(|torment| {
            torment
                .processes
                .iter()
                .filter(|p| producing(torment, p))
                .count()
        })?;
        self.board.enter(Phase::LetGo);
        let holding = |torment: &Self, p: &Process| {
            p.role == Role::Consumer && p.member(torment.board).ending.load(Ordering::Acquire) != 2
        };
        self.until_none(|torment| {
            torment
                .processes
                .iter()
                .filter(|p| holding(torment, p))
                .count()
        })?;
        self.board.enter(Phase::Settle);
        let unsettled = |torment: &Self, p: &Process| {
            let ending = p.member(torment.board).ending.load(Ordering::Acquire);
            p.role == Role::Producer && !p.told_to_end && ending != 3
        };
        self.until_none(|torment| {
            torment
                .processes
                .iter()
                .filter(|p| unsettled(torment, p))
                .count()
        })?;
        self.board.enter(Phase::Leave);
        self.until_none(|torment| {
            torment
                .processes
                .iter()
                .filter(|p| p.role != Role::Producer)
                .count()
        })?;
        self.board.enter(Phase::Finish);
        for process in &mut self.processes {
            process.told_to_end = true;
        }
        self.until_none(|torment| torment.processes.len())
    }

    /// Kills and waits for all of them: a living one would write into a folder that is removed.
    fn kill_everybody(&mut self) {
        for process in &self.processes {
            process.signal(Signal::KILL);
        }
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end && !self.processes.is_empty() {
            match ended() {
                Ok(Some((pid, _))) => self.processes.retain(|process| process.pid != pid),
                Ok(None) => std::thread::sleep(TICK),
                Err(_) => return,
            }
        }
    }

    fn until_none(&mut self, mut count: impl FnMut(&Self) -> usize) -> Result<(), String> {
        while count(self) != 0 {
            self.look_after()?;
            std::thread::sleep(TICK);
        }
        Ok(())
    }

    fn finished(&self) -> Report {
        let counted = |what| self.board.counted(what);
        if !self.options.json {
            let rest = [
                Count::Refused,
                Count::Forwards,
                Count::NoRoom,
                Count::Full,
                Count::FewFiles,
                Count::LateWrites,
                Count::TooLate,
            ];
            let rest: Vec<String> = rest
                .iter()
                .map(|&what| format!("{}: {}", what.in_words(), counted(what)))
                .collect();
            let _ = output::print(&format!("processes: {}\n{}", self.serial, rest.join("\n")));
        }
        Report {
            forks: counted(Count::Forks),
            claims: counted(Count::Claims),
            across: counted(Count::Across),
            early_reuse: counted(Count::EarlyReuse),
            double_retire: counted(Count::DoubleRetire),
            leaked_blocks: counted(Count::LeakedBlocks),
            leaked_regions: counted(Count::LeakedRegions),
            grown: counted(Count::Grown),
            out_of_memory: counted(Count::OutOfMemory),
            reclaims: counted(Count::Reclaims),
            silent: counted(Count::Silent),
            nonsense: counted(Count::Nonsense),
            abandoned: counted(Count::Abandoned),
            half_closed: counted(Count::HalfClosed),
            gave_up: counted(Count::GaveUp),
            strangers: counted(Count::Strangers),
            has_strangers: can_be_nobody(),
            visits: counted(Count::Visits),
            max_death_to_reclaim_ms: self.board.slowest_reclaim_ms(),
            crashes: self.crashes.len() as u64,
            ..self.report.clone()
        }
    }
}

/// Waits for any child that has ended, without waiting for one to end.
fn ended() -> Result<Option<(rustix::process::Pid, WaitStatus)>, String> {
    match wait(WaitOptions::NOHANG) {
        Ok(ended) => Ok(ended),
        Err(rustix::io::Errno::CHILD) => Ok(None),
        Err(error) => Err(format!("processes cannot be waited for: {error}")),
    }
}
