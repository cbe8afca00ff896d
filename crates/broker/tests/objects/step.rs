//! Dies at a named step, by SIGKILL, as a machine's out-of-memory killer would.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

static STEP: OnceLock<(String, PathBuf)> = OnceLock::new();

/// The file of a step that a process in this directory has died at: a case whose step nobody reaches shows nothing.
pub fn tombstone(dir: &Path, step: &str) -> PathBuf {
    dir.join(format!("died at {step}"))
}

/// Dies when the step is reached, if there is one.
pub fn listen(dir: &Path, step: Option<String>) {
    if let Some(step) = step {
        let tombstone = tombstone(dir, &step);
        STEP.set((step, tombstone)).expect("told once");
        tracing::subscriber::set_global_default(Listener).expect("nobody else listens");
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
        if field.name() == "step"
            && let Some((_, tombstone)) = STEP.get().filter(|(step, _)| step == value)
        {
            std::fs::write(tombstone, []).expect("a file in the directory that all share");
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::KILL).expect("a process can kill itself");
            loop {
                std::thread::park();
            }
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}
