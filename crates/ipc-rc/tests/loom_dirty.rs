//! The dirty word, and the sweep that takes it, under a model checker:
//! `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test -p gpu-ipc-ipc-rc --test loom_dirty`.
#![cfg(gpu_ipc_loom)]

use std::sync::Arc;

use gpu_api::Access;
use ipc_rc::model::{Effort, ReclaimedBlocks, SlotGroups, Terms};
use loom::sync::atomic::AtomicU64;
use loom::thread;
use transport::os::clock::Tick;
use transport::shared::counter_file::{GROUP, SlotFile};
use transport::shared::dirty::Dirty;
use transport::shared::slot::{Claim, Generation, Slot};

/// A counter file of one group, of words that loom knows.
struct File {
    slots: Vec<Slot<AtomicU64>>,
    dirty: [Dirty<AtomicU64>; 1],
}

impl SlotFile for File {
    type Word = AtomicU64;
    fn slots(&self) -> &[Slot<AtomicU64>] {
        &self.slots
    }
    fn dirty(&self) -> &[Dirty<AtomicU64>] {
        &self.dirty
    }
}

impl File {
    fn release(&self, (slot, generation): (u32, Generation)) {
        self.slots[slot as usize].release(generation);
        self.dirty[0].mark();
    }
}

/// A producer's part of a file, two leases in it that are held, and the file.
fn held() -> (SlotGroups<u32, File>, Arc<File>, [(u32, Generation); 2]) {
    let slots = (0..GROUP).map(|_| Slot::new(AtomicU64::new(0))).collect();
    let file = Arc::new(File {
        slots,
        dirty: [Dirty::new(AtomicU64::new(0))],
    });
    let mut part = SlotGroups::new(&file, 0);
    let leases = [7, 8].map(|block| {
        part.grant(&block, Terms::new(Tick::default(), None, Access::ReadWrite))
            .expect("a free slot")
    });
    for (slot, generation) in leases {
        assert_eq!(file.slots[slot as usize].claim(generation), Claim::Held);
    }
    (part, file, leases)
}

/// Looks where a mark is, and returns how many blocks came back.
fn collect(part: &mut SlotGroups<u32, File>) -> usize {
    let mut out = ReclaimedBlocks::new();
    part.collect(Effort::Marked, &mut out);
    out.len()
}

/// No release is missed, in any order of marks: after all have marked, one more collect finds
/// everything.
#[test]
fn no_release_is_missed() {
    loom::model(|| {
        let (mut part, file, leases) = held();
        let consumers = leases.map(|lease| {
            let file = file.clone();
            thread::spawn(move || file.release(lease))
        });
        let mut back = collect(&mut part);
        for consumer in consumers {
            consumer.join().unwrap();
        }
        back += collect(&mut part);
        assert_eq!(back, 2);
        assert!(!part.has_leases());
    });
}

/// A mark that is seen is seen with its release, and with every release whose mark it replaced.
#[test]
fn a_mark_is_never_taken_without_its_releases() {
    loom::model(|| {
        let (mut part, file, leases) = held();
        let consumers = leases.map(|lease| {
            let file = file.clone();
            thread::spawn(move || file.release(lease))
        });
        let back = collect(&mut part) + collect(&mut part);
        let left = part.is_marked(0);
        for consumer in consumers {
            consumer.join().unwrap();
        }
        // What a collect did not find must still be marked, at the latest after everybody has
        // marked.
        assert!(back == 2 || left || part.is_marked(0));
    });
}
