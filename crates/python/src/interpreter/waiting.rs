//! Waits that Ctrl-C ends.
//!
//! A wait runs without the interpreter's lock, in slices; after each Python's signal handlers run.
//! A wait ends early when what it waits for comes, so the slices cost nothing but their end.

use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use pyo3::call::PyCallArgs;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::errors::{invalid, raise};

/// The longest that Ctrl-C waits for an answer.
const SLICE: Duration = Duration::from_millis(50);

/// Reads a time in seconds; `None`, and infinity, wait for ever.
pub(crate) fn duration(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let Some(seconds) = seconds else {
        return Ok(None);
    };
    if seconds == f64::INFINITY {
        return Ok(None);
    }
    Duration::try_from_secs_f64(seconds).map(Some).map_err(|_| {
        invalid(
            "a time",
            seconds,
            "a number of seconds that is not negative, or None",
        )
    })
}

/// Calls `wait` with no lock held, slice after slice, until it gives something or the time is over.
///
/// `wait` is told how long it may take. `None` says that the time was over first.
pub(crate) fn in_slices<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut wait: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = deadline.map_or(SLICE, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        });
        let slice = left.min(SLICE);
        if let Some(done) = py.detach(|| wait(slice)) {
            return Ok(Some(done));
        }
        py.check_signals()?;
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
    }
}

/// Calls `wait` with no lock held, slice after slice, until it gives something.
pub(crate) fn for_ever<T: Send>(
    py: Python<'_>,
    mut wait: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<T> {
    loop {
        if let Some(done) = in_slices(py, None, &mut wait)? {
            return Ok(done);
        }
    }
}

/// What `gpu_ipc._aio` keeps for an object that coroutines wait for.
#[derive(Default)]
pub(crate) struct Waiters(Mutex<Option<Py<PyAny>>>);

impl Waiters {
    pub fn get(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(|waiters| waiters.clone_ref(py))
    }

    pub fn set(&self, waiters: Option<Py<PyAny>>) {
        let before = std::mem::replace(
            &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner),
            waiters,
        );
        // With no lock held: it may be anything.
        drop(before);
    }
}

/// Calls a coroutine function of `gpu_ipc._aio`.
pub(crate) fn coroutine<'py>(
    py: Python<'py>,
    name: &str,
    arguments: impl PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    py.import("gpu_ipc._aio")?.call_method1(name, arguments)
}

/// Calls what cannot be asked in slices on a thread of its own, and waits for it.
///
/// An exception of a signal handler leaves the call to its own end; what it gives is dropped there.
pub(crate) fn aside<T: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    // Nothing listens any more after an exception.
    thread::start("gpu-ipc-wait", move || drop(sender.send(call()))).map_err(raise)?;
    let done = for_ever(py, move |slice| match receiver.recv_timeout(slice) {
        Ok(done) => Some(Some(done)),
        Err(mpsc::RecvTimeoutError::Timeout) => None,
        Err(mpsc::RecvTimeoutError::Disconnected) => Some(None),
    })?;
    done.ok_or_else(|| PyRuntimeError::new_err("a wait of gpu_ipc panicked: a bug of the library"))
}
