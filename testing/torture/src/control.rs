//! What must be found: two ways of lending memory that lose blocks or take them too early, under
//! the same torture.
//!
//! - A plain shared counter: the holder adds one and takes one off. One that is killed leaves no
//!   trace of who it was, and its block never comes back.
//! - A blind time-out: a block is free a fixed time after it was lent, held or not. A holder that
//!   was stopped meanwhile finds another generation in it.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::message::{Message, Outbox};
use super::options::Control;
use super::seat::Seat;
use super::shared_stats::{Board, Shared, map};
use super::sides::{Borrower, Lender, Taken};
use harness::rng::Dice;

const BLOCKS: usize = 256;
const WORDS: usize = 8;
/// The blind time-out: several times as long as any consumer that runs holds a block.
const BLIND: Duration = Duration::from_millis(150);

/// A block: how many hold it, and its contents.
#[derive(Debug)]
#[repr(C)]
struct Cell {
    holders: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// Blocks that all of a producer's consumers map.
#[derive(Debug)]
#[repr(C)]
pub struct Cells([Cell; BLOCKS]);

// SAFETY: its fields are arrays and `repr(C)` structs of atomic integers.
unsafe impl Shared for Cells {}

fn path(seat: &Seat, producer: u64) -> PathBuf {
    seat.dir.join(format!("arena{producer}"))
}

/// The producer's side.
pub struct Arena {
    board: &'static Board,
    control: Control,
    cells: &'static Cells,
    free: VecDeque<usize>,
    lent: Vec<(usize, Instant)>,
}

impl Arena {
    /// Makes the memory.
    pub fn create(seat: &Seat) -> Result<Arena, String> {
        let making = |e: std::io::Error| format!("the control's memory cannot be made: {e}");
        let path = path(seat, seat.serial);
        let unfinished = path.with_extension("new");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&unfinished)
            .map_err(making)?;
        file.set_len(size_of::<Cells>() as u64).map_err(making)?;
        std::fs::rename(unfinished, path).map_err(making)?;
        let cells = map(&file).map_err(making)?;
        let control = seat.control.ok_or("only a control has such memory")?;
        Ok(Arena {
            board: seat.board,
            control,
            cells,
            free: (0..BLOCKS).collect(),
            lent: Vec::new(),
        })
    }

    fn is_back(&self, block: usize, since: Instant) -> bool {
        match self.control {
            Control::Counter => self.cells.0[block].holders.load(Ordering::Acquire) == 0,
            Control::BlindTimeout
            | Control::UnpinnedPiece
            | Control::BlindBroker
            | Control::LossyUpgrade
            | Control::EarlySeal => since.elapsed() >= BLIND,
        }
    }
}

impl Lender for Arena {
    fn lend(
        &mut self,
        dice: &mut Dice,
        partners: &[(u64, u64)],
        outbox: &Outbox,
    ) -> Result<(), String> {
        let Some(&(serial, _)) = dice.one_of(partners) else {
            return Ok(());
        };
        let Some(block) = self.free.pop_front() else {
            return Ok(());
        };
        let grant = self.board.next_grant();
        let cell = &self.cells.0[block];
        cell.words
            .iter()
            .for_each(|word| word.store(grant, Ordering::Release));
        cell.holders.fetch_add(1, Ordering::AcqRel);
        let message = Message {
            grant,
            stamp: grant,
            since: 0,
            most: 1,
            exclusive: true,
            across: false,
            bytes: (block as u64).to_le_bytes().to_vec(),
        };
        if !outbox.send(&message, serial) {
            cell.holders.fetch_sub(1, Ordering::AcqRel);
        }
        self.lent.push((block, Instant::now()));
        Ok(())
    }

    fn tend(&mut self) {
        let lent = std::mem::take(&mut self.lent);
        for (block, since) in lent {
            if self.is_back(block, since) {
                self.free.push_back(block);
            } else {
                self.lent.push((block, since));
            }
        }
    }

    fn let_go(&mut self) {}

    fn held(&mut self) -> u64 {
        0
    }

    fn finish(&mut self, _: bool) -> u64 {
        // Nobody else is left: what is not back will not come.
        std::thread::sleep(BLIND);
        self.tend();
        self.lent.len() as u64
    }
}

/// The consumer's side.
pub struct Loans {
    control: Control,
    cells: &'static Cells,
    serial: u64,
}

/// A block that is held.
pub struct Loan {
    control: Control,
    cell: &'static Cell,
}

impl Loans {
    /// Maps the producer's memory.
    pub fn open(seat: &Seat) -> Result<Loans, String> {
        let opening = |e: std::io::Error| format!("the control's memory cannot be mapped: {e}");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path(seat, seat.producer))
            .map_err(opening)?;
        let control = seat.control.ok_or("only a control has such memory")?;
        Ok(Loans {
            control,
            cells: map(&file).map_err(opening)?,
            serial: seat.serial,
        })
    }
}

impl Borrower for Loans {
    type Held = Loan;

    fn participant(&self) -> u64 {
        self.serial
    }

    fn take(&mut self, message: &Message, _: &mut Dice) -> Result<Taken<Loan>, String> {
        let number = message
            .bytes
            .as_slice()
            .try_into()
            .map(u64::from_le_bytes)
            .map_err(|e| e.to_string())?;
        let cell = self.cells.0.get(number as usize).ok_or("no such block")?;
        // Only who holds it can be robbed: a message that came late is nobody's lease.
        if self.control == Control::BlindTimeout
            && cell.words[0].load(Ordering::Acquire) != message.stamp
        {
            return Ok(Taken::Nothing);
        }
        Ok(Taken::Held(Loan {
            control: self.control,
            cell,
        }))
    }

    fn is_intact(&mut self, held: &Loan, message: &Message) -> Result<bool, String> {
        Ok(held
            .cell
            .words
            .iter()
            .all(|word| word.load(Ordering::Acquire) == message.stamp))
    }

    fn describe(&self, _: &Loan, _: &Message) -> String {
        String::new()
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn forward(&mut self, _: &Loan, _: u64, _: &Message) -> Result<Option<Message>, String> {
        Ok(None)
    }

    fn memory(&self, _: &Loan) -> Option<(*mut u8, usize)> {
        None
    }

    fn write_late(&mut self, _: &Loan, _: Duration) -> Result<bool, String> {
        Ok(false)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if self.control == Control::Counter {
            self.cell.holders.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
