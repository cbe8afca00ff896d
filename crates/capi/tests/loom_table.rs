//! The table of handles under a model checker:
//! `RUSTFLAGS="--cfg gpu_ipc_loom" cargo test -p gpu-ipc-capi --test loom_table`.
//!
//! The crate itself is empty there, so that nothing below it is built: this is the shipped file.
//! What a row holds is a cell of loom's, written before it is opened, read by calls inside and
//! written by its drop. So a missing order is a data race that loom reports.
#![cfg(gpu_ipc_loom)]

#[allow(dead_code, reason = "the model has rows, and no pointers of C's")]
#[path = "../src/handle.rs"]
mod handle;
#[path = "../src/table.rs"]
mod table;

use std::sync::atomic::{AtomicU32, Ordering};

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use table::{Closed, RowUse, Table};

struct Value {
    number: UnsafeCell<u32>,
    /// Not loom's, so that counting orders nothing.
    drops: std::sync::Arc<AtomicU32>,
}

// SAFETY: the number is touched only as the table allows, which is what loom checks here.
unsafe impl Sync for Value {}
// SAFETY: as above.
unsafe impl Send for Value {}

impl Value {
    fn write(&self, number: u32) {
        self.number.with_mut(|row_use| {
            // SAFETY: loom checks that nobody else touches the cell meanwhile.
            unsafe { *row_use = number }
        });
    }

    fn read(&self) -> u32 {
        self.number.with(|row_use| {
            // SAFETY: loom checks that nobody writes the cell meanwhile.
            unsafe { *row_use }
        })
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.write(0);
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

struct Model {
    table: Arc<Table<Value>>,
    drops: std::sync::Arc<AtomicU32>,
}

/// The place that the first open of a table gives.
const FIRST: RowUse = RowUse {
    row: 0,
    generation: 1,
};

impl Model {
    fn new() -> Model {
        Model {
            table: Arc::new(Table::new()),
            drops: std::sync::Arc::default(),
        }
    }

    /// Makes a table with one open row.
    fn open() -> Model {
        let model = Model::new();
        assert_eq!(model.table.open(None, model.value(1)).ok(), Some(FIRST));
        model
    }

    fn value(&self, number: u32) -> Value {
        let value = Value {
            number: UnsafeCell::new(0),
            drops: self.drops.clone(),
        };
        value.write(number);
        value
    }

    fn spawn<R: 'static>(
        &self,
        run: impl FnOnce(&Table<Value>) -> R + 'static,
    ) -> thread::JoinHandle<R> {
        let table = self.table.clone();
        thread::spawn(move || run(&table))
    }

    fn drops(&self) -> u32 {
        self.drops.load(Ordering::Relaxed)
    }
}

/// Makes a call, which finds the value of its own handle if it finds one.
fn visit(table: &Table<Value>, row_use: RowUse) -> bool {
    let inside = table.enter(row_use);
    inside
        .as_ref()
        .inspect(|value| assert_eq!(value.read(), row_use.generation))
        .is_some()
}

fn close(table: &Table<Value>, row_use: RowUse) -> bool {
    match table.close(row_use) {
        Closed::Taken(value, row) => {
            assert_eq!(value.read(), row_use.generation);
            row.into_iter().for_each(|row| table.put_back(row));
            true
        }
        Closed::InUse => true,
        Closed::NotOpen => false,
    }
}

/// `OPENED` pairs with `ENTER`. The row was used before, so that nothing but its word brings the
/// value over.
#[test]
fn a_call_that_finds_a_row_open_sees_its_value() {
    loom::model(|| {
        let model = Model::open();
        let Closed::Taken(_, row) = model.table.close(FIRST) else {
            panic!("nobody is inside")
        };
        let second = RowUse {
            generation: 2,
            ..FIRST
        };
        let caller = model.spawn(move |table| visit(table, second));
        assert_eq!(model.table.open(row, model.value(2)).ok(), Some(second));
        caller.join().unwrap();
        assert!(visit(&model.table, second));
    });
}

/// `LEAVE` pairs with `CLOSE`: the later of close and leave drops the value, once, after all use.
#[test]
fn what_is_closed_while_a_call_is_inside_goes_after_it() {
    loom::model(|| {
        let model = Model::open();
        let caller = model.spawn(|table| visit(table, FIRST));
        assert!(close(&model.table, FIRST));
        assert!(!visit(&model.table, FIRST));
        caller.join().unwrap();
        assert_eq!(model.drops(), 1);
    });
}

/// `LEAVE` pairs with `LEAVE`: the last of several calls drops the value after all others' use.
#[test]
fn the_last_of_two_calls_drops_what_was_closed() {
    loom::model(|| {
        let model = Model::open();
        let callers = [0, 1].map(|_| model.spawn(|table| visit(table, FIRST)));
        assert!(close(&model.table, FIRST));
        for caller in callers {
            caller.join().unwrap();
        }
        assert_eq!(model.drops(), 1);
    });
}

#[test]
fn one_of_two_closes_a_row() {
    loom::model(|| {
        let model = Model::open();
        let closers = [0, 1].map(|_| model.spawn(|table| close(table, FIRST)));
        visit(&model.table, FIRST);
        let closed = closers.into_iter().map(|closer| closer.join().unwrap());
        assert_eq!(closed.filter(|closed| *closed).count(), 1);
        assert_eq!(model.drops(), 1);
    });
}

/// A handle of an earlier use neither enters nor closes the next one, nor does it keep the next one
/// open.
#[test]
fn a_stale_handle_does_nothing_to_the_next_use_of_its_row() {
    loom::model(|| {
        let model = Model::open();
        let caller = model.spawn(|table| (visit(table, FIRST), close(table, FIRST)));
        let closed = match model.table.close(FIRST) {
            Closed::Taken(value, row) => {
                drop(value);
                // In its own row, as the next open of the thread that closed it.
                let next = model.table.open(row, model.value(2)).expect("room");
                assert_eq!(
                    next,
                    RowUse {
                        generation: 2,
                        ..FIRST
                    }
                );
                assert!(visit(&model.table, next) && close(&model.table, next));
                true
            }
            Closed::InUse => true,
            Closed::NotOpen => false,
        };
        let (_, closed_there) = caller.join().unwrap();
        assert!(closed != closed_there, "one of the two");
    });
}

/// A row that one thread freed is another's by the list.
#[test]
fn a_free_row_goes_from_thread_to_thread() {
    loom::model(|| {
        let model = Model::open();
        let closer = model.spawn(|table| close(table, FIRST));
        let row_use = model.table.open(None, model.value(2)).expect("room");
        if row_use.row == FIRST.row {
            assert_eq!(row_use.generation, 2);
            assert!(visit(&model.table, row_use));
        }
        assert!(closer.join().unwrap());
        drop(model.table.close(row_use));
        assert_eq!(model.drops(), 2);
    });
}
