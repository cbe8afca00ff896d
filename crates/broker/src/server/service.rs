//! The thread that serves all clients: the socket, the participants, their deaths, and the two
//! threads that may wait.
//!
//! It never waits for anything but all of them at once. An answer that does not fit into a socket
//! is dropped: the client asks again.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use gpu_api::{Error, Result};
use transport::os::process;
use transport::os::socket::{self, Listener, ReceiveOutcome};
use transport::os::waker::Waker;
use transport::trace_point;
use transport::wire::table;

use crate::memory::sealed;
use crate::object::identity::Epoch;
use crate::server::action::{Action, Answer, KeepError, Participant, Refused};
use crate::server::admission::{self, Newcomer, failed};
use crate::server::bequest::Tomb;
use crate::server::catalogue::Catalogue;
use crate::server::happened::{File, Happened};
use crate::server::limits::Limits;
use crate::server::listing::{Listing, Process, Removed, Row};
use crate::server::peer::{Peer, Proof};
use crate::server::watches::{Watch, Watches};
use crate::server::{deposit, workshop};
use crate::wire::{MOST_BYTES, RefusalCode, ToBroker, ToClient};

/// Connections that have not said hello yet, at most: of more, the one that has been silent for
/// longest goes.
const MOST_GREETINGS: usize = 256;
/// Messages of one participant in a turn.
const MESSAGES_A_TURN: usize = 16;
/// Connections accepted in a turn.
const ACCEPTS_A_TURN: usize = 64;
/// How often a keeper that is away is looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// How the broker stands with its keeper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeeperState {
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
    pub keeper: KeeperState,
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
    watches: Watches,
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
        let looks = parts.keeper != KeeperState::None;
        let mut service = Service {
            parts,
            watches: Watches::new()?,
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
        service
            .watches
            .add(Watch::Listener, service.parts.listener.as_fd())?;
        service
            .watches
            .add(Watch::Waker, service.parts.waker.fd())?;
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
        let timeout = self
            .look_at
            .filter(|_| !self.looking)
            .map(|at| at.saturating_duration_since(Instant::now()));
        for key in self.watches.wait(timeout) {
            match self.watches.of(key) {
                Some(Watch::Listener) => self.accept(),
                Some(Watch::Waker) => self.parts.waker.rise(),
                Some(Watch::Leash) => self.lose_keeper(),
                Some(Watch::Greeting) => self.greet(key),
                Some(Watch::Socket(participant)) => self.hear(participant, key),
                Some(Watch::Process(participant)) => {
                    self.note(participant, key, |proof| proof.exited = true)
                }
                Some(Watch::Descendant(participant, _)) => {
                    self.note(participant, key, |proof| proof.descendants -= 1)
                }
                None => {}
            }
        }
        while let Ok(happened) = self.parts.happened.try_recv() {
            self.take(happened);
        }
    }

    fn take(&mut self, happened: Happened) {
        let actions = match happened {
            Happened::Drafted(identity, draft) => self.parts.catalogue.drafted(
                identity,
                draft.map(|(draft, granularity)| (*draft, granularity)),
            ),
            Happened::Made(identity, made) => {
                trace_point!("made");
                let peers = &mut self.peers;
                self.parts.catalogue.made(identity, made, |writer, count| {
                    peers.get_mut(&writer)?.slots.grant(count)
                })
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
            Happened::Forgotten(token, forgotten) => {
                self.parts.catalogue.forgotten(token, forgotten)
            }
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
                    Ok(()) => self.parts.keeper = KeeperState::Fed,
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
                Action::Make {
                    identity,
                    device,
                    bytes,
                } => {
                    self.work(workshop::Job::Make(identity, device, bytes));
                }
                Action::Keep {
                    identity,
                    seq,
                    manifest,
                    regions,
                } => {
                    trace_point!("commit.accepted");
                    self.deposit(deposit::Job::Keep {
                        identity,
                        seq,
                        manifest,
                        regions,
                    });
                }
                Action::Forget {
                    token,
                    objects,
                    tombs,
                } => {
                    let tombs = tombs.map(|tombs| (self.next_tombs(), tombs));
                    self.deposit(deposit::Job::Forget {
                        token,
                        objects,
                        tombs,
                    });
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
        let Ok(key) = self.watches.add(Watch::Leash, leash.as_fd()) else {
            self.look_at = Some(Instant::now() + LOOK_AGAIN);
            return;
        };
        self.let_go();
        self.leash = Some((key, leash));
        if fed {
            self.parts.keeper = KeeperState::Fed;
        } else {
            self.looking = true;
            let tombs = (self.next_tombs(), self.parts.catalogue.tombs());
            self.deposit(deposit::Job::Feed {
                objects: self.parts.catalogue.visible(),
                tombs,
            });
        }
    }

    fn lose_keeper(&mut self) {
        self.let_go();
        if self.parts.keeper != KeeperState::None {
            self.parts.keeper = KeeperState::Absent;
            self.look_at = Some(Instant::now() + LOOK_AGAIN);
        }
    }

    fn let_go(&mut self) {
        if let Some((key, leash)) = self.leash.take() {
            self.watches.remove(key, leash.as_fd());
        }
    }

    // Connections.

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_A_TURN {
            match self.parts.listener.accept() {
                Ok(Some(socket)) => {
                    while self.greetings.len() >= MOST_GREETINGS {
                        let Some((&oldest, _)) = self.greetings.first_key_value() else {
                            break;
                        };
                        // It may have spoken since it was looked at.
                        self.greet(oldest);
                        if let Some(socket) = self.greetings.remove(&oldest) {
                            self.watches.remove(oldest, socket.as_fd());
                        }
                    }
                    match self.watches.add(Watch::Greeting, socket.as_fd()) {
                        Ok(key) => drop(self.greetings.insert(key, socket)),
                        Err(error) => tracing::warn!(%error, "a connection is turned away"),
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
        let Some(socket) = self.greetings.remove(&key) else {
            return;
        };
        let mut bytes = [0; MOST_BYTES];
        let mut fds = Vec::new();
        let len = match socket::receive(socket.as_fd(), &mut bytes, &mut fds) {
            Ok(ReceiveOutcome::Packet(len)) => len,
            Ok(ReceiveOutcome::Empty) => {
                self.greetings.insert(key, socket);
                return;
            }
            Ok(ReceiveOutcome::HungUp) | Err(_) => {
                self.watches.remove(key, socket.as_fd());
                return;
            }
        };
        self.watches.remove(key, socket.as_fd());
        if let Err((refusal, why)) = self.admit(&socket, &bytes[..len], &mut fds) {
            tracing::warn!(%why, "a participant is refused");
            admission::refuse(&socket, refusal, why);
        }
        if !fds.is_empty() {
            self.work(workshop::Job::Drop(fds));
        }
    }

    fn admit(
        &mut self,
        socket: &OwnedFd,
        bytes: &[u8],
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(), Refused> {
        let hello = Newcomer::read(socket, bytes, fds, &self.parts.allowed)?;
        let most = self.parts.limits.participants;
        if self.peers.len() >= most {
            return Err((
                RefusalCode::Limit,
                format!("the broker has {most} participants already"),
            ));
        }
        let participant = Participant(self.next_participant);
        self.next_participant += 1;
        let peer = hello.into_peer(participant, socket).map_err(failed)?;
        self.seat(participant, peer).map_err(failed)
    }

    fn seat(&mut self, participant: Participant, peer: Peer) -> Result<()> {
        let mut watched: Vec<(Watch, BorrowedFd<'_>)> = vec![
            (Watch::Socket(participant), peer.socket.as_fd()),
            (Watch::Process(participant), peer.pidfd.as_fd()),
        ];
        for (n, descendant) in peer.descendants.iter().enumerate() {
            watched.push((Watch::Descendant(participant, n), descendant.as_fd()));
        }
        let keys = self.watches.add_all(&watched)?;
        if let Err(error) = admission::welcome(&peer, self.incarnation, self.own_pidfd.as_fd()) {
            keys.iter()
                .zip(watched)
                .for_each(|(&key, (_, fd))| self.watches.remove(key, fd));
            return Err(error);
        }
        self.peers.insert(participant, peer);
        Ok(())
    }

    // Participants.

    fn hear(&mut self, participant: Participant, key: u64) {
        for _ in 0..MESSAGES_A_TURN {
            let Some(peer) = self.peers.get(&participant) else {
                return;
            };
            let mut bytes = [0; MOST_BYTES];
            let mut fds = Vec::new();
            match socket::receive(peer.socket.as_fd(), &mut bytes, &mut fds) {
                Ok(ReceiveOutcome::Packet(len)) => {
                    let message = ToBroker::decode(&bytes[..len], fds.len());
                    match message {
                        Ok(message) => self.obey(participant, message, &mut fds),
                        Err(error) => {
                            tracing::warn!(%error, participant = participant.0, "a message is passed over")
                        }
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
                // Half closed, or no participant of ours: nothing more is heard of it but its
                // hang-up.
                Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                    tracing::warn!(%error, participant = participant.0, "a participant is silenced");
                    self.watches.pause(key, peer.socket.as_fd());
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
        let Some(peer) = self.peers.get(&participant) else {
            return;
        };
        let asker = peer.asker;
        let catalogue = &mut self.parts.catalogue;
        let one = |request, answer| vec![Action::Answer(participant, request, answer)];
        let actions = match message {
            ToBroker::Hello { .. } => Vec::new(),
            ToBroker::Create {
                request,
                identity,
                wanted,
            } => {
                match (
                    catalogue.create(asker, request, identity, wanted),
                    fds.pop(),
                ) {
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
                if self.parts.keeper == KeeperState::Absent {
                    // Later: the keeper is away. It is asked again.
                    return;
                }
                catalogue.commit(asker, request, identity, |leases| {
                    peer.slots.are_released(leases)
                })
            }
            ToBroker::AskOutcome { request, identity } => {
                one(request, Answer::Outcome(catalogue.outcome(identity)))
            }
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
            ToBroker::Watch {
                request,
                seen,
                name,
            } => catalogue.watch(asker, request, &name, seen),
            ToBroker::Remove {
                request,
                epoch,
                name,
            } => {
                if self.parts.keeper == KeeperState::Absent {
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
        let Some(peer) = self.peers.get(&to) else {
            return;
        };
        let (message, files) = answer.into_message(request);
        let fds: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        say(peer, &message, &fds);
        trace_point!("answered");
    }

    fn list(&self, to: Participant, request: u64) {
        let Some(peer) = self.peers.get(&to) else {
            return;
        };
        let text = serde_json::to_vec(&self.listing(peer.asker.uid)).unwrap_or_default();
        match sealed::create("gpu-ipc-listing", &text) {
            Ok(file) => say(
                peer,
                &ToClient::Listing {
                    request,
                    bytes: text.len() as u64,
                },
                &[file.as_fd()],
            ),
            Err(error) => {
                let (refusal, why) = failed(error);
                say(
                    peer,
                    &ToClient::Declined {
                        request,
                        refusal,
                        why,
                    },
                    &[],
                );
            }
        }
    }

    fn listing(&self, uid: u32) -> Listing {
        let process = |participant: &Participant| {
            let peer = self.peers.get(participant)?;
            Some(Process {
                pid: peer.pid,
                command: peer.command.clone(),
                name: peer.name.clone(),
            })
        };
        let rows = self.parts.catalogue.rows(uid);
        let row = |row: &crate::server::object::Row| Row {
            name: row.name.clone(),
            epoch: row.epoch.0,
            identity: row.identity.to_string(),
            home: row.home.clone(),
            bytes: row.bytes,
            owner: row.owner,
            state: row.state.into(),
            writer: row.writer.as_ref().and_then(process),
            readers: row.readers.iter().filter_map(process).collect(),
        };
        let removed = |tomb: Tomb| {
            let Tomb {
                name,
                home,
                owner,
                removed,
                ..
            } = tomb;
            (owner == uid && removed > Epoch(0)).then_some(Removed {
                name,
                home,
                up_to: removed.0,
            })
        };
        Listing {
            pid: std::process::id(),
            age_s: self.started.elapsed().as_secs(),
            keeper: match self.parts.keeper {
                KeeperState::None => "none",
                KeeperState::Fed => "fed",
                KeeperState::Absent => "absent",
            }
            .into(),
            bytes: self.parts.catalogue.bytes(uid),
            limit: Some(self.parts.limits.bytes).filter(|&bytes| bytes != u64::MAX),
            restored: self.parts.restored,
            orphans: self.parts.orphans,
            commits: self.commits,
            opens: self.opens,
            aborted: self.aborted,
            objects: rows.iter().map(row).collect(),
            removed: self
                .parts
                .catalogue
                .tombs()
                .0
                .into_iter()
                .filter_map(removed)
                .collect(),
        }
    }

    // Deaths.

    fn note(&mut self, participant: Participant, key: u64, note: impl FnOnce(&mut Proof)) {
        let Some(peer) = self.peers.get_mut(&participant) else {
            return;
        };
        let fd = match self.watches.of(key) {
            Some(Watch::Process(_)) => peer.pidfd.as_fd(),
            Some(Watch::Descendant(_, n)) => peer.descendants[n].as_fd(),
            _ => return,
        };
        self.watches.remove(key, fd);
        note(&mut peer.proof);
        self.bury(participant);
    }

    fn hang_up(&mut self, participant: Participant, key: u64) {
        let Some(peer) = self.peers.get_mut(&participant) else {
            return;
        };
        self.watches.remove(key, peer.socket.as_fd());
        peer.proof.hung_up = true;
        self.parts.catalogue.hung_up(participant);
        self.bury(participant);
    }

    /// Forgets a participant that has hung up and holds nothing, or is proven dead.
    fn bury(&mut self, participant: Participant) {
        let Some(peer) = self.peers.get(&participant) else {
            return;
        };
        if !peer.proof.hung_up
            || (self.parts.catalogue.writes(participant) && !peer.proof.is_complete())
        {
            return;
        }
        if self.parts.catalogue.writes(participant) {
            trace_point!("writer.buried");
            self.aborted += 1;
        }
        self.parts.catalogue.writer_died(participant);
        if let Some(peer) = self.peers.remove(&participant) {
            let watched: Vec<_> = std::iter::once(&peer.pidfd)
                .chain(&peer.descendants)
                .map(AsFd::as_fd)
                .collect();
            self.watches.forget(participant, &watched);
            // What strangers sent may block at its close.
            let mut fds = peer.descendants;
            fds.push(peer.pidfd);
            self.work(workshop::Job::Drop(fds));
        }
    }
}

fn say(peer: &Peer, message: &ToClient, fds: &[BorrowedFd<'_>]) {
    let mut bytes = [0; MOST_BYTES];
    let len = table::encode(message, &mut bytes, peer.version);
    match socket::send(peer.socket.as_fd(), &bytes[..len], fds) {
        Ok(socket::SendOutcome::Sent) => {}
        outcome => tracing::debug!(
            ?outcome,
            participant = peer.asker.participant.0,
            "an answer is dropped"
        ),
    }
}
