//! The messages between a broker and its participants: one packet each, at most 4,096 bytes.
//!
//! Version 2 has the lineage in its welcome, and a watch can be taken back; version 3 has `Sum`
//! and pools: 11 to 14, 140, and the refusals 73 and 74.
//!
//! Every message starts with the same 16 bytes, in all versions:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 2 | magic `GO` |
//! | 2 | 2 | version: in `Hello` and `Refused` the highest that the sender speaks, else the one agreed on |
//! | 4 | 2 | type |
//! | 6 | 2 | file descriptors that come with the packet |
//! | 8 | 8 | request, which the answer repeats; 0 where there is none |
//!
//! `Hello` and `Refused` look the same in all versions, so that sides of any versions can agree, or
//! name both.
//!
//! | type | message | body from byte 16 on | file descriptors |
//! |---|---|---|---|
//! | 1 | `Hello` | lowest version u16, highest u16, shares a context, as under MPS u8, 0 u8, descendants u16, name text | own pidfd, descendants' pidfds |
//! | 2 | `Create` | identity 16, flags u32 (1 scratch, 2 replace, 4 expect), regions taken over u32 (bit `i`: region `i`), expected epoch u64 | draft of the manifest |
//! | 3 | `Commit` | identity 16 | |
//! | 4 | `AskOutcome` | identity 16 | |
//! | 5 | `Abort` | identity 16 | |
//! | 6 | `Open` | kind u8 (0 latest, 1 epoch, 2 identity), 0 in 7, epoch u64, identity 16, name text | |
//! | 7 | `Close` | identity 16 | |
//! | 8 | `Watch` | epoch that was seen u64, 2^64 - 1 to take the watch back; name text | |
//! | 9 | `Remove` | epoch u64, 0 for the whole name, 2^64 - 1 for what is not committed; name text | |
//! | 10 | `List` | | |
//! | 11 | `Sum` (from version 3 on, as are 12 to 14 and 140) | | |
//! | 12 | `Adopt` | token 16, name text | the end of a pipe, whose other end the holder keeps |
//! | 13 | `Release` | token 16, name text | |
//! | 14 | `ReadPool` | name text | |
//! | 129 | `Welcome` | lineage of the epochs 16 (of no meaning before version 2), participant u64, pid u32, slots u32 | broker's pidfd, counter file |
//! | 130 | `Refused` | code u16, lowest version u16, highest u16, text | |
//! | 131 | `Created` | granularity u64, regions u32, 0 u32, then for each: slot u32, 0 u32, generation u64 | the regions |
//! | 132 | `Committed` | epoch u64 | |
//! | 133 | `Outcome` | state u32 (1 committed, 2 unfinished, 3 unknown), 0 u32, epoch u64 | |
//! | 134 | `Noted` | | |
//! | 135 | `Opened` | identity 16, epoch u64, regions u32, 0 u32 | the manifest, then the regions |
//! | 136 | `Newer` | identity 16, epoch u64 | |
//! | 137 | `Removed` | epoch u64 | |
//! | 138 | `Listing` | bytes u64 | sealed memfd with that many bytes of JSON |
//! | 139 | `Declined` | code u16, text | |
//! | 140 | `Pool` | identity 16, generation u64, how the hold before it ended u32 (0 there was none, 1 in order, 2 by a death), files u32 | the manifest, the regions, the journal: `files` behind the first |
//!
//! A text is its bytes u16, then UTF-8 without control characters; a name has at most 255 bytes, a
//! reason 512. All numbers are little-endian. Every byte string that decodes has exactly one
//! meaning.
//!
//! **Questions are asked again**: a message may be lost where the receiver has no descriptor left.
//! The asker repeats until it hears; each question is answered the same however often it comes. A
//! commit that cannot be decided yet is not answered at all: it comes again.

mod packet;
#[cfg(test)]
mod property;
#[cfg(test)]
mod recorded_tests;
mod to_broker;
mod to_client;

pub(crate) use packet::KNOWS_POOLS;
pub use packet::VERSIONS;
pub use to_broker::{Selector, ToBroker, UNFINISHED, Wanted};
pub use to_client::{LeaseSlot, Standing, ToClient};
pub use transport::wire::packet::MOST_BYTES;
pub use transport::wire::refusal::RefusalCode;

#[cfg(test)]
mod tests {

    /// Each row of a table in the documentation of a module that encodes is in the document.
    #[test]
    fn the_document_has_the_tables_of_the_modules() {
        let document = include_str!("../../../../docs/WIRE.md");
        let modules = [
            include_str!("mod.rs"),
            include_str!("../object/manifest.rs"),
            include_str!("../keeper/notify.rs"),
            include_str!("../server/bequest.rs"),
            include_str!("../server/record.rs"),
        ];
        for module in modules {
            let rows: Vec<&str> = module
                .lines()
                .filter_map(|line| line.strip_prefix("//! |"))
                .collect();
            assert!(rows.len() > 4);
            for row in rows {
                assert!(
                    document.contains(&format!("\n|{row}\n")),
                    "not in docs/WIRE.md: |{row}"
                );
            }
        }
    }
}
