//! The events of a run.
//!
//! ```text
//! wake ─ choose ─► ask ─ admit ─► begin ─► finish ─► confirm ─► has it, serves it
//!   ▲                 │ refused      │ failed, stalled, slow │
//!   └─────────────────┴──────────────┴───────────────────────┘
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use gpu_ipc_gateway_plan::{
    Admission, Desk, Dice, Reading, Source, Step, Trouble, TroubleKind, Verdict, View, admit,
    choose, keep,
};

use crate::hearing::Board;
use crate::link::Link;
use crate::outcome::{Outcome, objects, optimum, rounds};
use crate::scenario::{self, Death, Host, SIZE, one_read};

const MICRO: Duration = Duration::from_micros(1);
const MILLI: Duration = Duration::from_millis(1);
/// A message between two gateways, there or back.
const MESSAGE: Duration = Duration::from_millis(2);
/// Opening, registering and connecting before the first byte.
const BEGIN: Duration = Duration::from_millis(50);
/// The confirmation and the commit.
const CONFIRM: Duration = Duration::from_millis(20);
/// Until a reset connection is reported.
const RESET: Duration = Duration::from_millis(50);
/// Until a question without an answer is given up.
const ANSWER: Duration = Duration::from_secs(2);
/// Until a silent host's announcements are withdrawn: Zenoh's lease.
const SILENCE: Duration = Duration::from_secs(9);
/// Until a host takes the lease of a silent reader back.
const LEASE: Duration = Duration::from_secs(30);
/// When a run that does not come to an end is ended.
const END: u32 = 10_000;

/// Who decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The shipped plan.
    Plan,
    /// The control: everybody reads from the origin, which serves everybody.
    OriginOnly,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Wake(u32),
    Ask {
        reader: u32,
        server: u32,
        last_resort: bool,
    },
    Refused {
        reader: u32,
        server: u32,
    },
    Failed {
        reader: u32,
        server: u32,
    },
    Begin {
        reader: u32,
        server: u32,
    },
    Check {
        reader: u32,
        read: u32,
    },
    Finish {
        server: u32,
        version: u32,
    },
    Filled {
        reader: u32,
        server: u32,
    },
    Free {
        reader: u32,
        server: u32,
    },
    Aged {
        server: u32,
    },
    Die(u32),
    Withdraw(u32),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Wants,
    Reads {
        server: u32,
        since: Duration,
        moved: Duration,
        left: f64,
    },
    Has,
}

/// One host while the run goes on.
#[derive(Debug)]
struct Site {
    host: Host,
    state: State,
    died: Option<Death>,
    link: Link,
    /// Counts the changes of `link`: a finish that was foreseen before the last one is void.
    version: u32,
    /// When each lease that it gave began.
    leases: Vec<(u32, Duration)>,
    admitted: u32,
    wanted_since: Duration,
    troubles: Vec<Trouble<u32>>,
    given_up: u32,
    /// Counts its own reads: a check of an earlier one is void.
    read: u32,
    depth: u32,
}

struct World {
    policy: Policy,
    now: Duration,
    sites: Vec<Site>,
    board: Board,
    queue: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    queued: u64,
    dice: Dice,
    heard: Vec<Source<u32>>,
    asked: u64,
    filled_at: Duration,
    missing: u32,
}

/// Runs hosts until each that lives has the object.
#[must_use]
pub fn run(hosts: u32, trouble: scenario::Trouble, seed: u64, policy: Policy) -> Outcome {
    let mut world = World::new(scenario::hosts(hosts, trouble, seed), seed, policy);
    while world.missing > 0 {
        let Some(Reverse((at, _, event))) = world.queue.pop() else {
            break;
        };
        if at > one_read() * END {
            break;
        }
        world.now = at;
        world.happen(event);
    }
    world.outcome(trouble)
}

