//! The other process: this program again, told what to do.

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, DevicePtr, DeviceUuid, Error, Gpu, Sharing};
use gpu_ipc_torch::{
    CounterFile, ReceivedStorage, Receiver, ReceiverStats, Recipient, Sender, TensorMessage,
};
use harness::{Child, WATCHDOG, say};
use ipc_rc::{After, Participant, ReceivedBlock, Session, Stream, Wait};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// What this program can be started as.
#[derive(Serialize, Deserialize)]
pub enum Role {
    Agent,
}

/// A message of a tensor as it travels.
pub type Bytes = Vec<u8>;

/// What the other process is told.
#[derive(Serialize, Deserialize, Debug)]
pub enum Command {
    /// Opens and holds.
    Open(Bytes),
    /// Opens by another receiver of the same process, and drops.
    OpenByAnother(Bytes),
    /// Opens, giving the sender's work no time at all.
    OpenAtOnce(Bytes),
    /// Opens behind its stream.
    OpenOnStream(Bytes),
    /// Opens behind its stream and drops at once: what is queued is the wait for the sender alone.
    OpenOnStreamAndDrop(Bytes),
    /// Opens in a forked child.
    OpenInFork(Bytes),
    /// Eight threads that open, look and drop, each its own messages, of one segment; with the byte
    /// that each finds.
    Storm(Vec<(Bytes, u8)>),
    /// Claims the same block by the native protocol, in a process that PyTorch's counts nothing of.
    Claim {
        socket: PathBuf,
        descriptor: Bytes,
    },
    /// Lets go of that.
    Unclaim,
    Decline(Bytes),
    /// Drops a storage that a stream is stopped on: the drop must return.
    DropBusy(Bytes),
    /// Lets that stream go on.
    GoOn,
    DropAll,
    Addresses,
    Settle,
    /// Exports what an expandable segment is: file descriptors of this process, one for each chunk.
    Export {
        chunks: u8,
    },
    /// Counts how often that is open.
    Exported,
    /// Sends a block that is shared by descriptor while this process can open none.
    SendWithoutDescriptors,
}

/// What it answers.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub enum Answer {
    Done,
    /// The first bytes of a storage or block.
    Content(Bytes),
    /// It is about to open.
    Opening,
    /// Whether what it dropped was given back.
    GivenBack(bool),
    /// How a forked child ended.
    ChildEnded(Option<i32>),
    Pending(u64),
    Settled {
        released: u64,
        segments: u64,
        kept: u64,
    },
    Addresses(Vec<u64>),
    Exported {
        file: String,
        fds: Vec<RawFd>,
    },
    Count(i64),
    Failed(String),
}

/// Bytes of a chunk of what is exported as an expandable segment.
pub const CHUNK: u64 = 1 << 20;

pub fn open_gpu() -> Gpu {
    Gpu::new(
        HostBackend::new(HostConfig::default()).expect("memory"),
        DeviceId(0),
    )
    .expect("a device")
}

/// Keeps a stream from going on until the returned end is dropped.
pub fn stop(stream: &Stream) -> mpsc::Sender<()> {
    let (gate, closed) = mpsc::channel::<()>();
    stream
        .host_function(move || closed.recv().unwrap_or(()))
        .expect("queued");
    gate
}

pub fn fill(stream: &Stream, ptr: DevicePtr, byte: u8, len: u64) {
    // SAFETY: `fill` asks for a live stream and a range that stays: the callers hold both until it
    // is done.
    unsafe { stream.gpu().backend().fill(stream.raw(), ptr, byte, len) }.expect("queued");
}

pub fn bytes(stream: &Stream, ptr: DevicePtr, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that stay until it is done: it
    // is waited for below.
    unsafe {
        stream
            .gpu()
            .backend()
            .copy_to_host(stream.raw(), bytes.as_mut_ptr(), ptr, bytes.len())
    }
    .expect("queued");
    stream.synchronize().expect("done");
    bytes
}

/// The other process as a test sees it. It is let go when dropped, and closes what it has.
pub struct Agent(Child<Command, Answer>);

impl Agent {
    pub fn start() -> Agent {
        Agent(Child::start(&Role::Agent))
    }

