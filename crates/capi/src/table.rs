//! A table of what handles of one kind stand for.
//!
//! Each row has a word that says whether it is open, which use of the row this is, and how many calls are in it. The
//! thread that takes the word to closed with no call inside has the value, alone, and makes the row free:
//!
//! ```text
//! FREE(g) ─open─► OPEN(g+1, 0) ◄─enter/leave─► OPEN(g+1, n)
//!                      │ close                      │ close
//!                      ▼                            ▼
//!                 FREE(g+1) ◄──────last leave── CLOSED(g+1, n)
//! ```
//!
//! | step | who | operation | ordering |
//! |---|---|---|---|
//! | open | the thread that was given the free row | store | Release A |
//! | enter | any call with the handle | compare-and-swap | Acquire B |
//! | leave | the same call at its end | `fetch_sub` | AcqRel C |
//! | close | one call | compare-and-swap | AcqRel D |
//!
//! - **A pairs with B and D:** who finds the row open sees the value.
//! - **C pairs with C and D:** who takes the value sees all that the calls inside did with it; every change of the word
//!   since it was opened is a read-modify-write, so each earlier one is seen.
//! - **A row is not free before its value is moved out,** and the list of free rows has a lock, so the next `open`
//!   comes after.
//! - **Not covered:** a thread that is killed inside a call (by `pthread_cancel` or a `longjmp` out of a callback): the
//!   value stays for ever.
//!
//! Checked by the tests at the foot, under Miri and the thread sanitizer too.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::handle::{LAST_GENERATION, MOST_ROWS};

/// The rows of the first chunk; each further one has as many as all before it.
const FIRST: u32 = 64;
const CHUNKS: usize = (MOST_ROWS / FIRST).ilog2() as usize + 1;

/// The word: the generation above, then whether the row is open, then the calls inside.
const GENERATION_SHIFT: u32 = 32;
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

struct Row<T> {
    word: AtomicU64,
    value: UnsafeCell<MaybeUninit<T>>,
}

/// What handles of one kind stand for.
pub(crate) struct Table<T> {
    chunks: [AtomicPtr<Row<T>>; CHUNKS],
    free: Mutex<FreeRows>,
}

#[derive(Default)]
struct FreeRows {
    rows: Vec<u32>,
    /// Rows that were never used begin here.
    fresh: u32,
}

// SAFETY: a value is put in by one thread, used by several at once and taken out by one, as the words order it. So it
// must be `Send` and `Sync`; the rest of the table is atomics and a lock.
unsafe impl<T: Send + Sync> Sync for Table<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for Table<T> {}

/// A row at one of its uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub row: u32,
    pub generation: u32,
}

/// All rows are in use.
#[derive(Debug)]
pub(crate) struct Full<T>(pub T);

impl<T> Table<T> {
    pub const fn new() -> Table<T> {
        Table {
            chunks: [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS],
            free: Mutex::new(FreeRows { rows: Vec::new(), fresh: 0 }),
        }
    }

    /// Puts a value into a free row.
    #[inline]
    pub fn open(&self, value: T) -> Result<Place, Full<T>> {
        let Some(number) = self.take_free() else { return Err(Full(value)) };
        let Some(row) = self.row(number) else { return Err(Full(value)) };
        let generation = (row.word.load(Ordering::Relaxed) >> GENERATION_SHIFT) as u32 + 1;
        // SAFETY: writing through the cell asks that nobody else uses the value: the row is free, and the list of free
        // rows gave it to this thread alone.
        unsafe { (*row.value.get()).write(value) };
        row.word.store(u64::from(generation) << GENERATION_SHIFT | OPEN, Ordering::Release); // A
        Ok(Place { row: number, generation })
    }

