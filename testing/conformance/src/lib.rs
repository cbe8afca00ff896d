//! What every backend must do, as one list of cases.
//!
//! [`cases`] need one process, [`peer_cases`] two: the test program starts itself again as the
//! peer, and the two talk over a [`Pipe`]. A case that is in neither list is dead code, which fails
//! the build. A case fails by a panic.
//!
//! What a device lacks is skipped, and [`lacked`] says so. [`Bare`] is a backend that lacks all that
//! may be lacking but file descriptors and host functions.
//!
//! `tests/conformance.rs` runs both lists on every device of every backend that this machine has;
//! what is absent shows as ignored, and with `REQUIRE_GPU=1` as failed.

mod bare;
mod current;
mod default_stream;
mod device;
mod event;
mod memory;
mod peer;
mod pipe;
mod pool;
mod queue;
mod range;
mod word;

use std::cell::RefCell;

use gpu_ipc::Gpu;

pub use bare::Bare;
pub use pipe::Pipe;

/// A case in one process.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Its name: the noun it is about, and what must hold.
    pub name: &'static str,
    /// Panics if it does not hold.
    pub run: fn(&Gpu),
}

/// A case in two processes: each runs its side, and both must come back.
#[derive(Clone, Copy, Debug)]
pub struct PeerCase {
    /// Its name.
    pub name: &'static str,
    /// The side of the process that allocates.
    pub producer: fn(&Gpu, &mut Pipe),
    /// The side of the process that opens.
    pub consumer: fn(&Gpu, &mut Pipe),
}

/// Lists the cases in one process.
pub fn cases() -> Vec<Case> {
    [
        device::CASES,
        memory::CASES,
        range::CASES,
        pool::CASES,
        queue::CASES,
        default_stream::CASES,
        event::CASES,
        word::CASES,
    ]
    .concat()
}

/// Lists the cases in two processes.
pub fn peer_cases() -> Vec<PeerCase> {
    [peer::CASES, range::PEER_CASES].concat()
}

thread_local! {
    /// What the case of this thread needed, in part or as a whole, and its device has not.
    static LACKED: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

/// Says whether a device can do something; where it cannot, the case that asks skips that, and
/// [`lacked`] tells what.
pub(crate) fn can(is_there: bool, what: &'static str) -> bool {
    if !is_there {
        LACKED.with_borrow_mut(|lacked| lacked.push(what));
    }
    is_there
}

/// Tells what the cases that ran on this thread skipped, since it was asked last.
pub fn lacked() -> Vec<&'static str> {
    let mut lacked = LACKED.take();
    lacked.sort_unstable();
    lacked.dedup();
    lacked
}

/// Waits until a condition holds; panics when it does not for so long that somebody hangs.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(
            start.elapsed().as_secs() < 60,
            "waited too long for: {what}"
        );
        std::thread::yield_now();
    }
}
