//! Finding out what a runtime can do, by doing it, in child processes.
//!
//! What is to be found out may bring a process down, or never return. So [`prove`] starts a program twice for each
//! [`Step`] and device, one to export and one to import as two processes would, waits for both within a patience, and
//! kills what has not come back. The program is any that calls [`run_if_asked`] first thing in its `main`, usually the
//! calling one itself:
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use backend_hip::{Step, probe};
//!
//! fn main() -> gpu_api::Result<()> {
//!     probe::run_if_asked();
//!     let program = std::env::current_exe().expect("a program has a path");
//!     let findings = probe::prove(&program, &Step::HARMLESS, Duration::from_secs(30))?;
//!     for finding in &findings.all {
//!         println!("{} on {}: {:?}", finding.step, finding.device, finding.seen);
//!     }
//!     println!("GPU_IPC_HIP_PROOF='{}'", findings.proof);
//!     Ok(())
//! }
//! ```
//!
//! A library cannot start its own process again unasked, so [`HipBackend::load`](crate::HipBackend::load) never probes.

mod channel;
mod memory;
mod order;

use std::env;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use gpu_api::{DeviceId, DevicePtr, Error, GpuCopies, GpuDevices, GpuStreams, RawStream, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::backend::HipBackend;
use crate::proof::{Proof, Step};

use self::channel::Channel;

/// Set in a process that runs one side of a step: the step, the side, the device.
const TASK: &str = "GPU_IPC_HIP_PROBE";

/// What became of one side of a step; the text says why not.
type Seen = std::result::Result<(), String>;

/// What was seen of one step on one device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Finding {
    /// What was tried.
    pub step: Step,
    /// Where.
    pub device: DeviceId,
    /// Nothing, where it worked; else what went wrong.
    pub seen: Seen,
}

/// What was seen of all steps on all devices.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Findings {
    /// One by one.
    pub all: Vec<Finding>,
    /// The steps that worked on every device.
    pub proof: Proof,
}

/// The two sides of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Exporter,
    Importer,
}

impl Side {
    const fn name(self) -> &'static str {
        match self {
            Side::Exporter => "exporter",
            Side::Importer => "importer",
        }
    }
}

/// Runs one side of a step and ends the process, if [`prove`] started it for that; else does nothing.
///
/// Call it first thing in `main`, before anything is printed or any thread is started.
pub fn run_if_asked() {
    let Ok(task) = env::var(TASK) else { return };
    let code = match run(&task) {
        Ok(()) => 0,
        Err(why) => {
            // Only the parent reads it, so an error here has no other reader.
            let _ = writeln!(std::io::stderr(), "{why}");
            1
        }
    };
    // The runtime's own clean-up at the end of a process is no part of what is proved, and may hang too.
    // SAFETY: `_exit` has no conditions.
    unsafe { libc::_exit(code) }
}

/// Tries steps on every device and says which worked.
///
/// `patience` is what one step on one device may take.
///
/// # Errors
///
/// Where the runtime cannot be loaded, as [`HipBackend::load`]; [`Error::System`] where `program` cannot be started.
/// What a step does is never an error: it is a [`Finding`].
pub fn prove(program: &Path, steps: &[Step], patience: Duration) -> Result<Findings> {
    prove_and_tell(program, steps, patience, |_| {})
}

/// Does what [`prove`] does, all devices at once, and calls `tell` with each finding as soon as it is there.
///
/// # Errors
///
/// As [`prove`].
pub fn prove_and_tell(
    program: &Path,
    steps: &[Step],
    patience: Duration,
    mut tell: impl FnMut(&Finding),
) -> Result<Findings> {
    let hip = HipBackend::load_with(None)?;
    let devices = hip.device_count()?;
    let mut all = Vec::new();
    for &step in steps {
        let (found, finding) = mpsc::channel();
        let seen = thread::scope(|scope| {
            for device in (0..devices).map(DeviceId) {
                let found = found.clone();
                let name = format!("gpu-ipc-probe-{}", device.0);
                let run = move || {
                    // The other end waits until the last has told.
                    let _ = found.send((device, attempt(program, step, device, patience)));
                };
                let started = thread::Builder::new().name(name).spawn_scoped(scope, run);
                started.map_err(|error| Error::system("starting a thread", "raise RLIMIT_NPROC", error))?;
            }
            drop(found);
            finding.iter().try_for_each(|(device, seen)| {
                let finding = Finding { step, device, seen: seen? };
                tell(&finding);
                all.push(finding);
                Ok(())
            })
        });
        seen?;
    }
    let worked = |step: &Step| all.iter().filter(|finding| finding.step == *step).all(|finding| finding.seen.is_ok());
    let proof = Proof::new(hip.version(), steps.iter().copied().filter(worked));
    Ok(Findings { all, proof })
}

