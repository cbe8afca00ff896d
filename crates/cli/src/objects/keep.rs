//! `gpu-ipc keep`: holds the descriptors of a broker, and starts it again when it dies.

use std::process::Command;

use clap::Args as Arguments;
use gpu_ipc::broker::keeper::process::{End, Keeper};

use super::BrokerDir;
use crate::device::explain;
use crate::{Outcome, output};

/// Options of a keeper.
#[derive(Arguments, Debug)]
pub struct KeepOptions {
    /// Which broker.
    #[command(flatten)]
    pub place: BrokerDir,
    /// Take every descriptor over from the keeper that is in the directory, which ends then; its
    /// broker lives on
    #[arg(long)]
    pub take_over: bool,
    /// Most descriptors to keep, one for each region and manifest [default: the process's limit]
    #[arg(long, value_name = "N")]
    pub most: Option<usize>,
    /// The broker's command, with the same --dir
    #[arg(last = true, required = true, num_args = 1..)]
    pub command: Vec<String>,
}

/// Keeps until the broker ends by itself.
pub fn run(options: &KeepOptions) -> Outcome {
    match keep(options) {
        Ok(outcome) => outcome,
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

fn keep(options: &KeepOptions) -> Result<Outcome, String> {
    let dir = options.place.path()?;
    let open = if options.take_over {
        Keeper::take_over
    } else {
        Keeper::open
    };
    let mut keeper = open(&dir, options.most).map_err(|error| explain(&error))?;
    let (program, arguments) = options.command.split_first().ok_or("no command")?;
    let start = || {
        let mut command = Command::new(program);
        command.args(arguments);
        command
    };
    let end = keeper.run(start).map_err(|error| explain(&error))?;
    Ok(match end {
        End::Broker(status) if !status.success() => Outcome::Finding,
        End::Broker(_) | End::Replaced => Outcome::Good,
    })
}
