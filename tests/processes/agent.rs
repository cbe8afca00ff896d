//! The other process: this test's own binary, started again, doing what it is told line by line.
//!
//! It can be a consumer, a producer, or both. Each command is one line on its standard input and is answered by one
//! line; words are separated by spaces, bytes are hex.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::num::NonZeroU32;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{
    After, ClaimError, Claims, Gpu, Participant, ParticipantId, ReceivedBlock, SentBlock, Session, Stream, To, Wait,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::gate::Gate;
use crate::kernel::Kernels;
use crate::step;

/// Set in a process that is an agent.
pub const ROLE: &str = "GPU_IPC_TEST_AGENT";
/// Long enough for the slowest machine: a wait that takes longer fails the test.
pub const WATCHDOG: Duration = Duration::from_secs(120);

/// An agent, as the test that started it sees it. Killed when dropped.
pub struct Agent {
    child: Child,
    to: ChildStdin,
    from: Receiver<String>,
}

impl Agent {
    /// Starts one.
    pub fn start() -> Agent {
        Self::start_with(&[])
    }

    /// Starts one with environment variables.
    pub fn start_with(variables: &[(&str, &str)]) -> Agent {
        let mut command = Command::new(std::env::current_exe().expect("a test binary has a path"));
        command.envs(variables.iter().copied());
        Self::run(command)
    }

    /// Starts one by a command that runs this binary in the end.
    pub fn run(mut command: Command) -> Agent {
        let mut child = command
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process can be started");
        let to = child.stdin.take().expect("piped");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let (sender, from) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Agent { child, to, from }
    }

    /// Gives a command without waiting for its answer.
    pub fn tell(&mut self, command: &str) {
        // An agent that died at this command is what some tests want; `answer` tells.
        let _ = writeln!(self.to, "{command}");
    }

    /// Waits for an answer; `None` when the agent died instead.
    pub fn answer(&mut self) -> Option<String> {
        match self.from.recv_timeout(WATCHDOG) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("the agent neither answered nor died"),
        }
    }

    /// Gives a command and returns the words of its answer.
    pub fn ask(&mut self, command: &str) -> Vec<String> {
        self.tell(command);
        let answer = self.answer().unwrap_or_else(|| panic!("the agent died at: {command}"));
        answer.split(' ').map(str::to_owned).collect()
    }

    /// Gives a command whose answer must be its first word `ok`, and returns the rest.
    pub fn must(&mut self, command: &str) -> Vec<String> {
        let mut words = self.ask(command);
        assert_eq!(words.remove(0), "ok", "{command}: {words:?}");
        words
    }

    /// Connects it to a session, and returns its number there.
    pub fn connect(&mut self, session: &Session) -> ParticipantId {
        ParticipantId(number(&self.must(&format!("connect {}", session.socket_path().display()))[0]))
    }

    /// Claims a descriptor and returns the block's index.
    pub fn claim(&mut self, descriptor: &gpu_ipc::Descriptor) -> u64 {
        number(&self.must(&format!("claim {}", hex(descriptor.as_bytes())))[0])
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

    /// Sends it a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("it is a child of ours");
    }

    /// Waits until it is gone.
    pub fn wait(&mut self) {
        self.child.wait().expect("it is a child of ours");
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a number that an agent answered.
pub fn number<T: FromStr>(word: &str) -> T {
    word.parse().unwrap_or_else(|_| panic!("not a number: {word}"))
}

/// Writes bytes as hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Reads hex.
pub fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).expect("hex")).collect()
}

/// Names the backend to test, if it is not the host.
pub const BACKEND: &str = "GPU_IPC_TEST_BACKEND";

/// Says whether the host backend is tested, which can do what a GPU does only by accident.
pub fn is_host() -> bool {
    std::env::var(BACKEND).map_or(true, |backend| backend == "host")
}

/// Opens the first device of the backend that is tested: of a GPU's, once in a process, as an application would. A
/// driver waits for the whole process before some of its calls, and only one object of ours can know what it waits for.
pub fn open_gpu() -> Gpu {
    static OPENED: OnceLock<Gpu> = OnceLock::new();
    if is_host() {
        return open_host().1;
    }
    OPENED.get_or_init(|| open_named(&std::env::var(BACKEND).expect("it is set"))).clone()
}