    /// Lets it take this process' descriptors: where Yama lets only a parent do so (`ptrace_scope`
    /// 1), it lets the process that is named here.
    pub fn may_take_descriptors(&self) {
        // SAFETY: `prctl(PR_SET_PTRACER)` takes a process' number; without Yama it is refused, and
        // not needed.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::from(self.pid())) };
    }

    /// Has it open a message, and returns why it does not.
    #[track_caller]
    pub fn cannot(&mut self, command: &Command) -> String {
        match self.ask(command) {
            Answer::Failed(why) => why,
            other => panic!("{command:?}: {other:?}"),
        }
    }
}

impl Deref for Agent {
    type Target = Child<Command, Answer>;
    fn deref(&self) -> &Child<Command, Answer> {
        &self.0
    }
}

impl DerefMut for Agent {
    fn deref_mut(&mut self) -> &mut Child<Command, Answer> {
        &mut self.0
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.0.end();
        }
    }
}

/// What the other process has.
struct Life {
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
    let mut life = Life {
        receiver,
        stream,
        held: Vec::new(),
        gates: Vec::new(),
        exported: None,
        native: None,
    };
    harness::obey(|command| {
        life.obey(command)
            .unwrap_or_else(|error| Answer::Failed(error.to_string()))
    });
}

impl Life {
    fn open(
        &self,
        message: &[u8],
        wait: Wait<'_>,
        timeout: Option<Duration>,
    ) -> Result<ReceivedStorage, Error> {
        let message = TensorMessage::decode(message)?;
        let mut storage = message.fields.decode()?;
        storage.uuid = message.uuid;
        self.receiver.open(&storage, wait, timeout)
    }

    fn content(&self, storage: &ReceivedStorage) -> Answer {
        let mut bytes = vec![0; storage.len().min(4) as usize];
        storage
            .read(&self.stream, &mut bytes)
            .expect("a stream of its own");
        Answer::Content(bytes)
    }

    fn obey(&mut self, command: Command) -> Result<Answer, Error> {
        Ok(match command {
            Command::Open(message) => {
                let storage = self.open(&message, Wait::Host, Some(WATCHDOG))?;
                let content = self.content(&storage);
                self.held.push(storage);
                content
            }
            Command::OpenByAnother(message) => {
                let storage = TensorMessage::decode(&message)?.fields.decode()?;
                Receiver::new(open_gpu())?.open(&storage, Wait::Host, Some(WATCHDOG))?;
                Answer::Done
            }
            Command::OpenAtOnce(message) => {
                self.open(&message, Wait::Host, Some(Duration::ZERO))?;
                Answer::Done
            }
            Command::OpenOnStream(message) => {
                say(&Answer::Opening);
                let storage = self.open(&message, Wait::Stream(&self.stream), None)?;
                self.content(&storage)
            }
            Command::OpenOnStreamAndDrop(message) => {
                drop(self.open(&message, Wait::Stream(&self.stream), None)?);
                // Long enough to give back what waits for nothing.
                Answer::GivenBack(self.receiver.wait_released(Duration::from_millis(200)))
            }
            Command::OpenInFork(message) => self.open_in_a_child(&message),
            Command::Storm(messages) => {
                let this = &*self;
                std::thread::scope(|scope| {
                    for share in messages.chunks(messages.len().div_ceil(8)) {
                        scope.spawn(move || {
                            let stream = Stream::create(this.receiver.gpu()).expect("a stream");
                            for (message, byte) in share {
                                let storage = this
                                    .open(message, Wait::Stream(&stream), None)
                                    .expect("opened");
                                assert_eq!(
                                    bytes(&stream, storage.device_ptr(), storage.len())[..],
                                    [*byte; 4096]
                                );
                            }
                        });
                    }
                });
                self.settled()
            }
            Command::Claim { socket, descriptor } => {
                let native = Participant::builder(self.receiver.gpu().clone())
                    .connect(socket)
                    .expect("it listens");
                let block = native
                    .claim(&descriptor, Wait::Host, Some(WATCHDOG))
                    .expect("claimed");
                let content = bytes(&self.stream, block.device_ptr(), 4);
                self.native = Some((block, native));
                Answer::Content(content)
            }
            Command::Unclaim => {
                self.native = None;
                Answer::Done
            }
            Command::Decline(message) => {
                self.receiver
                    .decline(&TensorMessage::decode(&message)?.fields.decode()?)?;
                Answer::Done
            }
            Command::DropBusy(message) => {
                let storage = self.open(&message, Wait::Host, Some(WATCHDOG))?;
                self.gates.push(stop(&self.stream));
                fill(&self.stream, storage.device_ptr(), 9, storage.len());
                storage.used_on(&self.stream)?;
                drop(storage);
                Answer::Pending(self.receiver.stats().pending)
            }
            Command::GoOn => {
                self.gates.clear();
                self.settled()
            }
            Command::DropAll => {
                self.held.clear();
                self.settled()
            }
            Command::Addresses => {
                let mut all: Vec<u64> = self
                    .held
                    .iter()
                    .map(|storage| storage.device_ptr().0)
                    .collect();
                all.sort_unstable();
                Answer::Addresses(all)
            }
            Command::Settle => self.settled(),
            Command::Export { chunks } => {
                let (gpu, file) = (self.receiver.gpu(), CounterFile::create()?);
                file.grant(0);
                let mut fds = Vec::new();
                for number in 0..chunks {
                    let made = gpu.backend().alloc(gpu.device(), CHUNK, Sharing::Fd)?;
                    fill(&self.stream, made.base, 0x50 + number, CHUNK);
                    fds.push(gpu.backend().export_fd(made.base)?);
                }
                self.stream.synchronize()?;
                let numbers = fds.iter().map(AsRawFd::as_raw_fd).collect();
                let answer = Answer::Exported {
                    file: file.name().as_str().to_owned(),
                    fds: numbers,
                };
                self.exported = Some((fds, file));
                answer
            }
            Command::Exported => {
                let (_, file) = self.exported.as_ref().expect("exported first");
                Answer::Count(file.count(0))
            }
            Command::SendWithoutDescriptors => self.send_without_descriptors()?,
        })
    }

