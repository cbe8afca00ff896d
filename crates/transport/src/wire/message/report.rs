//! The report that a session gives to a process that inspects it.

use std::time::Duration;

use gpu_api::{BackendKind, DeviceUuid, Holder, ParticipantId};

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
    pub holders: Vec<Holder>,
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

/// A holder, with the age of its oldest lease in milliseconds, and as much of its command as is
/// [shown].
impl Field for Holder {
    fn write(&self, w: &mut Writer<'_>) {
        let oldest = u64::try_from(self.oldest.as_millis()).unwrap_or(u64::MAX);
        let numbers = [self.participant.0, self.leases, self.bytes, self.mappings];
        numbers.into_iter().for_each(|number| w.u64(number));
        w.u64(oldest);
        w.u32(self.pid);
        let shown = shown(&self.command);
        let mut command = [0; MOST_COMMAND];
        command[..shown.len()].copy_from_slice(shown.as_bytes());
        w.put(&[u8::from(self.dying), shown.len() as u8, 0, 0]);
        w.put(&command);
    }

    fn read(r: &mut Reader<'_>) -> Result<Holder, Malformed> {
        let mut holder = Holder {
            participant: ParticipantId(r.u64()?),
            leases: r.u64()?,
            bytes: r.u64()?,
            mappings: r.u64()?,
            oldest: Duration::from_millis(r.u64()?),
            pid: r.u32()?,
            dying: false,
            command: String::new(),
        };
        let [dying, len] = r.array()?;
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
            let c = u32::from(c);
            return Err(malformed(
                "a character of a command",
                c,
                "no control character",
            ));
        }
        (holder.dying, holder.command) = (dying == 1, command.into());
        Ok(holder)
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

impl Field for Vec<Holder> {
    fn write(&self, w: &mut Writer<'_>) {
        debug_assert!(self.len() <= MOST_HOLDERS);
        w.u32(self.len() as u32);
        self.iter().for_each(|holder| holder.write(w));
    }

    fn read(r: &mut Reader<'_>) -> Result<Vec<Holder>, Malformed> {
        let count = r.u32()?;
        if count as usize > MOST_HOLDERS {
            return Err(malformed("the number of holders", count, "at most 40"));
        }
        (0..count).map(|_| Holder::read(r)).collect()
    }
}
