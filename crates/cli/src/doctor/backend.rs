//! One backend and its devices, as a process of its own found them.

use std::time::Duration;

use gpu_ipc::BackendKind;
use serde::{Deserialize, Serialize};

use super::check::{Check, CheckState};
use super::{device_files, mps};
use crate::child::{self, Child};

/// A backend and what was found of it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Backend {
    /// Its name.
    pub backend: String,
    /// How it stands.
    pub state: CheckState,
    /// Why it is not here, or what went wrong.
    pub why: Option<String>,
    /// What to do.
    pub remedy: Option<String>,
    /// What lies around its driver.
    pub checks: Vec<Check>,
    /// Its devices.
    pub devices: Vec<Device>,
}

/// A device and what was found of it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Device {
    /// Its number in a process that sees all that this one sees.
    pub number: u32,
    /// Its identity in every process.
    pub uuid: String,
    /// The vendor's name for it.
    pub name: String,
    /// Bytes of memory.
    pub total_bytes: u64,
    /// Bytes that are free, where the driver tells.
    pub free_bytes: Option<u64>,
    /// What it can do, as data.
    pub caps: Caps,
    /// A block was shared with a child process, and nothing that was tried failed.
    pub works: bool,
    /// What it can do in words, and what was tried.
    pub checks: Vec<Check>,
}

/// The library's [`Caps`](gpu_ipc::backend::Caps), field by field.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Caps {
    /// Memory can be shared by 64-byte handle.
    pub handle: bool,
    /// Memory can be shared by file descriptor.
    pub fd: bool,
    /// Memory shared by file descriptor can be mapped read-only.
    pub read_only: bool,
    /// Other processes can open its events.
    pub event_ipc: bool,
    /// Its streams write words in shared memory.
    pub stream_writes: bool,
    /// Its streams wait for words in shared memory.
    pub stream_waits: bool,
    /// Memory can be made apart from addresses, and mapped in ranges.
    pub ranges: bool,
    /// Several processes share one context of the driver.
    pub shared_context: bool,
    /// Allocations are multiples of this many bytes.
    pub granularity: u64,
}

/// What the process that asks says: what was found so far, and what it does next.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Progress {
    /// What it does next; nothing when it is done.
    pub doing: Option<String>,
    /// What was found so far.
    pub backend: Backend,
}

impl Backend {
    /// Begins with nothing found.
    pub fn new(kind: BackendKind) -> Backend {
        let backend = kind.name().to_owned();
        Backend {
            backend,
            state: CheckState::Absent,
            why: None,
            remedy: None,
            checks: Vec::new(),
            devices: Vec::new(),
        }
    }

    /// Says whether a device of it works.
    pub fn works(&self) -> bool {
        self.devices.iter().any(|device| device.works)
    }
}

/// Asks a backend, in a process of its own, and looks at what lies around its driver.
///
/// A process that is silent for longer than `patience` hangs.
pub fn ask(kind: BackendKind, patience: Duration, tell: &dyn Fn(String)) -> Backend {
    let args = ["doctor-process", "backend", "--backend", kind.name()];
    let mut backend = match Child::start(args, patience) {
        Ok(child) => listen(kind, child, tell),
        Err(why) => {
            let remedy = "repair what the line below names, or raise RLIMIT_NPROC: each driver is tried in a child process";
            Backend {
                state: CheckState::Failed,
                why: Some(why),
                remedy: Some(remedy.into()),
                ..Backend::new(kind)
            }
        }
    };
    // What the process found of the driver itself comes after what lies around it.
    let found = std::mem::replace(&mut backend.checks, device_files::checks(kind));
    backend.checks.extend(found);
    if kind.may_share_context() {
        backend.checks.push(mps::check());
    }
    let driver_is_here = backend.checks.iter().any(device_files::shows_driver);
    if backend.state == CheckState::Absent && driver_is_here {
        backend.state = CheckState::Failed;
    }
    backend
}

fn listen(kind: BackendKind, mut child: Child, tell: &dyn Fn(String)) -> Backend {
    let mut last = Progress {
        doing: Some("starting".into()),
        backend: Backend::new(kind),
    };
    while let Some(doing) = last.doing.take() {
        tell(format!("{kind}: {doing}"));
        last = loop {
            match child.line() {
                // A driver may write to standard output too.
                Ok(line) => match child::decode::<Result<Progress, String>>(&line) {
                    Ok(Ok(progress)) => break progress,
                    _ => continue,
                },
                Err(silence) => {
                    let how = child.describe(silence);
                    let mut backend = last.backend;
                    backend.state = CheckState::Failed;
                    backend.why = Some(format!("the process that was {doing} {how}"));
                    backend.remedy = Some(
                        "mend what fails above; else look at the driver's version and what it wrote to the system's \
                         log: a driver that hangs or crashes here does so in every program"
                            .into(),
                    );
                    return backend;
                }
            }
        };
    }
    last.backend
}
