//! A snapshot in words: a summary of one line, a histogram, and a map of the regions.

use std::fmt;

use super::shown::{Marks, Shown};
use super::{HolderSnapshot, RegionSnapshot, Snapshot};

/// Columns of the map of one region.
const COLUMNS: u64 = 64;

/// The most regions that are drawn: the others are counted.
const DRAWN: usize = 16;

/// Writes bytes in the largest unit that leaves at most one decimal.
pub(super) struct Bytes(pub(super) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB"];
        let at = (self.0.max(1).ilog2() / 10).min(4) as usize;
        let unit = 1u64 << (10 * at);
        let text = if self.0.is_multiple_of(unit) {
            format!("{} {}", self.0 / unit, units[at])
        } else {
            format!("{:.1} {}", self.0 as f64 / unit as f64, units[at])
        };
        f.pad(&text)
    }
}

impl fmt::Display for HolderSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dying = if self.dying { ", dying" } else { "" };
        write!(
            f,
            "process {} ({}) holds {} in {} leases and maps {} regions, oldest {:.1} s{dying}",
            self.pid,
            self.command,
            Bytes(self.bytes),
            self.leases,
            self.mappings,
            self.oldest_ms as f64 / 1000.0
        )
    }
}

impl Snapshot {
    /// Says in one line how much there is, what holds it, and in how many pieces the rest is.
    pub fn summary(&self) -> String {
        self.holders
            .iter()
            .fold(self.sums(), |text, holder| text + &format!("; {holder}"))
    }

    /// Writes the same without the holders.
    pub fn sums(&self) -> String {
        let stats = &self.stats;
        let limit = stats.bytes_limit.map_or_else(
            || "no limit".into(),
            |limit| format!("limit {}", Bytes(limit)),
        );
        format!(
            "{limit}, reserved {}, in use {}, largest free piece {}, {}",
            Bytes(stats.bytes_reserved),
            Bytes(stats.bytes_in_use),
            Bytes(stats.largest_free_block_bytes),
            self.scattered()
        )
    }

    /// Shows the histogram and the map, as [`Display`](fmt::Display) does under its summary.
    pub fn tables(&self) -> impl fmt::Display + '_ {
        Tables(self)
    }

    /// Says in how many pieces the free bytes are, and what some of the others are.
    fn scattered(&self) -> String {
        let mut text = format!("fragmentation {:.0} %", 100.0 * self.fragmentation());
        let apart = [
            (self.pending_bytes, "pending"),
            (self.exported_bytes(), "exported"),
            (self.limbo_bytes, "in limbo"),
            (self.quarantined_bytes, "quarantined"),
            (self.leaked_bytes, "leaked"),
        ];
        for (bytes, what) in apart.into_iter().filter(|&(bytes, _)| bytes > 0) {
            text += &format!(", {what} {}", Bytes(bytes));
        }
        text
    }

    /// Says what an error does not say yet that has the limit, what is reserved, what is in use,
    /// and the largest piece.
    pub(crate) fn rest_of_error(&self, draw: bool) -> String {
        let text = self.holders.iter().fold(self.scattered(), |text, holder| {
            text + &format!("; {holder}")
        });
        if draw {
            format!("{text}\n{}", Tables(self))
        } else {
            text
        }
    }
}

/// The histogram and the map.
struct Tables<'a>(&'a Snapshot);

/// The summary, a line for each order of size that has chunks, and a map of the regions.
///
/// In the map `*` is a column mostly in use, `o` mostly lent to other processes, `#` mostly in
/// limbo, `+` one with some of these, `x` mostly slack, `~` mostly pending, `_` free, `?` not
/// listed. `!` after a region's size says that another process may have it mapped.
impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.name, self.summary())?;
        fmt::Display::fmt(&Tables(self), f)
    }
}