/// A side of a step that runs; dropped, it is killed.
struct Runner {
    side: Side,
    child: Child,
    said: File,
    ended: Option<ExitStatus>,
}

impl Runner {
    fn start(program: &Path, step: Step, device: DeviceId, side: Side, socket: OwnedFd) -> Result<Runner> {
        let failed = |source| Error::system("starting a probe", "see that the program can be executed", source);
        let said = rustix::fs::memfd_create("gpu-ipc-probe", rustix::fs::MemfdFlags::CLOEXEC);
        let said = File::from(said.map_err(|errno| failed(errno.into()))?);
        let child = Command::new(program)
            .env(TASK, format!("{} {} {}", step.name(), side.name(), device.0))
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null())
            .stderr(Stdio::from(said.try_clone().map_err(failed)?))
            .spawn()
            .map_err(failed)?;
        Ok(Runner { side, child, said, ended: None })
    }

    /// Waits until it has ended or the time is up.
    fn wait(&mut self, until: Instant) -> Result<()> {
        let failed = |source: std::io::Error| Error::system("waiting for a probe", "try again", source);
        let pid = Pid::from_child(&self.child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| failed(errno.into()))?;
        let left = until.saturating_duration_since(Instant::now());
        let left = rustix::time::Timespec::try_from(left).ok();
        let mut ended = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
        match rustix::event::poll(&mut ended, left.as_ref()) {
            // A signal cut it short: the time that is left is killed for, which errs on the safe side.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        self.ended = self.child.try_wait().map_err(failed)?;
        Ok(())
    }

    fn seen(&mut self, patience: Duration) -> Seen {
        let name = self.side.name();
        match self.ended {
            Some(status) if status.success() => Ok(()),
            Some(status) => {
                let mut said = String::new();
                // What it said is an explanation only; that it failed is known.
                let _ = self.said.seek(SeekFrom::Start(0));
                let _ = self.said.read_to_string(&mut said);
                let said = said.lines().last().unwrap_or("it said nothing").to_owned();
                Err(format!("the {name} ended with {status}: {said}"))
            }
            None => Err(format!("the {name} did not come back within {} s", patience.as_secs())),
        }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        // One that has ended cannot be killed, and one that cannot be killed is the kernel's matter.
        let _ = self.child.kill();
        let _ = self.child.try_wait();
    }
}

fn attempt(program: &Path, step: Step, device: DeviceId, patience: Duration) -> Result<Seen> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (here, there) = pair.map_err(|errno| Error::system("socketpair", "raise RLIMIT_NOFILE", errno))?;
    let until = Instant::now() + patience;
    let mut exporter = Runner::start(program, step, device, Side::Exporter, here)?;
    let mut importer = Runner::start(program, step, device, Side::Importer, there)?;
    // Either ends when the other does: the socket between them says so.
    importer.wait(until)?;
    exporter.wait(until)?;
    let (imported, exported) = (importer.seen(patience), exporter.seen(patience));
    // The one that is meant to be refused may die of it.
    if step == Step::ReadOnly {
        return Ok(exported);
    }
    Ok(match (imported, exported) {
        // What one found out only from the other's end explains nothing.
        (Err(imported), Err(exported)) if imported.contains(channel::GONE) => Err(exported),
        (imported, exported) => imported.and(exported),
    })
}

/// One side of a step, as it sees itself.
struct Runtime {
    hip: Arc<HipBackend>,
    device: DeviceId,
    stream: RawStream,
    channel: Channel,
}

