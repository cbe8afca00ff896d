//! The demo: one producer, this process, and real consumer processes.
//!
//! 1. Blocks go out in batches. Each is written by the producer's stream, shared after it, claimed by a consumer on its
//!    own stream, and compared. The producer drops most of them while they are held: limbo. The next batch is
//!    allocated before the last one is let go, so that memory that was given out too early would show.
//! 2. One descriptor is cancelled instead of sent, one is claimed twice.
//! 3. One block is forwarded by the consumer that has it to another one, and one is broadcast to all.
//! 4. Two consumers are killed while they hold blocks; one of them has forked a child that lives on.
//! 5. It ends when nothing is held any more.

pub mod consumer;
mod pattern;
mod pipe;
mod report;

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use gpu_ipc::{After, Claims, Descriptor, Gpu, ParticipantId, SentBlock, Session, Stream, To};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::Outcome;
use crate::args::{BackendChoice, DemoOptions};
use pipe::{Consumer, WATCHDOG};
use report::Report;

/// Blocks that each of the two consumers holds when it is killed.
const HELD_AT_DEATH: u32 = 4;
/// Every so manieth block is kept by the producer, to read the reply.
const KEPT: usize = 4;

/// Runs the demo.
pub fn run(options: &DemoOptions) -> Outcome {
    let gpu = match choose(options.backend) {
        Ok(gpu) => gpu,
        Err(why) => {
            eprintln!("{why}");
            return Outcome::Unavailable;
        }
    };
    match Demo::new(gpu, options).and_then(Demo::play) {
        Ok(report) => {
            if options.json {
                println!("{}", serde_json::json!(report));
            } else {
                let width = std::io::stdout().is_terminal().then(terminal_width).flatten();
                println!("{}", report.table(width));
                println!("{}", if report.is_good() { "All blocks came back." } else { "Something went wrong." });
            }
            if report.is_good() { Outcome::Good } else { Outcome::Finding }
        }
        Err(why) => {
            eprintln!("the demo stopped: {why}");
            Outcome::Finding
        }
    }
}

fn terminal_width() -> Option<u16> {
    rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col).filter(|&columns| columns >= 40)
}

fn choose(choice: BackendChoice) -> Result<Gpu, String> {
    let found = gpu_ipc::detect().map_err(|e| e.to_string())?;
    let mut why = Vec::new();
    for &kind in choice.kinds() {
        match found.first(kind) {
            Ok(gpu) => return Ok(gpu),
            Err(error) => why.push(error.to_string()),
        }
    }
    Err(why.join("\n"))
}

/// A block on its way, as the producer has it.
struct Sent {
    consumer: usize,
    /// Kept to read the reply; most are dropped while they are held.
    kept: Option<(SentBlock, u64)>,
}

struct Demo<'a> {
    options: &'a DemoOptions,
    gpu: Gpu,
    stream: Stream,
    session: Session,
    consumers: Vec<(Consumer, ParticipantId)>,
    next_stamp: u32,
    buffer: Vec<u8>,
    report: Report,
    progress: ProgressBar,
}

