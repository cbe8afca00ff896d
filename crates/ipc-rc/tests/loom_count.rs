//! A session's count of blocks under a model checker:
//! `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test -p gpu-ipc-ipc-rc --test loom_count`.
#![cfg(gpu_ipc_loom)]

use ipc_rc::model::{Amount, Count};
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

fn count() -> Arc<[Count<AtomicU64>; 2]> {
    Arc::new([Count::default(), Count::default()])
}

/// A block that comes by one cell and goes by another never hides one that stays: WENT pairs with
/// SUM.
#[test]
fn a_sum_is_never_less_than_what_is_there() {
    for (comes, goes) in [(0, 1), (1, 0)] {
        loom::model(move || {
            let count = count();
            count[0].add(10);
            let other = {
                let count = count.clone();
                thread::spawn(move || {
                    count[comes].add(7);
                    count[goes].sub(7);
                })
            };
            let sum = Count::sum(&count[..]);
            assert!(
                (1..=2).contains(&sum.blocks) && (10..=17).contains(&sum.bytes),
                "{sum:?}"
            );
            other.join().unwrap();
            assert_eq!(
                Count::sum(&count[..]),
                Amount {
                    blocks: 1,
                    bytes: 10
                }
            );
        });
    }
}

/// The same when the threads that make it and drop it are two.
#[test]
fn a_block_that_changes_hands_is_counted_once() {
    loom::model(|| {
        let count = count();
        count[1].add(7);
        let other = {
            let count = count.clone();
            thread::spawn(move || count[0].sub(7))
        };
        let sum = Count::sum(&count[..]);
        assert!(
            sum.blocks <= 1 && (sum.bytes == 0 || sum.bytes == 7),
            "{sum:?}"
        );
        other.join().unwrap();
        assert_eq!(Count::sum(&count[..]), Amount::default());
    });
}
