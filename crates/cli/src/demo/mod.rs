//! The demo: one producer, this process, and real consumer processes.
//!
//! 1. Blocks go out in batches. Each is written by the producer's stream, shared after it, claimed
//!    by a consumer on its own stream, and compared. The producer drops most of them while they are
//!    held: limbo. The next batch is allocated before the last one is let go, so that memory that
//!    was given out too early would show.
//! 2. One descriptor is cancelled instead of sent, one is claimed twice.
//! 3. One block is forwarded by the consumer that has it to another one, and one is broadcast to
//!    all.
//! 4. Two consumers are killed while they hold blocks, with writes to them under way; one of them
//!    has forked a child that lives on, and that writes too where it can. Meanwhile the survivors
//!    get fresh blocks and watch their contents: memory of the dead that was used again too early
//!    would be overwritten under their eyes.
//! 5. It ends when nothing is held any more.

// Tests: `crates/cli/tests/program.rs`, `crates/cli/tests/reaped.rs`.

pub mod consumer;
mod report;
mod watchdog;

use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::time::Instant;

use gpu_ipc::allocators::{Arena, ArenaOptions};
use gpu_ipc::{After, Claims, Descriptor, Gpu, ParticipantId, SentBlock, Session, To};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpid};

use crate::args::DemoOptions;
use crate::child::{self, Child};
use crate::copier::Copier;
use crate::{Outcome, device, output, pattern};
use consumer::Told;
use report::{HELD_AT_DEATH, Report};
use watchdog::{PATIENCE, Watchdog};

/// Fresh blocks that the survivors watch: as many as the dead held, twice over.
const WATCHED: u32 = 4 * HELD_AT_DEATH;
/// Every so manieth block is kept by the producer, to read the reply.
const KEPT: usize = 4;

/// Runs the demo.
pub fn run(options: &DemoOptions) -> Outcome {
    let watchdog = Watchdog::start(options.json);
    let gpu = match device::choose(options.backend) {
        Ok(gpu) => gpu,
        Err(why) => return output::fail(&why, options.json, Outcome::Unavailable),
    };
    let played = Demo::new(gpu, options, watchdog.clone()).and_then(Demo::play);
    watchdog.rest();
    match played {
        Ok(report) => {
            let outcome = if report.is_good() {
                Outcome::Good
            } else {
                Outcome::Finding
            };
            output::conclude(
                &if options.json {
                    report.json()
                } else {
                    report.text(terminal_width())
                },
                outcome,
            )
        }
        Err(why) => output::fail(
            &format!("the demo stopped: {why}"),
            options.json,
            Outcome::Finding,
        ),
    }
}

fn terminal_width() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(size.ws_col).filter(|&columns| columns >= 40)
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
    copier: Copier,
    session: Session,
    consumers: Vec<(Child<Told>, ParticipantId)>,
    next_stamp: u32,
    report: Report,
    progress: ProgressBar,
    watchdog: Watchdog,
}

