//! A trainer shares a tensor with a reader that it starts, and tells its shape in the descriptor's
//! user bytes.
//!
//! The trainer opens a session, starts the reader as a process, and passes it the path of the
//! session's socket. The reader connects and answers with its number. Descriptors travel by any
//! transport that both have: here each is a line of hexadecimal digits on the reader's standard
//! input.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use gpu_ipc::backend::detect_only;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{
    After, BackendKind, Descriptor, Participant, ParticipantId, ReceivedBlock, Session, State,
    Stream, To, Wait,
};

const KIND: BackendKind = BackendKind::Host; // or BackendKind::Cuda, with the feature `cuda`
const PATIENCE: Option<Duration> = Some(Duration::from_secs(30));

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        None => trainer(),
        Some(socket) => reader(&socket),
    }
}

fn trainer() -> Result<(), Box<dyn Error>> {
    let gpu = detect_only(KIND)?.first(KIND)?;
    let stream = Stream::create(&gpu)?; // or `Stream::borrow`: your framework's
    let session = Session::builder(gpu.clone()).open()?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg(session.socket_path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut to = child.stdin.take().ok_or("no pipe")?;
    let mut from = BufReader::new(child.stdout.take().ok_or("no pipe")?).lines();
    let reader = ParticipantId(from.next().ok_or("the reader did not connect")??.parse()?);

    let tensor: Vec<u8> = vec![1.5f32; 1 << 20]
        .into_iter()
        .flat_map(f32::to_le_bytes)
        .collect();
    let block = session.alloc(4 << 20)?;
    stream.write(&block, &tensor)?; // or your framework's kernel writes to `block.device_ptr()`
    let mut shape = [0; 64]; // 64 bytes of the user's own travel in the descriptor
    shape[..8].copy_from_slice(&(1u64 << 20).to_le_bytes());
    let options = ShareOptions::default().user(shape);
    let descriptor = block.share_with(To::Participant(reader), After::Stream(&stream), &options)?;
    let line: String = descriptor
        .as_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    writeln!(to, "{line}")?;
    drop(block); // comes back when the reader has let go of it
    drop(to);
    let report = session.shutdown(Duration::from_secs(60));
    let answer = from.next().ok_or("the reader ended without an answer")??;
    let status = child.wait()?;
    if !status.success() || !report.clean {
        return Err(format!(
            "the reader ended with {status}; still held: {:?}",
            report.holders
        )
        .into());
    }
    println!("tensor: the reader read {answer}; nothing is held");
    Ok(())
}

fn reader(socket: &str) -> Result<(), Box<dyn Error>> {
    let gpu = detect_only(KIND)?.first(KIND)?;
    let stream = Stream::create(&gpu)?;
    let trainer = Participant::builder(gpu).connect(socket)?;
    println!("{}", trainer.id().0);
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let byte = |at| u8::from_str_radix(line.get(at..at + 2).unwrap_or("?"), 16);
        let bytes = (0..line.len())
            .step_by(2)
            .map(byte)
            .collect::<Result<Vec<u8>, _>>()?;
        let elements = u64::from_le_bytes(Descriptor::decode(&bytes)?.user()[..8].try_into()?);
        let block: ReceivedBlock = trainer.claim(&bytes, Wait::Stream(&stream), PATIENCE)?;
        if elements.checked_mul(4) != Some(block.len()) {
            return Err(format!("{elements} elements in {} bytes", block.len()).into());
        }
        let mut first = [0; 4];
        stream.read(&block, &mut first)?;
        match block.state() {
            State::Ready | State::ReadyProducerGone => {
                println!(
                    "{elements} elements, the first is {}",
                    f32::from_le_bytes(first)
                );
            }
            State::Pending | State::Poisoned => {
                return Err("the trainer died before it had written the tensor".into());
            }
        }
        // The drop releases the block, once the streams that it was used on are done.
    }
    // Says goodbye. A process that ends without it is dead to the producer, which then waits for
    // proof.
    Ok(trainer.close(PATIENCE)?)
}
