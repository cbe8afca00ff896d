//! A consumer of a run: it takes what it is sent, looks at it before and after it held it, and
//! sometimes forks, forwards or dies on its own account.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::borrower::Leases;
use super::control::Loans;
use super::fork::{self, die};
use super::message::{Inbox, Message, Outbox};
use super::options::Control;
use super::seat::Seat;
use super::shared_stats::{Board, Count, Phase};
use super::sides::{Borrower, Taken};
use harness::rng::Dice;
use harness::vitals::{Course, Vitals};

/// Blocks that a consumer holds at a time.
const MOST_HELD: usize = 16;
/// How long it holds one, at most.
const HOLD_MS: u64 = 30;
/// How long after a death its writes come, at most: well within the quarantine.
const LATEST_MS: u64 = 40;

/// Counts the regions that this process maps of the host's devices. On a GPU mappings are the
/// driver's to count.
fn mapped_regions() -> u64 {
    std::fs::read_to_string("/proc/self/maps")
        .map_or(0, |maps| maps.matches("/memfd:gpu-ipc-host").count()) as u64
}

struct Lease<H> {
    message: Message,
    held: H,
    until: Instant,
    /// Others may hold the block too.
    shared: bool,
}

/// Lives until the run, or its producer, ends.
pub fn run(seat: &Seat) -> Result<(), String> {
    let mut dice = Dice::new(seat.seed, seat.serial);
    let me = seat.board.member(seat.slot);
    // Some have a child before they connect.
    if seat.control.is_none() && seat.lasts.is_none() && dice.in_thousand(60) {
        me.forked.store(1, Ordering::Release);
        if fork::child(Duration::from_millis(dice.below(1500)), &[])? {
            seat.board.count(Count::Forks);
        }
    }
    // Before it may have few descriptors.
    let sockets = |e: std::io::Error| format!("a socket cannot be made: {e}");
    let boxes = (
        Inbox::open(&seat.dir, seat.serial).map_err(sockets)?,
        Outbox::new(&seat.dir).map_err(sockets)?,
    );
    if seat.control.is_some_and(Control::is_no_library) {
        return Consumer::serve(seat, &mut Loans::open(seat)?, boxes, dice);
    }
    match Leases::open(seat, &mut dice)? {
        Some(mut leases) => Consumer::serve(seat, &mut leases, boxes, dice),
        // The producer died, or there was no descriptor to spare.
        None => Ok(()),
    }
}

struct Consumer<'a, B: Borrower> {
    seat: &'a Seat,
    board: &'static Board,
    borrower: &'a mut B,
    inbox: Inbox,
    outbox: Outbox,
    dice: Dice,
    leases: VecDeque<Lease<B::Held>>,
    /// What it takes; of one that lives for the whole run.
    course: Option<Course>,
}