    /// Begins to use a value; `None` if it is closed.
    #[inline]
    pub fn enter(&self, place: Place) -> Option<Inside<'_, T>> {
        let row = self.row(place.row)?;
        let mut word = row.word.load(Ordering::Relaxed);
        loop {
            if word & !INSIDE != u64::from(place.generation) << GENERATION_SHIFT | OPEN || word & INSIDE == INSIDE {
                return None;
            }
            match row.word.compare_exchange_weak(word, word + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Inside { table: self, row, number: place.row }), // B
                Err(seen) => word = seen,
            }
        }
    }

    /// Closes a row, and drops its value, unless calls are inside: the last of them does. Says whether the row was
    /// open.
    #[inline]
    pub fn close(&self, place: Place) -> bool {
        let Some(row) = self.row(place.row) else { return false };
        let mut word = row.word.load(Ordering::Relaxed);
        loop {
            if word & !INSIDE != u64::from(place.generation) << GENERATION_SHIFT | OPEN {
                return false;
            }
            match row.word.compare_exchange_weak(word, word & !OPEN, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break, // D
                Err(seen) => word = seen,
            }
        }
        if word & INSIDE == 0 {
            // SAFETY: `take` asks to be the only one: this call closed the row and nobody is inside.
            drop(unsafe { self.take(row, place.row) });
        }
        true
    }

    /// Closes a row and returns its value, if no call is inside; otherwise as [`close`](Table::close).
    #[inline]
    pub fn close_and_take(&self, place: Place) -> Taken<T> {
        let Some(row) = self.row(place.row) else { return Taken::NotOpen };
        let open = u64::from(place.generation) << GENERATION_SHIFT | OPEN;
        match row.word.compare_exchange(open, open & !OPEN, Ordering::AcqRel, Ordering::Relaxed) {
            // SAFETY: `take` asks to be the only one: this call closed the row and nobody is inside.
            Ok(_) => Taken::Value(unsafe { self.take(row, place.row) }), // D
            Err(_) if self.close(place) => Taken::InUse,
            Err(_) => Taken::NotOpen,
        }
    }

    /// Moves a closed row's value out, and frees the row.
    ///
    /// # Safety
    ///
    /// The row is closed, no call is inside, and the caller alone found that.
    unsafe fn take(&self, row: &Row<T>, number: u32) -> T {
        // SAFETY: `&*` asks that nobody writes meanwhile: nobody puts a value in before the row is free, below.
        let kept = unsafe { &*row.value.get() };
        // SAFETY: `assume_init_read` asks for a value that is there and not read twice: an open row has one, and the
        // caller is the only one that takes it out.
        let value = unsafe { kept.assume_init_read() };
        if row.word.load(Ordering::Relaxed) >> GENERATION_SHIFT < u64::from(LAST_GENERATION) {
            self.lock().rows.push(number);
        }
        value
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FreeRows> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn take_free(&self) -> Option<u32> {
        let mut free = self.lock();
        if let Some(row) = free.rows.pop() {
            return Some(row);
        }
        let row = free.fresh;
        if row == MOST_ROWS {
            return None;
        }
        let (chunk, at) = split(row);
        if at == 0 {
            let rows: Box<[Row<T>]> = (0..rows_of(chunk))
                .map(|_| Row { word: AtomicU64::new(0), value: UnsafeCell::new(MaybeUninit::uninit()) })
                .collect();
            // Kept as long as the table, which is as long as the process.
            self.chunks[chunk].store(Box::into_raw(rows).cast(), Ordering::Release);
        }
        free.fresh += 1;
        Some(row)
    }

    #[inline]
    fn row(&self, number: u32) -> Option<&Row<T>> {
        let (chunk, at) = split(number);
        let rows = self.chunks[chunk].load(Ordering::Acquire);
        if rows.is_null() {
            return None;
        }
        // SAFETY: `add` asks to stay inside an allocation: a chunk has `rows_of` rows, and `split` gives a place below.
        let row = unsafe { rows.add(at as usize) };
        // SAFETY: `&*` asks for a valid value as long as the reference: chunks are freed with the table, and shared
        // references to rows are all that anybody has.
        Some(unsafe { &*row })
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        for number in 0..self.lock().fresh {
            let row = self.row(number).map(ptr::from_ref);
            // SAFETY: `&*` asks for a valid row: the chunks are freed below.
            let Some(row) = row.map(|row| unsafe { &*row }) else { continue };
            if row.word.load(Ordering::Relaxed) & OPEN != 0 {
                // SAFETY: `&mut *` asks to be the only one: the table is borrowed for its drop.
                let kept = unsafe { &mut *row.value.get() };
                // SAFETY: `assume_init_drop` asks for a value that is not used afterwards: the row is open, and its
                // table goes.
                unsafe { kept.assume_init_drop() };
            }
        }
        for (chunk, rows) in self.chunks.iter_mut().enumerate() {
            let rows = *rows.get_mut();
            if !rows.is_null() {
                let whole = ptr::slice_from_raw_parts_mut(rows, rows_of(chunk) as usize);
                // SAFETY: `from_raw` asks for what `into_raw` gave, with its length, once: `take_free` made it.
                drop(unsafe { Box::from_raw(whole) });
            }
        }
    }
}

/// What closing a row gave.
pub(crate) enum Taken<T> {
    Value(T),
    /// Calls are inside; the last of them drops the value.
    InUse,
    NotOpen,
}

