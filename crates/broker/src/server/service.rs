//! The thread that serves all clients: the socket, the participants, their deaths, and the two threads that may wait.
//!
//! It never waits for anything but all of them at once. An answer that does not fit into a socket is dropped: the
//! client asks again.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use channel::os::poller::Poller;
use channel::os::process;
use channel::os::socket::{self, Listener, ReceiveOutcome};
use channel::os::waker::Waker;
use channel::trace_point;
use gpu_api::{Error, Result};

use crate::memory::sealed;
use crate::object::identity::Identity;
use crate::object::manifest::Manifest;
use crate::server::catalogue::{Action, Answer, Asker, Catalogue, KeepError, Limits, Participant};
use crate::server::listing::{Listing, Process, Row};
use crate::server::peer::{Peer, Proof, Slots, identify};
use crate::server::{deposit, workshop};
use crate::wire::{self, MOST_BYTES, Refusal, ToBroker, ToClient, version_of_hello};

/// A descriptor that keeps memory.
pub(super) type File = Arc<OwnedFd>;

/// Connections that have not said hello yet, at most: of more, the one that has been silent for longest goes.
const MOST_GREETINGS: usize = 256;
/// Participants at a time.
const MOST_PARTICIPANTS: usize = 4_096;
/// Messages of one participant in a turn.
const MESSAGES_A_TURN: usize = 16;
/// Connections accepted in a turn.
const ACCEPTS_A_TURN: usize = 64;
/// How often a keeper that is away is looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What the other threads did.
pub(super) enum Happened {
    Drafted(Identity, Result<(Box<Manifest>, u64), (Refusal, String)>),
    Made(Identity, Result<Vec<File>, (Refusal, String)>),
    Kept(Identity, Result<File, KeepError>),
    Forgotten(u64, Result<(), KeepError>),
    Looked(Option<(OwnedFd, bool)>),
    Fed(Result<(), KeepError>),
}

/// How another thread tells the service what it did.
#[derive(Clone)]
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

/// What a descriptor is watched for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Watch {
    Listener,
    Waker,
    Leash,
    Greeting,
    Socket(Participant),
    Process(Participant),
    Descendant(Participant, usize),
}

/// How the broker stands with its keeper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    /// None was asked for.
    None,
    /// It has everything.
    Fed,
    /// It is being looked for, or fed.
    Absent,
}

/// What the service starts with.
pub(super) struct Parts {
    pub listener: Listener,
    pub limits: Limits,
    pub allowed: Vec<u32>,
    pub catalogue: Catalogue<File>,
    pub standing: Standing,
    pub next_tombs: u64,
    pub restored: u64,
    pub orphans: u64,
    pub happened: Receiver<Happened>,
    pub waker: Arc<Waker>,
    pub workshop: Sender<workshop::Job>,
    pub deposit: Sender<deposit::Job>,
}

pub(super) struct Service {
    parts: Parts,
    poller: Poller,
    watches: HashMap<u64, Watch>,
    next_key: u64,
    greetings: BTreeMap<u64, OwnedFd>,
    peers: HashMap<Participant, Peer>,
    next_participant: u64,
    incarnation: [u8; 16],
    own_pidfd: OwnedFd,
    leash: Option<(u64, OwnedFd)>,
    /// The deposit thread looks for a keeper, or feeds one.
    looking: bool,
    look_at: Option<Instant>,
    started: Instant,
    commits: u64,
    opens: u64,
    aborted: u64,
}

impl Service {
    pub(super) fn new(parts: Parts) -> Result<Service> {
        let mut incarnation = [0; 16];
        rustix::rand::getrandom(&mut incarnation, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::system("getrandom", "allow getrandom in this sandbox", e))?;
        let looks = parts.standing != Standing::None;
        let mut service = Service {
            parts,
            poller: Poller::new()?,
            watches: HashMap::new(),
            next_key: 0,
            greetings: BTreeMap::new(),
            peers: HashMap::new(),
            next_participant: 1,
            incarnation,
            own_pidfd: process::own_pidfd()?,
            leash: None,
            looking: false,
            look_at: looks.then(Instant::now),
            started: Instant::now(),
            commits: 0,
            opens: 0,
            aborted: 0,
        };
        let listener = service.key(Watch::Listener);
        service.poller.add(service.parts.listener.as_fd(), listener)?;
        let waker = service.key(Watch::Waker);
        service.poller.add(service.parts.waker.fd(), waker)?;
        Ok(service)
    }

