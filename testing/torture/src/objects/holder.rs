//! A holder: adopts a pool, compares every block that is listed, fills and seals others on streams
//! that are slow, and ends the hold in order, or dies with work or children left.

use std::time::Duration;

use gpu_ipc::Stream;
use gpu_ipc::broker::pool::{Previous, Sealed, bytes_for};
use gpu_ipc::broker::{Client, ObjectError, Pool};

use super::ledger::{
    self, BLOCK_BYTES, BLOCKS, PART, PIECE_BYTES, POOLS, is_whole, key_of, layout, name_of,
    offset_of, pieces_of, stamp_of,
};
use super::seat::{Seat, forgive};
use super::tally::Count;
use crate::fork;
use crate::options::Control;
use gpu_ipc_cli::device::explain;
use gpu_ipc_cli::owner::connect;
use harness::rng::Dice;

/// How long a stream waits between two pieces of a block, at most.
const SLOW_US: u64 = 300;
/// How long a child lives, at most.
const CHILD_MS: u64 = 300;
/// How long after a death its writes come, at most: as a GPU's unfinished work does.
const LATEST_MS: u64 = 20;
/// What is written behind a death.
const SCRIBBLE: u8 = 0x66;
/// Between two attempts to adopt.
const PAUSE: Duration = Duration::from_millis(2);

/// Holds pools until everybody is to end.
pub fn run(seat: &Seat) -> Result<(), String> {
    let mut dice = Dice::new(seat.seed, seat.serial);
    let client = connect(&seat.gpu, &seat.broker, "torture holder")?;
    let mut number = 0;
    while !seat.tally.ends() {
        seat.tally.beat(seat.slot);
        let which = dice.below(POOLS as u64) as usize;
        let ledger = seat.ledger.pool(which);
        let Some(pool) = take(ledger, &client, seat, which, &mut dice)? else {
            std::thread::sleep(PAUSE);
            continue;
        };
        let stream = || Stream::create(&seat.gpu).map_err(|e| explain(&e));
        let mut hold = Hold {
            seat,
            ledger,
            pool,
            name: name_of(which),
            streams: [stream()?, stream()?],
            pending: Vec::new(),
            open: Vec::new(),
            number: &mut number,
            dice: &mut dice,
        };
        hold.begin()?;
        hold.work()?;
        hold.end()?;
    }
    Ok(())
}

/// Adopts a pool, or makes it where no process has. `None`: another one holds it, or the broker is
/// away.
fn take(
    ledger: &ledger::Pool,
    client: &Client,
    seat: &Seat,
    which: usize,
    dice: &mut Dice,
) -> Result<Option<Pool>, String> {
    let name = name_of(which);
    let was_made = ledger.is_made();
    let mut adopted = client.adopt(&name, dice.in_thousand(200));
    if let Err(ObjectError::Gpu(gpu_ipc::Error::Invalid { .. })) = adopted {
        // Something lies at the last holder's addresses: that hold has ended again.
        adopted = client.adopt(&name, false);
    }
    match adopted {
        Err(ObjectError::NotFound { .. }) if was_made => {
            seat.found(
                Count::Lost,
                &format!("there is no pool {name}, which was held"),
            );
            Ok(None)
        }
        Err(ObjectError::NotFound { .. }) => {
            match client.create_pool(&name, layout()?, bytes_for(BLOCKS)) {
                Err(ObjectError::Refused { .. } | ObjectError::NotFound { .. }) => Ok(None),
                made => forgive(made),
            }
        }
        // It is held, or the keeper takes no record.
        Err(ObjectError::Refused { .. }) => Ok(None),
        adopted => forgive(adopted),
    }
}

/// A pool that is held.
struct Hold<'a> {
    seat: &'a Seat,
    ledger: &'a ledger::Pool,
    pool: Pool,
    name: String,
    streams: [Stream; 2],
    /// Blocks whose seals are queued, with their stamps.
    pending: Vec<(u32, u64)>,
    /// Blocks that were given up, and on which nothing is queued.
    open: Vec<u32>,
    number: &'a mut u64,
    dice: &'a mut Dice,
}