impl<B: Borrower> Consumer<'_, B> {
    fn serve(
        seat: &Seat,
        borrower: &mut B,
        (inbox, outbox): (Inbox, Outbox),
        dice: Dice,
    ) -> Result<(), String> {
        let me = seat.board.member(seat.slot);
        me.producer.store(seat.producer, Ordering::Relaxed);
        me.participant
            .store(borrower.participant(), Ordering::Relaxed);
        me.serial.store(seat.serial, Ordering::Release);
        let board = seat.board;
        Consumer {
            seat,
            board,
            borrower,
            inbox,
            outbox,
            dice,
            leases: VecDeque::new(),
            course: seat.lasts.map(Course::new),
        }
        .live()
    }

    fn live(mut self) -> Result<(), String> {
        let me = self.board.member(self.seat.slot);
        loop {
            me.beat.fetch_add(1, Ordering::Relaxed);
            if self.board.phase() == Phase::Work
                && let Some(course) = &mut self.course
            {
                course.look(|| Vitals {
                    regions: mapped_regions(),
                    ..Vitals::read()
                });
            }
            let leaving = self.board.phase() >= Phase::LetGo;
            let message = if self.leases.len() < MOST_HELD {
                self.inbox.take()
            } else {
                None
            };
            if self.borrower.is_gone() {
                break;
            }
            match &message {
                Some(message) => self.take(message)?,
                None => std::thread::sleep(Duration::from_micros(500)),
            }
            let now = Instant::now();
            while let Some(place) = self
                .leases
                .iter()
                .position(|lease| lease.until <= now || leaving)
            {
                let Some(lease) = self.leases.remove(place) else {
                    break;
                };
                self.end(lease, leaving)?;
            }
            if leaving && message.is_none() {
                if self.board.phase() >= Phase::Leave {
                    break;
                }
                me.ending.store(2, Ordering::Release);
            }
            if self.seat.control.is_none()
                && self.seat.lasts.is_none()
                && !leaving
                && self.dice.in_thousand(1)
            {
                self.misbehave()?;
            }
        }
        if let Some(why) = self.course.as_ref().and_then(Course::grown) {
            self.board.count(Count::Grown);
            gpu_ipc_cli::output::complain(&format!("consumer {}: {why}", self.seat.serial));
        }
        // Contents outlive their producer.
        while let Some(lease) = self.leases.pop_front() {
            self.end(lease, true)?;
        }
        Ok(())
    }

    fn take(&mut self, message: &Message) -> Result<(), String> {
        match self.borrower.take(message, &mut self.dice)? {
            Taken::Held(held) => {
                if !self.board.claimed(message.grant, u64::from(message.most)) {
                    self.board.count(Count::DoubleRetire);
                }
                if message.across {
                    self.board.count(Count::Across);
                }
                self.look(message, &held, "when it was claimed")?;
                let until = Instant::now() + Duration::from_millis(self.dice.below(HOLD_MS));
                self.leases.push_back(Lease {
                    message: message.clone(),
                    held,
                    until,
                    shared: !message.exclusive,
                });
            }
            Taken::Refused => self.board.count(Count::Refused),
            Taken::Nothing | Taken::Gone => {}
        }
        Ok(())
    }

    fn look(&mut self, message: &Message, held: &B::Held, when: &str) -> Result<(), String> {
        if !self.borrower.is_intact(held, message)? {
            self.board.count(Count::EarlyReuse);
            if self.seat.control.is_none() {
                let (serial, found) = (self.seat.serial, self.borrower.describe(held, message));
                let Message { stamp, since, .. } = message;
                gpu_ipc_cli::output::complain(&format!(
                    "consumer {serial}: block {stamp}, allocated at {since} us, had changed {when}: {found}"
                ));
            }
        }
        Ok(())
    }

    /// Looks at a block for the last time and lets it go, forwarding some before.
    fn end(&mut self, lease: Lease<B::Held>, leaving: bool) -> Result<(), String> {
        if !leaving && self.dice.in_thousand(50) {
            let partners = self.board.partners(self.seat.producer);
            if let Some(&(serial, participant)) = self.dice.one_of(&partners)
                && let Some(message) =
                    self.borrower
                        .forward(&lease.held, participant, &lease.message)?
            {
                self.board.count(Count::Forwards);
                self.outbox.send(&message, serial);
            }
        }
        self.look(&lease.message, &lease.held, "while it was held")
    }

    /// Does something that a program should not do, or that a framework does behind its back.
    fn misbehave(&mut self) -> Result<(), String> {
        let me = self.board.member(self.seat.slot);
        let exclusive = self.leases.iter().filter(|lease| !lease.shared);
        match self.dice.below(10) {
            // A child that does nothing, while this process lives on.
            0..3 => {
                me.forked.store(1, Ordering::Release);
                if fork::child(Duration::from_millis(self.dice.below(1500)), &[])? {
                    self.board.count(Count::Forks);
                }
            }
            // A child that goes on writing, as the work of its dead parent does.
            3..6 => {
                let memory: Vec<_> = exclusive
                    .filter_map(|lease| self.borrower.memory(&lease.held))
                    .collect();
                me.forked.store(1, Ordering::Release);
                if fork::child(Duration::from_millis(self.dice.below(800)), &memory)? {
                    self.board.count(Count::Forks);
                    die();
                }
            }
            // A write that comes when this process is dead.
            _ => {
                let mut armed = false;
                // They come one after the other: the first waits, and the others follow at once.
                let mut delay = Duration::from_millis(self.dice.below(LATEST_MS));
                for lease in exclusive {
                    armed |= self.borrower.write_late(&lease.held, delay)?;
                    delay = Duration::ZERO;
                }
                if armed {
                    self.board.count(Count::LateWrites);
                    if me.forked.load(Ordering::Acquire) == 0 {
                        self.board
                            .note_death(self.seat.producer, self.borrower.participant());
                    }
                    die();
                }
            }
        }
        Ok(())
    }
}
