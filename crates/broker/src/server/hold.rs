//! Who holds each pool, and how the hold before it ended.
//!
//! ```text
//! create, commit ─► First ─► Free ─adopt─► Taking ─► Held ─release─► Closing ─► Free
//!                              ▲             │         │
//!                              └─────────────┴─────────┴── proof of death
//! ```
//!
//! `Free` by a death is not free at once: the pool may be held when the quarantine is over, in which
//! the last GPU work of a dead process ends.
//!
//! In `First`, `Taking` and `Closing` the keeper is given a [record](crate::server::record). A broker that
//! dies must not let a successor give a pool to a second holder while the first one lives: so a hold
//! begins when the keeper has its record, and a pool without one is given to no process.
//!
//! What leads from one to the next: `catalogue/pools.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::object::identity::Identity;
use crate::pool::Previous;
use crate::server::action::{Asker, Participant};
use crate::server::listing::Process;
use crate::server::record::{Kept, Phase, Record};

/// Which process holds a pool: what tells of its death, and what it is called.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    /// What it shows to end the hold.
    pub token: Identity,
    /// The participant whose death ends it; none for a hold that a former broker gave.
    pub by: Option<Participant>,
    /// Of a hold that a former broker gave: processes that have not exited.
    pub alive: usize,
    /// It died while the keeper was taking a record.
    pub dead: bool,
    /// For people.
    pub who: Process,
    pub since: Instant,
}

/// How far the hold of a pool has come; the picture above says what leads where.
#[derive(Clone, Debug)]
pub(super) enum Hold<F> {
    /// The keeper takes the pool's first record; the pool's manifest waits.
    First {
        manifest: F,
    },
    Free {
        since: Instant,
    },
    /// The keeper takes the record of a new hold.
    Taking {
        asker: Asker,
        request: u64,
        holder: Holder,
        /// It gave up waiting.
        given_up: bool,
    },
    Held(Holder),
    /// The keeper takes the record of its end.
    Closing {
        to: Participant,
        request: u64,
        holder: Holder,
    },
}

/// One pool.
#[derive(Clone, Debug)]
pub(super) struct Pool<F> {
    /// That of the last hold.
    pub generation: u64,
    /// How the hold before ended: before the one that is, or else the last.
    pub previous: Previous,
    pub hold: Hold<F>,
    /// The number of the record that the keeper takes, with its pidfds.
    pub coming: Option<(u64, Vec<F>)>,
    /// What the keeper has.
    pub record: Option<Kept<F>>,
}

impl<F: Clone> Pool<F> {
    /// Goes on from a record that a former broker left.
    pub(super) fn restored(kept: Kept<F>, who: Process) -> Pool<F> {
        let Record {
            generation,
            phase,
            previous,
            token,
            processes,
            ..
        } = kept.record;
        let since = Instant::now();
        let (hold, previous) = match phase {
            Phase::Never => (Hold::Free { since }, Previous::Never),
            Phase::Closed => (Hold::Free { since }, Previous::Closed),
            Phase::Begun => {
                let holder = Holder {
                    token,
                    by: None,
                    alive: processes,
                    dead: false,
                    who,
                    since,
                };
                (Hold::Held(holder), previous)
            }
        };
        Pool {
            generation,
            previous,
            hold,
            coming: None,
            record: Some(kept),
        }
    }

    /// Ends the hold by its holder's death.
    pub(super) fn end_by_death(&mut self) {
        self.previous = Previous::Died;
        self.hold = Hold::Free {
            since: Instant::now(),
        };
    }

    /// Returns the process that holds it, for people, and since when it is as it is.
    pub(super) fn holder(&self) -> (Option<&Holder>, Option<Instant>) {
        match &self.hold {
            Hold::First { .. } => (None, None),
            Hold::Free { since } => (None, Some(*since)),
            Hold::Taking { holder, .. } | Hold::Held(holder) | Hold::Closing { holder, .. } => {
                (Some(holder), Some(holder.since))
            }
        }
    }
}

/// All pools, by the identity of their objects.
#[derive(Debug)]
pub(super) struct Pools<F> {
    rows: BTreeMap<Identity, Pool<F>>,
    /// Who holds what, or is about to.
    holding: BTreeSet<(Participant, Identity)>,
}

impl<F: Clone> Pools<F> {
    pub(super) fn new() -> Pools<F> {
        Pools {
            rows: BTreeMap::new(),
            holding: BTreeSet::new(),
        }
    }

    pub(super) fn get(&self, pool: Identity) -> Option<&Pool<F>> {
        self.rows.get(&pool)
    }

    pub(super) fn get_mut(&mut self, pool: Identity) -> Option<&mut Pool<F>> {
        self.rows.get_mut(&pool)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Identity, &Pool<F>)> {
        self.rows.iter()
    }

    pub(super) fn insert(&mut self, identity: Identity, pool: Pool<F>) {
        self.rows.insert(identity, pool);
    }

    pub(super) fn remove(&mut self, identity: Identity) -> Option<Pool<F>> {
        self.holding.retain(|(_, pool)| *pool != identity);
        self.rows.remove(&identity)
    }

    /// Notes that a participant holds a pool, or is about to.
    pub(super) fn holds_now(&mut self, participant: Participant, pool: Identity) {
        self.holding.insert((participant, pool));
    }

    /// Notes that it does no more.
    pub(super) fn holds_no_more(&mut self, participant: Participant, pool: Identity) {
        self.holding.remove(&(participant, pool));
    }

    /// Lists what a participant holds, or is about to.
    pub(super) fn held_by(&self, participant: Participant) -> impl Iterator<Item = Identity> + '_ {
        let range = (participant, Identity([0; 16]))..=(participant, Identity([u8::MAX; 16]));
        self.holding.range(range).map(|(_, pool)| *pool)
    }
}
