//! A consumer in a process of its own: this test's binary, started again, told line by line what to
//! do.

use std::collections::HashMap;
use std::path::PathBuf;

use gpu_ipc::{
    BackendKind, Descriptor, Gpu, Participant, ParticipantId, ReceivedBlock, Session, Wait,
};
use harness::{Child, WATCHDOG};
use serde::{Deserialize, Serialize};

/// What this binary can be started as.
#[derive(Serialize, Deserialize)]
pub enum Role {
    Consumer,
}

/// What a consumer is told. It answers with a number.
#[derive(Serialize, Deserialize, Debug)]
enum Command {
    Connect { socket: PathBuf },
    Claim { descriptor: Vec<u8> },
    Stamp { held: u64 },
    LetGo { held: u64 },
    Mappings,
}

/// A consumer, as the test that started it sees it. Killed when dropped.
pub struct Consumer(Child<Command, u64>);

impl Consumer {
    /// Starts one.
    pub fn start() -> Consumer {
        Consumer(Child::start(&Role::Consumer))
    }

    /// Connects it to a session, and returns its number there.
    #[track_caller]
    pub fn connect(&mut self, session: &Session) -> ParticipantId {
        ParticipantId(self.0.ask(&Command::Connect {
            socket: session.socket_path().into(),
        }))
    }

    /// Claims a block and returns its number of it.
    #[track_caller]
    pub fn claim(&mut self, descriptor: &Descriptor) -> u64 {
        self.0.ask(&Command::Claim {
            descriptor: descriptor.as_bytes().to_vec(),
        })
    }

    /// Reads the first 8 bytes of a block that it holds.
    #[track_caller]
    pub fn stamp(&mut self, held: u64) -> u64 {
        self.0.ask(&Command::Stamp { held })
    }

    /// Lets go of a block.
    #[track_caller]
    pub fn let_go(&mut self, held: u64) {
        assert_eq!(self.0.ask(&Command::LetGo { held }), 1, "it held none");
    }

    /// Counts the regions that it has mapped.
    #[track_caller]
    pub fn mappings(&mut self) -> u64 {
        self.0.ask(&Command::Mappings)
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Kills it at once, and waits until it is gone.
    pub fn kill(&mut self) {
        self.0.kill();
    }
}

/// Opens the first device of the backend that `GPU_IPC_TEST_BACKEND` names, or of the host backend.
pub fn open_gpu() -> Gpu {
    let name = std::env::var("GPU_IPC_TEST_BACKEND").unwrap_or_else(|_| "host".into());
    let kind = BackendKind::ALL
        .into_iter()
        .find(|kind| kind.name() == name)
        .expect("a backend's name");
    gpu_ipc::detect()
        .and_then(|found| found.first(kind))
        .expect("the backend that was asked for is here")
}

/// Writes a stamp into the first 8 bytes at an address.
pub fn write_stamp(
    gpu: &Gpu,
    stream: &gpu_ipc::Stream,
    ptr: gpu_ipc::backend::DevicePtr,
    stamp: u64,
) {
    let bytes = stamp.to_le_bytes();
    // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the copy
    // is done: the stream is synchronised before `bytes` goes, and every block here has 8 bytes.
    unsafe {
        gpu.backend()
            .copy_to_device(stream.raw(), ptr, bytes.as_ptr(), 8)
    }
    .expect("it copies");
    stream.synchronize().expect("it runs");
}

/// Reads the first 8 bytes at an address.
pub fn read_stamp(gpu: &Gpu, stream: &gpu_ipc::Stream, ptr: gpu_ipc::backend::DevicePtr) -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is
    // done: the stream is synchronised before `bytes` is read, and every block here has 8 bytes.
    unsafe {
        gpu.backend()
            .copy_to_host(stream.raw(), bytes.as_mut_ptr(), ptr, 8)
    }
    .expect("it copies");
    stream.synchronize().expect("it runs");
    u64::from_le_bytes(bytes)
}

/// Is a consumer until the test lets it go.
pub fn run() {
    let gpu = open_gpu();
    let stream = gpu_ipc::Stream::create(&gpu).expect("a stream");
    let mut participant: Option<Participant> = None;
    let mut received: HashMap<u64, ReceivedBlock> = HashMap::new();
    let mut claimed = 0u64;
    harness::obey(|command| match command {
        Command::Connect { socket } => {
            let connected = Participant::builder(gpu.clone())
                .connect(socket)
                .expect("connected");
            participant.insert(connected).id().0
        }
        Command::Claim { descriptor } => {
            let participant = participant.as_ref().expect("connected");
            let block = participant
                .claim(&descriptor, Wait::Host, Some(WATCHDOG))
                .expect("claimed");
            claimed += 1;
            received.insert(claimed, block);
            claimed
        }
        Command::Stamp { held } => read_stamp(&gpu, &stream, received[&held].device_ptr()),
        Command::LetGo { held } => u64::from(received.remove(&held).is_some()),
        Command::Mappings => participant.as_ref().map_or(0, Participant::mappings) as u64,
    });
}
