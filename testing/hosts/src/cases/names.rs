//! A host that was let in calls itself by another's name. Its certificate says who it is, so what it
//! answers is not believed: no object of the other host comes from it, and no replica goes.

use crate::host::{Pulling, Serving};
use crate::watch::until;
use crate::world::{Means, World};

const ORIGIN: usize = 0;
const EVIL: usize = 1;
const READER: usize = 2;
const BYTES: usize = 8 << 10;
/// Looks for removals that the reader's gateway takes before its replica counts as staying.
const LOOKS: usize = 3;

pub fn of_another(means: &Means) -> Result<String, String> {
    let serving = Serving {
        has_certificate: true,
        ..Serving::default()
    };
    let mut world = World::create(means, 3, &serving)?;
    let model = world.put(ORIGIN, "model", BYTES)?;
    world.pulled(READER, &model)?;
    let origin = world.hosts[ORIGIN].name.clone();
    // The program itself does not start so.
    let refused = world.hosts[EVIL].serves_as(&origin)?;
    if !refused.contains("its certificate is for [h2], and not for h1") {
        return Err(format!("a gateway with another's name said {refused:?}"));
    }
    // Another program does.
    let impostor = world.hosts[EVIL].impersonates(&world.hosts[ORIGIN], false)?;
    looked(&world)?;
    if !world.shows(READER, &model) {
        return Err("a replica went since another host said so".into());
    }
    let pull = Pulling {
        attempts: 2,
        ..Pulling::default().and(&["--from", &origin])
    };
    let ended = world.hosts[READER].pull("other", &pull)?.end("the pull")?;
    let why =
        "what answers for host h1 is not believed: its certificate is for [h2], and not for h1";
    let told = world.hosts[READER].logged(why);
    if ended.success() || told == 0 {
        let log = world.log();
        return Err(format!(
            "a pull from it ended with {ended}, told {told} times\n{log}"
        ));
    }
    drop(impostor);
    world.pulled(READER, &model)?;
    // The control: whose certificate it is decides.
    let _thief = world.hosts[EVIL].impersonates(&world.hosts[ORIGIN], true)?;
    until("the removal that a thief of the key says", || {
        (!world.shows(READER, &model)).then_some(())
    })
    .map_err(|why| format!("{why}\n{}", world.log()))?;
    world.check()?;
    Ok(format!(
        "not believed {told} times; with the stolen key it is"
    ))
}

/// Waits until the reader's gateway has asked the impostor several times.
fn looked(world: &World) -> Result<(), String> {
    until("looks for removals", || {
        (world.hosts[EVIL].logged("impostor: asked for removals") >= LOOKS).then_some(())
    })
}
