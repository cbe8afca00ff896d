//! A writer: puts object after object, under one of a few names.

use gpu_ipc::broker::{Client, ObjectError};

use super::tally::Count;
use super::{NAMES, PART_BYTES, PARTS, Place, forgive, layout, name_of, part_of, stamp_of};
use crate::owner::connect;
use crate::pattern;
use crate::torture::rng::Dice;

/// One of this many writers asks for its commit before it writes.
const HASTY: u64 = 300;

/// Puts until everybody is to end.
pub fn run(place: &Place) -> Result<(), String> {
    let mut dice = Dice::new(place.seed, place.serial);
    let client = connect(&place.gpu, &place.broker, "torture writer")?;
    let mut number = 0;
    while !place.tally.ends() {
        place.tally.beat(place.slot);
        number += 1;
        put(place, &client, &mut dice, place.serial << 32 | number)?;
    }
    Ok(())
}

fn put(place: &Place, client: &Client, dice: &mut Dice, stamp: u64) -> Result<(), String> {
    let name = dice.below(NAMES as u64) as usize;
    let Some(mut writer) = forgive(client.create(&name_of(name), layout(stamp)?))? else { return Ok(()) };
    if dice.in_thousand(HASTY) {
        writer.ask_before_the_writes_have_ended();
        place.tally.count(Count::Hasty);
    }
    let mut bytes = vec![0; PART_BYTES as usize];
    for part in 0..PARTS {
        pattern::fill(&mut bytes, stamp_of(stamp, part));
        if forgive(writer.write(&part_of(part), &bytes))?.is_none() {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_micros(dice.below(1_500)));
    }
    if dice.in_thousand(50) {
        // Given up: nobody ever sees it.
        return Ok(());
    }
    let committed = match writer.commit(&[]).and_then(|commit| commit.wait()) {
        // The keeper died in the middle of it, or another one was being fed.
        Err(ObjectError::Refused { .. }) => None,
        committed => forgive(committed)?,
    };
    if let Some(epoch) = committed {
        place.tally.committed(name, epoch.0);
        place.tally.count(Count::Commits);
    }
    Ok(())
}
