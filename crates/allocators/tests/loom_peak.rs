//! The peak of several heaps under a model checker:
//! `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test --release -p gpu-ipc-allocators --test loom_peak`.
//!
//! It must lie between what was surely in use at one time, and what may have been: an allocation is
//! in use at the latest when it has returned, and at the earliest when it is called.
#![cfg(gpu_ipc_loom)]

use std::num::NonZeroUsize;
use std::sync::Arc;

use allocators::{Allocator, BfcOptions, Growth, Request, Simulated, ThreadHeaps};
use loom::sync::Mutex;
use loom::thread;

const BLOCK: u64 = 256;

/// A sum, and the most that it was.
struct Sum(Mutex<(i64, i64)>);

impl Sum {
    fn new() -> Sum {
        Sum(Mutex::new((0, 0)))
    }

    fn add(&self, blocks: i64) {
        let mut sum = self.0.lock().expect("no panic");
        sum.0 += blocks;
        sum.1 = sum.1.max(sum.0);
    }

    fn most(&self) -> u64 {
        self.0.lock().expect("no panic").1 as u64 * BLOCK
    }
}

struct Heaps {
    heaps: ThreadHeaps<Simulated>,
    sure: Sum,
    possible: Sum,
}

impl Heaps {
    /// Two heaps with a region each, where four blocks were in use at once, and two are: either
    /// heap may have one more before it has to look at the other.
    fn new() -> Arc<Heaps> {
        let options = BfcOptions::new("heaps")
            .limit(16 * BLOCK)
            .growth(Growth::Whole)
            .max_slack_share(0.0);
        let heaps = ThreadHeaps::new(
            options,
            NonZeroUsize::new(2).expect("two"),
            Simulated::new(),
        );
        let heaps = Heaps {
            heaps,
            sure: Sum::new(),
            possible: Sum::new(),
        };
        let held = [0, 1, 0, 1].map(|own| heaps.take(own, 1));
        heaps.give(0, held[2], 1);
        heaps.give(1, held[3], 1);
        heaps.check();
        Arc::new(heaps)
    }

    fn take(&self, own: usize, blocks: i64) -> u64 {
        self.possible.add(blocks);
        let request = Request::new(blocks as u64 * BLOCK);
        let address = self.heaps.alloc_as(own, request).expect("room").address;
        self.sure.add(blocks);
        address
    }

    fn give(&self, own: usize, address: u64, blocks: i64) {
        self.sure.add(-blocks);
        self.heaps.free_as(own, address).expect("in use");
        self.possible.add(-blocks);
    }

    fn check(&self) {
        let peak = self.heaps.stats().peak_bytes_in_use;
        let (least, most) = (self.sure.most(), self.possible.most());
        assert!(
            least <= peak && peak <= most,
            "{peak} is not from {least} to {most}"
        );
    }
}

fn model(check: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(check);
}

#[test]
fn two_threads_that_allocate_at_once_make_a_peak() {
    model(|| {
        let heaps = Heaps::new();
        let other = heaps.clone();
        let thread = thread::spawn(move || {
            let address = other.take(1, 2);
            other.give(1, address, 2);
        });
        let address = heaps.take(0, 1);
        heaps.give(0, address, 1);
        thread.join().expect("no panic");
        heaps.check();
    });
}

#[test]
fn what_another_thread_frees_is_no_part_of_a_later_peak() {
    model(|| {
        let heaps = Heaps::new();
        let held = heaps.take(0, 2);
        let other = heaps.clone();
        let thread = thread::spawn(move || other.give(1, held, 2));
        heaps.take(0, 1);
        heaps.take(1, 1);
        thread.join().expect("no panic");
        heaps.check();
    });
}
