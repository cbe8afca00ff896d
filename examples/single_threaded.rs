//! One thread: a producer and a consumer that have no thread but their own, and no event loop either.
//!
//! ```text
//! cargo run --example single_threaded -- [--backend host|cuda|hip] [--rounds 1000]
//! ```
//!
//! In manual mode every call that waits serves the session or participant while it does. So a program that waits in such
//! calls alone needs neither threads nor `poll`. What it must not do is to wait for its peer in any other way while the
//! peer waits for it: nobody would answer. The producer is this process, the consumer another; at the end each looks
//! whether the library has started a thread in it.

use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use gpu_ipc::descriptor::BYTES;
use gpu_ipc::{After, BackendKind, Claims, Gpu, Participant, ReceivedBlock, Session, Stream, To, Wait, detect};

/// Bytes of a block.
const BLOCK: usize = 64 << 10;
/// Whoever takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // This program starts itself in this role.
        ["consumer", backend, socket] => consumer(backend, socket),
        _ => Options::parse(&args).and_then(|options| producer(&options)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("single_threaded: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    backend: String,
    rounds: u64,
}

impl Options {
    fn parse(args: &[String]) -> Result<Options, Box<dyn Error>> {
        let mut options = Options { backend: "host".into(), rounds: 1000 };
        for pair in args.chunks(2) {
            match pair {
                [name, value] if name == "--backend" => options.backend.clone_from(value),
                [name, value] if name == "--rounds" => options.rounds = value.parse()?,
                _ => return Err("usage: single_threaded [--backend host|cuda|hip] [--rounds N]".into()),
            }
        }
        Ok(options)
    }
}

fn open(backend: &str) -> Result<Gpu, Box<dyn Error>> {
    let kind = BackendKind::ALL.into_iter().find(|kind| kind.name() == backend);
    Ok(detect()?.first(kind.ok_or_else(|| format!("no backend is named {backend}"))?)?)
}

/// Refuses threads of the library. A driver's own stay out of it, and so does `gpu-ipc-host`, which is what runs the host
/// backend's streams: the GPU, as it were.
fn check_threads() -> Result<(), Box<dyn Error>> {
    for task in std::fs::read_dir("/proc/self/task")? {
        let name = std::fs::read_to_string(task?.path().join("comm"))?;
        if name.starts_with("gpu-ipc-") && name.trim_end() != "gpu-ipc-host" {
            return Err(format!("the library has started a thread: {}", name.trim_end()).into());
        }
    }
    Ok(())
}

// The producer.

fn producer(options: &Options) -> Result<(), Box<dyn Error>> {
    let gpu = open(&options.backend)?;
    let stream = Stream::create(&gpu)?;
    let session = Session::builder(gpu.clone()).region_bytes(2 * BLOCK as u64).manual().open()?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["consumer", &options.backend])
        .arg(session.socket_path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut to = child.stdin.take().ok_or("the consumer has no input")?;
    let mut from = child.stdout.take().ok_or("the consumer has no output")?;
    // Serves the session until it is there. A read from the pipe would not, and the consumer would never be welcomed.
    let consumer = session.wait_for_participants(1, Some(PATIENCE))?[0];
    for number in 0..options.rounds {
        let block = session.alloc(BLOCK as u64)?;
        let contents = number.to_le_bytes().repeat(BLOCK / 8);
        // SAFETY: `copy_to_device` asks for a live stream and for ranges that are valid until the copy is done:
        // `contents` is as long as the block, and both go after the stream is synchronised.
        unsafe { gpu.backend().copy_to_device(stream.raw(), block.device_ptr(), contents.as_ptr(), contents.len()) }?;
        // By turns, so that both ways of claiming are seen to work.
        let whom = if number % 2 == 0 { To::Participant(consumer) } else { To::Ticket(Claims::Once) };
        let descriptor = block.share(whom, After::Stream(&stream));
        stream.synchronize()?;
        to.write_all(descriptor?.as_bytes())?;
        // Serves the session: the claim of a ticket asks, and so does one whose region is not mapped yet. When it
        // returns, the consumer is done with the block and its answer is in the pipe.
        block.wait_released(Some(PATIENCE))?;
        let mut answer = [0; 8];
        from.read_exact(&mut answer).map_err(|e| format!("block {number}: the consumer is gone: {e}"))?;
        if u64::from_le_bytes(answer) != number {
            return Err(format!("block {number} contains {}", u64::from_le_bytes(answer)).into());
        }
    }
    check_threads()?;
    drop(to);
    let status = child.wait()?;
    if !status.success() {
        return Err(format!("the consumer ended with {status}").into());
    }
    let report = session.shutdown(PATIENCE);
    if !report.clean {
        return Err(format!("still held: {report:?}").into());
    }
    println!(
        "single_threaded: {} blocks of {} KiB; no thread of the library on either side",
        options.rounds,
        BLOCK >> 10
    );
    Ok(())
}

// The consumer.

fn consumer(backend: &str, socket: &str) -> Result<(), Box<dyn Error>> {
    let gpu = open(backend)?;
    let stream = Stream::create(&gpu)?;
    let participant = Participant::builder(gpu).manual().connect(socket)?;
    let (mut input, mut out, mut descriptor) = (std::io::stdin().lock(), std::io::stdout(), [0; BYTES]);
    loop {
        match input.read_exact(&mut descriptor) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error.into()),
        }
        let block = participant.claim(&descriptor, Wait::Host, Some(PATIENCE))?;
        let number = contents(&stream, &block)?;
        // Answered before the block goes: the producer reads the answer when it has seen the release.
        out.write_all(&number.to_le_bytes())?;
        out.flush()?;
        // No stream was named to the block, so the release is one store into shared memory and needs nobody's turn. The
        // copy was waited for.
        drop(block);
    }
    // The drop of a participant that has mappings starts a thread for them, since unmapping may block. Here the process
    // ends instead, and they go with it.
    check_threads()
}

/// Reads the number of which a block is full.
fn contents(stream: &Stream, block: &ReceivedBlock) -> Result<u64, Box<dyn Error>> {
    let mut bytes = vec![0; BLOCK];
    if block.len() != bytes.len() as u64 {
        return Err(format!("a block has {} bytes", block.len()).into());
    }
    let backend = stream.gpu().backend();
    // SAFETY: `copy_to_host` asks for a live stream and for ranges that are valid until the copy is done: both are held
    // until the stream is synchronised, and they are of one length.
    unsafe { backend.copy_to_host(stream.raw(), bytes.as_mut_ptr(), block.device_ptr(), bytes.len()) }?;
    stream.synchronize()?;
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[..8]);
    if bytes != number.repeat(BLOCK / 8) {
        return Err("a block contains several numbers".into());
    }
    Ok(u64::from_le_bytes(number))
}
