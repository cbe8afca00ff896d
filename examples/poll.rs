//! An event loop of `poll`: a producer and a consumer whose threads never wait in a call of the
//! library.
//!
//! ```text
//! cargo run --example poll -- [--backend host|cuda|hip] [--rounds 1000]
//! ```
//!
//! The producer is this process, the consumer another. Each polls the descriptor of its session or
//! participant beside a pipe of its own. The descriptor is readable while a notice is unread: at
//! the producer that a block of its pool is free again, at the consumer that the answer to a claim
//! has come. Grants go to the consumer through a pipe, as bytes; the numbers that it found in the
//! blocks come back.

use std::collections::VecDeque;
use std::error::Error;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use gpu_ipc::participant::Notice;
use gpu_ipc::session::SessionNotice;
use gpu_ipc::{
    After, BackendKind, ClaimError, Claims, Descriptor, Gpu, Participant, ReceivedBlock, SentBlock,
    Session, Stream, To, Wait, detect,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes of a block.
const BLOCK: usize = 64 << 10;
/// Blocks of the producer's pool.
const POOL: usize = 8;
/// A side that waits longer hangs.
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
            eprintln!("poll: {error}");
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
                _ => return Err("usage: poll [--backend host|cuda|hip] [--rounds N]".into()),
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

/// Sleeps until one of the descriptors can be read, and says which.
fn sleep<const N: usize>(fds: [&dyn AsFd; N]) -> Result<[bool; N], Box<dyn Error>> {
    let patience = Timespec {
        tv_sec: PATIENCE.as_secs().cast_signed(),
        tv_nsec: 0,
    };
    let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN));
    if poll(&mut fds, Some(&patience))? == 0 {
        Err("nothing happens".into())
    } else {
        Ok(fds.map(|fd| !fd.revents().is_empty()))
    }
}

/// Appends what a pipe has at this moment; says whether it has ended.
fn read(pipe: impl AsFd, bytes: &mut VecDeque<u8>) -> Result<bool, Box<dyn Error>> {
    let mut chunk = [0; 4096];
    let count = rustix::io::read(pipe, &mut chunk)?;
    bytes.extend(&chunk[..count]);
    Ok(count == 0)
}

/// Takes the next message of `N` bytes out of what was read, once it is whole.
fn message<const N: usize>(bytes: &mut VecDeque<u8>) -> Option<[u8; N]> {
    let whole: Vec<u8> = if bytes.len() < N {
        return None;
    } else {
        bytes.drain(..N).collect()
    };
    whole.try_into().ok()
}

// The producer.

fn producer(options: &Options) -> Result<(), Box<dyn Error>> {
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
    let mut to = child.stdin.take();
    let from = child.stdout.take().ok_or("the consumer has no output")?;
    let (mut shared, mut heard, mut waits, mut answers) = (0, 0, 0, VecDeque::new());
    loop {
        // A block is filled again when nobody holds it. When none is free the session tells of the
        // next.
        while shared < options.rounds
            && let Some(block) = pool
                .iter()
                .find(|block| block.wait_released(Some(Duration::ZERO)).is_ok())
        {
            fill(&stream, block, shared)?;
            let descriptor = block.share(To::Ticket(Claims::Once), After::Stream(&stream))?;
            to.as_mut()
                .ok_or("the consumer's input is closed")?
                .write_all(descriptor.as_bytes())?;
            shared += 1;
        }
        if shared == options.rounds {
            // The consumer sees the end.
            to = None;
        }
        let [noticed, answered] = sleep([&session, &from])?;
        if noticed {
            // All of them: while one is unread the descriptor stays readable.
            while let Some(notice) = session.next_notice() {
                waits += u64::from(notice == SessionNotice::TryAgain);
            }
        }
        if answered && read(&from, &mut answers)? {
            break;
        }
        while let Some(number) = message(&mut answers) {
            if u64::from_le_bytes(number) != heard {
                return Err(
                    format!("block {heard} contains {}", u64::from_le_bytes(number)).into(),
                );
            }
            heard += 1;
        }
    }
    let status = child.wait()?;
    if !status.success() || heard != options.rounds {
        return Err(format!("the consumer ended with {status} after {heard} blocks").into());
    }
    drop(pool);
    let report = session.shutdown(PATIENCE);
    if !report.clean {
        return Err(format!("still held: {report:?}").into());
    }
    println!(
        "poll: {heard} blocks of {} KiB from a pool of {POOL}, {waits} waits for a free one",
        BLOCK >> 10
    );
    Ok(())
}

/// Fills a block with its number.
fn fill(stream: &Stream, block: &SentBlock, number: u64) -> Result<(), Box<dyn Error>> {
    let contents = number.to_le_bytes().repeat(BLOCK / 8);
    Ok(stream.write(block, &contents)?)
}

// The consumer.

fn consumer(backend: &str, socket: &str) -> Result<(), Box<dyn Error>> {
    let gpu = open(backend)?;
    let stream = Stream::create(&gpu)?;
    // A connection waits for the producer's welcome, and so is made before the loop.
    let participant = Participant::builder(gpu).connect(socket)?;
    let (input, mut out) = (std::io::stdin(), std::io::stdout());
    let (mut unread, mut queue, mut ended) = (
        VecDeque::new(),
        VecDeque::<[u8; Descriptor::BYTES]>::new(),
        false,
    );
    // False while a claim waits for something that has not come.
    let mut try_claims = true;
    while !(ended && queue.is_empty()) {
        while try_claims && let Some(descriptor) = queue.front() {
            match participant.try_claim(descriptor, Wait::Host) {
                Ok(block) => {
                    queue.pop_front();
                    // A short copy, so the loop waits for it; for long work poll on the stream's
                    // end instead.
                    out.write_all(&contents(&stream, &block)?.to_le_bytes())?;
                    out.flush()?;
                }
                // The answer that it needs was asked for. A notice tells when it may have come.
                Err(ClaimError::WouldBlock) => try_claims = false,
                Err(error) => return Err(error.into()),
            }
        }
        // A pipe that has ended is readable for ever: it is not polled any more.
        let [noticed, told] = match (ended, queue.is_empty()) {
            (true, true) => break,
            (true, false) => [sleep([&participant])?[0], false],
            (false, _) => sleep([&participant, &input])?,
        };
        if noticed {
            while let Some(notice) = participant.next_notice() {
                match notice {
                    Notice::TryAgain => try_claims = true,
                    Notice::ProducerGone => return Err("the producer is gone".into()),
                    _ => {}
                }
            }
        }
        if told {
            ended = read(&input, &mut unread)?;
            queue.extend(std::iter::from_fn(|| message(&mut unread)));
        }
    }
    Ok(())
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
