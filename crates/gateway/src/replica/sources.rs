//! The host that a pull reads from: what it has heard and seen, put before the plan.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_ipc::broker::{Client, Identity, Selector, Standing};
use gpu_ipc_gateway_plan::{Source, Step, Trouble, TroubleKind, View, announced, choose};

use crate::error::Result;
use crate::message::{Find, Has, Incarnation, Wanted};
use crate::net::call::{Answer, Asked, Heard, Question, ask};
use crate::net::key::Gateway;
use crate::net::live::Live;
use crate::net::session::Session;
use crate::replica::search::{Offer, Search, Verdict};
use gpu_ipc_gateway_plan::Pace;

/// How long until a host that was named and is busy is asked again.
const NAMED_IS_BUSY: Duration = Duration::from_millis(500);
/// How long until this host's broker is asked again for what another process here is pulling.
const PULLED_HERE: Duration = Duration::from_millis(200);
/// How long a pull waits in all for the first gateway to be reached.
const REACHED: Duration = Duration::from_secs(5);
/// How often a search looks for answers.
const LOOK: Duration = Duration::from_millis(1);
/// Gateways that are asked which others there are, before a name counts as nobody's.
const MOST_TELL: usize = 3;

/// What is to be pulled.
#[derive(Clone, Debug)]
pub struct Order {
    /// The name.
    pub name: String,
    /// The epoch; the newest if nothing is said.
    pub epoch: Option<u64>,
    /// The host to read from, whatever its load; else the one that the plan chooses.
    pub from: Option<String>,
}

/// What to do next.
#[derive(Debug)]
pub enum Next {
    /// Nothing: this host's broker has it.
    Here(Has),
    /// Ask this gateway for a lease.
    Ask {
        /// The host.
        gateway: Gateway,
        /// What for.
        wanted: Wanted,
        /// How many others have it.
        others: u32,
        /// Whether the others failed or kept this host waiting.
        last_resort: bool,
    },
    /// Look again after this time, for this reason: nothing has failed.
    Wait(Duration, String),
    /// Nobody has it.
    Nobody,
    /// Nobody said that it is there, and not all were heard: why.
    Unheard(String),
}

/// The sources of one pull.
#[derive(Debug)]
pub struct Sources {
    session: Session,
    live: Arc<Live>,
    order: Order,
    me: Gateway,
    pace: Pace,
    search: Search,
    offers: Vec<Offer>,
    started: Instant,
    troubles: BTreeMap<Gateway, (TroubleKind, u32, Duration)>,
    decisions: u64,
    /// How long no gateway was there.
    alone: Duration,
}

impl Sources {
    /// Has asked nobody yet.
    pub fn new(
        (session, live): (&Session, &Arc<Live>),
        order: &Order,
        me: Gateway,
        pace: Pace,
        started: Instant,
    ) -> Sources {
        Sources {
            session: session.clone(),
            live: Arc::clone(live),
            order: order.clone(),
            me,
            pace,
            search: Search::new(order.epoch),
            offers: Vec::new(),
            started,
            troubles: BTreeMap::new(),
            decisions: 0,
            alone: Duration::ZERO,
        }
    }

    /// Asks who has it, for at most `patience`, and decides what to do next.
    pub fn next(&mut self, client: &Client, patience: Duration) -> Next {
        self.offers.clear();
        match self.search(patience) {
            Verdict::Offers(offers) => self.offers = offers,
            Verdict::Nobody => return Next::Nobody,
            Verdict::Silent(hosts) => {
                let hosts = hosts.join(", ");
                let why = format!("no gateway has it that answers, and {hosts} did not answer");
                return Next::Unheard(why);
            }
            Verdict::NotYet => {
                let from = self.order.from.as_ref();
                let from = from.map_or(String::new(), |host| format!(" of host {host}"));
                return Next::Unheard(format!("no gateway{from} was reached"));
            }
        }
        let newest = self.offers.first().map_or(0, |offer| offer.object.epoch);
        let mut asked = BTreeSet::new();
        for Offer { object, .. } in &self.offers {
            let Ok(identity) = object.identity.parse::<Identity>() else {
                continue;
            };
            match asked
                .insert(&object.identity)
                .then(|| client.outcome(identity))
            {
                // The broker remembers commits of what was removed since, so it is looked up.
                Some(Ok(Standing::Committed(epoch)))
                    if epoch.0 == newest
                        && client.open_one(&Selector::Identity(identity)).is_ok() =>
                {
                    return Next::Here(object.clone());
                }
                // An identity has one writer, and one read over the network does for this host. If
                // that process dies, the broker forgets what it began.
                Some(Ok(Standing::Unfinished)) => {
                    let why = format!(
                        "another process of this host is pulling {}",
                        self.order.name
                    );
                    return Next::Wait(PULLED_HERE, why);
                }
                _ => {}
            }
        }
        let offers = std::mem::take(&mut self.offers);
        let step = match &self.order.from {
            Some(_) => self.named(&offers),
            None => self.chosen(&offers),
        };
        let next = match step {
            Step::Read { host, last_resort } => Next::Ask {
                gateway: host.clone(),
                wanted: wanted(&offers, host, &self.order.name, newest),
                others: others(&offers, host),
                last_resort,
            },
            Step::Wait(pause) => {
                let why = format!("all gateways that have {} are busy", self.order.name);
                Next::Wait(pause, why)
            }
            Step::Nobody => Next::Nobody,
        };
        self.offers = offers;
        next
    }

