//! A reader of pools: copies blocks beside a holder that overwrites them, and compares those that
//! are said to have been whole all along.

use std::time::Duration;

use gpu_ipc::broker::{Client, ObjectError};

use super::ledger::{BLOCK_BYTES, PART, POOLS, is_whole, name_of, offset_of};
use super::seat::{Seat, forgive};
use super::tally::Count;
use gpu_ipc_cli::device::explain;
use harness::rng::Dice;

/// Between two attempts to read, and the longest wait for a next holder.
const PAUSE: Duration = Duration::from_millis(3);

/// Reads until the torture ends.
pub fn run(seat: &Seat) -> Result<(), String> {
    seat.read_on(read)
}

fn read(seat: &Seat, client: &Client, dice: &mut Dice) -> Result<(), String> {
    let which = dice.below(POOLS as u64) as usize;
    let (name, was_made) = (name_of(which), seat.ledger.pool(which).is_made());
    let reader = match client.read_pool(&name) {
        Err(ObjectError::NotFound { .. }) => {
            if was_made {
                seat.found(
                    Count::Lost,
                    &format!("there is no pool {name}, which was held"),
                );
            }
            None
        }
        Err(ObjectError::Refused { .. }) => None,
        opened => forgive(opened)?,
    };
    let Some(reader) = reader else {
        std::thread::sleep(PAUSE);
        return Ok(());
    };
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    for _ in 0..1 + dice.below(20) {
        seat.tally.beat(seat.slot);
        for listed in reader.sealed() {
            let at = offset_of(listed.block);
            let read = reader.read_whole(listed.block, PART, at, &mut bytes);
            let Some(found) = read.map_err(|e| explain(&e))? else {
                seat.tally.count(Count::Torn);
                continue;
            };
            seat.tally.count(Count::Looks);
            if !is_whole(&bytes, &found) {
                let why = format!("a reader of {name} found other bytes in {found:?}");
                seat.found(Count::Mixed, &why);
            }
        }
        let told = forgive(client.watch_pool(&name, reader.generation(), PAUSE))?.flatten();
        if told.is_some_and(|generation| generation <= reader.generation()) {
            let why = format!(
                "{name} was said to have generation {told:?} after {}",
                reader.generation()
            );
            seat.found(Count::Backwards, &why);
        }
    }
    Ok(())
}
