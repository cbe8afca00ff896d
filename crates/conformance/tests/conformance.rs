//! Runs the list on every device of every backend that this machine has.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

use conformance::{Pipe, cases, peer_cases};
use gpu_ipc::backend::DeviceId;
use gpu_ipc::{BackendKind, Gpu};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// Set in the second process of a case: its name, backend, device and descriptor.
const PEER: &str = "GPU_IPC_CONFORMANCE_PEER";

/// Runs the list here, or the second side of one case.
pub fn main() {
    if let Ok(task) = std::env::var(PEER) {
        peer(&task);
        return;
    }
    if std::env::var_os("GPU_IPC_HOST_DEVICES").is_none() {
        // SAFETY: `set_var` asks that no other thread reads the environment: this is the only thread.
        unsafe { std::env::set_var("GPU_IPC_HOST_DEVICES", "2") };
    }
    let found = gpu_ipc::detect().expect("the environment is right");
    let mut trials = Vec::new();
    for kind in BackendKind::ALL {
        let gpus: Vec<Gpu> = found.gpus().iter().filter(|gpu| gpu.kind() == kind).cloned().collect();
        if gpus.is_empty() {
            let why = found.missing().iter().find(|(missing, _)| *missing == kind);
            let why = why.map_or("it has no device".into(), |(_, error)| error.to_string());
            trials.extend(absent(kind, &why));
        }
        for gpu in gpus {
            trials.extend(present(&gpu));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn present(gpu: &Gpu) -> Vec<Trial> {
    let name = |case: &str| format!("{}:{}::{case}", gpu.kind(), gpu.device().0);
    let mut trials = Vec::new();
    for case in cases() {
        let gpu = gpu.clone();
        trials.push(Trial::test(name(case.name), move || {
            (case.run)(&gpu);
            Ok(())
        }));
    }
    for case in peer_cases() {
        let gpu = gpu.clone();
        trials.push(Trial::test(name(case.name), move || with_peer(&gpu, case.name, case.producer)));
    }
    trials
}

/// Shows every case of a backend that is not here as ignored, or, where it was asked for, as failed.
fn absent(kind: BackendKind, why: &str) -> Vec<Trial> {
    let wanted = std::env::var("REQUIRE_BACKEND").unwrap_or_else(|_| "cuda".into());
    let required = std::env::var("REQUIRE_GPU").is_ok_and(|v| v == "1") && kind.name() == wanted;
    let names = cases().into_iter().map(|case| case.name).chain(peer_cases().into_iter().map(|case| case.name));
    eprintln!("no {kind}: {why}");
    names
        .map(|case| {
            let why = why.to_owned();
            Trial::test(format!("{kind}:-::{case}"), move || Err(Failed::from(why))).with_ignored_flag(!required)
        })
        .collect()
}

/// Runs the producer's side here and the consumer's in this program, started again.
fn with_peer(gpu: &Gpu, name: &str, producer: fn(&Gpu, &mut Pipe)) -> Result<(), Failed> {
    let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::empty(), None);
    let (ours, theirs) = pair().map_err(|e| e.to_string())?;
    rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::CLOEXEC).map_err(|e| e.to_string())?;
    let task = format!("{name} {} {} {}", gpu.kind(), gpu.device().0, theirs.as_raw_fd());
    let mut child = Command::new(std::env::current_exe()?).env(PEER, task).spawn()?;
    // Closed here, so that the death of either side is the other's end of file.
    drop(theirs);
    producer(gpu, &mut Pipe::new(ours));
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(Failed::from(format!("the other process ended with {status}"))) }
}

fn peer(task: &str) {
    let words: Vec<&str> = task.split(' ').collect();
    let [name, kind, device, socket] = words[..] else { panic!("not a task: {task}") };
    let kind = BackendKind::ALL.into_iter().find(|k| k.name() == kind).expect("a backend's name");
    let backend = gpu_ipc::detect().and_then(|found| found.backend(kind)).expect("it is there in the other process");
    let gpu = Gpu::new(backend, DeviceId(device.parse().expect("a number"))).expect("there is the device");
    let case = peer_cases().into_iter().find(|case| case.name == name).expect("a case of the list");
    // SAFETY: `from_raw_fd` asks for an open descriptor that nobody else owns: it was left open for this process.
    let socket = unsafe { OwnedFd::from_raw_fd(socket.parse().expect("a number")) };
    (case.consumer)(&gpu, &mut Pipe::new(socket));
}
