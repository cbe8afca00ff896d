//! What a consumer does that suffers from something, in its own process.

use std::path::PathBuf;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{Gpu, Participant, Result, Stream, Wait};
use harness::{WATCHDOG, say};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::agent::{Fault, Said, Told, hear, hear_descriptor, read_stamp};
use crate::faulty::Faulty;
use crate::{hostile, limits, mapping};

/// Lives as a consumer: connects, claims, reads, lets go. Says how it failed, or that it passed.
pub fn run(fault: Fault) {
    let faulty = Faulty::new(HostBackend::new(HostConfig::default()).expect("it opens"));
    let gpu = Gpu::new(faulty.clone(), DeviceId(0)).expect("there is a device");
    let Told::Path(path) = hear() else {
        panic!("it is told where first")
    };
    match fault {
        Fault::Backend(call) => faulty.fail_at(call),
        Fault::Scribble(seed) => return hostile::scribble(&gpu, &path, seed),
        Fault::TwoThreads => return mapping::claim_beside(&faulty, &gpu, &path),
        Fault::Room => return limits::open_without_room(&gpu, &path),
        Fault::Signals(microseconds) => interrupt_every(microseconds),
        Fault::Files(files) => limit(Resource::Nofile, open_files() + files),
        Fault::Memory(quarters) => limit(Resource::As, mapped_bytes() + (quarters << 18)),
    }
    let lived = live(&gpu, path);
    let failed = faulty.heal();
    say(&match (lived, failed) {
        (Err(error), _) => Said::Failed(error.to_string()),
        // Nobody was told, because somebody could do without.
        (Ok(()), Some(call)) => Said::Failed(call.to_string()),
        (Ok(()), None) => Said::Passed,
    });
    // What went wrong with the backend is for the test to see.
    for wrong in faulty.wrongs() {
        eprintln!("wrong: {wrong}");
    }
    hear();
}

fn limit(resource: Resource, most: u64) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(
        resource,
        Rlimit {
            current: Some(most),
            maximum,
        },
    )
    .expect("less is always allowed");
}

/// Sends a signal every `microseconds`, to any thread. Its handler restarts no call.
fn interrupt_every(microseconds: u64) {
    extern "C" fn nothing(_: libc::c_int) {}
    let mut action: libc::sigaction = {
        // SAFETY: `zeroed` asks for a type of which zeroes are a value: a structure of integers, a
        // set and a pointer that may be null.
        unsafe { std::mem::zeroed() }
    };
    action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
    // SAFETY: `sigaction` asks for a handler that does only what is safe in one: it does nothing.
    let handled =
        unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) };
    let every = libc::timeval {
        tv_sec: 0,
        tv_usec: microseconds.cast_signed(),
    };
    let timer = libc::itimerval {
        it_interval: every,
        it_value: every,
    };
    // SAFETY: `setitimer` asks for a timer that can be read, and for nowhere to write the old one.
    let set = unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
    assert_eq!((handled, set), (0, 0));
}

fn open_files() -> u64 {
    // The directory that is read is one of them, and is closed.
    std::fs::read_dir("/proc/self/fd").map_or(8, Iterator::count) as u64 - 1
}

fn mapped_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("proc is mounted");
    let size = status
        .lines()
        .find_map(|line| line.strip_prefix("VmSize:"))
        .expect("a line of it");
    let kilobytes: u64 = size
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .expect("a number");
    kilobytes << 10
}

fn live(gpu: &Gpu, socket: PathBuf) -> Result<()> {
    let stream = Stream::create(gpu)?;
    let participant = Participant::builder(gpu.clone())
        .timeout(Some(WATCHDOG))
        .connect(socket)?;
    say(&Said::Joined(participant.id().0));
    for _ in 0..2 {
        let bytes = hear_descriptor();
        let claimed = participant.claim(&bytes, Wait::Stream(&stream), Some(WATCHDOG));
        let block = claimed.map_err(|error| gpu_ipc::Error::Refused {
            why: error.to_string(),
            remedy: "-",
        })?;
        say(&Said::Claimed);
        hear();
        let read = read_stamp(gpu, &stream, block.device_ptr());
        // The block is used on the stream until the read is done, whether or not that can be waited
        // for.
        block.used_on(&stream).expect("a stream of its own");
        say(&Said::Stamp(read?));
        drop(block);
    }
    drop(participant);
    Ok(())
}
