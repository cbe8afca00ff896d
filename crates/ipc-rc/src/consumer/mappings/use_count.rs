//! How many use a mapping, and whether it may be closed.
//!
//! The count is spread over cells, so that threads do not wait for each other's writes: each enters
//! by a cell of its own and leaves by the one that it entered by. All of them are opened, watched
//! and closed.
//!
//! | step | who | operation on a cell | ordering |
//! |---|---|---|---|
//! | enter | claimant | `fetch_add(1)`; if it finds CLOSING, leave and ask anew | [`ENTER`] Acquire |
//! | leave | a thread that ends a use | CAS to one less, unless WATCHED | [`LEAVE`] Release |
//! | leave, watched | the same | keep what the mapping hangs on, `fetch_sub(1)`, wake the thread if it was the last | [`LEAVE`] Release |
//! | watch | thread | `fetch_or(WATCHED)`, and then it looks whether anybody is left | Relaxed |
//! | close | thread | CAS 0 to CLOSING, cell by cell; from then on nobody enters | [`CLOSE`] Acquire |
//! | open | who maps, or a close that found a cell in use, for those before it | `fetch_sub(CLOSING)`, or one less: its own use | [`OPEN`] Release |
//!
//! After a failed close, a thread that was turned away retries under the closer's lock.
//!
//! # Pairings
//!
//! - **`LEAVE` with `CLOSE`**: all use of the mapping comes before its unmapping.
//! - **`OPEN` with `ENTER`**: a thread that entered reads what the mapping was opened with.
//! - **Watch** needs no order: it, the leaves and the look change and read one word, and the second
//!   sees the first. A close that fails opens cells that are not watched any more; but it failed by
//!   a cell that is, whose last leave wakes the thread, and the thread watches all of them before
//!   it looks again.
//!
//! **After a leave nobody may touch the cell**: the mapping may be closed, and its memory gone,
//! between the CAS and the next instruction. So a use that ends while the cell is watched keeps the
//! memory first, which the CAS makes sure of. And so a leave is a method of a cell, which consists
//! of its word alone: a reference to more would promise that the rest is there until the method
//! returns.
//!
//! Checked by `tests/loom_use_count.rs`; weakening `ENTER`, `LEAVE`, `CLOSE` or `OPEN` to Relaxed
//! fails it. That a leave touches nothing after it, by the interpreter on this file's tests.

use std::sync::atomic::Ordering;

use transport::shared::word::{NamedOrdering, Tally};

/// Pairs with [`OPEN`].
pub const ENTER: NamedOrdering = NamedOrdering::new("enter", Ordering::Acquire);
/// Pairs with [`CLOSE`].
pub const LEAVE: NamedOrdering = NamedOrdering::new("leave", Ordering::Release);
/// Pairs with [`LEAVE`].
pub const CLOSE: NamedOrdering = NamedOrdering::new("close", Ordering::Acquire);
/// Pairs with [`ENTER`].
pub const OPEN: NamedOrdering = NamedOrdering::new("open", Ordering::Release);

const CLOSING: u64 = 1 << 31;
/// The thread waits for the last use to end.
const WATCHED: u64 = 1 << 30;

/// What a leave found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Leave {
    /// The use has ended: touch nothing.
    Left,
    /// It has not: keep the memory and the thread's waker, then
    /// [`leave_watched`](Cell::leave_watched).
    Watched,
}

/// One cell of a count. Only these methods touch the word.
#[derive(Debug)]
#[repr(transparent)]
pub struct Cell<W>(W);

impl<W: Tally> Cell<W> {
    /// Counts one use more, and says whether it may begin. If not, it ends by a leave all the same.
    #[inline]
    #[must_use]
    pub fn enter(&self) -> bool {
        self.0.fetch_add(1, ENTER.get()) & CLOSING == 0
    }

    /// Ends one use.
    #[inline]
    pub fn leave(&self) -> Leave {
        let mut seen = self.0.load(Ordering::Relaxed);
        while seen & WATCHED == 0 {
            match self
                .0
                .compare_exchange_weak(seen, seen - 1, LEAVE.get(), Ordering::Relaxed)
            {
                Ok(_) => return Leave::Left,
                Err(changed) => seen = changed,
            }
        }
        Leave::Watched
    }

