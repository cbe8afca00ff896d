//! A side is stopped in the middle of a read for longer than a lease lives, and goes on. Meanwhile
//! the object is removed and another one takes its name, and its place in the origin's memory. What
//! was read must be thrown away.

use std::time::{Duration, SystemTime};

use rustix::process::Signal;

use crate::host::{Process, Pulling, Serving, send};
use crate::relay::{Fault, Relay};
use crate::watch::until;
use crate::world::{Committed, Means, World};

const HALF: &str = "pull.half_read";
const ORIGIN: usize = 0;
const REPLICA: usize = 1;
const OTHER: usize = 2;
/// Many times what connections hold.
const BYTES: usize = 8 << 20;
/// Short, so that a minute is not needed; long enough that a loaded machine renews it in time.
const LEASE_MS: u64 = 1_500;
/// Shorter than what a stopped origin does not see.
const SHORT: Duration = Duration::from_secs(1);
/// Bytes after which a read stands still, while its pull renews its lease.
pub const STALLS_AFTER: &str = "1000000";
/// How often it is done.
const ROUNDS: usize = 3;
/// How often the control may fail to publish a mixture: where memory is mapped is the kernel's
/// choice.
const CONTROL_ROUNDS: usize = 20;

pub fn reader(means: &Means) -> Result<String, String> {
    let (mut world, _relay) = create(means)?;
    for round in 0..ROUNDS {
        reuse_while_stopped(&mut world, round, true)?;
    }
    let no = world.hosts[ORIGIN].figure("confirmed", 1);
    world.emptied()?;
    Ok(format!(
        "{ROUNDS} copies thrown away, {no} of them because the origin did not confirm"
    ))
}

pub fn control(means: &Means) -> Result<String, String> {
    let (mut world, _relay) = create(means)?;
    for round in 0..CONTROL_ROUNDS {
        match reuse_while_stopped(&mut world, round, false) {
            Err(why) if why.contains("a mixture") => {
                return Ok(format!("found in round {round}: {why}"));
            }
            other => other?,
        }
    }
    Err(format!(
        "{CONTROL_ROUNDS} rounds without a confirmation, and no mixture\n{}",
        world.log()
    ))
}

pub fn origin(means: &Means) -> Result<String, String> {
    let mut world = World::create(means, 2, &Serving::default())?;
    for round in 0..ROUNDS {
        let name = format!("model-{round}");
        let old = world.put(ORIGIN, &name, BYTES)?;
        world.hosts[ORIGIN].serve(&Serving {
            lease_ms: Some(SHORT.as_millis() as u64),
            ..Serving::default()
        })?;
        let mut pull = stopped_at(&world, REPLICA, &old, HALF, &Pulling::default())?;
        signal(&mut world, ORIGIN, Signal::STOP);
        world.hosts[ORIGIN].remove(&name)?;
        let new = world.put(ORIGIN, &name, BYTES)?;
        pull.signal(Signal::CONT);
        // Its leases end while it does not run.
        std::thread::sleep(2 * SHORT);
        signal(&mut world, ORIGIN, Signal::CONT);
        pull.end("the pull")
            .map_err(|why| format!("round {round}: {why}\n{}", world.log()))?;
        world.check_of(&old.name)?;
        if world.shows(REPLICA, &old) {
            return Err(format!(
                "round {round}: {old:?} was committed after its lease had ended"
            ));
        }
        // With leases that a loaded machine renews in time.
        world.hosts[ORIGIN].serve(&Serving::default())?;
        world.pulled(REPLICA, &new)?;
    }
    world.emptied()?;
    Ok(format!("{ROUNDS} rounds"))
}

/// Stopped in the middle of a read until the lease has ended: what the origin still answers from
/// has to stay mapped.
pub fn reader_beyond_its_lease(means: &Means) -> Result<String, String> {
    let mut world = World::create(
        means,
        2,
        &Serving {
            lease_ms: Some(3_000),
            ..Serving::default()
        },
    )?;
    for round in 0..ROUNDS {
        let name = format!("model-{round}");
        let object = world.put(ORIGIN, &name, 4 * BYTES)?;
        let mut pull = stopped_at(&world, REPLICA, &object, HALF, &Pulling::default())?;
        let stopped = SystemTime::now();
        until("the end of the lease", || {
            (world.hosts[ORIGIN].leases_of(&name, stopped)? == 0).then_some(())
        })?;
        pull.signal(Signal::CONT);
        let ended = pull.end("the pull that was stopped")?;
        if !ended.success() || !world.shows(REPLICA, &object) {
            return Err(format!(
                "round {round}: the pull ended with {ended}\n{}",
                world.log()
            ));
        }
        if let Some(ended) = world.hosts[ORIGIN]
            .gateway
            .as_ref()
            .and_then(Process::ended)
        {
            return Err(format!(
                "round {round}: the origin's gateway ended with {ended}\n{}",
                world.log()
            ));
        }
    }
    world.check()?;
    world.emptied()?;
    Ok(format!("{ROUNDS} rounds, and the origin's gateway lives"))
}

