//! The gateway's side: starts the carrier, asks it, and starts another when it dies.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::memory::{Access, Mapped};
use super::packet::{Ask, Packet, Said, pair, receive, send};
use super::table::{Generation, Next, Table};
use super::{PATIENCE, SLOT, SLOTS};
use crate::error::{Error, Result};
use crate::transport::{Pair, Peer, Place, Progress, Registration, Span, Transfer, Transport};

/// Slots that one read has at a time: as many reads run as a process pulls objects at a time.
const OF_ONE: usize = 3;
/// Between two carriers, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// A carrier that has lived so long was well.
const WELL: Duration = Duration::from_secs(10);
/// What of the environment a carrier has: UCX's and NIXL's, and where its libraries are.
const KEPT: &[&str] = &[
    "UCX_",
    "NIXL_",
    "GPU_IPC_NIXL",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
];

/// How a carrier is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program, which runs [`worker::run`](super::worker::run) with these arguments.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Its environment, besides what is kept of this process'.
    pub environment: Vec<(&'static str, String)>,
    /// What carries the bytes in it: `nixl`, `tcp`.
    pub kind: &'static str,
}

/// An engine in a process of its own.
pub struct Carrier(Arc<Shared>);

struct Shared {
    options: Options,
    state: Mutex<State>,
    changed: Condvar,
}

type Answer = (Said, Vec<u8>);

struct State {
    table: Table<Answer>,
    line: Option<Line>,
    /// How often one was started, for people.
    starts: u64,
    over: bool,
}

/// A carrier that is alive.
#[derive(Clone)]
struct Line {
    socket: Arc<OwnedFd>,
    process: Arc<OwnedFd>,
    pid: u32,
    slots: Arc<Mapped>,
}

impl Line {
    fn kill(&self, why: &str) {
        tracing::warn!(why, pid = self.pid, "the carrier is killed");
        // It may have ended.
        let _ = pidfd_send_signal(&*self.process, Signal::KILL);
    }
}

impl Carrier {
    /// Starts one, and waits until it is ready.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] with what it lacks.
    pub fn start(options: Options) -> Result<Carrier> {
        let (child, line) = spawn(&options)?;
        let mut table = Table::new(SLOTS);
        let generation = table.started();
        let shared = Arc::new(Shared {
            options,
            state: Mutex::new(State {
                table,
                line: Some(line.clone()),
                starts: 1,
                over: false,
            }),
            changed: Condvar::new(),
        });
        let watched = Arc::clone(&shared);
        let watch = move || watched.keep(generation, child, line);
        thread::start("gateway-carrier", watch).map_err(no_thread)?;
        Ok(Carrier(shared))
    }

    /// Names the carrier's process; none while another is started.
    pub fn pid(&self) -> Option<u32> {
        self.0.lock().line.as_ref().map(|line| line.pid)
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.over = true;
        if let Some(line) = state.line.take() {
            // It ends by itself when the socket does; it may be stopped.
            let _ = pidfd_send_signal(&*line.process, Signal::KILL);
        }
        self.0.changed.notify_all();
    }
}

impl fmt::Debug for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carrier")
            .field("kind", &self.0.options.kind)
            .field("pid", &self.pid())
            .finish_non_exhaustive()
    }
}