impl fmt::Display for Tables<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tables(snapshot) = self;
        for bin in snapshot.bins().iter().filter(|bin| bin.chunks > 0) {
            writeln!(
                f,
                "  from {:>9}: {:>7} chunks, {:>10}; in use {:>7}, {:>10}, asked for {:>10}",
                Bytes(bin.from),
                bin.chunks,
                Bytes(bin.bytes),
                bin.chunks_in_use,
                Bytes(bin.bytes_in_use),
                Bytes(bin.asked_bytes),
            )?;
        }
        let marks = Marks::of(snapshot);
        for region in snapshot.regions.iter().take(DRAWN) {
            let mark = if region.pinned { '!' } else { ' ' };
            writeln!(
                f,
                "  {:#014x} {:>9}{mark} |{}|",
                region.base,
                Bytes(region.len),
                map(region, &marks)
            )?;
        }
        if snapshot.chunks_left_out > 0 {
            writeln!(f, "  {} chunks are not listed", snapshot.chunks_left_out)?;
        }
        match snapshot.regions.len().saturating_sub(DRAWN) {
            0 => Ok(()),
            more => writeln!(f, "  and {more} regions more"),
        }
    }
}

/// Draws a region as a line.
fn map(region: &RegionSnapshot, marks: &Marks<'_>) -> String {
    let columns = COLUMNS.min(region.len.max(1));
    let mut chunks = region.chunks.iter().peekable();
    let start_of = |column: u64| {
        region.base + (u128::from(region.len) * u128::from(column) / u128::from(columns)) as u64
    };
    let draw = |column| {
        let (start, end) = (start_of(column), start_of(column + 1));
        let (mut used, mut slack, mut pending, mut free) = ([0; 3], 0, 0, 0);
        while let Some(chunk) = chunks.peek() {
            let overlap = |from: u64, to: u64| to.min(end).saturating_sub(from.max(start));
            let chunk_end = chunk.address + chunk.len;
            let asked_end = chunk.address + chunk.asked;
            let mut in_use = |whose: usize| {
                used[whose] += overlap(chunk.address, asked_end);
                slack += overlap(asked_end, chunk_end);
            };
            match marks.shown(chunk) {
                Shown::Free => free += overlap(chunk.address, chunk_end),
                Shown::Pending => pending += overlap(chunk.address, chunk_end),
                Shown::Used => in_use(0),
                Shown::Lent => in_use(1),
                Shown::Limbo => in_use(2),
            }
            if chunk_end > end {
                break;
            }
            chunks.next();
        }
        let [own, lent, limbo] = used;
        let in_use: u64 = own + lent + limbo;
        let most = in_use.max(slack).max(pending).max(free);
        match most {
            0 => '?',
            _ if in_use == most && limbo >= own.max(lent) => '#',
            _ if in_use == most && lent >= own => 'o',
            _ if in_use == most => '*',
            _ if in_use > 0 => '+',
            _ if slack == most => 'x',
            _ if pending == most => '~',
            _ => '_',
        }
    };
    (0..columns).map(draw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bfc, BfcOptions, Growth, Request, Simulated};

    #[test]
    fn bytes_in_words() {
        let words = [0, 255, 256 << 10, (1 << 20) + (1 << 19), 1 << 30, u64::MAX]
            .map(|bytes| Bytes(bytes).to_string());
        assert_eq!(
            words,
            [
                "0 B",
                "255 B",
                "256 KiB",
                "1.5 MiB",
                "1 GiB",
                "16777216.0 TiB"
            ]
        );
    }

    #[test]
    fn a_report_shows_sizes_and_places() {
        let bfc = Bfc::new(
            BfcOptions::new("demo")
                .limit(64 << 10)
                .growth(Growth::Whole),
            Simulated::new(),
        );
        let held = [16 << 10, 1024, 15 << 10, 300]
            .map(|bytes| bfc.alloc(Request::new(bytes)).expect("room").address);
        bfc.free(held[0]).expect("in use");
        let report = bfc.snapshot().to_string();
        let lines: Vec<&str> = report.lines().collect();
        assert_eq!(
            lines[0],
            "demo: limit 64 KiB, reserved 64 KiB, in use 16.5 KiB, largest free piece 31.5 KiB, fragmentation 34 %"
        );
        assert_eq!(
            lines[1],
            "  from     512 B:       1 chunks,      512 B; in use       1,      512 B, asked for      300 B"
        );
        assert_eq!(lines.len(), 1 + 4 + 1);
        assert_eq!(
            lines[5],
            "  0x010000000000    64 KiB  |________________****************+_______________________________|"
        );
    }

    #[test]
    fn nothing_is_a_report_too() {
        let empty = Snapshot {
            name: "empty".into(),
            ..Snapshot::default()
        };
        assert_eq!(
            empty.to_string(),
            "empty: no limit, reserved 0 B, in use 0 B, largest free piece 0 B, fragmentation 0 %\n"
        );
    }
}
