//! Many runs as a table and as data.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::outcome::Outcome;
use crate::scenario::Trouble;
use crate::world::{Policy, run};

/// The sizes of the table.
pub const HOSTS: [u32; 7] = [2, 8, 9, 64, 256, 1024, 4096];

/// All runs.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What the hosts were drawn from.
    pub seed: u64,
    /// With the shipped plan.
    pub plan: Vec<Outcome>,
    /// The control, with equal hosts: everybody reads from the origin.
    pub origin_only: Vec<Outcome>,
}

impl Report {
    /// Runs each kind of trouble with each number of hosts up to a most.
    #[must_use]
    pub fn new(seed: u64, most: u32) -> Report {
        let sizes = || HOSTS.into_iter().filter(move |&hosts| hosts <= most);
        let with = |trouble, policy| sizes().map(move |hosts| run(hosts, trouble, seed, policy));
        let plan = Trouble::EACH
            .into_iter()
            .flat_map(|trouble| with(trouble, Policy::Plan))
            .collect();
        Report {
            seed,
            plan,
            origin_only: with(Trouble::None, Policy::OriginOnly).collect(),
        }
    }

    /// Writes the table in Markdown.
    #[must_use]
    pub fn table(&self) -> String {
        let head = [
            "hosts",
            "trouble",
            "died",
            "rounds",
            "optimum",
            "ratio",
            "chain",
            "origin's reads",
            "busiest link",
            "read",
            "asked",
        ];
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN).set_header(head);
        let plan = self.plan.iter().map(|row| (row.trouble.name(), row));
        let control = self
            .origin_only
            .iter()
            .map(|row| ("control: origin only", row));
        for (trouble, row) in plan.chain(control) {
            table.add_row([
                row.hosts.to_string(),
                trouble.to_owned(),
                row.died.to_string(),
                format!("{:.1}", row.rounds),
                format!("{:.0}", row.optimum),
                format!("{:.2}", row.rounds / row.optimum),
                row.depth.to_string(),
                row.origin_reads.to_string(),
                format!("{:.1}", row.busiest),
                format!("{:.2}", row.read_per_host),
                format!("{:.1}", row.asked_per_host),
            ]);
        }
        for place in [0, 2, 3, 4, 5, 6, 7, 8, 9, 10] {
            if let Some(column) = table.column_mut(place) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.to_string()
    }
}
