//! A snapshot as a picture.

use std::fmt::Write;

use super::shown::{Marks, Shown};
use super::text::Bytes;
use super::{ChunkSnapshot, RegionSnapshot, Snapshot};

/// Pixels of the longest region.
const WIDTH: f64 = 1000.0;
/// Pixels of a region's row, with its label.
const ROW: u64 = 34;
/// Pixels above the first row, and of the line of a holder.
const TOP: u64 = 64;
const LINE: u64 = 15;
/// The largest number of holders that are named.
const NAMED: usize = 12;

/// What chunks are shown as, the colours, and what the legend calls them.
const LEGEND: [(Shown, &str, &str); 5] = [
    (Shown::Used, "#4477aa", "in use"),
    (Shown::Lent, "#44aa99", "lent"),
    (Shown::Limbo, "#ee7733", "in limbo"),
    (Shown::Pending, "#ccbb44", "pending"),
    (Shown::Free, "#e6e6e6", "free"),
];

impl Snapshot {
    /// Draws the regions, one row each, with a chunk's size when the pointer rests on it.
    ///
    /// Chunks narrower than a pixel are drawn as one with their neighbours, so the picture stays
    /// small whatever the heap. A region that another process may have mapped has a red frame. The
    /// holders are listed below the legend.
    pub fn svg(&self) -> String {
        let named = self.holders.len().min(NAMED) as u64 + u64::from(self.holders.len() > NAMED);
        let top = TOP + LINE * named;
        let height = top + ROW * self.regions.len() as u64 + 8;
        let mut svg = format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{height}" viewBox="0 0 {w} {height}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="10" y="20" font-size="14">{name}</text>
<text x="10" y="38">{summary}</text>
"##,
            w = WIDTH + 20.0,
            name = escape(&self.name),
            summary = escape(&self.sums()),
        );
        for (at, (_, colour, name)) in LEGEND.iter().enumerate() {
            let x = 10 + 100 * at;
            put(
                &mut svg,
                format_args!(
                    r#"<rect x="{x}" y="46" width="10" height="10" fill="{colour}" stroke="black" stroke-width="0.3"/><text x="{}" y="55">{name}</text>"#,
                    x + 14
                ),
            );
        }
        put(
            &mut svg,
            format_args!(
                r##"<rect x="520" y="46" width="10" height="10" fill="none" stroke="#cc3311"/><text x="534" y="55">region that another process may have mapped</text>"##
            ),
        );
        let more = (self.holders.len() > NAMED)
            .then(|| format!("and {} more", self.holders.len() - NAMED));
        let names = self
            .holders
            .iter()
            .take(NAMED)
            .enumerate()
            .map(|(place, holder)| {
                let limbo = match self.limbo_of(place) {
                    0 => String::new(),
                    bytes => format!(", {} of it in limbo", Bytes(bytes)),
                };
                format!("{holder}{limbo}")
            });
        for (line, name) in (1..).zip(names.chain(more)) {
            put(
                &mut svg,
                format_args!(
                    r#"<text x="10" y="{}">{}</text>"#,
                    55 + LINE * line,
                    escape(&name)
                ),
            );
        }
        let marks = Marks::of(self);
        let longest = self
            .regions
            .iter()
            .map(|region| region.len)
            .max()
            .unwrap_or(1)
            .max(1);
        for (row, region) in self.regions.iter().enumerate() {
            draw(
                &mut svg,
                region,
                &marks,
                top + ROW * row as u64,
                WIDTH / longest as f64,
            );
        }
        svg += "</svg>\n";
        svg
    }
}

fn draw(svg: &mut String, region: &RegionSnapshot, marks: &Marks<'_>, y: u64, scale: f64) {
    put(
        svg,
        format_args!(
            r#"<text x="10" y="{}" font-size="10">{:#x}, {}</text>"#,
            y + 10,
            region.base,
            Bytes(region.len)
        ),
    );
    // Narrow chunks gather until together they make a pixel.
    let mut run: Option<Run> = None;
    for chunk in &region.chunks {
        let end = chunk.address + chunk.len;
        let shown = marks.shown(chunk);
        if (chunk.len as f64 * scale) >= 1.0 {
            flush(svg, region, run.take(), y, scale);
            rect(
                svg,
                region,
                (chunk.address, end),
                shown,
                &title(chunk, marks),
                (y, scale),
            );
            continue;
        }
        let gathered = run.get_or_insert(Run {
            start: chunk.address,
            end,
            shown,
            chunks: 0,
        });
        gathered.end = end;
        gathered.chunks += 1;
        // Readers look for what is in use, most of all for limbo.
        gathered.shown = gathered.shown.max(shown);
        if (end - gathered.start) as f64 * scale >= 1.0 {
            flush(svg, region, run.take(), y, scale);
        }
    }
    flush(svg, region, run, y, scale);
    let stroke = if region.pinned { "#cc3311" } else { "#000000" };
    put(
        svg,
        format_args!(
            r#"<rect x="10" y="{}" width="{:.2}" height="16" fill="none" stroke="{stroke}"/>"#,
            y + 13,
            region.len as f64 * scale
        ),
    );
}

