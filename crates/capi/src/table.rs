//! A table of what handles of one kind stand for.
//!
//! Each row has a word that says whether it is open, which use of the row this is, and how many
//! calls are in it. The thread that takes the word to closed with no call inside has the value,
//! alone, and makes the row free:
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
//! | open | the thread that has the row's [`FreeRow`] | store | [`OPENED`] Release |
//! | enter | any call with the handle | compare-and-swap | [`ENTER`] Acquire |
//! | leave | the same call at its end | `fetch_sub` | [`LEAVE`] AcqRel |
//! | close | one call | compare-and-swap | [`CLOSE`] Acquire |
//!
//! A call that meets no other is one compare-and-swap and one subtraction, without a lock.
//!
//! - **`OPENED` pairs with `ENTER` and `CLOSE`:** a call that finds the row open sees the value.
//! - **`LEAVE` pairs with `LEAVE` and `CLOSE`:** the thread that takes the value sees all that the
//!   calls inside did with it. Every change of the word since it was opened is a read-modify-write,
//!   so each earlier one is seen.
//! - **A handle of an earlier use changes nothing:** enter and close swap only a word of their own
//!   generation, and the next open only stores over a free one.
//! - **A row is free only when its value was moved out.** Its [`FreeRow`] is then one thread's,
//!   which opens it again or puts it on the list of free rows. The list has a lock, so a thread
//!   that takes it from there comes after.
//! - **Not covered:** a thread that is killed inside a call (by `pthread_cancel` or a `longjmp` out
//!   of a callback): the value stays for ever. A forked child must leave its parent's tables alone,
//!   as `process` does.
//!
//! Checked by `tests/loom_table.rs`, which fails when any of the orderings is weakened, and by the
//! tests at the foot, under Miri too.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};

use cfg_if::cfg_if;

use crate::handle::{LAST_GENERATION, MOST_ROWS};

cfg_if! {
    if #[cfg(gpu_ipc_loom)] {
        use loom::sync::atomic::{AtomicPtr, AtomicU64};
        use loom::sync::{Mutex, MutexGuard};
    } else {
        use std::sync::atomic::{AtomicPtr, AtomicU64};
        use std::sync::{Mutex, MutexGuard};
    }
}

/// Pairs with [`ENTER`] and [`CLOSE`].
const OPENED: NamedOrdering = NamedOrdering("opened", Ordering::Release);
/// Pairs with [`OPENED`].
const ENTER: NamedOrdering = NamedOrdering("enter", Ordering::Acquire);
/// Pairs with [`CLOSE`], and with itself.
const LEAVE: NamedOrdering = NamedOrdering("leave", Ordering::AcqRel);
/// Pairs with [`OPENED`] and [`LEAVE`].
const CLOSE: NamedOrdering = NamedOrdering("close", Ordering::Acquire);

/// An ordering with a name: with `GPU_IPC_WEAKEN=name` in the environment of a model checker's run
/// it is Relaxed, and a test must fail. In a build without the model checker it is always the
/// strong one.
#[derive(Clone, Copy)]
struct NamedOrdering(&'static str, Ordering);

impl NamedOrdering {
    #[inline]
    fn get(self) -> Ordering {
        static WEAKENED: OnceLock<Option<String>> = OnceLock::new();
        let is_weakened = |name| {
            WEAKENED
                .get_or_init(|| std::env::var("GPU_IPC_WEAKEN").ok())
                .as_deref()
                == Some(name)
        };
        if cfg!(gpu_ipc_loom) && is_weakened(self.0) {
            Ordering::Relaxed
        } else {
            self.1
        }
    }
}

/// The rows of the first chunk; each further one has as many as all before it.
const FIRST: u32 = if cfg!(gpu_ipc_loom) { 1 } else { 64 };
const CHUNKS: usize = (MOST_ROWS / FIRST).ilog2() as usize + 1;

/// The word: the generation above, then whether the row is open, then the calls inside.
const GENERATION_SHIFT: u32 = 32;
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

/// A line of the cache of its own: threads that use neighbours do not wait for each other.
#[repr(align(64))]
struct Row<T> {
    word: AtomicU64,
    value: UnsafeCell<MaybeUninit<T>>,
    number: u32,
    /// The list that it goes on. Kept here, so that a call inside is one pointer.
    list: Arc<Mutex<FreeRows>>,
}

/// What handles of one kind stand for.
pub(crate) struct Table<T> {
    chunks: [AtomicPtr<Row<T>>; CHUNKS],
    free: Arc<Mutex<FreeRows>>,
}

#[derive(Default)]
struct FreeRows {
    rows: Vec<FreeRow>,
    /// Rows that were never used begin here.
    fresh: u32,
}

// SAFETY: a value is put in by one thread, used by several at once and taken out by one, as the
// words order it. So it must be `Send` and `Sync`; the rest of the table is atomics and a lock.
unsafe impl<T: Send + Sync> Sync for Table<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for Table<T> {}

/// A row at one of its uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RowUse {
    pub row: u32,
    pub generation: u32,
}