    /// Serves for ever.
    pub(super) fn run(mut self, restored: Vec<Action<File>>) -> ! {
        self.act(restored);
        loop {
            self.turn();
        }
    }

    fn turn(&mut self) {
        self.look_for_keeper();
        let timeout = self.look_at.filter(|_| !self.looking).map(|at| at.saturating_duration_since(Instant::now()));
        for key in self.poller.wait(timeout) {
            match self.watches.get(&key).copied() {
                Some(Watch::Listener) => self.accept(),
                Some(Watch::Waker) => self.parts.waker.rise(),
                Some(Watch::Leash) => self.lose_keeper(),
                Some(Watch::Greeting) => self.greet(key),
                Some(Watch::Socket(participant)) => self.hear(participant, key),
                Some(Watch::Process(participant)) => self.note(participant, key, |proof| proof.exited = true),
                Some(Watch::Descendant(participant, _)) => self.note(participant, key, |proof| proof.descendants -= 1),
                None => {}
            }
        }
        while let Ok(happened) = self.parts.happened.try_recv() {
            self.take(happened);
        }
    }

    fn take(&mut self, happened: Happened) {
        let actions = match happened {
            Happened::Drafted(identity, draft) => {
                self.parts.catalogue.drafted(identity, draft.map(|(draft, granularity)| (*draft, granularity)))
            }
            Happened::Made(identity, made) => {
                trace_point!("made");
                let peers = &mut self.peers;
                self.parts.catalogue.made(identity, made, |writer, count| peers.get_mut(&writer)?.slots.grant(count))
            }
            Happened::Kept(identity, kept) => {
                self.commits += u64::from(kept.is_ok());
                if matches!(kept, Err(KeepError::Absent)) {
                    self.lose_keeper();
                }
                let actions = self.parts.catalogue.kept(identity, kept);
                trace_point!("visible");
                actions
            }
            Happened::Forgotten(token, forgotten) => self.parts.catalogue.forgotten(token, forgotten),
            Happened::Looked(found) => {
                self.looking = false;
                match found {
                    Some((leash, fed)) => self.hold(leash, fed),
                    None => self.look_at = Some(Instant::now() + LOOK_AGAIN),
                }
                Vec::new()
            }
            Happened::Fed(fed) => {
                self.looking = false;
                match fed {
                    Ok(()) => self.parts.standing = Standing::Fed,
                    Err(error) => {
                        tracing::warn!(?error, "the keeper does not take everything");
                        self.lose_keeper();
                    }
                }
                Vec::new()
            }
        };
        self.act(actions);
    }

    fn act(&mut self, actions: Vec<Action<File>>) {
        for action in actions {
            match action {
                Action::Answer(to, request, answer) => self.answer(to, request, answer),
                Action::Make { identity, device, bytes } => {
                    self.work(workshop::Job::Make(identity, device, bytes));
                }
                Action::Keep { identity, seq, manifest, regions } => {
                    trace_point!("commit.accepted");
                    self.deposit(deposit::Job::Keep { identity, seq, manifest, regions });
                }
                Action::Forget { token, objects, tombs } => {
                    let tombs = tombs.map(|tombs| (self.next_tombs(), tombs));
                    self.deposit(deposit::Job::Forget { token, objects, tombs });
                }
                Action::EndLeases(of, leases) => {
                    if let Some(peer) = self.peers.get_mut(&of) {
                        peer.slots.end(&leases);
                    }
                }
            }
        }
    }

    fn next_tombs(&mut self) -> u64 {
        self.parts.next_tombs += 1;
        self.parts.next_tombs
    }

    // The threads that may wait are there as long as the process.

    fn work(&self, job: workshop::Job) {
        let _ = self.parts.workshop.send(job);
    }

    fn deposit(&self, job: deposit::Job) {
        let _ = self.parts.deposit.send(job);
    }

    // The keeper.

