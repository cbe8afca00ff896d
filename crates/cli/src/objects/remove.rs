//! `gpu-ipc rm`: removes a name, or what never became visible under it.

use clap::Args as Arguments;
use gpu_ipc::broker::server::listing::Row;
use gpu_ipc::broker::{Epoch, ObjectError};

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
    let whole = options.epoch.is_none();
    let unfinished = rows().find(|row| row.epoch == 0).filter(|_| whole);
    if options.force && unfinished.is_some() {
        match client.abort_unfinished(name) {
            // It was committed meanwhile, and is removed below.
            Ok(()) | Err(ObjectError::NotFound { .. }) => {}
            Err(error) => return Err(explain(&error)),
        }
    }
    let epoch = Epoch(options.epoch.unwrap_or(0));
    match (client.remove_epoch(name, epoch), unfinished) {
        (Ok(_), _) => Ok(()),
        (Err(ObjectError::NotFound { .. }), Some(_)) if options.force => Ok(()),
        (
            Err(ObjectError::NotFound { .. }),
            Some(Row {
                writer: Some(writer),
                ..
            }),
        ) => Err(format!(
            "{name} was never committed; process {} ({}) fills it: end that, or abort it with --force",
            writer.pid, writer.command
        )),
        (Err(error), _) => Err(explain(&error)),
    }
}
