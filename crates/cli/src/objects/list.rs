//! `gpu-ipc objects`: what a broker has, and which processes read it.

use std::fmt::Write as _;

use clap::Args as Arguments;
use gpu_ipc::broker::server::listing::{Listing, Process};

use super::{BrokerDir, any_gpu};
use crate::device::explain;
use crate::gateway;
use crate::{Outcome, output, size};

/// Options of `objects`.
#[derive(Arguments, Debug)]
pub struct ObjectsOptions {
    /// Which broker.
    #[command(flatten)]
    pub place: BrokerDir,
    /// List what the gateways of all hosts announce instead
    #[arg(long)]
    pub all_hosts: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Prints the objects.
pub fn run(options: &ObjectsOptions) -> Outcome {
    if options.all_hosts {
        return gateway::all_hosts(options.place.dir.as_deref(), options.json);
    }
    let listing = any_gpu()
        .and_then(|gpu| options.place.connect(gpu, "gpu-ipc objects"))
        .and_then(|client| client.list().map_err(|error| explain(&error)));
    match listing {
        Ok(listing) if options.json => {
            output::conclude(&output::judged(true, &listing), Outcome::Good)
        }
        Ok(listing) => output::conclude(table(&listing).trim_end(), Outcome::Good),
        Err(why) => output::fail(&why, options.json, Outcome::Finding),
    }
}

fn table(listing: &Listing) -> String {
    let mut text = String::new();
    let keeper = match listing.keeper.as_str() {
        "fed" => "the keeper has everything",
        "absent" => "THE KEEPER IS AWAY: commits wait",
        _ => "no keeper: objects go with the broker",
    };
    let limit = listing
        .limit
        .map_or(String::new(), |limit| format!(" of {}", size::show(limit)));
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "BROKER  process {}, {}{limit}; {keeper}",
        listing.pid,
        size::show(listing.bytes)
    );
    for row in &listing.objects {
        let epoch = if row.epoch == 0 {
            "-".into()
        } else {
            row.epoch.to_string()
        };
        let bytes = size::show(row.bytes);
        let home = row
            .home
            .as_ref()
            .map_or(String::new(), |home| format!("  replica from {home}"));
        let (name, state, owner, identity) = (&row.name, &row.state, row.owner, &row.identity);
        let _ = writeln!(
            text,
            "{name}  epoch {epoch}  {bytes}  {state}  uid {owner}  {identity}{home}"
        );
        for (what, process) in row
            .writer
            .iter()
            .map(|writer| ("written", writer))
            .chain(row.readers.iter().map(|reader| ("read", reader)))
        {
            let Process { pid, command, name } = process;
            let _ = writeln!(text, "    {what} by {pid} ({command}) {name}");
        }
    }
    if listing.objects.is_empty() {
        text.push_str("no objects\n");
    }
    text
}
