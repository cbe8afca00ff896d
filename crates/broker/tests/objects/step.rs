//! Dies at a named step, and leaves word of it.

use std::path::{Path, PathBuf};

/// The file of a step that a process in this directory has died at: a case whose step nobody
/// reaches shows nothing.
pub fn tombstone(dir: &Path, step: &str) -> PathBuf {
    dir.join(format!("died at {step}"))
}

/// Dies when the step is reached, if there is one.
pub fn listen(dir: &Path, step: Option<String>) {
    if let Some(step) = step {
        harness::step::die_at(&step, Some(tombstone(dir, &step)));
    }
}
