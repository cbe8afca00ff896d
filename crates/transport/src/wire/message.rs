//! Control messages between a participant and its producer: one packet each, at most [`MOST_BYTES`]
//! bytes.
//!
//! Every message starts with the same 16 bytes. They, the magic and the greatest length are the
//! same in all versions, so either side of any version can name both versions when they differ.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 2 | magic `GI` |
//! | 2 | 2 | version |
//! | 4 | 2 | type |
//! | 6 | 2 | file descriptors that come with the packet |
//! | 8 | 8 | request, which the answer repeats; 0 where there is none |
//!
//! | type | message | body from byte 16 on | file descriptors |
//! |---|---|---|---|
//! | 1 | `Hello` | backend u8, 0 u8, descendants u16, sign u32, device 16, the name that the participant gave itself: length u16, text | own pidfd, descendants' pidfds |
//! | 2 | `MapRegion` | region u64, access u8, 0 in 7, then the lease that gives the right: file u32, slot u32, generation u64 | |
//! | 3 | `Unmapped` | region u64 | |
//! | 4 | `Bye` | | |
//! | 5 | `ClaimTickets` | count u32, 0 u32, then each: ticket u32, 0 u32, generation u64 | |
//! | 6 | `Forward` | settled u64; the lease: file u32, slot u32, generation u64; then the part: offset u64, length u64; then to whom: kind u8, 0 in 3, claims u32, participant u64, user 64 | |
//! | 7 | `Inspect` | from u32, 0 u32 | |
//! | 8 | `TakeSnapshot` | | |
//! | 9 | `AskFile` | index u32, 0 u32 | |
//! | 10 | `GiveBack` | ticket u32, 0 u32, generation u64 | |
//! | 11 | `Deposit` | settled u64, name 16 | what is kept |
//! | 12 | `Fetch` | name 16 | |
//! | 13 | `EndDeposit` | name 16, request of the deposit or fetch u64, returns u8, 0 in 7 | |
//! | 129 | `Welcome` | session 16, participant u64, pid u32, slots u32, most slots u64, key 16, key of tickets 16 | producer's pidfd, counter file 0 |
//! | 130 | `Refused` | code u16, length u16, text | |
//! | 131 | `CounterFile` | index u32, slots u32 | counter file |
//! | 132 | `Region` | region u64, length u64, device 16, access u8, place u8, 0 in 6, then by place: 1 address u64, 2 handle 64, 3 nothing, 4 range u64, its length u64, offset u64, region behind u64, 5 address u64, region behind u64 | for places 3 and 4: the memory |
//! | 133 | `NoRegion` | region u64, code u16, length u16, text | |
//! | 134 | `PleaseUnmap` | region u64 | |
//! | 135 | `Closing` | | |
//! | 136 | `Tickets` | count u32, 0 u32, then each: ticket u32, outcome u32, its generation u64, lease file u32, slot u32, generation u64, place: region u64, offset u64, length u64, fence word u32, 0 u32, value u64 | |
//! | 137 | `Forwarded` | descriptor 192 | |
//! | 138 | `Report` | session 16, device 16, backend u8, 0 in 3, pid u32, age in ms u64, 22 numbers u64, next u32, count u32, then each: participant u64, leases u64, bytes u64, mappings u64, oldest in ms u64, pid u32, dying u8, command's length u8, 0 in 2, command 32 | |
//! | 139 | `Declined` | code u16, length u16, text | |
//! | 140 | `Revoked` | the lease: file u32, slot u32, generation u64 | |
//! | 141 | `Snapshot` | length u64 | the snapshot |
//! | 142 | `Noted` | | |
//! | 143 | `Fetched` | name 16 | what was kept |
//!
//! All numbers are little-endian. Every byte string that decodes has exactly one meaning and every
//! meaning one byte string.
//!
//! - `ClaimTickets` names up to 56 tickets; `Tickets` answers each in the same order. The outcome
//!   of a ticket is 0 granted, 1 revoked, 2 already claimed, 3 stale, 4 limit, 5 failed, 6 later;
//!   but for 0 all that follows the ticket's generation is 0. A fence word of 2^32-1 is no fence,
//!   and its value is 0. Place, length and fence are the answer's: of a ticket's descriptor only
//!   the number and the generation are believed.
//! - Every question is answered, and may be asked again with the same number: it is answered the
//!   same, and grants nothing twice. `Unmapped`, `Bye` and `GiveBack` are answered by `Noted`,
//!   `AskFile` by `CounterFile` or `Declined`. A `CounterFile` that nobody asked for has the request 0. A region
//!   stays pinned from the first `MapRegion` until an `Unmapped`, whatever is answered.
//! - `GiveBack` ends the lease that the ticket gave, unless it is claimed. What the ticket did not
//!   give costs no claim.
//! - A region of place 4 is a piece of a range of addresses. The participant reserves all of the
//!   range at its first piece and maps each at its offset. A block that ends beyond its region goes
//!   on in the region behind, which is asked for by the same lease. The number of the region behind
//!   belongs to the place where this one ends, so it never changes; nothing need be there. Place 5
//!   is place 1 of such a region.
//! - `settled` of `Forward`: no wish of a lower number waits for its answer. The outcome 6 of a
//!   ticket: ask again in a while.
//! - `Forward` goes to a participant (kind 1, claims 0) or becomes a ticket (kind 2, participant 0,
//!   claims 0 for unlimited). The part lies in the block: its offset is counted from the region's
//!   start. `Forwarded` or `Declined` answers.
//! - `Inspect` may come in place of `Hello`, from a user that may connect. `Report` answers with
//!   the holders from place `from` on; `next` is where to go on, 2^32-1 after the last. The numbers
//!   are the fields of `Stats` in their order.
//! - `TakeSnapshot` comes in place of `Hello` too, from a user that may connect, and is the last
//!   message of its connection. `Snapshot` answers with a memfd of `length` bytes of JSON, 1 to
//!   16,777,216, sealed against writing, shrinking, growing and further seals; `Declined` when
//!   there is none.

mod deposit;
mod field;
mod packet;
mod report;
#[cfg(test)]
mod tests;
mod ticket;
mod to_participant;
mod to_producer;

pub use crate::wire::packet::MOST_BYTES;
pub use crate::wire::refusal::RefusalCode;
pub use crate::wire::table::DecodeError;
pub use deposit::DepositId;
pub use report::{MOST_HOLDERS, NUMBERS, ReportPage, shown};
pub use ticket::{Extent, Granted, MOST_TICKETS, Outcome, TicketAnswer, TicketId};
pub use to_participant::{MOST_SNAPSHOT, RegionPlace, ToParticipant};
pub use to_producer::{Heir, ToProducer};
