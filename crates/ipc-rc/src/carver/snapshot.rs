//! What a carver's memory looks like: the JSON that `Snapshot` of the allocators reads.
//!
//! That crate and this one do not know each other. A test of the program `gpu-ipc` holds the two together.

use std::fmt::{Display, Write};

use gpu_api::{Holder, Lent, Reclaim};

use super::chunks::Chunks;

/// What a row takes at most: its words, and numbers of twenty digits.
const CHUNK: usize = 144;
const REGION: usize = 112;
const LENT: usize = 128;
/// With a command of 256 characters of four bytes each.
const HOLDER: usize = 1400;
/// Everything else.
const REST: usize = 4096;

/// The most characters of a command.
const MOST_TEXT: usize = 256;

/// One region: what it is, and its chunks side by side.
pub(super) struct Row {
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) pinned: bool,
    /// Offset, bytes, and whether it is in use.
    pub(super) chunks: Vec<(u64, u64, bool)>,
}

/// The regions and sums of one moment.
pub(super) struct Listed {
    rows: Vec<Row>,
    in_use: u64,
    leaked: u64,
    largest_free: u64,
}

impl Listed {
    pub(super) fn of(chunks: &Chunks) -> Listed {
        let mut rows = chunks.rows();
        rows.sort_unstable_by_key(|row| row.base);
        Listed { rows, in_use: chunks.usage().in_use, leaked: chunks.leaked, largest_free: chunks.largest_free() }
    }

    /// Writes it down in at most `most` bytes, with what a session has lent; leaves out what does not fit, leases first,
    /// then the chunks of the last regions. `None` when even the list of regions does not fit.
    ///
    /// A carver counts neither allocations nor peaks: these are none, and what is there.
    pub(super) fn json(mut self, name: &str, asker: &dyn Reclaim, most: usize) -> Option<String> {
        let mut left = most.checked_sub(REST + self.rows.len() * REGION)?;
        let mut holders = asker.holders();
        holders.retain(|holder| holder.leases + holder.mappings > 0);
        let quarantined: u64 = holders.iter().filter(|holder| holder.dying).map(|holder| holder.bytes).sum();
        holders.truncate(left / 4 / HOLDER);
        left -= holders.len() * HOLDER;
        let lent = asker.lent(left / 2 / LENT);
        left -= lent.len() * LENT;
        let mut left_out = 0;
        for Row { chunks, .. } in &mut self.rows {
            match left.checked_sub(chunks.len() * CHUNK) {
                Some(rest) => left = rest,
                None => left_out += std::mem::take(chunks).len(),
            }
        }
        let Listed { rows, in_use, leaked, largest_free } = self;
        let reserved: u64 = rows.iter().map(|row| row.len).sum();
        let text = format!(
            "{{\"name\":\"{name}\",\"stats\":{{\"num_allocs\":0,\"bytes_in_use\":{in_use},\"peak_bytes_in_use\":{in_use},\
             \"largest_alloc_size\":0,\"bytes_limit\":null,\"bytes_reserved\":{reserved},\
             \"peak_bytes_reserved\":{reserved},\"peak_allocated_bytes\":{in_use},\"bytes_reservable_limit\":null,\
             \"largest_free_block_bytes\":{largest_free},\"pool_bytes\":{reserved},\"peak_pool_bytes\":{reserved}}},\
             \"asked_bytes\":{in_use},\"pending_bytes\":0,\"limbo_bytes\":{limbo},\"quarantined_bytes\":{quarantined},\
             \"leaked_bytes\":{leaked},\"bookkeeping_bytes\":0,\"holders\":[{held}],\"lent\":[{lent}],\
             \"regions\":[{regions}],\"chunks_left_out\":{left_out}}}",
            limbo = asker.limbo_bytes(),
            held = list(&holders, holder),
            lent = list(&lent, |lent| lease(lent, &holders)),
            regions = list(&rows, region),
        );
        (text.len() <= most).then_some(text)
    }
}

fn list<T, D: Display>(rows: &[T], show: impl Fn(&T) -> D) -> String {
    let mut text = String::new();
    for row in rows {
        let comma = if text.is_empty() { "" } else { "," };
        let _ = write!(text, "{comma}{}", show(row));
    }
    text
}

fn region(row: &Row) -> String {
    let Row { base, len, pinned, chunks } = row;
    let chunk = |&(offset, len, used): &(u64, u64, bool)| {
        let (asked, state) = if used { (len, "used") } else { (0, "free") };
        let address = base + offset;
        format!("{{\"address\":{address},\"len\":{len},\"asked\":{asked},\"number\":0,\"state\":\"{state}\"}}")
    };
    format!("{{\"base\":{base},\"len\":{len},\"pinned\":{pinned},\"chunks\":[{}]}}", list(chunks, chunk))
}

