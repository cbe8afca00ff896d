//! A snapshot as JSON: written by the process that it is of, read by one that does not trust it.

use gpu_api::{Error, Result};

use super::{RegionSnapshot, Snapshot};

/// What a row takes at most: its words, and numbers of twenty digits.
const CHUNK: usize = 144;
const REGION: usize = 112;
const LENT: usize = 128;
/// With a command of 256 characters of which each is written in six.
const HOLDER: usize = 1800;
/// Everything else.
const REST: usize = 4096;

/// Addresses are below this: sums of lengths cannot overflow.
const END: u64 = 1 << 56;

/// The most characters of a name or a command.
const MOST_TEXT: usize = 256;

impl Snapshot {
    /// Writes it down in at most `most` bytes; leaves out what does not fit, leases first, then the
    /// chunks of the last regions. `None` when even the list of regions does not fit.
    pub fn json(mut self, most: usize) -> Option<String> {
        cut(&mut self.name);
        self.holders
            .iter_mut()
            .for_each(|holder| cut(&mut holder.command));
        let mut left = most.checked_sub(REST + self.regions.len() * REGION)?;
        self.holders.truncate(left / 4 / HOLDER);
        left -= self.holders.len() * HOLDER;
        self.lent.truncate(left / 2 / LENT);
        left -= self.lent.len() * LENT;
        let named = self.holders.len();
        self.lent
            .iter_mut()
            .for_each(|lent| lent.holder = lent.holder.filter(|&holder| holder < named));
        for RegionSnapshot { chunks, .. } in &mut self.regions {
            match left.checked_sub(chunks.len() * CHUNK) {
                Some(rest) => left = rest,
                None => self.chunks_left_out += std::mem::take(chunks).len() as u64,
            }
        }
        serde_json::to_string(&self)
            .ok()
            .filter(|text| text.len() <= most)
    }

    /// Reads what [`json`](Snapshot::json) of another process wrote, and believes none of it:
    /// regions in order and apart, chunks that make up their region, texts that steer no terminal.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with the place and what was expected there.
    pub fn from_json(text: &str) -> Result<Snapshot> {
        let snapshot: Snapshot = serde_json::from_str(text).map_err(|error| {
            Error::invalid("the snapshot", error, "the JSON of this version of gpu-ipc")
        })?;
        snapshot.check()?;
        Ok(snapshot)
    }

    fn check(&self) -> Result<()> {
        let invalid = |what, got: String, must| Err(Error::invalid(what, got, must));
        let bad =
            |text: &&String| text.chars().any(char::is_control) || text.chars().count() > MOST_TEXT;
        let mut texts = self
            .holders
            .iter()
            .map(|holder| &holder.command)
            .chain([&self.name]);
        if let Some(text) = texts.find(bad) {
            return invalid(
                "a text of the snapshot",
                format!("{text:?}"),
                "at most 256 characters, none for control",
            );
        }
        let mut before = 0;
        for region in &self.regions {
            let end = region
                .base
                .checked_add(region.len)
                .filter(|&end| end <= END);
            let Some(end) = end.filter(|_| region.base >= before && region.len > 0) else {
                let got = format!("{} bytes at {:#x}", region.len, region.base);
                return invalid(
                    "a region of the snapshot",
                    got,
                    "behind the one before it, and below 2^56",
                );
            };
            before = end;
            let mut at = region.base;
            for chunk in &region.chunks {
                if chunk.address != at
                    || chunk.len == 0
                    || chunk.len > end - at
                    || chunk.asked > chunk.len
                {
                    let got = format!("{} bytes at {:#x}", chunk.len, chunk.address);
                    return invalid(
                        "a chunk of the snapshot",
                        got,
                        "behind the one before it, and in its region",
                    );
                }
                at += chunk.len;
            }
            if !region.chunks.is_empty() && at != end {
                let got = format!("{} bytes less", end - at);
                return invalid("the chunks of a region", got, "as many bytes as the region");
            }
        }
        let outside = |len: u64, address: u64| address.checked_add(len).is_none_or(|end| end > END);
        if let Some(lent) = self
            .lent
            .iter()
            .find(|lent| outside(lent.len, lent.address))
        {
            let got = format!("{} bytes at {:#x}", lent.len, lent.address);
            return invalid("a lease of the snapshot", got, "below 2^56");
        }
        Ok(())
    }
}

