//! The holder dies at each of its stores, in each order of its CPU and its streams; the successor
//! lists what was sealed, and nothing else.
//!
//! A store of a dead holder does not happen: its words count down. Streams run on for a while, as a
//! GPU's may, and then end, which is what the proof of death waits for.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use transport::shared::journal::{Entry, Key, LAST};
use transport::shared::word::{Tally, Word};

use super::table::{Sealed, Table, sealed};

/// A word whose writer dies after so many stores.
struct Mortal {
    value: Cell<u64>,
    life: Rc<Cell<usize>>,
}

/// Takes a step of the holder's life, and says whether it was alive.
fn live(life: &Cell<usize>) -> bool {
    let left = life.get();
    life.set(left.saturating_sub(1));
    left > 0
}

impl Word for Mortal {
    fn load(&self, _: Ordering) -> u64 {
        self.value.get()
    }

    fn store(&self, value: u64, _: Ordering) {
        if live(&self.life) {
            self.value.set(value);
        }
    }

    fn swap(&self, _: u64, _: Ordering) -> u64 {
        unreachable!("the journal only loads and stores")
    }

    fn compare_exchange(&self, _: u64, _: u64, _: Ordering, _: Ordering) -> Result<u64, u64> {
        unreachable!("the journal only loads and stores")
    }
}

impl Tally for Mortal {
    fn fetch_add(&self, _: u64, _: Ordering) -> u64 {
        unreachable!("the journal only loads and stores")
    }

    fn fetch_sub(&self, _: u64, _: Ordering) -> u64 {
        unreachable!("the journal only loads and stores")
    }

    fn fetch_or(&self, _: u64, _: Ordering) -> u64 {
        unreachable!("the journal only loads and stores")
    }

    fn fetch_and(&self, _: u64, _: Ordering) -> u64 {
        unreachable!("the journal only loads and stores")
    }

    fn compare_exchange_weak(&self, _: u64, _: u64, _: Ordering, _: Ordering) -> Result<u64, u64> {
        unreachable!("the journal only loads and stores")
    }

    fn fence(_: Ordering) {}
}

const BLOCKS: u32 = 3;

/// What a stream was told.
#[derive(Clone, Copy)]
enum Work {
    /// Write a half of a block.
    Half(u32, usize, u64),
    /// Write a block's seal.
    Seal(u32, u64),
}

/// How seals are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seals {
    /// By the stream, behind the filling.
    ByTheStream,
    /// By the CPU, at the call: the control.
    AtTheCall,
}

struct World {
    entries: Vec<Entry<Mortal>>,
    table: Table,
    life: Rc<Cell<usize>>,
    /// The bytes of each block, in two halves.
    memory: Vec<[u64; 2]>,
    /// One stream for each block, so that streams overtake one another.
    streams: Vec<Vec<Work>>,
    /// The contents of each block that were sealed and not given up, as the truth has it.
    truth: Vec<Option<(u64, u32)>>,
    /// Each filling has another number.
    fillings: u64,
    seals: Seals,
}

fn key_of(filling: u64) -> Key {
    Key(u128::from(filling).to_le_bytes())
}

impl World {
    fn new(life: usize, seals: Seals) -> World {
        let life = Rc::new(Cell::new(life));
        let word = || Mortal {
            value: Cell::new(0),
            life: life.clone(),
        };
        let entries: Vec<_> = (0..BLOCKS).map(|_| Entry::new(word)).collect();
        World {
            table: Table::of(&entries),
            entries,
            life,
            memory: vec![[0; 2]; BLOCKS as usize],
            streams: (0..BLOCKS).map(|_| Vec::new()).collect(),
            truth: vec![None; BLOCKS as usize],
            fillings: 0,
            seals,
        }
    }

    fn queue(&mut self, block: u32, work: Work) {
        if live(&self.life) {
            self.streams[block as usize].push(work);
        }
    }

    /// Gives a block up, fills it and seals it, as far as the holder lives.
    fn put(&mut self, block: u32) {
        if self.life.get() == 0 {
            return;
        }
        self.fillings += 1;
        let filling = self.fillings;
        self.table
            .invalidate(&self.entries, block)
            .expect("a block that is there");
        // The first store gave it up: the seal is 0.
        self.truth[block as usize] = None;
        for half in 0..2 {
            self.queue(block, Work::Half(block, half, filling));
        }
        let value = self.table.key(&self.entries, block, key_of(filling));
        match self.seals {
            Seals::ByTheStream => self.queue(block, Work::Seal(block, value)),
            Seals::AtTheCall if live(&self.life) => self.seal(block, value),
            Seals::AtTheCall => {}
        }
    }

    /// Writes a seal, as a stream does, which outlives the holder's CPU.
    fn seal(&mut self, block: u32, value: u64) {
        let left = self.life.replace(1);
        self.entries[block as usize].seal_here(value);
        self.life.set(left);
        let [first, _] = self.memory[block as usize];
        let generation = self.entries[block as usize].generation();
        if value == u64::from(generation) && self.seals == Seals::ByTheStream {
            self.truth[block as usize] = Some((first, generation));
        }
    }

