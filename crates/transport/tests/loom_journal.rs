//! An entry of a pool's journal under a model checker:
//! `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test -p gpu-ipc-transport --test loom_journal`.
//!
//! A block is two words, each filled by itself. The stream is a thread, which begins with what is
//! queued.
#![cfg(gpu_ipc_loom)]

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::sync::atomic::Ordering::Relaxed;
use loom::thread;
use transport::shared::journal::{Entry, Key, Whole};

struct Pool {
    entry: Entry<AtomicU64>,
    block: [AtomicU64; 2],
}

impl Pool {
    fn new() -> Arc<Pool> {
        Arc::new(Pool {
            entry: Entry::new(|| AtomicU64::new(0)),
            block: [AtomicU64::new(0), AtomicU64::new(0)],
        })
    }

    /// The holder's CPU gives the block up and fills it.
    fn fill(&self, generation: u32) {
        self.entry.invalidate(generation);
        for word in &self.block {
            word.store(u64::from(generation), Relaxed);
        }
    }

    /// Queues a seal: the stream stores it, at any time from now on.
    fn stream(pool: &Arc<Pool>, value: u64) -> thread::JoinHandle<()> {
        let pool = pool.clone();
        thread::spawn(move || pool.entry.seal_here(value))
    }

    fn key(&self, generation: u32) -> u64 {
        self.entry.key(0, generation, key(generation))
    }

    /// Copies the block, if it is whole and stays so.
    fn copy(&self) -> Option<(Whole, [u64; 2])> {
        let found = self.entry.look(0)?;
        let copied = [0, 1].map(|at: usize| self.block[at].load(Relaxed));
        self.entry.is_still(&found).then_some((found, copied))
    }

    /// Copies the block and compares it with what it must hold.
    fn check(&self) {
        if let Some((found, copied)) = self.copy() {
            assert_eq!(found.key, key(found.generation));
            assert_eq!(copied, [u64::from(found.generation); 2]);
        }
    }
}

fn key(generation: u32) -> Key {
    Key([generation as u8; 16])
}

/// What a sealed block shows is all that was written before its seal: LOOKED.
#[test]
fn a_sealed_block_shows_its_filling() {
    loom::model(|| {
        let pool = Pool::new();
        let reader = {
            let pool = pool.clone();
            thread::spawn(move || pool.check())
        };
        pool.fill(1);
        let value = pool.key(1);
        Pool::stream(&pool, value).join().unwrap();
        reader.join().unwrap();
    });
}

/// A reader beside a holder that fills the block again keeps no copy of two fillings: REOPENED and
/// LOOKED.
#[test]
fn a_copy_that_stays_is_of_one_filling() {
    loom::model(|| {
        let pool = Pool::new();
        pool.fill(1);
        let value = pool.key(1);
        pool.entry.seal_here(value);
        let reader = {
            let pool = pool.clone();
            thread::spawn(move || pool.check())
        };
        pool.fill(2);
        let value = pool.key(2);
        pool.entry.seal_here(value);
        reader.join().unwrap();
        let (found, _) = pool.copy().expect("whole");
        assert_eq!(found.generation, 2);
    });
}

/// A seal that was queued before the block was given up again comes at any time, and seals nothing:
/// the second filling has no seal yet.
#[test]
fn a_late_seal_of_a_former_filling_seals_nothing() {
    loom::model(|| {
        let pool = Pool::new();
        pool.fill(1);
        let first = pool.key(1);
        let stream = Pool::stream(&pool, first);
        pool.entry.invalidate(2);
        pool.key(2);
        assert_eq!(pool.entry.look(0), None);
        stream.join().unwrap();
        assert_eq!(pool.entry.look(0), None);
    });
}

/// A holder that dies after any of its steps, with its stream at work, leaves a successor, which
/// looks once both have ended, with nothing but what was sealed.
#[test]
fn a_successor_finds_what_was_sealed_and_nothing_else() {
    for steps in 0..=4 {
        loom::model(move || {
            let pool = Pool::new();
            if steps >= 1 {
                pool.fill(1);
            }
            let value = if steps >= 2 { pool.key(1) } else { 0 };
            let stream = (steps >= 3).then(|| Pool::stream(&pool, value));
            if steps >= 4 {
                pool.entry.invalidate(2);
            }
            if let Some(stream) = stream {
                stream.join().unwrap();
            }
            assert_eq!(pool.entry.look(0).is_some(), steps == 3, "{steps} steps");
            pool.check();
        });
    }
}
