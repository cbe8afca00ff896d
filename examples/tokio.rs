//! An event loop of tokio: a producer and a consumer on single-threaded runtimes, whose tasks never
//! block their thread on the other side.
//!
//! ```text
//! cargo run --example tokio -- [--backend host|cuda|hip] [--rounds 1000]
//! ```
//!
//! The producer is this process, the consumer another. In each, one task waits for the descriptor
//! of the session or participant and reads its notices; the others wait for what the notices tell.
//! Grants go to the consumer through a pipe, as bytes; the numbers that it found in the blocks come
//! back.

use std::error::Error;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use gpu_ipc::participant::Notice;
use gpu_ipc::session::SessionNotice;
use gpu_ipc::{
    After, BackendKind, ClaimError, Claims, Descriptor, Gpu, Participant, ReceivedBlock, SentBlock,
    Session, Stream, To, Wait, detect,
};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::unix::pipe;
use tokio::sync::Notify;

/// Bytes of a block.
const BLOCK: usize = 64 << 10;
/// Blocks of the producer's pool.
const POOL: usize = 8;
/// A side that waits longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build();
    let done = match (
        runtime,
        &args.iter().map(String::as_str).collect::<Vec<_>>()[..],
    ) {
        (Err(error), _) => Err(error.into()),
        // This program starts itself in this role.
        (Ok(runtime), ["consumer", backend, socket]) => runtime.block_on(consumer(backend, socket)),
        (Ok(runtime), _) => {
            Options::parse(&args).and_then(|options| runtime.block_on(producer(&options)))
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tokio: {error}");
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
        let mut options = Options {
            backend: "host".into(),
            rounds: 1000,
        };
        for pair in args.chunks(2) {
            match pair {
                [name, value] if name == "--backend" => options.backend.clone_from(value),
                [name, value] if name == "--rounds" => options.rounds = value.parse()?,
                _ => return Err("usage: tokio [--backend host|cuda|hip] [--rounds N]".into()),
            }
        }
        Ok(options)
    }
}

fn open(backend: &str) -> Result<Gpu, Box<dyn Error>> {
    let kind = BackendKind::ALL
        .into_iter()
        .find(|kind| kind.name() == backend);
    Ok(detect()?.first(kind.ok_or_else(|| format!("no backend is named {backend}"))?)?)
}

/// Reads notices whenever there are some.
async fn listen(fd: AsyncFd<OwnedFd>, mut read_all: impl FnMut()) {
    while let Ok(mut readable) = fd.readable().await {
        // Cleared before the notices are read: one that comes meanwhile makes the descriptor
        // readable again. All are read, because the runtime tells of changes alone.
        readable.clear_ready();
        read_all();
    }
}

/// Registers a copy of a session's or participant's descriptor with the runtime, which wants to own
/// what it watches.
fn watch(fd: impl AsFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // What replaces it is unsafe, for types whose descriptor may change or be closed while it is
    // registered.
    #[expect(deprecated, reason = "an owned descriptor stays open and the same")]
    AsyncFd::with_interest(fd.as_fd().try_clone_to_owned()?, Interest::READABLE)
}

// The producer.

async fn producer(options: &Options) -> Result<(), Box<dyn Error>> {
    let gpu = open(&options.backend)?;
    let stream = Stream::create(&gpu)?;
    let session = Session::builder(gpu).open()?;
    let pool = (0..POOL)
        .map(|_| session.alloc(BLOCK as u64))
        .collect::<Result<Vec<_>, _>>()?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["consumer", &options.backend])
        .arg(session.socket_path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let to = pipe::Sender::from_owned_fd(
        child
            .stdin
            .take()
            .ok_or("the consumer has no input")?
            .into(),
    )?;
    let mut from = pipe::Receiver::from_owned_fd(
        child
            .stdout
            .take()
            .ok_or("the consumer has no output")?
            .into(),
    )?;

    let freed = Arc::new(Notify::new());
    let (told, tell) = (session.clone(), freed.clone());
    tokio::spawn(listen(watch(&session)?, move || {
        while let Some(notice) = told.next_notice() {
            if notice == SessionNotice::TryAgain {
                tell.notify_one();
            }
        }
    }));
    let rounds = options.rounds;
    let producing = tokio::spawn(async move {
        // The error of another task must be one that can be sent here.
        produce_all(&pool, &stream, rounds, to, &freed)
            .await
            .map_err(|error| error.to_string())
    });

    let mut heard = 0;
    let mut answer = [0; 8];
    while read(&mut from, &mut answer).await? {
        if u64::from_le_bytes(answer) != heard {
            return Err(format!("block {heard} contains {}", u64::from_le_bytes(answer)).into());
        }
        heard += 1;
    }
    let status = child.wait()?;
    if !status.success() || heard != options.rounds {
        return Err(format!("the consumer ended with {status} after {heard} blocks").into());
    }
    producing.await??;
    // Nothing else is left to do on this thread, so it may wait.
    let report = session.shutdown(PATIENCE);
    if !report.clean {
        return Err(format!("still held: {report:?}").into());
    }
    println!(
        "tokio: {heard} blocks of {} KiB from a pool of {POOL}",
        BLOCK >> 10
    );
    Ok(())
}

