//! Pulls one object: carries out what the machine of [`pull`](crate::replica) says.
//!
//! One process does one pull. Where a transfer neither ends nor fails, the process ends with its
//! destination mapped, and its death frees the memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpu_ipc::broker::{CreateOptions, Epoch, Manifest, ObjectError, Readers, Writer};
use gpu_ipc_gateway_plan::TroubleKind;
use zenoh::Wait;

use crate::local::Local;
use crate::pace::Pace;
use crate::replica::report::{Failure, Kind, Report, Steps};
use crate::replica::sources::{Next, Order, Sources, puller};
use crate::step::pass;
use crate::replica::ways::Ways;
use crate::error::Result;
use crate::message::{Again, Ask, Release};
use crate::net::call::{Answer, Answered, Asked, Granted, Heard, Question, ask};
use crate::net::key::{Announced, Gateway, ROOT};
use crate::replica::{Action, Event, Outcome, Patience, Pull, Rules};
use crate::transport::choice::Tried;
use crate::transport::route::Found;
use crate::transport::choice::{Land, Way};
use crate::transport::{Peer, Progress, Registration, Transfer, Transport};

/// How often what is awaited is looked at, at least. Soon after something has happened it is looked
/// at more often: after an eighth of the time since.
const LOOK: Duration = Duration::from_millis(1);
/// How often a transfer is, at least, since its bytes move when it is polled; unless none has come
/// for [`QUIET`].
const READING: Duration = Duration::from_micros(100);
/// See [`READING`].
const QUIET: Duration = Duration::from_secs(1);
/// Less is no time to sleep.
const SPIN: Duration = Duration::from_micros(50);
/// How long the origin may take to hear that a lease has ended.
const RELEASE: Duration = Duration::from_secs(1);

/// A pull and its means.
pub struct Fetch<'a> {
    /// This host.
    pub local: &'a Local,
    /// The network.
    pub session: &'a zenoh::Session,
    /// What carries the bytes.
    pub transport: Arc<dyn Transport>,
    /// How long each step may take.
    pub patience: Patience,
    /// How long a read takes.
    pub pace: Pace,
    /// The way to take; else the one that is found fastest.
    pub way: Option<Way>,
    /// Where the bytes of a ring land; else as [`Land::of`] has it.
    pub land: Option<Land>,
    /// Tests alone have others.
    pub rules: Rules,
}

impl std::fmt::Debug for Fetch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetch")
            .field("local", self.local)
            .finish_non_exhaustive()
    }
}

/// One attempt's own: dropped in this order. A transfer that has not ended may write to the object:
/// before it is dropped, as a panic would do it, the process ends, and its memory with it.
#[derive(Default)]
struct Attempt {
    /// What kind of failure the next one is.
    kind: Kind,
    transfer: Option<Box<dyn Transfer>>,
    peer: Option<Box<dyn Peer>>,
    registration: Option<Box<dyn Registration>>,
    writer: Option<Writer>,
    granted: Option<(Gateway, Granted, Manifest, Vec<u8>)>,
}

