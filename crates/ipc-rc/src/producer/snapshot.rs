//! The snapshot of a session's source of regions.

use std::os::fd::OwnedFd;

use crate::producer::core::Core;
use transport::shared::sealed_file;
use transport::wire::message::{MOST_SNAPSHOT, RefusalCode, ToParticipant};

impl Core {
    /// Answers a request for a snapshot; the file goes with the message.
    pub(crate) fn snapshot(&self, request: u64) -> (ToParticipant, Option<OwnedFd>) {
        let declined = |code, why: String| (ToParticipant::Declined { request, code, why }, None);
        let Some(text) = self
            .memory
            .ask_source(|source| source.snapshot(self, MOST_SNAPSHOT as usize))
            .flatten()
        else {
            let why = "the session's source of regions has no snapshot".into();
            return declined(RefusalCode::Snapshot, why);
        };
        let len = text.len() as u64;
        if !(1..=MOST_SNAPSHOT).contains(&len) {
            return declined(
                RefusalCode::Failed,
                format!("the snapshot is of {len} bytes, at most 16,777,216 go"),
            );
        }
        match sealed_file::create("gpu-ipc-snapshot", text.as_bytes()) {
            Ok(file) => (ToParticipant::Snapshot { request, len }, Some(file)),
            Err(error) => declined(RefusalCode::Failed, error.to_string()),
        }
    }
}