/// Starts the program and waits until it says that it is ready.
fn spawn(options: &Options) -> Result<(Child, Line)> {
    let failed = |why: String| Error::Unavailable {
        what: "the process that carries bytes".into(),
        why,
        remedy: "its messages are on standard error",
    };
    let io = |e: std::io::Error| failed(e.to_string());
    let (ours, theirs) = pair().map_err(io)?;
    let bytes = SLOT * SLOTS as u64;
    let file = Mapped::file(bytes).map_err(io)?;
    let slots = Mapped::map(file.as_fd(), bytes, Access::ReadWrite).map_err(io)?;
    let kept = std::env::vars_os().filter(|(name, _)| {
        let name = name.as_encoded_bytes();
        KEPT.iter().any(|kept| name.starts_with(kept.as_bytes()))
    });
    let mut child = Command::new(&options.program)
        .args(&options.arguments)
        .env_clear()
        .envs(kept)
        .envs(
            options
                .environment
                .iter()
                .map(|(name, value)| (name, value)),
        )
        .current_dir("/")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .spawn()
        .map_err(io)?;
    let hello = Packet {
        files: vec![file],
        ..Packet::plain(0, Ask::Slots(bytes))
    };
    let ready = send(ours.as_fd(), &hello).and_then(|()| first(&ours));
    let process = Pid::from_raw(child.id().cast_signed())
        .ok_or_else(|| failed("it has no number".into()))
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).map_err(|e| io(e.into())));
    let lacks = match (ready, process) {
        (Err(error), _) => Err(io(error)),
        (_, Err(error)) => Err(error),
        (Ok(Said::Ready(lacks)), Ok(process)) => Ok((lacks, process)),
        (Ok(Said::Failed(why)), _) => Err(failed(why)),
        (Ok(other), _) => Err(failed(format!("it said {other:?} first"))),
    };
    let (lacks, process) = lacks.inspect_err(|_| {
        let _ = child.kill();
        let _ = child.wait();
    })?;
    for lack in lacks {
        tracing::warn!(%lack, "the carrier's cage");
    }
    let line = Line {
        socket: Arc::new(ours),
        process: Arc::new(process),
        pid: child.id(),
        slots: Arc::new(slots),
    };
    Ok((child, line))
}

