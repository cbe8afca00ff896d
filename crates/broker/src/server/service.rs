//! The thread that serves all clients: the socket, the participants, their deaths, and the two
//! threads that may wait.
//!
//! It never waits for anything but all of them at once. An answer that does not fit into a socket
//! is dropped: the client asks again.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use gpu_api::{Error, Result};
use rustix::fs::{FileType, fstat};
use rustix::process::{Resource, getrlimit};
use transport::os::closer::Foreign;
use transport::os::socket::{self, Listener, has_hung_up};
use transport::os::waker::Waker;
use transport::server::{Allowed, Door, Proof, Refused, Seat, Server, Watch, failed};
use transport::shared::sealed_file;
use transport::trace_point;
use transport::wire::table;

use crate::keeper::depositor::Fed;
use crate::keeper::pulse::Pulse;
use crate::object::identity::{Epoch, Identity};
use crate::server::action::{Action, Answer, Asker, KeepError, Participant};
use crate::server::bequest::Tomb;
use crate::server::catalogue::Catalogue;
use crate::server::happened::{File, Happened};
use crate::server::limits::Limits;
use crate::server::listing::{Latency, Listing, Process, Removed, Reread, Row, Shelf};
use crate::server::name::Name;
use crate::server::peer::Peer;
use crate::server::{deposit, object, workshop};
use crate::wire::{KNOWS_POOLS, MOST_BYTES, RefusalCode, ToBroker, ToClient};

/// How often a keeper that is away is looked for: until it has everything, the death of this broker
/// would lose it.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// How often the door is tried again by a broker that had no descriptor left.
const LISTEN_AGAIN: Duration = Duration::from_millis(100);
/// How often objects are looked for whose time is over.
const EXPIRE_AGAIN: Duration = Duration::from_secs(1);
/// Names whose objects are in a sum.
const MOST_SUMMED: usize = 1_000;
/// A keeper that has not answered for so long is said to be silent.
const SILENT_AFTER: Duration = Duration::from_secs(1);

/// How the broker stands with its keeper. `Fed` and `Full` are said of one run of one keeper, whose
/// leash is held as long as they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeeperState {
    /// None was asked for.
    None,
    /// It has everything.
    Fed,
    /// It has what it has room for.
    Full,
    /// It is being looked for, or fed.
    Absent,
}

/// What the service starts with.
pub(super) struct Parts {
    pub catalogue: Catalogue<File>,
    pub keeper: KeeperState,
    /// Hangs up with the keeper that has everything.
    pub leash: Option<OwnedFd>,
    /// What is known of the keeper without asking it.
    pub pulse: Option<Arc<Pulse>>,
    /// The last number of a bequest.
    pub next_number: u64,
    pub restored: u64,
    pub orphans: u64,
    /// Files of another version in the keeper.
    pub foreign: u64,
    pub happened: Receiver<Happened>,
    pub waker: Arc<Waker>,
    pub workshop: Sender<workshop::Job>,
    pub deposit: Sender<deposit::Job>,
}

pub(super) struct Service {
    pub(super) parts: Parts,
    pub(super) door: Door<Participant>,
    pub(super) peers: HashMap<Participant, Peer>,
    pub(super) next_participant: u64,
    /// Of the keeper that has everything, or what it has room for.
    leash: Option<(u64, OwnedFd)>,
    /// Processes that hold pools since a former broker, each with the pool and the token of its
    /// hold, by the number of their watch.
    inherited: HashMap<u64, (Identity, Identity, File)>,
    /// The deposit thread looks for a keeper, or feeds one.
    looking: bool,
    look_at: Option<Instant>,
    /// Numbers of the objects for which the keeper has no room.
    unkept: BTreeSet<u64>,
    /// Room came since the keeper was last given everything.
    room_came: bool,
    keeper_deaths: u64,
    /// Commits on their way to the keeper, and since when.
    keeping: HashMap<Identity, Instant>,
    latency: Latency,
    /// When objects are looked for whose time is over, if they have one.
    expire_at: Option<Instant>,
    pub(super) name: Name,
    pub(super) reread: Reread,
    started: Instant,
    commits: u64,
    opens: u64,
    aborted: u64,
}

