//! Hosts that look for names, over the messages that gateways ship.
//!
//! Each host has the shipped [`Index`] of its objects and answers from it; each search is the
//! shipped [`Search`]. Questions and answers are the bytes that go over the network, and are
//! counted. Some are lost, come late or twice; some hosts are silent, and some lie.
//!
//! What must hold: *nobody has it* is said only if no honest host that is there has it.

use std::time::Duration;

use gateway::message::{Find, Has, Home, Incarnation, List, Listed};
use gateway::net::call::{Answer, Answered, Question, read_question};
use gateway::net::key::Gateway;
use gateway::origin::index::Index;
use gateway::replica::search::{Search, Verdict};
use gpu_ipc::broker::server::listing::{Listing, Row};
use gpu_ipc_gateway_plan::Dice;

/// What goes wrong, one in so many; 0 for never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Messages that are lost.
    pub lost: u64,
    /// Answers that come twice, the second time in the next search.
    pub repeated: u64,
    /// Hosts that say nothing.
    pub silent: u64,
    /// Hosts that say no to everything.
    pub liars: u64,
}

/// What a search without an answer takes its silence for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// As it ships: the search says which hosts were silent.
    Shipped,
    /// The control: silence is a no.
    SilenceIsNo,
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic {
    /// Searches.
    pub searches: u64,
    /// Questions and answers.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of the largest.
    pub largest: u64,
    /// Searches that found it, that found that nobody has it, and that found silence.
    pub ended: [u64; 3],
    /// Searches that said that nobody has what an honest host has.
    pub wrong: u64,
    /// Tokens that a host that joins is told of.
    pub announced: u64,
}

#[derive(Debug)]
struct Host {
    gateway: Gateway,
    index: Index,
    silent: bool,
    lies: bool,
}

/// Hosts and what they have.
#[derive(Debug)]
pub struct Network {
    hosts: Vec<Host>,
    objects: u32,
    dice: Dice,
    faults: Faults,
    /// Answers that come once more, in the next search.
    late: Vec<(Gateway, Vec<u8>)>,
    /// What was counted.
    pub traffic: Traffic,
}

fn name(home: u32, object: u32) -> String {
    format!("models/{home}/layers.{object}.weight")
}

fn row(home: u32, object: u32, replica: bool) -> Row {
    let name = name(home, object);
    let mut identity = [0; 16];
    identity[..4].copy_from_slice(&home.to_le_bytes());
    identity[4..8].copy_from_slice(&object.to_le_bytes());
    Row {
        name,
        epoch: 1,
        identity: gpu_ipc::broker::Identity(identity).to_string(),
        home: replica.then(|| home_of(home).to_string()),
        bytes: 1 << 20,
        state: "visible".into(),
        ..Row::default()
    }
}

fn home_of(host: u32) -> Home {
    Home {
        host: format!("host-{host}"),
        broker: [host as u8; 16],
    }
}

fn is_drawn(dice: &mut Dice, one_in: u64) -> bool {
    one_in > 0 && dice.below(one_in) == 0
}

impl Network {
    /// Makes hosts with as many objects of their own each, and a replica of one of the host before.
    #[must_use]
    pub fn new(hosts: u32, objects: u32, faults: Faults, seed: u64) -> Network {
        let mut dice = Dice::new(seed);
        let host = |number: u32| {
            let own = (0..objects).map(|object| row(number, object, false));
            let before = (number + hosts - 1) % hosts;
            let replica = (hosts > 1).then(|| row(before, 0, true));
            let mut index = Index::new(home_of(number));
            let began = Duration::from_millis(1);
            assert!(index.begins(began));
            index.listed(began, Some(listing(own.chain(replica).collect())));
            let incarnation = Incarnation([number as u8; 16]);
            let gateway = Gateway {
                host: format!("host-{number}"),
                incarnation,
            };
            Host {
                gateway,
                index,
                silent: is_drawn(&mut dice, faults.silent),
                lies: is_drawn(&mut dice, faults.liars),
            }
        };
        let hosts: Vec<Host> = (0..hosts).map(host).collect();
        let traffic = Traffic {
            announced: hosts.len() as u64,
            ..Traffic::default()
        };
        Network {
            hosts,
            objects,
            dice,
            faults,
            late: Vec::new(),
            traffic,
        }
    }

    fn count(&mut self, bytes: &[u8]) {
        self.traffic.messages += 1;
        self.traffic.bytes += bytes.len() as u64;
        self.traffic.largest = self.traffic.largest.max(bytes.len() as u64);
    }