    /// Ends one use of a cell that is, or just was, watched, and says whether the thread is to be
    /// woken.
    #[must_use]
    pub fn leave_watched(&self) -> bool {
        self.0.fetch_sub(1, LEAVE.get()) == WATCHED + 1
    }

    fn close(&self) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        seen & !WATCHED == 0
            && self
                .0
                .compare_exchange(seen, CLOSING, CLOSE.get(), Ordering::Relaxed)
                .is_ok()
    }

    fn open(&self, uses: u64) {
        self.0.fetch_sub(CLOSING - uses, OPEN.get());
    }
}

/// A cell, kept off its neighbours' cache lines.
#[derive(Debug)]
#[repr(align(64))]
struct Apart<W>(Cell<W>);

/// A mapping's count.
#[derive(Debug)]
pub struct UseCount<W, const N: usize>([Apart<W>; N]);

impl<W: Tally, const N: usize> UseCount<W, N> {
    /// Makes the count of a mapping that is closed.
    pub fn closed(word: impl Fn(u64) -> W) -> UseCount<W, N> {
        UseCount(std::array::from_fn(|_| Apart(Cell(word(CLOSING)))))
    }

    /// Returns the cell to enter and leave by.
    #[inline]
    pub fn cell(&self, by: usize) -> &Cell<W> {
        &self.0[by].0
    }

    /// Opens it, entered by a cell (the thread that mapped).
    pub fn open(&self, by: usize) {
        for (number, cell) in self.0.iter().enumerate() {
            cell.0.open(u64::from(number == by));
        }
    }

    /// Closes it to further uses, if it has none (thread).
    #[must_use]
    pub fn close(&self) -> bool {
        match self.0.iter().position(|cell| !cell.0.close()) {
            None => true,
            Some(busy) => {
                self.0[..busy].iter().for_each(|cell| cell.0.open(0));
                false
            }
        }
    }

    /// Sets whether the end of the last use of each cell wakes the thread (thread).
    pub fn watch(&self, watched: bool) {
        for cell in &self.0 {
            if watched {
                cell.0.0.fetch_or(WATCHED, Ordering::Relaxed);
            } else {
                cell.0.0.fetch_and(!WATCHED, Ordering::Relaxed);
            }
        }
    }

    /// Says whether it is unused at this moment: a reason to try to close it.
    pub fn is_idle(&self) -> bool {
        self.0
            .iter()
            .all(|cell| cell.0.0.load(Ordering::Relaxed) & !WATCHED == 0)
    }
}

#[cfg(all(test, not(gpu_ipc_loom)))]
mod tests {
    use std::ptr::NonNull;
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// A count in memory with something else beside it, as in a mapping.
    struct Beside {
        uses: UseCount<AtomicU64, 1>,
        other: u64,
    }

    struct Borrowed(NonNull<Beside>);

    impl Borrowed {
        fn cell(&self) -> &Cell<AtomicU64> {
            // SAFETY: `as_ref` asks for a live value: the caller has entered, or has yet to close
            // and free it.
            unsafe { self.0.as_ref() }.uses.cell(0)
        }
    }

    // SAFETY: it stands for a `&Beside`, which is `Sync`, until the memory is freed.
    unsafe impl Send for Borrowed {}

    #[test]
    fn the_memory_may_go_while_a_leave_returns() {
        for _ in 0..if cfg!(miri) { 150 } else { 1_000 } {
            let beside = Box::new(Beside {
                uses: UseCount::closed(AtomicU64::new),
                other: 7,
            });
            beside.uses.open(0);
            let place = NonNull::from(Box::leak(beside));
            let leaving = Borrowed(place);
            let thread = std::thread::spawn(move || {
                let leaving = leaving;
                assert_eq!(leaving.cell().leave(), Leave::Left);
            });
            // SAFETY: `as_ref` asks for a live value: it is freed below.
            while !unsafe { place.as_ref() }.uses.close() {
                std::hint::spin_loop();
            }
            // SAFETY: `from_raw` asks for what `leak` gave, once: the count was closed, so nobody
            // uses it.
            let beside = unsafe { Box::from_raw(place.as_ptr()) };
            assert_eq!(beside.other, 7);
            drop(beside);
            thread.join().expect("it left");
        }
    }
}
