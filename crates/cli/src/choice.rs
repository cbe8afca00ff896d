//! Which device a command works on.

use std::path::PathBuf;

use clap::builder::PossibleValue;
use clap::{Args as Arguments, ValueEnum};
use gpu_ipc::BackendKind;

/// Which backend to use: one by its name, or `None` for the first that has a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackendChoice(pub Option<BackendKind>);

impl BackendChoice {
    /// Returns the backends to try, in order.
    pub fn kinds(self) -> Vec<BackendKind> {
        self.0
            .map_or_else(|| BackendKind::ALL.to_vec(), |kind| vec![kind])
    }
}

impl ValueEnum for BackendChoice {
    fn value_variants<'a>() -> &'a [BackendChoice] {
        const CHOICES: [BackendChoice; KINDS + 1] = {
            let mut choices = [BackendChoice(None); KINDS + 1];
            let mut at = 0;
            while at < KINDS {
                choices[at + 1] = BackendChoice(Some(BackendKind::ALL[at]));
                at += 1;
            }
            choices
        };
        &CHOICES
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let auto = || PossibleValue::new("auto").help("The first that has a device");
        self.0
            .map_or_else(|| Some(auto()), |kind| Vendor(kind).to_possible_value())
    }
}

/// A backend by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vendor(pub BackendKind);

impl Vendor {
    /// Returns the library's name for it.
    pub fn kind(self) -> BackendKind {
        self.0
    }
}

impl ValueEnum for Vendor {
    fn value_variants<'a>() -> &'a [Vendor] {
        const VENDORS: [Vendor; KINDS] = {
            let mut vendors = [Vendor(BackendKind::ALL[0]); KINDS];
            let mut at = 0;
            while at < KINDS {
                vendors[at] = Vendor(BackendKind::ALL[at]);
                at += 1;
            }
            vendors
        };
        &VENDORS
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()).help(self.0.maker()))
    }
}

const KINDS: usize = BackendKind::ALL.len();

/// Options of a consumer process.
#[derive(Arguments, Debug)]
pub struct ConsumerOptions {
    /// The producer's backend
    #[arg(long, value_enum)]
    pub backend: Vendor,
    /// The producer's device
    #[arg(long)]
    pub device: String,
    /// The producer's socket
    #[arg(long)]
    pub socket: PathBuf,
    /// Map the producer's memory read-only
    #[arg(long)]
    pub read_only: bool,
}
