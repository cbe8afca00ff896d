//! The questions that are on their way to a broker.
//!
//! | state | means | goes to |
//! |---|---|---|
//! | asked | sent, or to be sent; repeated as [`transport::client::Questions`] does | answered, lost |
//! | answered | the answer waits for the asker | taken |
//! | lost | the broker went, and the question was about what went with it | taken |
//!
//! An answer is known by its number; one that nobody waits for is dropped with its descriptors. A
//! question that may be put to any broker (open, watch, remove, outcome) is asked again of the next
//! one; one about an object that is being filled is lost with the broker, for its memory is. A
//! commit that was asked for turns into the question for its outcome. Checked by `model`.

#[cfg(test)]
mod model;

use ipc_rc::Gone;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use gpu_api::Error;
use transport::client::{self, Unsent};
use transport::os::socket::{self, SendOutcome};
use transport::wire::table::{self, Message};

use super::commit::CommitCell;
use super::connection::{Connection, nonsense};
use super::histories::Histories;
use crate::error::{ObjectError, Result};
use crate::object::identity::Identity;
use crate::wire::{MOST_BYTES, RefusalCode, Standing, ToBroker, ToClient};

pub(super) type Answer = (ToClient, Vec<OwnedFd>);

/// The call that an answer is for.
pub(super) enum Waiter {
    /// A thread that looks for it.
    Asker,
    /// A commit.
    Commit(Arc<CommitCell>, Identity),
    /// Nobody: it is only repeated until it is heard.
    Nobody,
}

struct Row {
    message: ToBroker,
    fds: Vec<OwnedFd>,
    waiter: Waiter,
    /// May be put to another broker.
    survives: bool,
    answer: Option<Result<Answer>>,
}

impl client::Row for Row {
    fn is_asked(&self) -> bool {
        self.answer.is_none()
    }
}

/// All of them, and the broker that they are put to.
pub(super) struct Questions {
    pub connection: Option<Arc<Connection>>,
    pub histories: Histories,
    table: client::Questions<u64, Row>,
}

impl Questions {
    pub(super) fn new(connection: Connection) -> Questions {
        Questions {
            histories: Histories::new(connection.lineage),
            connection: Some(Arc::new(connection)),
            table: client::Questions::default(),
        }
    }

    /// Asks a question. One that goes with this broker is lost at once where there is none.
    pub(super) fn begin(
        &mut self,
        message: impl FnOnce(u64) -> ToBroker,
        fds: Vec<OwnedFd>,
        waiter: Waiter,
        survives: bool,
    ) -> u64 {
        let request = self.table.number();
        let mut message = message(request);
        if let Some(connection) = &self.connection {
            self.histories.translate(&mut message, connection.lineage);
        }
        let mut row = Row {
            message,
            fds,
            waiter,
            survives,
            answer: None,
        };
        if self.connection.is_none() && !survives {
            if matches!(row.waiter, Waiter::Nobody) {
                return request;
            }
            row.answer = Some(Err(lost(&row.message)));
        }
        let now = Instant::now();
        self.table.begin(request, request, row, now);
        self.send_due(now);
        request
    }

    /// Sends the questions that are due, if there is a broker.
    pub(super) fn send_due(&mut self, now: Instant) {
        let Some(connection) = &self.connection else {
            return;
        };
        while let Some((request, row)) = self.table.first_due(now) {
            let mut bytes = [0; MOST_BYTES];
            let fds: Vec<BorrowedFd<'_>> = row.fds.iter().map(AsFd::as_fd).collect();
            let len = table::encode(&row.message, &mut bytes, connection.version);
            // A hang-up is found by the thread.
            let sent = match socket::send(&connection.socket, &bytes[..len], &fds) {
                Ok(SendOutcome::Sent) => Ok(()),
                Ok(SendOutcome::Full | SendOutcome::HungUp) | Err(_) => Err(Unsent),
            };
            self.table.note_sent(request, sent, now);
            if sent.is_err() {
                break;
            }
        }
    }

