//! Asking the producer, and waiting for its answer.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use gpu_api::Error;
use gpu_api::lock::AwaitChange;

use crate::consumer::claim_error::ClaimError;
use crate::consumer::connection::hear::Heard;
use crate::consumer::connection::link::{Link, Locked, SOCKET};
use crate::consumer::connection::question::{Key, Question};
use crate::consumer::connection::questions::{Interest, Look, Questions};

/// For how long a claim waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// `None` for ever.
    pub deadline: Option<Instant>,
    /// The caller asks again later, so the question stays.
    pub again: bool,
}

impl Patience {
    /// Waits for so long; `None` for ever.
    pub fn within(timeout: Option<Duration>) -> Patience {
        Patience {
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            again: false,
        }
    }

    /// Does not wait.
    pub fn none() -> Patience {
        Patience {
            deadline: Some(Instant::now()),
            again: true,
        }
    }

    fn left(self) -> Option<Duration> {
        self.left_before(None)
    }

    /// Returns the time that is left, or that until something else is due, if that is less.
    fn left_before(self, due: Option<Instant>) -> Option<Duration> {
        let until = [self.deadline, due].into_iter().flatten().min();
        until.map(|until| until.saturating_duration_since(Instant::now()))
    }

    /// Says whether the time is over.
    pub fn is_over(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }
}

/// A claim's interest in an answer. It ends when this is dropped: the question is withdrawn if
/// nobody else waits for it.
#[derive(Debug)]
pub(crate) struct Asking<'a> {
    link: &'a Link,
    interest: Interest,
    /// The caller comes again.
    pub kept: bool,
}

impl<'a> Asking<'a> {
    /// Begins, and asks nothing yet.
    pub fn new(link: &'a Link, key: Key, question: Question, patience: Patience) -> Asking<'a> {
        Asking {
            link,
            interest: Interest::new(key, question),
            kept: patience.again,
        }
    }

    /// Looks for the answer, and asks if no question for it is open.
    pub fn look(&mut self, questions: &mut Questions) -> Look {
        self.interest.look(questions, Instant::now())
    }

    /// Asks once more, because the answer was used up by another claim.
    pub fn renew(&mut self) {
        let mut table = self.link.table();
        self.interest.renew(&mut table, Instant::now());
    }

    /// Waits for `what`, as `read` finds it in what was answered. A refusal and the producer's end
    /// are errors, and so is the deadline.
    pub fn wait_for<T>(
        &mut self,
        patience: Patience,
        what: &'static str,
        read: impl Fn(Look) -> Option<Result<T, ClaimError>>,
    ) -> Result<T, ClaimError> {
        let link = self.link;
        let answer = link.wait_for_answer(patience, |questions| match self.look(questions) {
            Look::Refused(no, _) => Some(Err(no.into())),
            look => read(look).or_else(|| link.is_gone().then_some(Err(ClaimError::ProducerGone))),
        });
        answer.unwrap_or_else(|| Err(Error::deadline(what).into()))
    }

    /// Asks anew, whatever was answered.
    pub fn ask_anew(&mut self, questions: &mut Questions) {
        self.interest.ask_anew(questions, Instant::now());
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut table = self.link.table();
        self.interest.leave(&mut table, self.kept, Instant::now());
        table.hand_over();
    }
}

impl Link {
    /// Waits until `look` gives something, looking again at every change; `None` after the
    /// deadline. Repeats what is due meanwhile.
    pub fn wait_until<T>(
        &self,
        patience: Patience,
        mut look: impl FnMut(&mut Questions) -> Option<T>,
    ) -> Option<T> {
        let mut locked = self.table();
        loop {
            let seen = look(&mut locked);
            locked.send_due();
            if seen.is_some() || patience.is_over() {
                return seen;
            }
            let wait = patience.left_before(locked.next_due());
            let Locked { link, table } = locked;
            let table = self.changed.await_change(table, wait);
            locked = Locked { link, table };
        }
    }

    /// Waits for the socket, and reads it if no other thread does, so an answer need not wake the
    /// participant's thread.
    pub fn wait_for_answer<T>(
        &self,
        patience: Patience,
        mut look: impl FnMut(&mut Questions) -> Option<T>,
    ) -> Option<T> {
        let turn = match self.hearing.try_lock() {
            Ok(turn) if !turn.is_over => turn,
            _ => return self.wait_until(patience, look),
        };
        self.poller.pause(self.socket.as_fd(), SOCKET);
        let heard = loop {
            let due = {
                let mut table = self.table();
                let seen = look(&mut table);
                table.send_due();
                if seen.is_some() {
                    break Some(seen);
                }
                // Another thread maps or unmaps. It announces its end, and no packet tells of it.
                if table.is_anybody_acting() {
                    break None;
                }
                table.next_due()
            };
            match self.hear() {
                Heard::Message => {}
                Heard::Nothing if patience.is_over() => break Some(None),
                Heard::Nothing => {
                    if !self.await_packet(patience.left_before(due)) {
                        break None;
                    }
                }
                Heard::Nonsense | Heard::End => break None,
            }
        };
        self.poller.resume(self.socket.as_fd(), SOCKET);
        drop(turn);
        // The end, and the producer's death, are the service's business; it tells. So does a thread
        // that maps.
        heard.unwrap_or_else(|| self.wait_until(patience, look))
    }
}
