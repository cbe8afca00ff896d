//! A relay between replica and origin delays what the origin answers, cuts connections, and ends
//! them early: in Zenoh's handshake, in a question's answer, in the read.

use std::time::Duration;

use rustix::process::Signal;

use super::stop::stopped_at;
use crate::host::{Pulling, Serving};
use crate::relay::{Fault, Relay};
use crate::watch::until;
use crate::world::{Means, World};

const ORIGIN: usize = 0;
const REPLICA: usize = 1;
const BYTES: usize = 4 << 20;

/// Whether it hits the read alone: no question and no answer is so long.
fn in_the_read(fault: Fault) -> bool {
    match fault {
        Fault::Cut(after) | Fault::Truncate(after) => after >= 100_000,
        _ => true,
    }
}

/// Bytes after which a connection is hit: in a handshake, in announcements and answers, in the read
/// at its begin, middle and end.
const AFTER: [usize; 6] = [60, 900, 4_000, 100_000, BYTES / 2, BYTES - 1];

pub fn delays_cuts_and_truncates(means: &Means) -> Result<String, String> {
    let mut world = World::create(
        means,
        2,
        &Serving {
            lease_ms: Some(5_000),
            ..Serving::default()
        },
    )?;
    let relay = Relay::before(&world.hosts[ORIGIN].network)?;
    let faults = AFTER
        .iter()
        .flat_map(|&after| [Fault::Cut(after), Fault::Truncate(after)]);
    let faults: Vec<Fault> = faults
        .chain([Fault::Delay(Duration::from_millis(20))])
        .collect();
    for (round, fault) in faults.iter().enumerate() {
        let object = world.put(ORIGIN, &format!("model-{round}"), BYTES)?;
        let read = in_the_read(*fault);
        let mut pull = if read {
            stopped_at(
                &world,
                REPLICA,
                &object,
                "pull.granted",
                &Pulling::default(),
            )?
        } else {
            relay.set(*fault);
            world.hosts[REPLICA].pull(&object.name, &Pulling::default())?
        };
        if read {
            relay.set(*fault);
            pull.signal(Signal::CONT);
        }
        until("the fault", || {
            (relay.hit() > 0 || pull.ended().is_some()).then_some(())
        })?;
        let hit = relay.hit();
        if hit == 0 {
            return Err(format!(
                "{fault:?} hit no connection: nothing was tested\n{}",
                world.log()
            ));
        }
        if !matches!(fault, Fault::Delay(_)) {
            relay.set(Fault::None);
        }
        let ended = pull
            .end("a pull through the relay")
            .map_err(|why| format!("{why}\n{}", world.log()))?;
        world.check_of(&object.name)?;
        if !ended.success() {
            return Err(format!(
                "after {fault:?}, once, the pull ended with {ended}\n{}",
                world.log()
            ));
        }
        relay.set(Fault::None);
        if !world.shows(REPLICA, &object) {
            return Err(format!(
                "after {fault:?} the pull ended well, but nothing is there\n{}",
                world.log()
            ));
        }
    }
    world.check()?;
    world.emptied()?;
    Ok(format!(
        "{} faults, each once in a pull, which ended well",
        faults.len()
    ))
}
