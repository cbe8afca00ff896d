//! `gpu-ipc rm`: removes a name.

use clap::Args as Arguments;
use gpu_ipc::broker::Epoch;

use super::{BrokerDir, any_gpu};
use crate::device::explain;
use crate::{Outcome, output};

/// Options of `rm`.
#[derive(Arguments, Debug)]
pub struct RmOptions {
    /// The name
    pub name: String,
    /// Only this epoch
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub epoch: Option<u64>,
    /// Which broker.
    #[command(flatten)]
    pub place: BrokerDir,
}

/// Removes it; a process that has it mapped keeps it.
pub fn run(options: &RmOptions) -> Outcome {
    let removed = any_gpu()
        .and_then(|gpu| options.place.connect(gpu, "gpu-ipc rm"))
        .and_then(|client| {
            let epoch = Epoch(options.epoch.unwrap_or(0));
            client
                .remove_epoch(&options.name, epoch)
                .map_err(|error| explain(&error))
        });
    match removed {
        Ok(_) => Outcome::Good,
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}
