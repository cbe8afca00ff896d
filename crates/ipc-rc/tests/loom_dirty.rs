//! The dirty word under a model checker: `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test -p gpu-ipc-ipc-rc --test loom_dirty`.
#![cfg(gpu_ipc_loom)]

use channel::shared::dirty::Dirty;
use channel::shared::slot::{Claim, Generation, Seen, Slot};
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

struct Group {
    slots: [Slot<AtomicU64>; 2],
    dirty: Dirty<AtomicU64>,
}

fn group() -> (Arc<Group>, Generation) {
    let g = Generation::ZERO.next();
    let slot = || Slot::new(AtomicU64::new(0));
    let group = Arc::new(Group { slots: [slot(), slot()], dirty: Dirty::new(AtomicU64::new(0)) });
    for slot in &group.slots {
        slot.grant(g);
        assert_eq!(slot.claim(g), Claim::Held);
    }
    (group, g)
}

/// Looks where a mark is, and returns the slots found released.
fn collect(group: &Group, g: Generation, outstanding: &mut [bool; 2]) {
    if group.dirty.take() {
        for (slot, outstanding) in group.slots.iter().zip(outstanding) {
            if *outstanding && slot.read(g) == Seen::Released {
                *outstanding = false;
            }
        }
    }
}

/// No release is missed, whoever marks: after all have marked, one more collect finds everything.
#[test]
fn no_release_is_missed() {
    loom::model(|| {
        let (group, g) = group();
        let consumers: Vec<_> = (0..2)
            .map(|n| {
                let group = group.clone();
                thread::spawn(move || {
                    group.slots[n].release(g);
                    group.dirty.mark();
                })
            })
            .collect();
        let mut outstanding = [true; 2];
        collect(&group, g, &mut outstanding);
        for consumer in consumers {
            consumer.join().unwrap();
        }
        collect(&group, g, &mut outstanding);
        assert_eq!(outstanding, [false; 2]);
    });
}

/// A mark that is seen is seen with its release, and with every release whose mark it replaced.
#[test]
fn a_mark_is_never_taken_without_its_releases() {
    loom::model(|| {
        let (group, g) = group();
        let first = {
            let group = group.clone();
            thread::spawn(move || {
                group.slots[0].release(g);
                group.dirty.mark();
            })
        };
        let second = {
            let group = group.clone();
            thread::spawn(move || {
                group.slots[1].release(g);
                group.dirty.mark();
            })
        };
        let mut outstanding = [true; 2];
        collect(&group, g, &mut outstanding);
        collect(&group, g, &mut outstanding);
        let seen = outstanding.iter().filter(|o| !**o).count();
        let left = group.dirty.is_marked();
        first.join().unwrap();
        second.join().unwrap();
        // What a collect did not find must still be marked, at the latest after everybody has marked.
        assert!(seen == 2 || left || group.dirty.is_marked());
    });
}