impl Hold<'_> {
    /// Looks at what the last holder left.
    fn begin(&mut self) -> Result<(), String> {
        let (name, generation) = (&self.name, self.pool.generation());
        let before = self.ledger.adopted(generation);
        if before >= generation {
            let why = format!("{name} has generation {generation}, and {before} was held before");
            self.seat.found(Count::Backwards, &why);
        }
        if let Some(pid) = self.ledger.held_by(self.seat.serial) {
            let why = format!("{name} is held by {pid}, too");
            self.seat.found(Count::Doubled, &why);
        }
        self.seat.journal.note(&format!(
            "holds {name}, generation {generation}, {} before",
            self.pool.previous()
        ));
        self.seat.tally.count(Count::Adoptions);
        if self.pool.previous() == Previous::Died {
            self.seat.tally.count(Count::Heirs);
        }
        self.compare()
    }

    /// Compares every byte of what is listed, and what is listed with what must be.
    fn compare(&mut self) -> Result<(), String> {
        // First: what is proven while the list is read need not be in it.
        let proven: Vec<(u32, u64)> = self.ledger.proven().collect();
        let listed = self.pool.sealed().map_err(|e| explain(&e))?;
        for (block, stamp) in proven {
            if !listed
                .iter()
                .any(|of| of.block == block && of.key == key_of(stamp))
            {
                let why = format!(
                    "block {block} of {} is not listed, and was whole with stamp {stamp:#x}",
                    self.name
                );
                self.seat.found(Count::Lost, &why);
            }
        }
        for found in &listed {
            self.compare_block(found)?;
        }
        Ok(())
    }

    fn compare_block(&self, found: &Sealed) -> Result<(), String> {
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        let read = self
            .pool
            .read_part(PART, offset_of(found.block), &mut bytes);
        read.map_err(|e| explain(&e))?;
        self.seat.tally.count(Count::Compared);
        let asked = self.ledger.asked(found.block);
        let is_asked = self.seat.control.is_some() || stamp_of(found.key) == Some(asked);
        if !is_asked || !is_whole(&bytes, found) {
            let (block, name) = (found.block, &self.name);
            let first: Vec<String> = bytes
                .chunks(PIECE_BYTES as usize)
                .map(|piece| format!("{:02x}", piece[0]))
                .collect();
            let why = format!(
                "block {block} of {name} is listed as {found:?}, stamp {asked:#x} was asked for, and it begins its pieces with {}",
                first.join(" ")
            );
            self.seat.found(Count::Mixed, &why);
        }
        Ok(())
    }

    /// Fills blocks, until it is enough or this process dies.
    fn work(&mut self) -> Result<(), String> {
        for _ in 0..self.dice.below(60) {
            self.seat.tally.beat(self.seat.slot);
            self.fill()?;
            if self.dice.in_thousand(150) {
                self.prove()?;
            }
            if self.dice.in_thousand(10) {
                self.misbehave()?;
            }
            if self.seat.tally.ends() {
                break;
            }
        }
        Ok(())
    }

    /// Gives a block up, and queues its filling and its seal.
    fn fill(&mut self) -> Result<(), String> {
        let block = self.dice.below(u64::from(BLOCKS)) as u32;
        let stream = &self.streams[block as usize % 2];
        self.ledger.gives_up(block);
        self.pending.retain(|(of, _)| *of != block);
        self.open.retain(|of| *of != block);
        self.pool.invalidate(block).map_err(|e| explain(&e))?;
        if self.dice.in_thousand(100) {
            // Behind the filling that is queued from before, nothing more is.
            stream.synchronize().map_err(|e| explain(&e))?;
            self.open.push(block);
            return Ok(());
        }
        *self.number += 1;
        let stamp = self.seat.serial << 32 | *self.number;
        self.ledger.asks(block, stamp);
        let at = offset_of(block);
        let queue = |offset, len, byte| {
            let queued = self.pool.fill(PART, offset, len, byte, stream);
            queued.map_err(|e| explain(&e))
        };
        queue(at, BLOCK_BYTES, SCRIBBLE)?;
        for (piece, byte) in (0..).zip(pieces_of(stamp)) {
            if self.dice.in_thousand(200) {
                let pause = Duration::from_micros(self.dice.below(SLOW_US));
                let slow = stream.host_function(move || std::thread::sleep(pause));
                slow.map_err(|e| explain(&e))?;
            }
            queue(at + piece * PIECE_BYTES, PIECE_BYTES, byte)?;
        }
        let sealed = if self.seat.control == Some(Control::EarlySeal) {
            self.pool
                .seal_before_the_work_has_ended(block, key_of(stamp))
        } else {
            self.pool.seal(block, key_of(stamp), stream)
        };
        sealed.map_err(|e| explain(&e))?;
        self.pending.push((block, stamp));
        Ok(())
    }

    /// Waits for the streams: what was queued is whole, and stays listed whoever dies.
    fn prove(&mut self) -> Result<(), String> {
        for stream in &self.streams {
            stream.synchronize().map_err(|e| explain(&e))?;
        }
        for (block, stamp) in self.pending.drain(..) {
            self.ledger.proves(block, stamp);
            self.seat.tally.count(Count::Seals);
        }
        Ok(())
    }

    /// Ends the hold in order, often with work queued.
    fn end(mut self) -> Result<(), String> {
        if self.dice.in_thousand(300) {
            self.prove()?;
            self.compare()?;
        }
        let streams: Vec<&Stream> = self.streams.iter().collect();
        self.ledger.closes();
        if self.dice.in_thousand(700) {
            forgive(self.pool.close(&streams))?;
        } else {
            for stream in streams {
                self.pool.used_on(stream).map_err(|e| explain(&e))?;
            }
        }
        Ok(())
    }

    /// Leaves a child, or work that comes after the death.
    fn misbehave(&mut self) -> Result<(), String> {
        let base = self
            .pool
            .device_ptr(PART)
            .ok_or("a pool without its part")?
            .0;
        let places: Vec<u64> = self
            .open
            .iter()
            .map(|block| base + offset_of(*block))
            .collect();
        match self.dice.below(3) {
            0 => self.fork(&[]).map(drop),
            // A child that goes on writing.
            1 => {
                let host = self.seat.host.is_some();
                let memory = places.iter().filter(|_| host);
                let memory: Vec<_> = memory
                    .map(|at| (*at as *mut u8, BLOCK_BYTES as usize))
                    .collect();
                if self.fork(&memory)? {
                    self.die();
                }
                Ok(())
            }
            _ => {
                let mut delay = Duration::from_millis(self.dice.below(LATEST_MS));
                for (at, block) in places.iter().zip(&self.open) {
                    let armed = match &self.seat.host {
                        Some(host) => host.arm_late_write(
                            gpu_ipc::backend::DevicePtr(*at),
                            &[SCRIBBLE; 64],
                            delay,
                        ),
                        None => (0..50).try_for_each(|_| {
                            let stream = &self.streams[0];
                            let filled = self.pool.fill(
                                PART,
                                offset_of(*block),
                                BLOCK_BYTES,
                                SCRIBBLE,
                                stream,
                            );
                            filled.map_err(|e| match e {
                                ObjectError::Gpu(error) => error,
                                other => {
                                    gpu_ipc::Error::invalid("a fill", other.to_string(), "queued")
                                }
                            })
                        }),
                    };
                    armed.map_err(|e| explain(&e))?;
                    delay = Duration::ZERO;
                }
                self.die()
            }
        }
    }

    fn fork(&self, memory: &[(*mut u8, usize)]) -> Result<bool, String> {
        let lives = Duration::from_millis(1 + std::cmp::min(CHILD_MS, *self.number % CHILD_MS));
        let forked = fork::child(lives, memory)?;
        if forked {
            self.seat.tally.count(Count::Children);
        }
        Ok(forked)
    }

    fn die(&self) -> ! {
        self.seat.journal.note(&format!("dies with {}", self.name));
        self.seat.tally.count(Count::Deaths);
        self.seat.tally.dies(self.seat.slot, self.seat.serial);
        fork::die()
    }
}
