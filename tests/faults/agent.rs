//! A consumer in another process: this test's own binary, started again, and what the two say to
//! each other.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use gpu_ipc::{Gpu, Result, SentBlock, Stream};
use harness::Child;
use harness::program::this_program;
use serde::{Deserialize, Serialize};

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

/// Reads the first 8 bytes at an address.
pub fn read_stamp(gpu: &Gpu, stream: &Stream, ptr: gpu_ipc::backend::DevicePtr) -> Result<u64> {
    // Given up when nobody can say that the copy is done.
    let bytes = Box::leak(Box::new([0; 8]));
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is
    // done: `bytes` is never freed, and every block here has 8 bytes and is held by the caller, who
    // names the stream that uses it.
    unsafe {
        gpu.backend()
            .copy_to_host(stream.raw(), bytes.as_mut_ptr(), ptr, 8)
    }?;
    stream.synchronize()?;
    Ok(u64::from_le_bytes(*bytes))
}

/// Writes the first 8 bytes of a block.
pub fn write_stamp(gpu: &Gpu, stream: &Stream, block: &SentBlock, stamp: u64) -> Result<()> {
    let bytes = Box::leak(Box::new(stamp.to_le_bytes()));
    block.used_on(stream).expect("a stream of its own");
    // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the copy
    // is done: `bytes` is never freed, and the block, which has 8 bytes, is kept for the stream,
    // whether or not that can be waited for.
    unsafe {
        gpu.backend()
            .copy_to_device(stream.raw(), block.device_ptr(), bytes.as_ptr(), 8)
    }?;
    stream.synchronize()
}
