//! The figures as the tables of `docs/ALLOCATORS.md`.

use std::fmt::Write;
use std::fs;

use crate::Figures;

/// The rows, in the order in which allocators are run with a script.
pub const ROWS: [&str; 9] = [
    "**`Bfc`**",
    "`Bfc`, share 1 (TensorFlow's rule)",
    "`Bfc`, share 0",
    "**`ThreadHeaps`**",
    "`offset-allocator`, same job",
    "`range-alloc`, same job",
    "nothing, same job",
    "`offset-allocator` as it comes",
    "`range-alloc` as it comes",
];

/// One script with each of them; nothing where it was not run.
pub type Column = [Option<Figures>; ROWS.len()];

/// Which of its figures a batch is shown by.
#[derive(Clone, Copy)]
pub enum Shown {
    /// What it costs.
    Median,
    /// What it costs where nobody else takes the machine's time.
    Least,
}

/// Says on what machine, and how busy that was before.
pub fn machine() -> String {
    let model = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = model
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("a processor without a name", |(_, model)| model);
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load
        .split_whitespace()
        .next()
        .unwrap_or("unknown")
        .to_owned();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{cores} cores of {model}, load {load} before")
}

/// Writes the rows that have figures.
pub fn markdown(corner: &str, columns: &[(String, Column)], shown: Shown) -> String {
    let mut text = format!("| {corner} |");
    for (heading, _) in columns {
        let _ = write!(text, " {heading} |");
    }
    text += "\n|---|";
    text += &"---|".repeat(columns.len());
    for (at, row) in ROWS.into_iter().enumerate() {
        if columns.iter().all(|(_, column)| column[at].is_none()) {
            continue;
        }
        let _ = write!(text, "\n| {row} |");
        for (_, column) in columns {
            let _ = write!(text, " {} |", cell(column[at].as_ref(), shown));
        }
    }
    text
}

fn cell(figures: Option<&Figures>, shown: Shown) -> String {
    let Some(figures) = figures else {
        return "-".into();
    };
    let nanos = match shown {
        Shown::Median => figures.median,
        Shown::Least => figures.least,
    };
    let time = if nanos < 9.95 {
        format!("{nanos:.1} ns")
    } else {
        format!("{nanos:.0} ns")
    };
    figures.waste.map_or(time.clone(), |waste| {
        format!("{time}, {:.1} %", 100.0 * waste)
    })
}