/// Shortens a text that is too long, and takes out what the reader would refuse.
fn cut(text: &mut String) {
    if text.len() > MOST_TEXT || text.chars().any(char::is_control) {
        *text = text
            .chars()
            .take(MOST_TEXT)
            .map(|c| if c.is_control() { '?' } else { c })
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{ChunkSnapshot, ChunkState, HolderSnapshot, LentSnapshot};
    use super::*;
    use crate::{Bfc, BfcOptions, Growth, Request, Simulated};

    fn busy(chunks: u64) -> Snapshot {
        let bfc = Bfc::new(
            BfcOptions::new("busy").growth(Growth::Fixed(1 << 20)),
            Simulated::new(),
        );
        let held: Vec<u64> = (0..chunks)
            .map(|at| bfc.alloc(Request::new(4096 + at)).expect("room").address)
            .collect();
        held.iter()
            .step_by(3)
            .for_each(|&address| bfc.free(address).expect("in use"));
        let mut snapshot = bfc.snapshot();
        snapshot.lent = held
            .iter()
            .skip(1)
            .step_by(3)
            .map(|&address| lent(address))
            .collect();
        snapshot.holders.push(holder("reader"));
        snapshot
    }

    fn lent(address: u64) -> LentSnapshot {
        LentSnapshot {
            address,
            len: 4096,
            holder: Some(0),
            limbo: address.is_multiple_of(512),
        }
    }

    fn holder(command: &str) -> HolderSnapshot {
        let command = command.into();
        HolderSnapshot {
            participant: 3,
            pid: 9,
            command,
            leases: 1,
            bytes: 1,
            mappings: 1,
            oldest_ms: 1,
            dying: true,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let snapshot = busy(1000);
        assert!(snapshot.regions.len() > 2);
        let text = snapshot.clone().json(16 << 20).expect("room");
        assert_eq!(
            Snapshot::from_json(&text).expect("a good snapshot"),
            snapshot
        );
        let empty = Snapshot::default().json(REST).expect("room");
        assert_eq!(
            Snapshot::from_json(&empty).expect("a good snapshot"),
            Snapshot::default()
        );
    }

    #[test]
    fn the_longest_rows_are_no_longer_than_counted() {
        let most = u64::MAX;
        let state = ChunkState::Pending;
        let chunk = ChunkSnapshot {
            address: most,
            len: most,
            asked: most,
            number: most,
            state,
        };
        let region = RegionSnapshot {
            base: most,
            len: most,
            pinned: false,
            chunks: Vec::new(),
        };
        let lent = LentSnapshot {
            address: most,
            len: most,
            holder: Some(usize::MAX),
            limbo: false,
        };
        let pid = u32::MAX;
        // A character that is written as it is takes at most four bytes, and one that is escaped
        // two.
        let command = "\u{10ffff}".repeat(MOST_TEXT);
        let holder = HolderSnapshot {
            participant: most,
            pid,
            command,
            leases: most,
            bytes: most,
            mappings: most,
            oldest_ms: most,
            dying: false,
        };
        let len = |text: serde_json::Result<String>| text.expect("plain data").len() + 1;
        assert!(len(serde_json::to_string(&chunk)) <= CHUNK);
        assert!(len(serde_json::to_string(&region)) <= REGION);
        assert!(len(serde_json::to_string(&lent)) <= LENT);
        assert!(len(serde_json::to_string(&holder)) <= HOLDER);
    }

    #[test]
    fn what_does_not_fit_is_left_out_and_counted() {
        let snapshot = busy(4000);
        let whole = snapshot.clone().json(16 << 20).expect("room").len();
        let text = snapshot.clone().json(whole / 3).expect("room");
        assert!(text.len() <= whole / 3);
        let read = Snapshot::from_json(&text).expect("a good snapshot");
        assert_eq!(read.regions.len(), snapshot.regions.len());
        assert!(read.chunks_left_out > 0 && read.chunks().count() > 0);
        assert_eq!(
            read.chunks_left_out + read.chunks().count() as u64,
            snapshot.chunks().count() as u64
        );
        assert_eq!(snapshot.json(1000), None);
    }

    #[test]
    fn texts_that_steer_a_terminal_are_mended_by_the_writer_and_refused_by_the_reader() {
        let mut snapshot = Snapshot {
            name: "a\x1b[2J".into(),
            ..Snapshot::default()
        };
        snapshot.holders.push(holder(&"x".repeat(1000)));
        let raw = serde_json::to_string(&snapshot).expect("plain data");
        assert!(Snapshot::from_json(&raw).is_err());
        let read =
            Snapshot::from_json(&snapshot.json(1 << 20).expect("room")).expect("a good snapshot");
        assert_eq!(
            (read.name.as_str(), read.holders[0].command.len()),
            ("a?[2J", 256)
        );
    }

    #[test]
    fn another_version_or_nonsense_is_refused_with_the_place() {
        for text in [
            "",
            "{",
            "[]",
            "{\"name\":\"a\"}",
            "null",
            &"[".repeat(100_000),
        ] {
            let error = Snapshot::from_json(text)
                .expect_err("no snapshot")
                .to_string();
            assert!(error.contains("line 1 column"), "{error}");
        }
    }

    /// What another process may write instead of a number.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![
            Just(0),
            Just(1),
            Just(256),
            Just(END),
            Just(u64::MAX),
            any::<u64>(),
            0u64..1 << 21
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever another process writes is refused, or can be shown without a panic.
        #[test]
        fn nothing_that_is_read_cannot_be_shown(
            alterations in prop::collection::vec((0usize..12, 0usize..40, number()), 0..4),
        ) {
            let mut snapshot = busy(40);
            for (what, at, number) in alterations {
                let regions = snapshot.regions.len();
                let region = &mut snapshot.regions[at % regions];
                let chunks = region.chunks.len().max(1);
                match (what, region.chunks.get_mut(at % chunks)) {
                    (0, _) => region.base = number,
                    (1, _) => region.len = number,
                    (2, _) => region.chunks.clear(),
                    (3, Some(chunk)) => chunk.address = number,
                    (4, Some(chunk)) => chunk.len = number,
                    (5, Some(chunk)) => chunk.asked = number,
                    (6, _) => snapshot.lent[at % 10].address = number,
                    (7, _) => {
                        snapshot.lent[at % 10].len = number;
                        snapshot.lent[at % 9].holder = Some(number as usize);
                    }
                    (8, _) => snapshot.stats.bytes_in_use = number,
                    (9, _) => snapshot.pending_bytes = number,
                    (10, _) => (snapshot.stats.bytes_reserved, snapshot.stats.bytes_limit) = (number, Some(number)),
                    _ => (snapshot.holders[0].oldest_ms, snapshot.holders[0].bytes) = (number, number),
                }
            }
            let text = serde_json::to_string(&snapshot).expect("plain data");
            if let Ok(read) = Snapshot::from_json(&text) {
                prop_assert_eq!(&read, &snapshot);
                prop_assert!(read.to_string().len() < 1 << 20);
                prop_assert!(read.svg().len() < 1 << 20);
            }
        }

        #[test]
        fn altered_text_never_panics(at in 0usize..4000, byte in any::<u8>()) {
            let mut bytes = busy(12).json(1 << 20).expect("room").into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            let text = String::from_utf8(bytes).map_err(drop);
            if let Ok(read) = text.and_then(|text| Snapshot::from_json(&text).map_err(drop)) {
                read.to_string();
                read.svg();
            }
        }
    }
}
