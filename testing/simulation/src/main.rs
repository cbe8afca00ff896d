//! Prints how the gateways' plan fills 2 to 4,096 hosts.

use std::error::Error;
use std::path::PathBuf;

use clap::Parser;
use simulation::picture;
use simulation::report::Report;

/// Simulates hosts that pull one object at the same time, by the plan that gateways ship.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Draws links, deaths and lies.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Leaves out runs of more hosts.
    #[arg(long, default_value_t = 4096)]
    hosts: u32,
    /// Prints the figures as JSON.
    #[arg(long)]
    json: bool,
    /// Draws a picture into this file.
    #[arg(long)]
    svg: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let report = Report::new(args.seed, args.hosts);
    if let Some(file) = &args.svg {
        picture::draw(&report, file)?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("{}", report.table());
    }
    Ok(())
}
