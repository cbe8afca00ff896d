//! The other process: this program again, told what to do line by line.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, DevicePtr, DeviceUuid, Error, Gpu, Sharing};
use gpu_ipc_torch::{CounterFile, ReceivedStorage, Receiver, TensorMessage};
use ipc_rc::{Participant, ReceivedBlock, Stream, Wait};

/// Set in the other process.
pub const ROLE: &str = "GPU_IPC_TORCH_AGENT";
/// Bytes of a chunk of what is exported as an expandable segment.
pub const CHUNK: u64 = 1 << 20;
/// A process that takes longer counts as hung.
pub const WATCHDOG: Duration = Duration::from_secs(60);

pub fn open_gpu() -> Gpu {
    Gpu::new(HostBackend::new(HostConfig::default()).expect("memory"), DeviceId(0)).expect("a device")
}

/// Keeps a stream from going on until the returned end is dropped.
pub fn stop(stream: &Stream) -> mpsc::Sender<()> {
    let (gate, closed) = mpsc::channel::<()>();
    let wait = Box::new(move || {
        let _ = closed.recv();
    });
    // SAFETY: `host_function` asks for a live stream that nobody captures: `stream` keeps it.
    unsafe { stream.gpu().backend().host_function(stream.raw(), wait) }.expect("queued");
    gate
}

pub fn fill(stream: &Stream, ptr: DevicePtr, byte: u8, len: u64) {
    // SAFETY: `fill` asks for a live stream and a range that stays: the callers hold both until it is done.
    unsafe { stream.gpu().backend().fill(stream.raw(), ptr, byte, len) }.expect("queued");
}

pub fn bytes(stream: &Stream, ptr: DevicePtr, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that stay until it is done: it is waited for below.
    unsafe { stream.gpu().backend().copy_to_host(stream.raw(), bytes.as_mut_ptr(), ptr, bytes.len()) }.expect("queued");
    stream.synchronize().expect("done");
    bytes
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex")).collect()
}

/// The other process as a test sees it. It ends with its input.
pub struct Agent {
    child: Child,
    to: Option<ChildStdin>,
    from: mpsc::Receiver<String>,
}

impl Agent {
    pub fn start() -> Agent {
        let mut child = Command::new(std::env::current_exe().expect("a path"))
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let to = child.stdin.take();
        let (lines, from) = mpsc::channel();
        let out: ChildStdout = child.stdout.take().expect("piped");
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if lines.send(line).is_err() {
                    return;
                }
            }
        });
        Agent { child, to, from }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.to.as_ref().expect("alive"), "{line}").expect("it listens");
    }

    #[track_caller]
    pub fn answer(&self) -> String {
        self.from.recv_timeout(WATCHDOG).expect("an answer in time")
    }

    #[track_caller]
    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.answer()
    }

    /// Kills it and waits until it is dead.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is ours");
        self.child.wait().expect("it is ours");
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It ends with its input and closes its output then; a message more would be a fault of the test's.
        self.to = None;
        let _ = self.from.recv_timeout(WATCHDOG);
        // Dead already where a test killed it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the other process has.
struct State {
    receiver: Receiver,
    stream: Stream,
    held: Vec<ReceivedStorage>,
    gates: Vec<mpsc::Sender<()>>,
    exported: Option<(Vec<OwnedFd>, CounterFile)>,
    native: Option<(ReceivedBlock, Participant)>,
}

/// The other process.
pub fn run() {
    let gpu = open_gpu();
    let stream = Stream::create(&gpu).expect("a stream");
    let receiver = Receiver::new(gpu).expect("a thread");
    let mut state = State { receiver, stream, held: Vec::new(), gates: Vec::new(), exported: None, native: None };
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("text");
        let (command, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = state.obey(command, rest).unwrap_or_else(|error| format!("error: {error}"));
        println!("{answer}");
    }
}

impl State {
    fn open(&self, hex: &str, wait: Wait<'_>, timeout: Option<Duration>) -> Result<ReceivedStorage, Error> {
        let message = TensorMessage::decode(&unhex(hex))?;
        let mut storage = message.fields.decode()?;
        storage.uuid = message.uuid;
        self.receiver.open(&storage, wait, timeout)
    }

    fn content(&self, storage: &ReceivedStorage) -> String {
        hex(&bytes(&self.stream, storage.device_ptr(), storage.len().min(4)))
    }

