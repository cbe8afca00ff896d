//! Everything at random: commits, removals and pulls on three hosts, while processes are killed and
//! stopped, brokers and keepers are killed, gateways are replaced, links go down, and a relay
//! delays, cuts and truncates. A seed repeats the order of what is done, not what the kernel does.
//!
//! One step in [`REUSE_EVERY`] is no chance: a pull is stopped in its middle until its lease has
//! ended and its object's name and memory are another's. So a pull that commits without a
//! confirmation is caught in some hundred steps.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant, SystemTime};

use gateway::plan::Dice;
use gateway::step::{RING_STEPS, STEPS};
use rustix::process::Signal;

use crate::cases::STALLS_AFTER;
use crate::host::{Process, Pulling, Serving};
use crate::relay::{Fault, Relay};
use crate::watch::{WATCHDOG, until};
use crate::world::{Means, World};

const HOSTS: u8 = 3;
/// Names and their homes.
const NAMES: [(&str, usize); 2] = [("a", 0), ("b", 1)];
/// The name whose memory is used again while a pull of it is stopped, and its home.
const REUSED: (&str, usize) = ("reused", 0);
/// Steps from one such use to the next.
const REUSE_EVERY: u64 = 30;
/// Of every object, so that one fits in the place of another. Several times what the origin copies
/// at once and what connections hold, so that a pull that stops in its middle has not got the rest
/// already.
const BYTES: usize = 8 << 20;
/// How much later each piece of a read comes while memory is used again: so the middle lasts longer
/// than the moment until the signal stops the process.
const SLOWLY: Duration = Duration::from_millis(2);
/// Pulls at a time: one more and two cores do nothing but start processes.
const MOST_PULLS: usize = 4;
/// Shorter than most stops.
const LEASE_MS: u64 = 600;
/// How long something stays stopped or down.
const MOST_MS: u64 = 1_500;

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Where chance begins.
    pub seed: u64,
    /// For how long at most.
    pub time: Duration,
    /// For how many steps at most.
    pub steps: u64,
    /// Pulls commit only what was confirmed; those of the control do not.
    pub confirms: bool,
}

/// A pull that runs.
struct Running {
    pull: Process,
    host: usize,
    /// Since when it is stopped, and for how long.
    stopped: Option<(Instant, Duration)>,
}

struct Chaos {
    world: World,
    dice: Dice,
    confirms: bool,
    pulls: Vec<Running>,
    /// Until when a host's gateway is stopped, and its link down.
    stopped: BTreeMap<usize, Instant>,
    down: BTreeMap<usize, Instant>,
    /// A relay before a host, and until when it is there.
    relay: Option<(Relay, Instant)>,
    steps: u64,
    done: BTreeMap<&'static str, u64>,
}

/// Does it, and returns figures.
///
/// # Errors
///
/// What was found.
pub fn run(means: &Means, plan: &Plan) -> Result<String, String> {
    let world = World::create(means, HOSTS, &serving(plan.confirms))?;
    let mut chaos = Chaos {
        world,
        dice: Dice::new(plan.seed),
        confirms: plan.confirms,
        pulls: Vec::new(),
        stopped: BTreeMap::new(),
        down: BTreeMap::new(),
        relay: None,
        steps: 0,
        done: BTreeMap::new(),
    };
    let started = Instant::now();
    let mut found = Ok(());
    while found.is_ok() && started.elapsed() < plan.time && chaos.steps < plan.steps {
        found = chaos.step();
    }
    let found = found.and_then(|()| chaos.settle());
    let figures: Vec<String> = chaos
        .done
        .iter()
        .map(|(what, times)| format!("{times} {what}"))
        .collect();
    let (seconds, figures) = (started.elapsed().as_secs_f64(), figures.join(", "));
    let figures = format!(
        "seed {}, {seconds:.0} s, {} steps: {figures}",
        plan.seed, chaos.steps
    );
    found
        .map(|()| figures.clone())
        .map_err(|why| format!("{figures}: {why}\n{}", chaos.world.log()))
}

/// What nobody confirmed is wrong where late reads find another object's bytes.
fn serving(confirms: bool) -> Serving {
    Serving {
        lease_ms: Some(LEASE_MS),
        uncaged: !confirms,
        ..Serving::rings()
    }
}

