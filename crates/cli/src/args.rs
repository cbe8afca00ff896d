//! What the program can be told.

use std::path::PathBuf;

use clap::{Args as Group, Parser, Subcommand, ValueEnum};
use gpu_ipc::BackendKind;

/// Share GPU memory between processes, and free it when the last one is done.
#[derive(Parser, Debug)]
#[command(name = "gpu-ipc", version, arg_required_else_help = true)]
#[command(after_help = "Exit status: 0 good, 1 something was found, 2 wrong usage, 3 not available here.")]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// A command.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Show the main job with real processes: share, hold, die, reclaim
    #[command(after_help = "\
Examples:
  gpu-ipc demo                                     on the first GPU there is, else on shared memory
  gpu-ipc demo --backend host --consumers 16       sixteen consumers, without a GPU
  gpu-ipc demo --blocks 2000 --size 64KiB --json   one JSON object on standard output, for programs

Exit status: 0 if nothing leaked, was used again too early, or had wrong contents; else 1.")]
    Demo(DemoOptions),
    /// List the sessions on this host: what each holds, and who holds it
    #[command(after_help = "\
Examples:
  gpu-ipc ls                           this user's sessions in the runtime directory
  gpu-ipc ls --socket /run/app/s       the one that listens there; exit status 1 if it does not answer
  gpu-ipc ls --json | jq '.sessions[].holders'

A session that does not answer within --timeout shows as hung: its process hangs or is stopped.")]
    Ls(LsOptions),
    /// Show the sessions on this host, live
    #[command(after_help = "\
Examples:
  gpu-ipc top                          this user's sessions, every second
  gpu-ipc top --interval 0.2 --socket /run/app/s

Keys: up and down choose a session, p pauses, q quits.")]
    Top(TopOptions),
    /// A consumer of the demo (started by it)
    #[command(hide = true)]
    DemoConsumer(ConsumerOptions),
}

/// Which backend to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum BackendChoice {
    /// The first that has a device: CUDA, HIP, then shared memory.
    Auto,
    /// Shared memory instead of a GPU.
    Host,
    /// NVIDIA.
    Cuda,
    /// AMD.
    Hip,
}

impl BackendChoice {
    /// Returns the backends to try, in order.
    pub fn kinds(self) -> &'static [BackendKind] {
        match self {
            BackendChoice::Auto => &BackendKind::ALL,
            BackendChoice::Host => &[BackendKind::Host],
            BackendChoice::Cuda => &[BackendKind::Cuda],
            BackendChoice::Hip => &[BackendKind::Hip],
        }
    }
}

/// What the demo can be told.
#[derive(Group, Debug)]
pub struct DemoOptions {
    /// Where the memory lies
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendChoice,
    /// Consumer processes that live to the end; two more are killed
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub consumers: u32,
    /// Blocks that are shared
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub blocks: u32,
    /// Bytes of each block: a number, or one with KiB, MiB or GiB behind it
    #[arg(long, value_name = "BYTES", default_value = "64KiB", value_parser = bytes)]
    pub size: u64,
    /// What the contents of the blocks are made from
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Which sessions to ask, and for how long.
#[derive(Group, Debug)]
pub struct Where {
    /// Ask the session that listens here, not those in the runtime directory; may be given several times
    #[arg(long, value_name = "PATH")]
    pub socket: Vec<PathBuf>,
    /// Seconds that each session has to answer
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = seconds)]
    pub timeout: f64,
}

/// What `ls` can be told.
#[derive(Group, Debug)]
pub struct LsOptions {
    /// Where the sessions are.
    #[command(flatten)]
    pub place: Where,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

/// What `top` can be told.
#[derive(Group, Debug)]
pub struct TopOptions {
    /// Where the sessions are.
    #[command(flatten)]
    pub place: Where,
    /// Seconds between two looks
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = seconds)]
    pub interval: f64,
}

/// What a consumer of the demo is told.
#[derive(Group, Debug)]
pub struct ConsumerOptions {
    /// The producer's backend
    #[arg(long)]
    pub backend: BackendChoice,
    /// The producer's device
    #[arg(long)]
    pub device: String,
    /// The producer's socket
    #[arg(long)]
    pub socket: PathBuf,
}

/// Reads a time that a person would wait.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("{text:?} is no number of seconds from 0.01 to 3600")),
    }
}

/// Reads a number of bytes, a multiple of 8 for the demo's words.
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        other => return Err(format!("the unit is {other}, but must be KiB, MiB or GiB")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{digits:?} is no number"))?;
    match number.checked_mul(unit) {
        Some(bytes) if bytes >= 8 && bytes % 8 == 0 => Ok(bytes),
        _ => Err(format!("{text} is no multiple of 8 bytes from 8 on")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(bytes("64KiB"), Ok(65_536));
        assert_eq!(bytes("8"), Ok(8));
        assert_eq!(bytes("1GiB"), Ok(1 << 30));
        for wrong in ["", "KiB", "7", "0", "1kb", "99999999999GiB", "-8"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
