//! The side that sends: a session whose blocks PyTorch could open, and what a test asks of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpu_api::{Gpu, Sharing};
use gpu_ipc_torch::{CounterFile, Dtype, Fields, Layout, Recipient, SendId, Sender, TensorMessage};
use harness::wait_until;
use ipc_rc::{After, SentBlock, Session, SessionBuilder, Stream};

use crate::agent::{Answer, fill, open_gpu};

/// A session whose blocks PyTorch could open, and a sender.
pub struct Side {
    pub sender: Sender,
    pub stream: Stream,
    pub session: Session,
    pub gpu: Gpu,
    /// Kept for its removal.
    _dir: tempfile::TempDir,
}

impl Side {
    pub fn new() -> Side {
        Side::with(|builder| builder.sharing(Sharing::Handle))
    }

    /// Opens one whose session has these options.
    pub fn with(options: impl FnOnce(SessionBuilder) -> SessionBuilder) -> Side {
        let (gpu, dir) = (open_gpu(), tempfile::tempdir().expect("a directory"));
        let builder = options(Session::builder(gpu.clone()).socket(dir.path().join("s")));
        let (session, stream) = (
            builder.open().expect("a session"),
            Stream::create(&gpu).expect("a stream"),
        );
        Side {
            sender: Sender::new(gpu.clone()).quarantine(Duration::ZERO),
            stream,
            session,
            gpu,
            _dir: dir,
        }
    }

    pub fn block(&self, byte: u8) -> Arc<SentBlock> {
        let block = Arc::new(self.session.alloc(4096).expect("room"));
        fill(&self.stream, block.device_ptr(), byte, 4096);
        block
    }

    pub fn send(&self, block: &Arc<SentBlock>, to: Recipient) -> (SendId, TensorMessage) {
        let sending = self
            .sender
            .send(block, to, After::Stream(&self.stream))
            .expect("sent");
        let layout = Layout::contiguous(Dtype::U8, &[block.len()]);
        (
            sending.id,
            TensorMessage {
                fields: sending.fields,
                uuid: Some(sending.uuid),
                layout,
            },
        )
    }
}

/// The bytes in which a message travels.
pub fn coded(message: &TensorMessage) -> Vec<u8> {
    message.encode().expect("it fits")
}

pub fn settled(released: u64, segments: u64, kept: u64) -> Answer {
    Answer::Settled {
        released,
        segments,
        kept,
    }
}

/// The counter file that a message names.
pub fn path(fields: &Fields) -> PathBuf {
    let name = String::from_utf8(fields.ref_counter_handle.clone().expect("named")).expect("text");
    Path::new("/dev/shm").join(&name[1..])
}

/// The counter that a message names.
pub fn counter(message: &TensorMessage) -> (CounterFile, u32) {
    let place = message.fields.decode().expect("good").place.expect("bytes");
    (
        CounterFile::attach(&place.counter.file).expect("it is there"),
        place.counter.slot,
    )
}

/// Waits until a session has all its blocks back.
pub fn emptied(session: &Session) {
    wait_until("the session's blocks", || {
        session.collect();
        session.stats().live_blocks == 0
    });
}
