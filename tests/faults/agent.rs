//! A consumer in another process: this test's own binary, started again.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{Gpu, Participant, Result, SentBlock, Stream, Wait};
use harness::program::this_program;
use harness::{Child, WATCHDOG, say};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use crate::faulty::Faulty;
use crate::{hostile, limits, mapping};

/// What a consumer suffers from, or does.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The n-th call of the backend fails.
    Backend(u32),
    /// It can open this many files more than it has.
    Files(u64),
    /// It can map this many quarters of a megabyte more than it has.
    Memory(u64),
    /// A signal comes every so often, in microseconds.
    Signals(u64),
    /// It opens a session where there may be no room.
    Room,
    /// Two of its threads want one region.
    TwoThreads,
    /// It scribbles on its counter file, by a seed.
    Scribble(u64),
}

/// What it is told.
#[derive(Serialize, Deserialize, Debug)]
pub enum Told {
    /// The session's socket, or the directory to open one in.
    Path(PathBuf),
    Claim(Vec<u8>),
    Read,
}

/// What it says.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub enum Said {
    Joined(u64),
    Scribbling,
    Claimed,
    Stamp(u64),
    Failed(String),
    /// It opened no session, and left this many files.
    NoRoom {
        why: String,
        left: usize,
    },
    Passed,
}

/// A consumer, whose complaints are kept. Killed when dropped.
pub type Agent = Child<Told, Said>;

/// Starts one.
pub fn start(fault: Fault) -> Agent {
    run_as(this_program(), fault)
}

/// Starts one by a command that runs this binary.
pub fn run_as(mut program: Command, fault: Fault) -> Agent {
    program.stderr(Stdio::piped());
    Agent::run(program, &fault)
}

/// Lives as a consumer: connects, claims, reads, lets go. Says how it failed, or that it passed.
pub fn run(fault: Fault) {
    let faulty = Faulty::new(HostBackend::new(HostConfig::default()).expect("it opens"));
    let gpu = Gpu::new(faulty.clone(), DeviceId(0)).expect("there is a device");
    let Told::Path(path) = hear() else { panic!("it is told where first") };
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

/// Waits for what this process is told next. It ends when the test lets it go.
pub fn hear() -> Told {
    harness::next().unwrap_or_else(|| std::process::exit(0))
}

/// Waits for a descriptor.
pub fn hear_descriptor() -> Vec<u8> {
    match hear() {
        Told::Claim(descriptor) => descriptor,
        other => panic!("no descriptor: {other:?}"),
    }
}

fn limit(resource: Resource, most: u64) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: Some(most), maximum }).expect("less is always allowed");
}

/// Sends a signal every `microseconds`, to any thread. Its handler restarts no call.
fn interrupt_every(microseconds: u64) {
    extern "C" fn nothing(_: libc::c_int) {}
    let mut action: libc::sigaction = {
        // SAFETY: `zeroed` asks for a type of which zeroes are a value: a structure of integers, a set and a pointer
        // that may be null.
        unsafe { std::mem::zeroed() }
    };
    action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
    // SAFETY: `sigaction` asks for a handler that does only what is safe in one: it does nothing.
    let handled = unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) };
    let every = libc::timeval { tv_sec: 0, tv_usec: microseconds.cast_signed() };
    let timer = libc::itimerval { it_interval: every, it_value: every };
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
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).expect("a line of it");
    let kilobytes: u64 = size.trim().trim_end_matches(" kB").parse().expect("a number");
    kilobytes << 10
}

fn live(gpu: &Gpu, socket: PathBuf) -> Result<()> {
    let stream = Stream::create(gpu)?;
    let participant = Participant::builder(gpu.clone()).timeout(Some(WATCHDOG)).connect(socket)?;
    say(&Said::Joined(participant.id().0));
    for _ in 0..2 {
        let bytes = hear_descriptor();
        let claimed = participant.claim(&bytes, Wait::Stream(&stream), Some(WATCHDOG));
        let block = claimed.map_err(|error| gpu_ipc::Error::Refused { why: error.to_string(), remedy: "-" })?;
        say(&Said::Claimed);
        hear();
        let read = read_stamp(gpu, &stream, block.device_ptr());
        // The block is used on the stream until the read is done, whether or not that can be waited for.
        block.used_on(&stream).expect("a stream of its own");
        say(&Said::Stamp(read?));
        drop(block);
    }
    drop(participant);
    Ok(())
}

/// Reads the first 8 bytes at an address.
pub fn read_stamp(gpu: &Gpu, stream: &Stream, ptr: gpu_ipc::backend::DevicePtr) -> Result<u64> {
    // Given up when nobody can say that the copy is done.
    let bytes = Box::leak(Box::new([0; 8]));
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is done: `bytes` is
    // never freed, and every block here has 8 bytes and is held by the caller, who names the stream that uses it.
    unsafe { gpu.backend().copy_to_host(stream.raw(), bytes.as_mut_ptr(), ptr, 8) }?;
    stream.synchronize()?;
    Ok(u64::from_le_bytes(*bytes))
}

/// Writes the first 8 bytes of a block.
pub fn write_stamp(gpu: &Gpu, stream: &Stream, block: &SentBlock, stamp: u64) -> Result<()> {
    let bytes = Box::leak(Box::new(stamp.to_le_bytes()));
    block.used_on(stream).expect("a stream of its own");
    // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the copy is done: `bytes` is
    // never freed, and the block, which has 8 bytes, is kept for the stream, whether or not that can be waited for.
    unsafe { gpu.backend().copy_to_device(stream.raw(), block.device_ptr(), bytes.as_ptr(), 8) }?;
    stream.synchronize()
}