impl RowUse {
    /// Returns the word of the row while it is open and no call is inside.
    #[inline]
    fn open_word(self) -> u64 {
        u64::from(self.generation) << GENERATION_SHIFT | OPEN
    }
}

/// A free row of a table, which belongs to the owner of this value.
#[derive(Debug)]
#[must_use = "to be opened again, or put on the list of the table that it came from"]
pub(crate) struct FreeRow(u32);

/// All rows are in use.
#[derive(Debug)]
pub(crate) struct Full;

/// What closing a row gave.
#[derive(Debug)]
pub(crate) enum Closed<T> {
    /// The value, and the row unless its generations are used up.
    Taken(T, Option<FreeRow>),
    /// Calls are inside; the last of them drops the value.
    InUse,
    /// It was not open.
    NotOpen,
}

impl<T> Table<T> {
    pub fn new() -> Table<T> {
        Table {
            chunks: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            free: Arc::new(Mutex::new(FreeRows::default())),
        }
    }

    /// Puts a value into the free row that is given, which came from this table, or else into one
    /// of the list.
    #[inline]
    pub fn open(&self, row: Option<FreeRow>, value: T) -> Result<RowUse, Full> {
        let FreeRow(number) = row.or_else(|| self.take_free()).ok_or(Full)?;
        let row = self.row(number).ok_or(Full)?;
        let generation = (row.word.load(Ordering::Relaxed) >> GENERATION_SHIFT) as u32 + 1;
        let row_use = RowUse {
            row: number,
            generation,
        };
        // SAFETY: writing through the cell asks that nobody else uses the value: the row is free,
        // and this thread's.
        unsafe { (*row.value.get()).write(value) };
        row.word.store(row_use.open_word(), OPENED.get());
        Ok(row_use)
    }

    /// Begins to use a value; `None` if it is closed.
    #[inline]
    pub fn enter(&self, row_use: RowUse) -> Option<Inside<'_, T>> {
        let row = self.row(row_use.row)?;
        let open = row_use.open_word();
        let alone = row
            .word
            .compare_exchange(open, open + 1, ENTER.get(), Ordering::Relaxed)
            .is_ok();
        (alone || row.enter_beside(open)).then(|| Inside { row })
    }

    /// Closes a row, and takes its value, unless calls are inside: the last of them drops it.
    #[inline]
    pub fn close(&self, row_use: RowUse) -> Closed<T> {
        let Some(row) = self.row(row_use.row) else {
            return Closed::NotOpen;
        };
        let open = row_use.open_word();
        let alone = row
            .word
            .compare_exchange(open, open & !OPEN, CLOSE.get(), Ordering::Relaxed)
            .is_ok();
        let inside = if alone {
            Some(0)
        } else {
            row.close_beside(open)
        };
        match inside {
            Some(0) => {
                // SAFETY: `take` asks to be the only one: this call closed the row and nobody is
                // inside.
                let (value, row) = unsafe { row.take() };
                Closed::Taken(value, row)
            }
            Some(_) => Closed::InUse,
            None => Closed::NotOpen,
        }
    }

    /// Puts a row on the list of free ones.
    #[cold]
    pub fn put_back(&self, row: FreeRow) {
        lock(&self.free).rows.push(row);
    }

    #[cold]
    fn take_free(&self) -> Option<FreeRow> {
        let mut free = lock(&self.free);
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
                .map(|at| Row {
                    word: AtomicU64::new(0),
                    value: UnsafeCell::new(MaybeUninit::uninit()),
                    number: row + at,
                    list: self.free.clone(),
                })
                .collect();
            // Kept as long as the table, which is as long as the process.
            self.chunks[chunk].store(Box::into_raw(rows).cast(), Ordering::Release);
        }
        free.fresh += 1;
        Some(FreeRow(row))
    }

    #[inline]
    fn row(&self, number: u32) -> Option<&Row<T>> {
        let (chunk, at) = split(number);
        let rows = self.chunks[chunk].load(Ordering::Acquire);
        if rows.is_null() {
            return None;
        }
        // SAFETY: `add` asks to stay inside an allocation: a chunk has `rows_of` rows, and `split`
        // gives a place below.
        let row = unsafe { rows.add(at as usize) };
        // SAFETY: `&*` asks for a valid value as long as the reference: chunks are freed with the
        // table, and shared references to rows are all that anybody has.
        Some(unsafe { &*row })
    }
}

