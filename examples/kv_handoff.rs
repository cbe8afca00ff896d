//! KV hand-off: an engine fills the KV cache of sequences and hands it to a decoder; the engine is
//! killed and restarted.
//!
//! ```text
//! cargo run --example kv_handoff -- [--backend host|cuda|hip] [--rounds 10]
//! ```
//!
//! The decoder is this process; it outlives every engine. In each round it starts an engine, takes
//! over a batch of sequences, and one more whose KV the engine's GPU is still computing. Then the
//! engine is killed. The decoder is told, keeps the KV that it has, learns that the last one is
//! garbage, lets go of everything, and has all of its memory back before the next engine starts,
//! which is asked for the lost sequence again. In the end every sequence was decoded once.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use gpu_ipc::participant::Notice;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{
    After, BackendKind, ClaimError, Gpu, Participant, ReceivedBlock, Session, State, Stream, To,
    Wait, detect,
};
use rustix::event::{PollFd, PollFlags, poll};

/// Bytes of a sequence's KV.
const KV: usize = 64 << 10;
/// Sequences that an engine finishes before it dies.
const BATCH: u64 = 6;
/// A process that takes longer counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // This program starts itself in this role.
        ["engine", backend] => engine(backend),
        _ => Options::parse(&args).and_then(|options| decoder(&options)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kv_handoff: {error}");
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
            rounds: 10,
        };
        for pair in args.chunks(2) {
            match pair {
                [name, value] if name == "--backend" => options.backend.clone_from(value),
                [name, value] if name == "--rounds" => options.rounds = value.parse()?,
                _ => return Err("usage: kv_handoff [--backend host|cuda|hip] [--rounds N]".into()),
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

/// Makes what a sequence's KV contains: another word at each place, and other words for each
/// sequence.
fn contents(sequence: u64) -> Vec<u8> {
    (0..KV as u64 / 8)
        .flat_map(|place| (sequence << 32 | place).to_le_bytes())
        .collect()
}

// The decoder.

fn decoder(options: &Options) -> Result<(), Box<dyn Error>> {
    let gpu = open(&options.backend)?;
    let stream = Stream::create(&gpu)?;
    let (mut next, mut poisoned, mut most_mapped) = (0, 0, 0);
    let mut baseline = Footprint::now(&gpu)?;
    if gpu.kind() != BackendKind::Host {
        // A driver keeps some memory of its own from the first use on, so one hand-off comes before
        // the count.
        hand_off(&options.backend, &gpu, &stream, next)?;
        next += BATCH;
        poisoned += 1;
        baseline.free = 0;
        baseline.wait_until_back(&gpu)?;
        for _ in 0..1000 {
            // The killed engine's memory comes back when its process is gone for good.
            baseline.free = baseline.free.max(Footprint::now(&gpu)?.free);
        }
    }
    for round in 0..options.rounds {
        let mapped = hand_off(&options.backend, &gpu, &stream, next)
            .map_err(|e| format!("round {round}: {e}"))?;
        // What was garbage is asked for again, from the engine's successor.
        next += BATCH;
        poisoned += 1;
        most_mapped = mapped.max(most_mapped);
        // The engine is gone, and so is everything that this process had of it. The participant's
        // thread unmaps when it is told, not when we look: so we look until it has.
        baseline
            .wait_until_back(&gpu)
            .map_err(|e| format!("round {round}: {e}"))?;
    }
    println!(
        "kv_handoff: {} engines killed; {next} sequences of {} KiB decoded, {poisoned} poisoned and asked for again; \
         mapped: {} KiB before and after each, {} KiB with it",
        options.rounds,
        KV >> 10,
        baseline.mapped >> 10,
        most_mapped >> 10,
    );
    Ok(())
}

/// Lives through one engine: takes a batch of sequences over from it. Returns how many bytes were
/// mapped meanwhile.
fn hand_off(backend: &str, gpu: &Gpu, stream: &Stream, first: u64) -> Result<u64, Box<dyn Error>> {
    let mut engine = Engine::start(backend)?;
    let participant = Participant::builder(gpu.clone()).connect(engine.line()?)?;
    engine.tell(first)?;
    let finished: Vec<Vec<u8>> = (0..BATCH)
        .map(|_| engine.descriptor())
        .collect::<Result<_, _>>()?;
    let mut kv = Vec::new();
    for (sequence, claimed) in
        (first..).zip(participant.claim_many(&finished, Wait::Stream(stream), Some(PATIENCE)))
    {
        let block = claimed?;
        // Decoding begins: work on `stream` is ordered after the engine's.
        expect(stream, &block, sequence, State::Ready)?;
        kv.push((sequence, block));
    }
    // Half of them are decoded to the end; the drop hands the memory back to the engine.
    kv.truncate(kv.len() / 2);

    // The engine's GPU is still at this one. The claim does not wait; what is queued on `stream`
    // from here on does.
    let unfinished =
        participant.claim(&engine.descriptor()?, Wait::Stream(stream), Some(PATIENCE))?;
    if unfinished.state() != State::Pending {
        return Err(format!("unfinished KV is {:?}", unfinished.state()).into());
    }
    let mapped = Footprint::now(gpu)?.mapped;
    engine.kill()?;

    wait_for_producer_gone(&participant)?;
    // The stream goes on, although nobody will ever finish what it waited for; and what it waited
    // for is marked.
    stream.synchronize()?;
    if unfinished.state() != State::Poisoned {
        return Err(format!("the KV of a killed engine is {:?}", unfinished.state()).into());
    }
    // What was finished is as good as before: the memory lives as long as this process maps it.
    for (sequence, block) in &kv {
        expect(stream, block, *sequence, State::ReadyProducerGone)?;
    }
    // Nothing more comes from here.
    if !matches!(
        participant.claim(&finished[0], Wait::Host, Some(PATIENCE)),
        Err(ClaimError::ProducerGone)
    ) {
        return Err("a claim from a dead engine did not say so".into());
    }

    // With the last block of a region its mapping goes, without any other call.
    drop((kv, unfinished));
    let start = Instant::now();
    while participant.mappings() > 0 {
        if start.elapsed() > PATIENCE {
            return Err(format!(
                "{} regions of a dead engine stay mapped",
                participant.mappings()
            )
            .into());
        }
        std::thread::yield_now();
    }
    Ok(mapped)
}

/// Waits until the participant has the event that its producer is gone: it sleeps, and is woken.
fn wait_for_producer_gone(participant: &Participant) -> Result<(), Box<dyn Error>> {
    loop {
        while let Some(event) = participant.next_notice() {
            if event == Notice::ProducerGone {
                return Ok(());
            }
        }
        let patience = rustix::event::Timespec {
            tv_sec: PATIENCE.as_secs().cast_signed(),
            tv_nsec: 0,
        };
        if poll(
            &mut [PollFd::new(participant, PollFlags::IN)],
            Some(&patience),
        )? == 0
        {
            return Err("nobody said that the engine is dead".into());
        }
    }
}

/// Reads a block on the stream, and compares all of it and its state.
fn expect(
    stream: &Stream,
    block: &ReceivedBlock,
    sequence: u64,
    state: State,
) -> Result<(), Box<dyn Error>> {
    let mut seen = vec![0; KV];
    if block.len() != seen.len() as u64 {
        return Err(format!("sequence {sequence} has {} bytes", block.len()).into());
    }
    stream.read(block, &mut seen)?;
    if seen != contents(sequence) {
        return Err(format!("sequence {sequence} has other contents").into());
    }
    if block.state() == state {
        Ok(())
    } else {
        Err(format!("sequence {sequence} is {:?}", block.state()).into())
    }
}

/// What this process has of memory and descriptors.
#[derive(Debug)]
struct Footprint {
    /// Bytes of shared memory that are mapped; blocks of the host backend are among them.
    mapped: u64,
    descriptors: usize,
    /// Free bytes of the device, as the driver counts them.
    free: u64,
}

impl Footprint {
    fn now(gpu: &Gpu) -> Result<Footprint, Box<dyn Error>> {
        let mut mapped = 0;
        for line in std::fs::read_to_string("/proc/self/maps")?
            .lines()
            .filter(|line| line.contains("/memfd:"))
        {
            let (range, _) = line.split_once(' ').ok_or("a line of the maps has words")?;
            let (from, to) = range.split_once('-').ok_or("a mapping has two ends")?;
            mapped += u64::from_str_radix(to, 16)? - u64::from_str_radix(from, 16)?;
        }
        let descriptors = std::fs::read_dir("/proc/self/fd")?.count();
        Ok(Footprint {
            mapped,
            descriptors,
            free: gpu.backend().memory_info(gpu.device())?.free_bytes,
        })
    }

    fn wait_until_back(&self, gpu: &Gpu) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        loop {
            let now = Footprint::now(gpu)?;
            if now.mapped <= self.mapped
                && now.descriptors <= self.descriptors
                && now.free >= self.free
            {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("memory was {self:?} and is {now:?}").into());
            }
            std::thread::yield_now();
        }
    }
}