/// Takes out what lasted until this moment.
fn over(hosts: &mut BTreeMap<usize, Instant>, now: Instant) -> Vec<usize> {
    let over = hosts
        .iter()
        .filter(|(_, until)| **until <= now)
        .map(|(host, _)| *host)
        .collect();
    hosts.retain(|_, until| *until > now);
    over
}

/// Says whether a process ended as none should: by a panic, or by a signal that nobody sent.
fn crashed(status: ExitStatus) -> bool {
    let killed = Some(Signal::KILL.as_raw());
    status.code() == Some(101) || (status.signal().is_some() && status.signal() != killed)
}

impl Chaos {
    fn count(&mut self, what: &'static str, times: u64) {
        *self.done.entry(what).or_default() += times;
    }

    fn host(&mut self) -> usize {
        self.dice.below(HOSTS.into()) as usize
    }

    fn soon(&mut self) -> Instant {
        Instant::now() + Duration::from_millis(100 + self.dice.below(MOST_MS))
    }

    fn step(&mut self) -> Result<(), String> {
        self.steps += 1;
        if self.steps.is_multiple_of(REUSE_EVERY) {
            return self.reuse();
        }
        let (name, home) = NAMES[self.dice.below(NAMES.len() as u64) as usize];
        match self.dice.below(100) {
            0..18 => match self.world.put(home, name, BYTES) {
                Ok(_) => self.count("commits", 1),
                // Its broker was killed.
                Err(_) => self.count("commits not answered", 1),
            },
            18..26 => {
                let removed = self.world.hosts[home].remove(name);
                self.count("removals", removed.is_ok().into());
            }
            26..63 => self.pull(name, home)?,
            63..67 => self.kill_pull(),
            67..72 => self.stop_pull(),
            72..77 => self.replace_gateway()?,
            77..82 => self.stop_gateway(),
            82..86 => {
                let host = self.host();
                self.world.hosts[host].kill_broker()?;
                self.count("brokers killed", 1);
            }
            86..88 => {
                let host = self.host();
                self.world.hosts[host].kill_keeper()?;
                self.count("keepers killed", 1);
            }
            88..91 => self.cut()?,
            91..95 => self.put_relay()?,
            _ => {
                let read = self.world.check()?;
                self.count("objects compared", read as u64);
            }
        }
        self.go_on(Instant::now())
    }

    fn pull(&mut self, name: &str, home: usize) -> Result<(), String> {
        if self.pulls.len() >= MOST_PULLS {
            return Ok(());
        }
        let host = (home + 1 + self.dice.below(u64::from(HOSTS) - 1) as usize) % usize::from(HOSTS);
        let steps = [STEPS, RING_STEPS].concat();
        let step = steps[self.dice.below(steps.len() as u64) as usize];
        let step = match self.dice.below(10) {
            0..5 => Some("stop:pull.half_read".to_owned()),
            5 => Some(format!("stop:{step}")),
            6 => Some(format!("kill:{step}")),
            _ => None,
        };
        let ring = Pulling::by("pinned-ring");
        let ways = [
            Pulling::by("direct"),
            ring.clone(),
            ring.and(&["--land", "slots"]),
            Pulling::default(),
        ];
        let pulling = ways[self.dice.below(ways.len() as u64) as usize].clone();
        let pulling = Pulling {
            step,
            attempts: 4,
            stall_s: 2,
            confirms: self.confirms,
            ..pulling
        };
        let pull = self.world.hosts[host].pull(name, &pulling)?;
        self.pulls.push(Running {
            pull,
            host,
            stopped: None,
        });
        self.count("pulls", 1);
        Ok(())
    }

    fn any_pull(&mut self) -> Option<usize> {
        let pulls = self.pulls.len() as u64;
        (pulls > 0).then(|| self.dice.below(pulls) as usize)
    }

    fn kill_pull(&mut self) {
        if let Some(victim) = self.any_pull() {
            self.pulls[victim].pull.signal(Signal::KILL);
            self.count("pulls killed", 1);
        }
    }

    fn stop_pull(&mut self) {
        if let Some(victim) = self.any_pull() {
            self.pulls[victim].pull.signal(Signal::STOP);
        }
    }

    fn replace_gateway(&mut self) -> Result<(), String> {
        let host = self.host();
        self.stopped.remove(&host);
        self.world.hosts[host].gateway = None;
        self.world.hosts[host].serve_again(&serving(self.confirms))?;
        self.count("gateways replaced", 1);
        Ok(())
    }