    fn look_for_keeper(&mut self) {
        if !self.looking && self.look_at.is_some_and(|at| at <= Instant::now()) {
            self.look_at = None;
            self.looking = true;
            self.deposit(deposit::Job::Look);
        }
    }

    fn hold(&mut self, leash: OwnedFd, fed: bool) {
        let key = self.key(Watch::Leash);
        if self.poller.add(leash.as_fd(), key).is_err() {
            self.watches.remove(&key);
            self.look_at = Some(Instant::now() + LOOK_AGAIN);
            return;
        }
        self.let_go();
        self.leash = Some((key, leash));
        if fed {
            self.parts.standing = Standing::Fed;
        } else {
            self.looking = true;
            let tombs = (self.next_tombs(), self.parts.catalogue.tombs());
            self.deposit(deposit::Job::Feed { objects: self.parts.catalogue.visible(), tombs });
        }
    }

    fn lose_keeper(&mut self) {
        self.let_go();
        if self.parts.standing != Standing::None {
            self.parts.standing = Standing::Absent;
            self.look_at = Some(Instant::now() + LOOK_AGAIN);
        }
    }

    fn let_go(&mut self) {
        if let Some((key, leash)) = self.leash.take() {
            self.unwatch(key, leash.as_fd());
        }
    }

    // Connections.

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_A_TURN {
            match self.parts.listener.accept() {
                Ok(Some(socket)) => {
                    while self.greetings.len() >= MOST_GREETINGS {
                        let Some((&oldest, _)) = self.greetings.first_key_value() else { break };
                        // It may have spoken since it was looked at.
                        self.greet(oldest);
                        if let Some(socket) = self.greetings.remove(&oldest) {
                            self.unwatch(oldest, socket.as_fd());
                        }
                    }
                    let key = self.key(Watch::Greeting);
                    match self.poller.add(socket.as_fd(), key) {
                        Ok(()) => drop(self.greetings.insert(key, socket)),
                        Err(error) => {
                            self.watches.remove(&key);
                            tracing::warn!(%error, "a connection is turned away");
                        }
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    return;
                }
            }
        }
    }

    fn greet(&mut self, key: u64) {
        let Some(socket) = self.greetings.remove(&key) else { return };
        let mut bytes = [0; MOST_BYTES];
        let mut fds = Vec::new();
        let len = match socket::receive(socket.as_fd(), &mut bytes, &mut fds) {
            Ok(ReceiveOutcome::Packet(len)) => len,
            Ok(ReceiveOutcome::Empty) => {
                self.greetings.insert(key, socket);
                return;
            }
            Ok(ReceiveOutcome::HungUp) | Err(_) => {
                self.unwatch(key, socket.as_fd());
                return;
            }
        };
        self.unwatch(key, socket.as_fd());
        if let Err((refusal, why)) = self.admit(&socket, &bytes[..len], &mut fds) {
            tracing::warn!(%why, "a participant is refused");
            let refused = ToClient::Refused { refusal, lowest: wire::LOWEST, highest: wire::HIGHEST, why };
            let len = refused.encode(&mut bytes, wire::HIGHEST, 0);
            let _ = socket::send(socket.as_fd(), &bytes[..len], &[]);
        }
        if !fds.is_empty() {
            self.work(workshop::Job::Drop(fds));
        }
    }

