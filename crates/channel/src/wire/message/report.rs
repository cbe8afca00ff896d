//! The report that a session gives to a process that inspects it.

use std::time::Duration;

use gpu_api::{BackendKind, DeviceUuid, ParticipantId};

use super::packet::{DecodeError, malformed};
use crate::wire::descriptor::SessionId;
use crate::wire::packet::{MOST_BYTES, Reader, Writer};

/// Numbers in a report: the fields of `Stats` and of the source's usage.
pub const NUMBERS: usize = 22;

/// Holders in one message.
pub const MOST_HOLDERS: usize = 40;

const MOST_COMMAND: usize = 32;
const _: () = assert!(16 + 16 + 16 + 16 + 8 * NUMBERS + 8 + MOST_HOLDERS * (48 + MOST_COMMAND) <= MOST_BYTES);

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

    fn write(&self, w: &mut Writer<'_>) {
        for number in [self.participant.0, self.leases, self.bytes, self.mappings, self.oldest_ms] {
            w.put(&number.to_le_bytes());
        }
        w.put(&self.pid.to_le_bytes());
        let mut command = [0; MOST_COMMAND];
        let mut len = 0;
        for c in self.command.chars().map(|c| if c.is_control() { '?' } else { c }) {
            if len + c.len_utf8() > MOST_COMMAND {
                break;
            }
            len += c.encode_utf8(&mut command[len..]).len();
        }
        w.put(&[u8::from(self.dying), len as u8, 0, 0]);
        w.put(&command);
    }

    fn read(r: &mut Reader<'_>) -> Result<HolderRow, DecodeError> {
        let participant = ParticipantId(r.u64()?);
        let (leases, bytes, mappings, oldest_ms) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?);
        let (pid, dying, [len]) = (r.u32()?, r.flag("whether a holder is dying")?, r.array()?);
        r.zeros::<2>()?;
        let command: [u8; MOST_COMMAND] = r.array()?;
        let Some((command, rest)) = command.split_at_checked(usize::from(len)) else {
            return Err(malformed("the length of a command", len, "at most 32"));
        };
        if let Some(&byte) = rest.iter().find(|&&byte| byte != 0) {
            return Err(malformed("the padding of a command", byte, "0"));
        }
        let command =
            str::from_utf8(command).map_err(|e| malformed("a command's good bytes", e.valid_up_to(), "all"))?;
        if let Some(c) = command.chars().find(|c| c.is_control()) {
            return Err(malformed("a character of a command", u32::from(c), "no control character"));
        }
        Ok(HolderRow { participant, leases, bytes, mappings, oldest_ms, pid, dying, command: command.into() })
    }
}

impl ReportPage {
    pub(super) fn write(&self, w: &mut Writer<'_>) {
        debug_assert!(self.holders.len() <= MOST_HOLDERS);
        w.put(&self.session.0);
        w.put(&self.device.0);
        w.put(&[self.backend as u8, 0, 0, 0]);
        w.put(&self.pid.to_le_bytes());
        w.put(&self.age_ms.to_le_bytes());
        for number in self.numbers {
            w.put(&number.to_le_bytes());
        }
        w.put(&self.next.unwrap_or(u32::MAX).to_le_bytes());
        w.put(&(self.holders.len() as u32).to_le_bytes());
        self.holders.iter().for_each(|holder| holder.write(w));
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<ReportPage, DecodeError> {
        let (session, device) = (SessionId(r.array()?), DeviceUuid(r.array()?));
        let backend = r.backend()?;
        r.zeros::<3>()?;
        let (pid, age_ms) = (r.u32()?, r.u64()?);
        let mut numbers = [0; NUMBERS];
        for number in &mut numbers {
            *number = r.u64()?;
        }
        let next = Some(r.u32()?).filter(|&next| next != u32::MAX);
        let count = r.u32()? as usize;
        if count > MOST_HOLDERS {
            return Err(malformed("the number of holders", count, "at most 40"));
        }
        let holders = (0..count).map(|_| HolderRow::read(r)).collect::<Result<_, _>>()?;
        Ok(ReportPage { session, device, backend, pid, age_ms, numbers, next, holders })
    }
}
