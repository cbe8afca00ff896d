//! What a session holds, as numbers.

use crate::engine::Stats;
use crate::sized::sized_struct;

/// What a collect found.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_collected {
    /// `sizeof(gpu_ipc_collected)`.
    pub size: usize,
    /// Blocks that nothing holds any more, adopted ones among them.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of those, adopted ones that were returned.
    pub returned: u64,
}
sized_struct!(gpu_ipc_collected of 32 { size, blocks, bytes, returned });

/// A session at one moment. Numbers are of blocks unless they say bytes.
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types, reason = "the name that C has for it")]
#[repr(C)]
pub struct gpu_ipc_stats {
    /// `sizeof(gpu_ipc_stats)`.
    pub size: usize,
    /// Blocks that exist: with the producer, shared, or in limbo.
    pub live_blocks: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Blocks that the producer dropped and something still holds.
    pub limbo_blocks: u64,
    /// Their bytes.
    pub limbo_bytes: u64,
    /// Leases granted and not claimed.
    pub in_flight: u64,
    /// Leases claimed and not seen released.
    pub held: u64,
    /// Leases of participants that are dead or gone, until proof and quarantine are over.
    pub quarantined: u64,
    /// Bytes of the blocks behind those.
    pub quarantined_bytes: u64,
    /// Leases whose word in shared memory makes no sense: their blocks are barred until the
    /// holder's death.
    pub poisoned: u64,
    /// Blocks that are never used again, because nobody can say when the work on them ends.
    pub leaked_blocks: u64,
    /// Their bytes.
    pub leaked_bytes: u64,
    /// Grants taken back by cancel, by the addressee's death or by its goodbye, so far.
    pub revoked: u64,
    /// Grants taken back because nobody claimed them in time, so far.
    pub expired: u64,
    /// Participants that died with leases or mappings, so far.
    pub deaths: u64,
    /// Words found corrupt so far.
    pub corrupt_words: u64,
    /// Tickets that can still be claimed.
    pub tickets: u64,
    /// Participants that are connected, or dead and not buried yet.
    pub participants: u64,
    /// Regions of the session's memory.
    pub regions: u64,
    /// Bytes taken from the driver.
    pub reserved_bytes: u64,
    /// Bytes handed out.
    pub in_use_bytes: u64,
    /// Bytes in regions that other processes may have mapped.
    pub pinned_bytes: u64,
    /// Of the blocks in limbo, those that wait for streams on which no event could be recorded: a
    /// thread synchronises these.
    pub unmarked_blocks: u64,
}
sized_struct!(gpu_ipc_stats of 184 { size, live_blocks, live_bytes, limbo_blocks, limbo_bytes, in_flight, held, quarantined, quarantined_bytes, poisoned, leaked_blocks, leaked_bytes, revoked, expired, deaths, corrupt_words, tickets, participants, regions, reserved_bytes, in_use_bytes, pinned_bytes, unmarked_blocks });

impl gpu_ipc_stats {
    pub(crate) fn of(stats: &Stats) -> gpu_ipc_stats {
        gpu_ipc_stats {
            size: size_of::<gpu_ipc_stats>(),
            live_blocks: stats.live_blocks,
            live_bytes: stats.live_bytes,
            limbo_blocks: stats.limbo_blocks,
            limbo_bytes: stats.limbo_bytes,
            in_flight: stats.in_flight,
            held: stats.held,
            quarantined: stats.quarantined,
            quarantined_bytes: stats.quarantined_bytes,
            poisoned: stats.poisoned,
            leaked_blocks: stats.leaked_blocks,
            leaked_bytes: stats.leaked_bytes,
            revoked: stats.revoked,
            expired: stats.expired,
            deaths: stats.deaths,
            corrupt_words: stats.corrupt_words,
            tickets: stats.tickets,
            participants: stats.participants,
            regions: stats.source.regions,
            reserved_bytes: stats.source.reserved,
            in_use_bytes: stats.source.in_use,
            pinned_bytes: stats.source.pinned,
            unmarked_blocks: stats.unmarked_blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::sized;

    /// Lists the names of a structure's fields.
    fn fields(of: &impl std::fmt::Debug) -> BTreeSet<String> {
        let text = format!("{of:?}");
        let names = text
            .split([' ', '{', ',', '('])
            .filter_map(|word| word.strip_suffix(':'));
        names.map(str::to_owned).collect()
    }

    #[test]
    fn every_number_of_a_session_has_a_field() {
        let source = [
            ("reserved", "reserved_bytes"),
            ("in_use", "in_use_bytes"),
            ("pinned", "pinned_bytes"),
        ];
        let mut expected = fields(&Stats::default());
        assert!(
            expected.len() > 20 && expected.contains("unmarked_blocks"),
            "{expected:?}"
        );
        // Lists of what is behind the numbers: of participants there are functions.
        assert!(expected.remove("holders") && expected.remove("source"));
        for (here, there) in source {
            assert!(
                expected.remove(here) && expected.insert(there.to_owned()),
                "{here}"
            );
        }
        expected.insert("size".to_owned());
        assert_eq!(fields(&sized::zeroed::<gpu_ipc_stats>()), expected);
    }
}