impl Service {
    pub(super) fn new(mut parts: Parts, listener: Listener, allowed: Allowed) -> Result<Service> {
        let looks = parts.keeper == KeeperState::Absent;
        let expire_at = expires_at(parts.catalogue.limits());
        let name = Name::new(&allowed);
        let mut door = Door::new(Arc::new(listener), parts.waker.fd(), allowed)?;
        let leash = match parts.leash.take() {
            None => None,
            Some(leash) => Some((door.watches.add(Watch::Extra, leash.as_fd())?, leash)),
        };
        Ok(Service {
            door,
            parts,
            peers: HashMap::new(),
            next_participant: 1,
            leash,
            inherited: HashMap::new(),
            looking: false,
            look_at: looks.then(Instant::now),
            unkept: BTreeSet::new(),
            room_came: false,
            keeper_deaths: 0,
            keeping: HashMap::new(),
            latency: Latency::default(),
            expire_at,
            name,
            reread: Reread::default(),
            started: Instant::now(),
            commits: 0,
            opens: 0,
            aborted: 0,
        })
    }

    /// Serves for ever.
    pub(super) fn run(mut self, restored: Vec<Action<File>>) -> ! {
        self.act(restored);
        self.watch_inherited();
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
        let expires = self
            .expire_at
            .map(|at| at.saturating_duration_since(Instant::now()));
        let deaf = self.door.is_deaf().then_some(LISTEN_AGAIN);
        let named = Some(self.name.until_look(Instant::now()));
        let timeout = [timeout, deaf, expires, named].into_iter().flatten().min();
        let ready = self.door.watches.wait(timeout);
        self.parts.waker.rise();
        ready.for_each(|key| self.dispatch(key));
        self.door.listen_again();
        while let Ok(happened) = self.parts.happened.try_recv() {
            self.take(happened);
        }
        self.expire();
        if self.name.is_lost(&self.door) {
            // Those that came before it went.
            self.accept();
            self.name.bind_again(&mut self.door);
        }
    }

    /// Looks from here on for objects and pools whose time is over, if they have one.
    pub(super) fn expires(&mut self, limits: &Limits) {
        self.expire_at = expires_at(limits);
    }

    /// Removes objects whose time is over, unless what they need from the keeper must wait.
    fn expire(&mut self) {
        let now = Instant::now();
        if self.expire_at.is_some_and(|at| at <= now) {
            self.expire_at = Some(now + EXPIRE_AGAIN);
            if self.parts.keeper != KeeperState::Absent {
                let actions = self.parts.catalogue.expire(now);
                self.act(actions);
            }
        }
    }

    fn take(&mut self, happened: Happened) {
        let actions = match happened {
            Happened::Drafted(identity, draft) => self
                .parts
                .catalogue
                .drafted(identity, draft.map(|(draft, site)| (*draft, site))),
            Happened::Made(identity, made) => {
                trace_point!("made");
                let peers = &mut self.peers;
                self.parts.catalogue.made(identity, made, |writer, count| {
                    peers.get_mut(&writer)?.slots.grant(count)
                })
            }
            Happened::Kept(identity, kept) => {
                self.commits += u64::from(kept.is_ok());
                let begun = self.keeping.remove(&identity);
                if let Some(begun) = begun.filter(|_| kept.is_ok()) {
                    self.latency.note(begun.elapsed());
                }
                match &kept {
                    Ok(_) => tracing::debug!(%identity, "a commit is kept"),
                    Err(error) => {
                        tracing::warn!(%identity, ?error, "the keeper does not take a commit")
                    }
                }
                // Of two commits that one death ends, the second says nothing of the next keeper.
                if matches!(kept, Err(KeepError::Absent)) && self.leash.is_some() {
                    self.keeper_died();
                }
                let room = match kept {
                    Err(KeepError::Refused(_)) => self.make_keeper_room(identity),
                    _ => None,
                };
                let actions = room.unwrap_or_else(|| self.parts.catalogue.kept(identity, kept));
                trace_point!("visible");
                actions
            }
            Happened::Recorded(seq, record, kept) => {
                if let Err(error) = &kept {
                    tracing::warn!(pool = %record.pool, ?error, "the keeper does not take the record of a hold");
                }
                if matches!(kept, Err(KeepError::Absent)) && self.leash.is_some() {
                    self.keeper_died();
                }
                let actions = self.parts.catalogue.recorded(seq, *record, kept);
                trace_point!("record.known");
                actions
            }
            Happened::Forgotten(token, forgotten) => {
                self.room_came |= forgotten.is_ok();
                self.parts.catalogue.forgotten(token, forgotten)
            }
            Happened::Looked(found) => {
                self.looking = false;
                if found {
                    tracing::info!("a keeper is there; it is given everything");
                    self.feed();
                } else {
                    self.look_at = Some(Instant::now() + LOOK_AGAIN);
                }
                Vec::new()
            }
            Happened::Fed(fed) => {
                self.looking = false;
                match fed {
                    Ok(fed) => self.hold(fed),
                    Err(error) => {
                        tracing::warn!(?error, "the keeper does not take everything");
                        self.lose_keeper();
                    }
                }
                Vec::new()
            }
            Happened::Changed(changed) => self.change(changed),
        };
        self.act(actions);
        self.use_room();
    }

