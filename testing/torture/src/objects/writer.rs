//! A writer: puts object after object, under one of a few names.

use gpu_ipc::broker::{Client, CreateOptions, ObjectError, Writer};

use super::contents::{
    NAMES, PART_BYTES, PARTS, STILL, layout, name_of, part_of, stamp_of, still_of,
};
use super::seat::{Seat, forgive};
use super::tally::Count;
use gpu_ipc_cli::owner::connect;
use gpu_ipc_cli::pattern;
use harness::rng::Dice;

/// One of this many writers asks for its commit before it writes.
const HASTY: u64 = 300;

/// Puts until everybody is to end.
pub fn run(seat: &Seat) -> Result<(), String> {
    let mut dice = Dice::new(seat.seed, seat.serial);
    let client = connect(&seat.gpu, &seat.broker, "torture writer")?;
    let mut number = 0;
    while !seat.tally.ends() {
        seat.tally.beat(seat.slot);
        number += 1;
        put(seat, &client, &mut dice, seat.serial << 32 | number)?;
    }
    Ok(())
}

fn put(seat: &Seat, client: &Client, dice: &mut Dice, stamp: u64) -> Result<(), String> {
    let name = dice.below(NAMES as u64) as usize;
    let takes = dice.in_thousand(500);
    let Some((mut writer, taken)) = create(client, name, stamp, takes)? else {
        return Ok(());
    };
    if dice.in_thousand(HASTY) {
        writer.ask_before_the_writes_have_ended();
        seat.tally.count(Count::Hasty);
    }
    let mut bytes = vec![0; PART_BYTES as usize];
    let parts = (0..PARTS).map(|part| (part_of(part), stamp_of(stamp, part)));
    let still = (!taken).then(|| (STILL.to_owned(), still_of(name)));
    for (part, stamp) in parts.chain(still) {
        pattern::fill(&mut bytes, stamp);
        if forgive(writer.write(&part, &bytes))?.is_none() {
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
        seat.journal
            .note(&format!("committed epoch {epoch} of {}", name_of(name)));
        seat.tally.committed(name, epoch.0);
        seat.tally.count(Count::Commits);
        if taken {
            seat.tally.count(Count::Taken);
        }
    }
    Ok(())
}

/// Asks for memory, and says whether the part that stays the same was taken over. A name that has
/// no epoch yet has none.
fn create(
    client: &Client,
    name: usize,
    stamp: u64,
    takes: bool,
) -> Result<Option<(Writer, bool)>, String> {
    if takes {
        let options = CreateOptions {
            unchanged: vec![STILL.into()],
            ..CreateOptions::default()
        };
        match client.create_with(&name_of(name), layout(stamp)?, &options) {
            Err(ObjectError::NotFound { .. }) => {}
            created => return Ok(forgive(created)?.map(|writer| (writer, true))),
        }
    }
    Ok(forgive(client.create(&name_of(name), layout(stamp)?))?.map(|writer| (writer, false)))
}
