//! Places of participants in the session's table.

use gpu_api::ParticipantId;

/// How many low bits of a participant's number are its place in the table.
const PLACE_BITS: u32 = 12;

/// The most participants of a session at once.
pub(crate) const MOST_PARTICIPANTS: usize = 1 << PLACE_BITS;

/// Makes the number of a participant that takes a place; no two of a session are equal.
pub(crate) fn participant_id(serial: u64, place: usize) -> ParticipantId {
    ParticipantId((serial << PLACE_BITS) | place as u64)
}

/// Returns a participant's place in the table.
pub(crate) fn place_of(id: ParticipantId) -> usize {
    (id.0 as usize) & (MOST_PARTICIPANTS - 1)
}