fn holder(holder: &Holder) -> String {
    let Holder { participant, pid, command, leases, bytes, mappings, oldest, dying } = holder;
    // What would steer a terminal or end the string is no part of a name.
    let plain = |c: char| if c.is_control() || matches!(c, '"' | '\\') { '?' } else { c };
    let command: String = command.chars().take(MOST_TEXT).map(plain).collect();
    format!(
        "{{\"participant\":{},\"pid\":{pid},\"command\":\"{command}\",\"leases\":{leases},\"bytes\":{bytes},\
         \"mappings\":{mappings},\"oldest_ms\":{},\"dying\":{dying}}}",
        participant.0,
        u64::try_from(oldest.as_millis()).unwrap_or(u64::MAX),
    )
}

fn lease(lent: &Lent, holders: &[Holder]) -> String {
    let place = holders.iter().position(|holder| holder.participant == lent.participant);
    let place = place.map_or("null".into(), |place| place.to_string());
    let Lent { ptr, len, limbo, .. } = lent;
    format!("{{\"address\":{},\"len\":{len},\"holder\":{place},\"limbo\":{limbo}}}", ptr.0)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use gpu_api::{DevicePtr, ParticipantId, Piece, Reclaimed, RegionSource, Sharing};

    use super::super::Carver;
    use super::super::fake::Fake;
    use super::*;

    /// A session that lent a block to somebody with an odd name.
    #[derive(Debug)]
    struct Asker {
        lent: DevicePtr,
    }

    impl Reclaim for Asker {
        fn collect_all(&self) -> Reclaimed {
            Reclaimed::default()
        }
        fn ask_to_unmap(&self) -> usize {
            0
        }
        fn holders(&self) -> Vec<Holder> {
            let row = |id, command: &str, leases| Holder {
                participant: ParticipantId(id),
                pid: 7,
                command: command.into(),
                leases,
                bytes: 512,
                mappings: 0,
                oldest: Duration::from_millis(1500),
                dying: true,
            };
            vec![row(1, "idle", 0), row(u64::MAX, "a\"b\\c\x1bd", 1)]
        }
        fn limbo_bytes(&self) -> u64 {
            512
        }
        fn lent(&self, most: usize) -> Vec<Lent> {
            let lent = Lent { ptr: self.lent, len: 512, participant: ParticipantId(u64::MAX), limbo: true };
            [lent].into_iter().take(most).collect()
        }
    }

    fn carver(fake: &Arc<Fake>) -> (Carver, Vec<Piece>) {
        let carver = Carver::new(fake.gpu(), Sharing::Handle, 4096).expect("a carver");
        let pieces: Vec<Piece> = (0..3).map(|_| carver.take(500, 1).expect("room")).collect();
        carver.give_back(pieces[1].clone());
        pieces[0].region.pin();
        (carver, pieces)
    }

    #[test]
    fn it_lists_every_chunk_and_who_holds_one() {
        let fake = Fake::new(1 << 20);
        let (carver, pieces) = carver(&fake);
        let base = pieces[0].region.base().0;
        let text = carver.snapshot(&Asker { lent: pieces[0].ptr() }, 1 << 20).expect("room");
        let chunk = |at, len, asked, state| {
            format!("{{\"address\":{},\"len\":{len},\"asked\":{asked},\"number\":0,\"state\":\"{state}\"}}", base + at)
        };
        let chunks = [chunk(0, 512, 512, "used"), chunk(512, 512, 0, "free"), chunk(1024, 512, 512, "used")];
        for part in [
            "{\"name\":\"carver of device 0\",".to_owned(),
            "\"bytes_in_use\":1024,".to_owned(),
            "\"bytes_reserved\":4096,".to_owned(),
            "\"largest_free_block_bytes\":2560,".to_owned(),
            "\"limbo_bytes\":512,\"quarantined_bytes\":512,".to_owned(),
            "\"holders\":[{\"participant\":18446744073709551615,\"pid\":7,\"command\":\"a?b?c?d\",".to_owned(),
            "\"oldest_ms\":1500,\"dying\":true}]".to_owned(),
            format!("\"lent\":[{{\"address\":{base},\"len\":512,\"holder\":0,\"limbo\":true}}]"),
            format!("\"regions\":[{{\"base\":{base},\"len\":4096,\"pinned\":true,\"chunks\":[{}", chunks.join(",")),
            "\"chunks_left_out\":0}".to_owned(),
        ] {
            assert!(text.contains(&part), "{part}\nnot in\n{text}");
        }
    }

    #[test]
    fn it_leaves_out_what_does_not_fit() {
        let fake = Fake::new(1 << 20);
        let (carver, pieces) = carver(&fake);
        let asker = Asker { lent: pieces[0].ptr() };
        assert_eq!(carver.snapshot(&asker, REST), None, "not even the region");
        let least = REST + REGION;
        let text = carver.snapshot(&asker, least).expect("the region");
        assert!(
            text.contains("\"holders\":[],\"lent\":[],") && text.ends_with("\"chunks\":[]}],\"chunks_left_out\":4}")
        );
        // Whatever room there is, no more is taken.
        for more in 0..8000 {
            let text = carver.snapshot(&asker, least + more).expect("the region");
            assert!(text.len() <= least + more);
        }
        assert!(carver.snapshot(&asker, least + 8000).expect("room").ends_with("\"chunks_left_out\":0}"));
    }
}