async fn produce_all(
    pool: &[SentBlock],
    stream: &Stream,
    rounds: u64,
    mut to: pipe::Sender,
    freed: &Notify,
) -> Result<(), Box<dyn Error>> {
    for number in 0..rounds {
        let block = loop {
            // A block is filled again when nobody holds it. When none is free the session tells of
            // the next.
            match pool
                .iter()
                .find(|block| block.wait_released(Some(Duration::ZERO)).is_ok())
            {
                Some(block) => break block,
                None => freed.notified().await,
            }
        };
        fill(stream, block, number)?;
        let descriptor = block.share(To::Ticket(Claims::Once), After::Stream(stream))?;
        to.write_all(descriptor.as_bytes()).await?;
    }
    Ok(())
}

/// Fills a block with its number.
fn fill(stream: &Stream, block: &SentBlock, number: u64) -> Result<(), Box<dyn Error>> {
    let contents = number.to_le_bytes().repeat(BLOCK / 8);
    Ok(stream.write(block, &contents)?)
}

/// Reads as many bytes as fit; `false` at the end.
async fn read(pipe: &mut pipe::Receiver, bytes: &mut [u8]) -> Result<bool, std::io::Error> {
    match pipe.read_exact(bytes).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

// The consumer.

async fn consumer(backend: &str, socket: &str) -> Result<(), Box<dyn Error>> {
    let gpu = open(backend)?;
    let stream = Stream::create(&gpu)?;
    // A connection waits for the producer's welcome: that of the whole process, at its start.
    let participant = Participant::builder(gpu).connect(socket)?;
    let mut input = pipe::Receiver::from_owned_fd(std::io::stdin().as_fd().try_clone_to_owned()?)?;
    let mut out = pipe::Sender::from_owned_fd(std::io::stdout().as_fd().try_clone_to_owned()?)?;

    let again = Arc::new(Notify::new());
    let (told, tell) = (participant.clone(), again.clone());
    tokio::spawn(listen(watch(&participant)?, move || {
        while let Some(notice) = told.next_notice() {
            if matches!(notice, Notice::TryAgain | Notice::ProducerGone) {
                tell.notify_one();
            }
        }
    }));

    let mut descriptor = [0; Descriptor::BYTES];
    while read(&mut input, &mut descriptor).await? {
        let block = claim(&participant, &again, &descriptor).await?;
        // A short copy, so the task waits for it; longer work belongs on a thread that may block.
        out.write_all(&contents(&stream, &block)?.to_le_bytes())
            .await?;
    }
    Ok(())
}

/// Claims without blocking the thread. One task claims; for several, give each its own [`Notify`]
/// and tell all.
async fn claim(
    participant: &Participant,
    again: &Notify,
    bytes: &[u8],
) -> Result<ReceivedBlock, ClaimError> {
    loop {
        match participant.try_claim(bytes, Wait::Host) {
            // The answer that it needs was asked for. If it came already, the notice is there too.
            Err(ClaimError::WouldBlock) => again.notified().await,
            done => return done,
        }
    }
}

/// Reads the number of which a block is full.
fn contents(stream: &Stream, block: &ReceivedBlock) -> Result<u64, Box<dyn Error>> {
    let mut bytes = vec![0; BLOCK];
    if block.len() != bytes.len() as u64 {
        return Err(format!("a block has {} bytes", block.len()).into());
    }
    stream.read(block, &mut bytes)?;
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[..8]);
    if bytes != number.repeat(BLOCK / 8) {
        return Err("a block contains several numbers".into());
    }
    Ok(u64::from_le_bytes(number))
}
