//! The ledger against a map: whatever happens in whatever order, a block's count is the number of
//! its outstanding slots, every lease is retired exactly once, and nothing is retired while a
//! living process holds it.
//!
//! 1. `mod`: what can happen, in histories of random steps; `world`: the ledger, the map, and what
//!    must be true after each step.
//! 2. `racy_file`: what consumers do in the middle of a call. `threads`: what they do at any time,
//!    without a map.
//! 3. `reach`: how far the histories came, which is part of the test.

mod racy_file;
mod reach;
mod threads;
mod world;

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use reach::Reach;
use world::{GROUPS, SLOTS, World};

/// The consumer's next step on a lease, in the middle of a call.
type Race = Option<(usize, usize)>;

/// What happens. A number that chooses a lease is taken modulo how many there are.
#[derive(Clone, Debug)]
enum Step {
    Grant {
        block: usize,
        tenths: Option<u64>,
        times: usize,
    },
    Claim {
        lease: usize,
        times: usize,
    },
    Release {
        lease: usize,
        times: usize,
        marked: bool,
    },
    Revoke {
        lease: usize,
        race: Race,
    },
    Corrupt {
        lease: usize,
        word: u64,
    },
    Collect {
        everything: bool,
        race: Race,
    },
    Glance {
        shard: usize,
        race: Race,
    },
    Expire {
        tenths: u64,
        race: Race,
    },
    /// Claims, revokes and looks up what has ended.
    Past {
        lease: usize,
    },
    /// The same slot, again and again.
    Again {
        block: usize,
        times: usize,
    },
    /// The handle of a block goes, and another block comes.
    Replace {
        block: usize,
    },
    Die,
}

/// Few at a time, mostly.
fn times() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 1..4usize, 2 => 1..80usize, 1 => 100..600usize]
}

fn race() -> impl Strategy<Value = Race> {
    prop::option::of((
        prop_oneof![3 => 0..8usize, 2 => 0..80usize, 1 => 0..600usize],
        any::<usize>(),
    ))
}

fn step() -> impl Strategy<Value = Step> {
    let lease = any::<usize>;
    let block = 0..6usize;
    prop_oneof![
        60 => (block.clone(), prop::option::of(1..20u64), times())
            .prop_map(|(block, tenths, times)| Step::Grant { block, tenths, times }),
        50 => (lease(), times()).prop_map(|(lease, times)| Step::Claim { lease, times }),
        40 => (lease(), times(), prop::bool::weighted(0.8))
            .prop_map(|(lease, times, marked)| Step::Release { lease, times, marked }),
        20 => (lease(), race()).prop_map(|(lease, race)| Step::Revoke { lease, race }),
        8 => (lease(), any::<u64>()).prop_map(|(lease, word)| Step::Corrupt { lease, word }),
        50 => (prop::bool::weighted(0.3), race()).prop_map(|(everything, race)| Step::Collect { everything, race }),
        15 => (0..16usize, race()).prop_map(|(shard, race)| Step::Glance { shard, race }),
        15 => (1..15u64, race()).prop_map(|(tenths, race)| Step::Expire { tenths, race }),
        15 => lease().prop_map(|lease| Step::Past { lease }),
        5 => (block.clone(), 1..400usize).prop_map(|(block, times)| Step::Again { block, times }),
        5 => block.prop_map(|block| Step::Replace { block }),
        2 => Just(Step::Die),
    ]
}

/// Runs of 256 histories each, at most.
const MOST_RUNS: usize = 8;

#[test]
fn the_count_is_the_outstanding_slots_and_every_lease_ends_once() {
    let reach = RefCell::new(Reach::default());
    // A step may be another thread's, which has another shard.
    let steps = prop::collection::vec((step(), prop::bool::weighted(0.2)), 1..150);
    // A run that did not come far enough goes on: what is rare needs luck, and what cannot be
    // reached is found all the same.
    let mut missing = None;
    for _ in 0..MOST_RUNS {
        // Each run its own: a runner that has had its cases runs no more.
        let mut runner = TestRunner::new(Config {
            failure_persistence: None,
            ..Config::default()
        });
        let found = runner.run(&steps, |steps| {
            let mut world = World::new();
            for (step, elsewhere) in steps {
                if elsewhere {
                    reach.borrow_mut().threads += 1;
                    let done = std::thread::scope(|scope| scope.spawn(|| world.take(&step)).join());
                    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                } else {
                    world.take(&step);
                }
                world.check();
            }
            world.end(&mut reach.borrow_mut());
            Ok(())
        });
        found.unwrap_or_else(|failed| panic!("{failed}"));
        missing = reach.borrow().missing(SLOTS, GROUPS);
        if missing.is_none() {
            return;
        }
    }
    panic!("{} runs: {}", MOST_RUNS, missing.unwrap_or_default());
}