impl<'a> Demo<'a> {
    fn new(gpu: Gpu, options: &'a DemoOptions) -> Result<Demo<'a>, String> {
        let (size, device) = (options.size, gpu.info().total_bytes);
        if size > device {
            return Err(format!(
                "out of memory: a block of {size} bytes is more than the device's {device}; ask for less"
            ));
        }
        let session = Session::builder(gpu.clone()).open().map_err(|e| e.to_string())?;
        let progress = if options.json || !std::io::stderr().is_terminal() {
            ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden())
        } else {
            ProgressBar::new(u64::from(options.blocks))
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} blocks  {msg}") {
            progress.set_style(style);
        }
        let backend = gpu.kind().name().to_owned();
        if !options.json {
            println!("{} on {}, {}", gpu.info().name, gpu.kind(), gpu.uuid());
        }
        Ok(Demo {
            stream: Stream::create(&gpu).map_err(|e| e.to_string())?,
            consumers: Vec::new(),
            next_stamp: 0,
            buffer: vec![0; usize::try_from(options.size).map_err(|e| e.to_string())?],
            report: Report { backend, ..Report::default() },
            options,
            gpu,
            session,
            progress,
        })
    }

    fn play(mut self) -> Result<Report, String> {
        let working = self.options.consumers as usize;
        self.progress.set_message("starting consumers");
        for _ in 0..working + 2 {
            self.start_consumer()?;
        }
        self.share_all(working)?;
        self.progress.set_message("cancelling one, claiming one twice");
        self.cancel_one()?;
        self.claim_one_twice()?;
        self.progress.set_message("forwarding one, broadcasting one");
        self.forward_one()?;
        self.broadcast_one()?;
        self.progress.set_message("killing two consumers");
        self.kill_two(working)?;
        self.progress.set_message("waiting until nothing is held");
        self.end()?;
        self.progress.finish_and_clear();
        Ok(std::mem::take(&mut self.report))
    }

    fn start_consumer(&mut self) -> Result<(), String> {
        let device = self.gpu.uuid().to_string();
        let mut consumer = Consumer::start(self.gpu.kind().name(), &device, self.session.socket_path())?;
        let id = *consumer.answer()?.first().ok_or("a consumer did not say its number")?;
        self.consumers.push((consumer, ParticipantId(id)));
        self.report.consumers += 1;
        Ok(())
    }

    /// Makes a block and queues its contents on the stream; the caller shares it after the stream.
    fn write_block(&mut self) -> Result<(SentBlock, u64), String> {
        let stamp = pattern::stamp(self.options.seed, self.next_stamp);
        self.next_stamp += 1;
        let block = self.session.alloc(self.options.size).map_err(|e| e.to_string())?;
        // The buffer belongs to the copy that is queued until that is done.
        self.stream.synchronize().map_err(|e| e.to_string())?;
        pattern::fill(&mut self.buffer, stamp);
        let (from, len) = (self.buffer.as_ptr(), self.buffer.len());
        // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the copy is done: the
        // stream is synchronised before the buffer is written again or freed, and the block is the stream's until then,
        // because it is shared after it.
        unsafe { self.gpu.backend().copy_to_device(self.stream.raw(), block.ptr(), from, len) }
            .map_err(|e| e.to_string())?;
        block.used_on(&self.stream);
        Ok((block, stamp))
    }

    fn share(&mut self, block: &SentBlock, consumer: usize) -> Result<Descriptor, String> {
        let to = To::Participant(self.consumers[consumer].1);
        let descriptor = block.share(to, After::Stream(&self.stream)).map_err(|e| e.to_string())?;
        self.report.shared += 1;
        Ok(descriptor)
    }

    /// Shares a new block with a consumer, which claims and holds it; its answer is left to be read.
    fn send(&mut self, consumer: usize) -> Result<(SentBlock, u64, Descriptor), String> {
        let (block, stamp) = self.write_block()?;
        let descriptor = self.share(&block, consumer)?;
        self.consumers[consumer].0.tell(&format!("hold {} {stamp}", pipe::hex(descriptor.as_bytes())))?;
        Ok((block, stamp, descriptor))
    }

    fn held(&mut self, consumer: usize) -> Result<(), String> {
        let wrong = self.consumers[consumer].0.answer()?;
        self.report.claimed += 1;
        self.report.content_errors += wrong.first().copied().unwrap_or(1);
        Ok(())
    }

    fn share_all(&mut self, working: usize) -> Result<(), String> {
        // Two batches are out at once; a quarter of the device is theirs.
        let fit = self.gpu.info().total_bytes / 8 / self.options.size;
        let batch = u32::try_from(fit.clamp(1, 64)).unwrap_or(64);
        let mut last: Vec<Sent> = Vec::new();
        let mut left = self.options.blocks;
        // Across batches: every consumer gets its turn, and replies of each are read.
        let mut turn = 0;
        while left > 0 || !last.is_empty() {
            let now = left.min(batch);
            left -= now;
            let mut sent = Vec::with_capacity(now as usize);
            let mut handles = VecDeque::new();
            for _ in 0..now {
                let consumer = turn % working;
                let keep = (turn / working + turn).is_multiple_of(KEPT);
                turn += 1;
                let (block, stamp, _) = self.send(consumer)?;
                let kept = if keep {
                    Some((block, stamp))
                } else {
                    handles.push_back(block);
                    None
                };
                sent.push(Sent { consumer, kept });
            }
            for block in &sent {
                self.held(block.consumer)?;
            }
            drop(handles);
            self.finish(last)?;
            self.progress.inc(u64::from(now));
            last = sent;
        }
        Ok(())
    }

    /// Lets a batch go, and reads the replies in those blocks that were kept.
    fn finish(&mut self, batch: Vec<Sent>) -> Result<(), String> {
        for sent in &batch {
            self.consumers[sent.consumer].0.tell("finish 1")?;
        }
        for sent in batch {
            let changed = self.consumers[sent.consumer].0.answer()?;
            self.report.released += 1;
            self.report.early_reuse += changed.first().copied().unwrap_or(1);
            if let Some((block, stamp)) = sent.kept {
                self.wait("a lease to end", |demo| {
                    demo.session.collect();
                    block.outstanding() == 0
                })?;
                self.read(&block)?;
                self.report.content_errors += u64::from(!pattern::matches(&self.buffer, pattern::reply(stamp)));
            }
        }
        Ok(())
    }

    fn read(&mut self, block: &SentBlock) -> Result<(), String> {
        self.stream.synchronize().map_err(|e| e.to_string())?;
        let (to, len) = (self.buffer.as_mut_ptr(), self.buffer.len());
        // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is done: the
        // stream is synchronised before either goes.
        unsafe { self.gpu.backend().copy_to_host(self.stream.raw(), to, block.ptr(), len) }
            .map_err(|e| e.to_string())?;
        self.stream.synchronize().map_err(|e| e.to_string())
    }

    fn cancel_one(&mut self) -> Result<(), String> {
        let (block, _) = self.write_block()?;
        let descriptor = self.share(&block, 0)?;
        self.report.revoked += u64::from(block.cancel(&descriptor).map_err(|e| e.to_string())?);
        Ok(())
    }

    fn claim_one_twice(&mut self) -> Result<(), String> {
        let (_block, _, descriptor) = self.send(0)?;
        self.held(0)?;
        let refused = self.consumers[0].0.ask(&format!("again {}", pipe::hex(descriptor.as_bytes())))?;
        self.report.refused_duplicates += refused.first().copied().unwrap_or(0);
        self.finish(vec![Sent { consumer: 0, kept: None }])
    }

    /// The first consumer hands a block on and lets go of its own lease; the producer has dropped the block by then.
    fn forward_one(&mut self) -> Result<(), String> {
        let (block, stamp, _) = self.send(0)?;
        self.held(0)?;
        drop(block);
        let heir = self.consumers[1].1.0;
        self.consumers[0].0.tell(&format!("forward {heir}"))?;
        let descriptor = self.consumers[0].0.text()?;
        self.report.forwarded += 1;
        self.finish(vec![Sent { consumer: 0, kept: None }])?;
        // What the first wrote as its reply is what the second finds.
        self.consumers[1].0.tell(&format!("hold {descriptor} {}", pattern::reply(stamp)))?;
        self.held(1)?;
        self.finish(vec![Sent { consumer: 1, kept: None }])
    }

    /// One ticket goes to all; the lease of each is its own.
    fn broadcast_one(&mut self) -> Result<(), String> {
        let (block, stamp) = self.write_block()?;
        let ticket =
            block.share(To::Ticket(Claims::Unlimited), After::Stream(&self.stream)).map_err(|e| e.to_string())?;
        let claim = format!("hold {} {stamp}", pipe::hex(ticket.as_bytes()));
        for (consumer, _) in &mut self.consumers {
            consumer.tell(&claim)?;
        }
        for consumer in 0..self.consumers.len() {
            self.held(consumer)?;
            self.report.broadcast += 1;
        }
        drop(block);
        // Nobody replies into what others still read.
        for consumer in 0..self.consumers.len() {
            self.consumers[consumer].0.tell("let-go")?;
        }
        for consumer in 0..self.consumers.len() {
            let changed = self.consumers[consumer].0.answer()?;
            self.report.released += 1;
            self.report.early_reuse += changed.first().copied().unwrap_or(1);
        }
        Ok(())
    }

    /// Kills two consumers while they hold blocks, the second after it forked a child that lives on.
    fn kill_two(&mut self, first: usize) -> Result<(), String> {
        let second = first + 1;
        self.wait("limbo to be empty", |demo| {
            demo.session.collect();
            demo.session.stats().limbo_blocks == 0
        })?;
        for consumer in [first, second] {
            for _ in 0..HELD_AT_DEATH {
                // Dropped while it is held.
                drop(self.send(consumer)?);
                self.held(consumer)?;
            }
        }
        let held = u64::from(HELD_AT_DEATH);
        self.consumers[second].0.ask("fork")?;
        self.consumers[second].0.kill()?;
        self.wait("the second death to be noticed", |demo| demo.session.stats().quarantined == held)?;
        let killed = Instant::now();
        self.consumers[first].0.kill()?;
        self.wait("the blocks of the dead", |demo| {
            let stats = demo.session.stats();
            stats.deaths == 1 && stats.limbo_blocks <= held
        })?;
        self.report.death_to_reclaim_ms = killed.elapsed().as_secs_f64() * 1e3;
        self.report.reclaimed_after_death += held;
        // A whole death, quarantine and burial have passed since the second was killed: its child keeps its blocks.
        self.session.collect();
        self.report.early_reuse += held.saturating_sub(self.session.stats().limbo_blocks);
        self.consumers[second].0.let_children_go();
        self.wait("the blocks that the child kept", |demo| demo.session.stats().limbo_blocks == 0)?;
        self.report.reclaimed_after_death += held;
        self.consumers.truncate(first);
        Ok(())
    }

    fn end(&mut self) -> Result<(), String> {
        for (consumer, _) in &mut self.consumers {
            consumer.wait()?;
        }
        let report = self.session.shutdown(WATCHDOG);
        let stats = self.session.stats();
        self.report.in_limbo_at_end = stats.limbo_blocks;
        self.report.bytes_leaked = report.bytes + stats.leaked_bytes;
        Ok(())
    }

    fn wait(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) -> Result<(), String> {
        let start = Instant::now();
        while !holds(self) {
            if start.elapsed() > WATCHDOG {
                return Err(format!("waited {} s in vain for {what}", WATCHDOG.as_secs()));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}

impl Drop for Demo<'_> {
    fn drop(&mut self) {
        // After an error a copy may still be queued that reads the buffer. If the stream cannot be waited for, the buffer
        // is leaked.
        if self.stream.synchronize().is_err() {
            std::mem::forget(std::mem::take(&mut self.buffer));
        }
    }
}
