//! What the objects of a run contain: any process can tell from an object's name and stamp.

use gpu_ipc::broker::{Layout, PartSpec};

use gpu_ipc_cli::device::explain;

/// Names of objects; any writer puts any of them.
pub const NAMES: usize = 3;
pub const PARTS: u64 = 4;
pub const PART_BYTES: u64 = 20_000;
/// A part that is the same in every epoch of a name, in a region of its own.
pub const STILL: &str = "still";

/// Names an object.
pub fn name_of(name: usize) -> String {
    format!("model{name}")
}

/// Names a part.
pub fn part_of(part: u64) -> String {
    format!("p{part}")
}

/// Lays out an object with a stamp: its parts, and one that stays the same.
pub fn layout(stamp: u64) -> Result<Layout, String> {
    let parts = (0..PARTS).map(|part| PartSpec::bytes(part_of(part), PART_BYTES));
    let parts = parts
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| explain(&e))?;
    let still = PartSpec::bytes(STILL, PART_BYTES).map_err(|e| explain(&e))?;
    Layout::pack_groups([parts, vec![still]], &stamp.to_le_bytes()).map_err(|e| explain(&e))
}

/// The stamp of a name's part that stays the same: no other part has it.
pub fn still_of(name: usize) -> u64 {
    u64::MAX - name as u64
}

/// The stamp of a part: no two parts of all objects have the same.
pub fn stamp_of(stamp: u64, part: u64) -> u64 {
    stamp.wrapping_mul(PARTS).wrapping_add(part)
}