    fn admit(&mut self, socket: &OwnedFd, bytes: &[u8], fds: &mut Vec<OwnedFd>) -> Result<(), (Refusal, String)> {
        let internal = |error: Error| (Refusal::Failed, workshop::explain(&error));
        let of = socket::credentials(socket.as_fd()).map_err(|e| (Refusal::Failed, e.to_string()))?;
        let uid = of.uid;
        if uid != rustix::process::geteuid().as_raw() && !self.parts.allowed.contains(&uid) {
            return Err((Refusal::User, format!("uid {uid} may not connect to this broker")));
        }
        let Some((lowest, highest)) = version_of_hello(bytes) else {
            return Err((Refusal::Protocol, "the first message must be a hello".into()));
        };
        let Some(version) = wire::agree(lowest, highest) else {
            let ours = format!("{} to {}", wire::LOWEST, wire::HIGHEST);
            return Err((
                Refusal::Version,
                format!("the participant speaks versions {lowest} to {highest}, the broker {ours}"),
            ));
        };
        let hello = ToBroker::decode(bytes, fds.len()).map_err(|error| (Refusal::Protocol, error.to_string()))?;
        let ToBroker::Hello { shared_context, name, .. } = hello else {
            return Err((Refusal::Protocol, "the first message must be a hello".into()));
        };
        if self.peers.len() >= MOST_PARTICIPANTS {
            return Err((Refusal::Limit, format!("the broker has {MOST_PARTICIPANTS} participants already")));
        }
        let Some((pid, command)) = identify(fds).map_err(internal)? else {
            return Err((Refusal::Protocol, "a descriptor of the hello is not a pidfd".into()));
        };
        let mut came = std::mem::take(fds);
        let pidfd = came.remove(0);
        let participant = Participant(self.next_participant);
        self.next_participant += 1;
        let peer = Peer {
            asker: Asker { participant, uid, shared_context },
            pid,
            command,
            name,
            version,
            socket: socket.try_clone().map_err(|e| internal(Error::system("dup", "raise RLIMIT_NOFILE", e)))?,
            pidfd,
            proof: Proof { descendants: came.len(), ..Proof::default() },
            descendants: came,
            slots: Slots::new().map_err(internal)?,
        };
        self.seat(participant, peer).map_err(internal)
    }

    fn seat(&mut self, participant: Participant, peer: Peer) -> Result<()> {
        let mut watched: Vec<(Watch, BorrowedFd<'_>)> =
            vec![(Watch::Socket(participant), peer.socket.as_fd()), (Watch::Process(participant), peer.pidfd.as_fd())];
        for (n, descendant) in peer.descendants.iter().enumerate() {
            watched.push((Watch::Descendant(participant, n), descendant.as_fd()));
        }
        let mut keys = Vec::new();
        let mut all = || -> Result<()> {
            for &(watch, fd) in &watched {
                let key = self.next_key;
                self.next_key += 1;
                self.poller.add(fd, key)?;
                self.watches.insert(key, watch);
                keys.push((key, fd));
            }
            let welcome = ToClient::Welcome {
                incarnation: self.incarnation,
                participant: participant.0,
                pid: std::process::id(),
                slots: peer.slots.file().slot_count(),
            };
            let mut bytes = [0; MOST_BYTES];
            let len = welcome.encode(&mut bytes, peer.version, 2);
            match socket::send(peer.socket.as_fd(), &bytes[..len], &[self.own_pidfd.as_fd(), peer.slots.file().fd()]) {
                Ok(socket::SendOutcome::Sent) => Ok(()),
                Ok(_) => Err(Error::Closing),
                Err(e) => Err(Error::system("sendmsg", "raise RLIMIT_NOFILE", e)),
            }
        };
        if let Err(error) = all() {
            for (key, fd) in keys {
                self.watches.remove(&key);
                self.poller.remove(fd);
            }
            return Err(error);
        }
        self.peers.insert(participant, peer);
        Ok(())
    }

    // Participants.

    fn hear(&mut self, participant: Participant, key: u64) {
        for _ in 0..MESSAGES_A_TURN {
            let Some(peer) = self.peers.get(&participant) else { return };
            let mut bytes = [0; MOST_BYTES];
            let mut fds = Vec::new();
            match socket::receive(peer.socket.as_fd(), &mut bytes, &mut fds) {
                Ok(ReceiveOutcome::Packet(len)) => {
                    let message = ToBroker::decode(&bytes[..len], fds.len());
                    match message {
                        Ok(message) => self.obey(participant, message, &mut fds),
                        Err(error) => tracing::warn!(%error, participant = participant.0, "a message is passed over"),
                    }
                    if !fds.is_empty() {
                        self.work(workshop::Job::Drop(fds));
                    }
                }
                Ok(ReceiveOutcome::Empty) => return,
                Ok(ReceiveOutcome::HungUp) => {
                    self.hang_up(participant, key);
                    return;
                }
                // Half closed, or no participant of ours: nothing more is heard of it but its hang-up.
                Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                    tracing::warn!(%error, participant = participant.0, "a participant is silenced");
                    self.poller.pause(peer.socket.as_fd(), key);
                    return;
                }
                // A packet that was lost is asked again.
                Err(error) => {
                    tracing::warn!(%error, participant = participant.0, "a packet is lost");
                    return;
                }
            }
        }
    }

