//! The count of a lease's handles under a model checker:
//! `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test -p gpu-ipc-ipc-rc --test loom_handle_count`.
//!
//! The lease is a plain cell: its holders read, who ends it writes. So a missing order is a data
//! race that loom reports.
#![cfg(gpu_ipc_loom)]

use ipc_rc::model::HandleCount;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

struct Shared {
    holders: HandleCount<AtomicU64>,
    lease: UnsafeCell<u32>,
}

// SAFETY: `lease` is touched only as the count allows, which is what loom checks here.
unsafe impl Sync for Shared {}

fn held() -> Arc<Shared> {
    let shared = Arc::new(Shared {
        holders: HandleCount::new(AtomicU64::new(0)),
        lease: UnsafeCell::new(0),
    });
    assert!(!shared.holders.is_held());
    shared.holders.take();
    shared
}

impl Shared {
    /// UseCount the lease and drops one handle; says whether that ended it.
    fn finish(&self) -> bool {
        self.lease.with(|lease| {
            // SAFETY: loom checks that nobody writes the cell meanwhile.
            assert_eq!(unsafe { *lease }, 0, "it was ended before");
        });
        let last = self.holders.let_go();
        if last {
            self.lease.with_mut(|lease| {
                // SAFETY: loom checks that nobody else touches the cell meanwhile.
                unsafe { *lease = 1 }
            });
        }
        last
    }
}

/// Of all holders one ends the lease, after what all others did with it: LET_GO pairs with LAST and
/// LAST_AFTER_ALL.
#[test]
fn one_ends_it_after_all_others() {
    loom::model(|| {
        let shared = held();
        shared.holders.add();
        shared.holders.add();
        let others: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || shared.finish())
            })
            .collect();
        let mut ends = u32::from(shared.finish());
        ends += others
            .into_iter()
            .map(|other| u32::from(other.join().unwrap()))
            .sum::<u32>();
        assert_eq!(ends, 1);
        assert!(!shared.holders.is_held());
    });
}

/// A holder that clones while another drops keeps the lease.
#[test]
fn a_clone_keeps_it() {
    loom::model(|| {
        let shared = held();
        shared.holders.add();
        let cloning = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.holders.add();
                u32::from(shared.finish()) + u32::from(shared.finish())
            })
        };
        let ends = u32::from(shared.finish()) + cloning.join().unwrap();
        assert_eq!(ends, 1);
    });
}
