//! `gpu-ipc rm`: removes a name, or what never became visible under it.

use clap::Args as Arguments;
use gpu_ipc::broker::server::listing::Row;
use gpu_ipc::broker::{Client, Epoch, Identity};

use super::{Asked, any_gpu};
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
    /// Also abort what is being filled, and, as the broker's user, remove what is another user's
    #[arg(long)]
    pub force: bool,
    /// Which broker.
    #[command(flatten)]
    pub asked: Asked,
}

/// Removes it; a process that has it mapped keeps it.
pub fn run(options: &RmOptions) -> Outcome {
    match remove(options) {
        Ok(()) => Outcome::Good,
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

fn remove(options: &RmOptions) -> Result<(), String> {
    let name = &options.name;
    let client = options.asked.connect(any_gpu()?, "gpu-ipc rm")?;
    let listing = client.list().map_err(|error| explain(&error))?;
    let rows = || listing.objects.iter().filter(|row| row.name == *name);
    let own = rustix::process::geteuid().as_raw();
    let others = rows().find(|row| row.owner != own);
    if let Some(row) = others.filter(|_| !options.force) {
        let owner = row.owner;
        return Err(format!(
            "{name} belongs to uid {owner}; the broker's user removes it with --force"
        ));
    }
    let unfinished: Vec<&Row> = rows().filter(|row| row.epoch == 0).collect();
    if options.epoch.is_none() && options.force {
        unfinished.iter().try_for_each(|row| abort(&client, row))?;
    }
    let is_there = rows().any(|row| row.epoch > 0);
    if options.epoch.is_none() && !unfinished.is_empty() && !is_there {
        return match unfinished[0].writer.as_ref().filter(|_| !options.force) {
            Some(writer) => Err(format!(
                "{name} was never committed; process {} ({}) fills it: end that, or abort it with --force",
                writer.pid, writer.command
            )),
            None => Ok(()),
        };
    }
    let epoch = Epoch(options.epoch.unwrap_or(0));
    let removed = client.remove_epoch(name, epoch);
    removed.map(drop).map_err(|error| explain(&error))
}

/// Gives up an object that another process fills: its memory goes when that process lets go.
fn abort(client: &Client, row: &Row) -> Result<(), String> {
    let identity: Identity = row
        .identity
        .parse()
        .map_err(|_| format!("{} is no identity", row.identity))?;
    client.give_up(identity).map_err(|error| explain(&error))
}
