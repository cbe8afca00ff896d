//! Serves other gateways: opens what they ask for, registers it, confirms, and ends what was not renewed.
//!
//! One thread owns the table of leases, so that *ended, then taken back* is the order of its statements. Questions wait
//! in a queue of [`MOST_WAITING`]; one more is dropped, and its asker asks again.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use gpu_ipc::broker::{Epoch, Identity, Reader, Selector};
use serde::Serialize;
use zenoh::Wait;
use zenoh::liveliness::LivelinessToken;
use zenoh::query::{Query, Queryable};

use super::desk::Service;
use super::local::Local;
use super::pace::Pace;
use super::rings::{Lent, Rings};
use super::step::pass;
use crate::error::{Error, Result};
use crate::lease::{Asked, Ended, Limits, Table};
use crate::message::{Again, Ask, Fill, Grant, Incarnation, Release};
use crate::net::call::{Answer, Answered, Granted, Question, read_question};
use crate::net::key::{Announced, Gateway};
use crate::transport::path::choice::candidates;
use crate::transport::{Place, Registration, Transport};

/// Questions that wait to be answered.
pub const MOST_WAITING: usize = 256;
/// Objects that are announced; the others are found by asking this host.
pub const MOST_ANNOUNCED: usize = 4_096;
/// How often leases are looked at.
const TICK: Duration = Duration::from_millis(100);
/// How often the broker is asked what it has.
const LOOK: Duration = Duration::from_millis(500);

/// What a lease holds: dropped in this order.
#[derive(Debug)]
struct Held {
    /// None where the transport does not take the object's own memory.
    registration: Option<Box<dyn Registration>>,
    rings: Vec<Lent>,
    reader: Reader,
    host: String,
    since: Duration,
    confirmed: Cell<bool>,
}

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
    /// Leases that a timer ended.
    pub expired: u64,
    /// Questions that made no sense.
    pub garbage: u64,
}

/// A gateway that serves.
pub struct Server {
    gateway: Gateway,
    local: Local,
    transport: Arc<dyn Transport>,
    session: zenoh::Session,
    table: Table<Held>,
    started: Instant,
    figures: Figures,
    announced: BTreeMap<String, (Announced, LivelinessToken)>,
    /// Of the objects that were asked for.
    services: BTreeMap<[u8; 16], Service>,
    pace: Pace,
    rings: Rings,
    looked: Option<Instant>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("gateway", &self.gateway).finish_non_exhaustive()
    }
}

impl Server {
    /// Makes one; it serves from [`run`](Server::run) on.
    pub fn new(
        gateway: Gateway,
        local: Local,
        transport: Arc<dyn Transport>,
        session: zenoh::Session,
        limits: Limits,
        pace: Pace,
        slot_bytes: Option<u64>,
    ) -> Server {
        Server {
            rings: Rings::new(local.client.gpu().clone(), Arc::clone(&transport), slot_bytes),
            table: Table::new(gateway.incarnation, limits),
            gateway,
            local,
            transport,
            session,
            started: Instant::now(),
            figures: Figures::default(),
            announced: BTreeMap::new(),
            services: BTreeMap::new(),
            pace,
            looked: None,
        }
    }

    /// Serves until `each_tick`, which is given the figures and live leases, says that it is over.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] when nothing can be announced.
    pub fn run(mut self, mut each_tick: impl FnMut(&Figures, Vec<Lease>) -> bool) -> Result<()> {
        let (sender, questions) = sync_channel(MOST_WAITING);
        let _queryable = self.listen(sender)?;
        let _live = self.token(&format!("{}/live", self.gateway.key()))?;
        while each_tick(&self.figures, self.leases()) {
            self.look();
            self.hear(&questions);
            let ended = self.table.expire(self.started.elapsed());
            self.figures.expired += ended.len() as u64;
            ended.into_iter().for_each(|ended| self.take_back(ended));
            self.announce_loads();
        }
        Ok(())
    }