/// Waits for the first packet.
fn first(socket: &OwnedFd) -> std::io::Result<Said> {
    let patience = Timespec::try_from(PATIENCE).map_err(std::io::Error::other)?;
    let came = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&patience))?;
    if came == 0 {
        return Err(std::io::ErrorKind::TimedOut.into());
    }
    let packet = receive::<Said>(socket.as_fd(), false, false)?;
    let ended = || std::io::Error::other("it ended at once");
    packet.map(|packet| packet.body).ok_or_else(ended)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears one carrier after the other, until nobody needs one.
    fn keep(&self, mut generation: Generation, mut child: Child, mut line: Line) {
        let mut pause = PAUSES.0;
        loop {
            let begun = Instant::now();
            self.hear(generation, &line);
            // Before its slots are used again: it may have closed the socket alone.
            let _ = child.kill();
            let ended = child.wait();
            let mut state = self.lock();
            state.table.died();
            state.line = None;
            self.changed.notify_all();
            if state.over {
                return;
            }
            drop(state);
            tracing::warn!(
                ?ended,
                "the carrier has ended, and its leases with it; another is started"
            );
            if begun.elapsed() >= WELL {
                pause = PAUSES.0;
            }
            loop {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSES.1);
                if self.lock().over {
                    return;
                }
                match spawn(&self.options) {
                    Ok((next, its)) => {
                        (child, line) = (next, its);
                        break;
                    }
                    Err(error) => tracing::warn!(%error, "no carrier"),
                }
            }
            let mut state = self.lock();
            if state.over {
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            generation = state.table.started();
            state.starts += 1;
            state.line = Some(line.clone());
            self.changed.notify_all();
        }
    }

    /// Takes what a carrier says until it ends or makes no sense.
    fn hear(&self, generation: Generation, line: &Line) {
        loop {
            let packet = match receive::<Said>(line.socket.as_fd(), false, true) {
                Ok(Some(packet)) => packet,
                Ok(None) => return,
                Err(error) => return line.kill(&error.to_string()),
            };
            let answer = (packet.body, packet.attached);
            let next = self
                .lock()
                .table
                .answered(generation, packet.number, answer);
            match next {
                Next::Wake => self.changed.notify_all(),
                Next::End(lent) => self.tell(line, lent, Ask::End(lent)),
                Next::Nothing => {}
                Next::Kill => return line.kill("it answered what nobody asked"),
            }
        }
    }

    /// Says what has no answer.
    fn tell(&self, line: &Line, number: u64, ask: Ask) {
        if let Err(error) = send(line.socket.as_fd(), &Packet::plain(number, ask)) {
            line.kill(&format!("it takes no message: {error}"));
        }
    }

    /// Asks, and waits for the answer.
    fn ask(
        &self,
        number: fn(&mut Table<Answer>) -> u64,
        body: Ask,
        attached: Vec<u8>,
        files: Vec<OwnedFd>,
    ) -> Result<(Generation, u64, Answer)> {
        let until = Instant::now() + PATIENCE;
        let mut state = self.lock();
        let line = loop {
            match &state.line {
                Some(line) => break line.clone(),
                None if state.over || Instant::now() >= until => return Err(gone()),
                None => state = self.wait(state, until),
            }
        };
        let (generation, number) = (state.table.generation(), number(&mut state.table));
        let packet = Packet {
            number,
            body,
            attached,
            files,
        };
        if let Err(error) = send(line.socket.as_fd(), &packet) {
            // Nobody answers what was not asked. What is too long harms nobody.
            let _ = state
                .table
                .answered(generation, number, (Said::Loaded, Vec::new()));
            let _ = state.table.give_up(generation, number);
            if error.kind() != std::io::ErrorKind::Other {
                line.kill(&format!("it takes no message: {error}"));
            }
            return Err(Error::Unavailable {
                what: "an answer of the carrier".into(),
                why: error.to_string(),
                remedy: "ask again",
            });
        }
        loop {
            match state.table.take(generation, number) {
                Err(_) => return Err(gone()),
                Ok(Some((Said::Failed(why), _))) => {
                    return Err(Error::Unavailable {
                        what: "what the carrier was asked for".into(),
                        why,
                        remedy: "its messages are on standard error",
                    });
                }
                Ok(Some(answer)) => return Ok((generation, number, answer)),
                Ok(None) if Instant::now() >= until => {
                    line.kill("it does not answer");
                    return Err(gone());
                }
                Ok(None) => state = self.wait(state, until),
            }
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        let left = until.saturating_duration_since(Instant::now());
        self.changed
            .wait_timeout(state, left)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// The carrier said something else than was asked for.
    fn nonsense(&self, generation: Generation, said: &Said) -> Error {
        let state = self.lock();
        if generation == state.table.generation()
            && let Some(line) = &state.line
        {
            line.kill(&format!("it said {said:?} to another question"));
        }
        gone()
    }
}

impl Transport for Carrier {
    fn kind(&self) -> &'static str {
        self.0.options.kind
    }

    unsafe fn register(&self, memory: &[Span]) -> Result<Box<dyn Registration>> {
        if let Some(span) = memory.iter().find(|span| span.place != Place::Host) {
            return Err(Error::Invalid {
                what: "memory that a carrier's reads are copied to",
                got: format!("{:#x} on a device", span.address),
                must: "the host's",
            });
        }
        Ok(Box::new(Destination))
    }

    unsafe fn lend(&self, memory: &[Span], files: Vec<OwnedFd>) -> Result<Box<dyn Registration>> {
        if files.len() != memory.len() {
            return Err(Error::Invalid {
                what: "memory to lend",
                got: format!("{} descriptors for {} ranges", files.len(), memory.len()),
                must: "as many descriptors as ranges",
            });
        }
        let bytes = memory.iter().map(|span| span.bytes).collect();
        let (generation, number, (said, _)) =
            self.0
                .ask(Table::lend, Ask::Lend(bytes), Vec::new(), files)?;
        match said {
            Said::Lent(addresses) if addresses.len() == memory.len() => {
                self.0.lock().table.lent(generation, number);
                Ok(Box::new(Lent {
                    shared: Arc::clone(&self.0),
                    generation,
                    number,
                    addresses,
                }))
            }
            other => Err(self.0.nonsense(generation, &other)),
        }
    }

    fn wants_files(&self) -> bool {
        true
    }

    fn metadata(&self, registrations: &[u64]) -> Result<Vec<u8>> {
        let ask = Ask::Metadata(registrations.to_vec());
        match self.0.ask(Table::call, ask, Vec::new(), Vec::new())? {
            (_, _, (Said::Metadata, metadata)) => Ok(metadata),
            (generation, _, (other, _)) => Err(self.0.nonsense(generation, &other)),
        }
    }

    fn load_peer(&self, metadata: &[u8]) -> Result<Box<dyn Peer>> {
        match self
            .0
            .ask(Table::call, Ask::Load, metadata.to_vec(), Vec::new())?
        {
            (generation, number, (Said::Loaded, _)) => Ok(Box::new(Remote(Arc::new(Known {
                shared: Arc::clone(&self.0),
                generation,
                number,
            })))),
            (generation, _, (other, _)) => Err(self.0.nonsense(generation, &other)),
        }
    }

    fn ends_reads(&self) -> bool {
        true
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }
}