impl<T> Row<T> {
    /// Begins a use while others are inside, or says that the row is not open.
    #[cold]
    fn enter_beside(&self, open: u64) -> bool {
        let mut word = self.word.load(Ordering::Relaxed);
        while word & !INSIDE == open && word & INSIDE < INSIDE {
            match self
                .word
                .compare_exchange_weak(word, word + 1, ENTER.get(), Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(seen) => word = seen,
            }
        }
        false
    }

    /// Closes the row while others are inside, and says how many; `None` if it is not open.
    #[cold]
    fn close_beside(&self, open: u64) -> Option<u64> {
        let mut word = self.word.load(Ordering::Relaxed);
        while word & !INSIDE == open {
            match self.word.compare_exchange_weak(
                word,
                word & !OPEN,
                CLOSE.get(),
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(word & INSIDE),
                Err(seen) => word = seen,
            }
        }
        None
    }

    /// Moves a closed row's value out; it is free then, unless its generations are used up.
    ///
    /// # Safety
    ///
    /// The row is closed, no call is inside, and the caller alone found that.
    #[inline]
    unsafe fn take(&self) -> (T, Option<FreeRow>) {
        // SAFETY: `&*` asks that nobody writes meanwhile: nobody puts a value in before the row is
        // given on as free.
        let kept = unsafe { &*self.value.get() };
        // SAFETY: `assume_init_read` asks for a value that is there and not read twice: an open row
        // has one, and the caller is the only one that takes it out.
        let value = unsafe { kept.assume_init_read() };
        let generation = self.word.load(Ordering::Relaxed) >> GENERATION_SHIFT;
        (
            value,
            (generation < u64::from(LAST_GENERATION)).then_some(FreeRow(self.number)),
        )
    }
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table::new()
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        let fresh = lock(&self.free).fresh;
        for number in 0..fresh {
            let Some(row) = self.row(number) else {
                continue;
            };
            if row.word.load(Ordering::Relaxed) & OPEN != 0 {
                // SAFETY: `take` asks for a row that nobody uses any more: the table is borrowed
                // for its drop.
                drop(unsafe { row.take() });
            }
        }
        for (chunk, rows) in self.chunks.iter().enumerate() {
            let rows = rows.load(Ordering::Relaxed);
            if !rows.is_null() {
                let whole = ptr::slice_from_raw_parts_mut(rows, rows_of(chunk) as usize);
                // SAFETY: `from_raw` asks for what `into_raw` gave, with its length, once:
                // `take_free` made it.
                drop(unsafe { Box::from_raw(whole) });
            }
        }
    }
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
    if chunk == 0 {
        FIRST
    } else {
        FIRST << (chunk - 1)
    }
}

fn lock(free: &Mutex<FreeRows>) -> MutexGuard<'_, FreeRows> {
    free.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call that is inside a row: its value stays until this ends.
pub(crate) struct Inside<'a, T> {
    row: &'a Row<T>,
}

impl<T> Deref for Inside<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: reading the cell asks that nobody writes it meanwhile: nobody takes the value
        // while a call is inside.
        let value = unsafe { &*self.row.value.get() };
        // SAFETY: `assume_init_ref` asks for a value that is there: the row was open when this call
        // entered.
        unsafe { value.assume_init_ref() }
    }
}

