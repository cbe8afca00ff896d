//! The process that dies: this test's own binary, started again, with one call to make.

use std::path::{Path, PathBuf};

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Descriptor, Gpu, Participant, ParticipantId, Session, Stream, To, Wait};
use harness::say;
use serde::{Deserialize, Serialize};

use crate::counter;

/// The call that an agent makes, and with what.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub enum Call {
    Claim { socket: PathBuf },
    Release { socket: PathBuf },
    Grant { socket: PathBuf },
    Revoke { socket: PathBuf },
    Count { file: PathBuf },
    None,
}

/// What it is told while it gets ready.
#[derive(Serialize, Deserialize, Debug)]
pub enum Told {
    /// The other side's number.
    Participant(u64),
    Descriptor(Vec<u8>),
    /// What it shared is held.
    Held,
    Go,
}

/// How far it is.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub enum Said {
    Joined(u64),
    Mapped,
    Open,
    Shared(Vec<u8>),
    Ready,
}

/// Opens a host device.
pub fn open_gpu() -> Gpu {
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    Gpu::new(backend, DeviceId(0)).expect("there is a device")
}

/// Writes a stamp into a block.
pub fn write_stamp(gpu: &Gpu, ptr: gpu_ipc::backend::DevicePtr, stamp: u64) {
    let stream = Stream::create(gpu).expect("a stream");
    let bytes = stamp.to_le_bytes();
    // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the copy is done: the stream
    // is synchronised before `bytes` goes, and every block here has 8 bytes.
    unsafe { gpu.backend().copy_to_device(stream.raw(), ptr, bytes.as_ptr(), 8) }.expect("it copies");
    stream.synchronize().expect("it runs");
}

/// Reads a stamp.
pub fn read_stamp(gpu: &Gpu, ptr: gpu_ipc::backend::DevicePtr) -> u64 {
    let stream = Stream::create(gpu).expect("a stream");
    let mut bytes = [0; 8];
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is done: as above.
    unsafe { gpu.backend().copy_to_host(stream.raw(), bytes.as_mut_ptr(), ptr, 8) }.expect("it copies");
    stream.synchronize().expect("it runs");
    u64::from_le_bytes(bytes)
}

/// Runs an agent.
pub fn run(call: Call) {
    match call {
        Call::Claim { socket } => claim(&socket),
        Call::Release { socket } => release(&socket),
        Call::Grant { socket } => grant(&socket),
        Call::Revoke { socket } => revoke(&socket),
        Call::Count { file } => {
            let counter = counter::open(&file);
            ready();
            mark();
            counter::claim(counter);
            counter::release(counter);
            mark();
        }
        Call::None => say(&Said::Ready),
    }
    // The tracer ends it.
    harness::next::<Told>();
}

/// Says that the call can begin, and waits until it is to.
fn ready() {
    say(&Said::Ready);
    harness::next::<Told>();
}

/// Stops for the tracer.
fn mark() {
    // SAFETY: `raise` has no conditions; the tracer takes the signal away.
    unsafe { libc::raise(libc::SIGTRAP) };
}

fn hear_descriptor() -> Vec<u8> {
    match harness::next() {
        Some(Told::Descriptor(descriptor)) => descriptor,
        other => panic!("no descriptor: {other:?}"),
    }
}

fn claim(socket: &Path) {
    let participant = Participant::builder(open_gpu()).connect(socket).expect("connected");
    say(&Said::Joined(participant.id().0));
    // The region is mapped, so that the claim is the slot's and not the socket's.
    let first = participant.claim(&hear_descriptor(), Wait::Host, None).expect("claimed");
    say(&Said::Mapped);
    let descriptor = hear_descriptor();
    ready();
    mark();
    let second = participant.claim(&descriptor, Wait::None, None);
    mark();
    drop((first, second));
}

fn release(socket: &Path) {
    let participant = Participant::builder(open_gpu()).connect(socket).expect("connected");
    say(&Said::Joined(participant.id().0));
    let first = participant.claim(&hear_descriptor(), Wait::Host, None).expect("claimed");
    say(&Said::Mapped);
    let second = participant.claim(&hear_descriptor(), Wait::None, None).expect("claimed");
    ready();
    mark();
    drop(second);
    mark();
    drop(first);
}

fn grant(socket: &Path) {
    let (session, block, to) = produce(socket);
    ready();
    mark();
    let granted = block.share(to, After::Done);
    mark();
    drop((granted, session));
}

fn revoke(socket: &Path) {
    let (session, block, to) = produce(socket);
    let granted: Descriptor = block.share(to, After::Done).expect("shared");
    ready();
    mark();
    let revoked = block.cancel(&granted);
    mark();
    drop((revoked, session));
}

/// Opens a session, waits for a consumer, and gives it a block to hold; returns another block.
fn produce(socket: &Path) -> (Session, gpu_ipc::SentBlock, To) {
    let gpu = open_gpu();
    let session = Session::builder(gpu.clone()).socket(socket).open().expect("a session");
    say(&Said::Open);
    let told = harness::next();
    let Some(Told::Participant(id)) = told else { panic!("nobody comes: {told:?}") };
    let to = To::Participant(ParticipantId(id));
    let held = session.alloc(4096).expect("there is room");
    write_stamp(&gpu, held.device_ptr(), 7);
    say(&Said::Shared(held.share(to, After::Done).expect("shared").as_bytes().to_vec()));
    harness::next::<Told>();
    // Held by the consumer from here on.
    drop(held);
    (session.clone(), session.alloc(4096).expect("there is room"), to)
}