/// Memory of this process that reads are copied to: the carrier knows nothing of it.
#[derive(Debug)]
struct Destination;

impl Registration for Destination {
    fn number(&self) -> u64 {
        0
    }

    fn addresses(&self) -> Vec<u64> {
        Vec::new()
    }
}

/// What a carrier lends until this is dropped, or the carrier dies.
struct Lent {
    shared: Arc<Shared>,
    generation: Generation,
    number: u64,
    addresses: Vec<u64>,
}

impl Registration for Lent {
    fn number(&self) -> u64 {
        self.number
    }

    fn addresses(&self) -> Vec<u64> {
        self.addresses.clone()
    }

    fn is_alive(&self) -> bool {
        self.shared
            .lock()
            .table
            .is_lent(self.generation, self.number)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.table.end(self.generation, self.number)
            && let Some(line) = state.line.clone()
        {
            self.shared.tell(&line, self.number, Ask::End(self.number));
        }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// A peer that a carrier reads from.
#[derive(Debug)]
struct Remote(Arc<Known>);

/// A peer that a carrier knows until this is dropped: with it, and with the last read from it.
struct Known {
    shared: Arc<Shared>,
    generation: Generation,
    number: u64,
}

impl Peer for Remote {
    unsafe fn read(&self, pairs: &[Pair]) -> Result<Box<dyn Transfer>> {
        if let Some(pair) = pairs
            .iter()
            .find(|pair| pair.to.place != Place::Host || pair.from.bytes != pair.to.bytes)
        {
            return Err(Error::Invalid {
                what: "a destination",
                got: format!("{:?} for {:?}", pair.to, pair.from),
                must: "host memory, as long as its source",
            });
        }
        let state = self.0.shared.lock();
        let line = state.line.clone();
        let line = line.filter(|_| self.0.generation == state.table.generation());
        drop(state);
        let Some(line) = line else {
            return Err(died());
        };
        Ok(Box::new(Read {
            shared: Arc::clone(&self.0.shared),
            generation: self.0.generation,
            line,
            peer: Arc::clone(&self.0),
            waiting: pairs.iter().flat_map(pieces).collect(),
            flying: Vec::new(),
            arrived: 0,
            failed: None,
            ended: None,
        }))
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        let state = self.shared.lock();
        if self.generation == state.table.generation()
            && let Some(line) = state.line.clone()
        {
            self.shared
                .tell(&line, self.number, Ask::Forget(self.number));
        }
    }
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Known")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// A read, piece by piece through the slots.
struct Read {
    shared: Arc<Shared>,
    generation: Generation,
    line: Line,
    peer: Arc<Known>,
    waiting: VecDeque<Pair>,
    /// The question, its slot, and where its bytes go.
    flying: Vec<(u64, usize, Span)>,
    arrived: u64,
    failed: Option<String>,
    ended: Option<Result<(), String>>,
}

impl Read {
    /// Copies what has come, and frees the slots.
    fn land(&mut self) {
        let mut came = Vec::new();
        let mut state = self.shared.lock();
        let (generation, failed) = (self.generation, &mut self.failed);
        self.flying.retain(|&(number, slot, to)| {
            let said = state.table.take(generation, number);
            match said {
                Ok(None) => return true,
                Ok(Some((Said::Read, _))) => came.push((slot, to)),
                Ok(Some((said, _))) => {
                    state.table.free(generation, slot);
                    let why = match said {
                        Said::Failed(why) => why,
                        _ => "the carrier answered another question".into(),
                    };
                    failed.get_or_insert(why);
                }
                Err(_) => drop(failed.get_or_insert_with(|| died().to_string())),
            }
            false
        });
        drop(state);
        for (slot, to) in came {
            let length = usize::try_from(to.bytes).unwrap_or(usize::MAX);
            let from = self.line.slots.at(SLOT * slot as u64);
            // SAFETY: `copy_nonoverlapping` asks for
            // - a source that may be read: a slot has `SLOT` bytes, and a piece no more; it is
            //   mapped as long as `line` is held;
            // - a destination that may be written and lies apart: the caller of `Peer::read` keeps
            //   it mapped and to itself until this transfer has ended.
            unsafe { std::ptr::copy_nonoverlapping(from, to.address as *mut u8, length) };
            self.arrived += to.bytes;
            self.shared.lock().table.free(generation, slot);
        }
    }

    /// Asks for pieces, as far as there are slots.
    fn ask(&mut self) {
        while self.failed.is_none() && self.flying.len() < OF_ONE {
            let Some(pair) = self.waiting.front() else {
                return;
            };
            let mut state = self.shared.lock();
            if self.generation != state.table.generation() || state.line.is_none() {
                self.failed = Some(died().to_string());
                return;
            }
            let Some((number, slot)) = state.table.read() else {
                // Others have them.
                return;
            };
            let ask = Ask::Read {
                peer: self.peer.number,
                from: pair.from.address,
                bytes: pair.from.bytes,
                at: SLOT * slot as u64,
            };
            self.shared.tell(&self.line, number, ask);
            drop(state);
            self.flying.push((number, slot, pair.to));
            self.waiting.pop_front();
        }
    }
}

impl Transfer for Read {
    fn poll(&mut self) -> Result<Progress> {
        if let Some(ended) = &self.ended {
            return ended
                .clone()
                .map(|()| Progress::Done)
                .map_err(|why| Error::Transfer { why });
        }
        // What has come is told before the end is.
        let before = self.arrived;
        self.land();
        self.ask();
        let goes_on = !(self.flying.is_empty() && self.waiting.is_empty());
        if self.failed.is_none() && (goes_on || self.arrived > before) {
            return Ok(Progress::Running {
                bytes: self.arrived,
            });
        }
        // Nothing is written to the destination but here, so what is under way yet harms nobody.
        let ended = self.failed.take().map_or(Ok(()), Err);
        self.ended = Some(ended.clone());
        ended
            .map(|()| Progress::Done)
            .map_err(|why| Error::Transfer { why })
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        for (number, ..) in &self.flying {
            let _ = state.table.give_up(self.generation, *number);
        }
    }
}

impl fmt::Debug for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Read")
            .field("waiting", &self.waiting.len())
            .field("flying", &self.flying)
            .field("arrived", &self.arrived)
            .finish_non_exhaustive()
    }
}

/// Cuts a pair into pieces that fit into a slot.
fn pieces(pair: &Pair) -> impl Iterator<Item = Pair> + use<> {
    let pair = *pair;
    (0..pair.to.bytes.div_ceil(SLOT)).map(move |index| {
        let at = index * SLOT;
        let bytes = SLOT.min(pair.to.bytes - at);
        let mut piece = pair;
        // The origin's word: a range that wraps is refused by the carrier.
        piece.from.address = pair.from.address.wrapping_add(at);
        piece.to.address = pair.to.address + at;
        (piece.from.bytes, piece.to.bytes) = (bytes, bytes);
        piece
    })
}

fn gone() -> Error {
    Error::Unavailable {
        what: "an answer of the carrier".into(),
        why: "it has ended".into(),
        remedy: "ask again: another is started",
    }
}

fn died() -> Error {
    Error::Transfer {
        why: "the process that carries bytes has ended".into(),
    }
}

fn no_thread(error: gpu_ipc::Error) -> Error {
    Error::Unavailable {
        what: "a thread".into(),
        why: gpu_ipc::backend::explain(&error),
        remedy: "raise RLIMIT_NPROC",
    }
}