fn run(task: &str) -> Seen {
    let words: Vec<&str> = task.split(' ').collect();
    let [step, side, device] = words[..] else { return Err(format!("not a task: {task}")) };
    let step = Step::from_name(step).ok_or_else(|| format!("no such step: {step}"))?;
    let device = device.parse().map(DeviceId).map_err(|_| format!("no such device: {device}"))?;
    let side = [Side::Exporter, Side::Importer].into_iter().find(|known| known.name() == side);
    let side = side.ok_or_else(|| format!("no such side: {task}"))?;
    // A side whose starter is killed must not stay behind; where the kernel cannot promise that, the socket ends it.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let channel = Channel::from_stdin()?;
    let assumed: &[Step] = match step {
        Step::ReadOnly => &[Step::Vmm, Step::ReadOnly],
        Step::Waits => &[Step::Words, Step::Waits],
        _ => &[step],
    };
    let hip = HipBackend::load_assuming(assumed).map_err(told)?;
    let stream = hip.create_stream(device).map_err(told)?;
    let runtime = Runtime { hip, device, stream, channel };
    match (step, side) {
        (Step::Handles, Side::Exporter) => memory::export_handles(&runtime),
        (Step::Handles, Side::Importer) => memory::open_handles(&runtime),
        (Step::Vmm | Step::DmaBuf, Side::Exporter) => memory::export(&runtime),
        (Step::Vmm | Step::DmaBuf, Side::Importer) => memory::import(&runtime),
        (Step::ReadOnly, Side::Exporter) => memory::lend(&runtime),
        (Step::ReadOnly, Side::Importer) => memory::overwrite(&runtime),
        (Step::Words, Side::Exporter) => order::words_here(&runtime),
        (Step::Words, Side::Importer) => order::words_there(&runtime),
        (Step::Waits, Side::Exporter) => order::waits_here(&runtime),
        (Step::Waits, Side::Importer) => order::waits_there(&runtime),
        (Step::Events, Side::Exporter) => order::events_here(&runtime),
        (Step::Events, Side::Importer) => order::events_there(&runtime),
    }
}

/// Says what an error says, its cause included.
fn told(error: Error) -> String {
    match std::error::Error::source(&error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Makes a reason of what should have been.
fn expect(what: &str, holds: bool) -> Seen {
    if holds { Ok(()) } else { Err(format!("not so: {what}")) }
}

impl Runtime {
    /// Writes eight bytes and waits for it.
    fn write(&self, to: DevicePtr, value: u64) -> Seen {
        let bytes = value.to_le_bytes();
        // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until it is done: this process has
        // the memory and waits.
        unsafe { self.hip.copy_to_device(self.stream, to, bytes.as_ptr(), bytes.len()) }.map_err(told)?;
        self.synchronize(self.stream)
    }

    /// Reads eight bytes.
    fn read(&self, from: DevicePtr) -> std::result::Result<u64, String> {
        self.read_by(self.stream, from)
    }

    /// Reads eight bytes by a stream.
    fn read_by(&self, stream: RawStream, from: DevicePtr) -> std::result::Result<u64, String> {
        let mut bytes = [0; 8];
        // SAFETY: `copy_to_host` asks for a live stream and ranges that are valid until it is done: this process has
        // the memory and waits.
        unsafe { self.hip.copy_to_host(stream, bytes.as_mut_ptr(), from, bytes.len()) }.map_err(told)?;
        self.synchronize(stream)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Returns the free bytes of the device.
    fn free_bytes(&self) -> std::result::Result<u64, String> {
        Ok(self.hip.memory_info(self.device).map_err(told)?.free_bytes)
    }

    /// Holds up a stream until the result is dropped.
    fn hold(&self, stream: RawStream) -> std::result::Result<mpsc::Sender<()>, String> {
        let (go, gate) = mpsc::channel::<()>();
        let wait = Box::new(move || {
            // An error is the sign: the other end was dropped.
            let _ = gate.recv();
        });
        // SAFETY: `host_function` asks for a live stream that nobody captures: until the process ends.
        unsafe { self.hip.host_function(stream, wait) }.map_err(told)?;
        Ok(go)
    }

    fn synchronize(&self, stream: RawStream) -> Seen {
        // SAFETY: `synchronize_stream` asks for a live stream: none is destroyed before the process ends.
        unsafe { self.hip.synchronize_stream(stream) }.map_err(told)
    }

    fn is_idle(&self, stream: RawStream) -> std::result::Result<bool, String> {
        // SAFETY: `query_stream` asks for a live stream: none is destroyed before the process ends.
        unsafe { self.hip.query_stream(stream) }.map_err(told)
    }
}
