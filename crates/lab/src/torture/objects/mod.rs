//! Torture of objects: writers, readers, their broker and its keeper, killed and stopped at random.
//!
//! 1. `supervisor` starts them, torments them, and counts what they found (`report`).
//! 2. `writer` puts object after object; some ask for the commit before they have written, which a broker must not
//!    hear. `reader` opens, advances, sleeps and wakes, and compares every byte.
//! 3. `tally`: what they count in memory that outlives each of them.
//!
//! An object's parts have contents that follow from its stamp, which travels beside them: a reader that finds others
//! has seen a half. What was answered as committed must be there, or something newer.

mod reader;
mod report;
mod supervisor;
mod tally;
mod writer;

use std::path::PathBuf;

use clap::{Args as Group, ValueEnum};
use gpu_ipc::Gpu;
use gpu_ipc::broker::{Layout, ObjectError, PartSpec};

use super::TortureOptions;
use crate::args::Vendor;
use crate::device::{self, explain};
use crate::{Outcome, child, output};
use tally::Tally;

/// Names of objects; any writer puts any of them.
const NAMES: usize = 3;
const PARTS: u64 = 4;
const PART_BYTES: u64 = 20_000;
/// A part that is the same in every epoch of a name, in a region of its own.
const STILL: &str = "still";

/// What a process of a run does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Role {
    /// Puts objects.
    Writer,
    /// Opens them.
    Reader,
}

/// What a process of a run is told.
#[derive(Group, Debug)]
pub struct ObjectMemberOptions {
    /// What it does
    #[arg(long, value_enum)]
    pub role: Role,
    /// The directory of the run
    #[arg(long)]
    pub dir: PathBuf,
    /// Its place in the tally
    #[arg(long)]
    pub slot: usize,
    /// Its number in the run
    #[arg(long)]
    pub serial: u64,
    /// The seed of the run
    #[arg(long)]
    pub seed: u64,
    /// The backend
    #[arg(long, value_enum)]
    pub backend: Vendor,
    /// The device
    #[arg(long)]
    pub device: String,
}

/// The role of a process of a run, and its place.
struct Place {
    gpu: Gpu,
    /// The broker's directory.
    broker: PathBuf,
    tally: &'static Tally,
    slot: usize,
    serial: u64,
    seed: u64,
}

/// Runs a torture.
pub fn run(options: &TortureOptions, gpu: &Gpu) -> Outcome {
    match supervisor::run(options, gpu) {
        Ok((report, crashes)) => {
            for crash in &crashes {
                output::complain(crash);
            }
            let outcome = if report.is_good() { Outcome::Good } else { Outcome::Finding };
            output::conclude(&if options.json { report.json() } else { report.text() }, outcome)
        }
        Err(why) => output::fail(&format!("the torture stopped: {why}"), options.json, Outcome::Finding),
    }
}

/// Lives as a process of a run.
pub fn run_member(options: &ObjectMemberOptions) -> Outcome {
    child::die_with_parent();
    let lived = || {
        let gpu = device::find(options.backend.kind(), &options.device)?;
        let tally = Tally::open(&options.dir.join("tally")).map_err(|e| format!("no tally: {e}"))?;
        let broker = options.dir.join("broker");
        let place = Place { gpu, broker, tally, slot: options.slot, serial: options.serial, seed: options.seed };
        match options.role {
            Role::Writer => writer::run(&place),
            Role::Reader => reader::run(&place),
        }
    };
    match lived() {
        Ok(()) => Outcome::Good,
        Err(error) => {
            output::complain(&format!("process {} of the torture: {error}", options.serial));
            Outcome::Finding
        }
    }
}

fn name_of(name: usize) -> String {
    format!("model{name}")
}

fn part_of(part: u64) -> String {
    format!("p{part}")
}

fn layout(stamp: u64) -> Result<Layout, String> {
    let parts = (0..PARTS).map(|part| PartSpec::bytes(part_of(part), PART_BYTES));
    let parts = parts.collect::<Result<Vec<_>, _>>().map_err(|e| explain(&e))?;
    let still = PartSpec::bytes(STILL, PART_BYTES).map_err(|e| explain(&e))?;
    Layout::pack_groups([parts, vec![still]], &stamp.to_le_bytes()).map_err(|e| explain(&e))
}

/// The stamp of a name's part that stays the same: no other part has it.
fn still_of(name: usize) -> u64 {
    u64::MAX - name as u64
}

/// The stamp of a part: no two parts of all objects have the same.
fn stamp_of(stamp: u64, part: u64) -> u64 {
    stamp.wrapping_mul(PARTS).wrapping_add(part)
}

/// Passes over what may happen to anybody whose broker or keeper dies, and gives everything else.
fn forgive<T>(result: Result<T, ObjectError>) -> Result<Option<T>, String> {
    use gpu_ipc::Error;
    match result {
        Ok(value) => Ok(Some(value)),
        Err(
            ObjectError::WriterLost { .. }
            | ObjectError::Aborted { .. }
            | ObjectError::Gpu(
                Error::Connect { .. } | Error::Deadline { .. } | Error::ProducerGone { .. } | Error::Closing,
            ),
        ) => Ok(None),
        Err(error) => Err(explain(&error)),
    }
}