/// Finds a row's chunk and its place there.
#[inline]
fn split(row: u32) -> (usize, u32) {
    match (row / FIRST).checked_ilog2() {
        None => (0, row),
        Some(before) => (before as usize + 1, row - (FIRST << before)),
    }
}

fn rows_of(chunk: usize) -> u32 {
    if chunk == 0 { FIRST } else { FIRST << (chunk - 1) }
}

/// A call that is inside a row: its value stays until this ends.
pub(crate) struct Inside<'a, T> {
    table: &'a Table<T>,
    row: &'a Row<T>,
    number: u32,
}

impl<T> Deref for Inside<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: reading the cell asks that nobody writes it meanwhile: nobody takes the value while a call is inside.
        let value = unsafe { &*self.row.value.get() };
        // SAFETY: `assume_init_ref` asks for a value that is there: the row was open when this call entered.
        unsafe { value.assume_init_ref() }
    }
}

impl<T> Drop for Inside<'_, T> {
    #[inline]
    fn drop(&mut self) {
        let before = self.row.word.fetch_sub(1, Ordering::AcqRel); // C
        if before & (OPEN | INSIDE) == 1 {
            // SAFETY: `take` asks to be the only one: the row is closed and this was the last call inside.
            drop(unsafe { self.table.take(self.row, self.number) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Debug)]
    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn every_row_has_a_place_of_its_own() {
        let mut next = [0; CHUNKS];
        for row in (0..4096).chain(MOST_ROWS - 3..MOST_ROWS) {
            let (chunk, at) = split(row);
            assert!(chunk < CHUNKS && at < rows_of(chunk), "{row}");
            if row < 4096 {
                assert_eq!(at, next[chunk], "{row}");
                next[chunk] += 1;
            }
        }
    }

    #[test]
    fn a_closed_place_is_not_entered_though_its_row_is_used_again() {
        let table = Table::new();
        let first = table.open(1).expect("room");
        assert_eq!(table.enter(first).as_deref(), Some(&1));
        assert!(table.close(first));
        let second = table.open(2).expect("room");
        assert_eq!(second.row, first.row, "the row is used again");
        assert!(table.enter(first).is_none() && !table.close(first));
        assert_eq!(table.enter(second).as_deref(), Some(&2));
        assert!(matches!(table.close_and_take(second), Taken::Value(2)));
        assert!(matches!(table.close_and_take(second), Taken::NotOpen));
    }

    #[test]
    fn the_last_call_inside_drops_what_was_closed() {
        let (drops, table) = (Arc::new(AtomicUsize::new(0)), Table::new());
        let place = table.open(Counted(drops.clone())).expect("room");
        let (one, two) = (table.enter(place).expect("open"), table.enter(place).expect("open"));
        assert!(matches!(table.close_and_take(place), Taken::InUse));
        assert!(table.enter(place).is_none(), "closed to further calls");
        drop(one);
        assert_eq!(drops.load(Ordering::Relaxed), 0);
        drop(two);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        table.open(Counted(drops.clone())).expect("room");
        drop(table);
        assert_eq!(drops.load(Ordering::Relaxed), 2, "a table drops what is open");
    }

    #[test]
    fn a_row_whose_generations_are_used_up_is_left() {
        let table = Table::new();
        let place = table.open(7).expect("room");
        let row = table.row(place.row).expect("a row");
        let last = u64::from(LAST_GENERATION) << GENERATION_SHIFT | OPEN;
        row.word.store(last, Ordering::Relaxed);
        assert!(table.close(Place { row: place.row, generation: LAST_GENERATION }));
        assert_ne!(table.open(8).expect("room").row, place.row);
    }

    #[test]
    fn threads_close_what_others_are_in() {
        let (drops, table) = (Arc::new(AtomicUsize::new(0)), Table::new());
        let rounds = if cfg!(miri) { 20 } else { 500 };
        for _ in 0..rounds {
            let place = table.open(Counted(drops.clone())).expect("room");
            std::thread::scope(|scope| {
                let closers: Vec<_> = (0..2).map(|_| scope.spawn(|| table.close(place))).collect();
                for _ in 0..3 {
                    if let Some(inside) = table.enter(place) {
                        assert!(Arc::strong_count(&inside.0) > 1);
                    }
                }
                let closed = closers.into_iter().filter_map(|closer| closer.join().ok()).filter(|closed| *closed);
                assert_eq!(closed.count(), 1, "one of them closed it");
            });
        }
        assert_eq!(drops.load(Ordering::Relaxed), rounds);
    }
}
