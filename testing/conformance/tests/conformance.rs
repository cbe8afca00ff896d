//! Runs the list on every device of every backend that this machine has.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};

use conformance::{Bare, Pipe, cases, lacked, peer_cases};
use gpu_ipc::backend::{DeviceId, GpuBackend};
use gpu_ipc::{BackendKind, Gpu};
use harness::Child;
use harness::program::this_program;
use harness::surroundings::keep_open;
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};

/// The second process of a case.
#[derive(Serialize, Deserialize)]
struct Peer {
    case: String,
    backend: String,
    device: u32,
    /// The descriptor that it says everything by.
    pipe: RawFd,
}

/// Runs the list here, or the second side of one case.
pub fn main() {
    if let Some(peer) = harness::role() {
        return consume(&peer);
    }
    if std::env::var_os("GPU_IPC_HOST_DEVICES").is_none() {
        // SAFETY: `set_var` asks that no other thread reads the environment: this is the only
        // thread.
        unsafe { std::env::set_var("GPU_IPC_HOST_DEVICES", "2") };
    }
    let found = gpu_ipc::detect().expect("the environment is right");
    let mut trials = Vec::new();
    for kind in BackendKind::ALL {
        let gpus: Vec<Gpu> = found
            .gpus()
            .iter()
            .filter(|gpu| gpu.kind() == kind)
            .cloned()
            .collect();
        if gpus.is_empty() {
            let why = found.missing().iter().find(|(missing, _)| *missing == kind);
            let why = why.map_or("it has no device".into(), |(_, error)| error.to_string());
            trials.extend(absent(kind, &why));
        }
        for gpu in gpus {
            trials.extend(present(gpu.kind().name(), &gpu));
        }
    }
    let host = found.backend(BackendKind::Host);
    trials.extend(present(
        BARE,
        &bare(host.expect("there is host memory"), DeviceId(0)),
    ));
    let arguments = Arguments::from_args();
    let is_whole = arguments.filter.is_none() && arguments.skip.is_empty() && !arguments.list;
    let conclusion = libtest_mimic::run(&arguments, trials);
    if is_whole {
        tell_skipped();
    }
    conclusion.exit();
}

/// The name of the backend that has little.
const BARE: &str = "bare";

/// What that skips.
const BARE_LACKS: [&str; 6] = [
    "handles",
    "interprocess events",
    "managed memory",
    "pools",
    "ranges",
    "stream waits",
];

fn bare(host: Arc<dyn GpuBackend>, device: DeviceId) -> Gpu {
    Gpu::new(Arc::new(Bare::over(host)), device).expect("there is the device")
}

/// The cases that skipped something, by device and by what it lacks.
static SKIPPED: Mutex<BTreeMap<(String, &str), Vec<&str>>> = Mutex::new(BTreeMap::new());

/// Notes what a case skipped that ran on this thread.
fn note_skipped(device: &str, case: &'static str) {
    let mut skipped = SKIPPED.lock().expect("no case panics here");
    for what in lacked() {
        let cases = skipped.entry((device.to_owned(), what)).or_default();
        cases.push(case);
    }
}

/// Says what was skipped for want of what.
fn tell_skipped() {
    let skipped = SKIPPED.lock().expect("no case panics here");
    for ((device, what), cases) in skipped.iter() {
        println!(
            "{device} has no {what}; skipped, at least in part: {}",
            cases.join(", ")
        );
    }
    let of = |name: &str| -> Vec<&str> {
        let of = skipped
            .keys()
            .filter(|(device, _)| device.starts_with(name));
        of.map(|(_, what)| *what).collect()
    };
    assert_eq!(of(BARE), BARE_LACKS, "what the bare backend skips");
    assert!(
        of("host").is_empty(),
        "the host backend has all: {:?}",
        of("host")
    );
}

fn present(backend: &'static str, gpu: &Gpu) -> Vec<Trial> {
    let device = format!("{backend}:{}", gpu.device().0);
    let mut trials = Vec::new();
    for case in cases() {
        let (gpu, device) = (gpu.clone(), device.clone());
        trials.push(Trial::test(format!("{device}::{}", case.name), move || {
            // Of a case that failed on this thread.
            lacked();
            (case.run)(&gpu);
            note_skipped(&device, case.name);
            Ok(())
        }));
    }
    for case in peer_cases() {
        let (gpu, device) = (gpu.clone(), device.clone());
        trials.push(Trial::test(format!("{device}::{}", case.name), move || {
            lacked();
            let ended = with_peer(backend, &gpu, case.name, case.producer);
            note_skipped(&device, case.name);
            ended
        }));
    }
    trials
}

/// Shows every case of a backend that is not here as ignored, or, where it was asked for, as
/// failed.
fn absent(kind: BackendKind, why: &str) -> Vec<Trial> {
    let wanted = std::env::var("REQUIRE_BACKEND").unwrap_or_else(|_| "cuda".into());
    let required = std::env::var("REQUIRE_GPU").is_ok_and(|v| v == "1") && kind.name() == wanted;
    let names = cases()
        .into_iter()
        .map(|case| case.name)
        .chain(peer_cases().into_iter().map(|case| case.name));
    eprintln!("no {kind}: {why}");
    names
        .map(|case| {
            let why = why.to_owned();
            Trial::test(format!("{kind}:-::{case}"), move || Err(Failed::from(why)))
                .with_ignored_flag(!required)
        })
        .collect()
}

/// Runs the producer's side here and the consumer's in this program, started again.
fn with_peer(
    backend: &str,
    gpu: &Gpu,
    name: &str,
    producer: fn(&Gpu, &mut Pipe),
) -> Result<(), Failed> {
    let pair = || {
        socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
    };
    let (ours, theirs) = pair().map_err(|e| e.to_string())?;
    let (backend, device) = (backend.to_owned(), gpu.device().0);
    let peer = Peer {
        case: name.to_owned(),
        backend,
        device,
        pipe: theirs.as_raw_fd(),
    };
    let mut program = this_program();
    keep_open(&mut program, &theirs);
    let mut child = Child::<(), ()>::run(program, &peer);
    // Closed here, so that the death of either side is the other's end of file.
    drop(theirs);
    producer(gpu, &mut Pipe::new(ours));
    let status = child.wait();
    if status.success() {
        Ok(())
    } else {
        Err(Failed::from(format!(
            "the other process ended with {status}"
        )))
    }
}

fn consume(peer: &Peer) {
    let is_bare = peer.backend == BARE;
    let kind = BackendKind::ALL
        .into_iter()
        .find(|kind| kind.name() == peer.backend || is_bare && *kind == BackendKind::Host)
        .expect("a backend's name");
    let backend = gpu_ipc::detect()
        .and_then(|found| found.backend(kind))
        .expect("it is there in the other process");
    let device = DeviceId(peer.device);
    let gpu = if is_bare {
        bare(backend, device)
    } else {
        Gpu::new(backend, device).expect("there is the device")
    };
    let case = peer_cases()
        .into_iter()
        .find(|case| case.name == peer.case)
        .expect("a case of the list");
    // SAFETY: `from_raw_fd` asks for an open descriptor that nobody else owns: it was left open for
    // this process.
    let pipe = unsafe { OwnedFd::from_raw_fd(peer.pipe) };
    (case.consumer)(&gpu, &mut Pipe::new(pipe));
}