impl<'a> Demo<'a> {
    fn new(gpu: Gpu, options: &'a DemoOptions, watchdog: Watchdog) -> Result<Demo<'a>, String> {
        let (size, device) = (options.size, gpu.info().total_bytes);
        if size > device {
            return Err(format!(
                "out of memory: a block of {size} bytes is more than the device's {device}; ask for less"
            ));
        }
        // A child that a killed consumer leaves behind becomes ours to wait for. Where that is
        // refused it becomes init's.
        let _ = set_child_subreaper(Some(getpid()));
        let arena =
            Arena::new(gpu.clone(), ArenaOptions::default()).map_err(|e| device::explain(&e))?;
        let session = Session::builder(gpu.clone())
            .arena(&arena)
            .open()
            .map_err(|e| device::explain(&e))?;
        let progress = if options.json || !io::stderr().is_terminal() {
            ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden())
        } else {
            ProgressBar::new(u64::from(options.blocks))
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} blocks  {msg}") {
            progress.set_style(style);
        }
        let backend = gpu.kind().name().to_owned();
        if !options.json {
            output::print(&format!(
                "{} on {}, {}",
                gpu.info().name,
                gpu.kind(),
                gpu.uuid()
            ))?;
        }
        Ok(Demo {
            copier: Copier::new(&gpu).map_err(|e| device::explain(&e))?,
            consumers: Vec::new(),
            next_stamp: 0,
            report: Report {
                backend,
                blocks: u64::from(options.blocks),
                ..Report::default()
            },
            options,
            gpu,
            session,
            progress,
            watchdog,
        })
    }

    fn play(mut self) -> Result<Report, String> {
        let working = self.options.consumers as usize;
        self.step("starting consumers");
        for _ in 0..working + 2 {
            self.start_consumer()?;
        }
        self.step("sharing blocks");
        self.share_all(working)?;
        self.step("cancelling one, claiming one twice");
        self.cancel_one()?;
        self.claim_one_twice()?;
        self.step("forwarding one, broadcasting one");
        self.forward_one()?;
        self.broadcast_one()?;
        self.step("killing two consumers");
        self.kill_two(working)?;
        self.step("waiting until nothing is held");
        self.end()?;
        self.progress.finish_and_clear();
        Ok(std::mem::take(&mut self.report))
    }

    fn step(&self, what: &'static str) {
        self.progress.set_message(what);
        self.watchdog.step(what);
    }

    fn start_consumer(&mut self) -> Result<(), String> {
        let (device, socket) = (
            self.gpu.uuid().to_string(),
            self.session.socket_path().as_os_str(),
        );
        let args = [
            "demo-consumer",
            "--backend",
            self.gpu.kind().name(),
            "--device",
            &device,
            "--socket",
        ];
        let mut consumer = Child::start(args.iter().map(AsRef::as_ref).chain([socket]), PATIENCE)?;
        let id = ParticipantId(consumer.answer()?);
        self.consumers.push((consumer, id));
        self.report.consumers += 1;
        Ok(())
    }

    /// Makes a block and queues its contents on the stream; the caller shares it after the stream.
    fn write_block(&mut self) -> Result<(SentBlock, u64), String> {
        let stamp = pattern::stamp(self.options.seed, self.next_stamp);
        self.next_stamp += 1;
        let block = self
            .session
            .alloc(self.options.size)
            .map_err(|e| device::explain(&e))?;
        self.copier
            .write(&block, stamp)
            .map_err(|e| device::explain(&e))?;
        Ok((block, stamp))
    }

    fn share(&mut self, block: &SentBlock, consumer: usize) -> Result<Descriptor, String> {
        let to = To::Participant(self.consumers[consumer].1);
        let descriptor = block
            .share(to, After::Stream(self.copier.stream()))
            .map_err(|e| device::explain(&e))?;
        self.report.shared += 1;
        Ok(descriptor)
    }

    /// Shares a new block with a consumer, which claims and holds it; its answer is left to be
    /// read.
    fn send(&mut self, consumer: usize) -> Result<(SentBlock, u64, Descriptor), String> {
        let (block, stamp) = self.write_block()?;
        let descriptor = self.share(&block, consumer)?;
        self.consumers[consumer]
            .0
            .tell(&Told::Hold(descriptor.as_bytes().to_vec(), stamp))?;
        Ok((block, stamp, descriptor))
    }

    fn held(&mut self, consumer: usize) -> Result<(), String> {
        let wrong: bool = self.consumers[consumer].0.answer()?;
        self.watchdog.step("sharing blocks");
        self.report.claimed += 1;
        self.report.content_errors += u64::from(wrong);
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
            self.consumers[sent.consumer].0.tell(&Told::Finish)?;
        }
        for sent in batch {
            let changed: bool = self.consumers[sent.consumer].0.answer()?;
            self.report.released += 1;
            self.report.early_reuse += u64::from(changed);
            if let Some((block, stamp)) = sent.kept {
                self.wait("a lease to end", |demo| {
                    demo.session.collect();
                    block.outstanding() == 0
                })?;
                let replied = self
                    .copier
                    .holds(&block, pattern::reply(stamp))
                    .map_err(|e| device::explain(&e))?;
                self.report.content_errors += u64::from(!replied);
            }
        }
        Ok(())
    }

    fn cancel_one(&mut self) -> Result<(), String> {
        let (block, _) = self.write_block()?;
        let descriptor = self.share(&block, 0)?;
        self.report.revoked +=
            u64::from(block.cancel(&descriptor).map_err(|e| device::explain(&e))?);
        Ok(())
    }

    fn claim_one_twice(&mut self) -> Result<(), String> {
        let (_block, _, descriptor) = self.send(0)?;
        self.held(0)?;
        let refused: bool = self.consumers[0]
            .0
            .ask(&Told::Again(descriptor.as_bytes().to_vec()))?;
        self.report.refused_duplicates += u64::from(refused);
        self.finish(vec![Sent {
            consumer: 0,
            kept: None,
        }])
    }

    /// The first consumer hands a block on and lets go of its own lease; the producer has dropped
    /// the block by then.
    fn forward_one(&mut self) -> Result<(), String> {
        let (block, stamp, _) = self.send(0)?;
        self.held(0)?;
        drop(block);
        let heir = self.consumers[1].1.0;
        let descriptor = self.consumers[0].0.ask(&Told::Forward(heir))?;
        self.let_go(0)?;
        self.consumers[1].0.tell(&Told::Hold(descriptor, stamp))?;
        self.held(1)?;
        self.report.forwarded += 1;
        self.finish(vec![Sent {
            consumer: 1,
            kept: None,
        }])
    }

    /// Has a consumer let go of a block into which it does not reply, because others may read it.
    fn let_go(&mut self, consumer: usize) -> Result<(), String> {
        let changed: bool = self.consumers[consumer].0.ask(&Told::LetGo)?;
        self.report.released += 1;
        self.report.early_reuse += u64::from(changed);
        Ok(())
    }

    /// One ticket goes to all; the lease of each is its own.
    fn broadcast_one(&mut self) -> Result<(), String> {
        let (block, stamp) = self.write_block()?;
        let ticket = block
            .share(
                To::Ticket(Claims::Unlimited),
                After::Stream(self.copier.stream()),
            )
            .map_err(|e| device::explain(&e))?;
        let claim = Told::Hold(ticket.as_bytes().to_vec(), stamp);
        for (consumer, _) in &mut self.consumers {
            consumer.tell(&claim)?;
        }
        for consumer in 0..self.consumers.len() {
            self.held(consumer)?;
            self.report.broadcast += 1;
        }
        drop(block);
        for consumer in 0..self.consumers.len() {
            self.let_go(consumer)?;
        }
        Ok(())
    }

    /// Kills two consumers while they hold blocks, the second after it forked a child that lives
    /// on.
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
        let child = Pid::from_raw(self.consumers[second].0.ask(&Told::Fork)?);
        self.consumers[second].0.kill()?;
        self.wait("the second death to be noticed", |demo| {
            demo.session.stats().quarantined == held
        })?;
        self.consumers[first].0.ask::<()>(&Told::Overwrite)?;
        let killed = Instant::now();
        self.consumers[first].0.kill()?;
        self.wait("the blocks of the dead", |demo| {
            let stats = demo.session.stats();
            stats.deaths == 1 && stats.limbo_blocks <= held
        })?;
        self.report.death_to_reclaim_ms = killed.elapsed().as_secs_f64() * 1e3;
        self.report.reclaimed_after_death += held;
        // A whole death, quarantine and burial have passed since the second was killed: its child
        // keeps its blocks.
        self.session.collect();
        self.report.early_reuse += held.saturating_sub(self.session.stats().limbo_blocks);
        self.watch(first, second)?;
        self.consumers[second].0.close_input();
        self.reap(child)?;
        self.wait("the blocks that the child kept", |demo| {
            demo.session.stats().limbo_blocks == 0
        })?;
        self.report.reclaimed_after_death += held;
        self.consumers.truncate(first);
        Ok(())
    }

    /// Gives fresh blocks to the survivors while the child of `second` lives, lets that child write
    /// to what it keeps, and has the survivors look whether their contents changed.
    fn watch(&mut self, survivors: usize, second: usize) -> Result<(), String> {
        let room = self.gpu.info().total_bytes / 8 / self.options.size;
        let watched = u32::try_from(room).unwrap_or(WATCHED).clamp(1, WATCHED);
        let mut sent = Vec::new();
        let mut blocks = Vec::new();
        for turn in 0..watched as usize {
            let consumer = turn % survivors;
            blocks.push(self.send(consumer)?.0);
            self.held(consumer)?;
            sent.push(Sent {
                consumer,
                kept: None,
            });
        }
        // Told to the child: it is the only one left that reads there.
        self.consumers[second].0.ask::<()>(&Told::Overwrite)?;
        drop(blocks);
        self.finish(sent)
    }

    /// Waits for the child that a killed consumer left behind: it is ours, or init's where the
    /// kernel makes it so.
    fn reap(&self, child: Option<Pid>) -> Result<(), String> {
        let ended = child::poll(PATIENCE, || match waitpid(child, WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(rustix::io::Errno::CHILD) => Ok(Some(())),
            Ok(None) => Ok(None),
            Err(error) => Err(error.into()),
        });
        match ended.map_err(|e| format!("a forked child cannot be waited for: {e}"))? {
            Some(()) => Ok(()),
            None => Err(format!(
                "a forked child did not end within {} s",
                PATIENCE.as_secs()
            )),
        }
    }

    fn end(&mut self) -> Result<(), String> {
        for (consumer, _) in &mut self.consumers {
            consumer.wait()?;
        }
        let report = self.session.shutdown(PATIENCE);
        // All processes that had them mapped are gone.
        let _ = self.wait("every region to come back", |demo| {
            demo.session.trim().is_ok() && demo.session.stats().source.regions == 0
        });
        let stats = self.session.stats();
        self.report.regions_at_end = stats.source.regions;
        self.report.in_limbo_at_end = stats.limbo_blocks;
        self.report.bytes_leaked = report.bytes + stats.leaked_bytes;
        Ok(())
    }

    fn wait(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) -> Result<(), String> {
        match child::poll(PATIENCE, || Ok(holds(self).then_some(()))) {
            Ok(Some(())) => Ok(()),
            _ => Err(format!(
                "waited {} s in vain for {what}",
                PATIENCE.as_secs()
            )),
        }
    }
}