    fn obey(&mut self, participant: Participant, message: ToBroker, fds: &mut Vec<OwnedFd>) {
        let Some(peer) = self.peers.get(&participant) else { return };
        let asker = peer.asker;
        let catalogue = &mut self.parts.catalogue;
        let one = |request, answer| vec![Action::Answer(participant, request, answer)];
        let actions = match message {
            ToBroker::Hello { .. } => Vec::new(),
            ToBroker::Create { request, identity, scratch, replace, expect } => {
                match (catalogue.create(asker, request, identity, scratch, replace, expect), fds.pop()) {
                    (Ok(()), Some(draft)) => {
                        trace_point!("create.accepted");
                        self.work(workshop::Job::Draft(identity, draft));
                        Vec::new()
                    }
                    (Ok(()), None) => Vec::new(),
                    (Err(answer), draft) => {
                        fds.extend(draft);
                        answer.map_or(Vec::new(), |answer| one(request, answer))
                    }
                }
            }
            ToBroker::Commit { request, identity } => {
                trace_point!("commit.heard");
                if self.parts.standing == Standing::Absent {
                    // Later: the keeper is away. It is asked again.
                    return;
                }
                catalogue.commit(asker, request, identity, |leases| peer.slots.are_released(leases))
            }
            ToBroker::AskOutcome { request, identity } => one(request, Answer::Outcome(catalogue.outcome(identity))),
            ToBroker::Abort { request, identity } => {
                let mut actions = catalogue.abort(asker, identity);
                actions.extend(one(request, Answer::Noted));
                actions
            }
            ToBroker::Open { request, selector } => {
                self.opens += 1;
                one(request, catalogue.open(asker, &selector))
            }
            ToBroker::Close { request, identity } => {
                catalogue.close(participant, identity);
                one(request, Answer::Noted)
            }
            ToBroker::Watch { request, seen, name } => catalogue.watch(asker, request, &name, seen),
            ToBroker::Remove { request, epoch, name } => {
                if self.parts.standing == Standing::Absent {
                    return;
                }
                catalogue.remove(asker, request, &name, epoch)
            }
            ToBroker::List { request } => {
                self.list(participant, request);
                Vec::new()
            }
        };
        self.act(actions);
    }

    fn answer(&self, to: Participant, request: u64, answer: Answer<File>) {
        let Some(peer) = self.peers.get(&to) else { return };
        let mut files: Vec<File> = Vec::new();
        let message = match answer {
            Answer::Created { granularity, leases, regions } => {
                files = regions;
                ToClient::Created { request, granularity, leases }
            }
            Answer::Committed(epoch) => ToClient::Committed { request, epoch },
            Answer::Outcome(standing) => ToClient::Outcome { request, standing },
            Answer::Noted => ToClient::Noted { request },
            Answer::Opened { identity, epoch, manifest, regions } => {
                files.push(manifest);
                files.extend(regions);
                ToClient::Opened { request, identity, epoch }
            }
            Answer::Newer { identity, epoch } => ToClient::Newer { request, identity, epoch },
            Answer::Removed(epoch) => ToClient::Removed { request, epoch },
            Answer::Declined(refusal, why) => ToClient::Declined { request, refusal, why },
        };
        let fds: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        say(peer, &message, &fds);
        trace_point!("answered");
    }

    fn list(&self, to: Participant, request: u64) {
        let Some(peer) = self.peers.get(&to) else { return };
        let text = serde_json::to_vec(&self.listing(peer.asker.uid)).unwrap_or_default();
        match sealed::create("gpu-ipc-listing", &text) {
            Ok(file) => say(peer, &ToClient::Listing { request, bytes: text.len() as u64 }, &[file.as_fd()]),
            Err(error) => {
                let (refusal, why) = (Refusal::Failed, workshop::explain(&error));
                say(peer, &ToClient::Declined { request, refusal, why }, &[]);
            }
        }
    }

