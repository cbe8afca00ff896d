//! The call that an agent makes, and how it gets ready for it.

use std::path::Path;

use gpu_ipc::{After, Descriptor, Participant, ParticipantId, Session, To, Wait};
use harness::say;

use crate::agent::{Call, Said, Told, open_gpu, write_stamp};
use crate::counter;

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
    let participant = Participant::builder(open_gpu())
        .connect(socket)
        .expect("connected");
    say(&Said::Joined(participant.id().0));
    // The region is mapped, so that the claim is the slot's and not the socket's.
    let first = participant
        .claim(&hear_descriptor(), Wait::Host, None)
        .expect("claimed");
    say(&Said::Mapped);
    let descriptor = hear_descriptor();
    ready();
    mark();
    let second = participant.claim(&descriptor, Wait::None, None);
    mark();
    drop((first, second));
}

fn release(socket: &Path) {
    let participant = Participant::builder(open_gpu())
        .connect(socket)
        .expect("connected");
    say(&Said::Joined(participant.id().0));
    let first = participant
        .claim(&hear_descriptor(), Wait::Host, None)
        .expect("claimed");
    say(&Said::Mapped);
    let second = participant
        .claim(&hear_descriptor(), Wait::None, None)
        .expect("claimed");
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
    let session = Session::builder(gpu.clone())
        .socket(socket)
        .open()
        .expect("a session");
    say(&Said::Open);
    let told = harness::next();
    let Some(Told::Participant(id)) = told else {
        panic!("nobody comes: {told:?}")
    };
    let to = To::Participant(ParticipantId(id));
    let held = session.alloc(4096).expect("there is room");
    write_stamp(&gpu, held.device_ptr(), 7);
    say(&Said::Shared(
        held.share(to, After::Done)
            .expect("shared")
            .as_bytes()
            .to_vec(),
    ));
    harness::next::<Told>();
    // Held by the consumer from here on.
    drop(held);
    (
        session.clone(),
        session.alloc(4096).expect("there is room"),
        to,
    )
}
