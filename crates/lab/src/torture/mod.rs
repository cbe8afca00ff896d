//! Torture: producers and consumers that are killed, stopped and forked at random, and an oracle that is in the blocks.
//!
//! 1. This process starts the others, torments them ([`run`], `process`), and counts what they found (`report`).
//! 2. `producer`, `consumer`: what each of them does; `sides`: how it gets at memory; `lender`, `borrower`: by the
//!    library; `control`: by a method that must fail.
//!    `visitor`: connections that are opened and abandoned.
//! 3. `shared_stats`: what they count in memory that outlives each of them; `message`: what goes between them; `audit`:
//!    which bytes a session takes and gives back; `vitals`: what a process takes; `fork`: children that live on; `rng`:
//!    chance.
//!
//! `objects` is the same for a broker: writers, readers, brokers and keepers.
//!
//! Every block is filled with its generation. A holder compares all bytes before and after; returned bytes are
//! overwritten at once where the CPU can reach them. docs/TESTING.md lists what is done, and to which process.

mod audit;
mod borrower;
mod consumer;
mod control;
mod fork;
mod lender;
mod message;
pub mod objects;
mod process;
mod producer;
mod report;
pub(crate) mod rng;
mod shared_stats;
mod sides;
mod supervisor;
mod visitor;
pub(crate) mod vitals;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args as Group, ValueEnum};
use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{BackendKind, Gpu};
use serde::Serialize;

use crate::args::{BackendChoice, Vendor};
use crate::{Outcome, child, device, output};
use shared_stats::Board;

/// A process that takes longer to release its blocks counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

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
    /// Lend memory by a method known to be wrong instead of by the library; the run must find the defect
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
    /// With --broker: a broker that publishes at the commit's message, without reading the slots.
    BlindBroker,
}

/// Options of a process of a run.
#[derive(Group, Debug)]
pub struct MemberOptions {
    /// The directory of the run
    #[arg(long)]
    pub dir: PathBuf,
    /// Its index in the shared statistics
    #[arg(long)]
    pub slot: usize,
    /// Its number in the run
    #[arg(long)]
    pub serial: u64,
    /// The number of its producer; its own for a producer
    #[arg(long)]
    pub producer: u64,
    /// The seed of the run
    #[arg(long)]
    pub seed: u64,
    /// The backend
    #[arg(long, value_enum)]
    pub backend: Vendor,
    /// The device
    #[arg(long)]
    pub device: String,
    /// How many seconds the run lasts, for a producer that lives as long
    #[arg(long)]
    pub lasts: Option<u64>,
    /// Its device is small on purpose
    #[arg(long)]
    pub small: bool,
    /// It opens connections and abandons them
    #[arg(long)]
    pub visitor: bool,
    /// The control, if it is one
    #[arg(long, value_enum)]
    pub control: Option<Control>,
}

/// The identity of a process of a run, and its directory.
pub struct Seat {
    dir: PathBuf,
    board: &'static Board,
    slot: usize,
    serial: u64,
    producer: u64,
    seed: u64,
    control: Option<Control>,
    backend: BackendKind,
    device: String,
    lasts: Option<Duration>,
    is_small: bool,
}

/// A device, and what the host backend alone can be made to do.
struct Device {
    gpu: Gpu,
    host: Option<Arc<HostBackend>>,
}

impl Seat {
    fn gpu(&self) -> Result<Device, String> {
        if self.backend != BackendKind::Host {
            return Ok(Device { gpu: device::find(self.backend, &self.device)?, host: None });
        }
        let opened = HostConfig::from_env().and_then(HostBackend::new);
        let host = opened.map_err(|e| device::explain(&e))?;
        let gpu = Gpu::new(host.clone(), DeviceId(0)).map_err(|e| device::explain(&e))?;
        Ok(Device { gpu, host: Some(host) })
    }
}

/// Runs a torture.
pub fn run(options: &TortureOptions) -> Outcome {
    let of_brokers = options.control.map(|control| control == Control::BlindBroker);
    if of_brokers.is_some_and(|of_brokers| of_brokers != options.broker) {
        let why = "--control blind-broker goes with --broker, and the other controls without it";
        return output::fail(why, options.json, Outcome::Finding);
    }
    let gpu = match device::choose(options.backend) {
        Ok(gpu) => gpu,
        Err(why) => return output::fail(&why, options.json, Outcome::Unavailable),
    };
    if options.broker {
        return objects::run(options, &gpu);
    }
    let backend = match gpu.kind() {
        BackendKind::Cuda => Vendor::Cuda,
        BackendKind::Hip => Vendor::Hip,
        _ => Vendor::Host,
    };
    let uuid = gpu.uuid().to_string();
    drop(gpu);
    match supervisor::run(options, backend, &uuid) {
        Ok((report, crashes)) => {
            for crash in &crashes {
                output::complain(crash);
            }
            let outcome = if report.is_good() { Outcome::Good } else { Outcome::Finding };
            output::conclude(&if options.json { report.json() } else { report.text() }, outcome)
        }
        Err(why) => {
            let outcome = if why == supervisor::INTERRUPTED { Outcome::Interrupted } else { Outcome::Finding };
            output::fail(&format!("the torture stopped: {why}"), options.json, outcome)
        }
    }
}

/// Lives as a process of a run.
pub fn run_member(options: &MemberOptions) -> Outcome {
    child::die_with_parent();
    let lived = Board::open(&options.dir.join("board")).map_err(|e| format!("no board: {e}")).and_then(|board| {
        let place = Seat {
            dir: options.dir.clone(),
            board,
            slot: options.slot,
            serial: options.serial,
            producer: options.producer,
            seed: options.seed,
            control: options.control,
            backend: options.backend.kind(),
            device: options.device.clone(),
            lasts: options.lasts.map(Duration::from_secs),
            is_small: options.small,
        };
        match (options.visitor, place.serial == place.producer) {
            (true, _) => visitor::run(&place),
            (false, true) => producer::run(&place),
            (false, false) => consumer::run(&place),
        }
    });
    match lived {
        Ok(()) => Outcome::Good,
        Err(error) => {
            output::complain(&format!("process {} of the torture: {error}", options.serial));
            Outcome::Finding
        }
    }
}