    /// Answers why it cannot be sent, and what is outstanding then, and once there are descriptors
    /// again.
    fn send_without_descriptors(&self) -> Result<Answer, Error> {
        let dir = tempfile::tempdir().expect("a directory");
        let gpu = self.receiver.gpu();
        let session = Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .sharing(Sharing::Fd)
            .open()?;
        let block = Arc::new(session.alloc(4096)?);
        let sender = Sender::new(gpu.clone());
        let before = getrlimit(Resource::Nofile);
        setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(0),
                maximum: before.maximum,
            },
        )
        .expect("less is allowed");
        let refused = sender.send(&block, Recipient::Unknown, After::Done);
        setrlimit(Resource::Nofile, before).expect("as it was");
        let (why, none) = (
            refused.expect_err("no descriptor is left"),
            sender.outstanding().len(),
        );
        sender.send(&block, Recipient::Unknown, After::Done)?;
        Ok(Answer::Failed(format!(
            "{why}; outstanding {none}, then {}",
            sender.outstanding().len()
        )))
    }

    /// In a forked child every call says so, and every drop does nothing.
    fn open_in_a_child(&mut self, message: &[u8]) -> Answer {
        // SAFETY: `fork` asks that the child of a process with threads calls only what is safe
        // there: it allocates with the C library's allocator, which glibc keeps usable in a child.
        let child = unsafe {
            harness::fork(|| {
                let message =
                    TensorMessage::decode(message).and_then(|message| message.fields.decode());
                let opened =
                    message.and_then(|storage| self.receiver.open(&storage, Wait::None, None));
                self.held.clear();
                let is_refused = matches!(opened, Err(Error::Forked { .. }))
                    && self.receiver.stats() == ReceiverStats::default();
                i32::from(!is_refused)
            })
        };
        Answer::ChildEnded(child.ok().and_then(|child| child.code()))
    }

    fn settled(&self) -> Answer {
        assert!(
            self.receiver.wait_released(WATCHDOG),
            "nothing is given back"
        );
        let stats = self.receiver.stats();
        Answer::Settled {
            released: stats.released,
            segments: stats.segments,
            kept: stats.kept,
        }
    }
}

/// A uuid that no device has.
pub const NOBODY: DeviceUuid = DeviceUuid([0xee; 16]);