/// The process that carries a pull's bytes is stopped too, with reads on their way, until the lease
/// has ended: what it reads late is zeroes, and the origin's carrier lives.
pub fn carrier_beyond_its_lease(means: &Means) -> Result<String, String> {
    let serving = Serving {
        lease_ms: Some(3_000),
        ..Serving::default()
    };
    let mut world = World::create(means, 2, &serving)?;
    let carrier = |world: &World| {
        let gateway = world.hosts[ORIGIN].gateway.as_ref();
        gateway
            .and_then(Process::carrier)
            .ok_or("no carrier".to_owned())
    };
    let before = carrier(&world)?;
    for round in 0..ROUNDS {
        let name = format!("model-{round}");
        let object = world.put(ORIGIN, &name, 4 * BYTES)?;
        let reading = "pull.reading";
        let mut pull = stopped_at(&world, REPLICA, &object, reading, &Pulling::default())?;
        let reads = pull.carrier().ok_or("the pull has no carrier")?;
        let stopped = SystemTime::now();
        // It asks for what it can, and its carrier stops with that.
        pull.signal(Signal::CONT);
        let shows = || world.shows(REPLICA, &object) || pull.ended().is_some();
        std::thread::sleep(Duration::from_millis(5 << round));
        send(reads, Signal::STOP);
        if !shows() {
            until("the end of the lease", || {
                let left = world.hosts[ORIGIN].leases_of(&name, stopped)?;
                // It is renewed as long as the pull runs.
                send(pull.id(), Signal::STOP);
                (left == 0).then_some(())
            })?;
        }
        pull.signal(Signal::CONT);
        send(reads, Signal::CONT);
        let ended = pull.end("the pull that was stopped")?;
        if !ended.success() || !world.shows(REPLICA, &object) {
            let log = world.log();
            return Err(format!("round {round}: the pull ended with {ended}\n{log}"));
        }
    }
    let after = carrier(&world)?;
    if after != before {
        return Err(format!(
            "the origin's carrier died of a late read\n{}",
            world.log()
        ));
    }
    world.check()?;
    world.emptied()?;
    Ok(format!("{ROUNDS} rounds, and the origin's carrier lives"))
}

/// Three hosts, the first of which answers slowly: so the middle of a read is one on a loaded
/// machine too.
fn create(means: &Means) -> Result<(World, Relay), String> {
    let world = World::create(
        means,
        3,
        &Serving {
            lease_ms: Some(LEASE_MS),
            uncaged: true,
            ..Serving::default()
        },
    )?;
    let relay = Relay::before(&world.hosts[ORIGIN].network)?;
    relay.set(Fault::Delay(Duration::from_millis(4)));
    Ok((world, relay))
}

/// One pull is stopped in its middle until its lease has ended and its name and memory are
/// another's, whose lease lives; then what it has published is compared.
fn reuse_while_stopped(world: &mut World, round: usize, confirms: bool) -> Result<(), String> {
    let name = format!("model-{round}");
    // What the round before has mapped would have the place that becomes free in this one.
    let before = SystemTime::now();
    until("no lease", || {
        world.hosts[ORIGIN].leases(before)?.is_empty().then_some(())
    })?;
    let old = world.put(ORIGIN, &name, BYTES)?;
    let mut pull = stopped_at(
        world,
        REPLICA,
        &old,
        HALF,
        // The control says so itself.
        &Pulling {
            confirms,
            ..Pulling::default().and(if confirms { &["--uncaged"][..] } else { &[] })
        },
    )?;
    let stopped = SystemTime::now();
    until("the end of the lease", || {
        (world.hosts[ORIGIN].leases_of(&name, stopped)? == 0).then_some(())
    })?;
    world.hosts[ORIGIN].remove(&name)?;
    world.put(ORIGIN, &name, BYTES)?;
    // The origin maps the new object for another replica, where it had the old one, for as long as
    // this pull renews.
    let mut other = world.hosts[OTHER].pull(
        &name,
        &Pulling::default().and(&["--stall-after", STALLS_AFTER]),
    )?;
    until("the other lease", || {
        (world.hosts[ORIGIN].leases_of(&name, stopped)? > 0).then_some(())
    })?;
    let declined = world.hosts[ORIGIN].figure("declined", 0);
    // The replica's gateway removes what its home has removed; what is published is looked at
    // before.
    signal(world, REPLICA, Signal::STOP);
    pull.signal(Signal::CONT);
    until("the end of what was stopped, or its next question", || {
        let asks = || world.hosts[ORIGIN].figure("declined", 0) > declined;
        (pull.ended().is_some() || world.shows(REPLICA, &old) || asks()).then_some(())
    })?;
    let (seen, committed) = (world.check_of(&name), world.shows(REPLICA, &old));
    signal(world, REPLICA, Signal::CONT);
    // Else the second attempt waits for one that never ends.
    other.kill();
    pull.end("the pull that was stopped")?;
    match (seen, committed) {
        (Ok(_), true) if confirms => Err(format!(
            "round {round}: {old:?} was committed after its lease had ended"
        )),
        (seen, _) => seen.map(drop),
    }
}

/// Begins a pull and waits until it has stopped itself at a step.
///
/// # Errors
///
/// It ends before.
pub fn stopped_at(
    world: &World,
    host: usize,
    object: &Committed,
    step: &str,
    pulling: &Pulling,
) -> Result<Process, String> {
    let told = Pulling {
        step: Some(format!("stop:{step}")),
        ..pulling.clone()
    };
    let pull = world.hosts[host].pull(&object.name, &told)?;
    let stopped = until(step, || {
        (pull.is_stopped() || pull.ended().is_some()).then_some(())
    });
    match (stopped, pull.ended()) {
        (Ok(()), None) => Ok(pull),
        (stopped, ended) => Err(format!(
            "{stopped:?}: the pull ended with {ended:?}\n{}",
            world.log()
        )),
    }
}

fn signal(world: &mut World, host: usize, signal: Signal) {
    if let Some(gateway) = &mut world.hosts[host].gateway {
        gateway.signal(signal);
    }
}
