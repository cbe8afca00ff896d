//! What a broker allows.

use crate::wire::Refusal;

/// What a broker allows.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of all objects.
    pub bytes: u64,
    /// Bytes of the objects of one user.
    pub bytes_per_uid: u64,
    /// Epochs of a name that are kept.
    pub epochs: usize,
    /// Participants at a time.
    pub participants: usize,
    /// Reads the slots before it publishes; without, the negative control of the tests.
    pub reads_slots: bool,
}

impl Default for Limits {
    /// No limit of bytes; two epochs of each name; 4,096 participants.
    fn default() -> Limits {
        Limits { bytes: u64::MAX, bytes_per_uid: u64::MAX, epochs: 2, participants: 4_096, reads_slots: true }
    }
}

impl Limits {
    /// Refuses `asked` more bytes for a user, where `taken` lists every object's owner and bytes.
    pub(super) fn check(
        &self,
        asked: u64,
        uid: u32,
        taken: impl Iterator<Item = (u32, u64)>,
    ) -> Result<(), (Refusal, String)> {
        let (mut all, mut own) = (0u64, 0u64);
        for (owner, bytes) in taken {
            all = all.saturating_add(bytes);
            if owner == uid {
                own = own.saturating_add(bytes);
            }
        }
        if all.saturating_add(asked) > self.bytes {
            let why = format!("asked for {asked} bytes, {all} of the broker's limit of {} are taken", self.bytes);
            return Err((Refusal::Limit, why));
        }
        if own.saturating_add(asked) > self.bytes_per_uid {
            let limit = self.bytes_per_uid;
            let why = format!("asked for {asked} bytes, {own} of uid {uid}'s limit of {limit} are taken");
            return Err((Refusal::Limit, why));
        }
        Ok(())
    }
}