    fn stop_gateway(&mut self) {
        let (host, until) = (self.host(), self.soon());
        if let Some(gateway) = &mut self.world.hosts[host].gateway {
            gateway.signal(Signal::STOP);
            self.stopped.insert(host, until);
            self.count("gateways stopped", 1);
        }
    }

    fn cut(&mut self) -> Result<(), String> {
        let (host, until) = (self.host(), self.soon());
        self.world.hosts[host].network.link(false)?;
        self.down.insert(host, until);
        self.count("links down", 1);
        Ok(())
    }

    /// Puts a relay before a host for a while, in the place of one that is there. Connections that
    /// the host has end, and it makes none itself meanwhile.
    fn put_relay(&mut self) -> Result<(), String> {
        let (host, until) = (self.host(), self.soon());
        let after = 1 << self.dice.below(23) as usize;
        let fault = match self.dice.below(3) {
            0 => Fault::Cut(after),
            1 => Fault::Truncate(after),
            _ => Fault::Delay(Duration::from_millis(1 + self.dice.below(20))),
        };
        self.relay = None;
        let relay = Relay::before(&self.world.hosts[host].network)?;
        relay.set(fault);
        self.relay = Some((relay, until));
        self.count("relays", 1);
        Ok(())
    }

    /// A pull is stopped in its middle until its lease has ended and its object's name and memory
    /// are another's, whose lease lives. Other pulls go on meanwhile; stopped gateways and links
    /// that are down do not stay so.
    fn reuse(&mut self) -> Result<(), String> {
        let (name, home) = REUSED;
        let first = 1 + self.dice.below(u64::from(HOSTS) - 1) as usize;
        let second = usize::from(HOSTS) - first;
        self.go_on(Instant::now() + 2 * WATCHDOG)?;
        // Nor has a lease of the time before a mapping where the next ones would be.
        let before = SystemTime::now();
        self.wait("no lease", |chaos| {
            (chaos.world.hosts[home].leases_of(name, before)? == 0).then_some(())
        })?;
        let relay = Relay::before(&self.world.hosts[home].network)?;
        relay.set(Fault::Delay(SLOWLY));
        let Ok(old) = self.world.put(home, name, BYTES) else {
            return Ok(());
        };
        // The memory that is used again is the object's, or that of a ring: one that loses its
        // lease brings no piece more, so the control reads the object's.
        let way = if self.confirms && self.dice.below(2) == 0 {
            "pinned-ring"
        } else {
            "direct"
        };
        let Some(mut pull) = self.half(first, name, way)? else {
            return Ok(());
        };
        let stopped = SystemTime::now();
        self.wait("the end of the lease", |chaos| {
            let leases = chaos.world.hosts[home].leases_of(name, stopped)?;
            (leases == 0).then_some(())
        })?;
        let removed = self.world.hosts[home].remove(name);
        if removed
            .and_then(|()| self.world.put(home, name, BYTES))
            .is_ok()
        {
            // The origin maps the new object for another replica, where it had the old one, for as
            // long as this pull renews.
            let stalls = Pulling::by("direct").and(&["--stall-after", STALLS_AFTER]);
            let other = self.world.hosts[second].pull(name, &stalls)?;
            self.wait("the other lease", |chaos| {
                let leased = chaos.world.hosts[home].leases_of(name, stopped)? > 0;
                (leased || other.ended().is_some()).then_some(())
            })?;
            let declined = self.world.hosts[home].figure("declined", 0);
            // The replica's gateway removes what its home has removed; what is published is looked
            // at before.
            self.signal_gateway(first, Signal::STOP);
            pull.signal(Signal::CONT);
            self.wait(
                "the end of what was stopped, or its next question",
                |chaos| {
                    let asks = || chaos.world.hosts[home].figure("declined", 0) > declined;
                    (pull.ended().is_some() || chaos.world.shows(first, &old) || asks())
                        .then_some(())
                },
            )?;
            let (seen, committed) = (self.world.check_of(name), self.world.shows(first, &old));
            self.signal_gateway(first, Signal::CONT);
            let mut ended: Vec<_> = other.ended().into_iter().collect();
            // Else the second attempt of the first waits for one that never ends.
            drop(other);
            ended.push(self.wait("the end of the pull that was stopped", |_| pull.ended())?);
            self.count("memory used again under a pull", 1);
            if let Some(ended) = ended.into_iter().find(|ended| crashed(*ended)) {
                return Err(format!("FINDING: a pull crashed: {ended}"));
            }
            seen?;
            if self.confirms && committed {
                return Err(format!(
                    "FINDING: {old:?} was committed after its lease had ended"
                ));
            }
        }
        Ok(())
    }

