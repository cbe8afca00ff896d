//! What the library tells `tracing`, and its panics, told to Python's `logging`.
//!
//! `tracing` hands its events on to `log`, as text. They come on any thread, with any lock held, so
//! they are logged by the keeper's thread.

use std::sync::Once;

use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::process::process;
use super::queue::Line;

/// Takes in what is logged from here on, at the level that the logger has at this moment.
pub(crate) fn listen(py: Python<'_>) {
    static ONCE: Once = Once::new();
    // The first of this library: its `log` and its panics are its own, whatever other libraries of
    // the process have.
    ONCE.call_once(|| {
        drop(log::set_logger(&ToPython));
        std::panic::set_hook(Box::new(|panic| {
            let thread = std::thread::current();
            error_later(format!(
                "{} panicked: {panic}",
                thread.name().unwrap_or("a thread")
            ));
        }));
    });
    if let Ok(level) = logger(py).and_then(|logger| {
        logger
            .call_method0(py, "getEffectiveLevel")?
            .extract::<u32>(py)
    }) {
        let wanted = Level::iter()
            .filter(|known| u32::from(number(*known)) >= level)
            .max();
        log::set_max_level(wanted.map_or(LevelFilter::Off, |level| level.to_level_filter()));
    }
}

/// Logs a line. An error of a handler is the handler's.
pub(crate) fn tell(py: Python<'_>, line: Line) {
    if let Ok(logger) = logger(py) {
        let _ = logger.call_method1(py, "log", (line.level, "%s", line.text));
    }
}

/// Leaves an error to be logged, from any thread.
pub(crate) fn error_later(text: String) {
    process().queue.log(Line {
        level: number(Level::Error),
        text,
    });
}

/// Logs an error from a Python thread.
pub(crate) fn error(py: Python<'_>, text: String) {
    tell(
        py,
        Line {
            level: number(Level::Error),
            text,
        },
    );
}

fn logger(py: Python<'_>) -> PyResult<&Py<PyAny>> {
    static LOGGER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    LOGGER.get_or_try_init(py, || {
        Ok(py
            .import("logging")?
            .call_method1("getLogger", ("gpu_ipc",))?
            .unbind())
    })
}

/// Returns Python's number of a level.
fn number(level: Level) -> u8 {
    match level {
        Level::Error => 40,
        Level::Warn => 30,
        Level::Info => 20,
        Level::Debug => 10,
        Level::Trace => 5,
    }
}

struct ToPython;

impl Log for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            process().queue.log(Line {
                level: number(record.level()),
                text: record.args().to_string(),
            });
        }
    }

    fn flush(&self) {}
}
