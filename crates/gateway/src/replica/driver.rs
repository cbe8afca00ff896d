//! Pulls one object: carries out what the machine of [`replica`](crate::replica) says.
//!
//! One process does one pull. Where a transfer neither ends nor fails, the process ends with its
//! destination mapped, and its death frees the memory.
//!
//! The thread of a pull asks, polls and renews. What may take long has a thread of its own: the
//! object is made at this host's broker, and its memory registered, by
//! [`create`](crate::replica::create).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use gpu_ipc::broker::{Readers, Writer};
use gpu_ipc_gateway_plan::TroubleKind;

use crate::digest::{Digest, PIECE};
use crate::local::Local;
use crate::message::{Again, Ask, Confirm, Has, LeaseId, Release};
use crate::net::call::{Answer, Answered, Asked, Heard, Question, ask};
use crate::net::key::Gateway;
use crate::net::live::Live;
use crate::net::session::Session;
use crate::replica::create::{Created, Leased, Made, Means, begin};
use crate::replica::report::{Failure, Kind, Report, Steps};
use crate::replica::sources::{Next, Order, Sources, puller};
use crate::replica::ways::Ways;
use crate::replica::{Action, Event, Outcome, Patience, Pull, Rules};
use crate::step::pass;
use crate::transport::choice::{Land, Tried, Way};
use crate::transport::route::Found;
use crate::transport::{Progress, Transfer, Transport};
use gpu_ipc_gateway_plan::Pace;

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

/// What pulls of one process have in common.
pub struct Fetch<'a> {
    /// This host.
    pub local: &'a Local,
    /// The network.
    pub session: &'a Session,
    /// The gateways that are there.
    pub live: Arc<Live>,
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
    /// Who may open the replica here, besides the user that pulls.
    pub readers: Readers,
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
        let failed = |error: crate::Error| Failure {
            kind: Kind::Failed,
            why: error.to_string(),
        };
        Driver::begin(self, order, &mut progress)
            .map_err(failed)?
            .run()
    }
}

/// One attempt's own: dropped in this order. A transfer that has not ended may write to the object:
/// before it is dropped, as a panic would do it, the process ends, and its memory with it.
#[derive(Default)]
struct Attempt {
    /// What kind of failure the next one is.
    kind: Kind,
    /// The question for a lease, until it is answered.
    asked: Option<(Gateway, Question)>,
    transfer: Option<Box<dyn Transfer>>,
    creating: Option<Receiver<Created>>,
    /// Dropped, it is waited for: it reads the object.
    digesting: Option<Digesting>,
    digest: Option<Digest>,
    made: Option<Made>,
    leased: Option<Arc<Leased>>,
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
        self.leased.as_ref().map_or(0, |leased| leased.bytes())
    }
}

/// A thread that digests what came.
struct Digesting(Option<JoinHandle<Option<Digest>>>);

impl Digesting {
    /// Returns the digest once it is there.
    fn end(&mut self) -> Option<Option<Digest>> {
        let thread = self.0.take_if(|thread| thread.is_finished())?;
        // One that panicked has said so, and has compared nothing.
        Some(thread.join().unwrap_or_default())
    }
}

impl Drop for Digesting {
    fn drop(&mut self) {
        drop(self.0.take().map(JoinHandle::join));
    }
}

/// A pull on its way.
struct Driver<'a> {
    fetch: &'a Fetch<'a>,
    order: &'a Order,
    progress: &'a mut dyn FnMut(u64, u64),
    me: Gateway,
    sources: Sources,
    ways: Ways<'a>,
    pull: Pull,
    todo: VecDeque<Action>,
    attempt: Attempt,
    /// Questions of this attempt without an answer.
    waits: Vec<(Question, Asked)>,
    found: Arc<Mutex<Found>>,
    arrived: u64,
    report: Report,
    started: Instant,
    /// When something last happened.
    quiet: Instant,
    /// When the question for a lease, the object's creation, its read, its digest and the confirmation began.
    asking: Instant,
    creating: Instant,
    reading: Instant,
    digesting: Instant,
    confirming: Instant,
}

/// How a pull ends.
type End = Result<Report, Failure>;

