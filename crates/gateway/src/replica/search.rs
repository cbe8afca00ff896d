//! A search for who has a name: every gateway that is there is asked, and says yes or no. Pure: no
//! clock, no network.
//!
//! ```text
//! there ──asked──► Asked ──yes, no──► Answered
//!                    └──patience over, gone──► Silent
//! ```
//!
//! | message | lost | late or repeated | forged |
//! |---|---|---|---|
//! | a question | its gateway counts as silent, and is asked again in the next search | answered once more; nothing is kept of it | it costs the gateway an answer |
//! | yes or no | as a lost question | of a former search: it has no place to arrive | a yes leads to a question for a lease, whose answer is compared with what was asked for; a no of a gateway that has the object hides that copy alone |
//!
//! What is found, with several answers on their way:
//!
//! - With an epoch, the first yes will do: an epoch of a name is one object everywhere.
//! - Without, the home's answer decides, which knows the newest epoch. Until it comes, replicas are
//!   not read: they may be of an older one. A home that is silent or gone leaves the newest that
//!   was heard.
//! - *Nobody has it* is said only when every gateway that is there has said no, and those that
//!   they know of have too. Else some are silent, and that is another answer.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::message::Has;
use crate::net::key::Gateway;

/// A gateway that has the object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// The gateway.
    pub gateway: Gateway,
    /// What it says of it.
    pub object: Has,
    /// When it was first heard to have it.
    pub heard: Duration,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum State {
    Asked,
    Yes(Has),
    No,
    Silent,
}

/// What a search has come to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Answers are on their way that matter.
    NotYet,
    /// These have it, all with one identity and epoch unless somebody lies.
    Offers(Vec<Offer>),
    /// Nobody has it.
    Nobody,
    /// Nobody said yes, and these did not answer.
    Silent(Vec<String>),
}

/// One search.
#[derive(Clone, Debug, Default)]
pub struct Search {
    epoch: Option<u64>,
    states: BTreeMap<Gateway, State>,
    /// When each gateway was first heard to have each identity, in this and former searches.
    first: BTreeMap<(Gateway, String), Duration>,
}

impl Search {
    /// Makes one for an epoch, or for the newest.
    pub fn new(epoch: Option<u64>) -> Search {
        Search {
            epoch,
            ..Search::default()
        }
    }

    /// Begins again: all are to be asked.
    pub fn begin(&mut self) {
        self.states.clear();
    }

    /// Takes the gateways that are there at this moment, and returns those that are to be asked.
    /// Those that are there no more are not waited for.
    pub fn there(&mut self, gateways: &[Gateway]) -> Vec<Gateway> {
        for (gateway, state) in &mut self.states {
            if *state == State::Asked && !gateways.contains(gateway) {
                *state = State::Silent;
            }
        }
        let new = gateways
            .iter()
            .filter(|gateway| !self.states.contains_key(gateway));
        let new: Vec<Gateway> = new.cloned().collect();
        let asked = new.iter().map(|gateway| (gateway.clone(), State::Asked));
        self.states.extend(asked);
        new
    }

    /// Takes an answer: what the gateway has, the newest first, or nothing.
    pub fn answered(&mut self, gateway: &Gateway, now: Duration, found: Vec<Has>) {
        let Some(state) = self.states.get_mut(gateway) else {
            return;
        };
        let epoch = self.epoch;
        let fits = |has: &Has| epoch.is_none_or(|epoch| epoch == has.epoch);
        *state = match found.into_iter().find(fits) {
            Some(has) => {
                let key = (gateway.clone(), has.identity.clone());
                self.first.entry(key).or_insert(now);
                State::Yes(has)
            }
            None => State::No,
        };
    }

    /// A gateway will not answer.
    pub fn silent(&mut self, gateway: &Gateway) {
        if let Some(state) = self.states.get_mut(gateway)
            && *state == State::Asked
        {
            *state = State::Silent;
        }
    }

    /// Says what is known. With `patience_is_over` nothing is waited for.
    pub fn verdict(&self, patience_is_over: bool) -> Verdict {
        let newest = self.yes().map(|(_, has)| has.epoch).max();
        let Some(newest) = newest else {
            return self.nobody(patience_is_over);
        };
        let of_newest = self.yes().filter(|(_, has)| has.epoch == newest);
        let offers: Vec<Offer> = of_newest
            .map(|(gateway, has)| Offer {
                gateway: gateway.clone(),
                object: has.clone(),
                heard: self
                    .first
                    .get(&(gateway.clone(), has.identity.clone()))
                    .copied()
                    .unwrap_or_default(),
            })
            .collect();
        let decides = self.epoch.is_some() || self.home_has_answered(&offers);
        if decides || patience_is_over || !self.waits() {
            Verdict::Offers(offers)
        } else {
            Verdict::NotYet
        }
    }

    fn nobody(&self, patience_is_over: bool) -> Verdict {
        if self.states.is_empty() || (self.waits() && !patience_is_over) {
            return Verdict::NotYet;
        }
        let silent = self
            .states
            .iter()
            .filter(|(_, state)| matches!(state, State::Silent | State::Asked));
        let silent: Vec<String> = silent.map(|(gateway, _)| gateway.host.clone()).collect();
        if silent.is_empty() {
            Verdict::Nobody
        } else {
            Verdict::Silent(silent)
        }
    }

