//! Gateways that are started again at the same address, and two for one broker.

use rustix::process::Signal;

use super::stop::stopped_at;
use crate::host::{PORT, Pulling, Serving};
use crate::world::{Means, World};

const ORIGIN: usize = 0;
const REPLICA: usize = 1;
const OTHER: usize = 2;
const BYTES: usize = 8 << 20;

/// All bytes were read; the origin's gateway is replaced by one at the same address, whose first
/// lease is of another object with the same name.
pub fn same_address(means: &Means) -> Result<String, String> {
    let mut world = World::create(means, 3, &Serving::default())?;
    for (round, step) in ["pull.half_read", "pull.read", "pull.confirming"]
        .into_iter()
        .enumerate()
    {
        let name = format!("model-{round}");
        let old = world.put(ORIGIN, &name, BYTES)?;
        world.hosts[ORIGIN].serve(&Serving::default())?;
        let mut pull = stopped_at(&world, REPLICA, &old, step, &Pulling::default())?;
        world.hosts[ORIGIN].serve(&Serving::default())?;
        world.hosts[ORIGIN].remove(&name)?;
        let new = world.put(ORIGIN, &name, BYTES)?;
        let mut other = stopped_at(&world, OTHER, &new, "pull.half_read", &Pulling::default())?;
        pull.signal(Signal::CONT);
        pull.end("the pull")?;
        other.signal(Signal::CONT);
        other.end("the other pull")?;
        world.check_of(&old.name)?;
        if world.shows(REPLICA, &old) {
            return Err(format!(
                "at {step}: {old:?} was committed without its gateway"
            ));
        }
        world.pulled(REPLICA, &new)?;
        world.pulled(OTHER, &new)?;
    }
    world.emptied()?;
    Ok("3 steps".into())
}

/// Two gateways for the origin's broker, of which one dies; two pulls of one object at one
/// replica's broker.
pub fn two_for_one_broker(means: &Means) -> Result<String, String> {
    let mut world = World::create(means, 2, &Serving::default())?;
    let second = Some(world.hosts[ORIGIN].another_gateway(&Serving::default(), PORT + 1)?);
    let object = world.put(ORIGIN, "model-0", BYTES)?;
    let pulling = Pulling {
        more: vec!["--peer".into(), world.hosts[ORIGIN].at_port(PORT + 1)],
        ..Pulling::default()
    };
    let mut first = stopped_at(&world, REPLICA, &object, "pull.half_read", &pulling)?;
    // Of one object there is one writer; this one waits, or gives up.
    let beside = world.hosts[REPLICA].pull(&object.name, &pulling)?;
    // Whichever it reads from.
    world.hosts[ORIGIN].gateway = None;
    first.signal(Signal::CONT);
    first.end("the first pull")?;
    beside.end("the pull beside it")?;
    if !world.shows(REPLICA, &object) {
        return Err(format!(
            "neither of two pulls committed it\n{}",
            world.log()
        ));
    }
    world.check()?;
    world.hosts[ORIGIN].serve(&Serving::default())?;
    drop(second);
    let object = world.put(ORIGIN, "model-1", BYTES)?;
    world.pulled(REPLICA, &object)?;
    world.emptied()?;
    Ok("either may die, and of two pulls one commits".into())
}
