//! Asking the producer, and waiting for what it says: the [table of questions](crate::consumer::connection::questions), its lock, its
//! socket and its waiters.
//!
//! Messages are sent under the table's lock, without blocking, so that they leave in the order in which its rows changed.

use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::Instant;

use crate::consumer::connection::hear::Heard;
use crate::consumer::connection::link::{Link, SOCKET};
use crate::consumer::connection::questions::{Interest, Key, Look, Question, Questions, Unsent};
use crate::consumer::notice::Notice;
use channel::os::socket::{self, SendOutcome};
use channel::wire::message::{MOST_BYTES, ToProducer};

/// For how long a claim waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// `None` for ever.
    pub deadline: Option<Instant>,
    /// The caller comes again: what was asked for stays asked.
    pub again: bool,
}

impl Patience {
    /// Waits until a deadline.
    pub fn until(deadline: Option<Instant>) -> Patience {
        Patience { deadline, again: false }
    }

    /// Does not wait.
    pub fn none() -> Patience {
        Patience { deadline: Some(Instant::now()), again: true }
    }

    fn left(self) -> Option<std::time::Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Says whether the time is over.
    pub fn is_over(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }
}

/// What is asked, and when the thread will look.
#[derive(Debug, Default)]
pub(crate) struct Table {
    questions: Questions,
    /// When the participant's thread looks for what is due; `None` for not by itself.
    thread_looks: Option<Instant>,
}

/// The table, locked.
pub(crate) struct Locked<'a> {
    link: &'a Link,
    table: MutexGuard<'a, Table>,
}

impl Deref for Locked<'_> {
    type Target = Questions;

    fn deref(&self) -> &Questions {
        &self.table.questions
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Questions {
        &mut self.table.questions
    }
}

impl Locked<'_> {
    /// Sends what is due.
    pub fn send_due(&mut self) {
        let link = self.link;
        self.table.questions.send_due(Instant::now(), |message| link.send(message));
    }

    /// Sends what is due, and has the thread look after what nobody else will.
    pub fn hand_over(mut self) {
        self.send_due();
        let due = self.table.questions.next_due();
        let late = due.is_some_and(|due| self.table.thread_looks.is_none_or(|looks| due < looks));
        let waker = &self.link.waker;
        drop(self.table);
        if late {
            waker.nudge();
        }
    }

    /// Sends what is due, and says when to look again (thread).
    pub fn plan(mut self) -> Option<Instant> {
        self.send_due();
        self.table.thread_looks = self.table.questions.next_due();
        self.table.thread_looks
    }
}

/// A claim's interest in an answer. It ends when this is dropped: the question is withdrawn if nobody else waits for it.
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
        Asking { link, interest: Interest::new(key, question), kept: patience.again }
    }

    /// Looks for the answer, and asks if nobody has, or if what was asked is no more.
    pub fn look(&mut self, questions: &mut Questions) -> Look {
        self.interest.look(questions, Instant::now())
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
    /// Locks the table.
    pub fn table(&self) -> Locked<'_> {
        Locked { link: self, table: self.table.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    fn send(&self, message: &ToProducer) -> Result<(), Unsent> {
        let mut bytes = [0; MOST_BYTES];
        let len = message.encode(&mut bytes);
        match socket::send(self.socket.as_fd(), &bytes[..len], &[]) {
            Ok(SendOutcome::Sent) => Ok(()),
            // The thread sees the hang-up; what could not be sent for want of memory is sent again.
            Ok(SendOutcome::Full | SendOutcome::HungUp) | Err(_) => Err(Unsent),
        }
    }

    /// Asks ahead, for claims to come.
    pub fn ask_ahead(&self, questions: impl IntoIterator<Item = (Key, Question)>) {
        let (mut table, now) = (self.table(), Instant::now());
        questions.into_iter().for_each(|(key, question)| table.ask_ahead(key, question, now));
        table.hand_over();
    }

    /// Tells those who wait for something of this link to look again. Not to be called under the table's lock.
    pub fn announce_change(&self) {
        // A thread that looked before the change holds the lock until it waits.
        drop(self.table());
        self.changed.notify_all();
        if self.tries.load(Ordering::Relaxed) && self.tries.swap(false, Ordering::SeqCst) {
            self.notices.push(Notice::TryAgain);
        }
    }

    /// Waits until `look` gives something, looking again at every change; `None` after the deadline. Repeats what is due
    /// meanwhile.
    pub fn wait_until<T>(&self, patience: Patience, mut look: impl FnMut(&mut Questions) -> Option<T>) -> Option<T> {
        let mut locked = self.table();
        loop {
            let seen = look(&mut locked);
            locked.send_due();
            if seen.is_some() || patience.is_over() {
                return seen;
            }
            let due = locked.next_due().map(|due| due.saturating_duration_since(Instant::now()));
            let wait = [patience.left(), due].into_iter().flatten().min();
            let Locked { link, table } = locked;
            let table = match wait {
                Some(wait) => self.changed.wait_timeout(table, wait).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(table).unwrap_or_else(PoisonError::into_inner),
            };
            locked = Locked { link, table };
        }
    }

    /// Waits for what comes by the socket, and reads it if nobody does: an answer then costs no other thread's waking.
    pub fn wait_for_answer<T>(
        &self,
        patience: Patience,
        mut look: impl FnMut(&mut Questions) -> Option<T>,
    ) -> Option<T> {
        let Ok(turn) = self.hearing.try_lock() else { return self.wait_until(patience, look) };
        self.poller.pause(self.socket.as_fd(), SOCKET);
        let heard = loop {
            let due = {
                let mut table = self.table();
                let seen = look(&mut table);
                table.send_due();
                if seen.is_some() {
                    break Some(seen);
                }
                table.next_due().map(|due| due.saturating_duration_since(Instant::now()))
            };
            match self.hear() {
                Heard::Message => {}
                Heard::Nothing if patience.is_over() => break Some(None),
                Heard::Nothing => {
                    if !self.await_packet([patience.left(), due].into_iter().flatten().min()) {
                        break None;
                    }
                }
                Heard::End => break None,
            }
        };
        self.poller.resume(self.socket.as_fd(), SOCKET);
        drop(turn);
        // The end, and the producer's death, are the service's business; it tells.
        heard.unwrap_or_else(|| self.wait_until(patience, look))
    }
}