/// Names the device to open by its uuid, if it is not the first.
pub const DEVICE: &str = "GPU_IPC_TEST_DEVICE";

fn open_named(name: &str) -> Gpu {
    let kind = gpu_ipc::BackendKind::ALL.into_iter().find(|kind| kind.name() == name).expect("a backend's name");
    let found = gpu_ipc::detect().expect("the backends can be asked");
    match std::env::var(DEVICE) {
        Ok(uuid) => found.gpus().iter().find(|gpu| gpu.kind() == kind && gpu.uuid().to_string() == uuid).cloned(),
        Err(_) => found.first(kind).ok(),
    }
    .expect("the backend that was asked for is here")
}

/// Opens the first host device.
pub fn open_host() -> (std::sync::Arc<HostBackend>, Gpu) {
    let backend = HostBackend::new(HostConfig::from_env().expect("the variables are good")).expect("it opens");
    let gpu = Gpu::new(backend.clone(), DeviceId(0)).expect("there is a device");
    (backend, gpu)
}

/// Writes a stamp into the first 8 bytes at an address, in stream order, and waits for it.
pub fn write_stamp(gpu: &Gpu, stream: &Stream, ptr: gpu_ipc::backend::DevicePtr, stamp: u64) {
    let bytes = stamp.to_le_bytes();
    // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the copy is done: the stream
    // is synchronised before `bytes` goes, and every block here has 8 bytes.
    unsafe { gpu.backend().copy_to_device(stream.raw(), ptr, bytes.as_ptr(), 8) }.expect("it copies");
    stream.synchronize().expect("it runs");
}

/// Reads a stamp.
pub fn read_stamp(gpu: &Gpu, stream: &Stream, ptr: gpu_ipc::backend::DevicePtr) -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is done: the stream
    // is synchronised before `bytes` is read, and every block here has 8 bytes.
    unsafe { gpu.backend().copy_to_host(stream.raw(), bytes.as_mut_ptr(), ptr, 8) }.expect("it copies");
    stream.synchronize().expect("it runs");
    u64::from_le_bytes(bytes)
}

/// What an agent has.
struct State {
    /// For what the host backend alone can be made to do.
    host: Option<std::sync::Arc<HostBackend>>,
    gpu: Gpu,
    stream: Stream,
    participant: Option<Participant>,
    crowd: Vec<Participant>,
    received: HashMap<u64, ReceivedBlock>,
    session: Option<Session>,
    sent: HashMap<u64, SentBlock>,
    serial: u64,
    stuck: Vec<Gate>,
    kernels: Option<Kernels>,
}

/// Runs an agent until its standard input ends.
pub fn run() {
    let (host, gpu) = if is_host() {
        let (host, gpu) = open_host();
        (Some(host), gpu)
    } else {
        (None, open_gpu())
    };
    let stream = Stream::create(&gpu).expect("a stream");
    let mut state = State {
        host,
        gpu,
        stream,
        participant: None,
        crowd: Vec::new(),
        received: HashMap::new(),
        session: None,
        sent: HashMap::new(),
        serial: 0,
        stuck: Vec::new(),
        kernels: None,
    };
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match state.obey(&words) {
            Ok(answer) => format!("ok {answer}"),
            Err(error) => format!("error {error}"),
        };
        let mut out = std::io::stdout().lock();
        if writeln!(out, "{}", answer.trim_end()).and_then(|()| out.flush()).is_err() {
            break;
        }
    }
}