    fn obey(&mut self, command: &str, rest: &str) -> Result<String, Error> {
        Ok(match command {
            "open" => {
                let storage = self.open(rest, Wait::Host, Some(WATCHDOG))?;
                let content = self.content(&storage);
                self.held.push(storage);
                content
            }
            // By another receiver of this process.
            "open-other" => {
                let storage = TensorMessage::decode(&unhex(rest))?.fields.decode()?;
                Receiver::new(open_gpu())?.open(&storage, Wait::Host, Some(WATCHDOG))?;
                "opened".into()
            }
            // Gives the sender's work no time at all.
            "hurry" => {
                self.open(rest, Wait::Host, Some(Duration::ZERO))?;
                "in time".into()
            }
            "on-stream" => {
                println!("opening");
                let storage = self.open(rest, Wait::Stream(&self.stream), None)?;
                self.content(&storage)
            }
            // Opens and drops at once: what is queued is the wait for the sender alone.
            "on-stream-drop" => {
                drop(self.open(rest, Wait::Stream(&self.stream), None)?);
                // Long enough to give back what waits for nothing.
                match self.receiver.wait_released(Duration::from_millis(200)) {
                    true => "given back".into(),
                    false => "waits".into(),
                }
            }
            // In a child everything says so, and every drop does nothing.
            "fork" => {
                // SAFETY: `fork` asks that the child of a process with threads calls only what is safe there: it
                // allocates with the C library's allocator, which glibc keeps usable in a child, and leaves with
                // `_exit`.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    let message = TensorMessage::decode(&unhex(rest)).and_then(|message| message.fields.decode());
                    let opened = message.and_then(|storage| self.receiver.open(&storage, Wait::None, None));
                    self.held.clear();
                    let code = if matches!(opened, Err(Error::Forked { .. })) { 0 } else { 1 };
                    // SAFETY: `_exit` has no conditions.
                    unsafe { libc::_exit(code) };
                }
                let child = rustix::process::Pid::from_raw(pid);
                let status = rustix::process::waitpid(child, rustix::process::WaitOptions::empty());
                let code = status.ok().flatten().and_then(|(_, status)| status.exit_status());
                format!("the child ends with {}", code.map_or("nothing".into(), |code| code.to_string()))
            }
            // Eight threads that open, look and drop, each its own messages, of one segment.
            "storm" => {
                let messages: Vec<&str> = rest.split(' ').collect();
                let this = &*self;
                std::thread::scope(|scope| {
                    for share in messages.chunks(messages.len().div_ceil(8)) {
                        scope.spawn(move || {
                            let stream = Stream::create(this.receiver.gpu()).expect("a stream");
                            for (hex, expected) in share.iter().filter_map(|message| message.split_once('=')) {
                                let storage = this.open(hex, Wait::Stream(&stream), None).expect("opened");
                                let byte: u8 = expected.parse().expect("a number");
                                assert_eq!(bytes(&stream, storage.device_ptr(), storage.len())[..], [byte; 4096]);
                            }
                        });
                    }
                });
                self.settled()
            }
            // The same block by the native protocol, in a process that PyTorch's counts nothing of.
            "claim" => {
                let (socket, descriptor) = rest.split_once(' ').expect("two words");
                let native = Participant::builder(self.receiver.gpu().clone()).connect(socket).expect("it listens");
                let block = native.claim(&unhex(descriptor), Wait::Host, Some(WATCHDOG)).expect("claimed");
                let content = hex(&bytes(&self.stream, block.device_ptr(), 4));
                self.native = Some((block, native));
                content
            }
            "unclaim" => {
                self.native = None;
                "let go".into()
            }
            "decline" => {
                self.receiver.decline(&TensorMessage::decode(&unhex(rest))?.fields.decode()?)?;
                "declined".into()
            }
            // Drops a storage that a stream is stopped on: the drop must return.
            "drop-busy" => {
                let storage = self.open(rest, Wait::Host, Some(WATCHDOG))?;
                self.gates.push(stop(&self.stream));
                fill(&self.stream, storage.device_ptr(), 9, storage.len());
                storage.used_on(&self.stream)?;
                drop(storage);
                format!("{} pending", self.receiver.stats().pending)
            }
            "go" => {
                self.gates.clear();
                self.settled()
            }
            "drop" => {
                self.held.clear();
                self.settled()
            }
            "bases" => {
                let mut all: Vec<u64> = self.held.iter().map(|storage| storage.device_ptr().0).collect();
                all.sort_unstable();
                all.iter().map(|at| format!("{at} ")).collect()
            }
            "settled" => self.settled(),
            // What an expandable segment is: file descriptors of this process, one for each chunk.
            "export" => {
                let (gpu, file) = (self.receiver.gpu(), CounterFile::create()?);
                file.grant(0);
                let (mut answer, mut fds) = (file.name().as_str().to_owned(), Vec::new());
                for number in 0..rest.parse().expect("a number") {
                    let made = gpu.backend().alloc(gpu.device(), CHUNK, Sharing::Fd)?;
                    fill(&self.stream, made.base, 0x50 + number, CHUNK);
                    fds.push(gpu.backend().export_fd(made.base)?);
                    answer += &format!(" {}", fds[usize::from(number)].as_raw_fd());
                }
                self.stream.synchronize()?;
                self.exported = Some((fds, file));
                answer
            }
            "exported" => {
                let (_, file) = self.exported.as_ref().expect("exported first");
                file.count(0).to_string()
            }
            other => panic!("no such command: {other}"),
        })
    }

    fn settled(&self) -> String {
        assert!(self.receiver.wait_released(WATCHDOG), "nothing is given back");
        let stats = self.receiver.stats();
        format!("{} released, {} segments, {} kept", stats.released, stats.segments, stats.kept)
    }
}

/// A uuid that no device has.
pub const NOBODY: DeviceUuid = DeviceUuid([0xee; 16]);
