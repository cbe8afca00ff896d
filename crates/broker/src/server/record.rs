//! The record of a hold: what a broker leaves to its successor of who may write to a pool.
//!
//! The keeper has it as it has an object: `mSEQ` is the record, `rSEQ.i` are the pidfds of the
//! holder and of its descendants, and the end of a pipe that hangs up with the holder's last forked
//! child: those that it forks later have no pidfd there. A broker that knows no pools takes it for a manifest of another
//! version, and leaves it there.
//!
//! | at | bytes | field of a record |
//! |---|---|---|
//! | 0 | 8 | magic `GIPCobjH` |
//! | 8 | 4 | crc32c of all that follows |
//! | 12 | 1 | the hold: 0 there was none, 1 it was begun, 2 it was closed in order |
//! | 13 | 1 | how the hold before it ended: 0 there was none, 1 in order, 2 by a death |
//! | 14 | 2 | pidfds and pipe, at most 16 together |
//! | 16 | 16 | identity of the pool |
//! | 32 | 8 | generation |
//! | 40 | 16 | the holder's token |

use gpu_api::{Error, Result};

use crate::object::identity::Identity;
use crate::object::layout::MOST_REGIONS;
use crate::pool::Previous;

/// The bytes of a record.
pub const RECORD_BYTES: u64 = 56;
/// The most descriptors of a hold: the holder's pidfd, those of descendants that keep the device's
/// files, and the pipe's.
pub const MOST_PROCESSES: usize = MOST_REGIONS;

const MAGIC: [u8; 8] = *b"GIPCobjH";

/// How far the hold of a record has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// The pool was never held.
    Never,
    /// The hold was begun.
    Begun,
    /// It was closed in order.
    Closed,
}

/// The record of a hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// Which pool.
    pub pool: Identity,
    /// The hold's generation; 0 for none.
    pub generation: u64,
    /// How far it has come.
    pub phase: Phase,
    /// How the hold before it ended.
    pub previous: Previous,
    /// What the holder shows to end it.
    pub token: Identity,
    /// Descriptors that are with it; each becomes readable, or hangs up, when what it stands for has
    /// ended.
    pub processes: usize,
}

impl Record {
    /// Writes it.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&[self.phase as u8, self.previous as u8]);
        out.extend_from_slice(&(self.processes as u16).to_le_bytes());
        out.extend_from_slice(&self.pool.0);
        out.extend_from_slice(&self.generation.to_le_bytes());
        out.extend_from_slice(&self.token.0);
        let sum = crc32c::crc32c(&out[12..]);
        out[8..12].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Says whether bytes begin as a record does.
    pub(crate) fn is_record(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// Reads it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for anything that [`encode`](Record::encode) does not write.
    pub fn decode(bytes: &[u8]) -> Result<Record> {
        let invalid = || Error::Invalid {
            what: "the record of a hold",
            got: format!("{} other bytes", bytes.len()),
            must: "what a broker of this version wrote",
        };
        let whole: &[u8; RECORD_BYTES as usize] = bytes.try_into().map_err(|_| invalid())?;
        let id = |at: usize| Identity(std::array::from_fn(|i| whole[at + i]));
        let record = Record {
            pool: id(16),
            generation: u64::from_le_bytes(std::array::from_fn(|i| whole[32 + i])),
            phase: match whole[12] {
                0 => Phase::Never,
                1 => Phase::Begun,
                2 => Phase::Closed,
                _ => return Err(invalid()),
            },
            previous: Previous::of(whole[13]).ok_or_else(invalid)?,
            token: id(40),
            processes: usize::from(u16::from_le_bytes([whole[14], whole[15]])),
        };
        let has_processes = (1..=MOST_PROCESSES).contains(&record.processes);
        let sound = has_processes == (record.phase == Phase::Begun)
            && (has_processes || record.processes == 0)
            && (record.generation == 0) == (record.phase == Phase::Never);
        if sound && record.encode() == bytes {
            Ok(record)
        } else {
            Err(invalid())
        }
    }
}

/// A record that was found in a keeper.
#[derive(Clone, Debug)]
pub struct Kept<F> {
    /// Its number.
    pub seq: u64,
    /// What it says.
    pub record: Record,
    /// The file.
    pub file: F,
    /// What tells of the ends of the holder's processes.
    pub processes: Vec<F>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            pool: Identity(std::array::from_fn(|byte| byte as u8)),
            generation: 7,
            phase: Phase::Begun,
            previous: Previous::Died,
            token: Identity([9; 16]),
            processes: 2,
        }
    }

    #[test]
    fn the_recorded_record_of_version_1_is_read_and_written() {
        let recorded = include_bytes!("../../tests/recorded/record-1.bin");
        assert_eq!(Record::decode(recorded).expect("version 1"), record());
        assert_eq!(record().encode(), recorded);
        for at in 0..recorded.len() {
            let mut bad = recorded.to_vec();
            bad[at] ^= 1;
            assert!(Record::decode(&bad).is_err(), "byte {at}");
            assert!(Record::decode(&recorded[..at]).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn a_record_that_contradicts_itself_is_refused() {
        let bad = [
            Record {
                processes: 0,
                ..record()
            },
            Record {
                processes: MOST_PROCESSES + 1,
                ..record()
            },
            Record {
                generation: 0,
                ..record()
            },
            Record {
                phase: Phase::Closed,
                ..record()
            },
            Record {
                phase: Phase::Never,
                processes: 0,
                ..record()
            },
        ];
        for record in bad {
            assert!(Record::decode(&record.encode()).is_err(), "{record:?}");
        }
    }

    #[test]
    fn an_older_broker_leaves_a_record_where_it_is() {
        let manifest = crate::object::manifest::is_of_another_version(&record().encode());
        assert!(manifest, "taken for a manifest of another version");
        assert_eq!(record().encode().len() as u64, RECORD_BYTES);
    }
}
