//! A subscriber of the library's events that panics, for tests of what the end of a session's
//! thread leaves.

use std::thread;

use pyo3::prelude::*;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::interpreter::errors::invalid;

/// The thread of a session, by its name.
const SESSION: &str = "gpu-ipc-session";

/// Panic on the thread of any session when it has something to say, as when a participant connects.
#[pyfunction(name = "_panic_on_sessions_thread")]
pub(crate) fn panic_on_sessions_thread() -> PyResult<()> {
    tracing::subscriber::set_global_default(Panics)
        .map_err(|error| invalid("the subscriber of this process", error, "set once"))
}

struct Panics;

impl Subscriber for Panics {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        assert_ne!(thread::current().name(), Some(SESSION), "on purpose");
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
