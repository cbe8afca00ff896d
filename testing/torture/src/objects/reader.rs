//! A reader: opens, compares, advances, sleeps and wakes, and lets go.

use gpu_ipc::broker::{Client, ObjectError, Reader};

use super::contents::{NAMES, PART_BYTES, PARTS, STILL, name_of, part_of, stamp_of, still_of};
use super::seat::{Seat, forgive};
use super::tally::Count;
use gpu_ipc_cli::pattern;
use harness::rng::Dice;

/// Reads until the torture ends.
pub fn run(seat: &Seat) -> Result<(), String> {
    seat.read_on(read)
}

fn read(seat: &Seat, client: &Client, dice: &mut Dice) -> Result<(), String> {
    let tally = seat.tally;
    let name = dice.below(NAMES as u64) as usize;
    let highest = tally.highest(name);
    let Some(mut reader) = found(seat, name, highest, client.open(&name_of(name)))? else {
        return Ok(());
    };
    compare(seat, name, &reader)?;
    tally.count(Count::Opens);
    let at = reader.device_ptr("p0");
    for _ in 0..dice.below(6) {
        tally.beat(seat.slot);
        let (before, highest) = (reader.epoch().0, tally.highest(name));
        if dice.in_thousand(200) {
            // Its lease keeps the memory, whatever becomes of the name meanwhile.
            forgive(reader.sleep(false))?;
            if forgive(reader.wake())?.is_none() {
                return Ok(());
            }
            compare(seat, name, &reader)?;
            tally.count(Count::Wakes);
            continue;
        }
        let moved = reader.advance();
        let Some(moved) = found(seat, name, 0, moved.map(|moved| (moved, reader.epoch().0)))?
        else {
            continue;
        };
        if moved.1 < highest {
            let name = name_of(name);
            let why = format!(
                "{name} went to epoch {}, and {highest} was committed",
                moved.1
            );
            seat.found(Count::Lost, &why);
        }
        if reader.epoch().0 < before || reader.device_ptr("p0") != at {
            let (name, now) = (name_of(name), reader.epoch());
            let why = format!("{name} went from epoch {before} to {now}, or its addresses moved");
            seat.found(Count::Backwards, &why);
        }
        compare(seat, name, &reader)?;
        if moved.0 {
            tally.count(Count::Advances);
        }
    }
    Ok(())
}

/// What was found under a name; nothing when it may be that there is nothing.
trait Found {
    fn epoch(&self) -> u64;
}

impl Found for Reader {
    fn epoch(&self) -> u64 {
        Reader::epoch(self).0
    }
}

impl Found for (bool, u64) {
    fn epoch(&self) -> u64 {
        self.1
    }
}

fn found<T: Found>(
    seat: &Seat,
    name: usize,
    highest: u64,
    result: Result<T, ObjectError>,
) -> Result<Option<T>, String> {
    let found = match result {
        Err(ObjectError::NotFound { .. }) => {
            // Nobody removes a name: it is there from its first commit on.
            if seat.tally.highest(name).min(highest) > 0 {
                let name = name_of(name);
                let why = format!("{name} has no object, and epoch {highest} was committed");
                seat.found(Count::Lost, &why);
            }
            return Ok(None);
        }
        other => forgive(other)?,
    };
    if let Some(found) = found.as_ref().filter(|found| found.epoch() < highest) {
        let (name, epoch) = (name_of(name), found.epoch());
        let why = format!("{name} has epoch {epoch} at most, and {highest} was committed");
        seat.found(Count::Lost, &why);
    }
    Ok(found)
}

/// Compares every byte with what the stamp says.
fn compare(seat: &Seat, name: usize, reader: &Reader) -> Result<(), String> {
    let stamp = u64::from_le_bytes(
        reader
            .layout()
            .user()
            .try_into()
            .map_err(|_| "an object without a stamp")?,
    );
    let mut bytes = vec![0; PART_BYTES as usize];
    let mut is_whole = true;
    let parts = (0..PARTS).map(|part| (part_of(part), stamp_of(stamp, part)));
    for (part, stamp) in parts.chain([(STILL.to_owned(), still_of(name))]) {
        reader
            .read_at(&part, 0, &mut bytes)
            .map_err(|e| gpu_ipc_cli::device::explain(&e))?;
        is_whole &= pattern::matches(&bytes, stamp);
    }
    if !is_whole {
        let (name, epoch) = (name_of(name), reader.epoch());
        let why = format!("epoch {epoch} of {name} has other bytes than its stamp {stamp:#x} says");
        seat.found(Count::Mixed, &why);
    }
    Ok(())
}
