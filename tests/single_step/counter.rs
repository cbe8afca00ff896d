//! The control: a plain counter in shared memory, which the same deaths must make leak.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::agent::{Call, Said};
use crate::trace::Trace;
use crate::{Case, chosen};

pub const CASES: &[Case] = &[("counter::a_plain_counter_leaks", leaks)];

/// Maps a counter for as long as the process lives.
pub fn open(path: &Path) -> &'static AtomicU64 {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .expect("a file");
    file.set_len(8).expect("there is room");
    // SAFETY: `mmap` at no address of ours replaces no mapping.
    let page = unsafe {
        mmap(
            std::ptr::null_mut(),
            8,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &file,
            0,
        )
    }
    .expect("mapped");
    // SAFETY: `AtomicU64::from_ptr` asks for an aligned word that stays valid: a page is, and it is
    // never unmapped.
    unsafe { AtomicU64::from_ptr(page.cast()) }
}

/// One holder more.
pub fn claim(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::AcqRel);
}

/// One holder less.
pub fn release(counter: &AtomicU64) {
    counter.fetch_sub(1, Ordering::AcqRel);
}

fn leaks() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("counter");
    let counter = open(&path);
    let start = || {
        counter.store(0, Ordering::Release);
        let mut trace = Trace::start(&Call::Count { file: path.clone() });
        assert_eq!(trace.hear(), Said::Ready);
        trace.begin();
        trace
    };
    let mut pilot = start();
    let mut changes = Vec::new();
    let mut before = 0;
    while pilot.step() {
        let count = counter.load(Ordering::Acquire);
        if count != before {
            changes.push(pilot.executed());
            before = count;
        }
    }
    let total = pilot.executed();
    pilot.kill();
    assert_eq!(changes.len(), 2, "the counter goes up, and down");
    let mut leaked = 0;
    let mut points = 0;
    for at in chosen(total, &changes) {
        let mut trace = start();
        while trace.executed() < at && trace.step() {}
        trace.kill();
        points += 1;
        leaked += usize::from(counter.load(Ordering::Acquire) != 0);
    }
    println!("counter: {total} instructions, {points} deaths, {leaked} leaks");
    assert!(leaked > 0, "nothing leaked: these deaths prove nothing");
    assert!(
        leaked < points,
        "everything leaked: these deaths prove nothing"
    );
}
