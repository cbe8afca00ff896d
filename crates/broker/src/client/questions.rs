//! The questions that are on their way to a broker.
//!
//! | state | means | goes to |
//! |---|---|---|
//! | asked | sent, or to be sent; repeated after 100, 200, 400, 800, 1,000, 1,000 ... ms | answered, lost |
//! | answered | the answer waits for the asker | taken |
//! | lost | the broker went, and the question was about what went with it | taken |
//!
//! An answer is known by its number; one that nobody waits for is dropped with its descriptors. A
//! question that may be put to any broker (open, watch, remove, outcome) is asked again of the next
//! one; one about an object that is being filled is lost with the broker, for its memory is. A
//! commit that was asked for turns into the question for its outcome.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_api::Error;
use transport::os::socket;
use transport::wire::table::{self, Message};

use super::commit::CommitCell;
use super::connection::{Connection, nonsense};
use crate::error::{ObjectError, Result};
use crate::object::identity::Identity;
use crate::wire::{MOST_BYTES, RefusalCode, Standing, ToBroker, ToClient};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

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
    due: Instant,
    pause: Duration,
}

/// All of them, and the broker that they are put to.
pub(super) struct Questions {
    pub connection: Option<Arc<Connection>>,
    rows: BTreeMap<u64, Row>,
    next_request: u64,
}

impl Questions {
    pub(super) fn new(connection: Connection) -> Questions {
        Questions {
            connection: Some(Arc::new(connection)),
            rows: BTreeMap::new(),
            next_request: 1,
        }
    }

    /// Notes a question. One that goes with this broker is lost at once where there is none.
    pub(super) fn begin(
        &mut self,
        message: impl FnOnce(u64) -> ToBroker,
        fds: Vec<OwnedFd>,
        waiter: Waiter,
        survives: bool,
    ) -> u64 {
        let request = self.next_request;
        self.next_request += 1;
        let (due, pause) = (Instant::now() + FIRST_PAUSE, FIRST_PAUSE);
        let mut row = Row {
            message: message(request),
            fds,
            waiter,
            survives,
            answer: None,
            due,
            pause,
        };
        if self.connection.is_none() && !survives {
            row.answer = Some(Err(lost(&row.message)));
        }
        self.rows.insert(request, row);
        request
    }

    /// Sends a question, if there is a broker.
    pub(super) fn send(&self, request: u64) {
        let (Some(connection), Some(row)) = (&self.connection, self.rows.get(&request)) else {
            return;
        };
        let mut bytes = [0; MOST_BYTES];
        let fds: Vec<BorrowedFd<'_>> = row.fds.iter().map(AsFd::as_fd).collect();
        let len = table::encode(&row.message, &mut bytes, connection.version);
        // What does not fit is repeated; a hang-up is found by the thread.
        let _ = socket::send(&connection.socket, &bytes[..len], &fds);
    }

    /// Repeats questions that were not answered in time.
    pub(super) fn repeat(&mut self, now: Instant) {
        let due: Vec<u64> = self
            .rows
            .iter()
            .filter(|(_, row)| row.answer.is_none() && row.due <= now)
            .map(|(id, _)| *id)
            .collect();
        for request in due {
            self.send(request);
            if let Some(row) = self.rows.get_mut(&request) {
                row.pause = (row.pause * 2).min(LONGEST_PAUSE);
                row.due = now + row.pause;
            }
        }
    }

    /// Takes an answer.
    pub(super) fn hear(&mut self, message: ToClient, fds: Vec<OwnedFd>) {
        let request = message.request();
        let Some(row) = self.rows.get_mut(&request) else {
            return;
        };
        if row.answer.is_some() {
            return;
        }
        match &row.waiter {
            Waiter::Asker => row.answer = Some(Ok((message, fds))),
            Waiter::Nobody => drop(self.rows.remove(&request)),
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
                self.rows.remove(&request);
            }
        }
    }

    /// Takes the answer to a question, which is over then.
    pub(super) fn take(&mut self, request: u64) -> Option<Result<Answer>> {
        let answer = self.rows.get_mut(&request)?.answer.take()?;
        let row = self.rows.remove(&request)?;
        Some(answer.and_then(|answer| refused(answer, &row.message)))
    }

    /// Takes a question back.
    pub(super) fn withdraw(&mut self, request: u64) {
        self.rows.remove(&request);
    }

    /// Says when the next question is repeated.
    pub(super) fn due(&self) -> Option<Instant> {
        self.rows
            .values()
            .filter(|row| row.answer.is_none())
            .map(|row| row.due)
            .min()
    }

    /// Says whether a commit waits for its answer.
    pub(super) fn has_commits(&self) -> bool {
        self.rows
            .values()
            .any(|row| matches!(row.waiter, Waiter::Commit(..)))
    }

    /// Loses the broker: what went with it is told, and the rest is asked of the next one.
    pub(super) fn lose(&mut self) {
        self.connection = None;
        let mut outcomes = Vec::new();
        let mut forgotten = Vec::new();
        for (&request, row) in &mut self.rows {
            match &row.waiter {
                Waiter::Commit(cell, identity)
                    if matches!(row.message, ToBroker::Commit { .. }) =>
                {
                    outcomes.push((cell.clone(), *identity));
                    forgotten.push(request);
                }
                // What it was about has gone with the broker.
                Waiter::Nobody => forgotten.push(request),
                _ if !row.survives && row.answer.is_none() => {
                    row.answer = Some(Err(lost(&row.message)))
                }
                _ => {}
            }
        }
        forgotten
            .iter()
            .for_each(|request| drop(self.rows.remove(request)));
        for (cell, identity) in outcomes {
            let ask = |request| ToBroker::AskOutcome { request, identity };
            self.begin(ask, Vec::new(), Waiter::Commit(cell, identity), true);
        }
    }

    /// Asks the next broker everything.
    pub(super) fn welcome(&mut self, connection: Connection) {
        self.connection = Some(Arc::new(connection));
        let now = Instant::now();
        self.rows.values_mut().for_each(|row| row.due = now);
        self.repeat(now);
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
                ToBroker::Remove { name, .. } | ToBroker::Watch { name, .. } => name.clone(),
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
        _ => Error::ProducerGone { pid: 0 }.into(),
    }
}