    fn act(&mut self, actions: Vec<Action<File>>) {
        for action in actions {
            match action {
                Action::Answer(to, request, answer) => self.answer(to, request, answer),
                Action::Make {
                    identity,
                    device,
                    bytes,
                    journal,
                } => {
                    self.work(workshop::Job::Make(identity, device, bytes, journal));
                }
                Action::Keep {
                    identity,
                    seq,
                    manifest,
                    regions,
                } => {
                    trace_point!("commit.accepted");
                    self.keeping.insert(identity, Instant::now());
                    self.deposit(deposit::Job::Keep {
                        identity,
                        seq,
                        manifest,
                        regions,
                    });
                }
                Action::KeepRecord {
                    seq,
                    record,
                    processes,
                } => self.deposit(deposit::Job::KeepRecord {
                    seq,
                    record: Box::new(record),
                    processes,
                }),
                Action::Forget {
                    token,
                    objects,
                    bequest,
                } => {
                    let bequest = bequest.map(|bequest| (self.next_number(), bequest));
                    self.deposit(deposit::Job::Forget {
                        token,
                        objects,
                        bequest,
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

    fn next_number(&mut self) -> u64 {
        self.parts.next_number += 1;
        self.parts.next_number
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

    /// Holds the leash of a keeper that was given everything. One that has ended meanwhile hangs up.
    fn hold(&mut self, Fed { leash, without }: Fed) {
        self.let_go();
        let key = match self.door.watches.add(Watch::Extra, leash.as_fd()) {
            Ok(key) => key,
            Err(error) => {
                tracing::warn!(%error, "the keeper cannot be watched");
                self.parts.keeper = KeeperState::Absent;
                self.look_at = Some(Instant::now() + LOOK_AGAIN);
                return;
            }
        };
        (self.leash, self.look_at) = (Some((key, leash)), None);
        if without.is_empty() {
            tracing::info!("the keeper has everything");
            self.parts.keeper = KeeperState::Fed;
        } else {
            tracing::warn!(
                objects = without.len(),
                "the keeper has no room for some objects: they go with this broker"
            );
            self.parts.keeper = KeeperState::Full;
        }
        self.unkept = without.into_iter().collect();
    }

    fn feed(&mut self) {
        self.looking = true;
        self.room_came = false;
        let bequest = (self.next_number(), self.parts.catalogue.bequest());
        self.deposit(deposit::Job::Feed {
            objects: self.parts.catalogue.visible(),
            bequest,
        });
    }

    /// Says whether a full keeper is about to be given again what it had no room for, because
    /// something has left it.
    fn has_room_to_use(&self) -> bool {
        self.parts.keeper == KeeperState::Full && self.room_came
    }

    /// Gives it that, once no commit and no record of a hold is on its way there.
    fn use_room(&mut self) {
        let is_due = self.has_room_to_use() && self.keeping.is_empty() && !self.looking;
        if is_due && !self.parts.catalogue.is_recording() {
            self.feed();
        }
    }

    /// Lets objects go for a commit that a full keeper refused, if any may.
    fn make_keeper_room(&mut self, identity: Identity) -> Option<Vec<Action<File>>> {
        let pulse = self.parts.pulse.as_ref().filter(|pulse| pulse.most() > 0)?;
        let room = pulse.most().saturating_sub(pulse.kept());
        let catalogue = &mut self.parts.catalogue;
        let actions = catalogue.make_keeper_room(identity, room, &self.unkept)?;
        tracing::info!(%identity, room, "objects go that the keeper has room for a commit");
        Some(actions)
    }

    fn lose_keeper(&mut self) {
        self.let_go();
        if self.parts.keeper != KeeperState::None {
            if self.parts.keeper != KeeperState::Absent {
                tracing::warn!("the keeper is gone; commits and removals wait for the next one");
            }
            self.parts.keeper = KeeperState::Absent;
            self.look_at = Some(Instant::now());
        }
    }

    /// Notes that the keeper has ended.
    pub(super) fn keeper_died(&mut self) {
        tracing::warn!("the keeper has ended; the next one is given everything");
        self.keeper_deaths += 1;
        self.lose_keeper();
    }

    /// Says how the broker stands with its keeper, in a word and in numbers.
    fn shelf(&self) -> (&'static str, Shelf) {
        let Some(pulse) = &self.parts.pulse else {
            return ("none", Shelf::default());
        };
        let silence = pulse.silence().filter(|silence| *silence >= SILENT_AFTER);
        let missing = match self.parts.keeper {
            KeeperState::None | KeeperState::Fed => 0,
            _ => {
                let catalogue = &self.parts.catalogue;
                catalogue.count_visible(|seq| self.is_without(seq))
            }
        };
        let (kept, most) = (pulse.kept(), pulse.most());
        let (word, why) = match (self.parts.keeper, silence) {
            (KeeperState::None, _) => ("none", String::new()),
            (_, Some(silence)) => (
                "silent",
                format!("it has not answered for {} s", silence.as_secs()),
            ),
            (KeeperState::Fed, None) => ("fed", String::new()),
            (KeeperState::Absent, None) => ("absent", "no keeper answers".into()),
            (KeeperState::Full, None) => (
                "full",
                format!("it has {kept} descriptors of at most {most}"),
            ),
        };
        let shelf = Shelf {
            kept,
            most,
            starts: pulse.starts(),
            missing,
            silent_s: silence.map_or(0, |silence| silence.as_secs()),
            why,
        };
        (word, shelf)
    }

    /// Says whether an object is nowhere but in this broker.
    fn is_unkept(&self, row: &object::Row) -> bool {
        matches!(row.state, "visible" | "pool")
            && (self.is_without(row.seq) || row.record.is_some_and(|of| self.is_without(of)))
    }

    fn is_without(&self, seq: u64) -> bool {
        match self.parts.keeper {
            KeeperState::None | KeeperState::Fed => false,
            KeeperState::Absent => true,
            KeeperState::Full => self.unkept.contains(&seq),
        }
    }

    fn let_go(&mut self) {
        if let Some((key, leash)) = self.leash.take() {
            self.door.watches.remove(key, leash.as_fd());
        }
    }

    // Participants.

    /// Does what a message asks for.
    pub(super) fn answer_message(
        &mut self,
        participant: Participant,
        message: ToBroker,
        mut fds: Vec<Foreign>,
    ) {
        let Some(peer) = self.peers.get(&participant) else {
            return;
        };
        let asker = peer.asker;
        // Then a question that the keeper must note is passed over: it is asked again.
        let keeper_takes_none = self.parts.keeper == KeeperState::Absent || self.has_room_to_use();
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
                    (Err(answer), _) => answer.map_or(Vec::new(), |answer| one(request, answer)),
                }
            }
            ToBroker::Commit { request, identity } => {
                trace_point!("commit.heard");
                if keeper_takes_none {
                    // Later: the keeper is away, or about to be given what it had no room for.
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
                self.list(participant, request, None);
                Vec::new()
            }
            ToBroker::Sum { request } => {
                self.list(participant, request, Some(MOST_SUMMED));
                Vec::new()
            }
            ToBroker::Adopt {
                request,
                token,
                name,
            } => {
                if keeper_takes_none {
                    return;
                }
                trace_point!("adopt.heard");
                let who = Process {
                    pid: peer.seat.pid,
                    command: peer.command.clone(),
                    name: peer.name.clone(),
                };
                let processes = tells_of_death(&peer.seat, &fds);
                let now = Instant::now();
                catalogue.adopt(asker, request, (&name, token), processes, who, now)
            }
            ToBroker::Release {
                request,
                token,
                name,
            } => {
                if keeper_takes_none {
                    return;
                }
                trace_point!("release.heard");
                catalogue.release(asker, request, &name, token)
            }
            ToBroker::ReadPool { request, name } => {
                self.opens += 1;
                vec![catalogue.read_pool(asker, request, &name)]
            }
        };
        self.act(actions);
    }

    fn answer(&self, to: Participant, request: u64, answer: Answer<File>) {
        let Some(peer) = self.peers.get(&to) else {
            return;
        };
        if let Answer::Declined(refusal, why) = &answer
            && let Some(unlogged) = peer.refusals.note(Instant::now())
        {
            let (pid, uid) = (peer.seat.pid, peer.asker.uid);
            tracing::info!(
                pid,
                uid,
                name = peer.name,
                ?refusal,
                why,
                unlogged,
                "refused"
            );
        }
        let answer = match answer {
            // The name has something that a participant of before pools cannot know.
            Answer::Declined(RefusalCode::Pool, why) if peer.version < KNOWS_POOLS => {
                Answer::Declined(RefusalCode::Conflict, why)
            }
            answer => answer,
        };
        let (message, files) = answer.into_message(request);
        let fds: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        say(peer, &message, &fds);
        trace_point!("answered");
    }

    /// Sends a listing: of all objects, or of those of so many names.
    fn list(&mut self, to: Participant, request: u64, names: Option<usize>) {
        // A keeper that has just ended is not said to have everything.
        if self
            .leash
            .as_ref()
            .is_some_and(|(_, leash)| has_hung_up(leash))
        {
            self.keeper_died();
        }
        let Some(peer) = self.peers.get(&to) else {
            return;
        };
        let text = serde_json::to_vec(&self.listing(peer.asker, names)).unwrap_or_default();
        match sealed_file::create("gpu-ipc-listing", &text) {
            Ok(file) => say(
                peer,
                &ToClient::Listing {
                    request,
                    bytes: text.len() as u64,
                },
                &[file.as_fd()],
            ),
            Err(error) => {
                let (refusal, why) = failed(&error);
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

    fn listing(&self, asker: Asker, names: Option<usize>) -> Listing {
        let uid = asker.uid;
        let catalogue = &self.parts.catalogue;
        let process = |participant: &Participant| {
            let peer = self.peers.get(participant)?;
            Some(Process {
                pid: peer.seat.pid,
                command: peer.command.clone(),
                name: peer.name.clone(),
            })
        };
        let rows = match names {
            Some(most) => catalogue.rows_of_names(asker, most),
            None => catalogue.rows(asker),
        };
        let (keeper, shelf) = self.shelf();
        let users = catalogue.users(uid);
        // Of another user's objects that it may open a sum says nothing: they are not counted.
        let bytes = match names {
            Some(_) => users.iter().map(|user| user.bytes).sum(),
            None => catalogue.bytes(asker),
        };
        let removed_names = match names {
            Some(_) => Vec::new(),
            None => catalogue.bequest().tombs.0,
        };
        let limits = catalogue.limits();
        let row = |row: &object::Row| Row {
            name: row.name.clone(),
            epoch: row.epoch.0,
            identity: row.identity.to_string(),
            home: row.home.clone(),
            bytes: row.bytes,
            owner: row.owner,
            state: row.state.into(),
            parts: row.parts,
            age_s: row.since.elapsed().map_or(0, |age| age.as_secs()),
            pinned: row.pinned,
            unkept: self.is_unkept(row),
            writer: row.writer.as_ref().and_then(process),
            readers: row.readers.iter().filter_map(process).collect(),
            pool: row.pool.clone(),
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
        let limit = |bytes| Some(bytes).filter(|&bytes| bytes != u64::MAX);
        Listing {
            pid: std::process::id(),
            age_s: self.started.elapsed().as_secs(),
            keeper: keeper.into(),
            shelf,
            keeper_deaths: self.keeper_deaths,
            bytes,
            limit: limit(limits.bytes),
            limit_per_uid: limit(limits.bytes_per_uid),
            participants: self.peers.len() as u64,
            participants_limit: limits.participants as u64,
            restored: self.parts.restored,
            orphans: self.parts.orphans,
            foreign: self.parts.foreign,
            lineage: catalogue.lineage().to_string(),
            total: users.iter().map(|user| user.objects).sum(),
            users,
            names: catalogue.names() as u64,
            names_limit: limits.names as u64,
            commits: self.commits,
            opens: self.opens,
            aborted: self.aborted,
            evicted: catalogue.evicted(),
            commit_latency: self.latency.clone(),
            objects: rows.iter().map(row).collect(),
            removed: removed_names.into_iter().filter_map(removed).collect(),
            descriptors: descriptors(),
            descriptors_limit: getrlimit(Resource::Nofile).current.unwrap_or(0),
            turned_away: self.door.turned_away(),
            rebound: self.name.rebound(),
            reread: self.reread.clone(),
        }
    }

    // Deaths.

    /// Waits for the ends of processes that hold pools since a former broker.
    fn watch_inherited(&mut self) {
        for (pool, token, file) in self.parts.catalogue.inherited_processes() {
            match self.door.watches.add(Watch::Extra, file.as_fd()) {
                Ok(key) => {
                    self.inherited.insert(key, (pool, token, file));
                }
                Err(error) => {
                    tracing::warn!(%error, %pool, "the end of a pool's holder cannot be learned; the pool stays held");
                }
            }
        }
    }

    /// Notes the exit of a process that holds a pool since a former broker. Says whether the number
    /// is of such a process.
    pub(super) fn inherited_exited(&mut self, key: u64) -> bool {
        let Some((pool, token, file)) = self.inherited.remove(&key) else {
            return false;
        };
        self.door.watches.remove(key, file.as_fd());
        self.parts.catalogue.process_exited(pool, token);
        true
    }

    /// Forgets a participant that has hung up and holds nothing, or is proven dead.
    pub(super) fn bury(&mut self, participant: Participant, proof: Proof) {
        let wrote = self.parts.catalogue.writes(participant);
        let held = self.parts.catalogue.holds(participant);
        if !proof.hung_up || ((wrote || held) && !proof.is_complete()) {
            return;
        }
        if held {
            trace_point!("holder.buried");
        }
        if wrote {
            trace_point!("writer.buried");
            self.aborted += 1;
        }
        self.parts.catalogue.writer_died(participant);
        if let Some(peer) = self.peers.remove(&participant) {
            let (pid, uid) = (peer.seat.pid, peer.asker.uid);
            let Peer { command, name, .. } = &peer;
            if wrote {
                tracing::warn!(
                    pid,
                    uid,
                    command,
                    name,
                    "a writer died; what it did not commit is closed"
                );
            } else if held {
                tracing::warn!(
                    pid,
                    uid,
                    command,
                    name,
                    "a holder died; its pools may be adopted"
                );
            } else {
                tracing::debug!(pid, uid, command, name, "a participant is gone");
            }
            self.door.forget(participant, &peer.seat);
        }
    }
}

/// Returns what tells of a holder's death: pidfds, and the end of a pipe that came with its question.
fn tells_of_death(seat: &Seat, fds: &[Foreign]) -> Result<Vec<File>, Refused> {
    let is_pipe = |fd: &&Foreign| {
        fstat(fd.as_fd()).is_ok_and(|is| FileType::from_raw_mode(is.st_mode) == FileType::Fifo)
    };
    let Some(line) = fds.first().filter(is_pipe) else {
        let why = "the descriptor of an adoption is not a pipe's".into();
        return Err((RefusalCode::Protocol, why));
    };
    let line = line.as_fd().try_clone_to_owned();
    let line = line.map_err(|e| failed(&Error::without_descriptors("dup of a pipe", e)))?;
    let mut all = seat.processes().map_err(|error| failed(&error))?;
    all.push(line);
    Ok(all.into_iter().map(Arc::new).collect())
}

fn expires_at(limits: &Limits) -> Option<Instant> {
    limits.ttl.or(limits.pool_ttl).map(|_| Instant::now())
}

/// Counts the open descriptors of this process.
fn descriptors() -> u64 {
    let is = rustix::fs::stat("/proc/self/fd");
    is.map_or(0, |is| u64::try_from(is.st_size).unwrap_or(0))
}

fn say(peer: &Peer, message: &ToClient, fds: &[BorrowedFd<'_>]) {
    let mut bytes = [0; MOST_BYTES];
    let len = table::encode(message, &mut bytes, peer.version);
    match socket::send(&peer.seat.socket, &bytes[..len], fds) {
        Ok(socket::SendOutcome::Sent) => {}
        outcome => tracing::debug!(
            ?outcome,
            participant = peer.asker.participant.0,
            "an answer is dropped"
        ),
    }
}
