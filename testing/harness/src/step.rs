//! A death at a named step of the library's life cycle, by SIGKILL, as by a machine's out-of-memory
//! killer.

use std::fmt;
use std::path::PathBuf;
use std::sync::OnceLock;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// The step, and the file that is made there.
static STEP: OnceLock<(String, Option<PathBuf>)> = OnceLock::new();

/// Dies when the step is reached the next time, and leaves a file if it is given a place for one: a
/// test whose step nobody reaches shows nothing.
///
/// # Panics
///
/// The second time, and if another subscriber hears the process's events.
pub fn die_at(step: &str, tombstone: Option<PathBuf>) {
    STEP.set((step.to_owned(), tombstone)).expect("told once");
    tracing::subscriber::set_global_default(Listener).expect("nobody else listens");
}

/// Tells of a step that the library does not know, because it is the application's.
pub fn reached(step: &str) {
    if let Some((_, tombstone)) = STEP.get().filter(|(at, _)| at == step) {
        if let Some(path) = tombstone {
            std::fs::write(path, []).expect("a file in the directory that all share");
        }
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::KILL)
            .expect("a process can kill itself");
        loop {
            std::thread::park();
        }
    }
}

struct Listener;

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "gpu_ipc::step"
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Killer);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Killer;

impl Visit for Killer {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "step" {
            reached(value);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}
