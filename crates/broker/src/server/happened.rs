//! What the threads that may wait tell the one that serves.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use transport::os::waker::Waker;

use crate::keeper::depositor::Fed;
use crate::object::identity::Identity;
use crate::object::manifest::Manifest;
use crate::server::action::KeepError;
use crate::server::catalogue::draft::Site;
use crate::server::limits::Limits;
use crate::server::record::Record;
use transport::server::{Allowed, Refused};

/// A descriptor that keeps memory.
pub(super) type File = Arc<OwnedFd>;

/// What the other threads did.
pub(super) enum Happened {
    Drafted(Identity, Result<(Box<Manifest>, Site), Refused>),
    Made(Identity, Result<Vec<File>, Refused>),
    Kept(Identity, Result<File, KeepError>),
    /// The number of a record, what it says, and whether the keeper has it.
    Recorded(u64, Box<Record>, Result<File, KeepError>),
    Forgotten(u64, Result<(), KeepError>),
    /// Whether a keeper is there.
    Looked(bool),
    Fed(Result<Fed, KeepError>),
    /// What is allowed from here on, or why it stays as it is.
    Changed(Result<Box<(Limits, Allowed)>, String>),
}

/// How another thread tells the service what it did.
#[derive(Clone, Debug)]
pub(super) struct Teller {
    pub sender: Sender<Happened>,
    pub waker: Arc<Waker>,
}

impl Teller {
    pub(super) fn tell(&self, happened: Happened) {
        // Without a service the process ends.
        let _ = self.sender.send(happened);
        self.waker.wake();
    }
}