impl<'a> Driver<'a> {
    fn begin(
        fetch: &'a Fetch<'a>,
        order: &'a Order,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> crate::Result<Driver<'a>> {
        let started = Instant::now();
        let me = puller(&fetch.local.home.host)?;
        let net = (fetch.session, &fetch.live);
        let sources = Sources::new(net, order, me.clone(), fetch.pace, started);
        let mut ways = Ways::new(
            fetch.session,
            Arc::clone(&fetch.transport),
            fetch.local.client.gpu(),
            fetch.patience.answer,
        );
        (ways.way, ways.land) = (fetch.way, fetch.land);
        let (pull, actions) = Pull::begin(Duration::ZERO, fetch.patience, fetch.rules);
        let report = Report {
            name: order.name.clone(),
            transport: fetch.transport.kind().into(),
            ..Report::default()
        };
        Ok(Driver {
            fetch,
            order,
            progress,
            me,
            sources,
            ways,
            pull,
            todo: actions.into(),
            attempt: Attempt::default(),
            waits: Vec::new(),
            found: Arc::default(),
            arrived: 0,
            report,
            started,
            quiet: started,
            asking: started,
            creating: started,
            reading: started,
            digesting: started,
            confirming: started,
        })
    }

    fn run(mut self) -> End {
        loop {
            while let Some(action) = self.todo.pop_front() {
                if let Some(end) = self.act(action) {
                    return end;
                }
                self.quiet = Instant::now();
            }
            self.rest();
            self.look_at_the_object();
            self.look_at_the_transfer();
            self.look_at_the_digest();
            self.hear();
            self.happened(Event::Tick);
        }
    }

    /// Does one thing, and says how the pull ended if that was the last.
    fn act(&mut self, action: Action) -> Option<End> {
        match action {
            Action::Ask(number) => return self.ask(number),
            Action::Repeat(number) => self.lease(number),
            Action::Create(_) => self.create(),
            Action::Read(_) => self.read(),
            Action::Flush => self.flush(),
            Action::Confirm(confirm) => {
                pass("pull.confirming");
                self.confirming = Instant::now();
                self.send(Question::Confirm(Confirm {
                    digest: self.attempt.digest,
                    ..confirm
                }));
            }
            Action::Renew(renew) => self.send(Question::Renew(renew)),
            Action::Commit => self.commit(),
            Action::Drop => self.throw_away(),
            Action::Release(lease) => self.release(lease),
            Action::End(outcome) => return Some(self.end(outcome)),
        }
        None
    }

    fn happened(&mut self, event: Event) {
        let now = self.started.elapsed();
        self.todo.extend(self.pull.happened(now, event));
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses a host and asks it for a lease.
    fn ask(&mut self, number: u64) -> Option<End> {
        let former = std::mem::take(&mut self.attempt);
        if let Some((gateway, _)) = &former.asked {
            self.sources.trouble(gateway, TroubleKind::Failed);
        }
        drop(former);
        self.waits.clear();
        let (local, patience) = (self.fetch.local, self.fetch.patience.answer);
        let event = match self.sources.next(&local.client, patience) {
            Next::Here(here) => return Some(Ok(self.was_here(here))),
            Next::Nobody => {
                self.attempt.kind = Kind::NotFound;
                let from = self.order.from.as_ref();
                let from = from.map_or(String::new(), |host| format!(" of host {host}"));
                let why = format!("no gateway{from} has {}", self.order.name);
                Event::Declined(number, why, Again::Later)
            }
            Next::Unheard(why) => {
                self.attempt.kind = Kind::Unreached;
                let why = format!("{} was not found: {why}", self.order.name);
                Event::Declined(number, why, Again::Later)
            }
            Next::Wait(pause, why) => {
                self.attempt.kind = Kind::Busy;
                Event::Busy(number, why, pause)
            }
            Next::Ask {
                gateway,
                wanted,
                others,
                last_resort,
            } => {
                self.asking = Instant::now();
                let question = Question::Ask(Ask {
                    asker: self.me.incarnation,
                    host: self.me.host.clone(),
                    number,
                    wanted,
                    others,
                    last_resort,
                });
                self.attempt.asked = Some((gateway, question));
                self.lease(number);
                return None;
            }
        };
        self.happened(event);
        None
    }

    /// Asks for the lease, and waits for the answer.
    fn lease(&mut self, number: u64) {
        let Some((gateway, question)) = self.attempt.asked.take() else {
            return;
        };
        let (session, patience) = (self.fetch.session, self.fetch.patience.answer);
        let answered = ask(session, &gateway, &question, patience).map(|asked| asked.wait());
        let event = match answered {
            Ok(Some(Answered {
                answer: Answer::Registering,
                ..
            })) => {
                self.attempt.asked = Some((gateway, question));
                return self.happened(Event::Registering(number));
            }
            Ok(Some(answered)) => self.leased(number, &gateway, question, answered),
            Ok(None) => {
                let why = format!("the gateway of {} does not answer", gateway.host);
                Event::Declined(number, why, Again::Later)
            }
            Err(error) => Event::Declined(number, error.to_string(), Again::Later),
        };
        self.report.steps = Steps {
            lease: self.asking.elapsed().as_secs_f64(),
            ..Steps::default()
        };
        let event = self.judge(event, &gateway);
        self.happened(event);
    }

    /// Takes the answer to a question for a lease.
    fn leased(
        &mut self,
        number: u64,
        gateway: &Gateway,
        question: Question,
        Answered { answer, attached }: Answered,
    ) -> Event {
        let (granted, wanted) = match (answer, question) {
            (Answer::Granted(granted), Question::Ask(Ask { wanted, .. })) => (*granted, wanted),
            (
                Answer::Declined {
                    why,
                    again: Again::Busy,
                },
                _,
            ) => {
                self.attempt.kind = Kind::Busy;
                return Event::Busy(number, why, Duration::ZERO);
            }
            (Answer::Declined { why, again }, _) => return Event::Declined(number, why, again),
            _ => {
                let why = format!("the gateway of {} answered another question", gateway.host);
                return Event::Declined(number, why, Again::Never);
            }
        };
        let leased = Leased {
            gateway: gateway.clone(),
            asker: self.me.incarnation,
            wanted,
            granted,
            attached,
        };
        if let Err(why) = leased.check(self.fetch.transport.kind()) {
            return Event::Declined(number, why, Again::Never);
        }
        let grant = leased.granted.grant;
        self.attempt.leased = Some(Arc::new(leased));
        Event::Granted(number, grant)
    }

    /// Remembers what an answer says of its gateway. What one cannot serve for good, another may.
    fn judge(&mut self, event: Event, gateway: &Gateway) -> Event {
        match event {
            Event::Busy(..) => self.sources.trouble(gateway, TroubleKind::Refused),
            Event::Declined(..) => self.sources.trouble(gateway, TroubleKind::Failed),
            _ => {}
        }
        match event {
            Event::Declined(number, why, Again::Never) if self.sources.count() > 1 => {
                Event::Declined(number, why, Again::Later)
            }
            event => event,
        }
    }

    /// Begins to make the object.
    fn create(&mut self) {
        pass("pull.granted");
        self.creating = Instant::now();
        let Some(leased) = &self.attempt.leased else {
            let why = "nothing was granted".into();
            return self.happened(Event::NotCreated(why, Again::Never));
        };
        let means = Means {
            local: self.fetch.local.clone(),
            session: self.fetch.session.clone(),
            transport: Arc::clone(&self.fetch.transport),
            patience: self.fetch.patience.answer,
            readers: self.fetch.readers.clone(),
        };
        match begin(means, Arc::clone(leased)) {
            Ok(creating) => self.attempt.creating = Some(creating),
            Err(error) => self.happened(Event::NotCreated(error.to_string(), Again::Later)),
        }
    }

    /// Looks whether the object is made.
    fn look_at_the_object(&mut self) {
        let Some(creating) = &self.attempt.creating else {
            return;
        };
        let created = match creating.try_recv() {
            Ok(created) => created,
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => Err((
                "the thread that makes the object panicked".into(),
                Again::Never,
                Kind::Failed,
            )),
        };
        self.attempt.creating = None;
        self.report.steps.create = self.creating.elapsed().as_secs_f64();
        pass("pull.created");
        let event = match created {
            Ok(made) => {
                self.attempt.made = Some(made);
                Event::Created
            }
            Err((why, again, kind)) => {
                self.attempt.kind = kind;
                Event::NotCreated(why, again)
            }
        };
        self.happened(event);
    }

    /// Begins to read.
    fn read(&mut self) {
        self.arrived = 0;
        *self.found() = Found::default();
        self.reading = Instant::now();
        let begun = self.begin_to_read();
        self.report.steps.stage = self.reading.elapsed().as_secs_f64();
        pass("pull.reading");
        if let Err(why) = begun {
            self.happened(Event::ReadFailed(why));
        }
    }

    fn begin_to_read(&mut self) -> Result<(), String> {
        let (Some(leased), Some(made)) = (&self.attempt.leased, &mut self.attempt.made) else {
            return Err("nothing was created".into());
        };
        let peer = made.peer.take().ok_or("it was read already")?;
        let object = self.fetch.local.spans(made.writer.regions());
        // SAFETY: `Ways::begin` asks that the object stays mapped, writable and to itself until the
        // transfer has ended: it is the writer's, which nobody else uses, and `Attempt` is not
        // dropped before the transfer's end: a transfer that does not end leads to
        // `Outcome::Stuck`, for which it is forgotten; a panic ends the process.
        let begun = unsafe {
            self.ways.begin(
                peer,
                (&leased.gateway, &leased.granted),
                &object,
                made.registration.is_some(),
                &self.found,
            )
        };
        self.attempt.transfer = Some(begun.map_err(|error| error.to_string())?);
        Ok(())
    }

    /// Looks how far the transfer is.
    fn look_at_the_transfer(&mut self) {
        let Some(transfer) = &mut self.attempt.transfer else {
            return;
        };
        let event = match transfer.poll() {
            Ok(Progress::Running { bytes }) => {
                let all = self.attempt.bytes();
                if bytes > self.arrived {
                    (self.arrived, self.quiet) = (bytes, Instant::now());
                    (self.progress)(bytes, all);
                }
                if bytes * 2 >= all {
                    pass("pull.half_read");
                }
                Event::Progress(bytes)
            }
            Ok(Progress::Done) => {
                self.attempt.transfer = None;
                Event::Read
            }
            Err(error) => {
                self.attempt.transfer = None;
                Event::ReadFailed(error.to_string())
            }
        };
        self.happened(event);
    }

    /// Makes the device see what was read.
    fn flush(&mut self) {
        pass("pull.read");
        self.note_the_read();
        let bytes = self.attempt.bytes();
        (self.progress)(bytes, bytes);
        let begun = Instant::now();
        let flushed = self.fetch.transport.flush();
        self.report.steps.flush = begun.elapsed().as_secs_f64();
        self.digesting = Instant::now();
        if let Err(why) = flushed
            .map_err(|error| error.to_string())
            .and_then(|()| self.digest())
        {
            self.happened(Event::ReadFailed(why));
        }
    }

    /// Digests what came: a little of it at once, and more on a thread.
    fn digest(&mut self) -> Result<(), String> {
        let Some(made) = &self.attempt.made else {
            return Err("nothing was created".into());
        };
        let object = self.fetch.local.spans(made.writer.regions());
        // SAFETY: `Digest::of`: the object is the writer's, and its transfer has ended. A thread is
        // waited for before `made` goes, which `Attempt` drops later and `throw_away` gives up later.
        let work = move || unsafe { Digest::of(&object) };
        if self.attempt.bytes() <= PIECE {
            self.digested(work());
            return Ok(());
        }
        let started =
            thread::start("gateway-digests", work).map_err(|e| format!("no thread: {e}"))?;
        self.attempt.digesting = Some(Digesting(Some(started)));
        Ok(())
    }

    fn look_at_the_digest(&mut self) {
        let digesting = self.attempt.digesting.as_mut();
        if let Some(digest) = digesting.and_then(Digesting::end) {
            self.attempt.digesting = None;
            self.digested(digest);
        }
    }

    fn digested(&mut self, digest: Option<Digest>) {
        self.attempt.digest = digest;
        self.report.steps.digest = self.digesting.elapsed().as_secs_f64();
        self.happened(Event::Flushed);
    }

    /// Notes what the read took, and by which way.
    fn note_the_read(&mut self) {
        let Found {
            measured,
            taken,
            ring,
            ..
        } = self.found().clone();
        // A transport may read while it is told to begin.
        let read = taken.map_or(self.reading, |(_, at)| at);
        let report = &mut self.report;
        let steps = &mut report.steps;
        steps.trials = taken.map_or(0.0, |(_, at)| (at - self.reading).as_secs_f64());
        steps.read = read.elapsed().as_secs_f64();
        report.gb_s = self.attempt.bytes() as f64 / steps.read.max(1e-9) / 1e9;
        if let Some((land, times)) = ring {
            report.land = Some(land);
            let seconds = |of: &AtomicU64| of.load(Ordering::Relaxed) as f64 / 1e9;
            steps.ring_reading = seconds(&times.reading);
            steps.ring_filling = seconds(&times.filling);
            steps.ring_copying = seconds(&times.copying);
            steps.fills = times.answers.load(Ordering::Relaxed);
            steps.fill = seconds(&times.answering) / steps.fills.max(1) as f64;
        }
        report.way = taken.map(|(way, _)| way);
        report.ways = measured.iter().map(Tried::from).collect();
    }

    /// Makes the object visible.
    fn commit(&mut self) {
        pass("pull.confirmed");
        let begun = Instant::now();
        self.report.steps.confirm = (begun - self.confirming).as_secs_f64();
        let made = self.attempt.made.take();
        let event = match made.map(|made| made.into_writer()) {
            Some(writer) => commit(writer),
            None => Event::NotCommitted("nothing was read".into()),
        };
        self.report.steps.commit = begun.elapsed().as_secs_f64();
        self.happened(event);
    }

    /// Gives the attempt's object up: nothing is written to it any more.
    fn throw_away(&mut self) {
        if let Some(leased) = &self.attempt.leased {
            self.sources.trouble(&leased.gateway, TroubleKind::Failed);
        }
        self.attempt.transfer = None;
        self.attempt.digesting = None;
        self.attempt.made = None;
    }

    /// Tells the origin that the lease has ended: others wait for it. Else the timer ends it.
    fn release(&self, lease: LeaseId) {
        if let Some(leased) = &self.attempt.leased {
            let question = Question::Release(Release { lease });
            let _ = ask(self.fetch.session, &leased.gateway, &question, RELEASE)
                .map(|asked| asked.wait());
        }
    }

    fn send(&mut self, question: Question) {
        let Some(leased) = &self.attempt.leased else {
            return;
        };
        let patience = self.fetch.patience.answer;
        match ask(self.fetch.session, &leased.gateway, &question, patience) {
            Ok(asked) => self.waits.push((question, asked)),
            Err(error) => tracing::warn!(%error, "a question could not be asked"),
        }
    }

    /// Hears what was answered, and what will not be.
    fn hear(&mut self) {
        for (question, asked) in std::mem::take(&mut self.waits) {
            match asked.hear() {
                Heard::Answer(answered) => {
                    if let Some(event) = heard(&question, &answered) {
                        self.happened(event);
                    }
                }
                Heard::NotYet => self.waits.push((question, asked)),
                Heard::Nothing => {
                    if let Question::Confirm(confirm) = question {
                        self.happened(Event::Unheard(confirm.number));
                    }
                }
            }
        }
    }

    /// Sleeps for as long as nothing is missed.
    fn rest(&mut self) {
        let begun = self.found().begun;
        self.quiet = begun.map_or(self.quiet, |begun| begun.max(self.quiet));
        let most = if self.attempt.transfer.is_some() && self.quiet.elapsed() < QUIET {
            READING
        } else {
            LOOK
        };
        let pause = most.min(self.quiet.elapsed() / 8);
        if pause < SPIN {
            std::thread::yield_now();
        } else {
            std::thread::sleep(pause);
        }
    }

    fn was_here(&mut self, here: Has) -> Report {
        let Has {
            epoch,
            identity,
            bytes,
            home,
            ..
        } = here;
        Report {
            epoch,
            identity,
            bytes,
            home: home.host,
            seconds: self.started.elapsed().as_secs_f64(),
            was_here: true,
            ..std::mem::take(&mut self.report)
        }
    }

    fn end(&mut self, outcome: Outcome) -> End {
        let mut attempt = std::mem::take(&mut self.attempt);
        match outcome {
            Outcome::Done => {
                pass("pull.committed");
                let mut report = std::mem::take(&mut self.report);
                if let Some(leased) = attempt.leased.take() {
                    report.bytes = leased.bytes();
                    report.checked = attempt.digest.map_or(0, |_| leased.bytes());
                    report.epoch = leased.granted.grant.epoch;
                    report.identity = leased.granted.grant.identity().to_string();
                    report.from.clone_from(&leased.gateway.host);
                    report.home.clone_from(&leased.granted.home.host);
                }
                report.retries = self.pull.attempt() - 1;
                report.seconds = self.started.elapsed().as_secs_f64();
                Ok(report)
            }
            Outcome::Failed(why) => Err(Failure {
                kind: attempt.kind,
                why,
            }),
            Outcome::Stuck(why) => {
                // The transfer may write yet: mapped until this process ends.
                std::mem::forget(attempt);
                Err(Failure {
                    kind: Kind::Stuck,
                    why,
                })
            }
        }
    }
}

fn heard(question: &Question, answered: &Answered) -> Option<Event> {
    match (question, &answered.answer) {
        (Question::Confirm(confirm), Answer::Is(yes)) => {
            Some(Event::Confirmed(confirm.number, *yes))
        }
        (Question::Confirm(confirm), Answer::Differs) => Some(Event::Differs(confirm.number)),
        (Question::Confirm(confirm), Answer::Registering) => Some(Event::NotYet(confirm.number)),
        (Question::Renew(renew), Answer::Is(yes)) => Some(Event::Renewed(renew.lease, *yes)),
        _ => None,
    }
}

fn commit(writer: Writer) -> Event {
    // The bytes are there for all streams: the transport's flush was waited for.
    match writer.commit(&[]).and_then(|commit| commit.wait()) {
        Ok(_) => Event::Committed,
        Err(error) => Event::NotCommitted(error.to_string()),
    }
}
