//! A consumer in a process of its own: this test's binary, started again, told line by line what to do.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use gpu_ipc::{BackendKind, Descriptor, Gpu, Participant, ParticipantId, ReceivedBlock, Session, Wait};

/// Set in a process that is a consumer.
pub const ROLE: &str = "GPU_IPC_TEST_CONSUMER";
/// Long enough for the slowest machine: a wait that takes longer fails the test.
pub const WATCHDOG: Duration = Duration::from_secs(120);

/// A consumer, as the test that started it sees it. Killed when dropped.
pub struct Consumer {
    child: Child,
    to: ChildStdin,
    from: Receiver<String>,
}

impl Consumer {
    /// Starts one.
    pub fn start() -> Consumer {
        let mut child = Command::new(std::env::current_exe().expect("a test binary has a path"))
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process can be started");
        let to = child.stdin.take().expect("piped");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let (sender, from) = channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Consumer { child, to, from }
    }

    /// Gives a command and returns its number.
    #[track_caller]
    fn ask(&mut self, command: &str) -> u64 {
        writeln!(self.to, "{command}").expect("it lives");
        let answer = match self.from.recv_timeout(WATCHDOG) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => panic!("the consumer died at: {command}"),
            Err(RecvTimeoutError::Timeout) => panic!("no answer to: {command}"),
        };
        answer.parse().unwrap_or_else(|_| panic!("{command}: {answer}"))
    }

    /// Connects it to a session, and returns its number there.
    #[track_caller]
    pub fn connect(&mut self, session: &Session) -> ParticipantId {
        ParticipantId(self.ask(&format!("connect {}", session.socket_path().display())))
    }

    /// Claims a block and returns its number of it.
    #[track_caller]
    pub fn claim(&mut self, descriptor: &Descriptor) -> u64 {
        let hex: String = descriptor.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        self.ask(&format!("claim {hex}"))
    }

    /// Reads the first 8 bytes of a block that it holds.
    #[track_caller]
    pub fn stamp(&mut self, held: u64) -> u64 {
        self.ask(&format!("stamp {held}"))
    }

    /// Lets go of a block.
    #[track_caller]
    pub fn let_go(&mut self, held: u64) {
        assert_eq!(self.ask(&format!("drop {held}")), 1, "it held none");
    }

    /// Counts the regions that it has mapped.
    #[track_caller]
    pub fn mappings(&mut self) -> u64 {
        self.ask("mappings")
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it at once, and waits until it is gone.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is a child of ours");
        self.child.wait().expect("it is a child of ours");
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Opens the first device of the backend that `GPU_IPC_TEST_BACKEND` names, or of the host backend.
pub fn open_gpu() -> Gpu {
    let name = std::env::var("GPU_IPC_TEST_BACKEND").unwrap_or_else(|_| "host".into());
    let kind = BackendKind::ALL.into_iter().find(|kind| kind.name() == name).expect("a backend's name");
    gpu_ipc::detect().and_then(|found| found.first(kind)).expect("the backend that was asked for is here")
}

/// Writes a stamp into the first 8 bytes at an address.
pub fn write_stamp(gpu: &Gpu, stream: &gpu_ipc::Stream, ptr: gpu_ipc::backend::DevicePtr, stamp: u64) {
    let bytes = stamp.to_le_bytes();
    // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the copy is done: the stream
    // is synchronised before `bytes` goes, and every block here has 8 bytes.
    unsafe { gpu.backend().copy_to_device(stream.raw(), ptr, bytes.as_ptr(), 8) }.expect("it copies");
    stream.synchronize().expect("it runs");
}

fn read_stamp(gpu: &Gpu, stream: &gpu_ipc::Stream, ptr: gpu_ipc::backend::DevicePtr) -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is done: the stream
    // is synchronised before `bytes` is read, and every block here has 8 bytes.
    unsafe { gpu.backend().copy_to_host(stream.raw(), bytes.as_mut_ptr(), ptr, 8) }.expect("it copies");
    stream.synchronize().expect("it runs");
    u64::from_le_bytes(bytes)
}

/// Is a consumer until its standard input ends.
pub fn run() {
    let gpu = open_gpu();
    let stream = gpu_ipc::Stream::create(&gpu).expect("a stream");
    let mut participant: Option<Participant> = None;
    let mut held: HashMap<u64, ReceivedBlock> = HashMap::new();
    let mut claimed = 0u64;
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        let number = || argument.parse::<u64>().expect("a number");
        let answer = match command {
            "connect" => {
                let connected = Participant::builder(gpu.clone()).connect(argument).expect("connected");
                participant.insert(connected).id().0
            }
            "claim" => {
                let digits = argument.as_bytes().chunks(2).map(|two| std::str::from_utf8(two).expect("hex"));
                let bytes: Vec<u8> = digits.map(|two| u8::from_str_radix(two, 16).expect("hex")).collect();
                let participant = participant.as_ref().expect("connected");
                let block = participant.claim(&bytes, Wait::Host, Some(WATCHDOG)).expect("claimed");
                claimed += 1;
                held.insert(claimed, block);
                claimed
            }
            "stamp" => read_stamp(&gpu, &stream, held[&number()].device_ptr()),
            "drop" => u64::from(held.remove(&number()).is_some()),
            "mappings" => participant.as_ref().map_or(0, Participant::mappings) as u64,
            other => panic!("no such command: {other}"),
        };
        println!("{answer}");
    }
}
