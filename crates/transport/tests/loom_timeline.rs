//! The timeline word under a model checker:
//! `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test -p gpu-ipc-transport --test loom_timeline`.
#![cfg(gpu_ipc_loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use transport::shared::timeline::Fence;
use transport::shared::timeline::Timeline;

struct Shared {
    word: Timeline<AtomicU64>,
    contents: UnsafeCell<u32>,
}

// SAFETY: `contents` is touched only as the word's protocol allows, which is what loom checks here.
unsafe impl Sync for Shared {}

fn shared() -> Arc<Shared> {
    Arc::new(Shared {
        word: Timeline::new(AtomicU64::new(0)),
        contents: UnsafeCell::new(0),
    })
}

fn produce(shared: &Shared) {
    shared.contents.with_mut(|contents| {
        // SAFETY: loom checks that nobody else touches the cell meanwhile.
        unsafe { *contents = 7 }
    });
    shared.word.reach(1);
}

fn consume(shared: &Shared) {
    shared.contents.with(|contents| {
        // SAFETY: loom checks that nobody writes the cell meanwhile.
        assert_eq!(unsafe { *contents }, 7);
    });
}

/// What was done before a value was reached is seen by who sees it reached: LOOK pairs with the
/// producing side.
#[test]
fn a_reached_value_shows_the_contents() {
    loom::model(|| {
        let shared = shared();
        let producer = {
            let shared = shared.clone();
            thread::spawn(move || produce(&shared))
        };
        if shared.word.look(1) == Fence::Reached {
            consume(&shared);
        }
        producer.join().unwrap();
    });
}

/// What the poisoning swap says had been reached is there to be read: POISONING's Acquire.
#[test]
fn a_poisoners_answer_shows_the_contents() {
    loom::model(|| {
        let shared = shared();
        let producer = {
            let shared = shared.clone();
            thread::spawn(move || produce(&shared))
        };
        match shared.word.poison() {
            Some(1) => consume(&shared),
            other => assert_eq!(other, Some(0)),
        }
        producer.join().unwrap();
    });
}

/// A poisoned word never counts as reached.
#[test]
fn poison_is_not_a_value() {
    loom::model(|| {
        let shared = shared();
        let poisoner = {
            let shared = shared.clone();
            thread::spawn(move || {
                let _ = shared.word.poison();
            })
        };
        assert!(shared.word.look(1) != Fence::Reached);
        poisoner.join().unwrap();
        assert_eq!(shared.word.look(1), Fence::Poisoned);
    });
}
