//! The supervisor: starts the other processes, kills them, stops them, and waits for the end.

use std::path::Path;
use std::time::{Duration, Instant};

use gpu_ipc::Gpu;
use gpu_ipc::broker::Client;
use gpu_ipc::broker::server::listing::Row;
use rustix::process::{Pid, Signal, kill_process};

use super::contents::NAMES;
use super::journal::{self, Journal};
use super::ledger::POOLS;
use super::member::Member;
use super::report::Report;
use super::seat::Role;
use super::tally::{Count, Tally};
use crate::directory::Dir;
use crate::options::{Control, PATIENCE, TortureOptions};
use gpu_ipc_cli::output;
use gpu_ipc_cli::owner::Owner;
use harness::rng::{Dice, chosen_seed};

/// How many processes of each role there are at a time, writing ones first.
const OF_OBJECTS: [(Role, usize); 2] = [(Role::Writer, 2), (Role::Reader, 4)];
const OF_POOLS: [(Role, usize); 2] = [(Role::Holder, 4), (Role::Onlooker, 2)];
/// Epochs of a name that the broker keeps.
const EPOCHS: usize = 2;
/// The bytes that the first broker is told as its limit.
const FIRST_LIMIT: u64 = 16 << 30;
/// Descriptors of a keeper that is too small for the objects of a run.
const FEW: usize = 7;
/// How long a keeper is stopped that is to be found silent.
const LONG_STOP: Duration = Duration::from_secs(4);
/// How long more than two brokers may be there: one that waits ends soon after its keeper.
const CROWD: Duration = Duration::from_secs(5);
/// Between two looks.
const TICK: Duration = Duration::from_millis(5);
/// A process that does nothing for this long hangs: a commit may meet a stopped broker and a new
/// keeper.
const SILENCE: Duration = Duration::from_secs(45);

/// Runs until the time is over, or until the control's fault shows, and says what was found and
/// which process crashed.
pub fn run(options: &TortureOptions, gpu: &Gpu) -> Result<(Report, Vec<String>), String> {
    let seed = options.seed.unwrap_or_else(chosen_seed);
    if !options.json {
        output::print(&format!("seed {seed}"))?;
    }
    let dir = Dir::new()?;
    let tally =
        Tally::open(&dir.0.join("tally")).map_err(|e| format!("memory cannot be shared: {e}"))?;
    let control = options.control;
    let words = words(control, FIRST_LIMIT);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let log = journal::path(&dir.0);
    let owner = Owner::start_logging(gpu, dir.0.join("broker"), &words, Some(log))?;
    let journal = Journal::open(&dir.0, "torture".into());
    let watcher = owner.connect(gpu, "torture")?;
    let mut torment = Torment {
        gpu,
        dir: &dir.0,
        owner,
        watcher,
        tally,
        journal: journal.map_err(|e| format!("no journal: {e}"))?,
        dice: Dice::new(seed, 0),
        seed,
        serial: 0,
        members: Vec::new(),
        owners: [None; 2],
        whole: false,
        crashes: Vec::new(),
        report: Report {
            seconds: options.seconds,
            seed,
            control: control.is_some(),
            pools: options.pools,
            ..Report::default()
        },
        control,
        roles: if options.pools { OF_POOLS } else { OF_OBJECTS },
        limit: FIRST_LIMIT,
        fresh: false,
        is_small: false,
        crowded: None,
        counted: Instant::now(),
        silence: true,
    };
    let end = Instant::now() + Duration::from_secs(options.seconds);
    // What comes after a finding does not explain it.
    while Instant::now() < end && !torment.finished().has_finding() {
        torment.refill()?;
        torment.hurt()?;
        torment.look_after()?;
        std::thread::sleep(TICK);
    }
    torment.end()?;
    let report = torment.finished();
    if control.is_none() && (report.has_finding() || report.crashes > 0) {
        output::complain(&journal::last(&dir.0));
    }
    Ok((report, std::mem::take(&mut torment.crashes)))
}

/// Says what a broker is told. The limit is never reached: it tells the brokers of one keeper from
/// those of another.
fn words(control: Option<Control>, limit: u64) -> Vec<String> {
    let mut words = vec![
        "--keep-epochs".to_owned(),
        EPOCHS.to_string(),
        "--limit".to_owned(),
        limit.to_string(),
    ];
    if control == Some(Control::BlindBroker) {
        words.push("--publish-blindly".to_owned());
    }
    words
}

