//! The connection to a broker: its thread hears, repeats what was not answered, finishes commits, and reconnects.
//!
//! # A question
//!
//! | state | means | goes to |
//! |---|---|---|
//! | asked | sent, or to be sent; repeated after 100, 200, 400, 800, 1,000, 1,000 ... ms | answered, lost |
//! | answered | the answer waits for the asker | taken |
//! | lost | the broker went, and the question was about what went with it | taken |
//!
//! An answer is known by its number; one that nobody waits for is dropped with its descriptors. A question that may be
//! put to any broker (open, watch, remove, outcome) is asked again of the next one; one about an object that is being
//! filled is lost with the broker, for its memory is. A commit that was asked for turns into the question for its
//! outcome.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use channel::os::process::{descendants_holding, own_pidfd};
use channel::os::socket::{self, ReceiveOutcome, connect_within};
use channel::os::waker::Waker;
use channel::shared::counter_file::CounterFile;
use gpu_api::{Error, ForkGuard, Gpu, WordPtr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::commit::{CommitCell, Pending};
use super::retire::Retiring;
use crate::error::{ObjectError, Result};
use crate::object::identity::Identity;
use crate::server::broker::SOCKET;
use crate::wire::{self, MOST_BYTES, Refusal, Selector, Standing, ToBroker, ToClient};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How often a broker that is away is tried again.
const RECONNECT: Duration = Duration::from_millis(20);
/// How often words and events that the GPU sets are looked at.
const LOOK: Duration = Duration::from_micros(500);

type Answer = (ToClient, Vec<OwnedFd>);

/// Whom an answer is for.
enum Waiter {
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

/// The counter file of a connection, registered with the driver.
#[derive(Debug)]
pub(super) struct Words {
    pub file: CounterFile,
    pub registered: Option<WordPtr>,
    gpu: Gpu,
}

impl Words {
    fn of(gpu: &Gpu, file: CounterFile) -> Result<Words> {
        let registered = if gpu.caps().stream_writes {
            // SAFETY: `register_words` asks for bytes that stay mapped until `unregister_words`: `drop` calls that
            // before the file goes.
            Some(unsafe { gpu.backend().register_words(file.start(), file.bytes()) }?)
        } else {
            None
        };
        Ok(Words { file, registered, gpu: gpu.clone() })
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        if self.registered.is_some() {
            // SAFETY: `unregister_words` asks for a registration that no unfinished operation uses: a commit keeps
            // these words until its releases have happened.
            if let Err(error) = unsafe { self.gpu.backend().unregister_words(self.file.start()) } {
                tracing::warn!(%error, "words cannot be unregistered");
            }
        }
    }
}

/// A connection that was welcomed.
#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    version: u16,
    pub words: Arc<Words>,
}

#[derive(Default)]
struct LinkState {
    connection: Option<Arc<Connection>>,
    rows: BTreeMap<u64, Row>,
    next_request: u64,
    commits: Vec<Pending>,
    retiring: Vec<Retiring>,
    /// Leases of readers, to be taken again from the next broker.
    leases: BTreeMap<Identity, usize>,
    closing: bool,
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
        f.debug_struct("Link").field("dir", &self.shared.dir).finish_non_exhaustive()
    }
}

impl Link {
    /// Connects and starts the thread.
    pub(super) fn connect(gpu: Gpu, dir: PathBuf, name: String, patience: Duration) -> Result<Arc<Link>> {
        let (shared, fork) = (
            Shared {
                gpu,
                dir,
                name,
                state: Mutex::new(LinkState { next_request: 1, ..LinkState::default() }),
                changed: Condvar::new(),
                waker: Waker::new()?,
            },
            ForkGuard::new()?,
        );
        let connection = shared.greet(Instant::now() + patience)?;
        shared.state().connection = Some(Arc::new(connection));
        let shared = Arc::new(shared);
        let thread = Thread { shared: shared.clone() };
        std::thread::Builder::new()
            .name("gpu-ipc-objects".into())
            .spawn(move || thread.run())
            .map_err(|e| Error::system("starting a thread", "raise RLIMIT_NPROC", e))?;
        Ok(Arc::new(Link { shared, fork, patience }))
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.shared.gpu
    }

    /// Fails in a forked child.
    pub(super) fn check_fork(&self) -> Result<()> {
        Ok(self.fork.check("this connection to a broker")?)
    }

    pub(super) fn is_connected(&self) -> bool {
        !self.fork.is_child() && self.shared.state().connection.is_some()
    }

