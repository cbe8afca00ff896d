//! The connection to a broker: its thread hears, repeats what was not answered, finishes commits,
//! and reconnects.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use gpu_api::lock::{Acquire, AwaitChange};
use gpu_api::{Error, ForkGuard, Gpu, thread};
use rustix::event::{PollFd, PollFlags};
use transport::os::poller::poll_for;
use transport::os::socket::{self, ReceiveOutcome};
use transport::os::waker::Waker;

use super::commit::Pending;
use super::connection::{Connection, SAYS_LINEAGE};
use super::farewell::Farewell;
use super::questions::{Answer, Questions, Waiter};
use super::retire::Retiring;
use crate::error::{ObjectError, Result};
use crate::memory::range::Imported;
use crate::object::identity::{Epoch, Identity, Lineage};
use crate::wire::{MOST_BYTES, Selector, ToBroker, ToClient};

/// How long a hello to another broker may take.
const HELLO: Duration = Duration::from_secs(1);
/// How often a broker that is away is tried again.
const RECONNECT: Duration = Duration::from_millis(20);
/// How often words and events that the GPU sets are looked at.
const LOOK: Duration = Duration::from_micros(500);

struct LinkState {
    questions: Questions,
    commits: Vec<Pending>,
    retiring: Vec<Retiring>,
    /// Handles of unmapped memory.
    spent: Vec<Imported>,
    /// Leases of readers, to be taken again from the next broker.
    leases: BTreeMap<Identity, usize>,
    closing: bool,
}

impl LinkState {
    fn new(connection: Connection) -> LinkState {
        LinkState {
            questions: Questions::new(connection),
            commits: Vec::new(),
            retiring: Vec::new(),
            spent: Vec::new(),
            leases: BTreeMap::new(),
            closing: false,
        }
    }

    /// Loses the broker, and unfinished objects with it.
    fn lose(&mut self) {
        self.questions.lose();
        self.commits.iter_mut().for_each(Pending::lose);
    }

    /// Takes the readers' leases again, for the list of who reads what: the memory is there
    /// without.
    fn welcome(&mut self, connection: Connection) {
        self.questions.welcome(connection);
        for &identity in self.leases.keys() {
            let selector = Selector::Identity(identity);
            let ask = |request| ToBroker::Open { request, selector };
            self.questions.begin(ask, Vec::new(), Waiter::Nobody, false);
        }
    }
}

struct Shared {
    gpu: Gpu,
    dir: PathBuf,
    name: String,
    state: Mutex<LinkState>,
    changed: Condvar,
    waker: Waker,
}

/// The client's end of a connection.
pub(super) struct Link {
    shared: Arc<Shared>,
    fork: ForkGuard,
    patience: Duration,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("dir", &self.shared.dir)
            .finish_non_exhaustive()
    }
}

impl Link {
    /// Connects and starts the thread.
    pub(super) fn connect(
        gpu: Gpu,
        dir: PathBuf,
        name: String,
        patience: Duration,
    ) -> Result<Arc<Link>> {
        let fork = ForkGuard::new()?;
        let connection = Connection::greet(&gpu, &dir, &name, Instant::now() + patience)?;
        let state = Mutex::new(LinkState::new(connection));
        let shared = Shared {
            gpu,
            dir,
            name,
            state,
            changed: Condvar::new(),
            waker: Waker::new()?,
        };
        let shared = Arc::new(shared);
        let worker = Thread {
            shared: shared.clone(),
        };
        thread::start("gpu-ipc-objects", move || worker.run())?;
        Ok(Arc::new(Link {
            shared,
            fork,
            patience,
        }))
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.shared.gpu
    }

    /// Fails in a forked child.
    pub(super) fn check_fork(&self) -> Result<()> {
        Ok(self.fork.check("this connection to a broker")?)
    }

    /// Returns the guard that tells a forked child.
    pub(super) fn fork(&self) -> ForkGuard {
        self.fork
    }

    pub(super) fn is_connected(&self) -> bool {
        !self.fork.is_child() && self.shared.state().questions.connection.is_some()
    }

    /// Returns the connection, if there is one.
    pub(super) fn connection(&self) -> Option<Arc<Connection>> {
        self.shared.state().questions.connection.clone()
    }

    /// Asks a question that may be put to any broker, and waits for the answer.
    pub(super) fn ask(
        &self,
        message: impl FnOnce(u64) -> ToBroker,
        fds: Vec<OwnedFd>,
    ) -> Result<Answer> {
        self.ask_until(message, fds, Instant::now() + self.patience)
    }

