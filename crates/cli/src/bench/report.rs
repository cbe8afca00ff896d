//! What a run measured, for people and for programs.

use std::fs;
use std::path::Path;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{ContentArrangement, Table};
use gpu_ipc::{BackendKind, Gpu};
use serde::{Deserialize, Serialize};

use super::row::{Row, digits, fraction, show};
use crate::failure::Result;

/// Where it was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// The backend's name.
    pub backend: String,
    /// The device's name.
    pub device: String,
    /// The vendor's driver; empty where there is none.
    pub driver: String,
    /// The kernel.
    pub kernel: String,
    /// Processors that may be used.
    pub cores: usize,
    /// The commit, if the program knows.
    pub commit: Option<String>,
    /// Fewer samples than figures need.
    pub quick: bool,
    /// Built without optimisation: the figures say nothing.
    pub debug: bool,
    /// Jobs that people do, beside what they use today.
    #[serde(default)]
    pub jobs: bool,
    /// Cargo's profile that the program was built with; empty in reports of programs that did not
    /// say.
    #[serde(default)]
    pub profile: String,
}

/// The profile for measurements.
const MEASURES: &str = "dist";

impl Machine {
    /// Looks where this is.
    pub fn of(gpu: &Gpu, quick: bool) -> Machine {
        let system = rustix::system::uname();
        Machine {
            backend: gpu.kind().name().to_owned(),
            device: gpu.info().name.clone(),
            driver: driver(gpu.kind()),
            kernel: system.release().to_string_lossy().into_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            commit: commit(),
            quick,
            debug: cfg!(debug_assertions),
            jobs: false,
            profile: env!("GPU_IPC_PROFILE").to_owned(),
        }
    }
}

/// Says which driver runs.
fn driver(kind: BackendKind) -> String {
    let Some(path) = kind.version_file() else {
        return String::new();
    };
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    // NVIDIA's line is a sentence with the version in it.
    let version = line
        .split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'));
    version.unwrap_or(line.trim()).to_owned()
}

/// The commit, from the environment or from the file that a bundle has beside the program.
fn commit() -> Option<String> {
    let named = std::env::var("GPU_IPC_COMMIT").ok();
    let beside = || fs::read_to_string(std::env::current_exe().ok()?.with_file_name("COMMIT")).ok();
    let text = named.or_else(beside)?;
    text.lines()
        .next()
        .map(|line| line.trim().to_owned())
        .filter(|line| !line.is_empty())
}

/// What a run measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Every row has numbers.
    pub ok: bool,
    /// Where.
    #[serde(flatten)]
    pub place: Machine,
    /// Everything that was measured.
    pub rows: Vec<Row>,
}

impl Report {
    /// Puts one together.
    pub fn new(place: Machine, rows: Vec<Row>) -> Report {
        Report {
            ok: !rows.is_empty() && rows.iter().all(|row| row.error.is_none()),
            place,
            rows,
        }
    }

    /// Reads what an earlier run wrote.
    pub fn read(file: &Path) -> Result<Report> {
        let name = file.display();
        let text = fs::read_to_string(file).map_err(|e| format!("{name}: {e}"))?;
        serde_json::from_str(&text).map_err(|e| {
            format!("{name} is not what `gpu-ipc bench --json` writes of a run: {e}").into()
        })
    }

    /// Makes one JSON object.
    pub fn json(&self) -> String {
        serde_json::to_string(self)
            .unwrap_or_else(|error| format!("{{\"ok\":false,\"error\":\"{error}\"}}"))
    }

    /// Makes what people read.
    pub fn text(&self, width: Option<u16>) -> String {
        let place = &self.place;
        let mut text = format!("{}, {}", place.device, place.backend);
        for (what, value) in [
            ("driver", Some(&place.driver)),
            ("commit", place.commit.as_ref()),
        ] {
            if let Some(value) = value.filter(|value| !value.is_empty()) {
                text += &format!(", {what} {value}");
            }
        }
        text += &format!(", Linux {}, {} cores\n", place.kernel, place.cores);
        if place.jobs {
            text += &self.slower();
        }
        text += &self.table(width).to_string();
        let mut last = "";
        for row in self.rows.iter().filter(|row| row.error.is_none()) {
            if row.group() != last {
                last = row.group();
                let beside = if place.jobs { "beside it" } else { "its floor" };
                text += &format!("\n{last}: {}; {beside}: {}", row.what, row.floor_is);
            }
        }
        for row in &self.rows {
            if let Some(why) = &row.error {
                text += &format!("\n{} failed: {why}", row.row);
            }
            if let Some(note) = &row.note {
                text += &format!("\n{}: {note}", row.row);
            }
        }
        let goals = self.rows.iter().filter_map(|row| row.met);
        let (met, all) = goals.fold((0, 0), |(met, all), one| (met + u32::from(one), all + 1));
        text += &format!("\n{met} of {all} goals reached");
        if place.quick {
            text += "; a quick run: too few samples for figures";
        }
        if place.debug {
            text += "; a debug build: the figures say nothing";
        }
        if !place.profile.is_empty() {
            text += &format!("\nbuilt with the profile {}", place.profile);
        }
        if place.profile != MEASURES && !place.profile.is_empty() {
            text += ", which does not inline across crates: `cargo build --profile dist -p gpu-ipc-cli` builds \
                     target/dist/gpu-ipc, whose figures the documents give";
        }
        text
    }

    /// Says what is slower than what people use today, the worst first.
    fn slower(&self) -> String {
        let mut slower: Vec<(f64, &Row)> = self
            .rows
            .iter()
            .filter_map(|row| Some((row.ratio?, row)))
            .filter(|(ratio, _)| *ratio > 1.0)
            .collect();
        slower.sort_by(|a, b| b.0.total_cmp(&a.0));
        if self.rows.iter().all(|row| row.ratio.is_none()) {
            return "nothing was compared\n".to_owned();
        }
        if slower.is_empty() {
            return "nothing is slower or larger than what it is beside\n".to_owned();
        }
        let names: Vec<String> = slower
            .iter()
            .map(|(ratio, row)| format!("{} {} x", row.row, digits(*ratio)))
            .collect();
        format!(
            "slower or larger than what it is beside: {}\n",
            names.join(", ")
        )
    }

    fn table(&self, width: Option<u16>) -> Table {
        let mut table = Table::new();
        table
            .load_style(UTF8_FULL_CONDENSED)
            .set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width(width.unwrap_or(132));
        let [floor, baseline] = if self.place.jobs {
            ["raw calls", "today"]
        } else {
            ["floor", "baseline"]
        };
        table.set_header([
            "row", "median", "p99", floor, "ratio", baseline, "samples", "goal", "met",
        ]);
        for row in &self.rows {
            let number =
                |value: Option<f64>| value.map_or_else(String::new, |value| show(value, row.unit));
            table.add_row([
                row.row.clone(),
                number(row.ours.map(|f| f.median)),
                number(row.ours.map(|f| f.p99)),
                number(row.floor.map(|f| f.median)),
                row.ratio.map_or_else(String::new, fraction),
                number(row.baseline.map(|f| f.median)),
                row.ours
                    .map_or_else(String::new, |f| format!("{} x {}", f.samples, f.calls)),
                row.goal.clone().unwrap_or_default(),
                match (&row.error, row.met) {
                    (Some(_), _) => "failed",
                    (None, Some(true)) => "yes",
                    (None, Some(false)) => "no",
                    (None, None) => "",
                }
                .to_owned(),
            ]);
        }
        table
    }
}
