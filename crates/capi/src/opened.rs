//! What stands behind a handle, where that is more than a value of the engine's.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::callback::{Callback, Hold};
use crate::engine::{
    AdoptToken, Loan, ParticipantId, Released, Result, Session, SessionNotice, Stream,
};

/// A stream, and the application's hold on one that it lent: the library lets go of a stream sooner
/// when that has ended.
pub(crate) struct OpenStream {
    pub stream: Stream,
    pub _hold: Option<Arc<Hold>>,
}

/// A loan until it is released, and what waits for its end.
pub(crate) struct OpenLoan {
    loan: Mutex<Option<Arc<Loan>>>,
    end: Released,
}

impl OpenLoan {
    pub fn of(loan: Loan) -> OpenLoan {
        OpenLoan {
            end: loan.released(),
            loan: Mutex::new(Some(Arc::new(loan))),
        }
    }

    fn loan(&self) -> MutexGuard<'_, Option<Arc<Loan>>> {
        self.loan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the loan, unless it was released.
    pub fn lent(&self) -> Option<Arc<Loan>> {
        self.loan().clone()
    }

    /// Ends the loan; with calls that share it at this moment, the last of them ends it.
    pub fn release(&self) {
        let loan = self.loan().take();
        // Not under the lock.
        drop(loan);
    }

    /// Waits until the loan has ended and its last holder is done. Keeps nothing of it meanwhile.
    pub fn wait_released(&self, timeout: Option<Duration>) -> Result<()> {
        self.end.wait(timeout)
    }
}

/// Participants that have left whose names are kept.
const DEPARTED: usize = 64;

/// A session, and the callbacks for adopted memory that is its owner's again.
pub(crate) struct OpenSession {
    pub session: Session,
    adopted: Mutex<Adopted>,
    /// Participants that the last notices were about.
    departed: Mutex<VecDeque<(ParticipantId, String)>>,
}

/// Callbacks by the token of their block.
#[derive(Default)]
struct Adopted {
    last: u64,
    waiting: HashMap<AdoptToken, Callback>,
}

impl OpenSession {
    pub fn of(session: Session) -> OpenSession {
        OpenSession {
            session,
            adopted: Mutex::default(),
            departed: Mutex::default(),
        }
    }

    /// Takes the oldest notice, and keeps the name in it.
    pub fn next_notice(&self) -> Option<SessionNotice> {
        let notice = self.session.next_notice();
        if let Some(SessionNotice::Left {
            participant, name, ..
        }) = &notice
        {
            let mut departed = self.departed();
            departed.truncate(DEPARTED - 1);
            departed.push_front((*participant, name.clone()));
        }
        notice
    }

    /// Returns the name of a participant that is connected, or that a notice has told of.
    pub fn participant_name(&self, participant: ParticipantId) -> Option<String> {
        self.session.participant_name(participant).or_else(|| {
            let departed = self.departed();
            let known = departed.iter().find(|(id, _)| *id == participant);
            known.map(|(_, name)| name.clone())
        })
    }

    fn departed(&self) -> MutexGuard<'_, VecDeque<(ParticipantId, String)>> {
        self.departed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn adopted(&self) -> MutexGuard<'_, Adopted> {
        self.adopted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the callback of memory that is about to be adopted, and returns the token to adopt it
    /// with.
    pub fn expect(&self, callback: Callback) -> AdoptToken {
        let mut adopted = self.adopted();
        adopted.last += 1;
        let token = AdoptToken(adopted.last);
        adopted.waiting.insert(token, callback);
        token
    }

    /// Forgets a callback: the memory was not adopted.
    pub fn expect_no_more(&self, token: AdoptToken) {
        self.adopted().waiting.remove(&token);
    }

    /// Collects, and calls back for what came home, on this thread and with no lock held. Returns
    /// the blocks, their bytes, and how many were adopted.
    pub fn collect(&self) -> (u64, u64, u64) {
        let collected = self.session.collect();
        let tokens = collected.tokens.len() as u64;
        let callbacks: Vec<Callback> = {
            let mut adopted = self.adopted();
            collected
                .tokens
                .iter()
                .filter_map(|token| adopted.waiting.remove(token))
                .collect()
        };
        callbacks.into_iter().for_each(Callback::run);
        (collected.blocks, collected.bytes, tokens)
    }
}