    /// Asks every gateway that is there, and those that they know of, until the answers decide.
    fn search(&mut self, patience: Duration) -> Verdict {
        self.search.begin();
        let begun = Instant::now();
        let mut rounds = Rounds::default();
        loop {
            let mut there = self.live.gateways(self.order.from.as_deref());
            // This host's own gateway may know of more.
            there.retain(|gateway| *gateway != self.me);
            if there.is_empty() && self.alone + begun.elapsed() >= REACHED {
                self.alone += begun.elapsed();
                return Verdict::NotYet;
            }
            for gateway in self.search.there(&there) {
                rounds.ask(&self.session, &gateway, self.find(), patience);
            }
            let now = self.started.elapsed();
            rounds.hear(|gateway, found| match found {
                Some(found) => self.search.answered(gateway, now, found),
                None => self.search.silent(gateway),
            });
            let is_over = begun.elapsed() >= patience;
            let mut verdict = self.search.verdict(is_over);
            if verdict == Verdict::Nobody && self.order.from.is_none() {
                // Those that the others know of, and that this process has not reached yet, could
                // have it too.
                rounds.ask_who_is_there(&self.session, &there, patience);
                verdict = match rounds.unreached(&there) {
                    Some(hosts) if hosts.is_empty() => Verdict::Nobody,
                    None | Some(_) if !is_over => Verdict::NotYet,
                    hosts => Verdict::Silent(hosts.unwrap_or_else(|| names(&there))),
                };
            }
            if verdict != Verdict::NotYet || is_over {
                return verdict;
            }
            std::thread::sleep(LOOK);
        }
    }

    fn find(&self) -> Question {
        Question::Find(Find {
            name: self.order.name.clone(),
            epoch: self.order.epoch,
        })
    }

    /// Says how many gateways offer it.
    pub fn count(&self) -> usize {
        self.offers.len()
    }

    /// Remembers what went wrong with a gateway.
    pub fn trouble(&mut self, gateway: &Gateway, kind: TroubleKind) {
        let at = self.started.elapsed();
        let known = self
            .troubles
            .entry(gateway.clone())
            .or_insert((kind, 0, at));
        let times = if known.0 == kind { known.1 + 1 } else { 1 };
        *known = (kind, times, at);
    }

    fn chosen<'a>(&mut self, offers: &'a [Offer]) -> Step<&'a Gateway> {
        let sources: Vec<Source<&Gateway>> = offers
            .iter()
            .map(
                |Offer {
                     gateway,
                     object,
                     heard,
                 }| Source {
                    host: gateway,
                    origin: object.origin,
                    heard: *heard,
                    reads: announced(
                        object.origin,
                        object.reads,
                        object.admitted,
                        others(offers, gateway),
                    ),
                    limit: object.limit,
                },
            )
            .collect();
        // A gateway that has gone cannot be chosen.
        let troubles: Vec<Trouble<&Gateway>> = offers
            .iter()
            .filter_map(|offer| {
                let (kind, times, at) = *self.troubles.get(&offer.gateway)?;
                Some(Trouble {
                    host: &offer.gateway,
                    kind,
                    times,
                    at,
                })
            })
            .collect();
        let bytes = offers.first().map_or(0, |offer| offer.object.bytes);
        self.decisions += 1;
        let (low, high) = self.me.incarnation.0.split_at(8);
        let drawn = [low, high].map(|half| {
            half.iter()
                .fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte))
        });
        let step = choose(&View {
            me: &self.me,
            now: self.started.elapsed(),
            wanted_since: Duration::ZERO,
            expected: self.pace.expected(bytes),
            sources: &sources,
            troubles: &troubles,
            seed: drawn[0] ^ drawn[1].wrapping_mul(self.decisions),
        });
        match step {
            Step::Read { host, last_resort } => {
                let host = offers
                    .iter()
                    .map(|offer| &offer.gateway)
                    .find(|gateway| *gateway == host);
                host.map_or(Step::Nobody, |host| Step::Read { host, last_resort })
            }
            Step::Wait(pause) => Step::Wait(pause),
            Step::Nobody => Step::Nobody,
        }
    }

    /// A host that the user named is not chosen, and need not point to others.
    fn named<'a>(&self, offers: &'a [Offer]) -> Step<&'a Gateway> {
        let since = |gateway: &Gateway| match self.troubles.get(gateway) {
            Some((TroubleKind::Refused, _, at)) => self.started.elapsed().saturating_sub(*at),
            _ => NAMED_IS_BUSY,
        };
        let rested = offers
            .iter()
            .map(|offer| &offer.gateway)
            .max_by_key(|gateway| since(gateway));
        match rested {
            Some(host) if since(host) >= NAMED_IS_BUSY => Step::Read {
                host,
                last_resort: true,
            },
            Some(host) => Step::Wait(NAMED_IS_BUSY.saturating_sub(since(host))),
            None => Step::Nobody,
        }
    }
}

