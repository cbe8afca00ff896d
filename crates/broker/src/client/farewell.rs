//! What is told when a hold of a pool ends.

use std::io::PipeWriter;

use super::journal::Journal;
use crate::object::identity::Identity;
use crate::wire::ToBroker;

/// Ends a hold once nothing of it is left here.
#[derive(Debug)]
pub(super) struct Farewell {
    /// Unregistered before the broker is told.
    pub journal: Option<Journal>,
    pub token: Identity,
    pub name: String,
    /// Forked children have it too: it hangs up with the last of them.
    pub _line: PipeWriter,
}

impl Farewell {
    /// Lets go of the journal, and returns what to tell the broker.
    pub(super) fn take(mut self) -> impl FnOnce(u64) -> ToBroker {
        self.journal = None;
        let (token, name) = (self.token, std::mem::take(&mut self.name));
        move |request| ToBroker::Release {
            request,
            token,
            name,
        }
    }
}
