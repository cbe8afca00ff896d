//! The sleep of a thread under a model checker:
//! `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test -p gpu-ipc-transport --test loom_waker`.
//!
//! Work is a word that is written and read with no order of its own, so only the fences can show
//! it.
#![cfg(gpu_ipc_loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use transport::os::waker::Sleep;

#[derive(Default)]
struct Shared {
    sleep: Sleep<AtomicU64>,
    work: [AtomicU64; 2],
}

impl Shared {
    /// Goes to sleep as far as the last look, and returns what that sees.
    fn doze(&self) -> [bool; 2] {
        self.sleep.doze();
        [0, 1].map(|number| self.work[number].load(Ordering::Relaxed) != 0)
    }

    fn make(&self, number: usize) {
        self.work[number].store(1, Ordering::Relaxed);
    }
}

fn caller(
    shared: &Arc<Shared>,
    number: usize,
    tell: fn(&Sleep<AtomicU64>) -> bool,
) -> thread::JoinHandle<bool> {
    let shared = shared.clone();
    thread::spawn(move || {
        shared.make(number);
        tell(&shared.sleep)
    })
}

/// Urgent work is seen by the look, or its caller wakes the thread, however long that means to
/// sleep: DOZE pairs with NUDGE.
#[test]
fn urgent_work_is_seen_or_wakes() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let caller = caller(&shared, 0, Sleep::nudge);
        let [seen, _] = shared.doze();
        shared.sleep.will_rise_soon();
        assert!(seen | caller.join().unwrap());
    });
}

/// Work that can wait wakes a thread that sleeps long: DOZE pairs with REMIND.
#[test]
fn work_that_can_wait_is_seen_or_wakes_who_sleeps_long() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let caller = caller(&shared, 0, Sleep::remind);
        let [seen, _] = shared.doze();
        assert!(seen | caller.join().unwrap());
    });
}

/// Work that can wait is seen by a thread that has slept for a short while.
#[test]
fn work_that_can_wait_is_seen_at_the_next_look() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let caller = caller(&shared, 0, Sleep::remind);
        let [first, _] = shared.doze();
        shared.sleep.will_rise_soon();
        // The time is over.
        shared.sleep.rise();
        let [second, _] = shared.doze();
        assert!(first | second | caller.join().unwrap());
    });
}

/// Two callers wake a thread once, and by its next look it has seen the work of the caller that did
/// not wake it.
#[test]
fn two_callers_wake_it_once() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let callers = [
            caller(&shared, 0, Sleep::nudge),
            caller(&shared, 1, Sleep::nudge),
        ];
        let seen = shared.doze();
        let woke = callers.map(|caller| caller.join().unwrap());
        assert!(woke != [true; 2]);
        assert!(
            seen == [true; 2] || woke.contains(&true),
            "{seen:?} {woke:?}"
        );
    });
}

/// A reminder alone shortens the next sleep, once.
#[test]
fn a_reminder_is_taken_once() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let caller = caller(&shared, 0, Sleep::remind);
        shared.doze();
        let first = shared.sleep.take_reminder();
        caller.join().unwrap();
        assert!(first != shared.sleep.take_reminder());
    });
}
