//! What gateways announce, as this process has heard it.
//!
//! Tokens come and go by a subscription. While nothing is known, a question goes to all: a
//! subscription does not say when it has told everything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use zenoh::Wait;
use zenoh::pubsub::Subscriber;
use zenoh::sample::SampleKind;

use crate::error::{Error, Result};
use crate::net::key::{Announced, Gateway};

/// An object that a gateway has.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Offer {
    /// The gateway.
    pub gateway: Gateway,
    /// The object.
    pub object: Announced,
    /// When the gateway was first heard to have it.
    pub heard: Duration,
}

#[derive(Default)]
struct Known {
    /// By the keys of their tokens: a gateway whose load changes has two for a moment.
    tokens: BTreeMap<String, (Gateway, Announced)>,
    first: BTreeMap<(Gateway, String), Duration>,
}

/// The announcements under a key.
pub struct Heard {
    session: zenoh::Session,
    key: String,
    started: Instant,
    known: Arc<Mutex<Known>>,
    _subscriber: Subscriber<()>,
}

impl std::fmt::Debug for Heard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Heard")
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

impl Heard {
    /// Begins to listen for announcements whose key this one, which may have wild cards, covers.
    /// Times are counted from `started`.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] when the session has ended.
    pub fn listen(session: &zenoh::Session, key: String, started: Instant) -> Result<Heard> {
        let known = Arc::<Mutex<Known>>::default();
        let told = known.clone();
        let hear = move |sample: zenoh::sample::Sample| {
            let is_there = sample.kind() == SampleKind::Put;
            told.lock().unwrap_or_else(PoisonError::into_inner).hear(
                sample.key_expr().as_str(),
                is_there,
                started.elapsed(),
            );
        };
        let subscriber = session
            .liveliness()
            .declare_subscriber(key.clone())
            .history(true)
            .callback(hear)
            .wait();
        let subscriber = subscriber.map_err(|error| Error::Unavailable {
            what: "a subscription".into(),
            why: error.to_string(),
            remedy: "see that the session is open",
        })?;
        Ok(Heard {
            session: session.clone(),
            key,
            started,
            known,
            _subscriber: subscriber,
        })
    }

    /// Returns what is known; asks all, for at most `patience`, while that is nothing.
    pub fn offers(&self, patience: Duration) -> Vec<Offer> {
        if self.known().tokens.is_empty() {
            self.ask(patience);
        }
        let known = self.known();
        let offer = |(gateway, object): &(Gateway, Announced)| {
            let heard = known
                .first
                .get(&(gateway.clone(), object.identity.clone()))
                .copied()
                .unwrap_or_default();
            Offer {
                gateway: gateway.clone(),
                object: object.clone(),
                heard,
            }
        };
        known.tokens.values().map(offer).collect()
    }

    /// Returns the hosts that are known to have an object.
    pub fn hosts(&self, identity: &str) -> BTreeSet<String> {
        let known = self.known();
        let having = known
            .tokens
            .values()
            .filter(|(_, object)| object.identity == identity);
        having.map(|(gateway, _)| gateway.host.clone()).collect()
    }

    fn ask(&self, patience: Duration) {
        let Ok(replies) = self
            .session
            .liveliness()
            .get(&self.key)
            .timeout(patience)
            .wait()
        else {
            return;
        };
        while let Ok(reply) = replies.recv() {
            if let Ok(sample) = reply.result() {
                self.known()
                    .hear(sample.key_expr().as_str(), true, self.started.elapsed());
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn hear(&mut self, key: &str, is_there: bool, now: Duration) {
        if !is_there {
            if let Some((gateway, object)) = self.tokens.remove(key) {
                let again = |(other, has): &(Gateway, Announced)| {
                    *other == gateway && has.identity == object.identity
                };
                if !self.tokens.values().any(again) {
                    self.first.remove(&(gateway, object.identity));
                }
            }
            return;
        }
        let Some((gateway, object)) = Announced::parse(key) else {
            return;
        };
        self.first
            .entry((gateway.clone(), object.identity.clone()))
            .or_insert(now);
        self.tokens.insert(key.to_owned(), (gateway, object));
    }
}

#[cfg(test)]
mod tests {
    use gpu_ipc::broker::Identity;

    use super::*;
    use crate::message::Incarnation;

    #[test]
    fn a_gateway_whose_load_changes_was_first_heard_when_it_had_the_object() {
        let gateway = Gateway {
            host: "a".into(),
            incarnation: Incarnation([1; 16]),
        };
        let token = |reads| {
            let identity = Identity([2; 16]).to_string();
            let object = Announced {
                name: "model".into(),
                epoch: 1,
                identity,
                bytes: 9,
                layout: 3,
                reads,
                limit: 1,
                home: "a".into(),
            };
            object.key(&gateway)
        };
        let mut known = Known::default();
        let second = Duration::from_secs(1);
        known.hear(&token(0), true, second);
        known.hear(&token(1), true, second * 2);
        known.hear(&token(0), false, second * 2);
        assert_eq!(known.first.values().collect::<Vec<_>>(), [&second]);
        known.hear("gpu-ipc/1/anything", true, second);
        assert_eq!(known.tokens.len(), 1);
        known.hear(&token(1), false, second * 3);
        assert!(known.first.is_empty() && known.tokens.is_empty());
    }
}