impl State {
    fn obey(&mut self, words: &[&str]) -> Result<String, String> {
        let text = |e: gpu_ipc::Error| e.to_string();
        let index = |n: usize| number::<u64>(words[n]);
        match words[0] {
            "connect" => self.joined(Participant::builder(self.gpu.clone()).connect(words[1]).map_err(text)?),
            // Connects until it is refused: how often, the first's number, and why not more.
            "crowd" => loop {
                match Participant::builder(self.gpu.clone()).connect(words[1]) {
                    Ok(participant) => self.crowd.push(participant),
                    Err(error) => {
                        let first = self.crowd.first().map_or(0, |participant| participant.id().0);
                        break Ok(format!("{} {first} {error}", self.crowd.len()));
                    }
                }
            },
            "crowd-of" => {
                for _ in 0..index(2) {
                    self.crowd.push(Participant::builder(self.gpu.clone()).connect(words[1]).map_err(text)?);
                }
                Ok(String::new())
            }
            "crowd-claim-all" => {
                for participant in &self.crowd {
                    let claimed = participant.claim(&unhex(words[1]), Wait::Host, Some(WATCHDOG));
                    let claimed = claimed.map_err(|error| variant(&error))?;
                    self.serial += 1;
                    self.received.insert(self.serial, claimed);
                }
                Ok(self.crowd.len().to_string())
            }
            "cancel" => {
                let descriptor = gpu_ipc::Descriptor::decode(&unhex(words[2])).map_err(text)?;
                let cancelled = self.sent[&index(1)].cancel(&descriptor).map_err(text)?;
                Ok(cancelled.to_string())
            }
            "crowd-claim" => {
                let first = self.crowd.first().ok_or("nobody is connected")?;
                let claimed = first.claim(&unhex(words[1]), Wait::Host, Some(WATCHDOG));
                claimed.map(|block| block.len().to_string()).map_err(|error| variant(&error))
            }
            "connect-cached" => {
                let builder = Participant::builder(self.gpu.clone()).mapping_cache(index(2), index(3) as usize);
                self.joined(builder.connect(words[1]).map_err(text)?)
            }
            // By a descriptor that this process was started with.
            "connect-by" => {
                // SAFETY: `from_raw_fd` asks for an open descriptor that nobody else owns: the parent
                // left it open for this command alone.
                let connection = unsafe { OwnedFd::from_raw_fd(number(words[1])) };
                self.joined(Participant::builder(self.gpu.clone()).connect_by(connection).map_err(text)?)
            }
            "try" => {
                let participant = self.participant.as_ref().ok_or("not connected")?;
                match participant.try_claim(&unhex(words[1]), Wait::Host) {
                    Ok(block) => Ok(self.keep(block)),
                    Err(error) => Err(variant(&error)),
                }
            }
            // Claims several at once, and says how many and the first reason why not.
            "claim-many" => {
                let participant = self.participant.as_ref().ok_or("not connected")?;
                let descriptors: Vec<Vec<u8>> = words[1].split(',').map(unhex).collect();
                let mut why = String::from("-");
                let mut count = 0;
                for claimed in participant.claim_many(&descriptors, Wait::None, Some(WATCHDOG)) {
                    match claimed {
                        Ok(block) => {
                            count += 1;
                            self.keep(block);
                        }
                        Err(error) => why = variant(&error),
                    }
                }
                Ok(format!("{count} {why}"))
            }
            "prefetch" => {
                let participant = self.participant.as_ref().ok_or("not connected")?;
                let descriptors: Vec<Vec<u8>> = words[1].split(',').map(unhex).collect();
                participant.prefetch(&descriptors).map(|()| String::new()).map_err(|error| variant(&error))
            }
            "await-event" => self.await_event(words[1]),
            "forward" | "forward-ticket" => {
                let to = match words[0] {
                    "forward" => To::Participant(ParticipantId(index(2))),
                    _ => To::Ticket(NonZeroU32::new(index(2) as u32).map_or(Claims::Unlimited, Claims::Times)),
                };
                let forwarded = self.received[&index(1)].forward(to, Some(WATCHDOG));
                step::reached("forwarded");
                forwarded.map(|descriptor| hex(descriptor.as_bytes())).map_err(|error| variant(&error))
            }
            "slice" => {
                let slice = self.received[&index(1)].slice(index(2)..index(3)).map_err(text)?;
                Ok(self.keep(slice))
            }
            "len" => Ok(self.received[&index(1)].len().to_string()),
            "claim" | "claim-stream" | "claim-none" => {
                let wait = match words[0] {
                    "claim" => Wait::Host,
                    "claim-none" => Wait::None,
                    _ => Wait::Stream(&self.stream),
                };
                let participant = self.participant.as_ref().ok_or("not connected")?;
                match participant.claim(&unhex(words[1]), wait, Some(WATCHDOG)) {
                    Ok(block) => Ok(self.keep(block)),
                    Err(error) => Err(variant(&error)),
                }
            }
            "stamp" => {
                step::reached("use");
                let ptr = self.received[&index(1)].device_ptr();
                Ok(read_stamp(&self.gpu, &self.stream, ptr).to_string())
            }
            "state" => Ok(format!("{:?}", self.received[&index(1)].state())),
            "kept" => Ok(self.participant.as_ref().map_or(0, Participant::kept_leases).to_string()),
            "mappings" => Ok(self.participant.as_ref().map_or(0, Participant::mappings).to_string()),
            "synchronize" => self.stream.synchronize().map(|()| String::new()).map_err(text),
            "reply" => {
                let block = &self.received[&index(1)];
                write_stamp(&self.gpu, &self.stream, block.device_ptr(), index(2));
                block.used_on(&self.stream).expect("a stream of its own");
                Ok(String::new())
            }
            "used" => {
                self.received[&index(1)].used_on(&self.stream).expect("a stream of its own");
                Ok(String::new())
            }
            "drop" => {
                drop(self.received.remove(&index(1)).or_else(|| {
                    drop(self.sent.remove(&index(1)));
                    None
                }));
                Ok(String::new())
            }
            "drop-all" => {
                self.received.clear();
                Ok(String::new())
            }
            "stick" => {
                self.stuck.push(Gate::close(&self.gpu, &self.stream));
                Ok(String::new())
            }
            // A kernel that writes on and on into a block.
            "write-on" => {
                let ptr = match (self.received.get(&index(1)), self.sent.get(&index(1))) {
                    (Some(received), _) => {
                        received.used_on(&self.stream).expect("a stream of its own");
                        received.device_ptr()
                    }
                    (None, Some(sent)) => {
                        sent.used_on(&self.stream).expect("a stream of its own");
                        sent.device_ptr()
                    }
                    (None, None) => return Err("no such block".into()),
                };
                self.kernels.get_or_insert_with(Kernels::open).write_on(&self.stream, ptr, index(2));
                Ok(String::new())
            }
            // A kernel that breaks the context.
            "crash" => {
                let stream = Stream::create(&self.gpu).map_err(text)?;
                self.kernels.get_or_insert_with(Kernels::open).crash(&stream);
                // The error is there once a stream tells of it.
                while stream.synchronize().is_ok() {}
                std::mem::forget(stream);
                Ok(String::new())
            }
            "unstick" => {
                self.stuck.clear();
                Ok(String::new())
            }
            "late" => {
                let ptr = self.received[&index(1)].device_ptr();
                let delay = Duration::from_millis(index(3));
                self.host
                    .as_ref()
                    .ok_or("not the host")?
                    .arm_late_write(ptr, &index(2).to_le_bytes(), delay)
                    .map_err(text)?;
                Ok(String::new())
            }
            "fork" => Ok(fork_that_lives_on().to_string()),
            "fork-and-call" => Ok(self.call_in_a_child()),
            "disconnect" => {
                self.participant = None;
                Ok(String::new())
            }
            "die-at" => {
                step::die_at(words[1]);
                Ok(String::new())
            }
            "open" => {
                let session = Session::builder(self.gpu.clone()).socket(words[1]).open().map_err(text)?;
                self.session = Some(session);
                Ok(String::new())
            }
            "alloc" => {
                let block = self.session.as_ref().ok_or("no session")?.alloc(index(1)).map_err(text)?;
                write_stamp(&self.gpu, &self.stream, block.device_ptr(), index(2));
                self.serial += 1;
                self.sent.insert(self.serial, block);
                Ok(self.serial.to_string())
            }
            "stamp-sent" => Ok(read_stamp(&self.gpu, &self.stream, self.sent[&index(1)].device_ptr()).to_string()),
            "outstanding" => {
                self.session.as_ref().ok_or("no session")?.collect();
                Ok(self.sent[&index(1)].outstanding().to_string())
            }
            "share" | "share-stream" | "share-ticket" | "share-ticket-stream" => {
                let after = if words[0].ends_with("-stream") { After::Stream(&self.stream) } else { After::Done };
                let to = match words[0] {
                    "share-ticket" | "share-ticket-stream" => To::Ticket(Claims::Once),
                    _ => To::Participant(ParticipantId(index(2))),
                };
                let descriptor = self.sent[&index(1)].share(to, after).map_err(text)?;
                step::reached("send");
                Ok(hex(descriptor.as_bytes()))
            }
            "collect" => {
                let session = self.session.as_ref().ok_or("no session")?;
                step::reached("collect-begins");
                let collected = session.collect();
                Ok(format!("{} {}", collected.blocks, session.stats().limbo_blocks))
            }
            "break" => {
                self.host.as_ref().ok_or("not the host")?.break_device(DeviceId(0));
                Ok(String::new())
            }
            other => Err(format!("no such command: {other}")),
        }
    }