impl World {
    fn new(hosts: Vec<Host>, seed: u64, policy: Policy) -> World {
        let count = hosts.len() as u32;
        let site = |host: Host| Site {
            state: State::Wants,
            died: None,
            link: Link::new(host.link),
            version: 0,
            leases: Vec::new(),
            admitted: 0,
            wanted_since: Duration::ZERO,
            troubles: Vec::new(),
            given_up: 0,
            read: 0,
            depth: 0,
            host,
        };
        let mut world = World {
            policy,
            now: Duration::ZERO,
            sites: hosts.into_iter().map(site).collect(),
            board: Board::new(count),
            queue: BinaryHeap::new(),
            queued: 0,
            dice: Dice::new(seed ^ 0x5eed),
            heard: Vec::new(),
            asked: 0,
            filled_at: Duration::ZERO,
            missing: count - 1,
        };
        world.sites[0].state = State::Has;
        world.board.say(0, Duration::ZERO, Some(0));
        for host in 1..count {
            let start = 100 * MILLI + MILLI * world.dice.below(100) as u32;
            world.sites[host as usize].wanted_since = start;
            world.after(start, Event::Wake(host));
            if let Some((at, _)) = world.sites[host as usize].host.death {
                world.after(at, Event::Die(host));
            }
        }
        world
    }

