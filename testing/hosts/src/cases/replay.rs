//! Somebody has recorded the question that confirmed a lease, and asks it again after the lease has
//! ended: at the same gateway, while another lease has the memory, and at a gateway that was
//! started again at the same address.

use std::time::SystemTime;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::stop::{STALLS_AFTER, stopped_at};
use crate::host::{Pulling, Serving};
use crate::watch::until;
use crate::world::{Means, World};

const ORIGIN: usize = 0;
const REPLICA: usize = 1;
const OTHER: usize = 2;
const BYTES: usize = 8 << 20;
/// How often it is asked again, each time.
const TIMES: u32 = 3;

pub fn confirmation(means: &Means) -> Result<String, String> {
    let mut world = World::create(means, 3, &Serving::default())?;
    let old = world.put(ORIGIN, "model", BYTES)?;
    let began = SystemTime::now();
    let mut pull = stopped_at(&world, REPLICA, &old, "pull.half_read", &Pulling::default())?;
    until("the lease", || {
        (world.hosts[ORIGIN].leases_of("model", began)? > 0).then_some(())
    })?;
    let status = world.hosts[ORIGIN].status().unwrap_or_default();
    let given = &status[0]["leases"][0];
    let lease = json!({ "incarnation": status[0]["incarnation"], "lease": given["lease"], "asker": given["asker"] });
    let confirm =
        json!({ "confirm": { "lease": lease, "identity": given["identity"], "number": 1_000 } });
    let is = |yes: bool, answers: &[Value]| {
        let right = answers.iter().all(|answer| *answer == json!({ "is": yes }));
        right
            .then_some(())
            .ok_or_else(|| format!("instead of {yes}: {answers:?}"))
    };
    // A question that the origin confirms while the lease lives; then the lease ends.
    is(true, &world.hosts[ORIGIN].ask(&confirm, 1)?)?;
    is(
        true,
        &world.hosts[ORIGIN].ask(&json!({ "release": { "lease": lease } }), 1)?,
    )?;
    is(false, &world.hosts[ORIGIN].ask(&confirm, TIMES)?)?;
    // Another object has the name, and another lease the memory.
    world.hosts[ORIGIN].remove("model")?;
    let new = world.put(ORIGIN, "model", BYTES)?;
    let beside = Pulling::default().and(&["--stall-after", STALLS_AFTER]);
    let asked = SystemTime::now();
    let other = world.hosts[OTHER].pull("model", &beside)?;
    until("the other lease", || {
        (world.hosts[ORIGIN].leases_of("model", asked)? > 0).then_some(())
    })?;
    is(false, &world.hosts[ORIGIN].ask(&confirm, TIMES)?)?;
    drop(other);
    // Another incarnation.
    world.hosts[ORIGIN].serve(&Serving::default())?;
    let asked = SystemTime::now();
    let other = world.hosts[OTHER].pull("model", &beside)?;
    until("a lease of the other incarnation", || {
        (world.hosts[ORIGIN].leases_of("model", asked)? > 0).then_some(())
    })?;
    is(false, &world.hosts[ORIGIN].ask(&confirm, TIMES)?)?;
    drop(other);
    pull.signal(Signal::CONT);
    pull.end("the pull whose confirmation was asked for")?;
    if world.shows(REPLICA, &old) {
        return Err(format!(
            "{old:?} was committed after its lease had ended\n{}",
            world.log()
        ));
    }
    world.check()?;
    world.hosts[ORIGIN].serve(&Serving::default())?;
    world.pulled(REPLICA, &new)?;
    world.emptied()?;
    Ok(format!("once yes, then {} times no", 3 * TIMES))
}