    /// Asks a host, as bytes there and back; nothing where one of both is lost.
    fn ask(&mut self, host: usize, question: &Question) -> Option<Answer> {
        let bytes = serde_json::to_vec(question).expect("a JSON");
        self.count(&bytes);
        if is_drawn(&mut self.dice, self.faults.lost) || self.hosts[host].silent {
            return None;
        }
        let read = read_question(&bytes).expect("short enough");
        let answer = self.hosts[host].answer(&read);
        let bytes = Answered::plain(answer).encode();
        self.count(&bytes);
        if is_drawn(&mut self.dice, self.faults.lost) {
            return None;
        }
        if is_drawn(&mut self.dice, self.faults.repeated) {
            let gateway = self.hosts[host].gateway.clone();
            self.late.push((gateway, bytes.clone()));
        }
        Some(Answered::decode(&bytes).expect("its own").answer)
    }

    /// Looks for a name that somebody has, or nobody.
    pub fn search(&mut self, rule: Rule) -> Verdict {
        let (home, object) = (
            self.dice.below(self.hosts.len() as u64) as u32,
            // One in eight is nobody's.
            self.dice.below(u64::from(self.objects) * 8 / 7 + 1) as u32,
        );
        let find = Find {
            name: name(home, object),
            epoch: None,
        };
        let there: Vec<Gateway> = self.hosts.iter().map(|host| host.gateway.clone()).collect();
        let mut search = Search::new(None);
        // Of a former search: nobody waits for them, since nobody was asked yet.
        for (gateway, bytes) in std::mem::take(&mut self.late) {
            if let Ok(Answer::Found(found)) = Answered::decode(&bytes).map(|said| said.answer) {
                search.answered(&gateway, Duration::ZERO, found);
            }
        }
        let mut order = search.there(&there);
        // All are asked at once, and answer in any order.
        while !order.is_empty() {
            let next = self.dice.below(order.len() as u64) as usize;
            let gateway = order.swap_remove(next);
            let host = there.iter().position(|other| *other == gateway);
            let host = host.expect("it is there");
            match self.ask(host, &Question::Find(find.clone())) {
                Some(Answer::Found(found)) => search.answered(&gateway, Duration::ZERO, found),
                _ if rule == Rule::SilenceIsNo => {
                    search.answered(&gateway, Duration::ZERO, Vec::new());
                }
                _ => search.silent(&gateway),
            }
        }
        let verdict = search.verdict(true);
        self.traffic.searches += 1;
        let ended = match &verdict {
            Verdict::Offers(_) => 0,
            Verdict::Nobody => 1,
            Verdict::Silent(_) | Verdict::NotYet => 2,
        };
        self.traffic.ended[ended] += 1;
        let is_there = self
            .hosts
            .iter()
            .any(|host| !host.lies && !host.found(&find).is_empty());
        self.traffic.wrong += u64::from(verdict == Verdict::Nobody && is_there);
        verdict
    }

    /// Lists all objects of a host, page by page.
    ///
    /// # Panics
    ///
    /// If the host is silent, or a message is lost.
    pub fn list(&mut self, host: usize) -> Vec<Listed> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let Some(Answer::Listed(page, more)) = self.ask(host, &Question::List(List { after }))
            else {
                panic!("no page")
            };
            after = page.last().map(|last| (last.name.clone(), last.epoch));
            all.extend(page);
            if !more {
                return all;
            }
        }
    }
}

impl Host {
    fn found(&self, find: &Find) -> Vec<Listed> {
        self.index.find(find, Duration::ZERO).expect("a list")
    }

    fn answer(&self, question: &Question) -> Answer {
        match question {
            Question::Find(_) if self.lies => Answer::Found(Vec::new()),
            Question::Find(find) => {
                let has = |listed: Listed| Has {
                    epoch: listed.epoch,
                    identity: listed.identity,
                    bytes: listed.bytes,
                    origin: listed.origin,
                    home: listed.home,
                    reads: 0,
                    limit: 1,
                    admitted: 0,
                };
                Answer::Found(self.found(find).into_iter().map(has).collect())
            }
            Question::List(list) => {
                let (page, more) = self.index.page(list, Duration::ZERO).expect("a list");
                Answer::Listed(page, more)
            }
            _ => Answer::Is(false),
        }
    }
}

fn listing(objects: Vec<Row>) -> Listing {
    Listing {
        objects,
        ..Listing::default()
    }
}
