//! The report that a session gives to a process that inspects it.

use std::time::Duration;

use gpu_api::{BackendKind, DeviceUuid, ParticipantId};

use crate::record;
use crate::wire::descriptor::SessionId;
use crate::wire::field::Field;
use crate::wire::packet::{MOST_BYTES, Malformed, Reader, Writer, malformed};

/// Numbers in a report: the fields of `Stats` and of the source's usage.
pub const NUMBERS: usize = 22;

/// Holders in one message.
pub const MOST_HOLDERS: usize = 40;

const MOST_COMMAND: usize = 32;
const _: () =
    assert!(16 + 16 + 16 + 16 + 8 * NUMBERS + 8 + MOST_HOLDERS * (48 + MOST_COMMAND) <= MOST_BYTES);

/// The whole of a session in numbers, and some of its holders.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReportPage {
    /// The session that is described.
    pub session: SessionId,
    /// Its device.
    pub device: DeviceUuid,
    /// The vendor of that device.
    pub backend: BackendKind,
    /// The producer's process.
    pub pid: u32,
    /// The session's age in milliseconds.
    pub age_ms: u64,
    /// The session's statistics, in the order of `docs/WIRE.md`.
    pub numbers: [u64; NUMBERS],
    /// The place from which to ask on.
    pub next: Option<u32>,
    /// Participants that hold leases or mappings.
    pub holders: Vec<HolderRow>,
}

/// A participant in a report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HolderRow {
    /// The participant.
    pub participant: ParticipantId,
    /// Leases that are granted or held.
    pub leases: u64,
    /// Bytes of the blocks behind these leases.
    pub bytes: u64,
    /// Regions that it has mapped.
    pub mappings: u64,
    /// Age of its oldest lease in milliseconds.
    pub oldest_ms: u64,
    /// Its process, as the producer sees it; 0 in another pid namespace.
    pub pid: u32,
    /// Its death is noticed and not yet proven.
    pub dying: bool,
    /// Up to 32 bytes; the kernel keeps 15 of a command's name.
    pub command: String,
}

impl HolderRow {
    /// Returns the age of its oldest lease.
    pub fn oldest(&self) -> Duration {
        Duration::from_millis(self.oldest_ms)
    }
}

/// Returns as much of a process' name or command as is shown: whole characters, up to 32 bytes, with
/// `?` for control characters.
pub fn shown(name: &str) -> String {
    let mut shown = String::new();
    for c in name.chars().map(|c| if c.is_control() { '?' } else { c }) {
        if shown.len() + c.len_utf8() > MOST_COMMAND {
            break;
        }
        shown.push(c);
    }
    shown
}

impl Field for HolderRow {
    fn write(&self, w: &mut Writer<'_>) {
        for number in [
            self.participant.0,
            self.leases,
            self.bytes,
            self.mappings,
            self.oldest_ms,
        ] {
            w.u64(number);
        }
        w.u32(self.pid);
        let shown = shown(&self.command);
        let mut command = [0; MOST_COMMAND];
        command[..shown.len()].copy_from_slice(shown.as_bytes());
        w.put(&[u8::from(self.dying), shown.len() as u8, 0, 0]);
        w.put(&command);
    }

    fn read(r: &mut Reader<'_>) -> Result<HolderRow, Malformed> {
        let participant = ParticipantId(r.u64()?);
        let (leases, bytes, mappings, oldest_ms) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?);
        let (pid, [dying, len]) = (r.u32()?, r.array()?);
        if dying > 1 {
            return Err(malformed("whether a holder is dying", dying, "0 or 1"));
        }
        r.zeros::<2>()?;
        let command: [u8; MOST_COMMAND] = r.array()?;
        let Some((command, rest)) = command.split_at_checked(usize::from(len)) else {
            return Err(malformed("the length of a command", len, "at most 32"));
        };
        if let Some(&byte) = rest.iter().find(|&&byte| byte != 0) {
            return Err(malformed("the padding of a command", byte, "0"));
        }
        let command = str::from_utf8(command)
            .map_err(|e| malformed("a command's good bytes", e.valid_up_to(), "all"))?;
        if let Some(c) = command.chars().find(|c| c.is_control()) {
            return Err(malformed(
                "a character of a command",
                u32::from(c),
                "no control character",
            ));
        }
        let (dying, command) = (dying == 1, command.into());
        Ok(HolderRow {
            participant,
            leases,
            bytes,
            mappings,
            oldest_ms,
            pid,
            dying,
            command,
        })
    }
}

record!(ReportPage { session, device, backend [3], pid, age_ms, numbers, next, holders });

impl Field for [u64; NUMBERS] {
    fn write(&self, w: &mut Writer<'_>) {
        self.iter().for_each(|number| w.u64(*number));
    }

    fn read(r: &mut Reader<'_>) -> Result<[u64; NUMBERS], Malformed> {
        let mut numbers = [0; NUMBERS];
        for number in &mut numbers {
            *number = r.u64()?;
        }
        Ok(numbers)
    }
}

/// A place; 2^32-1 for none.
impl Field for Option<u32> {
    fn write(&self, w: &mut Writer<'_>) {
        w.u32(self.unwrap_or(u32::MAX));
    }

    fn read(r: &mut Reader<'_>) -> Result<Option<u32>, Malformed> {
        Ok(Some(r.u32()?).filter(|&place| place != u32::MAX))
    }
}

impl Field for Vec<HolderRow> {
    fn write(&self, w: &mut Writer<'_>) {
        debug_assert!(self.len() <= MOST_HOLDERS);
        w.u32(self.len() as u32);
        self.iter().for_each(|holder| holder.write(w));
    }

    fn read(r: &mut Reader<'_>) -> Result<Vec<HolderRow>, Malformed> {
        let count = r.u32()?;
        if count as usize > MOST_HOLDERS {
            return Err(malformed("the number of holders", count, "at most 40"));
        }
        (0..count).map(|_| HolderRow::read(r)).collect()
    }
}