    fn signal_gateway(&mut self, host: usize, signal: Signal) {
        if let Some(gateway) = &mut self.world.hosts[host].gateway {
            gateway.signal(signal);
        }
    }

    /// Begins a pull and waits until it has stopped itself in the middle; nothing if it ends
    /// before.
    fn half(&mut self, host: usize, name: &str, way: &str) -> Result<Option<Process>, String> {
        let step = Some("stop:pull.half_read".to_owned());
        let pulling = Pulling {
            step,
            confirms: self.confirms,
            ..Pulling::by(way)
        };
        let pull = self.world.hosts[host].pull(name, &pulling)?;
        self.wait("the middle of a pull", |_| {
            (pull.is_stopped() || pull.ended().is_some()).then_some(())
        })?;
        Ok(pull.ended().is_none().then_some(pull))
    }

    /// Waits for something while everything else goes on.
    fn wait<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&Chaos) -> Option<T>,
    ) -> Result<T, String> {
        let over = Instant::now() + WATCHDOG;
        loop {
            if let Some(seen) = look(self) {
                return Ok(seen);
            }
            if Instant::now() >= over {
                return Err(format!("{what}: not within {} s", WATCHDOG.as_secs()));
            }
            self.go_on(Instant::now())?;
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Lets go on what was stopped long enough, and looks after processes that have ended.
    fn go_on(&mut self, now: Instant) -> Result<(), String> {
        self.relay = self.relay.take().filter(|(_, until)| *until > now);
        for host in &mut self.world.hosts {
            if let Some(ended) = host.gateway.as_ref().and_then(Process::ended) {
                return Err(format!(
                    "FINDING: the gateway of {} ended by itself: {ended}",
                    host.name
                ));
            }
        }
        for host in over(&mut self.down, now) {
            self.world.hosts[host].network.link(true)?;
        }
        for host in over(&mut self.stopped, now) {
            if let Some(gateway) = &mut self.world.hosts[host].gateway {
                gateway.signal(Signal::CONT);
            }
        }
        let mut ended = Vec::new();
        for running in &mut self.pulls {
            if let Some(status) = running.pull.ended() {
                if crashed(status) {
                    return Err(format!(
                        "FINDING: a pull on host {} crashed: {status}",
                        running.host
                    ));
                }
                ended.push(status.success());
                continue;
            }
            match running.stopped {
                None if running.pull.is_stopped() => {
                    let time = Duration::from_millis(200 + self.dice.below(2 * MOST_MS));
                    running.stopped = Some((now, time));
                }
                Some((since, time)) if now.saturating_duration_since(since) >= time => {
                    running.pull.signal(Signal::CONT);
                    running.stopped = None;
                    *self.done.entry("pulls stopped and continued").or_default() += 1;
                }
                _ => {}
            }
        }
        self.pulls
            .retain_mut(|running| running.pull.ended().is_none());
        for success in ended {
            self.count(
                if success {
                    "pulls that committed or found it here"
                } else {
                    "pulls that failed"
                },
                1,
            );
        }
        Ok(())
    }

    /// Ends all faults; then everything must work, and leave nothing.
    fn settle(&mut self) -> Result<(), String> {
        let later = Instant::now() + 2 * WATCHDOG;
        self.go_on(later)?;
        until("the end of all pulls", || {
            // They may stop themselves yet, and one may wait for another.
            self.pulls
                .iter_mut()
                .for_each(|running| running.pull.signal(Signal::CONT));
            self.pulls
                .iter_mut()
                .all(|running| running.pull.ended().is_some())
                .then_some(())
        })?;
        self.go_on(later)?;
        // Leases that a loaded machine renews in time, however loaded it is.
        for host in &mut self.world.hosts {
            host.serve_again(&Serving::rings())?;
        }
        let read = self.world.check()?;
        self.count("objects compared", read as u64);
        for (name, home) in NAMES {
            let object = self.world.put(home, name, BYTES)?;
            for host in (0..usize::from(HOSTS)).filter(|host| *host != home) {
                self.world.pulled(host, &object)?;
            }
        }
        self.world.emptied()
    }
}
