//! What is dropped with the interpreter's lock, whichever thread gives it up.

use std::cell::RefCell;

use pyo3::Python;

use super::process::process;

thread_local! {
    /// What this thread has given up during a [`Call`]; `None` outside of one.
    static GIVEN_UP: RefCell<Option<Vec<Box<dyn Send>>>> = const { RefCell::new(None) };
}

/// Something of Python's. Its drop leaves it to the thread's [`Call`], or else to the keeper, and
/// takes no lock of Python's.
pub(crate) struct Later<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Later<T> {
    pub fn new(one: T) -> Later<T> {
        Later(Some(one))
    }
}

impl<T: Send + 'static> Drop for Later<T> {
    fn drop(&mut self) {
        let Some(one) = self.0.take() else { return };
        let mut one = Some(Box::new(one) as Box<dyn Send>);
        // A thread at its end, whose variables are gone, is in no call.
        let _ = GIVEN_UP.try_with(|given_up| {
            if let Some(given_up) = &mut *given_up.borrow_mut() {
                given_up.extend(one.take());
            }
        });
        if let Some(one) = one {
            process().queue.drop_later(one);
        }
    }
}

/// A call from Python. What its thread gives up meanwhile, with the interpreter's lock or without,
/// is dropped at its end, with the lock: to leave it to the keeper costs a wake-up, and the keeper
/// takes the lock from this thread.
///
/// It stays on the thread that began it, since `Python` does.
pub(crate) struct Call<'py> {
    _py: Python<'py>,
    /// That of the call whose Python code made this one.
    outer: Option<Vec<Box<dyn Send>>>,
}

impl<'py> Call<'py> {
    pub fn begin(py: Python<'py>) -> Call<'py> {
        Call {
            _py: py,
            outer: GIVEN_UP.replace(Some(Vec::new())),
        }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let given_up = GIVEN_UP.replace(self.outer.take());
        // Outside of the borrow: a `__del__` may make calls of its own.
        drop(given_up);
    }
}
