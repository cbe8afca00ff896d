//! Shards: what several threads change is cut into as many pieces, so that they do not wait for
//! each other.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many pieces there are.
pub const SHARDS: usize = 16;

/// Returns a thread's own shard. Threads are numbered as they first ask, so those of a pool, which
/// begin one after the other, have one each; by anything that a hash could take, such as addresses,
/// half of eight would meet in one.
#[inline]
pub fn own_shard() -> usize {
    static NUMBERED: AtomicUsize = AtomicUsize::new(0);
    const NONE: usize = usize::MAX;
    thread_local!(static OWN: Cell<usize> = const { Cell::new(NONE) });
    OWN.with(|own| {
        if own.get() == NONE {
            own.set(NUMBERED.fetch_add(1, Ordering::Relaxed) % SHARDS);
        }
        own.get()
    })
}