    fn after(&mut self, time: Duration, event: Event) {
        self.queued += 1;
        self.queue
            .push(Reverse((self.now + time, self.queued, event)));
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Die(host) => self.die(host),
            Event::Withdraw(host) => self.board.say(host, self.now, None),
            Event::Ask {
                reader,
                server,
                last_resort,
            } => self.asked(reader, server, last_resort),
            Event::Finish { server, version } => self.finish(server, version),
            Event::Free { reader, server } => self.slot_back(reader, server),
            Event::Aged { server } => self.announce(server),
            // What follows is the reader's own doing.
            Event::Wake(reader)
            | Event::Refused { reader, .. }
            | Event::Failed { reader, .. }
            | Event::Begin { reader, .. }
            | Event::Check { reader, .. }
            | Event::Filled { reader, .. }
                if self.sites[reader as usize].died.is_some() =>
            {
                if let Event::Begin { server, .. } | Event::Filled { server, .. } = event {
                    self.after(LEASE, Event::Free { reader, server });
                }
            }
            Event::Wake(reader) => self.wake(reader),
            Event::Refused { reader, server } => self.trouble(reader, server, TroubleKind::Refused),
            Event::Failed { reader, server } => self.trouble(reader, server, TroubleKind::Failed),
            Event::Begin { reader, server } => self.begin(reader, server),
            Event::Check { reader, read } => self.check(reader, read),
            Event::Filled { reader, server } => self.filled(reader, server),
        }
    }

    /// Lets a host decide with what it has heard.
    fn with_view<T>(&mut self, host: u32, decide: impl FnOnce(&View<'_, u32>) -> T) -> T {
        let mut heard = std::mem::take(&mut self.heard);
        self.board.heard_by(host, self.now, &mut heard);
        let site = &self.sites[host as usize];
        let decided = decide(&View {
            me: host,
            now: self.now,
            wanted_since: site.wanted_since,
            expected: site.host.expected(),
            sources: &heard,
            troubles: &site.troubles,
            seed: self.dice.throw(),
        });
        self.heard = heard;
        decided
    }

    fn wake(&mut self, reader: u32) {
        let step = match self.policy {
            Policy::Plan => self.with_view(reader, choose),
            Policy::OriginOnly => Step::Read {
                host: 0,
                last_resort: false,
            },
        };
        match step {
            Step::Read {
                host: server,
                last_resort,
            } => {
                self.asked += 1;
                self.after(
                    MESSAGE,
                    Event::Ask {
                        reader,
                        server,
                        last_resort,
                    },
                );
            }
            Step::Wait(time) => self.after(time, Event::Wake(reader)),
            Step::Nobody => self.after(one_read() / 8, Event::Wake(reader)),
        }
    }

    fn asked(&mut self, reader: u32, server: u32, last_resort: bool) {
        match self.sites[server as usize].died {
            Some(Death::Killed) => return self.after(RESET, Event::Failed { reader, server }),
            Some(Death::Stopped) => return self.after(ANSWER, Event::Failed { reader, server }),
            None => {}
        }
        let (now, serves_all) = (
            self.now,
            self.sites[server as usize].host.lies || self.policy == Policy::OriginOnly,
        );
        if serves_all || self.at_desk(server, |desk| admit(desk, last_resort)) == Admission::Admit {
            let site = &mut self.sites[server as usize];
            site.leases.push((reader, now));
            site.admitted += 1;
            self.announce(server);
            self.after(one_read() * 3 / 2 + MILLI, Event::Aged { server });
            self.after(MESSAGE + BEGIN, Event::Begin { reader, server });
        } else {
            self.after(MESSAGE, Event::Refused { reader, server });
        }
    }

    /// Lets a host that has the object decide with what it knows of its own service.
    fn at_desk<T>(&mut self, server: u32, decide: impl FnOnce(&Desk<'_>) -> T) -> T {
        let origin = server == 0;
        let mut others = 0;
        if origin {
            // Nobody else's decision depends on the others.
            let mut heard = std::mem::take(&mut self.heard);
            self.board.heard_by(server, self.now, &mut heard);
            others = heard.iter().filter(|source| source.host != server).count() as u32;
            self.heard = heard;
        }
        let site = &self.sites[server as usize];
        let reads: Vec<Duration> = site.leases.iter().map(|lease| self.now - lease.1).collect();
        decide(&Desk {
            origin,
            reads: &reads,
            expected: site.host.expected(),
            admitted: site.admitted,
            others,
        })
    }

    fn begin(&mut self, reader: u32, server: u32) {
        if self.sites[server as usize].died == Some(Death::Killed) {
            return self.after(RESET, Event::Failed { reader, server });
        }
        let most = self.sites[reader as usize].host.link;
        let now = self.now;
        self.change(server, |link| link.add(now, reader, SIZE, most));
        let site = &mut self.sites[reader as usize];
        site.state = State::Reads {
            server,
            since: now,
            moved: now,
            left: SIZE,
        };
        site.read += 1;
        let read = site.read;
        self.after(one_read() / 8, Event::Check { reader, read });
    }

    fn check(&mut self, reader: u32, read: u32) {
        let site = &self.sites[reader as usize];
        let State::Reads {
            server,
            since,
            moved,
            left,
        } = site.state
        else {
            return;
        };
        if site.read != read || self.policy == Policy::OriginOnly {
            return;
        }
        let (given_up, now) = (site.given_up, self.now);
        let Some(flow) = self.sites[server as usize]
            .link
            .flows(now)
            .iter()
            .find(|flow| flow.reader == reader)
        else {
            return;
        };
        let moved = if flow.left < left { now } else { moved };
        let (left, done) = (flow.left, (SIZE - flow.left) as u64);
        self.sites[reader as usize].state = State::Reads {
            server,
            since,
            moved,
            left,
        };
        let (elapsed, idle) = (now - since, now - moved);
        let reading = Reading {
            host: server,
            elapsed,
            idle,
            done,
            size: SIZE as u64,
            given_up,
        };
        let kind = match self.with_view(reader, |view| keep(view, &reading)) {
            Verdict::Keep => return self.after(one_read() / 8, Event::Check { reader, read }),
            Verdict::Stalled => TroubleKind::Failed,
            Verdict::Slow => TroubleKind::Slow,
        };
        self.change(server, |link| link.remove(now, reader));
        self.after(MESSAGE, Event::Free { reader, server });
        self.sites[reader as usize].given_up += u32::from(kind == TroubleKind::Slow);
        self.trouble(reader, server, kind);
    }

    fn finish(&mut self, server: u32, version: u32) {
        if self.sites[server as usize].version != version {
            return;
        }
        let Some((at, reader)) = self.sites[server as usize].link.first_done() else {
            return;
        };
        // Each look at a read in between rounds the time that is left.
        debug_assert!(at <= self.now + MICRO);
        let now = self.now;
        self.change(server, |link| link.remove(now, reader));
        self.sites[reader as usize].read += 1;
        self.after(CONFIRM, Event::Filled { reader, server });
    }

    fn filled(&mut self, reader: u32, server: u32) {
        if self.sites[server as usize].died.is_some() {
            return self.trouble(reader, server, TroubleKind::Failed);
        }
        self.sites[server as usize]
            .leases
            .retain(|lease| lease.0 != reader);
        self.announce(server);
        let depth = self.sites[server as usize].depth + 1;
        let site = &mut self.sites[reader as usize];
        site.state = State::Has;
        site.depth = depth;
        self.missing -= 1;
        self.filled_at = self.now;
        self.announce(reader);
    }

    /// Remembers what went wrong with a host, and looks for another at once.
    fn trouble(&mut self, reader: u32, server: u32, kind: TroubleKind) {
        let at = self.now;
        let site = &mut self.sites[reader as usize];
        site.state = State::Wants;
        match site
            .troubles
            .iter_mut()
            .find(|trouble| trouble.host == server)
        {
            Some(trouble) if trouble.kind == kind => {
                (trouble.times, trouble.at) = (trouble.times + 1, at)
            }
            Some(trouble) => {
                *trouble = Trouble {
                    host: server,
                    kind,
                    times: 1,
                    at,
                }
            }
            None => site.troubles.push(Trouble {
                host: server,
                kind,
                times: 1,
                at,
            }),
        }
        self.after(MILLI, Event::Wake(reader));
    }

    fn die(&mut self, host: u32) {
        let now = self.now;
        let Some((_, how)) = self.sites[host as usize].host.death else {
            return;
        };
        let site = &mut self.sites[host as usize];
        site.died = Some(how);
        let state = site.state;
        let readers: Vec<u32> = site
            .link
            .flows(now)
            .iter()
            .map(|flow| flow.reader)
            .collect();
        if state != State::Has {
            self.missing -= 1;
        }
        match how {
            Death::Killed => {
                for reader in readers {
                    self.change(host, |link| link.remove(now, reader));
                    self.sites[reader as usize].read += 1;
                    self.after(
                        RESET,
                        Event::Failed {
                            reader,
                            server: host,
                        },
                    );
                }
                self.after(RESET, Event::Withdraw(host));
            }
            Death::Stopped => {
                self.change(host, |link| link.stop(now, None));
                self.after(SILENCE, Event::Withdraw(host));
            }
        }
        if let State::Reads { server, .. } = state {
            self.change(server, |link| match how {
                Death::Killed => drop(link.remove(now, host)),
                Death::Stopped => link.stop(now, Some(host)),
            });
            self.after(
                if how == Death::Killed { RESET } else { LEASE },
                Event::Free {
                    reader: host,
                    server,
                },
            );
        }
    }

    /// Takes a lease back whose read did not succeed.
    fn slot_back(&mut self, reader: u32, server: u32) {
        let site = &mut self.sites[server as usize];
        let before = site.leases.len();
        site.leases.retain(|lease| lease.0 != reader);
        site.admitted -= (before - site.leases.len()) as u32;
        self.announce(server);
    }

    fn announce(&mut self, host: u32) {
        let site = &self.sites[host as usize];
        if site.state == State::Has && site.died.is_none() {
            let reads = if site.host.lies {
                0
            } else {
                self.at_desk(host, |desk| desk.announced())
            };
            self.board.say(host, self.now, Some(reads));
        }
    }

    /// Changes a link, and foresees its next end anew.
    fn change<T>(&mut self, server: u32, change: impl FnOnce(&mut Link) -> T) {
        let site = &mut self.sites[server as usize];
        change(&mut site.link);
        site.version += 1;
        if let Some((at, _)) = site.link.first_done() {
            let event = Event::Finish {
                server,
                version: site.version,
            };
            self.after(at.saturating_sub(self.now), event);
        }
    }

    fn outcome(&self, trouble: scenario::Trouble) -> Outcome {
        let living: Vec<&Site> = self
            .sites
            .iter()
            .filter(|site| site.died.is_none())
            .collect();
        let hosts: Vec<&Host> = living.iter().map(|site| &site.host).collect();
        let filled = living
            .iter()
            .filter(|site| site.state == State::Has)
            .count() as u32;
        let sent = |site: &Site| objects(site.link.sent);
        let got = f64::from(filled.saturating_sub(1).max(1));
        Outcome {
            hosts: self.sites.len() as u32,
            trouble,
            unfilled: living.len() as u32 - filled,
            died: (self.sites.len() - living.len()) as u32,
            rounds: rounds(self.filled_at),
            optimum: optimum(&hosts),
            depth: living.iter().map(|site| site.depth).max().unwrap_or(0),
            origin_reads: self.sites[0].admitted,
            origin_sent: sent(&self.sites[0]),
            busiest: self.sites.iter().map(sent).fold(0.0, f64::max),
            read_per_host: self.sites.iter().map(sent).sum::<f64>() / got,
            asked_per_host: self.asked as f64 / got,
        }
    }
}
