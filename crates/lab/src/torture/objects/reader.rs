//! A reader: opens, compares, advances, sleeps and wakes, and lets go.

use gpu_ipc::broker::{Client, ObjectError, Reader};

use super::tally::Count;
use super::{NAMES, PART_BYTES, PARTS, Place, STILL, forgive, name_of, part_of, stamp_of, still_of};
use crate::owner::connect;
use crate::pattern;
use crate::torture::rng::Dice;

/// Reads until everybody is to end.
pub fn run(place: &Place) -> Result<(), String> {
    let mut dice = Dice::new(place.seed, place.serial);
    let client = connect(&place.gpu, &place.broker, "torture reader")?;
    while !place.tally.ends() {
        place.tally.beat(place.slot);
        read(place, &client, &mut dice)?;
    }
    Ok(())
}

fn read(place: &Place, client: &Client, dice: &mut Dice) -> Result<(), String> {
    let tally = place.tally;
    let name = dice.below(NAMES as u64) as usize;
    let highest = tally.highest(name);
    let Some(mut reader) = found(place, name, highest, client.open(&name_of(name)))? else { return Ok(()) };
    compare(place, name, &reader)?;
    tally.count(Count::Opens);
    let at = reader.device_ptr("p0");
    for _ in 0..dice.below(6) {
        tally.beat(place.slot);
        let (before, highest) = (reader.epoch().0, tally.highest(name));
        if dice.in_thousand(200) {
            // Its lease keeps the memory, whatever becomes of the name meanwhile.
            forgive(reader.sleep(false))?;
            if forgive(reader.wake())?.is_none() {
                return Ok(());
            }
            compare(place, name, &reader)?;
            tally.count(Count::Wakes);
            continue;
        }
        let moved = reader.advance();
        let Some(moved) = found(place, name, 0, moved.map(|moved| (moved, reader.epoch().0)))? else { continue };
        if moved.1 < highest {
            tally.count(Count::Lost);
        }
        if reader.epoch().0 < before || reader.device_ptr("p0") != at {
            tally.count(Count::Backwards);
        }
        compare(place, name, &reader)?;
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
    place: &Place,
    name: usize,
    highest: u64,
    result: Result<T, ObjectError>,
) -> Result<Option<T>, String> {
    let found = match result {
        Err(ObjectError::NotFound { .. }) => {
            // Nobody removes a name: it is there from its first commit on.
            if place.tally.highest(name).min(highest) > 0 {
                place.tally.count(Count::Lost);
            }
            return Ok(None);
        }
        other => forgive(other)?,
    };
    if found.as_ref().is_some_and(|found| found.epoch() < highest) {
        place.tally.count(Count::Lost);
    }
    Ok(found)
}

/// Compares every byte with what the stamp says.
fn compare(place: &Place, name: usize, reader: &Reader) -> Result<(), String> {
    let stamp = u64::from_le_bytes(reader.layout().user().try_into().map_err(|_| "an object without a stamp")?);
    let mut bytes = vec![0; PART_BYTES as usize];
    let mut is_whole = true;
    let parts = (0..PARTS).map(|part| (part_of(part), stamp_of(stamp, part)));
    for (part, stamp) in parts.chain([(STILL.to_owned(), still_of(name))]) {
        reader.read_at(&part, 0, &mut bytes).map_err(|e| crate::device::explain(&e))?;
        is_whole &= pattern::matches(&bytes, stamp);
    }
    if !is_whole {
        place.tally.count(Count::Mixed);
    }
    Ok(())
}