    fn joined(&mut self, participant: Participant) -> Result<String, String> {
        let id = participant.id().0;
        self.participant = Some(participant);
        Ok(id.to_string())
    }

    fn keep(&mut self, block: ReceivedBlock) -> String {
        self.serial += 1;
        self.received.insert(self.serial, block);
        self.serial.to_string()
    }

    /// Polls the participant's descriptor until an event of this name has come.
    fn await_event(&self, name: &str) -> Result<String, String> {
        let participant = self.participant.as_ref().ok_or("not connected")?;
        let deadline = Instant::now() + WATCHDOG;
        loop {
            while let Some(event) = participant.next_notice() {
                let event = format!("{event:?}");
                if event.starts_with(name) {
                    return Ok(event.replace(' ', ""));
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no event {name}");
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: 0 };
            let _ = poll(&mut [PollFd::new(participant, PollFlags::IN)], Some(&timeout));
        }
    }

    /// In a forked child every call gives `Forked` and every drop does nothing.
    fn call_in_a_child(&mut self) -> String {
        // SAFETY: `fork` asks that the child of a process with threads calls only what is safe there: it allocates with
        // the C library's allocator, which glibc keeps usable in a child, and leaves with `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let mut good = true;
            if let Some(participant) = self.participant.take() {
                good &= matches!(participant.claim(&[], Wait::None, None), Err(ClaimError::Forked));
                good &= matches!(participant.prefetch(&[[0u8; 192]]), Err(ClaimError::Forked));
                participant.abandon(&[]);
                good &= participant.next_notice().is_none();
                good &= matches!(participant.close(None), Err(gpu_ipc::Error::Forked { .. }));
            }
            for block in self.received.values() {
                good &= matches!(block.used_on(&self.stream), Err(gpu_ipc::Error::Forked { .. }));
                let to = To::Ticket(Claims::Once);
                good &= matches!(block.forward(to, None), Err(ClaimError::Forked));
            }
            if let Some(session) = self.session.take() {
                good &= matches!(session.alloc(1), Err(gpu_ipc::Error::Forked { .. }));
                drop(session);
            }
            self.received.clear();
            self.sent.clear();
            // SAFETY: `_exit` has no conditions.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        let mut status = 0;
        // SAFETY: `waitpid` asks for a valid place for the status.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        status.to_string()
    }
}

/// Forks a child that does nothing until it is killed, and returns its number.
fn fork_that_lives_on() -> i32 {
    // SAFETY: `fork` asks that the child of a process with threads calls only async-signal-safe functions: it calls
    // `pause` alone.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        for standard in 0..3 {
            // The test reads these to their end, which must not wait for the child.
            // SAFETY: `close` asks for a descriptor that nobody uses afterwards: the child uses none.
            unsafe { libc::close(standard) };
        }
        loop {
            // SAFETY: `pause` has no conditions.
            unsafe { libc::pause() };
        }
    }
    pid
}

fn variant(error: &ClaimError) -> String {
    let name = match error {
        ClaimError::WouldBlock => "WouldBlock",
        ClaimError::Revoked => "Revoked",
        ClaimError::AlreadyClaimed => "AlreadyClaimed",
        ClaimError::Stale => "Stale",
        ClaimError::ProducerGone => "ProducerGone",
        ClaimError::Capturing => "Capturing",
        ClaimError::Forked => "Forked",
        ClaimError::Refused { .. } => "Refused",
        ClaimError::Backend(_) => "Backend",
    };
    format!("{name} {error}")
}