impl Fetch<'_> {
    /// Pulls, and calls `progress` with the bytes that have arrived and those of the object.
    ///
    /// # Errors
    ///
    /// Why the object is not here.
    pub fn run(
        &self,
        order: &Order,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Report, Failure> {
        let started = Instant::now();
        let failed = |error: crate::Error| Failure {
            kind: Kind::Failed,
            why: error.to_string(),
        };
        let me = puller(&self.local.host).map_err(failed)?;
        let mut sources =
            Sources::listen(self.session, order, me.clone(), self.pace, started).map_err(failed)?;
        let mut report = Report {
            name: order.name.clone(),
            transport: self.transport.kind().into(),
            ..Report::default()
        };
        let mut attempt = Attempt::default();
        let mut ways = Ways::new(
            self.session,
            Arc::clone(&self.transport),
            self.local.client.gpu(),
            self.patience.answer,
        );
        (ways.way, ways.land) = (self.way, self.land);
        let found = Arc::<Mutex<Found>>::default();
        let (mut arrived, mut quiet) = (0, Instant::now());
        let begun = || found.lock().unwrap_or_else(PoisonError::into_inner).begun;
        let mut waits: Vec<(Question, Asked)> = Vec::new();
        let (mut began, mut confirming) = (Instant::now(), Instant::now());
        let (mut pull, actions) = Pull::begin(Duration::ZERO, self.patience, self.rules);
        let mut todo: std::collections::VecDeque<Action> = actions.into();
        loop {
            while let Some(action) = todo.pop_front() {
                let begins = Instant::now();
                let event = match action {
                    Action::Ask(number) => {
                        attempt = Attempt::default();
                        match sources.next(&self.local.client, self.patience.answer) {
                            Next::Here(here) => {
                                let seconds = started.elapsed().as_secs_f64();
                                let Announced {
                                    epoch,
                                    identity,
                                    bytes,
                                    home,
                                    ..
                                } = here;
                                return Ok(Report {
                                    epoch,
                                    identity,
                                    bytes,
                                    home,
                                    seconds,
                                    was_here: true,
                                    ..report
                                });
                            }
                            Next::Nobody => {
                                attempt.kind = Kind::NotFound;
                                let from = order
                                    .from
                                    .as_ref()
                                    .map_or(String::new(), |host| format!(" of host {host}"));
                                let why = format!("no gateway{from} announces {}", order.name);
                                Some(Event::Declined(number, why, Again::Later))
                            }
                            Next::Wait(pause) => {
                                attempt.kind = Kind::Busy;
                                let why =
                                    format!("all gateways that announce {} are busy", order.name);
                                Some(Event::Busy(number, why, pause))
                            }
                            Next::PulledHere(pause) => {
                                attempt.kind = Kind::Busy;
                                let why = format!(
                                    "another process of this host is pulling {}",
                                    order.name
                                );
                                Some(Event::Busy(number, why, pause))
                            }
                            Next::Ask {
                                gateway,
                                wanted,
                                last_resort,
                            } => {
                                let (asker, host) = (me.incarnation, me.host.clone());
                                let question = Question::Ask(Ask {
                                    asker,
                                    host,
                                    number,
                                    wanted,
                                    last_resort,
                                });
                                let event = self.lease(number, &gateway, &question, &mut attempt);
                                report.steps = Steps {
                                    lease: begins.elapsed().as_secs_f64(),
                                    ..Steps::default()
                                };
                                Some(judge(event, &gateway, &mut sources))
                            }
                        }
                    }
                    Action::Create(_) => {
                        pass("pull.granted");
                        let made = self.create(&mut attempt);
                        report.steps.create = begins.elapsed().as_secs_f64();
                        pass("pull.created");
                        Some(made)
                    }
                    Action::Read(_) => {
                        arrived = 0;
                        *found.lock().unwrap_or_else(PoisonError::into_inner) = Found::default();
                        let begun = self.read(&mut attempt, &mut ways, &found);
                        report.steps.stage = begins.elapsed().as_secs_f64();
                        began = Instant::now();
                        pass("pull.reading");
                        begun.err().map(Event::ReadFailed)
                    }
                    Action::Flush => {
                        pass("pull.read");
                        let bytes = attempt.bytes();
                        let Found {
                            measured,
                            taken,
                            ring,
                            ..
                        } = found.lock().unwrap_or_else(PoisonError::into_inner).clone();
                        let read = taken.map_or(began, |(_, at)| at);
                        report.steps.trials = (read - began).as_secs_f64();
                        report.steps.read = read.elapsed().as_secs_f64();
                        report.gb_s = bytes as f64 / report.steps.read.max(1e-9) / 1e9;
                        if let Some((land, times)) = ring {
                            report.land = Some(land);
                            let seconds = |of: &AtomicU64| of.load(Ordering::Relaxed) as f64 / 1e9;
                            report.steps.ring_reading = seconds(&times.reading);
                            report.steps.ring_filling = seconds(&times.filling);
                            report.steps.ring_copying = seconds(&times.copying);
                            report.steps.fills = times.answers.load(Ordering::Relaxed);
                            report.steps.fill =
                                seconds(&times.answering) / report.steps.fills.max(1) as f64;
                        }
                        report.way = taken.map(|(way, _)| way);
                        report.ways = measured.iter().map(Tried::from).collect();
                        progress(bytes, bytes);
                        let begins = Instant::now();
                        let flushed = self.transport.flush();
                        report.steps.flush = begins.elapsed().as_secs_f64();
                        Some(match flushed {
                            Ok(()) => Event::Flushed,
                            Err(error) => Event::ReadFailed(error.to_string()),
                        })
                    }
                    Action::Confirm(confirm) => {
                        pass("pull.confirming");
                        confirming = begins;
                        self.send(&attempt, Question::Confirm(confirm), &mut waits);
                        None
                    }
                    Action::Renew(renew) => {
                        self.send(&attempt, Question::Renew(renew), &mut waits);
                        None
                    }
                    Action::Commit => {
                        pass("pull.confirmed");
                        report.steps.confirm = (begins - confirming).as_secs_f64();
                        let committed = commit(&mut attempt);
                        report.steps.commit = begins.elapsed().as_secs_f64();
                        Some(committed)
                    }
                    Action::Drop => {
                        if let Some((gateway, ..)) = &attempt.granted {
                            sources.trouble(gateway, TroubleKind::Failed);
                        }
                        attempt.transfer = None;
                        attempt.registration = None;
                        attempt.writer = None;
                        None
                    }
                    Action::Release(lease) => {
                        // Others wait for it; else the timer ends it.
                        if let Some((gateway, ..)) = &attempt.granted {
                            let question = Question::Release(Release { lease });
                            let _ = ask(self.session, gateway, &question, RELEASE)
                                .map(|asked| asked.wait());
                        }
                        None
                    }
                    Action::End(Outcome::Done) => {
                        pass("pull.committed");
                        if let Some((gateway, granted, _, _)) = &attempt.granted {
                            report.epoch = granted.grant.epoch;
                            report.identity = granted.grant.identity().to_string();
                            report.from.clone_from(&gateway.host);
                            report.home.clone_from(&granted.home);
                        }
                        report.bytes = attempt.bytes();
                        report.retries = pull.attempt() - 1;
                        report.seconds = started.elapsed().as_secs_f64();
                        return Ok(report);
                    }
                    Action::End(Outcome::Failed(why)) => {
                        return Err(Failure {
                            kind: attempt.kind,
                            why,
                        });
                    }
                    Action::End(Outcome::Stuck(why)) => {
                        // The transfer may write yet: mapped until this process ends.
                        std::mem::forget(attempt);
                        return Err(Failure {
                            kind: Kind::Stuck,
                            why,
                        });
                    }
                };
                quiet = Instant::now();
                if let Some(event) = event {
                    todo.extend(pull.happened(started.elapsed(), event));
                }
            }
            quiet = begun().map_or(quiet, |begun| begun.max(quiet));
            let most = if attempt.transfer.is_some() && quiet.elapsed() < QUIET {
                READING
            } else {
                LOOK
            };
            let pause = most.min(quiet.elapsed() / 8);
            if pause < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
            }
            let now = started.elapsed();
            if let Some(transfer) = &mut attempt.transfer {
                let event = match transfer.poll() {
                    Ok(Progress::Running { bytes }) => {
                        if bytes > arrived {
                            (arrived, quiet) = (bytes, Instant::now());
                            progress(bytes, attempt.bytes());
                        }
                        if bytes * 2 >= attempt.bytes() {
                            pass("pull.half_read");
                        }
                        Event::Progress(bytes)
                    }
                    Ok(Progress::Done) => {
                        attempt.transfer = None;
                        Event::Read
                    }
                    Err(error) => {
                        attempt.transfer = None;
                        Event::ReadFailed(error.to_string())
                    }
                };
                todo.extend(pull.happened(now, event));
            }
            let mut open = Vec::new();
            for (question, asked) in waits.drain(..) {
                match asked.hear() {
                    Heard::Answer(answered) => {
                        if let Some(event) = heard(&question, &answered) {
                            todo.extend(pull.happened(now, event));
                        }
                    }
                    Heard::NotYet => open.push((question, asked)),
                    Heard::Nothing => {}
                }
            }
            waits = open;
            todo.extend(pull.happened(now, Event::Tick));
        }
    }

    fn lease(
        &self,
        number: u64,
        gateway: &Gateway,
        question: &Question,
        attempt: &mut Attempt,
    ) -> Event {
        let later = |why: String| Event::Declined(number, why, Again::Later);
        let never = |why: String| Event::Declined(number, why, Again::Never);
        let asked = Instant::now();
        let answered = loop {
            match ask(self.session, gateway, question, self.patience.answer)
                .map(|asked| asked.wait())
            {
                // The same question: it is not registered once more.
                Ok(Some(Answered {
                    answer: Answer::Registering,
                    ..
                })) if asked.elapsed() < self.patience.busy => {}
                Ok(answered) => break answered,
                Err(error) => return later(error.to_string()),
            }
        };
        let Some(Answered { answer, attached }) = answered else {
            return later(format!("the gateway of {} does not answer", gateway.host));
        };
        let granted = match answer {
            Answer::Granted(granted) => *granted,
            Answer::Declined {
                why,
                again: Again::Busy,
            } => {
                attempt.kind = Kind::Busy;
                return Event::Busy(number, why, Duration::ZERO);
            }
            Answer::Declined { why, again } => return Event::Declined(number, why, again),
            Answer::Registering => {
                return later(format!("the gateway of {} registers it yet", gateway.host));
            }
            _ => return never("the gateway answered another question".into()),
        };
        let (manifest, metadata) = attached.split_at(granted.manifest);
        let manifest = match Manifest::decode(manifest) {
            Ok(manifest) => manifest,
            Err(error) => return never(error.to_string()),
        };
        let bytes: Vec<u64> = manifest.layout.regions().to_vec();
        let sound = manifest.identity == granted.grant.identity()
            && manifest.epoch == granted.grant.epoch()
            && granted.regions.iter().map(|(_, bytes, _)| *bytes).eq(bytes)
            && granted.transport == self.transport.kind();
        if !sound {
            let why = format!(
                "what {} granted is not what it describes, or it carries bytes by {}",
                gateway.host, granted.transport
            );
            return never(why);
        }
        let grant = granted.grant;
        let metadata = metadata.to_vec();
        attempt.granted = Some((gateway.clone(), granted, manifest, metadata));
        Event::Granted(number, grant)
    }

    fn create(&self, attempt: &mut Attempt) -> Event {
        let Some((_, granted, manifest, metadata)) = &attempt.granted else {
            return Event::NotCreated("nothing was granted".into(), Again::Never);
        };
        let uid = rustix::process::getuid().as_raw();
        // Its owner there may read it here too.
        let readers = match &manifest.readers {
            Readers::Owner if manifest.owner == uid => Readers::Owner,
            Readers::Owner => Readers::Uids(vec![manifest.owner]),
            Readers::Everybody => Readers::Everybody,
            Readers::Uids(uids) => {
                let all = uids
                    .iter()
                    .copied()
                    .chain([manifest.owner])
                    .filter(|other| *other != uid);
                Readers::Uids(all.take(16).collect())
            }
        };
        let replica_of = Some((Epoch(granted.grant.epoch), granted.home.clone()));
        let identity = Some(granted.grant.identity());
        let options = CreateOptions {
            readers,
            identity,
            replica_of,
            ..CreateOptions::default()
        };
        let writer =
            match self
                .local
                .client
                .create_with(&manifest.name, manifest.layout.clone(), &options)
            {
                Ok(writer) => writer,
                Err(error) => {
                    let again = match &error {
                        // Another process of this host began in the same moment: it is waited for
                        // from here on.
                        ObjectError::Refused {
                            refusal: gpu_ipc::broker::wire::RefusalCode::Exists,
                            ..
                        } => Again::Later,
                        ObjectError::Gpu(_)
                        | ObjectError::WriterLost { .. }
                        | ObjectError::Aborted { .. } => Again::Later,
                        _ => Again::Never,
                    };
                    if matches!(
                        error,
                        ObjectError::Refused { .. } | ObjectError::Conflict { .. }
                    ) {
                        attempt.kind = Kind::Refused;
                    }
                    return Event::NotCreated(error.to_string(), again);
                }
            };
        let spans = self.local.spans(writer.regions());
        // SAFETY: `register` asks for memory that is mapped and writable until the registration is
        // dropped and transfers have ended: `Attempt` keeps the writer, whose mapping it is, drops
        // it after the registration, and is never dropped while a transfer may write.
        match unsafe { self.transport.register(&spans) } {
            Ok(registration) => attempt.registration = Some(registration),
            Err(error) if granted.rings.is_empty() => {
                return Event::NotCreated(error.to_string(), Again::Never);
            }
            Err(error) => tracing::warn!(%error, "the object is read through a ring"),
        }
        match self.transport.load_peer(metadata) {
            Ok(peer) => attempt.peer = Some(peer),
            Err(error) => {
                attempt.registration = None;
                return Event::NotCreated(error.to_string(), Again::Later);
            }
        }
        attempt.writer = Some(writer);
        Event::Created
    }

    fn read(
        &self,
        attempt: &mut Attempt,
        ways: &mut Ways<'_>,
        found: &Arc<Mutex<Found>>,
    ) -> Result<(), String> {
        let (Some((gateway, granted, _, _)), Some(writer), Some(peer)) =
            (&attempt.granted, &attempt.writer, attempt.peer.take())
        else {
            return Err("nothing was created".into());
        };
        let object = self.local.spans(writer.regions());
        // SAFETY: `Ways::begin` asks that the object stays mapped, writable and to itself until the
        // transfer has ended: it is the writer's, which nobody else uses, and `Attempt` is not
        // dropped before the transfer's end: a transfer that does not end leads to
        // `Outcome::Stuck`, for which it is forgotten; a panic ends the process.
        let begun = unsafe {
            ways.begin(
                peer,
                (gateway, granted),
                &object,
                attempt.registration.is_some(),
                found,
            )
        };
        attempt.transfer = Some(begun.map_err(|error| error.to_string())?);
        Ok(())
    }

    fn send(&self, attempt: &Attempt, question: Question, waits: &mut Vec<(Question, Asked)>) {
        let Some((gateway, ..)) = &attempt.granted else {
            return;
        };
        match ask(self.session, gateway, &question, self.patience.answer) {
            Ok(asked) => waits.push((question, asked)),
            Err(error) => tracing::warn!(%error, "a question could not be asked"),
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.transfer.is_some() {
            std::process::abort();
        }
    }
}