    /// As [`ask`](Link::ask), until a deadline.
    pub(super) fn ask_until(
        &self,
        message: impl FnOnce(u64) -> ToBroker,
        fds: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<Answer> {
        self.put(message, fds, deadline, true)
    }

    /// Asks a question that goes with this broker.
    pub(super) fn ask_here(
        &self,
        message: impl FnOnce(u64) -> ToBroker,
        fds: Vec<OwnedFd>,
    ) -> Result<Answer> {
        self.put(message, fds, Instant::now() + self.patience, false)
    }

    fn put(
        &self,
        message: impl FnOnce(u64) -> ToBroker,
        fds: Vec<OwnedFd>,
        deadline: Instant,
        survives: bool,
    ) -> Result<Answer> {
        self.check_fork()?;
        let mut state = self.shared.state();
        let request = state.questions.begin(message, fds, Waiter::Asker, survives);
        self.shared.waker.wake();
        loop {
            if let Some(answer) = state.questions.take(request) {
                return answer;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.questions.withdraw(request);
                return Err(Error::deadline("the broker's answer").into());
            }
            state = self.shared.changed.await_change(state, Some(left));
        }
    }

    /// Tells the broker something that needs no answer here.
    pub(super) fn tell(&self, message: impl FnOnce(u64) -> ToBroker) {
        if self.fork.is_child() {
            return;
        }
        let mut state = self.shared.state();
        state
            .questions
            .begin(message, Vec::new(), Waiter::Nobody, false);
        self.shared.waker.wake();
    }

    /// Says whether the broker that is connected speaks a version.
    pub(super) fn knows(&self, version: u16) -> bool {
        let state = self.shared.state();
        let connection = state.questions.connection.as_ref();
        connection.is_some_and(|connection| connection.version >= version)
    }

    /// Takes a watch of a name back, if no other thread watches it and the broker knows how.
    pub(super) fn unwatch(&self, name: &str) {
        if self.fork.is_child() {
            return;
        }
        let mut state = self.shared.state();
        let questions = &mut state.questions;
        let knows = questions
            .connection
            .as_ref()
            .is_some_and(|c| c.version >= SAYS_LINEAGE);
        if !knows || questions.watches(name) {
            return;
        }
        let question = |request| ToBroker::Watch {
            request,
            seen: Epoch(u64::MAX),
            name: name.into(),
        };
        questions.begin(question, Vec::new(), Waiter::Nobody, false);
        self.shared.waker.wake();
    }

    /// Notes which history the epoch is of that the commit of a name will have.
    pub(super) fn learn(&self, name: &str, lineage: Option<Lineage>) {
        self.shared.state().questions.histories.learn(name, lineage);
    }

    /// Says whether the epochs of a name that were learned last are of the connection's history.
    pub(super) fn epochs_are_of(&self, name: &str, connection: &Connection) -> bool {
        let state = self.shared.state();
        state.questions.histories.are_of(name, connection.lineage)
    }

    /// Notes a reader's lease, so that it is taken again from the next broker.
    pub(super) fn hold(&self, identity: Identity) {
        *self.shared.state().leases.entry(identity).or_default() += 1;
    }

    /// Ends a reader's lease.
    pub(super) fn let_go(&self, identity: Identity) {
        if self.fork.is_child() {
            return;
        }
        let mut state = self.shared.state();
        let last = state.leases.get_mut(&identity).is_none_or(|count| {
            *count -= 1;
            *count == 0
        });
        if last {
            state.leases.remove(&identity);
            drop(state);
            self.tell(|request| ToBroker::Close { request, identity });
        }
    }

    /// Tells this broker, or the next one, that a hold has ended.
    pub(super) fn leave(&self, farewell: Farewell) {
        if !self.fork.is_child() {
            self.shared.leave(farewell);
            self.shared.waker.wake();
        }
    }

    /// Hands a commit to the thread.
    pub(super) fn finish(&self, pending: Pending) {
        self.shared.state().commits.push(pending);
        self.shared.waker.wake();
    }

    /// Hands handles to the thread, which gives them back: driver calls without a waiting caller.
    pub(super) fn let_fall(&self, spent: Option<Imported>) {
        if self.fork.is_child() {
            // As in `retire`.
            std::mem::forget(spent);
            return;
        }
        self.shared.state().spent.extend(spent);
        self.shared.waker.wake();
    }

    /// Hands addresses to the thread, to be given back once the GPU is done with them.
    pub(super) fn retire(&self, retiring: Retiring) {
        if self.fork.is_child() {
            // The driver is not for a forked child.
            std::mem::forget(retiring);
            return;
        }
        self.shared.state().retiring.push(retiring);
        self.shared.waker.wake();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if !self.fork.is_child() {
            self.shared.state().closing = true;
            self.shared.waker.wake();
        }
    }
}

/// The thread of a link. It ends when the link is dropped and nothing is left to finish.
struct Thread {
    shared: Arc<Shared>,
}

impl Thread {
    fn run(self) {
        let shared = self.shared;
        loop {
            let (connection, timeout) = {
                let mut state = shared.state();
                // Work that others wait for is done outside the lock.
                let mut commits = std::mem::take(&mut state.commits);
                let mut retiring = std::mem::take(&mut state.retiring);
                let spent = std::mem::take(&mut state.spent);
                // What was made by a broker that has gone was lost with it.
                let words = state
                    .questions
                    .connection
                    .as_ref()
                    .map(|connection| connection.words.clone());
                let is_here = |pending: &Pending| {
                    words
                        .as_ref()
                        .is_some_and(|words| Arc::ptr_eq(words, &pending.words))
                };
                commits
                    .iter_mut()
                    .filter(|pending| !is_here(pending))
                    .for_each(Pending::lose);
                drop((state, words));
                drop(spent);
                commits.retain_mut(|pending| match pending.go_on() {
                    None => true,
                    Some(asked) => {
                        if let Some((cell, identity)) = asked {
                            let mut state = shared.state();
                            let ask = |request| ToBroker::Commit { request, identity };
                            if state.questions.connection.is_some() {
                                let waiter = Waiter::Commit(cell, identity);
                                state.questions.begin(ask, Vec::new(), waiter, false);
                                transport::trace_point!("commit.asked");
                            } else {
                                cell.set(Err(ObjectError::WriterLost { identity }));
                            }
                        }
                        false
                    }
                });
                retiring.retain_mut(|retiring| {
                    let gone = retiring.go_on();
                    if gone && let Some(farewell) = retiring.farewell.take() {
                        shared.leave(farewell);
                    }
                    !gone
                });
                let mut state = shared.state();
                let busy = !commits.is_empty() || !retiring.is_empty();
                state.commits.append(&mut commits);
                state.retiring.append(&mut retiring);
                if state.closing
                    && state.commits.is_empty()
                    && state.retiring.is_empty()
                    && !state.questions.has_commits()
                {
                    return;
                }
                let now = Instant::now();
                state.questions.send_due(now);
                let mut timeout = state
                    .questions
                    .next_due()
                    .map(|due| due.saturating_duration_since(now));
                let mut at_most = |time: Duration| {
                    timeout = Some(timeout.map_or(time, |timeout| timeout.min(time)))
                };
                if busy {
                    at_most(LOOK);
                }
                if state.questions.connection.is_none() {
                    at_most(RECONNECT);
                }
                (state.questions.connection.clone(), timeout)
            };
            shared.wait(connection.as_deref(), timeout);
            match connection {
                Some(connection) => shared.hear(&connection),
                None => {
                    if let Ok(connection) = shared.greet() {
                        shared.state().welcome(connection);
                    }
                }
            }
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.acquire()
    }

    fn leave(&self, farewell: Farewell) {
        let message = farewell.take();
        let questions = &mut self.state().questions;
        questions.begin(message, Vec::new(), Waiter::Nobody, true);
    }

    fn greet(&self) -> Result<Connection> {
        Connection::greet(&self.gpu, &self.dir, &self.name, Instant::now() + HELLO)
    }

    fn wait(&self, connection: Option<&Connection>, timeout: Option<Duration>) {
        let waker = self.waker.fd();
        let mut fds = vec![PollFd::new(&waker, PollFlags::IN)];
        fds.extend(connection.map(|connection| PollFd::new(&connection.socket, PollFlags::IN)));
        // An interruption is a wake-up with nothing to do.
        let _ = poll_for(&mut fds, timeout);
        self.waker.rise();
    }

    fn hear(&self, connection: &Connection) {
        let mut bytes = [0; MOST_BYTES];
        loop {
            let mut fds = Vec::new();
            match socket::receive(&connection.socket, &mut bytes, &mut fds) {
                Ok(ReceiveOutcome::Packet(len)) => match ToClient::decode(&bytes[..len], fds.len())
                {
                    Ok(message) => self.state().questions.hear(message, fds),
                    Err(error) => tracing::warn!(%error, "a message of the broker is passed over"),
                },
                Ok(ReceiveOutcome::Empty) => break,
                Ok(ReceiveOutcome::HungUp) => {
                    self.state().lose();
                    break;
                }
                // A packet that was lost is asked for again.
                Err(error) => {
                    tracing::warn!(%error, "a packet of the broker is lost");
                    break;
                }
            }
        }
        self.changed.notify_all();
    }
}
