//! Serves other gateways: opens what they ask for, registers it, confirms, and ends what was not
//! renewed.
//!
//! One thread owns the table of leases, so that *ended, then taken back* is the order of its
//! statements. Questions wait in a queue of [`MOST_WAITING`]; one more is dropped, and its asker
//! asks again. An object is registered beside this thread (`register`), whose result comes by the
//! same queue; the lease begins then. What the broker has is listed beside it too (`index`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use gpu_ipc::broker::{Epoch, Identity, Reader, Selector};
use gpu_ipc_gateway_plan::READS_AT_ONCE;
use serde::Serialize;
use zenoh::Wait;
use zenoh::liveliness::LivelinessToken;
use zenoh::query::{Query, Queryable};

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::local::Local;
use crate::message::{
    Again, Ask, Confirm, Fill, Find, Grant, Has, Home, Incarnation, LeaseNumber, List, Listed,
    MANIFEST_PIECE, MOST_BYTES, Manifest,
};
use crate::net::call::{Answer, Answered, Granted, Question, read_question, reply};
use crate::net::key::Gateway;
use crate::net::live::Live;
use crate::net::session::Session;
use crate::origin::admit::Service;
use crate::origin::digests::Digests;
use crate::origin::index::Index;
use crate::origin::register::{Done, Event, Held, Registering, TELL, Wanted};
use crate::origin::rings::{Lent, Rings, Slots};
use crate::origin::{Asked, Ended, Limits, Table};
use crate::step::pass;
use crate::transport::choice::candidates;
use crate::transport::{Place, Transport};
use gpu_ipc_gateway_plan::Pace;

/// Questions that wait to be answered.
pub const MOST_WAITING: usize = 256;
/// How often leases are looked at.
const TICK: Duration = Duration::from_millis(100);
/// How long a question waits for a list.
const SOUGHT: Duration = Duration::from_secs(60);
/// How often a lease's time an object stays mapped after a timer has ended its lease.
///
/// UCX answers a read over TCP piece by piece from the origin's memory, as the connection takes it,
/// also when the registration has gone: a reader that was stopped, or whose link was down, and goes
/// on later would make it read what is not mapped (seen as `SIGSEGV`). UCX does not tell when it is
/// done.
const LINGERS: u32 = 4;

/// What a gateway has done, as data.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures {
    /// Leases that were granted.
    pub granted: u64,
    /// Bytes of their objects.
    pub bytes: u64,
    /// Questions for a lease that were refused.
    pub declined: u64,
    /// Confirmations that were answered with yes, and with no.
    pub confirmed: (u64, u64),
    /// Confirmations of other bytes than the object's.
    pub differed: u64,
    /// Leases that a timer ended.
    pub expired: u64,
    /// Leases that ended with the process that carried their bytes.
    pub lost: u64,
    /// How often an asker was told that its object is being registered yet.
    pub told: u64,
    /// Questions to fill slots, and the microseconds that their copies took.
    pub fills: (u64, u64),
    /// Questions that made no sense.
    pub garbage: u64,
}

/// A gateway that serves.
pub struct Server {
    gateway: Gateway,
    local: Local,
    transport: Arc<dyn Transport>,
    session: Session,
    live: Live,
    table: Table<Held>,
    started: Instant,
    figures: Figures,
    index: Index,
    /// Questions that wait for a list, and when each came.
    seeking: Vec<(Query, Sought, Duration)>,
    /// Of the objects that were asked for.
    services: BTreeMap<[u8; 16], Service>,
    digests: Digests,
    /// Confirmations that wait for a digest, and when each came.
    confirming: Vec<(Query, Confirm, Duration)>,
    pace: Pace,
    registering: Registering,
    /// Objects of leases that a timer has ended, and until when they stay mapped.
    lingering: Vec<(Duration, Arc<Reader>)>,
    lingers: Duration,
}

