//! A snapshot as a picture.

use std::fmt::Write;

use super::text::Bytes;
use super::{ChunkSnapshot, ChunkState, RegionSnapshot, Snapshot};

/// Pixels of the longest region.
const WIDTH: f64 = 1000.0;
/// Pixels of a region's row, with its label.
const ROW: u64 = 34;
/// Pixels above the first row.
const TOP: u64 = 64;

/// The states, their colours, and what the legend calls them.
const LEGEND: [(ChunkState, &str, &str); 3] = [
    (ChunkState::Used, "#4477aa", "in use"),
    (ChunkState::Pending, "#ccbb44", "pending"),
    (ChunkState::Free, "#e6e6e6", "free"),
];

impl Snapshot {
    /// Draws the regions, one row each, with a chunk's size when the pointer rests on it.
    ///
    /// Chunks narrower than a pixel are drawn as one with their neighbours, so the picture stays small whatever the
    /// heap. A region that another process may have mapped has a red frame.
    pub fn svg(&self) -> String {
        let height = TOP + ROW * self.regions.len() as u64 + 8;
        let mut svg = format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{height}" viewBox="0 0 {w} {height}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="10" y="20" font-size="14">{name}</text>
<text x="10" y="38">{summary}</text>
"##,
            w = WIDTH + 20.0,
            name = escape(&self.name),
            summary = escape(&self.summary()),
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
        let longest = self.regions.iter().map(|region| region.len).max().unwrap_or(1).max(1);
        for (row, region) in self.regions.iter().enumerate() {
            draw(&mut svg, region, TOP + ROW * row as u64, WIDTH / longest as f64);
        }
        svg += "</svg>\n";
        svg
    }
}

fn draw(svg: &mut String, region: &RegionSnapshot, y: u64, scale: f64) {
    put(
        svg,
        format_args!(r#"<text x="10" y="{}" font-size="10">{:#x}, {}</text>"#, y + 10, region.base, Bytes(region.len)),
    );
    // Narrow chunks gather until together they make a pixel.
    let mut run: Option<Run> = None;
    for chunk in &region.chunks {
        let end = chunk.address + chunk.len;
        if (chunk.len as f64 * scale) >= 1.0 {
            flush(svg, region, run.take(), y, scale);
            rect(svg, region, (chunk.address, end), chunk.state, &title(chunk), (y, scale));
            continue;
        }
        let gathered = run.get_or_insert(Run { start: chunk.address, end, state: chunk.state, chunks: 0 });
        gathered.end = end;
        gathered.chunks += 1;
        // What is in use is what somebody looks for.
        if chunk.state == ChunkState::Used {
            gathered.state = ChunkState::Used;
        }
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
    state: ChunkState,
    chunks: u64,
}

fn flush(svg: &mut String, region: &RegionSnapshot, run: Option<Run>, y: u64, scale: f64) {
    if let Some(Run { start, end, state, chunks }) = run {
        rect(svg, region, (start, end), state, &format!("{chunks} chunks, {}", Bytes(end - start)), (y, scale));
    }
}

fn title(chunk: &ChunkSnapshot) -> String {
    match chunk.state {
        ChunkState::Free => format!("free, {}", Bytes(chunk.len)),
        ChunkState::Used => format!("allocation {}, {} of {}", chunk.number, Bytes(chunk.asked), Bytes(chunk.len)),
        ChunkState::Pending => format!("pending, {}", Bytes(chunk.len)),
    }
}

fn rect(
    svg: &mut String,
    region: &RegionSnapshot,
    (start, end): (u64, u64),
    state: ChunkState,
    title: &str,
    (y, scale): (u64, f64),
) {
    let colour = LEGEND.iter().find(|(other, ..)| *other == state).map_or("#000000", |(_, colour, _)| colour);
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
        let bfc = Bfc::new(BfcOptions::new("<a&b>").limit(1 << 20).growth(Growth::Whole), Simulated::new());
        bfc.alloc(Request::new(256 << 10)).expect("room");
        let svg = bfc.snapshot().svg();
        assert!(svg.contains("&lt;a&amp;b&gt;") && !svg.contains("<a&b>"), "names are no markup");
        assert!(svg.contains(r##"x="10.00" y="77" width="250.00" height="16" fill="#4477aa""##), "{svg}");
        assert!(svg.contains(r##"x="260.00" y="77" width="750.00" height="16" fill="#e6e6e6""##), "{svg}");
        assert_eq!(svg.matches("<rect").count(), svg.matches("</rect>").count() + svg.matches("/>").count());
    }

    #[test]
    fn a_picture_of_many_chunks_stays_small() {
        let bfc = Bfc::new(BfcOptions::new("many").limit(64 << 20).growth(Growth::Whole), Simulated::new());
        for _ in 0..100_000 {
            bfc.alloc(Request::new(256)).expect("room");
        }
        let svg = bfc.snapshot().svg();
        assert!(svg.matches("<title>").count() <= 1001, "{}", svg.matches("<title>").count());
        assert!(svg.len() < 300_000, "{} bytes", svg.len());
    }
}
