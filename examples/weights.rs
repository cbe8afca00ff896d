//! Weight hot-swap: a trainer publishes generation after generation of weights, and readers go over
//! to each as it comes.
//!
//! ```text
//! cargo run --example weights -- [--backend host|cuda|hip] [--rounds 20] [--readers 4]
//! ```
//!
//! The trainer is this process; each reader is a process of its own. A generation is one block,
//! shared with one ticket that anybody may claim (a broadcast), so the trainer needs no list of its
//! readers. A reader claims the generation that is announced while it still holds the one before,
//! checks it, and lets the old one go. In each tenth round a reader is killed in the middle of its
//! swap and another takes its place. No generation is lost to the dead, and memory stays flat.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use gpu_ipc::{
    After, BackendKind, Claims, Gpu, Participant, ReceivedBlock, SentBlock, Session, State, Stream,
    To, Wait, detect,
};

/// Bytes of a generation.
const WEIGHTS: usize = 256 << 10;
/// Every page carries a stamp at its start and at its end.
const PAGE: usize = 4096;
/// A reader is killed in every tenth round.
const KILL_EVERY: u64 = 10;
/// A process that takes longer counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // This program starts itself in this role.
        ["reader", backend, socket] => reader(backend, socket),
        _ => Options::parse(&args).and_then(|options| trainer(&options)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("weights: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    backend: String,
    rounds: u64,
    readers: usize,
}

impl Options {
    fn parse(args: &[String]) -> Result<Options, Box<dyn Error>> {
        let mut options = Options {
            backend: "host".into(),
            rounds: 20,
            readers: 4,
        };
        for pair in args.chunks(2) {
            match pair {
                [name, value] if name == "--backend" => options.backend.clone_from(value),
                [name, value] if name == "--rounds" => options.rounds = value.parse()?,
                [name, value] if name == "--readers" => options.readers = value.parse()?,
                _ => {
                    return Err(
                        "usage: weights [--backend host|cuda|hip] [--rounds N] [--readers N]"
                            .into(),
                    );
                }
            }
        }
        if options.readers == 0 {
            Err("at least one reader".into())
        } else {
            Ok(options)
        }
    }
}

fn open(backend: &str) -> Result<Gpu, Box<dyn Error>> {
    let kind = BackendKind::ALL
        .into_iter()
        .find(|kind| kind.name() == backend);
    Ok(detect()?.first(kind.ok_or_else(|| format!("no backend is named {backend}"))?)?)
}

/// Makes the stamp of a page: no two pages of all generations have the same.
fn stamp(generation: u64, page: usize) -> [u8; 8] {
    (generation << 32 | page as u64).to_le_bytes()
}

/// Says which page, if any, does not belong to the generation.
fn wrong_page(weights: &[u8], generation: u64) -> Option<usize> {
    let good = |(number, page): (usize, &[u8])| {
        let stamp = stamp(generation, number);
        page.starts_with(&stamp) && page.ends_with(&stamp)
    };
    weights
        .chunks(PAGE)
        .enumerate()
        .position(|page| !good(page))
}

// The trainer.

fn trainer(options: &Options) -> Result<(), Box<dyn Error>> {
    let gpu = open(&options.backend)?;
    let stream = Stream::create(&gpu)?;
    // At the most two generations exist at once, so one region holds them all.
    let session = Session::builder(gpu)
        .region_bytes(2 * WEIGHTS as u64)
        .open()?;
    let start = || Reader::start(&options.backend, &session);
    let mut readers = (0..options.readers)
        .map(|_| start())
        .collect::<Result<Vec<_>, _>>()?;
    let (mut killed, mut most_reserved) = (0, 0);
    let mut current: Option<SentBlock> = None;
    for generation in 1..=options.rounds {
        let block = session.alloc(WEIGHTS as u64)?;
        train(&stream, &block, generation)?;
        // One descriptor for everybody, for as long as `block` lives. Those who claim it wait for
        // the stream themselves.
        let ticket = block.share(To::Ticket(Claims::Unlimited), After::Stream(&stream))?;
        let hex: String = ticket
            .as_bytes()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let announcement = format!("{generation} {hex}");
        for reader in &mut readers {
            reader.tell(&announcement)?;
        }
        if generation % KILL_EVERY == 0 {
            // It holds the generation before, and has claimed this one or not: nobody waits to see.
            let victim = usize::try_from(generation / KILL_EVERY)? % readers.len();
            readers[victim].kill()?;
            readers[victim] = start()?;
            readers[victim].tell(&announcement)?;
            killed += 1;
        }
        for reader in &mut readers {
            reader.expect(generation)?;
        }
        // Nobody needs the generation before any more. The wait is for a dead reader: what it held
        // comes back once its death is proven and its quarantine is over.
        if let Some(old) = current.replace(block) {
            old.wait_released(Some(PATIENCE))?;
        }
        let stats = settled(&session)?;
        // Two generations were alive a moment ago; more was never reserved than they need, killed
        // readers or not.
        if generation == 1 {
            most_reserved = stats.source.reserved;
        }
        if stats.live_bytes != WEIGHTS as u64 || stats.source.reserved > most_reserved {
            return Err(format!("memory grew in generation {generation}: {stats:?}").into());
        }
    }
    drop(current);
    for reader in readers {
        reader.end()?;
    }
    let report = session.shutdown(PATIENCE);
    if !report.clean {
        return Err(format!("still held: {report:?}").into());
    }
    println!(
        "weights: {} generations of {} KiB to {} readers, {killed} killed and replaced; {} KiB reserved from first to \
         last",
        options.rounds,
        WEIGHTS >> 10,
        options.readers,
        most_reserved >> 10,
    );
    Ok(())
}

/// Writes a generation's weights, in the order of the stream.
fn train(stream: &Stream, block: &SentBlock, generation: u64) -> Result<(), Box<dyn Error>> {
    let mut weights = vec![0; WEIGHTS];
    for (number, page) in weights.chunks_mut(PAGE).enumerate() {
        page[..8].copy_from_slice(&stamp(generation, number));
        page[PAGE - 8..].copy_from_slice(&stamp(generation, number));
    }
    // This waits for the copy; a kernel that computes the weights in place needs no wait.
    Ok(stream.write(block, &weights)?)
}

/// Waits until the old generation is freed: one block is left, and its bytes are all that is taken.
fn settled(session: &Session) -> Result<gpu_ipc::session::Stats, Box<dyn Error>> {
    let start = Instant::now();
    loop {
        session.collect();
        let stats = session.stats();
        if stats.live_blocks == 1 && stats.source.in_use == WEIGHTS as u64 {
            return Ok(stats);
        }
        if start.elapsed() > PATIENCE {
            return Err(format!("an old generation was never freed: {stats:?}").into());
        }
        std::thread::yield_now();
    }
}

/// A reader as the trainer sees it. It ends by itself when its input does.
struct Reader {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Reader {
    fn start(backend: &str, session: &Session) -> Result<Reader, Box<dyn Error>> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["reader", backend])
            .arg(session.socket_path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let to = child.stdin.take().ok_or("a reader has no input")?;
        let from = BufReader::new(child.stdout.take().ok_or("a reader has no output")?);
        Ok(Reader { child, to, from })
    }

    fn tell(&mut self, line: &str) -> Result<(), Box<dyn Error>> {
        writeln!(self.to, "{line}")
            .map_err(|e| format!("reader {} is gone: {e}", self.child.id()).into())
    }

    /// Waits until it uses a generation and has let go of all others.
    fn expect(&mut self, generation: u64) -> Result<(), Box<dyn Error>> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        match line.trim().parse::<u64>() {
            Ok(told) if generation == told => Ok(()),
            _ => Err(format!(
                "reader {} in generation {generation}: {line:?}",
                self.child.id()
            )
            .into()),
        }
    }

    fn kill(&mut self) -> Result<(), Box<dyn Error>> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    fn end(mut self) -> Result<(), Box<dyn Error>> {
        drop(self.to);
        let status = self.child.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("a reader ended with {status}").into())
        }
    }
}