/// What a list is wanted for.
enum Sought {
    Name(Find),
    Page(List),
    Removed(Vec<String>),
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("gateway", &self.gateway)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Makes one; it serves from [`run`](Server::run) on.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] when the session has ended.
    pub fn new(
        gateway: Gateway,
        local: Local,
        transport: Arc<dyn Transport>,
        session: Session,
        limits: Limits,
        pace: Pace,
        slots: Slots,
    ) -> Result<Server> {
        let rings = Rings::new(local.client.gpu().clone(), Arc::clone(&transport), slots);
        Ok(Server {
            lingering: Vec::new(),
            lingers: limits.time * LINGERS,
            registering: Registering::new(Arc::clone(&transport), Arc::new(rings)),
            table: Table::new(gateway.incarnation, limits),
            live: Live::listen(&session)?,
            index: Index::new(local.home.clone()),
            seeking: Vec::new(),
            gateway,
            local,
            transport,
            session,
            started: Instant::now(),
            figures: Figures::default(),
            services: BTreeMap::new(),
            digests: Digests::default(),
            confirming: Vec::new(),
            pace,
        })
    }

    /// Serves until `each_tick`, which is given the figures and live leases, says that it is over.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] when nothing can be announced.
    pub fn run(mut self, mut each_tick: impl FnMut(&Figures, Vec<Lease>) -> bool) -> Result<()> {
        let (sender, events) = sync_channel(MOST_WAITING);
        let _queryable = self.listen(sender.clone())?;
        let _live = self.token(&format!("{}/live", self.gateway.key()))?;
        while each_tick(&self.figures, self.leases()) {
            self.hear(&events, &sender);
            for query in self.registering.take_impatient() {
                self.figures.told += 1;
                reply(&self.session, &query, &Answered::plain(Answer::Registering));
            }
            self.registering
                .forget()
                .into_iter()
                .for_each(|lease| self.table.failed(lease));
            let now = self.started.elapsed();
            self.lingering.retain(|(until, _)| *until > now);
            let ended = self.table.expire(now);
            self.figures.expired += ended.len() as u64;
            ended
                .into_iter()
                .for_each(|ended| self.take_back_expired(ended));
            let lost = self.table.lose(|held| !held.is_alive());
            self.figures.lost += lost.len() as u64;
            lost.into_iter().for_each(|ended| self.take_back(ended));
            self.services.retain(|_, service| !service.is_over(now));
            let services = &self.services;
            self.digests
                .retain(|identity| services.contains_key(identity));
            self.confirm_waiting(&sender);
        }
        Ok(())
    }

    fn listen(&self, sender: SyncSender<Event>) -> Result<Queryable<()>> {
        let session = self.session.clone();
        let queue = move |query: Query| {
            let bytes = query.payload().map_or(0, |payload| payload.len());
            if bytes > MOST_BYTES {
                // Not kept while others wait.
                let why = format!("a question has {bytes} bytes, and may have {MOST_BYTES}");
                return reply(&session, &query, &declined(why, Again::Never));
            }
            if sender.try_send(Event::Asked(query)).is_err() {
                tracing::warn!("{MOST_WAITING} questions wait already; one more was dropped");
            }
        };
        let key = format!("{}/ask", self.gateway.key());
        self.session
            .declare_queryable(key)
            .callback(queue)
            .wait()
            .map_err(unavailable)
    }

    fn token(&self, key: &str) -> Result<LivelinessToken> {
        self.session
            .liveliness()
            .declare_token(key)
            .wait()
            .map_err(unavailable)
    }

    /// Answers what has come, for a tick.
    fn hear(&mut self, events: &Receiver<Event>, sender: &SyncSender<Event>) {
        let until = self.started.elapsed() + TICK;
        // Leases are looked at in between, however many questions come.
        while self.started.elapsed() < until {
            self.seek(sender);
            let next = self.index.next().filter(|_| !self.seeking.is_empty());
            let wakes = next.map_or(until, |next| next.min(until));
            let left = wakes.saturating_sub(self.started.elapsed());
            let answered = match events.recv_timeout(left) {
                Ok(Event::Asked(query)) => self.heard(query, sender),
                Ok(Event::Listed(listing)) => {
                    let now = self.started.elapsed();
                    self.index.listed(now, listing.map(|listing| *listing));
                    None
                }
                Ok(Event::Digested(identity, digest)) => {
                    self.digests.done(identity, digest);
                    self.confirm_waiting(sender);
                    None
                }
                Ok(Event::Registered(done)) => {
                    let done = self.registering.done(*done);
                    done.map(|(query, done)| (query, self.registered(done, sender)))
                }
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return std::thread::sleep(left),
            };
            let Some((query, answered)) = answered else {
                continue;
            };
            reply(&self.session, &query, &answered);
            if matches!(answered.answer, Answer::Granted(_)) {
                pass("lease.granted");
            }
        }
    }

    /// Answers the questions for which the list is new enough, and has another taken for the rest.
    fn seek(&mut self, sender: &SyncSender<Event>) {
        let now = self.started.elapsed();
        for (query, sought, came) in std::mem::take(&mut self.seeking) {
            match self.sought(&sought, came) {
                Some(answer) => reply(&self.session, &query, &Answered::plain(answer)),
                None if now.saturating_sub(came) < SOUGHT => {
                    self.seeking.push((query, sought, came));
                }
                // There is no list, and its asker waits no more.
                None => {}
            }
        }
        if self.seeking.is_empty() || !self.index.begins(now) {
            return;
        }
        let (local, sender) = (self.local.clone(), sender.clone());
        let list = move || {
            let listed = local.list();
            let listed = listed.inspect_err(|error| tracing::warn!(%error, "no list"));
            // A gateway that has ended wants it no more.
            drop(sender.send(Event::Listed(listed.ok().map(Box::new))));
        };
        if let Err(error) = thread::start("gateway-lists", list) {
            tracing::warn!(%error, "no list");
            self.index.listed(now, None);
        }
    }

    fn sought(&mut self, sought: &Sought, came: Duration) -> Option<Answer> {
        match sought {
            Sought::Page(list) => {
                let (page, more) = self.index.page(list, came)?;
                Some(Answer::Listed(page, more))
            }
            Sought::Removed(names) => self.index.removed(names, came).map(Answer::Removed),
            Sought::Name(find) => {
                let found = self.index.find(find, came)?;
                let has = found.into_iter().filter_map(|listed| self.has(listed));
                Some(Answer::Found(has.collect()))
            }
        }
    }

    /// Says how busy this host is with an object; nothing for one of another device, which is
    /// another gateway's.
    fn has(&mut self, listed: Listed) -> Option<Has> {
        let identity: Identity = listed.identity.parse().ok()?;
        let now = self.started.elapsed();
        let reads = self.reads(now, identity);
        if !self.services.contains_key(&identity.0) {
            let reader = self.local.client.open_one(&Selector::Identity(identity));
            self.serve(now, &reader.ok()?);
        }
        let (reads, admitted) = self.services.get(&identity.0)?.load(&reads);
        let Listed {
            epoch,
            identity,
            bytes,
            origin,
            home,
            ..
        } = listed;
        Some(Has {
            epoch,
            identity,
            bytes,
            origin,
            home,
            reads,
            limit: READS_AT_ONCE,
            admitted,
        })
    }

    /// Answers a question, unless a registration comes first.
    fn heard(&mut self, query: Query, sender: &SyncSender<Event>) -> Option<(Query, Answered)> {
        let bytes = query
            .payload()
            .map(|payload| payload.to_bytes().into_owned())
            .unwrap_or_default();
        let now = self.started.elapsed();
        let is = |yes| Answered::plain(Answer::Is(yes));
        let answered = match read_question(&bytes) {
            Ok(Question::Ask(ask)) => return self.ask(now, &ask, query, sender),
            Ok(Question::Confirm(confirm)) => {
                let Some(answer) = self.confirm(&confirm, sender) else {
                    self.confirming.push((query, confirm, now));
                    return None;
                };
                Answered::plain(answer)
            }
            Ok(Question::Renew(renew)) => is(self.table.renew(now, &renew)),
            Ok(Question::Fill(fill)) => {
                pass("fill.heard");
                let begun = Instant::now();
                let filled = self.fill(now, &fill);
                self.figures.fills.0 += 1;
                self.figures.fills.1 += begun.elapsed().as_micros() as u64;
                pass("fill.copied");
                is(filled)
            }
            Ok(Question::Release(release)) => {
                let ended = self.table.release(&release);
                let was = ended.is_some();
                ended.into_iter().for_each(|ended| self.take_back(ended));
                is(was)
            }
            Ok(Question::Manifest(manifest)) => self.manifest(now, &manifest),
            Ok(Question::Find(find)) => return self.seeks(now, query, Sought::Name(find)),
            Ok(Question::List(list)) => return self.seeks(now, query, Sought::Page(list)),
            Ok(Question::Gateways) => Answered::plain(Answer::Gateways(self.live.gateways(None))),
            Ok(Question::Removed(removed)) if removed.broker == self.local.home.broker => {
                return self.seeks(now, query, Sought::Removed(removed.names));
            }
            Ok(Question::Removed(_)) => {
                let host = &self.gateway.host;
                let why = format!("this {host} is not that home: its broker has another number");
                declined(why, Again::Never)
            }
            Err(error) => {
                self.figures.garbage += 1;
                declined(error.to_string(), Again::Never)
            }
        };
        Some((query, answered))
    }

    /// Keeps a question until there is a list for it.
    fn seeks(&mut self, now: Duration, query: Query, sought: Sought) -> Option<(Query, Answered)> {
        if self.seeking.len() >= MOST_WAITING {
            let why = format!("{MOST_WAITING} questions wait for a list already");
            return Some((query, declined(why, Again::Busy)));
        }
        self.seeking.push((query, sought, now));
        None
    }

    /// Answers a confirmation; nothing while the object is being digested.
    fn confirm(&mut self, confirm: &Confirm, sender: &SyncSender<Event>) -> Option<Answer> {
        pass("confirm.heard");
        let now = self.started.elapsed();
        let alive = self.table.confirm(now, confirm);
        if alive && let Some(said) = confirm.digest {
            match self.digest(confirm, sender) {
                None => return None,
                Some(own) if own != said => {
                    self.figures.differed += 1;
                    tracing::warn!(
                        identity = %Identity(confirm.identity),
                        "a reader has other bytes than this object: something alters them on the way"
                    );
                    return Some(Answer::Differs);
                }
                Some(_) => {}
            }
        }
        let counted = &mut self.figures.confirmed;
        *(if alive {
            &mut counted.0
        } else {
            &mut counted.1
        }) += 1;
        if alive && let Some(held) = self.table.of(confirm.lease.lease) {
            held.confirmed.set(true);
            if let Some(service) = self.services.get_mut(&confirm.identity) {
                service.confirmed(now, &held.host);
            }
        }
        pass("confirm.answered");
        Some(Answer::Is(alive))
    }

    fn digest(&mut self, confirm: &Confirm, sender: &SyncSender<Event>) -> Option<Digest> {
        let held = self.table.of(confirm.lease.lease)?;
        self.digests.of(&held.reader, &self.local, sender)
    }

    /// Answers the confirmations that wait for a digest, if it is there or they have waited long.
    fn confirm_waiting(&mut self, sender: &SyncSender<Event>) {
        let now = self.started.elapsed();
        for (query, confirm, came) in std::mem::take(&mut self.confirming) {
            match self.confirm(&confirm, sender) {
                Some(answer) => reply(&self.session, &query, &Answered::plain(answer)),
                None if now.saturating_sub(came) < TELL => {
                    self.confirming.push((query, confirm, came));
                }
                None => reply(&self.session, &query, &Answered::plain(Answer::Registering)),
            }
        }
    }

    fn ask(
        &mut self,
        now: Duration,
        ask: &Ask,
        query: Query,
        sender: &SyncSender<Event>,
    ) -> Option<(Query, Answered)> {
        pass("ask.heard");
        let number = match LeaseNumber::random() {
            Ok(number) => number,
            Err(error) => return Some((query, self.decline(error.to_string(), Again::Later))),
        };
        let lease = match self.table.ask(now, ask, number) {
            Asked::Open(lease) => lease,
            Asked::Again(grant) => {
                let held = self.table.of(grant.lease.lease)?;
                return Some((query, self.granted(grant, held)));
            }
            Asked::Wait(lease) => {
                let (query, done) = self.registering.asked(lease, query)?;
                return Some((query, self.registered(done, sender)));
            }
            Asked::Busy(why) => return Some((query, self.decline(why, Again::Busy))),
        };
        let wanted = match self.open(now, lease, ask) {
            Ok(wanted) => wanted,
            Err((why, again)) => {
                self.table.failed(lease);
                return Some((query, self.decline(why, again)));
            }
        };
        if let Err(refused) = self.registering.begin(wanted, query, sender.clone()) {
            let (query, error) = *refused;
            self.table.failed(lease);
            return Some((query, self.decline(error.to_string(), Again::Later)));
        }
        None
    }

    /// Makes a lease live whose object is registered and whose asker waits, or declines it.
    fn registered(&mut self, done: Done, sender: &SyncSender<Event>) -> Answered {
        let Done { lease, bytes, held } = done;
        let held = match held {
            Ok(held) => held,
            Err(error) => {
                self.table.failed(lease);
                // A carrier that has died is started again.
                let again = match self.transport.wants_files() {
                    true => Again::Later,
                    false => Again::Never,
                };
                return self.decline(error.to_string(), again);
            }
        };
        pass("lease.registered");
        let (identity, epoch) = (held.reader.identity().0, held.reader.epoch().0);
        if let Some(digest) = held.digest {
            self.digests.done(identity, Some(digest));
        } else if self.local.place() == Place::Host {
            // While it is read.
            let _ = self.digests.of(&held.reader, &self.local, sender);
        }
        let now = self.started.elapsed();
        let grant = match self.table.registered(now, lease, identity, epoch, held) {
            Ok(grant) => grant,
            Err((ended, again, why)) => {
                // It was never admitted.
                drop(ended);
                return self.decline(why, again);
            }
        };
        if let Some(service) = self.services.get_mut(&identity) {
            service.begun();
        }
        match self.table.of(lease).map(|held| self.granted(grant, held)) {
            Some(answered) => {
                self.figures.granted += 1;
                self.figures.bytes += bytes;
                answered
            }
            None => self.decline("the lease has ended".into(), Again::Later),
        }
    }

    fn decline(&mut self, why: String, again: Again) -> Answered {
        self.figures.declined += 1;
        declined(why, again)
    }

    /// Opens an object, if the plan admits the asker; else says why not, and whether it may work
    /// later.
    fn open(
        &mut self,
        now: Duration,
        lease: LeaseNumber,
        ask: &Ask,
    ) -> Result<Wanted, (String, Again)> {
        if !self.registering.has_room() {
            return Err(("too many objects are being registered".into(), Again::Busy));
        }
        let wanted = &ask.wanted;
        let selector = match (wanted.identity, wanted.epoch) {
            (Some(identity), _) => Selector::Identity(Identity(identity)),
            (None, Some(epoch)) => Selector::Epoch(wanted.name.clone(), Epoch(epoch)),
            (None, None) => Selector::Latest(wanted.name.clone()),
        };
        let opened = self.local.client.open_one(&selector);
        let reader = opened.map_err(|e| {
            // Also for what is not there: an announcement may be older than the object's removal,
            // and its successor's comes with the next look at the broker.
            (e.to_string(), Again::Later)
        })?;
        if reader.name() != wanted.name {
            let why = format!(
                "this identity has the name {}, and not {}",
                reader.name(),
                wanted.name
            );
            return Err((why, Again::Never));
        }
        let spans = self.local.spans(reader.regions());
        let reads = self.reads(now, reader.identity());
        self.serve(now, &reader)
            .admit(now, &reads, ask.others, ask.last_resort)
            .map_err(|why| (why, Again::Busy))?;
        let ways = candidates(self.local.place());
        Ok(Wanted {
            lease,
            since: now,
            host: ask.host.clone(),
            reader,
            spans,
            ways,
        })
    }

    /// Fills a slot of a lease that is live. On the thread that ends leases, so that none ends
    /// meanwhile.
    fn fill(&self, now: Duration, fill: &Fill) -> bool {
        let Some(held) = self.table.alive(now, fill.lease) else {
            return false;
        };
        let Some(ring) = held.rings.iter().find(|ring| ring.way() == fill.way) else {
            return false;
        };
        let spans = self.local.spans(held.reader.regions());
        // SAFETY: `fill`: the lease holds the reader, whose mapping is readable, and an object
        // never changes.
        unsafe { ring.fill(fill, &spans) }
    }

    /// Returns the ages of the reads of an object.
    fn reads(&self, now: Duration, identity: Identity) -> Vec<Duration> {
        let held = self
            .table
            .held()
            .map(|held| (held.reader.identity(), held.since));
        let of_it = held
            .chain(self.registering.objects())
            .filter(|(of, _)| *of == identity);
        of_it.map(|(_, since)| now.saturating_sub(since)).collect()
    }

    /// Finds the service of an object, or begins it.
    fn serve(&mut self, now: Duration, reader: &Reader) -> &mut Service {
        let manifest = reader.manifest();
        let (host, pace) = (&self.gateway.host, self.pace);
        let begin = || {
            let bytes = manifest.layout.regions().iter().sum();
            Service::new(host, manifest.home.is_none(), now, pace.expected(bytes))
        };
        let identity = reader.identity();
        self.services.entry(identity.0).or_insert_with(begin)
    }

    /// Takes back what a lease held whose reader is done.
    fn take_back(&mut self, ended: Ended<Held>) {
        drop(self.deregister(ended));
        pass("lease.deregistered");
    }

    /// Takes back what a lease held whose reader has not said that it is done.
    fn take_back_expired(&mut self, ended: Ended<Held>) {
        let reader = self.deregister(ended);
        if !self.transport.ends_reads() {
            self.lingering
                .push((self.started.elapsed() + self.lingers, reader));
        }
        pass("lease.deregistered");
    }

    fn deregister(&mut self, ended: Ended<Held>) -> Arc<Reader> {
        pass("lease.ended");
        let Held {
            registration,
            rings,
            reader,
            confirmed,
            ..
        } = ended.into_inner();
        let service = self.services.get_mut(&reader.identity().0);
        if let Some(service) = service.filter(|_| !confirmed.get()) {
            service.failed();
        }
        drop(registration);
        drop(rings);
        reader
    }

    fn granted(&self, grant: Grant, held: &Held) -> Answered {
        let reader = &held.reader;
        let device = match self.local.place() {
            Place::Host => None,
            Place::Device(ordinal) => Some(ordinal),
        };
        let addresses = held.registration.as_ref().map(|one| one.addresses());
        let addresses = addresses.unwrap_or_default();
        let granted = Granted {
            grant,
            home: match &reader.manifest().home {
                Some(home) => Home::read(home),
                None => self.local.home.clone(),
            },
            transport: self.transport.kind().into(),
            regions: reader
                .regions()
                .into_iter()
                .enumerate()
                .map(|(n, (_, bytes))| (addresses.get(n).copied().unwrap_or(0), bytes, device))
                .collect(),
            direct: held.registration.is_some(),
            rings: held.rings.iter().map(Lent::describe).collect(),
            manifest: held.manifest.len(),
        };
        let first = &held.manifest[..held.manifest.len().min(MANIFEST_PIECE)];
        Answered {
            answer: Answer::Granted(Box::new(granted)),
            attached: [first, &held.metadata[..]].concat(),
        }
    }

    /// Gives a piece of the manifest of a live lease's object.
    fn manifest(&self, now: Duration, asked: &Manifest) -> Answered {
        let held = self.table.alive(now, asked.lease);
        let Some(rest) = held.and_then(|held| held.manifest.get(asked.from..)) else {
            return declined("no lease lives that has this piece".into(), Again::Never);
        };
        let piece = rest[..rest.len().min(MANIFEST_PIECE)].to_vec();
        Answered {
            answer: Answer::Manifest(piece.len()),
            attached: piece,
        }
    }

    fn leases(&self) -> Vec<Lease> {
        let lease = |(grant, asker, host, lives): (Grant, Incarnation, &str, Duration)| Lease {
            lease: grant.lease.lease,
            identity: grant.identity().to_string(),
            epoch: grant.epoch,
            asker: asker.to_string(),
            host: host.into(),
            lives_ms: lives.as_millis() as u64,
        };
        self.table.live(self.started.elapsed()).map(lease).collect()
    }
}

/// A live lease, as data.
#[derive(Clone, Debug, Serialize)]
pub struct Lease {
    /// Its number.
    pub lease: LeaseNumber,
    /// The object.
    pub identity: String,
    /// Its epoch.
    pub epoch: u64,
    /// The process that has it.
    pub asker: String,
    /// Its host.
    pub host: String,
    /// How long it lives yet.
    pub lives_ms: u64,
}

fn declined(why: String, again: Again) -> Answered {
    Answered::plain(Answer::Declined { why, again })
}

fn unavailable(error: zenoh::Error) -> Error {
    Error::Unavailable {
        what: "an announcement".into(),
        why: error.to_string(),
        remedy: "see that the session is open",
    }
}