impl Attempt {
    fn bytes(&self) -> u64 {
        self.granted.as_ref().map_or(0, |(_, granted, ..)| {
            granted.regions.iter().map(|(_, bytes, _)| bytes).sum()
        })
    }
}

/// Remembers what an answer says of its gateway. What one cannot serve for good, another may.
fn judge(event: Event, gateway: &Gateway, sources: &mut Sources) -> Event {
    match event {
        Event::Busy(..) => sources.trouble(gateway, TroubleKind::Refused),
        Event::Declined(..) => sources.trouble(gateway, TroubleKind::Failed),
        _ => {}
    }
    match event {
        Event::Declined(number, why, Again::Never) if sources.count() > 1 => {
            Event::Declined(number, why, Again::Later)
        }
        event => event,
    }
}

fn heard(question: &Question, answered: &Answered) -> Option<Event> {
    match (question, &answered.answer) {
        (Question::Confirm(confirm), Answer::Is(yes)) => {
            Some(Event::Confirmed(confirm.number, *yes))
        }
        (Question::Renew(renew), Answer::Is(yes)) => Some(Event::Renewed(renew.lease, *yes)),
        _ => None,
    }
}

fn commit(attempt: &mut Attempt) -> Event {
    attempt.registration = None;
    let Some(writer) = attempt.writer.take() else {
        return Event::NotCommitted("nothing was read".into());
    };
    // The bytes are there for all streams: the transport's flush was waited for.
    match writer.commit(&[]).and_then(|commit| commit.wait()) {
        Ok(_) => Event::Committed,
        Err(error) => Event::NotCommitted(error.to_string()),
    }
}

/// Names what a gateway of this network is for messages: used by `objects`.
pub fn announced(session: &zenoh::Session, patience: Duration) -> Vec<(Gateway, Announced)> {
    let Ok(replies) = session
        .liveliness()
        .get(format!("{ROOT}/*/*/has/**"))
        .timeout(patience)
        .wait()
    else {
        return Vec::new();
    };
    let mut all = Vec::new();
    while let Ok(reply) = replies.recv() {
        let key = reply
            .result()
            .ok()
            .map(|sample| sample.key_expr().as_str().to_owned());
        all.extend(key.and_then(|key| Announced::parse(&key)));
    }
    all.sort();
    all
}