/// Chunks too narrow to be seen one by one.
struct Run {
    start: u64,
    end: u64,
    shown: Shown,
    chunks: u64,
}

fn flush(svg: &mut String, region: &RegionSnapshot, run: Option<Run>, y: u64, scale: f64) {
    if let Some(Run {
        start,
        end,
        shown,
        chunks,
    }) = run
    {
        rect(
            svg,
            region,
            (start, end),
            shown,
            &format!("{chunks} chunks, {}", Bytes(end - start)),
            (y, scale),
        );
    }
}

fn title(chunk: &ChunkSnapshot, marks: &Marks<'_>) -> String {
    let held = match marks.shown(chunk) {
        Shown::Free => return format!("free, {}", Bytes(chunk.len)),
        Shown::Pending => return format!("pending, {}", Bytes(chunk.len)),
        Shown::Used => String::new(),
        Shown::Lent => format!(", held by {}", marks.holders(chunk.address).join(", ")),
        Shown::Limbo => format!(
            ", in limbo, held by {}",
            marks.holders(chunk.address).join(", ")
        ),
    };
    format!(
        "allocation {}, {} of {}{held}",
        chunk.number,
        Bytes(chunk.asked),
        Bytes(chunk.len)
    )
}

fn rect(
    svg: &mut String,
    region: &RegionSnapshot,
    (start, end): (u64, u64),
    shown: Shown,
    title: &str,
    (y, scale): (u64, f64),
) {
    let colour = LEGEND
        .iter()
        .find(|(other, ..)| *other == shown)
        .map_or("#000000", |(_, colour, _)| colour);
    put(
        svg,
        format_args!(
            r##"<rect x="{:.2}" y="{}" width="{:.2}" height="16" fill="{colour}" stroke="#ffffff" stroke-width="0.2"><title>{}</title></rect>"##,
            10.0 + (start - region.base) as f64 * scale,
            y + 13,
            (end - start) as f64 * scale,
            escape(title),
        ),
    );
}

/// Adds a line.
fn put(svg: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(svg, "{line}").expect("a string takes everything");
}

/// Keeps names from being markup.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            // XML 1.0 has no place for these, however they are written.
            '\0'..='\x08' | '\x0b' | '\x0c' | '\x0e'..='\x1f' => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use crate::{Bfc, BfcOptions, Growth, Request, Simulated};

    #[test]
    fn every_wide_chunk_has_a_rectangle_of_its_length() {
        let bfc = Bfc::new(
            BfcOptions::new("<a&b>")
                .limit(1 << 20)
                .growth(Growth::Whole),
            Simulated::new(),
        );
        bfc.alloc(Request::new(256 << 10)).expect("room");
        let svg = bfc.snapshot().svg();
        assert!(
            svg.contains("&lt;a&amp;b&gt;") && !svg.contains("<a&b>"),
            "names are no markup"
        );
        assert!(
            svg.contains(r##"x="10.00" y="77" width="250.00" height="16" fill="#4477aa""##),
            "{svg}"
        );
        assert!(
            svg.contains(r##"x="260.00" y="77" width="750.00" height="16" fill="#e6e6e6""##),
            "{svg}"
        );
        assert_eq!(
            svg.matches("<rect").count(),
            svg.matches("</rect>").count() + svg.matches("/>").count()
        );
    }

    #[test]
    fn a_picture_of_many_chunks_stays_small() {
        let bfc = Bfc::new(
            BfcOptions::new("many")
                .limit(64 << 20)
                .growth(Growth::Whole),
            Simulated::new(),
        );
        for _ in 0..100_000 {
            bfc.alloc(Request::new(256)).expect("room");
        }
        let svg = bfc.snapshot().svg();
        assert!(
            svg.matches("<title>").count() <= 1001,
            "{}",
            svg.matches("<title>").count()
        );
        assert!(svg.len() < 300_000, "{} bytes", svg.len());
    }
}
