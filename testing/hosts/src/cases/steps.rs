//! At every named step of a pull, on either side, a process is killed: the one that is there, the
//! one on the other side, or the broker of either. Afterwards the object can be pulled, is right,
//! and leaves nothing behind.

use gateway::step::{RING_STEPS, STEPS};
use rustix::process::Signal;

use crate::host::{Pulling, Serving};
use crate::watch::until;
use crate::world::{Means, World};

const ORIGIN: usize = 0;
const REPLICA: usize = 1;
/// Long enough that a read has a middle: many times what connections hold.
const BYTES: usize = 4 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Itself,
    OtherSide,
    Broker(usize),
}

pub fn itself(means: &Means) -> Result<String, String> {
    all(means, Victim::Itself)
}

pub fn other_side(means: &Means) -> Result<String, String> {
    all(means, Victim::OtherSide)
}

pub fn broker_of_origin(means: &Means) -> Result<String, String> {
    all(means, Victim::Broker(ORIGIN))
}

pub fn broker_of_replica(means: &Means) -> Result<String, String> {
    all(means, Victim::Broker(REPLICA))
}

/// At the steps that only a read through a ring has: each victim.
pub fn of_a_ring(means: &Means) -> Result<String, String> {
    let mut world = World::create(means, 2, &Serving::rings())?;
    let victims = [
        Victim::Itself,
        Victim::OtherSide,
        Victim::Broker(ORIGIN),
        Victim::Broker(REPLICA),
    ];
    for step in RING_STEPS {
        for victim in victims {
            // Through slots of this side too, in every other.
            let land = if victim == Victim::Itself || victim == Victim::Broker(ORIGIN) {
                "object"
            } else {
                "slots"
            };
            let pulling = Pulling::by("pinned-ring").and(&["--land", land]);
            one(&mut world, step, victim, &Serving::rings(), pulling)
                .map_err(|why| format!("at {step}, {victim:?}: {why}"))?;
        }
    }
    world.check()?;
    world.emptied()?;
    Ok(format!(
        "{} steps, {} victims",
        RING_STEPS.len(),
        victims.len()
    ))
}

fn all(means: &Means, victim: Victim) -> Result<String, String> {
    let mut world = World::create(means, 2, &Serving::default())?;
    for step in STEPS {
        one(
            &mut world,
            step,
            victim,
            &Serving::default(),
            Pulling::default(),
        )
        .map_err(|why| format!("at {step}: {why}"))?;
    }
    world.check()?;
    world.emptied()?;
    Ok(format!("{} steps", STEPS.len()))
}

fn one(
    world: &mut World,
    step: &str,
    victim: Victim,
    serving: &Serving,
    mut pulling: Pulling,
) -> Result<(), String> {
    let object = world.put(ORIGIN, &format!("at-{step}-{victim:?}"), BYTES)?;
    let at = if step.starts_with("pull.") {
        REPLICA
    } else {
        ORIGIN
    };
    let told = Some(format!(
        "{}:{step}",
        if victim == Victim::Itself {
            "kill"
        } else {
            "stop"
        }
    ));
    if at == ORIGIN {
        world.hosts[ORIGIN].serve(&Serving {
            step: told,
            ..serving.clone()
        })?;
    } else {
        pulling.step = told;
    }
    let before = world.hosts[at].steps(step);
    let mut pull = world.hosts[REPLICA].pull(&object.name, &pulling)?;
    let reached = until("the step", || {
        let origin = world.hosts[ORIGIN].gateway.as_mut()?;
        let there = if at == ORIGIN { origin } else { &mut pull };
        (there.is_stopped() || there.ended().is_some()).then_some(())
    });
    if reached.is_err() || world.hosts[at].steps(step) == before {
        return Err(format!(
            "the step was not reached: {reached:?}\n{}",
            world.log()
        ));
    }
    match victim {
        Victim::Itself => {}
        Victim::OtherSide if at == ORIGIN => pull.kill(),
        Victim::OtherSide => world.hosts[ORIGIN].gateway = None,
        Victim::Broker(host) => {
            let killed = world.hosts[host].kill_broker()?;
            world.hosts[host].other_broker(killed)?;
        }
    }
    if victim != Victim::Itself {
        match &mut world.hosts[ORIGIN].gateway {
            Some(origin) if at == ORIGIN => origin.signal(Signal::CONT),
            _ => pull.signal(Signal::CONT),
        }
    }
    if world.hosts[ORIGIN]
        .gateway
        .as_mut()
        .is_none_or(|gateway| gateway.ended().is_some())
    {
        world.hosts[ORIGIN].serve(serving)?;
    }
    pull.end("the pull")?;
    world.check_of(&object.name)?;
    world.pulled(REPLICA, &object)
}
