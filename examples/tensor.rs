//! A trainer shares a tensor with a reader in another process, and tells its shape in the
//! descriptor's user bytes.
//!
//! The trainer opens a session and passes the path of its socket to the reader, which connects and
//! answers with its number. Descriptors travel by any transport that both have: here on the
//! reader's standard input, which the test harness of this repository writes.

mod shared;

use std::error::Error;
use std::path::PathBuf;

use gpu_ipc::session::ShareOptions;
use gpu_ipc::{
    After, Descriptor, Participant, ParticipantId, ReceivedBlock, Session, State, Stream, To, Wait,
};
use harness::{Child, next, say};
use shared::{PATIENCE, open};

const BACKEND: &str = "host"; // or "cuda", with the feature `cuda`

fn main() -> Result<(), Box<dyn Error>> {
    match harness::role::<PathBuf>() {
        None => train(),
        Some(socket) => read(&socket),
    }
}

fn train() -> Result<(), Box<dyn Error>> {
    let gpu = open(BACKEND)?;
    let stream = Stream::create(&gpu)?; // or `Stream::borrow`: your framework's
    let session = Session::builder(gpu.clone()).open()?;
    let mut child: Child<Vec<u8>, String> = Child::start(&session.socket_path());
    let id = child.answer().ok_or("the reader did not connect")?;
    let reader = ParticipantId(id.parse()?);

    let tensor: Vec<u8> = 1.5f32.to_le_bytes().repeat(1 << 20);
    let block = session.alloc(4 << 20)?;
    stream.write(&block, &tensor)?; // or your framework's kernel writes to `block.device_ptr()`
    let mut shape = [0; 64]; // 64 bytes of the user's own travel in the descriptor
    shape[..8].copy_from_slice(&(1u64 << 20).to_le_bytes());
    let options = ShareOptions::default().user(shape);
    let descriptor = block.share_with(To::Participant(reader), After::Stream(&stream), &options)?;
    let answer = child.ask(&descriptor.as_bytes().to_vec());
    drop(block); // comes back when the reader has let go of it
    let status = child.end();
    let report = session.shutdown(PATIENCE);
    if !status.success() || !report.clean {
        let held = report.holders;
        return Err(format!("the reader ended with {status}; still held: {held:?}").into());
    }
    println!("tensor: the reader read {answer}; nothing is held");
    Ok(())
}

fn read(socket: &PathBuf) -> Result<(), Box<dyn Error>> {
    let gpu = open(BACKEND)?;
    let stream = Stream::create(&gpu)?;
    let trainer = Participant::builder(gpu).connect(socket)?;
    say(&trainer.id().0.to_string());
    while let Some(bytes) = next::<Vec<u8>>() {
        let elements = u64::from_le_bytes(Descriptor::decode(&bytes)?.user()[..8].try_into()?);
        let block: ReceivedBlock = trainer.claim(&bytes, Wait::Stream(&stream), Some(PATIENCE))?;
        if elements.checked_mul(4) != Some(block.len()) {
            return Err(format!("{elements} elements in {} bytes", block.len()).into());
        }
        let mut first = [0; 4];
        stream.read(&block, &mut first)?;
        match block.state() {
            State::Ready | State::ReadyProducerGone => {
                let first = f32::from_le_bytes(first);
                say(&format!("{elements} elements, the first is {first}"));
            }
            State::Pending | State::Poisoned => {
                return Err("the trainer died before it had written the tensor".into());
            }
        }
        // The drop releases the block, once the streams that it was used on are done.
    }
    // Says goodbye. A process that ends without it is dead to the producer, which then waits for
    // proof.
    Ok(trainer.close(Some(PATIENCE))?)
}
