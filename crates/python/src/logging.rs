//! What the library tells `tracing`, told to Python's `logging`.
//!
//! Events come on any thread, with any lock held, so they are turned into text there and logged by the keeper's thread.

use std::fmt::{self, Write as _};
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::process::process;

/// A line to log.
pub(crate) struct Line {
    level: u8,
    text: String,
}

/// The least level, as Python numbers them, that the logger `gpu_ipc` wants.
static WANTED: AtomicU8 = AtomicU8::new(30);

/// Takes in what is logged from here on, at the level that the logger has at this moment.
pub(crate) fn listen(py: Python<'_>) {
    static ONCE: Once = Once::new();
    // The first of this library: its `tracing` is its own, whatever other libraries of the process have.
    ONCE.call_once(|| drop(tracing::subscriber::set_global_default(ToPython)));
    if let Ok(level) = logger(py).and_then(|logger| logger.call_method0(py, "getEffectiveLevel")?.extract::<u32>(py)) {
        WANTED.store(u8::try_from(level.max(1)).unwrap_or(u8::MAX), Ordering::Relaxed);
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
    process().keeper.log(Line { level: 40, text });
}

/// Logs an error from a Python thread.
pub(crate) fn error(py: Python<'_>, text: String) {
    tell(py, Line { level: 40, text });
}

fn logger(py: Python<'_>) -> PyResult<&Py<PyAny>> {
    static LOGGER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    LOGGER.get_or_try_init(py, || Ok(py.import("logging")?.call_method1("getLogger", ("gpu_ipc",))?.unbind()))
}

fn number(level: &Level) -> u8 {
    match *level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

struct ToPython;

impl Subscriber for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        number(metadata.level()) >= WANTED.load(Ordering::Relaxed)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        process().keeper.log(Line { level: number(event.metadata().level()), text: text.0 });
    }

    // The library opens no spans.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// An event's message, with its fields behind.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match (field.name(), self.0.is_empty()) {
            ("message", true) => write!(self.0, "{value:?}"),
            ("message", false) => {
                let fields = std::mem::take(&mut self.0);
                write!(self.0, "{value:?} {fields}")
            }
            (name, true) => write!(self.0, "{name}={value:?}"),
            (name, false) => write!(self.0, " {name}={value:?}"),
        };
    }
}
