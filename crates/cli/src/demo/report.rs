//! What the demo saw, for people and for programs.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{ContentArrangement, Table};
use serde::Serialize;

use crate::output;

/// Blocks that each of the two consumers holds when it is killed.
pub const HELD_AT_DEATH: u32 = 4;

/// The session's quarantine, in milliseconds: nothing of the dead comes back before.
const QUARANTINE_MS: f64 = 100.0;

/// What the demo saw.
#[derive(Clone, Debug, Default, Serialize)]
#[cfg_attr(test, derive(serde::Deserialize))]
pub struct Report {
    /// The backend's name.
    pub backend: String,
    /// Consumer processes, the two that were killed among them.
    pub consumers: u64,
    /// Blocks that were asked for.
    pub blocks: u64,
    /// Leases granted.
    pub shared: u64,
    /// Leases claimed.
    pub claimed: u64,
    /// Leases released by consumers that live.
    pub released: u64,
    /// Grants taken back before they were claimed.
    pub revoked: u64,
    /// Second claims of one descriptor that were refused.
    pub refused_duplicates: u64,
    /// Leases forwarded to a third process.
    pub forwarded: u64,
    /// Leases of one ticket that all consumers claimed.
    pub broadcast: u64,
    /// Blocks reclaimed from the dead.
    pub reclaimed_after_death: u64,
    /// Milliseconds from the kill to the reclaim, quarantine included.
    pub death_to_reclaim_ms: f64,
    /// Blocks in limbo at the end.
    pub in_limbo_at_end: u64,
    /// Bytes that did not come back.
    pub bytes_leaked: u64,
    /// Regions of the device's memory that did not come back when everybody had left.
    pub regions_at_end: u64,
    /// Blocks whose contents changed while they were held, survivors' fresh ones after a death
    /// among them, or that were reclaimed while a forked child lived.
    pub early_reuse: u64,
    /// Blocks with wrong contents.
    pub content_errors: u64,
}

impl Report {
    /// Says whether everything is as it must be.
    pub fn is_good(&self) -> bool {
        self.wrong().is_empty()
    }

    /// Lists what is not as it must be: every number is judged, by what it must be or by the
    /// others.
    fn wrong(&self) -> Vec<String> {
        let claimed = (self.shared + self.forwarded + self.broadcast).saturating_sub(self.revoked);
        let ended = self.released + self.reclaimed_after_death;
        let equal = [
            ("revoked", self.revoked, 1),
            ("refused duplicates", self.refused_duplicates, 1),
            ("forwarded", self.forwarded, 1),
            ("broadcast", self.broadcast, self.consumers),
            ("claimed", self.claimed, claimed),
            ("released or reclaimed", ended, self.claimed),
            (
                "reclaimed after death",
                self.reclaimed_after_death,
                2 * u64::from(HELD_AT_DEATH),
            ),
            ("in limbo at end", self.in_limbo_at_end, 0),
            ("bytes leaked", self.bytes_leaked, 0),
            ("regions at end", self.regions_at_end, 0),
            ("early reuse", self.early_reuse, 0),
            ("content errors", self.content_errors, 0),
        ];
        let wrong = equal.into_iter().filter(|(_, is, must)| is != must);
        let mut wrong: Vec<String> = wrong
            .map(|(what, is, must)| format!("{what}: {is}, not {must}"))
            .collect();
        if self.consumers < 3 || self.shared < self.blocks {
            wrong.push(format!(
                "{} of {} blocks shared with {} consumers",
                self.shared, self.blocks, self.consumers
            ));
        }
        if self.death_to_reclaim_ms < QUARANTINE_MS {
            let early = self.death_to_reclaim_ms;
            wrong.push(format!(
                "death to reclaim: {early:.0} ms, less than the quarantine's {QUARANTINE_MS:.0}"
            ));
        }
        wrong
    }

    /// Makes one JSON object: the fields, and `ok`.
    pub fn json(&self) -> String {
        output::judged(self.is_good(), self)
    }

    /// Makes what people read.
    pub fn text(&self, width: Option<u16>) -> String {
        let wrong = self.wrong();
        let last = match wrong.is_empty() {
            true => "All blocks came back.".to_owned(),
            false => format!("Something went wrong. {}.", wrong.join("; ")),
        };
        format!("{}\n{last}", self.table(width))
    }

