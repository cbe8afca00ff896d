//! Camera fan-out: a camera fills frames into a small pool of blocks; fast, slow and crashing
//! subscribers look at them.
//!
//! ```text
//! cargo run --example camera -- [--backend host|cuda|hip] [--rounds 20]
//! ```
//!
//! The camera is this process; each subscriber is a process of its own.
//!
//! | subscriber | looks at a frame | gets it by |
//! |---|---|---|
//! | fast | at once, and lets go | a grant of its own |
//! | window | at once, and keeps the last two; is killed in each tenth round and replaced | a grant of its own |
//! | slow | one at a time, for four ticks each; the rest wait in its queue | a ticket that one process may claim |
//!
//! When the slow one has the whole pool in its queue, the camera drops frames; it never waits and
//! never writes into a frame that somebody may still look at. Every pixel carries the number of its
//! frame, and every subscriber compares all of them when it gets a frame and again before it lets
//! go: none is ever torn.

use std::collections::VecDeque;
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::Duration;

use gpu_ipc::session::ShareOptions;
use gpu_ipc::{
    After, BackendKind, Claims, Descriptor, Gpu, Participant, ParticipantId, ReceivedBlock,
    SentBlock, Session, State, Stream, To, Wait, detect,
};

/// Bytes of a frame: pixels of four bytes.
const FRAME: usize = 64 << 10;
/// Frames that can be in somebody's hands.
const POOL: u64 = 6;
/// Times per round at which the camera has a picture.
const TICKS: u64 = 24;
/// Ticks that the slow subscriber needs for a frame.
const SLOWNESS: u64 = 4;
/// The window subscriber is killed in every tenth round, at this tick, while it holds two frames.
const KILL_EVERY: u64 = 10;
const KILL_AT: u64 = 3;
/// A process that takes longer counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // This program starts itself in this role.
        ["subscriber", backend, socket, manner] => subscriber(backend, socket, manner),
        _ => Options::parse(&args).and_then(|options| camera(&options)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("camera: {error}");
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
            rounds: 20,
        };
        for pair in args.chunks(2) {
            match pair {
                [name, value] if name == "--backend" => options.backend.clone_from(value),
                [name, value] if name == "--rounds" => options.rounds = value.parse()?,
                _ => return Err("usage: camera [--backend host|cuda|hip] [--rounds N]".into()),
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

/// Makes the picture that the camera sees: its number in every pixel.
fn picture(number: u32) -> Vec<u8> {
    number.to_le_bytes().repeat(FRAME / 4)
}

// The camera.

fn camera(options: &Options) -> Result<(), Box<dyn Error>> {
    let gpu = open(&options.backend)?;
    let stream = Stream::create(&gpu)?;
    let session = Session::builder(gpu)
        .region_bytes(POOL * FRAME as u64)
        .open()?;
    let pool = (0..POOL)
        .map(|_| session.alloc(FRAME as u64))
        .collect::<Result<Vec<_>, _>>()?;
    let start = |manner| Subscriber::start(&options.backend, &session, manner);
    let (mut fast, mut window, mut slow) = (start("fast")?, start("window")?, start("slow")?);
    let (mut number, mut dropped, mut killed) = (0, 0, 0);
    for round in 1..=options.rounds {
        let before = number;
        for tick in 0..TICKS {
            if round % KILL_EVERY == 0 && tick == KILL_AT {
                window.kill()?;
                window = start("window")?;
                killed += 1;
            }
            // The question costs nothing and waits for nothing.
            let free = pool
                .iter()
                .find(|block| block.wait_released(Some(Duration::ZERO)).is_ok());
            let Some(block) = free else {
                dropped += 1;
                slow.tell("tick")?;
                continue;
            };
            number += 1;
            let grants = [
                (block, To::Participant(fast.id)),
                (block, To::Participant(window.id)),
                (block, To::Ticket(Claims::Once)),
            ];
            let frames = shoot(&session, &stream, &grants, number)?;
            for (subscriber, frame) in [&mut fast, &mut window, &mut slow].into_iter().zip(&frames)
            {
                subscriber.told += 1;
                subscriber.tell(&hex(frame.as_bytes()))?;
            }
            // What is left of the time until the next tick, long enough for those two.
            fast.expect(u64::from(number))?;
            window.expect(u64::from(number))?;
        }
        let published = u64::from(number - before);
        // The slow one gave back at most one frame in `SLOWNESS` ticks, and the camera has only the
        // pool: if it published more, it wrote into a frame that was being read.
        if !(POOL..=POOL + TICKS / SLOWNESS).contains(&published) {
            return Err(
                format!("round {round}: {published} of {TICKS} frames were published").into(),
            );
        }
        for subscriber in [&mut fast, &mut window, &mut slow] {
            subscriber.tell("end")?;
            subscriber.expect(subscriber.told)?;
        }
        // Everybody has let go, the dead too: their frames come back when their death is proven and
        // their quarantine over. A camera need not wait for that; this one does so that each round
        // begins with a whole pool.
        for block in &pool {
            block
                .wait_released(Some(PATIENCE))
                .map_err(|e| format!("round {round}: {e}"))?;
        }
    }
    drop(pool);
    for subscriber in [fast, window, slow] {
        subscriber.finish()?;
    }
    let report = session.shutdown(PATIENCE);
    if !report.clean {
        return Err(format!("still held: {report:?}").into());
    }
    println!(
        "camera: {number} frames of {} KiB from a pool of {POOL}, none torn; {dropped} dropped rather than waited for; \
         {killed} subscribers killed and replaced",
        FRAME >> 10,
    );
    Ok(())
}

/// Takes a picture into a block that nobody looks at, and shares it.
fn shoot(
    session: &Session,
    stream: &Stream,
    grants: &[(&SentBlock, To)],
    number: u32,
) -> Result<Vec<Descriptor>, Box<dyn Error>> {
    let picture = picture(number);
    // This waits for the copy; a device that renders into the block needs no wait.
    stream.write(grants[0].0, &picture)?;
    // The frame's number travels in the descriptor: a subscriber knows what it is about to see.
    let mut user = [0; 64];
    user[..4].copy_from_slice(&number.to_le_bytes());
    Ok(session.share_many(
        grants,
        After::Stream(stream),
        &ShareOptions::default().user(user),
    )?)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A subscriber as the camera sees it. It ends by itself when its input does.
struct Subscriber {
    id: ParticipantId,
    told: u64,
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Subscriber {
    fn start(backend: &str, session: &Session, manner: &str) -> Result<Subscriber, Box<dyn Error>> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["subscriber", backend])
            .arg(session.socket_path())
            .arg(manner)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let to = child.stdin.take().ok_or("a subscriber has no input")?;
        let from = BufReader::new(child.stdout.take().ok_or("a subscriber has no output")?);
        let mut subscriber = Subscriber {
            id: ParticipantId(0),
            told: 0,
            child,
            to,
            from,
        };
        subscriber.id = ParticipantId(subscriber.answer()?);
        Ok(subscriber)
    }

    fn tell(&mut self, line: &str) -> Result<(), Box<dyn Error>> {
        writeln!(self.to, "{line}")
            .map_err(|e| format!("subscriber {} is gone: {e}", self.child.id()).into())
    }

    fn answer(&mut self) -> Result<u64, Box<dyn Error>> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        line.trim()
            .parse()
            .map_err(|_| format!("subscriber {} says {line:?}", self.child.id()).into())
    }

    fn expect(&mut self, number: u64) -> Result<(), Box<dyn Error>> {
        match self.answer()? {
            told if told == number => Ok(()),
            told => Err(format!(
                "subscriber {} says {told} instead of {number}",
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

    fn finish(mut self) -> Result<(), Box<dyn Error>> {
        drop(self.to);
        let status = self.child.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("a subscriber ended with {status}").into())
        }
    }
}

// A subscriber.

fn subscriber(backend: &str, socket: &str, manner: &str) -> Result<(), Box<dyn Error>> {
    let gpu = open(backend)?;
    let stream = Stream::create(&gpu)?;
    let mut out = std::io::stdout();
    let mut camera = Participant::builder(gpu.clone());
    if gpu.caps().read_only {
        // Who only looks cannot scribble.
        camera = camera.read_only();
    }
    let camera = camera.connect(socket)?;
    let mut eye = Eye {
        stream,
        camera,
        seen: 0,
    };
    writeln!(out, "{}", eye.camera.id().0)?;
    let (mut held, mut queue, mut ticks) = (VecDeque::new(), VecDeque::<Vec<u8>>::new(), 0);
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match (manner, line.as_str()) {
            (_, "end") => {
                while let Some(frame) = held.pop_front() {
                    eye.let_go(frame)?;
                }
                while let Some(descriptor) = queue.pop_front() {
                    eye.look(&descriptor).and_then(|frame| eye.let_go(frame))?;
                }
                writeln!(out, "{}", eye.seen)?;
            }
            ("slow", line) => {
                ticks += u64::from(!held.is_empty());
                if line != "tick" {
                    queue.push_back(unhex(line)?);
                }
                if ticks == SLOWNESS {
                    ticks = 0;
                    if let Some(frame) = held.pop_front() {
                        eye.let_go(frame)?;
                    }
                }
                if held.is_empty()
                    && let Some(descriptor) = queue.pop_front()
                {
                    held.push_back(eye.look(&descriptor)?);
                }
            }
            (manner, line) => {
                let frame = eye.look(&unhex(line)?)?;
                let number = frame.number;
                held.push_back(frame);
                let keep = if manner == "window" { 2 } else { 0 };
                while held.len() > keep
                    && let Some(frame) = held.pop_front()
                {
                    eye.let_go(frame)?;
                }
                writeln!(out, "{number}")?;
            }
        }
    }
    Ok(())
}

/// A frame that is being looked at.
struct Frame {
    number: u32,
    block: ReceivedBlock,
}

struct Eye {
    stream: Stream,
    camera: Participant,
    seen: u64,
}

impl Eye {
    fn look(&mut self, descriptor: &[u8]) -> Result<Frame, Box<dyn Error>> {
        let mut number = [0; 4];
        number.copy_from_slice(&Descriptor::decode(descriptor)?.user()[..4]);
        let block = self
            .camera
            .claim(descriptor, Wait::Stream(&self.stream), Some(PATIENCE))?;
        let frame = Frame {
            number: u32::from_le_bytes(number),
            block,
        };
        self.compare(&frame)?;
        self.seen += 1;
        Ok(frame)
    }

    /// Up to here the frame was this process' to look at: it must be as it was at first. The drop
    /// hands it back.
    fn let_go(&self, frame: Frame) -> Result<(), Box<dyn Error>> {
        self.compare(&frame)
    }

    fn compare(&self, frame: &Frame) -> Result<(), Box<dyn Error>> {
        let mut pixels = vec![0; FRAME];
        if frame.block.len() != pixels.len() as u64 {
            return Err(format!("frame {} has {} bytes", frame.number, frame.block.len()).into());
        }
        self.stream.read(&frame.block, &mut pixels)?;
        if frame.block.state() != State::Ready || pixels != picture(frame.number) {
            return Err(
                format!("frame {} is torn ({:?})", frame.number, frame.block.state()).into(),
            );
        }
        Ok(())
    }
}

fn unhex(hex: &str) -> Result<Vec<u8>, std::num::ParseIntError> {
    let byte = |at| u8::from_str_radix(hex.get(at..at + 2).unwrap_or("?"), 16);
    (0..hex.len()).step_by(2).map(byte).collect()
}