    fn yes(&self) -> impl Iterator<Item = (&Gateway, &Has)> {
        self.states
            .iter()
            .filter_map(|(gateway, state)| match state {
                State::Yes(has) => Some((gateway, has)),
                _ => None,
            })
    }

    fn waits(&self) -> bool {
        self.states.values().any(|state| *state == State::Asked)
    }

    /// Says whether the home of what was found has said what is the newest.
    fn home_has_answered(&self, offers: &[Offer]) -> bool {
        offers.iter().all(|offer| {
            let home = &offer.object.home.host;
            let mut of_home = self
                .states
                .iter()
                .filter(|(gateway, _)| gateway.host == *home)
                .peekable();
            of_home.peek().is_some() && of_home.all(|(_, state)| *state != State::Asked)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Home, Incarnation};

    fn gateway(host: &str) -> Gateway {
        Gateway {
            host: host.into(),
            incarnation: Incarnation([host.as_bytes()[0]; 16]),
        }
    }

    fn has(home: &str, epoch: u64) -> Vec<Has> {
        let home = Home {
            host: home.into(),
            broker: [1; 16],
        };
        vec![Has {
            epoch,
            identity: format!("{epoch:032x}"),
            bytes: 9,
            origin: false,
            reads: 0,
            admitted: 0,
            limit: 1,
            home,
        }]
    }

    fn search(epoch: Option<u64>, hosts: &[&str]) -> Search {
        let mut search = Search::new(epoch);
        let there: Vec<Gateway> = hosts.iter().copied().map(gateway).collect();
        assert_eq!(search.there(&there), there);
        assert_eq!(search.there(&there), [], "nobody is asked twice");
        search
    }

    fn hosts(verdict: &Verdict) -> Vec<&str> {
        match verdict {
            Verdict::Offers(offers) => offers.iter().map(|o| o.gateway.host.as_str()).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nobody_is_said_only_when_all_said_no() {
        let mut search = search(None, &["a", "b"]);
        assert_eq!(search.verdict(false), Verdict::NotYet);
        search.answered(&gateway("a"), Duration::ZERO, Vec::new());
        assert_eq!(search.verdict(false), Verdict::NotYet);
        assert_eq!(search.verdict(true), Verdict::Silent(vec!["b".into()]));
        search.silent(&gateway("b"));
        assert_eq!(search.verdict(false), Verdict::Silent(vec!["b".into()]));
        search.answered(&gateway("b"), Duration::ZERO, Vec::new());
        assert_eq!(search.verdict(false), Verdict::Nobody, "it came after all");
        assert_eq!(
            Search::new(None).verdict(true),
            Verdict::NotYet,
            "nobody was there"
        );
    }

    #[test]
    fn without_an_epoch_the_home_decides() {
        let mut search = search(None, &["a", "b", "c"]);
        search.answered(&gateway("b"), Duration::ZERO, has("a", 1));
        assert_eq!(
            search.verdict(false),
            Verdict::NotYet,
            "a replica may be old"
        );
        search.answered(&gateway("a"), Duration::ZERO, has("a", 2));
        assert_eq!(hosts(&search.verdict(false)), ["a"]);
        search.answered(&gateway("c"), Duration::ZERO, has("a", 2));
        assert_eq!(hosts(&search.verdict(false)), ["a", "c"]);
    }

    #[test]
    fn a_home_that_is_gone_leaves_what_was_heard() {
        let mut search = search(None, &["a", "b"]);
        search.answered(&gateway("b"), Duration::ZERO, has("a", 1));
        search.there(&[gateway("b")]);
        assert_eq!(hosts(&search.verdict(false)), ["b"]);
    }

    #[test]
    fn with_an_epoch_the_first_yes_will_do_and_others_epochs_are_a_no() {
        let mut search = search(Some(1), &["a", "b"]);
        search.answered(&gateway("a"), Duration::ZERO, has("a", 2));
        assert_eq!(search.verdict(false), Verdict::NotYet);
        search.answered(&gateway("b"), Duration::ZERO, has("a", 1));
        assert_eq!(hosts(&search.verdict(false)), ["b"]);
        search.answered(&gateway("stranger"), Duration::ZERO, has("a", 1));
        assert_eq!(
            hosts(&search.verdict(true)),
            ["b"],
            "who was not asked is not heard"
        );
    }

    #[test]
    fn the_first_hearing_outlives_a_search() {
        let mut search = search(None, &["a"]);
        search.answered(&gateway("a"), Duration::from_secs(1), has("a", 1));
        search.begin();
        assert_eq!(search.there(&[gateway("a")]), [gateway("a")]);
        search.answered(&gateway("a"), Duration::from_secs(9), has("a", 1));
        match search.verdict(false) {
            Verdict::Offers(offers) => assert_eq!(offers[0].heard, Duration::from_secs(1)),
            other => panic!("{other:?}"),
        }
    }
}
