//! The count of a mapping's uses under a model checker:
//! `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test -p gpu-ipc-ipc-rc --test loom_use_count`.
//!
//! The mapping is a plain cell: who uses it reads, who maps and unmaps writes. So a missing order
//! is a data race that loom reports.
#![cfg(gpu_ipc_loom)]

use ipc_rc::model::{Leave, UseCount};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

struct Shared {
    uses: UseCount<AtomicU64, 2>,
    mapping: UnsafeCell<u32>,
}

// SAFETY: `mapping` is touched only as the count allows, which is what loom checks here.
unsafe impl Sync for Shared {}

fn closed() -> Arc<Shared> {
    Arc::new(Shared {
        uses: UseCount::closed(AtomicU64::new),
        mapping: UnsafeCell::new(0),
    })
}

/// A mapping that is open and that nobody uses.
fn open() -> Arc<Shared> {
    let shared = closed();
    shared.map();
    shared.uses.open(0);
    assert!(!shared.leave(0), "nobody waits");
    shared
}

impl Shared {
    fn map(&self) {
        self.mapping.with_mut(|mapping| {
            // SAFETY: loom checks that nobody else touches the cell meanwhile.
            unsafe { *mapping += 1 }
        });
    }

    /// UseCount the mapping.
    fn read(&self) -> u32 {
        self.mapping.with(|mapping| {
            // SAFETY: loom checks that nobody writes the cell meanwhile.
            unsafe { *mapping }
        })
    }

    /// Ends a use, and says whether it wakes the thread.
    fn leave(&self, by: usize) -> bool {
        let cell = self.uses.cell(by);
        cell.leave() == Leave::Watched && cell.leave_watched()
    }

    /// UseCount the mapping if it is open.
    fn visit(&self, by: usize) -> bool {
        if self.uses.cell(by).enter() {
            assert_eq!(self.read(), 1);
        }
        self.leave(by)
    }
}

/// All use comes before the unmapping: LEAVE pairs with CLOSE.
#[test]
fn nobody_uses_what_is_closed() {
    loom::model(|| {
        let shared = open();
        let users: Vec<_> = (0..2)
            .map(|by| {
                let shared = shared.clone();
                thread::spawn(move || shared.visit(by))
            })
            .collect();
        if shared.uses.close() {
            shared.map();
        }
        users
            .into_iter()
            .for_each(|user| drop(user.join().unwrap()));
    });
}

/// The same for a use that ends while the thread waits for it.
#[test]
fn nobody_uses_what_is_closed_after_a_watch() {
    loom::model(|| {
        let shared = open();
        let user = {
            let shared = shared.clone();
            thread::spawn(move || shared.visit(0))
        };
        shared.uses.watch(true);
        if shared.uses.is_idle() && shared.uses.close() {
            shared.map();
        }
        user.join().unwrap();
    });
}

/// A thread that enters finds the mapping that was opened: OPEN pairs with ENTER.
#[test]
fn who_enters_sees_what_was_mapped() {
    loom::model(|| {
        let shared = closed();
        let users: Vec<_> = (0..2)
            .map(|by| {
                let shared = shared.clone();
                thread::spawn(move || shared.visit(by))
            })
            .collect();
        shared.map();
        shared.uses.open(0);
        assert_eq!(shared.read(), 1);
        assert!(!shared.leave(0));
        users
            .into_iter()
            .for_each(|user| drop(user.join().unwrap()));
        assert!(
            shared.uses.close(),
            "threads that were turned away have left"
        );
    });
}

/// A thread that watches and then finds somebody there is woken by the last of them, whichever cell
/// they came by, and also when its attempt to close fails half-way.
#[test]
fn the_last_of_the_watched_wakes_the_thread() {
    loom::model(|| {
        let shared = open();
        assert!(shared.uses.cell(1).enter());
        let leaver = {
            let shared = shared.clone();
            thread::spawn(move || shared.leave(1))
        };
        let visitor = {
            let shared = shared.clone();
            thread::spawn(move || shared.visit(0))
        };
        shared.uses.watch(true);
        let closed = shared.uses.close();
        let woken = [leaver, visitor]
            .map(|thread| thread.join().unwrap())
            .contains(&true);
        assert!(closed || woken, "the thread would sleep for ever");
        assert!(closed || shared.uses.close(), "it closes at the next look");
    });
}

/// A watch that has ended wakes nobody, and ends no use.
#[test]
fn a_watch_that_ends_takes_nothing_with_it() {
    loom::model(|| {
        let shared = open();
        assert!(shared.uses.cell(0).enter());
        let leaver = {
            let shared = shared.clone();
            thread::spawn(move || shared.leave(0))
        };
        shared.uses.watch(true);
        shared.uses.watch(false);
        leaver.join().unwrap();
        assert!(shared.uses.is_idle() && shared.uses.close());
    });
}