    fn listen(&self, sender: SyncSender<Query>) -> Result<Queryable<()>> {
        let queue = move |query: Query| {
            if sender.try_send(query).is_err() {
                tracing::warn!("{MOST_WAITING} questions wait already; one more was dropped");
            }
        };
        let key = format!("{}/ask", self.gateway.key());
        self.session.declare_queryable(key).callback(queue).wait().map_err(unavailable)
    }

    fn token(&self, key: &str) -> Result<LivelinessToken> {
        self.session.liveliness().declare_token(key).wait().map_err(unavailable)
    }

    /// Answers what has come, for a tick.
    fn hear(&mut self, questions: &Receiver<Query>) {
        let until = Instant::now() + TICK;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let query = match questions.recv_timeout(left) {
                Ok(query) => query,
                Err(RecvTimeoutError::Timeout) => return,
                Err(RecvTimeoutError::Disconnected) => return std::thread::sleep(left),
            };
            let bytes = query.payload().map(|payload| payload.to_bytes().into_owned()).unwrap_or_default();
            let answered = match read_question(&bytes) {
                Ok(question) => self.answer(question),
                Err(error) => {
                    self.figures.garbage += 1;
                    Some(declined(error.to_string(), Again::Never))
                }
            };
            // Before the answer, so that a gateway that hears of the lease has heard of the load.
            self.announce_loads();
            let Some(answered) = answered else { continue };
            if let Err(error) = query.reply(query.key_expr().clone(), answered.encode()).wait() {
                tracing::warn!(%error, "an answer could not be sent");
            }
            if matches!(answered.answer, Answer::Granted(_)) {
                pass("lease.granted");
            }
        }
    }

    fn answer(&mut self, question: Question) -> Option<Answered> {
        let now = self.started.elapsed();
        let is = |yes| Some(Answered::plain(Answer::Is(yes)));
        match question {
            Question::Ask(ask) => self.ask(now, &ask),
            Question::Confirm(confirm) => {
                pass("confirm.heard");
                let yes = self.table.confirm(self.started.elapsed(), &confirm);
                let counted = &mut self.figures.confirmed;
                *(if yes { &mut counted.0 } else { &mut counted.1 }) += 1;
                if yes && let Some(held) = self.table.of(confirm.lease.lease) {
                    held.confirmed.set(true);
                    if let Some(service) = self.services.get_mut(&confirm.identity) {
                        service.confirmed(now, &held.host);
                    }
                }
                pass("confirm.answered");
                is(yes)
            }
            Question::Renew(renew) => is(self.table.renew(now, &renew)),
            Question::Fill(fill) => {
                pass("fill.heard");
                let filled = self.fill(now, &fill);
                pass("fill.copied");
                is(filled)
            }
            Question::Release(release) => {
                let ended = self.table.release(&release);
                let was = ended.is_some();
                ended.into_iter().for_each(|ended| self.take_back(ended));
                is(was)
            }
            Question::Removed(names) => Some(self.removed(&names)),
        }
    }

    fn ask(&mut self, now: Duration, ask: &Ask) -> Option<Answered> {
        pass("ask.heard");
        let lease = match self.table.ask(now, ask) {
            Asked::Open(lease) => lease,
            Asked::Again(grant) => {
                let held = self.table.of(grant.lease.lease)?;
                return self.granted(grant, held).ok();
            }
            Asked::Wait => return None,
            Asked::Busy(why) => return self.decline(why, Again::Busy),
        };
        let (bytes, held) = match self.hold(now, ask) {
            Ok(held) => held,
            Err((why, again)) => {
                self.table.failed(lease);
                return self.decline(why, again);
            }
        };
        pass("lease.registered");
        let (identity, epoch) = (held.reader.identity().0, held.reader.epoch().0);
        let now = self.started.elapsed();
        match self.table.registered(now, lease, identity, epoch, held) {
            Ok(grant) => {
                if let Some(service) = self.services.get_mut(&identity) {
                    service.begun();
                }
                let answered = self.table.of(lease).map(|held| self.granted(grant, held));
                match answered {
                    Some(Ok(answered)) => {
                        self.figures.granted += 1;
                        self.figures.bytes += bytes;
                        Some(answered)
                    }
                    Some(Err(error)) => {
                        let ended = self.table.release(&Release { lease: grant.lease });
                        ended.into_iter().for_each(|ended| self.take_back(ended));
                        self.decline(error.to_string(), Again::Later)
                    }
                    None => None,
                }
            }
            Err((ended, again, why)) => {
                // It was never admitted.
                drop(ended);
                self.decline(why, again)
            }
        }
    }

    fn decline(&mut self, why: String, again: Again) -> Option<Answered> {
        self.figures.declined += 1;
        Some(declined(why, again))
    }

    /// Opens and registers an object, if the plan admits the asker. Returns its bytes with it; else why not, and
    /// whether it may work later.
    fn hold(&mut self, now: Duration, ask: &Ask) -> Result<(u64, Held), (String, Again)> {
        let wanted = &ask.wanted;
        let selector = match (wanted.identity, wanted.epoch) {
            (Some(identity), _) => Selector::Identity(Identity(identity)),
            (None, Some(epoch)) => Selector::Epoch(wanted.name.clone(), Epoch(epoch)),
            (None, None) => Selector::Latest(wanted.name.clone()),
        };
        let opened = self.local.client.open_one(&selector);
        let reader = opened.map_err(|e| {
            // Also for what is not there: an announcement may be older than the object's removal, and its successor's
            // comes with the next look at the broker.
            (e.to_string(), Again::Later)
        })?;
        if reader.name() != wanted.name {
            let why = format!("this identity has the name {}, and not {}", reader.name(), wanted.name);
            return Err((why, Again::Never));
        }
        let spans = self.local.spans(reader.regions());
        let bytes = spans.iter().map(|span| span.bytes).sum();
        let reads = self.reads(now, reader.identity());
        let service = self.service(&reader, bytes).map_err(|e| (e.to_string(), Again::Later))?;
        service.admit(now, &reads, ask.last_resort).map_err(|why| (why, Again::Busy))?;
        // SAFETY: `register` asks for memory that is mapped and readable until the registration is dropped: `Held`
        // keeps the reader, whose mapping it is, and drops it after the registration.
        let registered = unsafe { self.transport.register(&spans) };
        let ways = candidates(self.local.place());
        // SAFETY: `lend`: the reader's mapping is readable, and an object never changes.
        let rings = unsafe { self.rings.lend(ways, &spans) };
        let registration = match registered {
            Ok(registration) => Some(registration),
            Err(error) if rings.is_empty() => return Err((error.to_string(), Again::Never)),
            Err(error) => {
                tracing::warn!(%error, "an object is read through rings alone");
                None
            }
        };
        let (host, since, confirmed) = (ask.host.clone(), now, Cell::new(false));
        Ok((bytes, Held { registration, rings, reader, host, since, confirmed }))
    }

    /// Fills a slot of a lease that is live. On the thread that ends leases, so that none ends meanwhile.
    fn fill(&self, now: Duration, fill: &Fill) -> bool {
        let Some(held) = self.table.alive(now, fill.lease) else { return false };
        let Some(ring) = held.rings.iter().find(|ring| ring.way() == fill.way) else { return false };
        let spans = self.local.spans(held.reader.regions());
        // SAFETY: `fill`: the lease holds the reader, whose mapping is readable, and an object never changes.
        unsafe { ring.fill(fill, &spans) }
    }

    /// Returns the ages of the reads of an object.
    fn reads(&self, now: Duration, identity: Identity) -> Vec<Duration> {
        let of_it = self.table.held().filter(|held| held.reader.identity() == identity);
        of_it.map(|held| now.saturating_sub(held.since)).collect()
    }

    fn service(&mut self, reader: &Reader, bytes: u64) -> Result<&mut Service> {
        let identity = reader.identity();
        let service = match self.services.entry(identity.0) {
            Entry::Occupied(known) => return Ok(known.into_mut()),
            Entry::Vacant(place) => place,
        };
        let origin = reader.manifest().home.is_none();
        let (host, pace, started) = (&self.gateway.host, self.pace, self.started);
        Ok(service.insert(Service::begin(&self.session, host, identity, origin, bytes, pace, started)?))
    }

    /// Announces how many read each object, where that has changed.
    fn announce_loads(&mut self) {
        let now = self.started.elapsed();
        for (&number, service) in &self.services {
            let identity = Identity(number);
            let Some((announced, _)) = self.announced.get(&identity.to_string()) else { continue };
            let reads = service.announced(now, &self.reads(now, identity));
            if reads == announced.reads {
                continue;
            }
            let announced = Announced { reads, ..announced.clone() };
            match self.token(&announced.key(&self.gateway)) {
                // The former token goes when the other is there.
                Ok(token) => drop(self.announced.insert(identity.to_string(), (announced, token))),
                Err(error) => return tracing::warn!(%error, "the load of an object is not announced"),
            }
        }
    }

    fn take_back(&mut self, ended: Ended<Held>) {
        pass("lease.ended");
        let held = ended.into_inner();
        let service = self.services.get_mut(&held.reader.identity().0);
        if let Some(service) = service.filter(|_| !held.confirmed.get()) {
            service.failed();
        }
        drop(held);
        pass("lease.deregistered");
    }

    fn granted(&self, grant: Grant, held: &Held) -> Result<Answered> {
        let reader = &held.reader;
        let manifest = reader.manifest().encode().map_err(|e| Error::Unavailable {
            what: "the manifest".into(),
            why: e.to_string(),
            remedy: "commit the object again",
        })?;
        let device = match self.local.place() {
            Place::Host => None,
            Place::Device(ordinal) => Some(ordinal),
        };
        let granted = Granted {
            grant,
            home: reader.manifest().home.clone().unwrap_or_else(|| self.gateway.host.clone()),
            transport: self.transport.kind().into(),
            regions: reader.regions().into_iter().map(|(at, bytes)| (at.0, bytes, device)).collect(),
            direct: held.registration.is_some(),
            rings: held.rings.iter().map(Lent::describe).collect(),
            manifest: manifest.len(),
        };
        let attached = [manifest, self.transport.metadata()?].concat();
        Ok(Answered { answer: Answer::Granted(Box::new(granted)), attached })
    }

    fn removed(&self, names: &[String]) -> Answered {
        let list = match self.local.list() {
            Ok(list) => list,
            Err(error) => return declined(error.to_string(), Again::Later),
        };
        let ours = list.removed.into_iter().filter(|row| row.home.is_none() && names.contains(&row.name));
        Answered::plain(Answer::Removed(ours.map(|row| (row.name, row.up_to)).collect()))
    }

    /// Announces what the broker has got, and takes back what it has not any more.
    fn look(&mut self) {
        if self.looked.is_some_and(|at| at.elapsed() < LOOK) {
            return;
        }
        self.looked = Some(Instant::now());
        let list = match self.local.list() {
            Ok(list) => list,
            Err(error) => return tracing::warn!(%error, "what is announced stays"),
        };
        let visible: BTreeMap<String, _> = list
            .objects
            .into_iter()
            .filter(|row| row.state == "visible")
            .map(|row| (row.identity.clone(), row))
            .take(MOST_ANNOUNCED)
            .collect();
        self.announced.retain(|identity, _| visible.contains_key(identity));
        self.services.retain(|&number, _| visible.contains_key(&Identity(number).to_string()));
        for identity in visible.into_keys() {
            if self.announced.contains_key(&identity) {
                continue;
            }
            let Ok(number) = identity.parse::<Identity>() else { continue };
            // An object of another device is another gateway's.
            let Ok(reader) = self.local.client.open_one(&Selector::Identity(number)) else { continue };
            let announced = self.local.announced(&reader);
            match self.token(&announced.key(&self.gateway)) {
                Ok(token) => drop(self.announced.insert(identity, (announced, token))),
                Err(error) => return tracing::warn!(%error, "an object is not announced"),
            }
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
    pub lease: u64,
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
