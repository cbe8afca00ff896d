//! What a run is asked for.

use std::time::Duration;

use clap::{Args as Group, ValueEnum};
use serde::Serialize;

use gpu_ipc_cli::choice::BackendChoice;

/// A process that takes longer to release its blocks counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Options of `torture`.
#[derive(Group, Debug)]
pub struct TortureOptions {
    /// Seconds to run
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(1..=604_800)
    )]
    pub seconds: u64,
    /// Random seed; printed, and chosen by the system by default
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Consumer processes at a time
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        default_value_t = 6,
        value_parser = clap::value_parser!(u32).range(1..=256)
    )]
    pub consumers: u32,
    /// Which backend to use
    #[arg(long, value_enum, default_value = "host")]
    pub backend: BackendChoice,
    /// Torment writers and readers of objects, their broker and its keeper, instead of sessions
    #[arg(long)]
    pub broker: bool,
    /// Torment holders and readers of pools, their broker and its keeper, instead of sessions
    #[arg(long, conflicts_with = "broker")]
    pub pools: bool,
    /// Lend memory by a method known to be wrong instead of by the library; the run must find the
    /// defect
    #[arg(long, value_enum)]
    pub control: Option<Control>,
    /// Print one JSON object instead of a text
    #[arg(long)]
    pub json: bool,
}

/// A wrong way of lending, whose defect a run must find.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Control {
    /// A plain shared counter: it leaks when its holder is killed.
    Counter,
    /// A time-out that frees what a stopped process holds.
    BlindTimeout,
    /// The library over memory that grows in place and forgets its pins: pieces go back while they
    /// are mapped.
    UnpinnedPiece,
    /// With --broker: a broker that publishes at the commit's message, without reading the slots.
    BlindBroker,
    /// With --broker: a keeper is replaced by ending it and its broker, and nothing is taken over.
    LossyUpgrade,
    /// With --pools: the CPU writes the seal of a block at the call, and not the stream behind the
    /// work that fills it.
    EarlySeal,
}

impl Control {
    /// Returns the option of the torture that it is for; `None` for the one among sessions.
    pub fn goes_with(self) -> Option<&'static str> {
        match self {
            Control::BlindBroker | Control::LossyUpgrade => Some("--broker"),
            Control::EarlySeal => Some("--pools"),
            Control::Counter | Control::BlindTimeout | Control::UnpinnedPiece => None,
        }
    }

    /// Says whether it lends by something else than the library.
    pub fn is_no_library(self) -> bool {
        self != Control::UnpinnedPiece
    }
}