impl<T> Inside<'_, T> {
    /// Takes the value of a row that was closed meanwhile.
    #[cold]
    fn end_last(&self) {
        // SAFETY: `take` asks to be the only one: the row is closed and this was the last call
        // inside.
        let (value, row) = unsafe { self.row.take() };
        lock(&self.row.list).rows.extend(row);
        drop(value);
    }
}

impl<T> Drop for Inside<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.row.word.fetch_sub(1, LEAVE.get()) & (OPEN | INSIDE) == 1 {
            self.end_last();
        }
    }
}

#[cfg(test)]
#[cfg(not(gpu_ipc_loom))]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Debug)]
    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Closes a row, puts it on the list, and says whether it was open.
    fn close<T>(table: &Table<T>, row_use: RowUse) -> bool {
        match table.close(row_use) {
            Closed::Taken(value, row) => {
                row.into_iter().for_each(|row| table.put_back(row));
                drop(value);
                true
            }
            Closed::InUse => true,
            Closed::NotOpen => false,
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
        let first = table.open(None, 1).expect("room");
        assert_eq!(table.enter(first).as_deref(), Some(&1));
        let Closed::Taken(1, row @ Some(_)) = table.close(first) else {
            panic!("it was open")
        };
        let second = table.open(row, 2).expect("room");
        assert_eq!(second.row, first.row, "the row is used again");
        assert!(table.enter(first).is_none() && !close(&table, first));
        assert_eq!(table.enter(second).as_deref(), Some(&2));
        assert!(close(&table, second) && !close(&table, second));
        assert_eq!(
            table.open(None, 3).expect("room").row,
            first.row,
            "by the list"
        );
    }

    #[test]
    fn the_last_call_inside_drops_what_was_closed() {
        let (drops, table) = (Arc::new(AtomicUsize::new(0)), Table::new());
        let row_use = table.open(None, Counted(drops.clone())).expect("room");
        let (one, two) = (
            table.enter(row_use).expect("open"),
            table.enter(row_use).expect("open"),
        );
        assert!(matches!(table.close(row_use), Closed::InUse));
        assert!(table.enter(row_use).is_none(), "closed to further calls");
        assert!(matches!(table.close(row_use), Closed::NotOpen));
        drop(one);
        assert_eq!(drops.load(Ordering::Relaxed), 0);
        drop(two);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        assert_eq!(
            table.open(None, Counted(drops.clone())).expect("room").row,
            row_use.row,
            "the row is free"
        );
        drop(table);
        assert_eq!(
            drops.load(Ordering::Relaxed),
            2,
            "a table drops what is open"
        );
    }

    #[test]
    fn a_row_whose_generations_are_used_up_is_left() {
        let table = Table::new();
        let row_use = table.open(None, 7).expect("room");
        let last = RowUse {
            generation: LAST_GENERATION,
            ..row_use
        };
        table
            .row(row_use.row)
            .expect("a row")
            .word
            .store(last.open_word(), Ordering::Relaxed);
        assert!(matches!(table.close(last), Closed::Taken(7, None)));
        assert_ne!(table.open(None, 8).expect("room").row, row_use.row);
    }

    #[test]
    fn threads_close_what_others_are_in() {
        let (drops, table) = (Arc::new(AtomicUsize::new(0)), Table::new());
        let rounds = if cfg!(miri) { 20 } else { 500 };
        for _ in 0..rounds {
            let row_use = table.open(None, Counted(drops.clone())).expect("room");
            std::thread::scope(|scope| {
                let closers: Vec<_> = (0..2)
                    .map(|_| scope.spawn(|| close(&table, row_use)))
                    .collect();
                for _ in 0..3 {
                    if let Some(inside) = table.enter(row_use) {
                        assert!(Arc::strong_count(&inside.0) > 1);
                    }
                }
                let closed = closers
                    .into_iter()
                    .filter_map(|closer| closer.join().ok())
                    .filter(|closed| *closed);
                assert_eq!(closed.count(), 1, "one of them closed it");
            });
        }
        assert_eq!(drops.load(Ordering::Relaxed), rounds);
    }
}