    /// Makes the table.
    fn table(&self, width: Option<u16>) -> String {
        let mut table = Table::new();
        table
            .load_style(UTF8_FULL_CONDENSED)
            .set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width(width.unwrap_or(80));
        table.set_header(["what", "count", "meaning"]);
        let rows: [(&str, String, &str); 15] = [
            (
                "consumers",
                self.consumers.to_string(),
                "processes that were shared with; two of them were killed",
            ),
            (
                "shared",
                self.shared.to_string(),
                "leases granted: one descriptor each, sent through a pipe",
            ),
            (
                "claimed",
                self.claimed.to_string(),
                "leases that a consumer took",
            ),
            (
                "released",
                self.released.to_string(),
                "leases ended by their consumer, after its stream was done",
            ),
            (
                "revoked",
                self.revoked.to_string(),
                "a descriptor that was never sent; its grant was taken back",
            ),
            (
                "refused duplicates",
                self.refused_duplicates.to_string(),
                "a descriptor claimed twice: once is once",
            ),
            (
                "forwarded",
                self.forwarded.to_string(),
                "leases passed on by a consumer",
            ),
            (
                "broadcast",
                self.broadcast.to_string(),
                "leases of one ticket, claimed by every consumer",
            ),
            (
                "reclaimed after death",
                self.reclaimed_after_death.to_string(),
                "blocks of two consumers killed with SIGKILL; one had forked a child, and its blocks waited for it",
            ),
            (
                "death to reclaim",
                format!("{:.0} ms", self.death_to_reclaim_ms),
                "from the kill to the block being free, 100 ms of quarantine included",
            ),
            (
                "in limbo at end",
                self.in_limbo_at_end.to_string(),
                "dropped by the producer, still held: must be 0",
            ),
            (
                "bytes leaked",
                self.bytes_leaked.to_string(),
                "did not come back: must be 0",
            ),
            (
                "regions at end",
                self.regions_at_end.to_string(),
                "device memory without a user: must be 0",
            ),
            (
                "early reuse",
                self.early_reuse.to_string(),
                "reused while a process held them: must be 0",
            ),
            (
                "content errors",
                self.content_errors.to_string(),
                "blocks that did not hold what was shared: must be 0",
            ),
        ];
        for (what, count, meaning) in rows {
            table.add_row([what, &count, meaning]);
        }
        table.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a demo with one consumer and five blocks sees.
    fn good() -> Report {
        Report {
            backend: "host".into(),
            consumers: 3,
            blocks: 5,
            shared: 32,
            claimed: 35,
            released: 27,
            revoked: 1,
            refused_duplicates: 1,
            forwarded: 1,
            broadcast: 3,
            reclaimed_after_death: 8,
            death_to_reclaim_ms: 104.0,
            ..Report::default()
        }
    }

    #[test]
    fn every_number_decides() {
        let good = good();
        assert_eq!(good.wrong(), [""; 0]);
        let serde_json::Value::Object(fields) = serde_json::to_value(&good).expect("it serialises")
        else {
            panic!("no object");
        };
        for (field, value) in fields.iter().filter(|(field, _)| *field != "backend") {
            let mut changed = fields.clone();
            let was = value.as_f64().expect("a number");
            // One of what must not be, and less of what must.
            let other = match field.as_str() {
                "blocks" => was + 100.0,
                _ if was == 0.0 => 1.0,
                _ => was - was.min(5.0),
            };
            changed[field] = if value.is_u64() {
                (other as u64).into()
            } else {
                other.into()
            };
            let report: Report = serde_json::from_value(changed.into()).expect("a report");
            assert!(!report.is_good(), "{field}: {report:?}");
        }
    }

    #[test]
    fn the_json_says_whether_all_is_well() {
        let parse = |report: &Report| -> serde_json::Value {
            serde_json::from_str(&report.json()).expect("JSON")
        };
        assert_eq!(parse(&good())["ok"], true);
        let bad = Report {
            early_reuse: 1,
            ..good()
        };
        assert_eq!(
            (&parse(&bad)["ok"], &parse(&bad)["early_reuse"]),
            (&false.into(), &1.into())
        );
    }

    #[test]
    fn the_table_fits_a_terminal() {
        let text = Report {
            backend: "host".into(),
            ..Report::default()
        }
        .table(None);
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
    }

    #[test]
    fn the_keys_are_these() {
        let value = serde_json::to_value(Report::default()).expect("it serialises");
        let mut keys: Vec<&String> = value.as_object().expect("an object").keys().collect();
        keys.sort();
        let mut expected = [
            "backend",
            "consumers",
            "shared",
            "claimed",
            "released",
            "revoked",
            "refused_duplicates",
            "forwarded",
            "broadcast",
            "reclaimed_after_death",
            "death_to_reclaim_ms",
            "in_limbo_at_end",
            "blocks",
            "bytes_leaked",
            "regions_at_end",
            "early_reuse",
            "content_errors",
        ];
        expected.sort_unstable();
        assert_eq!(keys, expected);
    }
}
