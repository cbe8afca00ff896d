//! The Python thread that empties the [`queue`] of what other threads leave to the interpreter.
//!
//! It is called `gpu-ipc`, a daemon that `atexit` stops; what is given up after that is leaked.
//!
//! The thread sleeps in one `poll`: on a descriptor of the queue, and on that of each session's
//! notices, which says when adopted memory is its owner's again. Nothing says when somebody resizes
//! a storage that is lent, so while PyTorch's storages are, it looks at them once a second.
//!
//! [`queue`]: super::queue

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::errors::OrRaise;
use super::logging;
use super::process::process;
use super::queue::Work;

/// Starts the thread, unless it runs.
pub(crate) fn start(py: Python<'_>) -> PyResult<()> {
    static START: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let queue = &process().queue;
    if !queue.open().or_raise()? {
        return Ok(());
    }
    let start = START.get_or_try_init(py, || {
        py.import("gpu_ipc._threads")?
            .getattr("start")
            .map(Bound::unbind)
    });
    let started = start.and_then(|start| start.call0(py));
    if started.is_err() {
        queue.abandon();
    }
    started.map(drop)
}

/// Run the thread that empties the queue, until `_stop`.
#[pyfunction(name = "_keep")]
pub(crate) fn keep(py: Python<'_>) {
    let queue = &process().queue;
    loop {
        let Some(Work {
            garbage,
            lines,
            heard,
            lenders,
        }) = py.detach(|| queue.next())
        else {
            return;
        };
        drop(garbage);
        lines.into_iter().for_each(|line| logging::tell(py, line));
        // Asked without the interpreter's lock, dropped with it: a `__del__` may run here, and no
        // lock of ours is held.
        let returned: Vec<_> = py.detach(|| heard.iter().map(|session| session.hear()).collect());
        drop(returned);
        lenders.iter().for_each(|lender| lender.look_for_freed(py));
        py.detach(|| {
            drop((heard, lenders));
            drop(queue.let_go());
        });
    }
}

/// Stop the thread. What is given up from here on is leaked.
#[pyfunction(name = "_stop")]
pub(crate) fn stop() {
    drop(process().queue.stop());
}