struct Torment<'a> {
    gpu: &'a Gpu,
    dir: &'a Path,
    owner: Owner,
    watcher: Client,
    tally: &'static Tally,
    journal: Journal,
    dice: Dice,
    seed: u64,
    serial: u64,
    members: Vec<Member>,
    /// Broker and keeper that are stopped, and when they go on.
    owners: [Option<(Pid, Instant)>; 2],
    /// The broker that has the lock serves, and its keeper has everything: one of them may die.
    whole: bool,
    crashes: Vec<String>,
    report: Report,
    control: Option<Control>,
    roles: [(Role, usize); 2],
    /// The limit that the brokers of the last keeper are told.
    limit: u64,
    /// The broker that serves next is the last keeper's.
    fresh: bool,
    /// The keeper has no room for every object.
    is_small: bool,
    /// Since when there have been more brokers than two.
    crowded: Option<Instant>,
    /// When they were counted last.
    counted: Instant,
    /// A keeper that is stopped need not be found silent: it was, or it is not stopped for long.
    silence: bool,
}

impl Torment<'_> {
    fn refill(&mut self) -> Result<(), String> {
        for (role, count) in self.roles {
            for _ in self
                .members
                .iter()
                .filter(|member| member.role == role)
                .count()..count
            {
                self.start(role)?;
            }
        }
        Ok(())
    }

    fn start(&mut self, role: Role) -> Result<(), String> {
        self.serial += 1;
        let taken = |slot: &usize| self.members.iter().any(|member| member.slot == *slot);
        let slot = (0..super::tally::MOST_MEMBERS)
            .find(|slot| !taken(slot))
            .ok_or("too many processes")?;
        let member = Member::start(
            (self.gpu, self.dir, self.control),
            role,
            (self.serial, self.seed, slot),
            self.tally.beats(slot),
        )?;
        self.members.push(member);
        Ok(())
    }

    /// Kills or stops somebody, or nobody. Two hundred times a second.
    fn hurt(&mut self) -> Result<(), String> {
        self.go_on(Instant::now());
        self.look_whether_whole();
        self.look_for_crowd();
        if self.dice.in_thousand(10) {
            let role = self.roles[self.dice.below(2) as usize].0;
            // One that has not begun teaches nothing.
            let working: Vec<usize> = (0..self.members.len())
                .filter(|&at| {
                    let member = &self.members[at];
                    member.role == role
                        && !member.killed
                        && self.tally.beats(member.slot) != member.seen.0
                })
                .collect();
            if let Some(&at) = self.dice.one_of(&working) {
                self.members[at].killed = true;
                self.members[at].signal(Signal::KILL);
            }
        }
        if self.dice.in_thousand(20) {
            self.stop();
        }
        let may_kill = self.whole && !self.awaits_silence();
        if may_kill && self.dice.in_thousand(12) {
            self.kill_broker();
        } else if may_kill && self.dice.in_thousand(5) {
            self.kill_keeper()?;
        } else if may_kill && self.dice.in_thousand(5) {
            self.upgrade()?;
        }
        Ok(())
    }

    fn kill_broker(&mut self) {
        if let Some(broker) = self.owner.broker() {
            self.journal.note(&format!("kills broker {broker}"));
            let _ = kill_process(broker, Signal::KILL);
            self.report.broker_kills += 1;
            self.whole = false;
            self.fresh = true;
        }
    }

    /// Kills the keeper, and starts one with other options; now and then one that is too small.
    fn kill_keeper(&mut self) -> Result<(), String> {
        let small = !self.is_small && self.dice.in_thousand(300);
        self.tell(small.then_some(FEW));
        self.note_keeper("kills keeper");
        self.owner.kill_keeper()?;
        self.owners[1] = None;
        self.owner.start_keeper()?;
        self.note_keeper("started keeper");
        self.report.keeper_kills += 1;
        self.whole = false;
        Ok(())
    }

    /// Lets another keeper take over, and then often kills the broker at once: what it had is in the
    /// new keeper, though it has given it nothing.
    fn upgrade(&mut self) -> Result<(), String> {
        self.tell(None);
        if self.control == Some(Control::LossyUpgrade) {
            self.note_keeper("ends instead of replacing keeper");
            self.owner.kill_keeper()?;
            self.kill_broker();
            self.owners[1] = None;
            return self.owner.start_keeper();
        }
        // One that is stopped hands nothing over.
        self.go_on(Instant::now() + Duration::from_secs(3_600));
        self.note_keeper("replaces keeper");
        self.owner.replace_keeper()?;
        self.note_keeper("everything was taken over by keeper");
        self.report.upgrades += 1;
        self.whole = false;
        if self.dice.in_thousand(500) {
            self.kill_broker();
        }
        Ok(())
    }

    fn note_keeper(&self, what: &str) {
        let keeper = self
            .owner
            .keeper()
            .map_or(0, |pid| pid.as_raw_nonzero().get());
        let room = if self.is_small { ", a small one" } else { "" };
        self.journal
            .note(&format!("{what} {keeper} (limit {}{room})", self.limit));
    }

    /// Gives the next keeper other options than the last one's.
    fn tell(&mut self, most: Option<usize>) {
        self.limit += 1 << 20;
        self.owner.tell(words(self.control, self.limit), most);
        self.is_small = most.is_some();
        self.fresh = false;
    }

    fn stop(&mut self) {
        let mut until = Instant::now() + Duration::from_millis(5 + self.dice.below(400));
        let is_calm = self.whole && self.owners.iter().all(Option::is_none);
        if is_calm && self.dice.in_thousand(60) {
            until = Instant::now() + LONG_STOP;
            self.silence = false;
            return self.stop_owner(1, self.owner.keeper(), until);
        }
        match self.dice.below(4) {
            2 if self.owners[0].is_none() => self.stop_owner(0, self.owner.broker(), until),
            3 if self.owners[1].is_none() => self.stop_owner(1, self.owner.keeper(), until),
            which @ (0 | 1) => {
                let role = self.roles[which as usize].0;
                let running: Vec<usize> = (0..self.members.len())
                    .filter(|&at| {
                        self.members[at].role == role && self.members[at].stopped.is_none()
                    })
                    .collect();
                if let Some(&at) = self.dice.one_of(&running) {
                    self.members[at].signal(Signal::STOP);
                    self.members[at].stopped = Some(until);
                    self.report.stops[which as usize] += 1;
                }
            }
            _ => {}
        }
    }

    fn stop_owner(&mut self, which: usize, pid: Option<Pid>, until: Instant) {
        if let Some(pid) = pid.filter(|pid| kill_process(*pid, Signal::STOP).is_ok()) {
            let (what, ms) = (
                ["broker", "keeper"][which],
                until.saturating_duration_since(Instant::now()).as_millis(),
            );
            self.journal
                .note(&format!("stops {what} {pid} for {ms} ms"));
            self.owners[which] = Some((pid, until));
            self.report.stops[2 + which] += 1;
        }
    }

    /// Says whether a keeper is stopped for long and was not found silent yet.
    fn awaits_silence(&self) -> bool {
        self.owners[1].is_some() && !self.silence
    }

    fn go_on(&mut self, now: Instant) {
        for member in &mut self.members {
            if member.stopped.is_some_and(|until| until <= now) {
                member.stopped = None;
                member.signal(Signal::CONT);
            }
        }
        for (which, stopped) in self.owners.iter_mut().enumerate() {
            if let Some((pid, until)) = *stopped
                && until <= now
            {
                // It may have been killed meanwhile.
                self.journal.note(&format!("lets {pid} go on"));
                let _ = kill_process(pid, Signal::CONT);
                *stopped = None;
                self.silence |= which == 1;
            }
        }
    }

    /// Looks whether the broker that has the lock serves, with a keeper that has everything. Until
    /// then neither may be killed: both at once lose what nobody has mapped, as they must.
    fn look_whether_whole(&mut self) {
        // A broker that died while its keeper is stopped answers when the keeper goes on, which
        // this thread sees to.
        if self.whole && self.owners[0].is_none() && self.awaits_silence() {
            let listing = self.watcher.list();
            self.silence = listing.is_ok_and(|listing| listing.keeper == "silent");
            self.report.silences += u64::from(self.silence);
        }
        if self.whole || self.owners.iter().any(Option::is_some) {
            return;
        }
        let Ok(listing) = self.watcher.list() else {
            return;
        };
        if listing.keeper == "full" {
            self.report.fills += u64::from(self.is_small);
            // What it has no room for is in the broker alone, until a larger one is there.
            let failed = self.kill_keeper().err();
            return self.crashes.extend(failed);
        }
        let holder = self
            .owner
            .broker()
            .map(|pid| pid.as_raw_nonzero().get().cast_unsigned());
        self.whole = listing.keeper == "fed" && holder == Some(listing.pid);
        if self.whole {
            let (pid, objects) = (listing.pid, listing.objects.len());
            self.journal.note(&format!(
                "broker {pid} says that its keeper has all {objects} objects"
            ));
        }
        if self.whole && std::mem::take(&mut self.fresh) && listing.limit != Some(self.limit) {
            self.report.stale += 1;
            self.crashes.push(format!(
                "a broker serves with the limit {:?}, and its keeper's is {}",
                listing.limit, self.limit
            ));
        }
    }

    /// Counts the brokers, once a second: one serves, and one may wait.
    fn look_for_crowd(&mut self) {
        if self.counted.elapsed() < Duration::from_secs(1) {
            return;
        }
        self.counted = Instant::now();
        let crowd = self.owner.brokers().len() > 2;
        match self.crowded {
            _ if !crowd => self.crowded = None,
            None => self.crowded = Some(Instant::now()),
            Some(since) if since.elapsed() > CROWD => {
                self.report.piled += 1;
                self.crowded = None;
            }
            Some(_) => {}
        }
    }

    /// Waits for processes that ended, and finds those that hang.
    fn look_after(&mut self) -> Result<(), String> {
        let mut at = 0;
        while at < self.members.len() {
            let member = &mut self.members[at];
            let ended = member
                .child
                .try_wait()
                .map_err(|e| format!("a process cannot be waited for: {e}"))?;
            if let Some(status) = ended {
                let member = self.members.swap_remove(at);
                match member.role {
                    Role::Writer if member.killed => self.report.writer_kills += 1,
                    Role::Holder if member.killed => self.report.holder_kills += 1,
                    Role::Reader | Role::Onlooker if member.killed => {
                        self.report.reader_kills += 1;
                    }
                    _ if status.success() => {}
                    Role::Holder if self.tally.is_dead(member.slot, member.serial) => {}
                    role => self.crashes.push(format!(
                        "process {} ({role:?}) ended with {status}",
                        member.serial
                    )),
                }
                continue;
            }
            let (beats, now) = (self.tally.beats(member.slot), Instant::now());
            if member.stopped.is_some()
                || beats != member.seen.0 && now - member.seen.1 > SILENCE / 9
            {
                member.seen = (beats, now);
            }
            if !member.killed && now - member.seen.1 > SILENCE {
                self.report.hung += 1;
                output::complain(&format!(
                    "process {} ({:?}) did nothing for {} s and is killed",
                    member.serial,
                    member.role,
                    SILENCE.as_secs()
                ));
                member.killed = true;
                member.signal(Signal::KILL);
            }
            at += 1;
        }
        Ok(())
    }

    /// Lets everybody come to an end, and looks what is left: visible objects, the last epochs of
    /// each name.
    fn end(&mut self) -> Result<(), String> {
        self.go_on(Instant::now() + Duration::from_secs(3_600));
        self.tally.end();
        let start = Instant::now();
        while !self.members.is_empty() {
            if start.elapsed() > PATIENCE {
                self.report.hung += self.members.len() as u64;
                self.members
                    .iter()
                    .for_each(|member| member.signal(Signal::KILL));
                return Ok(());
            }
            self.look_after()?;
            std::thread::sleep(TICK);
        }
        let start = Instant::now();
        loop {
            let left = self.watcher.list().map(|listing| {
                let (whole, unfinished): (Vec<_>, Vec<_>) = listing
                    .objects
                    .into_iter()
                    .partition(|row| row.state == "visible" || row.state == "pool");
                let beyond = whole.len().saturating_sub(self.most_left());
                let read = whole.into_iter().filter(|row| {
                    let held = row.pool.as_ref().is_some_and(|pool| pool.holder.is_some());
                    held || !row.readers.is_empty()
                });
                let left: Vec<Row> = unfinished.into_iter().chain(read).collect();
                ((beyond + left.len()) as u64, left)
            });
            match left {
                Ok((0, _)) => return Ok(()),
                Ok((count, left)) if start.elapsed() > PATIENCE => {
                    self.report.leaked = count;
                    self.journal
                        .note(&format!("FOUND Leaked: {count}, among them {left:?}"));
                    return Ok(());
                }
                Err(error) if start.elapsed() > PATIENCE => {
                    return Err(gpu_ipc_cli::device::explain(&error));
                }
                _ => std::thread::sleep(TICK),
            }
        }
    }

    /// Returns how many objects, or pools, are there at the end, at most.
    fn most_left(&self) -> usize {
        if self.roles == OF_POOLS {
            POOLS
        } else {
            NAMES * EPOCHS
        }
    }

    fn finished(&mut self) -> Report {
        let counted = |what| self.tally.counted(what);
        let report = &self.report;
        Report {
            commits: counted(Count::Commits),
            hasty: counted(Count::Hasty),
            taken: counted(Count::Taken),
            opens: counted(Count::Opens),
            advances: counted(Count::Advances),
            wakes: counted(Count::Wakes),
            mixed: counted(Count::Mixed),
            lost: counted(Count::Lost),
            backwards: counted(Count::Backwards),
            adoptions: counted(Count::Adoptions),
            heirs: counted(Count::Heirs),
            seals: counted(Count::Seals),
            compared: counted(Count::Compared),
            looks: counted(Count::Looks),
            torn: counted(Count::Torn),
            children: counted(Count::Children),
            deaths: counted(Count::Deaths),
            doubled: counted(Count::Doubled),
            crashes: self.crashes.len() as u64,
            ..report.clone()
        }
    }
}

impl Drop for Torment<'_> {
    fn drop(&mut self) {
        self.go_on(Instant::now() + Duration::from_secs(3_600));
        for member in &mut self.members {
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
    }
}