// A reader.

fn reader(backend: &str, socket: &str) -> Result<(), Box<dyn Error>> {
    let gpu = open(backend)?;
    let stream = Stream::create(&gpu)?;
    let mut out = std::io::stdout();
    let trainer = Participant::builder(gpu).connect(socket)?;
    let mut weights = vec![0; WEIGHTS];
    let mut current: Option<(u64, ReceivedBlock)> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (generation, hex) = line
            .split_once(' ')
            .ok_or("an announcement has two words")?;
        let (generation, descriptor) = (generation.parse()?, unhex(hex)?);
        let next = trainer.claim(&descriptor, Wait::Stream(&stream), Some(PATIENCE))?;
        check(&stream, &next, &mut weights, generation)?;
        // Until here a real reader serves from the old one. It was not touched all the while.
        if let Some((old_generation, old)) = current.replace((generation, next)) {
            check(&stream, &old, &mut weights, old_generation)?;
        }
        writeln!(out, "{generation}")?;
    }
    Ok(())
}

/// Compares all of a block with what its generation must be.
fn check(
    stream: &Stream,
    block: &ReceivedBlock,
    weights: &mut [u8],
    generation: u64,
) -> Result<(), Box<dyn Error>> {
    if block.len() != weights.len() as u64 {
        return Err(format!("generation {generation} has {} bytes", block.len()).into());
    }
    stream.read(block, weights)?;
    match (block.state(), wrong_page(weights, generation)) {
        (State::Ready, None) => Ok(()),
        (state, wrong) => {
            Err(format!("generation {generation} is {state:?}, wrong page: {wrong:?}").into())
        }
    }
}

fn unhex(hex: &str) -> Result<Vec<u8>, std::num::ParseIntError> {
    let byte = |at| u8::from_str_radix(hex.get(at..at + 2).unwrap_or("?"), 16);
    (0..hex.len()).step_by(2).map(byte).collect()
}