/// An engine as the decoder sees it. It ends by itself when its input does.
struct Engine {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Engine {
    fn start(backend: &str) -> Result<Engine, Box<dyn Error>> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["engine", backend])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let to = child.stdin.take().ok_or("an engine has no input")?;
        let from = BufReader::new(child.stdout.take().ok_or("an engine has no output")?);
        Ok(Engine { child, to, from })
    }

    fn tell(&mut self, number: u64) -> Result<(), Box<dyn Error>> {
        writeln!(self.to, "{number}")
            .map_err(|e| format!("engine {} is gone: {e}", self.child.id()).into())
    }

    fn line(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        if self.from.read_line(&mut line)? == 0 {
            return Err(format!("engine {} ended", self.child.id()).into());
        }
        Ok(line.trim_end().into())
    }

    fn descriptor(&mut self) -> Result<Vec<u8>, Box<dyn Error>> {
        let hex = self.line()?;
        let byte = |at| u8::from_str_radix(hex.get(at..at + 2).unwrap_or("?"), 16);
        Ok((0..hex.len())
            .step_by(2)
            .map(byte)
            .collect::<Result<_, _>>()?)
    }

    fn kill(&mut self) -> Result<(), Box<dyn Error>> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

// The engine.

fn engine(backend: &str) -> Result<(), Box<dyn Error>> {
    let gpu = open(backend)?;
    let stream = Stream::create(&gpu)?;
    let mut out = std::io::stdout();
    let session = Session::builder(gpu).region_bytes(4 * KV as u64).open()?;
    writeln!(out, "{}", session.socket_path().display())?;
    let mut lines = std::io::stdin().lock().lines();
    let first: u64 = lines.next().ok_or("nobody said where to begin")??.parse()?;
    let decoder = To::Participant(session.wait_for_participants(1, Some(PATIENCE))?[0]);

    let blocks = (0..BATCH)
        .map(|_| session.alloc(KV as u64))
        .collect::<Result<Vec<_>, _>>()?;
    for (block, sequence) in blocks.iter().zip(first..) {
        stream.write(block, &contents(sequence))?;
    }
    // The whole batch costs one fence; kernels that fill the blocks are waited for by the decoder's
    // stream alone.
    let grants: Vec<_> = blocks.iter().map(|block| (block, decoder)).collect();
    for descriptor in
        session.share_many(&grants, After::Stream(&stream), &ShareOptions::default())?
    {
        writeln!(out, "{}", hex(descriptor.as_bytes()))?;
    }

    // A kernel that takes longer than the engine lives.
    let (end, ended) = channel::<()>();
    let kernel = move || {
        let _ = ended.recv();
    };
    stream.host_function(kernel)?;
    let unfinished = session.alloc(KV as u64)?;
    writeln!(
        out,
        "{}",
        hex(unfinished
            .share(decoder, After::Stream(&stream))?
            .as_bytes())
    )?;

    // The end never comes: it is killed. It would come if the decoder had failed.
    let _ = lines.next();
    drop(end);
    Ok(stream.synchronize()?)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
