//! A consumer in another process: this test's own binary, started again.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{Gpu, Participant, Result, SentBlock, Stream, Wait};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::WATCHDOG;
use crate::faulty::Faulty;
use crate::{hostile, limits, mapping};

/// Names what an agent suffers from.
pub const ROLE: &str = "GPU_IPC_TEST_FAULT";

/// An agent. Killed when dropped.
pub struct Agent {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Agent {
    /// Starts one: `backend N`, `files N`, `memory N`, `signals N`, `room N`, `two N` or `scribble N`.
    pub fn start(fault: &str) -> Agent {
        Agent::run(Command::new(std::env::current_exe().expect("a test binary has a path")), fault)
    }

    /// Starts one by a command that runs this binary.
    pub fn run(mut command: Command, fault: &str) -> Agent {
        let command = command.env(ROLE, fault).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("a process can be started");
        let to = child.stdin.take();
        let from = BufReader::new(child.stdout.take().expect("piped"));
        Agent { child, to, from }
    }

    /// Tells it something; it may be gone.
    pub fn tell(&mut self, line: &str) {
        if let Some(to) = &mut self.to {
            let _ = writeln!(to, "{line}");
        }
    }

    /// Hears the next line; `None` once it is gone.
    pub fn hear(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.from.read_line(&mut line).expect("a pipe");
        (read != 0).then(|| line.trim_end().to_owned())
    }

    /// Waits for its end, and returns what it complained about.
    pub fn end(mut self) -> (ExitStatus, String) {
        self.to = None;
        let mut complaint = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = std::io::Read::read_to_string(&mut stderr, &mut complaint);
        }
        (self.child.wait().expect("it is a child of ours"), complaint)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lives as a consumer: connects, claims, reads, lets go. Says `failed` and why, or `passed`.
pub fn run(role: &str) {
    let (what, number) = role.split_once(' ').expect("a fault and a number");
    let number: u64 = number.parse().expect("a number");
    let faulty = Faulty::new(HostBackend::new(HostConfig::default()).expect("it opens"));
    let gpu = Gpu::new(faulty.clone(), DeviceId(0)).expect("there is a device");
    let socket = hear();
    match what {
        "backend" => faulty.fail_at(u32::try_from(number).unwrap_or(u32::MAX)),
        "scribble" => return hostile::scribble(&gpu, &socket, number),
        "two" => return mapping::claim_beside(&faulty, &gpu, &socket),
        "room" => return limits::open_without_room(&gpu, &socket),
        "signals" => interrupt_every(number),
        "files" => limit(Resource::Nofile, open_files() + number),
        "memory" => limit(Resource::As, mapped_bytes() + (number << 18)),
        _ => {}
    }
    let lived = live(&gpu, &socket);
    let failed = faulty.heal();
    match (lived, failed) {
        (Err(error), _) => println!("failed {error}"),
        // Nobody was told, because somebody could do without.
        (Ok(()), Some(call)) => println!("failed {call}"),
        (Ok(()), None) => println!("passed"),
    }
    // What went wrong with the backend is for the test to see.
    for wrong in faulty.wrongs() {
        eprintln!("wrong: {wrong}");
    }
    hear();
}

pub fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).expect("a pipe");
    line.trim_end().to_owned()
}

/// Hears bytes in hexadecimal.
pub fn hear_bytes() -> Vec<u8> {
    let text = hear();
    (0..text.len()).step_by(2).filter_map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
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

fn live(gpu: &Gpu, socket: &str) -> Result<()> {
    let stream = Stream::create(gpu)?;
    let participant = Participant::builder(gpu.clone()).timeout(Some(WATCHDOG)).connect(socket)?;
    println!("{}", participant.id().0);
    for _ in 0..2 {
        let bytes = hear_bytes();
        let claimed = participant.claim(&bytes, Wait::Stream(&stream), Some(WATCHDOG));
        let block = claimed.map_err(|error| gpu_ipc::Error::Refused { why: error.to_string(), remedy: "-" })?;
        println!("claimed");
        hear();
        let read = read_stamp(gpu, &stream, block.device_ptr());
        // The block is used on the stream until the read is done, whether or not that can be waited for.
        block.used_on(&stream).expect("a stream of its own");
        println!("read {}", read?);
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