    /// Returns the connection, if there is one.
    pub(super) fn connection(&self) -> Option<Arc<Connection>> {
        self.shared.state().connection.clone()
    }

    /// Asks a question that may be put to any broker, and waits for the answer.
    pub(super) fn ask(&self, message: impl FnOnce(u64) -> ToBroker, fds: Vec<OwnedFd>) -> Result<Answer> {
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
    pub(super) fn ask_here(&self, message: impl FnOnce(u64) -> ToBroker, fds: Vec<OwnedFd>) -> Result<Answer> {
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
        let request = state.begin(message, fds, Waiter::Asker, survives);
        state.send(request);
        self.shared.waker.wake();
        loop {
            let row = state.rows.get_mut(&request).expect("only its asker takes a question back");
            if let Some(answer) = row.answer.take() {
                let message = row.message.clone();
                state.rows.remove(&request);
                return answer.and_then(|answer| refused(answer, &message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.rows.remove(&request);
                return Err(Error::Deadline { what: "the broker's answer" }.into());
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Tells the broker something that needs no answer here.
    pub(super) fn tell(&self, message: impl FnOnce(u64) -> ToBroker) {
        if self.fork.is_child() {
            return;
        }
        let mut state = self.shared.state();
        let request = state.begin(message, Vec::new(), Waiter::Nobody, false);
        state.send(request);
        self.shared.waker.wake();
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

    /// Hands a commit to the thread.
    pub(super) fn finish(&self, pending: Pending) {
        self.shared.state().commits.push(pending);
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

impl Shared {
    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects, says hello and waits for the welcome.
    fn greet(&self, deadline: Instant) -> Result<Connection> {
        let socket = connect_within(&self.dir.join(SOCKET), Some(deadline))?;
        let pidfd = own_pidfd()?;
        let descendants = descendants_holding(self.gpu.backend().device_files())?;
        let hello = ToBroker::Hello {
            lowest: wire::LOWEST,
            highest: wire::HIGHEST,
            shared_context: self.gpu.caps().shared_context,
            name: self.name.clone(),
        };
        let mut bytes = [0; MOST_BYTES];
        let fds: Vec<BorrowedFd<'_>> = std::iter::once(&pidfd).chain(&descendants).map(AsFd::as_fd).collect();
        let len = hello.encode(&mut bytes, wire::LOWEST, fds.len());
        match socket::send(&socket, &bytes[..len], &fds) {
            Ok(socket::SendOutcome::Sent) => {}
            Ok(_) => return Err(self.gone()),
            Err(e) => return Err(Error::system("sendmsg to the broker", "raise RLIMIT_NOFILE", e).into()),
        }
        loop {
            let mut fds = Vec::new();
            match socket::receive(&socket, &mut bytes, &mut fds) {
                Ok(ReceiveOutcome::Packet(len)) => return self.welcomed(socket, &bytes[..len], fds),
                Ok(ReceiveOutcome::Empty) => {
                    socket::wait_ready(socket.as_fd(), PollFlags::IN, "the broker's welcome", Some(deadline))?;
                }
                Ok(ReceiveOutcome::HungUp) => return Err(self.gone()),
                Err(e) => return Err(Error::system("recvmsg from the broker", "raise RLIMIT_NOFILE", e).into()),
            }
        }
    }

    fn welcomed(&self, socket: OwnedFd, bytes: &[u8], mut fds: Vec<OwnedFd>) -> Result<Connection> {
        let version = u16::from_le_bytes([bytes[2], bytes.get(3).copied().unwrap_or(0)]);
        match ToClient::decode(bytes, fds.len()).map_err(Error::from)? {
            ToClient::Welcome { slots, .. } => {
                let file = CounterFile::open(fds.swap_remove(1), slots)?;
                Ok(Connection { socket, version, words: Arc::new(Words::of(&self.gpu, file)?) })
            }
            ToClient::Refused { refusal, lowest, highest, why } => {
                let why = if refusal == Refusal::Version {
                    let (l, h) = (wire::LOWEST, wire::HIGHEST);
                    format!("the broker speaks versions {lowest} to {highest}, this side {l} to {h}")
                } else {
                    why
                };
                Err(ObjectError::Refused { refusal, why, remedy: refusal.remedy() })
            }
            _ => Err(nonsense()),
        }
    }

    fn gone(&self) -> ObjectError {
        let path = self.dir.join(SOCKET).display().to_string();
        let (why, remedy) = ("the broker hung up".into(), "start it again: `gpu-ipc keep -- gpu-ipc broker`");
        Error::Connect { path, why, remedy, source: None }.into()
    }
}

impl LinkState {
    fn begin(
        &mut self,
        message: impl FnOnce(u64) -> ToBroker,
        fds: Vec<OwnedFd>,
        waiter: Waiter,
        survives: bool,
    ) -> u64 {
        let request = self.next_request;
        self.next_request += 1;
        let (due, pause) = (Instant::now() + FIRST_PAUSE, FIRST_PAUSE);
        let mut row = Row { message: message(request), fds, waiter, survives, answer: None, due, pause };
        if self.connection.is_none() && !survives {
            row.answer = Some(Err(lost(&row.message)));
        }
        self.rows.insert(request, row);
        request
    }

    fn send(&self, request: u64) {
        let (Some(connection), Some(row)) = (&self.connection, self.rows.get(&request)) else { return };
        let mut bytes = [0; MOST_BYTES];
        let fds: Vec<BorrowedFd<'_>> = row.fds.iter().map(AsFd::as_fd).collect();
        let len = row.message.encode(&mut bytes, connection.version, fds.len());
        // What does not fit is repeated; a hang-up is found by the thread.
        let _ = socket::send(&connection.socket, &bytes[..len], &fds);
    }

    fn repeat(&mut self, now: Instant) {
        let due: Vec<u64> =
            self.rows.iter().filter(|(_, row)| row.answer.is_none() && row.due <= now).map(|(id, _)| *id).collect();
        for request in due {
            self.send(request);
            if let Some(row) = self.rows.get_mut(&request) {
                row.pause = (row.pause * 2).min(LONGEST_PAUSE);
                row.due = now + row.pause;
            }
        }
    }

    fn hear(&mut self, message: ToClient, fds: Vec<OwnedFd>) {
        let request = message.request();
        let Some(row) = self.rows.get_mut(&request) else { return };
        if row.answer.is_some() {
            return;
        }
        match &row.waiter {
            Waiter::Asker => row.answer = Some(Ok((message, fds))),
            Waiter::Nobody => drop(self.rows.remove(&request)),
            Waiter::Commit(cell, identity) => {
                let done = match message {
                    ToClient::Committed { epoch, .. } => Ok(epoch),
                    ToClient::Outcome { standing: Standing::Committed(epoch), .. } => Ok(epoch),
                    // The broker that was asked before has not died yet, or has not decided.
                    ToClient::Outcome { standing: Standing::Unfinished, .. } => return,
                    ToClient::Outcome { standing: Standing::Unknown, .. } => {
                        Err(ObjectError::WriterLost { identity: *identity })
                    }
                    ToClient::Declined { refusal, why, .. } => Err(declined(refusal, why, &row.message)),
                    _ => Err(nonsense()),
                };
                cell.set(done);
                self.rows.remove(&request);
            }
        }
    }

    /// Loses the broker: what went with it is told, and the rest is asked of the next one.
    fn lose(&mut self) {
        self.connection = None;
        let mut outcomes = Vec::new();
        let mut forgotten = Vec::new();
        for (&request, row) in &mut self.rows {
            match &row.waiter {
                Waiter::Commit(cell, identity) if matches!(row.message, ToBroker::Commit { .. }) => {
                    outcomes.push((cell.clone(), *identity));
                    forgotten.push(request);
                }
                // What it was about has gone with the broker.
                Waiter::Nobody => forgotten.push(request),
                _ if !row.survives && row.answer.is_none() => row.answer = Some(Err(lost(&row.message))),
                _ => {}
            }
        }
        forgotten.iter().for_each(|request| drop(self.rows.remove(request)));
        for (cell, identity) in outcomes {
            let ask = |request| ToBroker::AskOutcome { request, identity };
            self.begin(ask, Vec::new(), Waiter::Commit(cell, identity), true);
        }
        self.commits.iter_mut().for_each(Pending::lose);
    }

    fn welcome(&mut self, connection: Connection) {
        self.connection = Some(Arc::new(connection));
        let leases: Vec<Identity> = self.leases.keys().copied().collect();
        for identity in leases {
            // For the list of who reads what: the memory is there without.
            let selector = Selector::Identity(identity);
            let request = self.begin(|request| ToBroker::Open { request, selector }, Vec::new(), Waiter::Nobody, false);
            self.send(request);
        }
        let now = Instant::now();
        self.rows.values_mut().for_each(|row| row.due = now);
        self.repeat(now);
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
                // What was made by a broker that has gone was lost with it.
                let words = state.connection.as_ref().map(|connection| connection.words.clone());
                let is_here =
                    |pending: &Pending| words.as_ref().is_some_and(|words| Arc::ptr_eq(words, &pending.words));
                commits.iter_mut().filter(|pending| !is_here(pending)).for_each(Pending::lose);
                drop((state, words));
                commits.retain_mut(|pending| match pending.go_on() {
                    None => true,
                    Some(asked) => {
                        if let Some((cell, identity)) = asked {
                            let mut state = shared.state();
                            let ask = |request| ToBroker::Commit { request, identity };
                            let waiter = Waiter::Commit(cell, identity);
                            if state.connection.is_some() {
                                let request = state.begin(ask, Vec::new(), waiter, false);
                                state.send(request);
                            } else if let Waiter::Commit(cell, identity) = waiter {
                                cell.set(Err(ObjectError::WriterLost { identity }));
                            }
                        }
                        false
                    }
                });
                retiring.retain_mut(|retiring| !retiring.go_on());
                let mut state = shared.state();
                let busy = !commits.is_empty() || !retiring.is_empty();
                state.commits.append(&mut commits);
                state.retiring.append(&mut retiring);
                let waits = state.rows.values().any(|row| matches!(row.waiter, Waiter::Commit(..)));
                if state.closing && state.commits.is_empty() && state.retiring.is_empty() && !waits {
                    return;
                }
                let now = Instant::now();
                state.repeat(now);
                let due = state.rows.values().filter(|row| row.answer.is_none()).map(|row| row.due).min();
                let mut timeout = due.map(|due| due.saturating_duration_since(now));
                let mut at_most = |time: Duration| timeout = Some(timeout.map_or(time, |timeout| timeout.min(time)));
                if busy {
                    at_most(LOOK);
                }
                if state.connection.is_none() {
                    at_most(RECONNECT);
                }
                (state.connection.clone(), timeout)
            };
            shared.wait(connection.as_deref(), timeout);
            match connection {
                Some(connection) => shared.hear(&connection),
                None => {
                    if let Ok(connection) = shared.greet(Instant::now() + LONGEST_PAUSE) {
                        shared.state().welcome(connection);
                    }
                }
            }
        }
    }
}

impl Shared {
    fn wait(&self, connection: Option<&Connection>, timeout: Option<Duration>) {
        let waker = self.waker.fd();
        let mut fds = vec![PollFd::new(&waker, PollFlags::IN)];
        fds.extend(connection.map(|connection| PollFd::new(&connection.socket, PollFlags::IN)));
        let timeout = timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        // An interruption is a wake-up with nothing to do.
        let _ = poll(&mut fds, timeout.as_ref());
        self.waker.rise();
    }

    fn hear(&self, connection: &Connection) {
        let mut bytes = [0; MOST_BYTES];
        loop {
            let mut fds = Vec::new();
            match socket::receive(&connection.socket, &mut bytes, &mut fds) {
                Ok(ReceiveOutcome::Packet(len)) => match ToClient::decode(&bytes[..len], fds.len()) {
                    Ok(message) => self.state().hear(message, fds),
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

fn refused(answer: Answer, question: &ToBroker) -> Result<Answer> {
    match answer {
        (ToClient::Declined { refusal, why, .. }, _) => Err(declined(refusal, why, question)),
        answer => Ok(answer),
    }
}

fn declined(refusal: Refusal, why: String, question: &ToBroker) -> ObjectError {
    match refusal {
        Refusal::NotFound => {
            let name = match question {
                ToBroker::Open { selector, .. } => selector.to_string(),
                ToBroker::Remove { name, .. } | ToBroker::Watch { name, .. } => name.clone(),
                _ => "the object".into(),
            };
            ObjectError::NotFound { name, why }
        }
        Refusal::Conflict => ObjectError::Conflict { why },
        Refusal::OutOfMemory => ObjectError::OutOfMemory { why },
        refusal => ObjectError::Refused { refusal, why, remedy: refusal.remedy() },
    }
}

fn lost(question: &ToBroker) -> ObjectError {
    match question {
        ToBroker::Create { identity, .. } | ToBroker::Commit { identity, .. } => {
            ObjectError::WriterLost { identity: *identity }
        }
        _ => Error::ProducerGone { pid: 0 }.into(),
    }
}

/// The broker answered what nobody asked.
pub(super) fn nonsense() -> ObjectError {
    Error::Mismatch {
        what: "the broker's answer",
        theirs: "of another kind".into(),
        ours: "what the question asks for".into(),
        remedy: "use broker and client of one version",
    }
    .into()
}
