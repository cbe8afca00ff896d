//! Everything at random: commits, removals and pulls on three hosts, while processes are killed and stopped, brokers
//! are killed, gateways are replaced and links go down. A seed repeats the order of what is done, not what the kernel
//! does.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gateway::host::step::STEPS;
use gateway::plan::Dice;
use rustix::process::Signal;

use crate::host::{Process, Pulling, Serving, until};
use crate::world::{Means, World};

const HOSTS: u8 = 3;
/// Names and their homes.
const NAMES: [(&str, usize); 2] = [("a", 0), ("b", 1)];
/// Of every object, so that one fits in the place of another.
const BYTES: usize = 2 << 20;
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
    /// For how long.
    pub time: Duration,
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
    done: BTreeMap<&'static str, u64>,
}

/// Does it, and returns figures.
///
/// # Errors
///
/// What was found.
pub fn run(means: &Means, plan: &Plan) -> Result<String, String> {
    let world = World::create(means, HOSTS, &serving())?;
    let mut chaos = Chaos {
        world,
        dice: Dice::new(plan.seed),
        confirms: plan.confirms,
        pulls: Vec::new(),
        stopped: BTreeMap::new(),
        down: BTreeMap::new(),
        done: BTreeMap::new(),
    };
    let started = Instant::now();
    let mut found = Ok(());
    while found.is_ok() && started.elapsed() < plan.time {
        found = chaos.step();
    }
    let found = found.and_then(|()| chaos.settle());
    let figures: Vec<String> = chaos.done.iter().map(|(what, times)| format!("{times} {what}")).collect();
    let figures = format!("seed {}, {:.0} s: {}", plan.seed, started.elapsed().as_secs_f64(), figures.join(", "));
    found.map(|()| figures.clone()).map_err(|why| format!("{figures}: {why}\n{}", chaos.world.log()))
}

fn serving() -> Serving {
    Serving { lease_ms: Some(LEASE_MS), ..Serving::default() }
}

/// Takes out what lasted until this moment.
fn over(hosts: &mut BTreeMap<usize, Instant>, now: Instant) -> Vec<usize> {
    let over = hosts.iter().filter(|(_, until)| **until <= now).map(|(host, _)| *host).collect();
    hosts.retain(|_, until| *until > now);
    over
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
        let (name, home) = NAMES[self.dice.below(NAMES.len() as u64) as usize];
        match self.dice.below(100) {
            0..20 => match self.world.put(home, name, BYTES) {
                Ok(_) => self.count("commits", 1),
                // Its broker was killed.
                Err(_) => self.count("commits not answered", 1),
            },
            20..28 => {
                let removed = self.world.hosts[home].remove(name);
                self.count("removals", removed.is_ok().into());
            }
            28..68 => self.pull(name, home)?,
            68..72 => self.kill_pull(),
            72..77 => self.stop_pull(),
            77..82 => self.replace_gateway()?,
            82..87 => self.stop_gateway(),
            87..91 => {
                let host = self.host();
                self.world.hosts[host].kill_broker()?;
                self.count("brokers killed", 1);
            }
            91..95 => self.cut()?,
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
        let step = STEPS[self.dice.below(STEPS.len() as u64) as usize];
        let step = match self.dice.below(10) {
            0..5 => Some("stop:pull.half_read".to_owned()),
            5 => Some(format!("stop:{step}")),
            6 => Some(format!("kill:{step}")),
            _ => None,
        };
        let pulling = Pulling { step, attempts: 4, stall_s: 2, confirms: self.confirms, more: Vec::new() };
        let pull = self.world.hosts[host].pull(name, &pulling)?;
        self.pulls.push(Running { pull, host, stopped: None });
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
        self.world.hosts[host].serve_again(&serving())?;
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

    /// Lets go on what was stopped long enough, and looks after pulls that have ended.
    fn go_on(&mut self, now: Instant) -> Result<(), String> {
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
        self.pulls.retain_mut(|running| running.pull.ended().is_none());
        for success in ended {
            self.count(if success { "pulls that committed or found it here" } else { "pulls that failed" }, 1);
        }
        Ok(())
    }

    /// Ends all faults; then everything must work, and leave nothing.
    fn settle(&mut self) -> Result<(), String> {
        let later = Instant::now() + Duration::from_secs(3_600);
        self.go_on(later)?;
        for running in &mut self.pulls {
            let what = format!("the end of a pull on {}", self.world.hosts[running.host].name);
            // It may stop itself yet.
            until(&what, || {
                running.pull.signal(Signal::CONT);
                running.pull.ended()
            })?;
        }
        self.go_on(later)?;
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
