//! A process of a run: which one it is, and what it is told.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args as Group, ValueEnum};
use gpu_ipc::broker::{Client, ObjectError};
use gpu_ipc::host::HostBackend;
use gpu_ipc::{Gone, Gpu};

use super::journal::Journal;
use super::ledger::Ledger;
use super::tally::{Count, Tally};
use crate::options::Control;
use crate::seat::Device;
use crate::told::Told;
use gpu_ipc_cli::device::explain;
use gpu_ipc_cli::owner::connect;
use harness::rng::Dice;

/// What a process of a run does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Role {
    /// Puts objects.
    Writer,
    /// Opens them.
    Reader,
    /// Holds pools.
    Holder,
    /// Reads pools.
    Onlooker,
}

/// What a process of a run is told.
#[derive(Group, Debug)]
pub struct ObjectMemberOptions {
    /// What it does
    #[arg(long, value_enum)]
    pub role: Role,
    /// The control, if it is one that a process of a run has a part in
    #[arg(long, value_enum)]
    pub control: Option<Control>,
    /// What every process of a run is told.
    #[command(flatten)]
    pub told: Told,
}

/// The identity of a process of a run, and what it works with.
pub struct Seat {
    pub gpu: Gpu,
    pub host: Option<Arc<HostBackend>>,
    /// The broker's directory.
    pub broker: PathBuf,
    pub tally: &'static Tally,
    pub ledger: &'static Ledger,
    pub journal: Journal,
    pub slot: usize,
    pub serial: u64,
    pub seed: u64,
    pub control: Option<Control>,
}

impl Seat {
    /// Takes the one that a process is told.
    pub fn take(options: &ObjectMemberOptions) -> Result<Seat, String> {
        let told = &options.told;
        let Device { gpu, host } = Device::open(told.backend.kind(), &told.device)?;
        let tally = Tally::open(&told.dir.join("tally")).map_err(|e| format!("no tally: {e}"))?;
        let ledger =
            Ledger::open(&told.dir.join("ledger")).map_err(|e| format!("no ledger: {e}"))?;
        let broker = told.dir.join("broker");
        let who = format!("{:?} {}", options.role, told.serial).to_lowercase();
        let journal = Journal::open(&told.dir, who).map_err(|e| format!("no journal: {e}"))?;
        Ok(Seat {
            gpu,
            host,
            broker,
            tally,
            ledger,
            journal,
            slot: told.slot,
            serial: told.serial,
            seed: told.seed,
            control: options.control,
        })
    }

    /// Connects as a reader, and reads until the torture ends.
    pub fn read_on(
        &self,
        read: impl Fn(&Seat, &Client, &mut Dice) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut dice = Dice::new(self.seed, self.serial);
        let client = connect(&self.gpu, &self.broker, "torture reader")?;
        while !self.tally.ends() {
            self.tally.beat(self.slot);
            read(self, &client, &mut dice)?;
        }
        Ok(())
    }

    /// Counts a finding, and says what it is.
    pub fn found(&self, what: Count, why: &str) {
        self.journal.note(&format!("FOUND {what:?}: {why}"));
        self.tally.count(what);
    }
}

/// Passes over what may happen to anybody whose broker or keeper dies, and gives everything else.
pub fn forgive<T>(result: Result<T, ObjectError>) -> Result<Option<T>, String> {
    use gpu_ipc::Error;
    match result {
        Ok(value) => Ok(Some(value)),
        Err(
            ObjectError::WriterLost { .. }
            | ObjectError::Aborted { .. }
            | ObjectError::Gpu(Error::Connect { .. } | Error::Deadline { .. }),
        ) => Ok(None),
        Err(ObjectError::Gpu(error)) if Gone::of(&error).is_some() => Ok(None),
        Err(error) => Err(explain(&error)),
    }
}
