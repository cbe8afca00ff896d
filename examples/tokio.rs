//! An event loop of tokio: a producer and a consumer as two tasks of a single-threaded runtime,
//! neither of which blocks the thread on the other.
//!
//! ```text
//! cargo run --example tokio -- [--backend host|cuda|hip] [--rounds 1000]
//! ```
//!
//! One task waits for the descriptor of the session and reads its notices, another for that of the
//! participant; the two others wait for what the notices say. A real program has one side; this one
//! has both, so that it is whole.

mod shared;

use std::error::Error;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use gpu_ipc::participant::Notice;
use gpu_ipc::session::SessionNotice;
use gpu_ipc::{
    After, ClaimError, Claims, Descriptor, Participant, ReceivedBlock, SentBlock, Session, Stream,
    To, Wait,
};
use shared::{Options, check, end, open, pool, shut_down, words};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc};

/// Bytes of a block, each word of which is its number.
const BLOCK: usize = 64 << 10;
/// Blocks of the producer's pool.
const POOL: usize = 8;

fn main() -> ExitCode {
    let run = |options: &Options| {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_io().build()?.block_on(run(options))
    };
    let done = Options::parse("tokio", 1000).and_then(|options| run(&options));
    end("tokio", done)
}

async fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let gpu = open(&options.backend)?;
    let stream = Stream::create(&gpu)?;
    let session = Session::builder(gpu.clone()).open()?;
    // A connection waits for the producer's welcome: that of the whole process, at its start.
    let participant = Participant::builder(gpu).connect(session.socket_path())?;
    let pool = pool(&session, POOL, BLOCK)?;

    let (freed, again) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (session_says, tell) = (session.clone(), freed.clone());
    tokio::spawn(listen(watch(&session)?, move || {
        while let Some(notice) = session_says.next_notice() {
            if notice == SessionNotice::TryAgain {
                tell.notify_one();
            }
        }
    }));
    let (participant_says, tell) = (participant.clone(), again.clone());
    tokio::spawn(listen(watch(&participant)?, move || {
        while let Some(notice) = participant_says.next_notice() {
            if matches!(notice, Notice::TryAgain | Notice::ProducerGone) {
                tell.notify_one();
            }
        }
    }));

    let (to, mut from) = mpsc::channel(POOL);
    let (rounds, producer) = (options.rounds, stream.clone());
    let producing = tokio::spawn(async move {
        // The error of another task must be one that can be sent here.
        produce(&pool, &producer, rounds, to, &freed)
            .await
            .map_err(|error| error.to_string())
    });
    let mut claimed = 0;
    while let Some(descriptor) = from.recv().await {
        let block = claim(&participant, &again, &descriptor).await?;
        // A short copy, so the task waits for it; longer work belongs on a thread that may block.
        check(&stream, &block, claimed)?;
        claimed += 1;
    }
    producing.await??;
    drop(participant);
    // Nothing else is left to do on this thread, so it may wait.
    shut_down(&session)?;
    println!("tokio: {claimed} blocks of 64 KiB from a pool of {POOL}");
    Ok(())
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

async fn produce(
    pool: &[SentBlock],
    stream: &Stream,
    rounds: u64,
    to: mpsc::Sender<Descriptor>,
    freed: &Notify,
) -> Result<(), Box<dyn Error>> {
    for number in 0..rounds {
        let block = loop {
            // When none is free, the session has a notice when the next one is.
            let free = |block: &&SentBlock| block.wait_released(Some(Duration::ZERO)).is_ok();
            match pool.iter().find(free) {
                Some(block) => break block,
                None => freed.notified().await,
            }
        };
        stream.write(block, &words(number, BLOCK))?;
        let descriptor = block.share(To::Ticket(Claims::Once), After::Stream(stream))?;
        to.send(descriptor).await?;
    }
    Ok(())
}

/// Claims without blocking the thread. One task claims; for several, give each its own [`Notify`]
/// and tell all.
async fn claim(
    participant: &Participant,
    again: &Notify,
    descriptor: &Descriptor,
) -> Result<ReceivedBlock, ClaimError> {
    loop {
        match participant.try_claim(descriptor.as_bytes(), Wait::Host) {
            // The answer that it needs was asked for. If it came already, the notice is there too.
            Err(ClaimError::WouldBlock) => again.notified().await,
            done => return done,
        }
    }
}