    fn listing(&self, uid: u32) -> Listing {
        let process = |participant: &Participant| {
            let peer = self.peers.get(participant)?;
            Some(Process { pid: peer.pid, command: peer.command.clone(), name: peer.name.clone() })
        };
        let rows = self.parts.catalogue.rows(uid);
        let row = |row: &crate::server::catalogue::Row| Row {
            name: row.name.clone(),
            epoch: row.epoch.0,
            identity: row.identity.to_string(),
            bytes: row.bytes,
            owner: row.owner,
            state: row.state.into(),
            writer: row.writer.as_ref().and_then(process),
            readers: row.readers.iter().filter_map(process).collect(),
        };
        Listing {
            pid: std::process::id(),
            age_s: self.started.elapsed().as_secs(),
            keeper: match self.parts.standing {
                Standing::None => "none",
                Standing::Fed => "fed",
                Standing::Absent => "absent",
            }
            .into(),
            bytes: rows.iter().map(|row| row.bytes).sum(),
            limit: Some(self.parts.limits.bytes).filter(|&bytes| bytes != u64::MAX),
            restored: self.parts.restored,
            orphans: self.parts.orphans,
            commits: self.commits,
            opens: self.opens,
            aborted: self.aborted,
            objects: rows.iter().map(row).collect(),
        }
    }

    // Deaths.

    fn note(&mut self, participant: Participant, key: u64, note: impl FnOnce(&mut Proof)) {
        let Some(peer) = self.peers.get_mut(&participant) else { return };
        let fd = match self.watches.get(&key) {
            Some(Watch::Process(_)) => peer.pidfd.as_fd(),
            Some(Watch::Descendant(_, n)) => peer.descendants[*n].as_fd(),
            _ => return,
        };
        self.poller.remove(fd);
        self.watches.remove(&key);
        note(&mut peer.proof);
        self.bury(participant);
    }

    fn hang_up(&mut self, participant: Participant, key: u64) {
        let Some(peer) = self.peers.get_mut(&participant) else { return };
        self.poller.remove(peer.socket.as_fd());
        self.watches.remove(&key);
        peer.proof.hung_up = true;
        self.parts.catalogue.hung_up(participant);
        self.bury(participant);
    }

    /// Forgets a participant that has hung up and holds nothing, or is proven dead.
    fn bury(&mut self, participant: Participant) {
        let Some(peer) = self.peers.get(&participant) else { return };
        if !peer.proof.hung_up || (self.parts.catalogue.writes(participant) && !peer.proof.is_complete()) {
            return;
        }
        if self.parts.catalogue.writes(participant) {
            trace_point!("writer.buried");
            self.aborted += 1;
        }
        self.parts.catalogue.writer_died(participant);
        if let Some(peer) = self.peers.remove(&participant) {
            let mine = |watch: &Watch| matches!(watch, Watch::Socket(of) | Watch::Process(of) | Watch::Descendant(of, _) if *of == participant);
            self.poller.remove(peer.pidfd.as_fd());
            peer.descendants.iter().for_each(|descendant| self.poller.remove(descendant.as_fd()));
            self.watches.retain(|_, watch| !mine(watch));
            // What strangers sent may block at its close.
            let mut fds = peer.descendants;
            fds.push(peer.pidfd);
            self.work(workshop::Job::Drop(fds));
        }
    }

    fn key(&mut self, watch: Watch) -> u64 {
        let key = self.next_key;
        self.next_key += 1;
        self.watches.insert(key, watch);
        key
    }

    fn unwatch(&mut self, key: u64, fd: BorrowedFd<'_>) {
        self.poller.remove(fd);
        self.watches.remove(&key);
    }
}

fn say(peer: &Peer, message: &ToClient, fds: &[BorrowedFd<'_>]) {
    let mut bytes = [0; MOST_BYTES];
    let len = message.encode(&mut bytes, peer.version, fds.len());
    match socket::send(peer.socket.as_fd(), &bytes[..len], fds) {
        Ok(socket::SendOutcome::Sent) => {}
        outcome => tracing::debug!(?outcome, participant = peer.asker.participant.0, "an answer is dropped"),
    }
}