fn wanted(offers: &[Offer], gateway: &Gateway, name: &str, epoch: u64) -> Wanted {
    let offered = offers.iter().find(|offer| offer.gateway == *gateway);
    let identity = offered
        .and_then(|offer| offer.object.identity.parse().ok())
        .map(|identity: Identity| identity.0);
    Wanted {
        name: name.to_owned(),
        epoch: Some(epoch),
        identity,
    }
}

/// Counts the hosts besides a gateway's that have it.
fn others(offers: &[Offer], gateway: &Gateway) -> u32 {
    let hosts: BTreeSet<&String> = offers.iter().map(|offer| &offer.gateway.host).collect();
    let others = hosts.into_iter().filter(|host| **host != gateway.host);
    u32::try_from(others.count()).unwrap_or(u32::MAX)
}

/// The questions of one search.
#[derive(Debug, Default)]
struct Rounds {
    waits: Vec<(Gateway, Asked)>,
    /// Questions which gateways there are, once nobody has said that it has the object.
    knows: Vec<Asked>,
    asked: bool,
    known: Option<BTreeSet<Gateway>>,
}

impl Rounds {
    fn ask(
        &mut self,
        session: &Session,
        gateway: &Gateway,
        question: Question,
        patience: Duration,
    ) {
        match ask(session, gateway, &question, patience) {
            Ok(asked) => self.waits.push((gateway.clone(), asked)),
            Err(error) => tracing::warn!(%error, "a gateway could not be asked"),
        }
    }

    /// Hears what has come: what a gateway has, or that it will not answer.
    fn hear(&mut self, mut told: impl FnMut(&Gateway, Option<Vec<Has>>)) {
        for (gateway, asked) in std::mem::take(&mut self.waits) {
            match asked.hear() {
                Heard::Answer(answered) => match answered.answer {
                    Answer::Found(found) => told(&gateway, Some(found)),
                    _ => told(&gateway, None),
                },
                Heard::NotYet => self.waits.push((gateway, asked)),
                Heard::Nothing => told(&gateway, None),
            }
        }
        self.knows.retain(|asked| match asked.hear() {
            Heard::Answer(answered) => {
                if let Answer::Gateways(known) = answered.answer {
                    self.known.get_or_insert_default().extend(known);
                }
                false
            }
            Heard::NotYet => true,
            Heard::Nothing => false,
        });
    }

    /// Asks some which gateways there are, once.
    fn ask_who_is_there(&mut self, session: &Session, there: &[Gateway], patience: Duration) {
        if std::mem::replace(&mut self.asked, true) {
            return;
        }
        let asked = there
            .iter()
            .take(MOST_TELL)
            .map(|gateway| ask(session, gateway, &Question::Gateways, patience));
        self.knows = asked.filter_map(Result::ok).collect();
    }

    /// Lists those that were named and are not among these; none while that is not known.
    fn unreached(&self, there: &[Gateway]) -> Option<Vec<String>> {
        let known = self.known.as_ref().filter(|_| self.knows.is_empty())?;
        let unreached = known.iter().filter(|known| !there.contains(known));
        Some(unreached.map(|gateway| gateway.host.clone()).collect())
    }
}

fn names(gateways: &[Gateway]) -> Vec<String> {
    gateways
        .iter()
        .map(|gateway| gateway.host.clone())
        .collect()
}

/// Names a process that pulls, which serves nobody.
pub fn puller(host: &str) -> Result<Gateway> {
    Ok(Gateway {
        host: host.to_owned(),
        incarnation: Incarnation::random()?,
    })
}