    /// Takes an answer.
    pub(super) fn hear(&mut self, message: ToClient, fds: Vec<OwnedFd>) {
        let request = message.request();
        let Some(row) = self.table.get_mut(request) else {
            return;
        };
        if row.answer.is_some() {
            return;
        }
        let now = self.connection.as_ref().and_then(|now| now.lineage);
        self.histories.hear(&row.message, &message, now);
        match &row.waiter {
            Waiter::Asker => {
                row.answer = Some(Ok((message, fds)));
                self.table.plan(request);
            }
            Waiter::Nobody => drop(self.table.remove(request)),
            Waiter::Commit(cell, identity) => {
                let done = match message {
                    ToClient::Committed { epoch, .. } => Ok(epoch),
                    ToClient::Outcome {
                        standing: Standing::Committed(epoch),
                        ..
                    } => Ok(epoch),
                    // The broker that was asked before has not died yet, or has not decided.
                    ToClient::Outcome {
                        standing: Standing::Unfinished,
                        ..
                    } => return,
                    ToClient::Outcome {
                        standing: Standing::Unknown,
                        ..
                    } => Err(ObjectError::WriterLost {
                        identity: *identity,
                    }),
                    ToClient::Declined { refusal, why, .. } => {
                        Err(declined(refusal, why, &row.message))
                    }
                    _ => Err(nonsense()),
                };
                cell.set(done);
                self.table.remove(request);
            }
        }
    }

    /// Takes the answer to a question, which is over then.
    pub(super) fn take(&mut self, request: u64) -> Option<Result<Answer>> {
        let answer = self.table.get_mut(request)?.answer.take()?;
        let row = self.table.remove(request)?;
        Some(answer.and_then(|answer| refused(answer, &row.message)))
    }

    /// Takes a question back.
    pub(super) fn withdraw(&mut self, request: u64) {
        self.table.remove(request);
    }

    /// Says whether a name is watched.
    pub(super) fn watches(&self, name: &str) -> bool {
        self.table
            .iter()
            .any(|(_, row)| matches!(&row.message, ToBroker::Watch { name: of, .. } if of == name))
    }

    /// Says when the next question is repeated.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.connection.as_ref().and(self.table.next_due())
    }

    /// Says whether a commit waits for its answer.
    pub(super) fn has_commits(&self) -> bool {
        self.table
            .iter()
            .any(|(_, row)| matches!(row.waiter, Waiter::Commit(..)))
    }

    /// Loses the broker: what went with it is told, and the rest is asked of the next one.
    pub(super) fn lose(&mut self) {
        self.connection = None;
        let mut outcomes = Vec::new();
        let requests: Vec<u64> = self.table.iter().map(|(request, _)| request).collect();
        for request in requests {
            let Some(row) = self.table.get_mut(request) else {
                continue;
            };
            match &row.waiter {
                Waiter::Commit(cell, identity)
                    if matches!(row.message, ToBroker::Commit { .. }) =>
                {
                    outcomes.push((cell.clone(), *identity));
                    self.table.remove(request);
                }
                // What it was about has gone with the broker.
                Waiter::Nobody => drop(self.table.remove(request)),
                _ if !row.survives && row.answer.is_none() => {
                    row.answer = Some(Err(lost(&row.message)));
                    self.table.plan(request);
                }
                _ => {}
            }
        }
        for (cell, identity) in outcomes {
            let ask = |request| ToBroker::AskOutcome { request, identity };
            self.begin(ask, Vec::new(), Waiter::Commit(cell, identity), true);
        }
    }

    /// Asks the next broker everything.
    pub(super) fn welcome(&mut self, connection: Connection) {
        let requests: Vec<u64> = self.table.iter().map(|(request, _)| request).collect();
        for request in requests {
            if let Some(row) = self.table.get_mut(request) {
                self.histories
                    .translate(&mut row.message, connection.lineage);
            }
        }
        self.connection = Some(Arc::new(connection));
        let now = Instant::now();
        self.table.ask_all(now);
        self.send_due(now);
    }
}

fn refused(answer: Answer, question: &ToBroker) -> Result<Answer> {
    match answer {
        (ToClient::Declined { refusal, why, .. }, _) => Err(declined(refusal, why, question)),
        answer => Ok(answer),
    }
}

fn declined(refusal: RefusalCode, why: String, question: &ToBroker) -> ObjectError {
    match refusal {
        RefusalCode::NotFound => {
            let name = match question {
                ToBroker::Open { selector, .. } => selector.to_string(),
                ToBroker::Remove { name, .. }
                | ToBroker::Watch { name, .. }
                | ToBroker::Adopt { name, .. }
                | ToBroker::ReadPool { name, .. } => name.clone(),
                _ => "the object".into(),
            };
            ObjectError::NotFound { name, why }
        }
        RefusalCode::Conflict => ObjectError::Conflict { why },
        RefusalCode::OutOfMemory => ObjectError::OutOfMemory { why },
        refusal => ObjectError::Refused {
            refusal,
            why,
            remedy: refusal.remedy(),
        },
    }
}

fn lost(question: &ToBroker) -> ObjectError {
    match question {
        ToBroker::Create { identity, .. } | ToBroker::Commit { identity, .. } => {
            ObjectError::WriterLost {
                identity: *identity,
            }
        }
        _ => Error::from(Gone::Producer { pid: 0 }).into(),
    }
}
