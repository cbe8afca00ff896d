//! The process that dies: this test's own binary, started again, with one call to make.

use std::io::BufRead;
use std::path::Path;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Descriptor, Gpu, Participant, ParticipantId, Session, Stream, To, Wait};

use crate::counter;

/// Names what an agent does.
pub const ROLE: &str = "GPU_IPC_TEST_INSTRUCTION";
/// What it does it with.
pub const ARGUMENTS: &str = "GPU_IPC_TEST_ARGUMENTS";

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
pub fn run(role: &str) {
    let arguments = std::env::var(ARGUMENTS).unwrap_or_default();
    let arguments: Vec<&str> = arguments.split(' ').collect();
    match role {
        "claim" => claim(arguments[0]),
        "release" => release(arguments[0]),
        "grant" => grant(arguments[0]),
        "revoke" => revoke(arguments[0]),
        "count" => {
            let counter = counter::open(Path::new(arguments[0]));
            say("ready");
            hear();
            mark();
            counter::claim(counter);
            counter::release(counter);
            mark();
        }
        _ => say("ready"),
    }
    // The tracer ends it.
    hear();
}

fn say(line: &str) {
    println!("{line}");
}

fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).expect("a pipe");
    line.trim_end().to_owned()
}

/// Stops for the tracer.
fn mark() {
    // SAFETY: `raise` has no conditions; the tracer takes the signal away.
    unsafe { libc::raise(libc::SIGTRAP) };
}

fn hear_descriptor() -> Vec<u8> {
    let text = hear();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex")).collect()
}

/// Writes bytes as hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn claim(socket: &str) {
    let participant = Participant::builder(open_gpu()).connect(socket).expect("connected");
    say(&participant.id().0.to_string());
    // The region is mapped, so that the claim is the slot's and not the socket's.
    let first = participant.claim(&hear_descriptor(), Wait::Host, None).expect("claimed");
    say("mapped");
    let descriptor = hear_descriptor();
    say("ready");
    hear();
    mark();
    let second = participant.claim(&descriptor, Wait::None, None);
    mark();
    drop((first, second));
}

fn release(socket: &str) {
    let participant = Participant::builder(open_gpu()).connect(socket).expect("connected");
    say(&participant.id().0.to_string());
    let first = participant.claim(&hear_descriptor(), Wait::Host, None).expect("claimed");
    say("mapped");
    let second = participant.claim(&hear_descriptor(), Wait::None, None).expect("claimed");
    say("ready");
    hear();
    mark();
    drop(second);
    mark();
    drop(first);
}

fn grant(socket: &str) {
    let (session, block, to) = produce(socket);
    say("ready");
    hear();
    mark();
    let granted = block.share(to, After::Done);
    mark();
    drop((granted, session));
}

fn revoke(socket: &str) {
    let (session, block, to) = produce(socket);
    let granted: Descriptor = block.share(to, After::Done).expect("shared");
    say("ready");
    hear();
    mark();
    let revoked = block.cancel(&granted);
    mark();
    drop((revoked, session));
}

/// Opens a session, waits for a consumer, and gives it a block to hold; returns another block.
fn produce(socket: &str) -> (Session, gpu_ipc::SentBlock, To) {
    let gpu = open_gpu();
    let session = Session::builder(gpu.clone()).socket(socket).open().expect("a session");
    say("open");
    let to = To::Participant(ParticipantId(hear().parse().expect("a number")));
    let held = session.alloc(4096).expect("there is room");
    write_stamp(&gpu, held.device_ptr(), 7);
    say(&hex(held.share(to, After::Done).expect("shared").as_bytes()));
    hear();
    // Held by the consumer from here on.
    drop(held);
    (session.clone(), session.alloc(4096).expect("there is room"), to)
}