    /// Lets a stream take its next step.
    fn run(&mut self, stream: usize) {
        if self.streams[stream].is_empty() {
            return;
        }
        match self.streams[stream].remove(0) {
            Work::Half(block, half, filling) => {
                self.memory[block as usize][half] = filling;
            }
            Work::Seal(block, value) => self.seal(block, value),
        }
    }

    /// Compares what is listed with the memory and with the truth.
    fn check(&self) -> Result<(), String> {
        let listed = sealed(&self.entries);
        for Sealed { block, key, .. } in &listed {
            let [first, second] = self.memory[*block as usize];
            if first != second || *key != key_of(first) {
                return Err(format!(
                    "block {block} is listed as {key:?} and holds {first} and {second}"
                ));
            }
        }
        for (block, truth) in (0u32..).zip(&self.truth) {
            if let Some((_, generation)) = truth
                && !listed
                    .iter()
                    .any(|of| of.block == block && of.generation == *generation)
            {
                return Err(format!("block {block} was sealed and is not listed"));
            }
        }
        Ok(())
    }
}

/// What happens next: the holder puts a block, or a stream takes a step.
#[derive(Clone, Copy, Debug)]
enum Step {
    Put(u32),
    Run(usize),
}

fn any_steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..BLOCKS).prop_map(Step::Put),
        (0..BLOCKS as usize).prop_map(Step::Run),
        (0..BLOCKS as usize).prop_map(Step::Run),
        (0..BLOCKS as usize).prop_map(Step::Run),
    ];
    proptest::collection::vec(step, 1..60)
}

/// Plays steps by a holder of so many stores and queued operations, then lets the streams run on.
fn play(steps: &[Step], life: usize, after: &[usize], seals: Seals) -> Result<World, String> {
    let mut world = World::new(life, seals);
    for step in steps {
        match step {
            Step::Put(block) => world.put(*block),
            Step::Run(stream) => world.run(*stream),
        }
        world.check()?;
    }
    world.life.set(0);
    for stream in after {
        world.run(*stream);
        world.check()?;
    }
    Ok(world)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn a_successor_lists_what_was_sealed_and_nothing_else(
        steps in any_steps(), life in 0usize..200, after in proptest::collection::vec(0..BLOCKS as usize, 0..40),
    ) {
        let world = play(&steps, life, &after, Seals::ByTheStream);
        let mut world = world.map_err(TestCaseError::fail)?;
        // The successor goes on with the same entries.
        world.streams.iter_mut().for_each(Vec::clear);
        world.life.set(usize::MAX);
        world.table = Table::of(&world.entries);
        for block in 0..BLOCKS {
            world.put(block);
            for _ in 0..3 {
                world.check().map_err(TestCaseError::fail)?;
                world.run(block as usize);
            }
            world.check().map_err(TestCaseError::fail)?;
        }
        prop_assert_eq!(sealed(&world.entries).len(), BLOCKS as usize);
    }
}

#[test]
fn every_life_of_a_short_holder() {
    use Step::{Put, Run};
    let steps = [
        Put(0),
        Run(0),
        Run(0),
        Put(1),
        Run(0),
        Put(0),
        Run(1),
        Run(0),
        Run(1),
        Run(1),
        Put(1),
        Run(0),
        Run(0),
    ];
    for life in 0..60 {
        for ran in 0..6 {
            for stream in 0..2 {
                if let Err(why) = play(&steps, life, &vec![stream; ran], Seals::ByTheStream) {
                    panic!("life {life}, {ran} steps of stream {stream} after it: {why}");
                }
            }
        }
    }
}

#[test]
fn a_seal_that_the_cpu_writes_at_the_call_is_caught() {
    let caught = play(&[Step::Put(0)], usize::MAX, &[], Seals::AtTheCall);
    assert!(caught.is_err_and(|why| why.starts_with("block 0 is listed")));
}

#[test]
fn a_block_is_sealed_once_for_each_time_it_was_given_up() {
    let mut world = World::new(usize::MAX, Seals::ByTheStream);
    let refused = |world: &World, blocks: &[(u32, Key)]| {
        let error = world.table.check(blocks).expect_err("refused");
        error.to_string()
    };
    let key = key_of(1);
    assert!(refused(&world, &[(0, key)]).contains("block 0, which was not invalidated"));
    assert!(refused(&world, &[(BLOCKS, key)]).contains("block 3 of a journal for 3"));
    world.table.invalidate(&world.entries, 0).expect("a block");
    assert!(refused(&world, &[(0, key), (0, key)]).contains("block 0 twice"));
    world.table.check(&[(0, key)]).expect("open");
    world.table.key(&world.entries, 0, key);
    assert!(refused(&world, &[(0, key)]).contains("not invalidated since its last seal"));
    let error = world.table.invalidate(&world.entries, BLOCKS);
    assert!(
        error
            .expect_err("no such block")
            .to_string()
            .contains("block 3 of")
    );
}

#[test]
fn a_block_whose_generations_are_used_up_is_refused() {
    let world = World::new(usize::MAX, Seals::ByTheStream);
    world.entries[1].invalidate(LAST);
    let mut table = Table::of(&world.entries);
    let error = table.invalidate(&world.entries, 1).expect_err("the last");
    assert!(error.to_string().contains("use another block"), "{error}");
    table.invalidate(&world.entries, 0).expect("another block");
}
