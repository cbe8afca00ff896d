//! The host that a pull reads from: what it has heard and seen, put before the plan.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use gpu_ipc::broker::{Client, Identity, Standing};
use gpu_ipc_gateway_plan::{Source, Step, Trouble, TroubleKind, View, choose};

use crate::net::heard::{Heard, Offer};
use crate::pace::Pace;
use crate::error::Result;
use crate::message::{Incarnation, Wanted};
use crate::net::key::{Announced, Gateway, ROOT, escape};

/// How long until a host that was named and is busy is asked again.
const NAMED_IS_BUSY: Duration = Duration::from_millis(500);
/// How long until this host's broker is asked again for what another process here is pulling.
const PULLED_HERE: Duration = Duration::from_millis(200);

/// What is to be pulled.
#[derive(Clone, Debug)]
pub struct Order {
    /// The name.
    pub name: String,
    /// The epoch; the newest that is announced if nothing is said.
    pub epoch: Option<u64>,
    /// The host to read from, whatever its load; else the one that the plan chooses.
    pub from: Option<String>,
}

/// What to do next.
#[derive(Debug)]
pub enum Next {
    /// Nothing: this host's broker has it.
    Here(Announced),
    /// Ask this gateway for a lease.
    Ask {
        /// The host.
        gateway: Gateway,
        /// What for.
        wanted: Wanted,
        /// Whether the others failed or kept this host waiting.
        last_resort: bool,
    },
    /// Look again after this time: all are busy.
    Wait(Duration),
    /// Look again after this time: another process of this host is pulling it.
    PulledHere(Duration),
    /// Nobody announces it.
    Nobody,
}

/// The sources of one pull.
#[derive(Debug)]
pub struct Sources {
    order: Order,
    me: Gateway,
    pace: Pace,
    heard: Heard,
    started: Instant,
    troubles: BTreeMap<Gateway, (TroubleKind, u32, Duration)>,
    decisions: u64,
}

impl Sources {
    /// Begins to listen for hosts that have it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) when the session has ended.
    pub fn listen(
        session: &zenoh::Session,
        order: &Order,
        me: Gateway,
        pace: Pace,
        started: Instant,
    ) -> Result<Sources> {
        let name = escape(&order.name);
        let host = order.from.as_deref().map_or("*".to_owned(), escape);
        let epoch = order
            .epoch
            .map_or("*".to_owned(), |epoch| epoch.to_string());
        let key = format!("{ROOT}/{host}/*/has/*/{epoch}/*/*/*/*/*/{name}");
        let heard = Heard::listen(session, key, started)?;
        Ok(Sources {
            order: order.clone(),
            me,
            pace,
            heard,
            started,
            troubles: BTreeMap::new(),
            decisions: 0,
        })
    }

    /// Decides what to do next.
    pub fn next(&mut self, client: &Client, patience: Duration) -> Next {
        let mut offers = self.heard.offers(patience);
        let Some(newest) = offers.iter().map(|offer| offer.object.epoch).max() else {
            return Next::Nobody;
        };
        offers.retain(|offer| offer.object.epoch == newest);
        let mut asked = BTreeSet::new();
        for Offer { object, .. } in &offers {
            let Ok(identity) = object.identity.parse::<Identity>() else {
                continue;
            };
            match asked
                .insert(&object.identity)
                .then(|| client.outcome(identity))
            {
                Some(Ok(Standing::Committed(epoch))) if epoch.0 == newest => {
                    return Next::Here(object.clone());
                }
                // An identity has one writer, and one read over the network does for this host. If
                // that process dies, the broker forgets what it began.
                Some(Ok(Standing::Unfinished)) => return Next::PulledHere(PULLED_HERE),
                _ => {}
            }
        }
        let step = match &self.order.from {
            Some(_) => self.named(&offers),
            None => self.chosen(&offers),
        };
        match step {
            Step::Read { host, last_resort } => Next::Ask {
                gateway: host.clone(),
                wanted: wanted(&offers, host, &self.order.name, newest),
                last_resort,
            },
            Step::Wait(pause) => Next::Wait(pause),
            Step::Nobody => Next::Nobody,
        }
    }

    /// Says how many gateways offer it.
    pub fn count(&self) -> usize {
        let mut gateways: Vec<Gateway> = self
            .heard
            .offers(Duration::ZERO)
            .into_iter()
            .map(|offer| offer.gateway)
            .collect();
        gateways.sort();
        gateways.dedup();
        gateways.len()
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
                    origin: object.home == gateway.host,
                    heard: *heard,
                    reads: object.reads,
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

/// Names a process that pulls, which serves nobody.
pub fn puller(host: &str) -> Result<Gateway> {
    Ok(Gateway {
        host: host.to_owned(),
        incarnation: Incarnation::random()?,
    })
}
