//! A link goes down in the middle of a read and comes up again: soon, or only after the reader has
//! given up.

use std::time::Duration;

use rustix::process::Signal;

use super::stop::stopped_at;
use crate::host::{Pulling, Serving};
use crate::world::{Means, World};

const ORIGIN: usize = 0;
const REPLICA: usize = 1;
/// Many times what connections hold.
const BYTES: usize = 8 << 20;

pub fn down_and_up(means: &Means) -> Result<String, String> {
    let mut world = World::create(means, 2, &Serving::rings())?;
    for way in ["direct", "pinned-ring"] {
        for down in [ORIGIN, REPLICA] {
            let object = world.put(ORIGIN, &format!("{way}-{down}"), BYTES)?;
            let mut pull = stopped_at(
                &world,
                REPLICA,
                &object,
                "pull.half_read",
                &Pulling::by(way),
            )?;
            world.hosts[down].network.link(false)?;
            pull.signal(Signal::CONT);
            // For so long it reads from nowhere.
            std::thread::sleep(Duration::from_millis(500));
            if pull.ended().is_some() {
                return Err(format!(
                    "the pull ended while the link was down\n{}",
                    world.log()
                ));
            }
            world.hosts[down].network.link(true)?;
            let ended = pull.end("the pull")?;
            if !ended.success() || !world.shows(REPLICA, &object) {
                return Err(format!(
                    "{way}: the pull ended with {ended} after the link came up\n{}",
                    world.log()
                ));
            }
            let status = world.hosts[REPLICA].status().unwrap_or_default();
            let taken = &status[0]["paths"][0]["way"];
            if *taken != way.replace('-', "_") {
                return Err(format!("{taken} was taken, and not {way}: {status}"));
            }
            world.check()?;
        }
    }
    world.emptied()?;
    Ok("at the origin and at the replica, directly and through a ring".into())
}

pub fn down_for_good(means: &Means) -> Result<String, String> {
    let mut world = World::create(
        means,
        2,
        &Serving {
            lease_ms: Some(4_000),
            ..Serving::default()
        },
    )?;
    for is_caged in [false, true] {
        let name = format!("model-{is_caged}");
        // A carrier reads on while its pull is stopped, as far as its slots go: 12 MiB. From 64 MiB
        // on there is a ring, and a question to fill it that is not answered fails the read.
        let object = world.put(ORIGIN, &name, 48 << 20)?;
        let more: &[&str] = if is_caged { &[] } else { &["--uncaged"] };
        let pulling = Pulling {
            stall_s: 5,
            attempts: 3,
            ..Pulling::default().and(more)
        };
        let mut pull = stopped_at(&world, REPLICA, &object, "pull.half_read", &pulling)?;
        world.hosts[REPLICA].network.link(false)?;
        pull.signal(Signal::CONT);
        let ended = pull.end("the pull whose link is down")?;
        // A carrier's read may also fail at once: plain TCP connects for each piece.
        let signal = std::os::unix::process::ExitStatusExt::signal(&ended);
        if ended.success() || (!is_caged && signal != Some(Signal::KILL.as_raw())) {
            return Err(format!(
                "a transfer that neither ends nor fails left its process with {ended}\n{}",
                world.log()
            ));
        }
        world.check()?;
        if world.shows(REPLICA, &object) {
            return Err("half a read is visible".into());
        }
        world.hosts[REPLICA].network.link(true)?;
        world.pulled(REPLICA, &object)?;
    }
    world.emptied()?;
    Ok("the process of the pull ended itself, and left nothing".into())
}
