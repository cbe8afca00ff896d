//! System calls that fail: a consumer that finds no descriptor, or no memory, is told, or dies of it, and its producer
//! loses nothing; a session that finds no room for its socket says so and leaves nothing there; a call that a signal
//! interrupts is made again.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Gpu, ParticipantId, Session, Stream, To};

use crate::agent::{Agent, write_stamp};
use crate::{Case, comes};

pub const CASES: &[Case] = &[
    ("limits::a_consumer_without_descriptors", || until_it_passes("files")),
    ("limits::a_consumer_without_memory", || until_it_passes("memory")),
    ("limits::interrupted_calls", interrupted),
];

/// Needs a kernel and a machine that let this user mount a file system of its own.
pub const MOUNTS: &[Case] = &[("limits::a_directory_without_room", without_room)];

fn until_it_passes(what: &str) {
    let gpu = Gpu::new(HostBackend::new(HostConfig::default()).expect("it opens"), DeviceId(0)).expect("a device");
    let stream = Stream::create(&gpu).expect("a stream");
    let dir = tempfile::tempdir().expect("a directory");
    let builder = Session::builder(gpu.clone()).socket(dir.path().join("s"));
    let session = builder.quarantine(Duration::ZERO).open().expect("a session");
    for number in 0.. {
        assert!(number < 400, "a consumer does not get on with that much {what} either");
        let passed = consume(&gpu, &stream, &session, &format!("{what} {number}"));
        assert!(
            comes(|| {
                session.collect();
                let stats = session.stats();
                (stats.live_blocks, stats.participants, stats.leaked_blocks) == (0, 0, 0)
            }),
            "{what} {number}: {:?}",
            session.stats()
        );
        if passed {
            println!("{what}: {number} lives with too few");
            return;
        }
    }
}

/// A consumer's life among signals, and a producer's: nobody takes an interruption for a failure.
fn interrupted() {
    let gpu = Gpu::new(HostBackend::new(HostConfig::default()).expect("it opens"), DeviceId(0)).expect("a device");
    let stream = Stream::create(&gpu).expect("a stream");
    let dir = tempfile::tempdir().expect("a directory");
    let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
    // The faster they come the less gets done between them.
    for microseconds in [5000, 1000, 300, 100] {
        for _ in 0..5 {
            let passed = consume(&gpu, &stream, &session, &format!("signals {microseconds}"));
            assert!(passed, "a signal every {microseconds} us is taken for a failure");
        }
    }
    let gone = comes(|| {
        session.collect();
        session.stats().participants == 0
    });
    assert!(gone, "{:?}", session.stats());
}

/// A command that runs this binary with a file system of this many files at /mnt.
fn with_files(files: u32) -> Command {
    let script = format!(r#"mount -t tmpfs -o size=1m,nr_inodes={files} none /mnt && exec "$0""#);
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c"]).arg(script);
    command.arg(std::env::current_exe().expect("a test binary has a path"));
    command
}

/// Says whether a file system can be mounted here.
pub fn can_mount() -> bool {
    let mut command = Command::new("unshare");
    let command = command.args(["--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]);
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// The directory itself is one file, and a socket that is being bound takes two.
fn without_room() {
    for (failures, files) in (1..10).enumerate() {
        let mut agent = Agent::run(with_files(files), "room 0");
        agent.tell("/mnt");
        let line = agent.hear().expect("it says how it went");
        let (status, complaint) = agent.end();
        assert!(status.success() && !complaint.contains("panicked"), "{files} files: {complaint}");
        if line == "passed" {
            assert!(failures >= 2, "only {failures} calls failed");
            return;
        }
        assert!(line.contains("No space left") || line.contains("os error 28"), "{files} files: {line}");
        assert!(line.ends_with("; 0 left"), "{files} files: {line}");
    }
    panic!("a session does not get on with more room either");
}

/// Opens a session in a directory that may have no room, and says how it went and what is left there.
pub fn open_without_room(gpu: &Gpu, dir: &str) {
    let opened = Session::builder(gpu.clone()).socket(Path::new(dir).join("s")).open();
    match opened {
        Ok(_) => println!("passed"),
        Err(error) => {
            let cause = std::error::Error::source(&error).map_or(String::new(), ToString::to_string);
            let left = std::fs::read_dir(dir).map_or(usize::MAX, Iterator::count);
            println!("failed {error}: {cause}; {left} left");
        }
    }
}

/// Shares two blocks with a consumer that may fail at any time, and says whether it did not.
pub fn consume(gpu: &Gpu, stream: &Stream, session: &Session, fault: &str) -> bool {
    let mut agent = Agent::start(fault);
    agent.tell(session.socket_path().to_str().expect("a plain name"));
    let first = agent.hear();
    let Some(id) = first.as_deref().and_then(|word| word.parse().ok()) else {
        return ended(agent, fault, first.as_deref());
    };
    for stamp in 1..=2u64 {
        let block = session.alloc(4096).expect("there is room");
        write_stamp(gpu, stream, &block, stamp).expect("it writes");
        let shared = block.share(To::Participant(ParticipantId(id)), After::Stream(stream));
        let Ok(descriptor) = shared else {
            // It is gone already.
            let line = agent.hear();
            return ended(agent, fault, line.as_deref());
        };
        let hex: String = descriptor.as_bytes().iter().map(|b| format!("{b:02x}")).collect();
        agent.tell(&hex);
        let line = agent.hear();
        if line.as_deref() != Some("claimed") {
            return ended(agent, fault, line.as_deref());
        }
        // While it holds the block, the producer lets go, and gives its other bytes to others.
        drop(block);
        session.collect();
        let other = session.alloc(4096).expect("there is room");
        write_stamp(gpu, stream, &other, 99).expect("it writes");
        agent.tell("read");
        let line = agent.hear();
        if line.as_deref() != Some(format!("read {stamp}").as_str()) {
            return ended(agent, fault, line.as_deref());
        }
    }
    let line = agent.hear();
    ended(agent, fault, line.as_deref())
}

/// Lets an agent end, whose last line says how it went.
fn ended(agent: Agent, fault: &str, line: Option<&str>) -> bool {
    let (status, complaint) = agent.end();
    assert!(!complaint.contains("wrong:") && !complaint.contains("panicked"), "{fault}: {complaint}");
    match line {
        Some("passed") => true,
        Some(line) if line.starts_with("failed ") => {
            assert!(status.success(), "{fault}: {status} after {line}: {complaint}");
            false
        }
        // A process without memory may abort, which the Rust runtime does.
        None if fault.starts_with("memory") => false,
        other => panic!("{fault}: {other:?}, {status}: {complaint}"),
    }
}
