//! Pulls for other processes of this host: a child of the gateway, which has its connection to the
//! broker, its network and its agent open before anybody asks.
//!
//! ```text
//! gpu-ipc pull ──one line of JSON──► socket `pulls` in the broker's directory
//!              ◄──a line for each object, and for progress── the child: some pulls at a time
//! ```
//!
//! | what fails | what happens |
//! |---|---|
//! | a transfer neither ends nor fails | the child says so of its object and kills itself: its memory may be written to. The gateway starts another, and whoever asked asks it for the objects that are left |
//! | the child dies | the same |
//! | the gateway dies | the child dies with it |
//! | whoever asked goes away | what is being pulled is pulled to its end, and no more is begun |
//! | a request makes no sense, or is too long | one line says why |
//!
//! The socket is for the gateway's user alone: the directory lets nobody else in, and the user of
//! each connection is compared.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use gpu_ipc::broker::Readers;
use serde::{Deserialize, Serialize};

use super::args::RunOptions;
use super::objects::each;
use super::state;
use crate::error::{Error, Result};
use crate::local::Local;
use crate::message::Listed;
use crate::net::key::Gateway;
use crate::net::live::Live;
use crate::net::session::Session;
use crate::replica::driver::Fetch;
use crate::replica::report::{Failure, Kind, Report};
use crate::replica::sources::Order;
use crate::replica::{Patience, Rules};
use crate::transport::Transport;
use crate::transport::choice::{Land, Way};

/// The socket's name.
const SOCKET: &str = "pulls";
/// Bytes of a request: some hundred names.
const MOST_REQUEST: u64 = 256 << 10;
/// Pulls of one request at a time: a gateway serves so many of one host.
const AT_A_TIME: usize = 8;
/// Requests at a time.
const MOST_REQUESTS: usize = 64;
/// How often a name that is followed is looked for.
const FOLLOW: Duration = Duration::from_millis(500);
/// Between two children, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// A child that has lived so long was well.
const WELL: Duration = Duration::from_secs(10);
/// How long the socket may be away, while another child starts.
const AWAY: Duration = Duration::from_secs(30);
/// Children that one request may outlive.
const MOST_CHILDREN: usize = 5;

/// What is asked for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Names.
    pub names: Vec<String>,
    /// Names with `*` for any text: all that any host has.
    pub patterns: Vec<String>,
    /// Groups: all members, then the roll.
    pub groups: Vec<String>,
    /// As [`Order`] has them.
    pub from: Option<String>,
    /// The epoch of each.
    pub epoch: Option<u64>,
    /// The way to take.
    pub way: Option<Way>,
    /// Where the bytes of a ring land.
    pub land: Option<Land>,
    /// Whether everybody of this host may open them, and else which users besides its own.
    pub everybody: bool,
    /// See there.
    pub uids: Vec<u32>,
    /// As [`Patience`] has them, in seconds.
    pub attempts: u32,
    /// While all are busy.
    pub wait_s: u64,
    /// Without a byte.
    pub stall_s: u64,
    /// Until an answer.
    pub answer_s: u64,
    /// Whether the names are kept current until whoever asked goes away.
    pub follow: bool,
}

/// A line of the answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// So many objects were found by patterns and groups.
    Found(Vec<String>),
    /// Bytes of an object that have arrived, and all of them.
    Progress(String, u64, u64),
    /// It is here.
    Done(Box<Report>),
    /// It is not.
    Failed(String, Failure),
    /// That was all.
    End,
}

/// Keeps a child that pulls, until the gateway ends.
///
/// # Errors
///
/// [`Error::Unavailable`] without a thread.
pub fn keep() -> Result<()> {
    let watch = || {
        let mut pause = PAUSES.0;
        loop {
            let begun = Instant::now();
            match start() {
                Ok(mut child) => {
                    let ended = child.wait();
                    tracing::warn!(
                        ?ended,
                        "the process that pulls has ended; another is started"
                    );
                }
                Err(error) => tracing::warn!(%error, "no process that pulls"),
            }
            pause = if begun.elapsed() >= WELL {
                PAUSES.0
            } else {
                (pause * 2).min(PAUSES.1)
            };
            std::thread::sleep(pause);
        }
    };
    match thread::start("gateway-pulls", watch) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::Unavailable {
            what: "a thread".into(),
            why: error.to_string(),
            remedy: "raise RLIMIT_NPROC",
        }),
    }
}

/// Starts this program again with the same arguments, to pull.
fn start() -> std::io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg("pulls").args(std::env::args_os().skip(2));
    command.env(PARENT, std::process::id().to_string());
    command.spawn()
}

/// Names the process that this one ends with: a gateway to the child that pulls, and a keeper to its
/// gateway.
const PARENT: &str = "GPU_IPC_GATEWAY_PARENT";

/// Ends with the process that [`PARENT`] names, also when that is killed. What dies before this is
/// asked is found by its number.
pub fn end_with_the_parent() {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};

    let Some(parent) = std::env::var(PARENT)
        .ok()
        .and_then(|pid| pid.parse::<i32>().ok())
    else {
        return;
    };
    let told = set_parent_process_death_signal(Some(Signal::KILL));
    let is_there = getppid().is_some_and(|pid| pid.as_raw_nonzero().get() == parent);
    if told.is_err() || !is_there {
        std::process::exit(1);
    }
}

/// What all pulls of the child have.
struct Means {
    local: Local,
    session: Session,
    live: Arc<Live>,
    transport: Arc<dyn Transport>,
    options: RunOptions,
    dir: PathBuf,
}

/// The child: pulls what it is asked for, until the gateway ends.
///
/// # Errors
///
/// What keeps it from pulling.
pub fn run(options: &RunOptions) -> Result<()> {
    end_with_the_parent();
    let mut net = options.net.clone();
    // Its own gateway knows the others.
    net.peers.insert(0, options.listen);
    let (network, dir) = (net.network(None)?, options.place.dir()?);
    let local = Local::connect(
        &options.place.host(),
        options.place.broker.as_deref(),
        options.place.device.as_deref(),
    )?;
    let transport = net.carrier(network.own_address(), true, local.place())?;
    let session = network.open()?;
    let means = Arc::new(Means {
        live: Arc::new(Live::listen(&session)?),
        local,
        session,
        transport,
        options: options.clone(),
        dir,
    });
    let listener = listen(&means.dir)?;
    let requests = Arc::<AtomicUsize>::default();
    for stream in listener.incoming().flatten() {
        if requests.fetch_add(1, Ordering::AcqRel) >= MOST_REQUESTS {
            requests.fetch_sub(1, Ordering::AcqRel);
            let why = format!("{MOST_REQUESTS} requests are being answered; ask again");
            refuse(&stream, Kind::Busy, why);
            continue;
        }
        let (means, counted) = (Arc::clone(&means), Arc::clone(&requests));
        let answer = move || {
            answer(&means, &stream);
            counted.fetch_sub(1, Ordering::AcqRel);
        };
        if let Err(error) = thread::start("gateway-answers", answer) {
            requests.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%error, "a request has no thread");
        }
    }
    Ok(())
}

/// Listens in the place of a child that was there before.
fn listen(dir: &Path) -> Result<UnixListener> {
    let beside = dir.join(format!("{SOCKET}.{}", std::process::id()));
    let _ = std::fs::remove_file(&beside);
    let listener = UnixListener::bind(&beside)
        .and_then(|listener| std::fs::rename(&beside, dir.join(SOCKET)).map(|()| listener));
    listener.map_err(|error| Error::Unavailable {
        what: dir.join(SOCKET).display().to_string(),
        why: error.to_string(),
        remedy: "start the broker first, and the gateway as the same user",
    })
}

fn refuse(stream: &UnixStream, kind: Kind, why: String) {
    let line = Said::Failed(String::new(), Failure { kind, why });
    let _ = say(&mut &*stream, &line);
}

fn say(mut to: impl Write, said: &Said) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(said).expect("texts and numbers have a JSON");
    line.push(b'\n');
    to.write_all(&line)
}

/// Answers one request.
fn answer(means: &Means, stream: &UnixStream) {
    let own = rustix::process::getuid();
    match rustix::net::sockopt::socket_peercred(stream) {
        Ok(peer) if peer.uid == own => {}
        _ => {
            let why = format!("this gateway pulls for uid {} alone", own.as_raw());
            return refuse(stream, Kind::Refused, why);
        }
    }
    let mut line = Vec::new();
    let read = BufReader::new(stream.take(MOST_REQUEST)).read_until(b'\n', &mut line);
    let request: Request = match read.map(|_| serde_json::from_slice(&line)) {
        Ok(Ok(request)) => request,
        Ok(Err(error)) => return refuse(stream, Kind::Failed, format!("a request: {error}")),
        Err(_) => return,
    };
    let names = match names(means, &request) {
        Ok(names) => names,
        Err(why) => {
            return refuse(stream, Kind::Unreached, why);
        }
    };
    if say(stream, &Said::Found(names.clone())).is_err() {
        return;
    }
    loop {
        if !pull_all(means, &request, &names, stream) {
            return;
        }
        if !request.follow {
            let _ = say(stream, &Said::End);
            return;
        }
        std::thread::sleep(FOLLOW);
        // Finds that whoever asked has gone.
        if say(stream, &Said::Progress(String::new(), 0, 0)).is_err() {
            return;
        }
    }
}

/// Pulls all names, some at a time. Says whether whoever asked is there yet.
fn pull_all(means: &Means, request: &Request, names: &[String], stream: &UnixStream) -> bool {
    let left = Mutex::new(names.iter().collect::<VecDeque<_>>());
    let (to, is_there) = (Mutex::new(stream), AtomicBool::new(true));
    let tell = |said: &Said| {
        let to = to.lock().unwrap_or_else(PoisonError::into_inner);
        if say(*to, said).is_err() {
            is_there.store(false, Ordering::Relaxed);
        }
    };
    let work = || {
        while is_there.load(Ordering::Relaxed) {
            let next = left
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop_front();
            let Some(name) = next else { return };
            pull_one(means, request, name, &tell);
        }
    };
    std::thread::scope(|scope| {
        // This thread is one of them.
        for _ in 1..names.len().min(AT_A_TIME) {
            if let Err(error) = thread::start_scoped(scope, "gateway-pulls", work) {
                tracing::warn!(%error, "fewer pulls at a time");
            }
        }
        work();
    });
    is_there.load(Ordering::Relaxed)
}

fn pull_one(means: &Means, request: &Request, name: &str, tell: &(impl Fn(&Said) + Sync)) {
    let readers = match (&request.uids[..], request.everybody) {
        (_, true) => Readers::Everybody,
        ([], false) => Readers::Owner,
        (uids, false) => Readers::Uids(uids.to_vec()),
    };
    let seconds = Duration::from_secs;
    let fetch = Fetch {
        local: &means.local,
        session: &means.session,
        live: Arc::clone(&means.live),
        transport: Arc::clone(&means.transport),
        patience: Patience {
            attempts: request.attempts,
            stall: seconds(request.stall_s),
            answer: seconds(request.answer_s),
            busy: seconds(request.wait_s),
            ..Patience::default()
        },
        pace: means.options.net.pace(),
        way: request.way,
        land: request.land,
        readers,
        rules: Rules::default(),
    };
    let order = Order {
        name: name.to_owned(),
        epoch: request.epoch,
        from: request.from.clone(),
    };
    let mut told = Instant::now();
    let ended = fetch.run(&order, |bytes, all| {
        if told.elapsed() >= Duration::from_millis(100) {
            told = Instant::now();
            tell(&Said::Progress(name.to_owned(), bytes, all));
        }
    });
    match ended {
        // A name that is followed is told of when it has changed.
        Ok(report) if request.follow && report.was_here => {}
        Ok(report) => {
            note(&report, &means.dir);
            tell(&Said::Done(Box::new(report)));
        }
        Err(failure) => {
            let is_stuck = failure.kind == Kind::Stuck;
            tell(&Said::Failed(name.to_owned(), failure));
            if is_stuck {
                // Threads may be writing, and no destructor may unmap what they write to.
                die();
            }
        }
    }
}

/// Ends this process without a word to anybody: threads may be writing, and no destructor may unmap
/// what they write to.
pub fn die() {
    use rustix::process::{Signal, getpid, kill_process};

    kill_process(getpid(), Signal::KILL).ok();
}

/// Notes what a pull found of a path, for `status`.
pub fn note(report: &Report, dir: &Path) {
    let Some(way) = report.way else { return };
    let Report {
        from,
        transport,
        gb_s,
        bytes,
        ways,
        ..
    } = report.clone();
    state::Path {
        from,
        transport,
        way,
        gb_s,
        bytes,
        ways,
    }
    .write(dir);
}

/// Finds the names that are meant.
fn names(means: &Means, request: &Request) -> Result<Vec<String>, String> {
    let mut names = request.names.clone();
    let groups = request.groups.iter().map(|group| format!("{group}/*"));
    let patterns: Vec<String> = request.patterns.iter().cloned().chain(groups).collect();
    if !patterns.is_empty() {
        let mut found = std::collections::BTreeSet::new();
        let take = |_: &Gateway, listed: &Listed| {
            if patterns.iter().any(|pattern| fits(pattern, &listed.name)) {
                found.insert(listed.name.clone());
            }
        };
        let from = request.from.as_deref();
        let silent = each(&means.session, &means.live, from, take);
        let silent = silent.ok_or("no gateway was reached")?;
        if !silent.is_empty() {
            let silent: Vec<String> = silent.into_iter().collect();
            return Err(format!(
                "the gateways of {} did not answer",
                silent.join(", ")
            ));
        }
        names.extend(found);
    }
    // A roll says that all its members are there.
    names.extend(request.groups.iter().cloned());
    Ok(names)
}

/// Says whether a name fits a pattern, whose `*` stands for any text.
fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else {
        return rest.is_empty();
    };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Asks the gateway of a broker's directory to pull; nothing if none runs there that does.
///
/// # Errors
///
/// [`Error::Unavailable`] when its child died too often, or does not come back.
pub fn ask(dir: &Path, request: &Request, mut hear: impl FnMut(Said)) -> Option<Result<()>> {
    let socket = dir.join(SOCKET);
    let mut stream = UnixStream::connect(&socket).ok()?;
    let mut left = request.clone();
    let mut known = false;
    for _ in 0..MOST_CHILDREN {
        let sent = serde_json::to_vec(&left).expect("texts and numbers have a JSON");
        let sent = [&sent[..], b"\n"].concat();
        if stream.write_all(&sent).is_ok() {
            for line in BufReader::new(&stream)
                .lines()
                .map_while(std::io::Result::ok)
            {
                let Ok(said) = serde_json::from_str::<Said>(&line) else {
                    continue;
                };
                match &said {
                    Said::End => return Some(Ok(())),
                    Said::Found(names) if !known => {
                        known = true;
                        (left.names, left.patterns, left.groups) =
                            (names.clone(), Vec::new(), Vec::new());
                    }
                    Said::Done(report) => left.names.retain(|name| *name != report.name),
                    // The whole request was refused.
                    Said::Failed(name, _) if name.is_empty() => {
                        hear(said);
                        return Some(Ok(()));
                    }
                    Said::Failed(name, _) => left.names.retain(|other| other != name),
                    Said::Found(_) | Said::Progress(..) => {}
                }
                hear(said);
            }
        }
        if known && left.names.is_empty() && !left.follow {
            return Some(Ok(()));
        }
        // Its process died; what it has not said is asked for again.
        match again(&socket) {
            Some(other) => stream = other,
            None => break,
        }
    }
    Some(Err(Error::Unavailable {
        what: "the gateway's process that pulls".into(),
        why: format!("it ended with {} objects left", left.names.len()),
        remedy: "see the gateway's log",
    }))
}

/// Connects to the next child.
fn again(socket: &Path) -> Option<UnixStream> {
    let until = Instant::now() + AWAY;
    while Instant::now() < until {
        if let Ok(stream) = UnixStream::connect(socket) {
            return Some(stream);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, name, does) in [
            ("model", "model", true),
            ("model", "models", false),
            ("model/*", "model/0", true),
            ("model/*", "model", false),
            ("*", "", true),
            ("*/w*t", "layers/weight", true),
            ("*/w*t", "layers/weights", false),
            ("a*b*b", "ab", false),
            ("a*b*b", "abb", true),
        ] {
            assert_eq!(fits(pattern, name), does, "{pattern} {name}");
        }
    }

    #[test]
    fn a_request_survives_its_line() {
        let request = Request {
            names: vec!["a\nb".into()],
            way: Some(Way::PinnedRing),
            ..Request::default()
        };
        let line = serde_json::to_string(&request).expect("a JSON");
        assert!(!line.contains('\n'));
        let read: Request = serde_json::from_str(&line).expect("its own line");
        assert_eq!((read.names, read.way), (request.names, request.way));
        serde_json::from_str::<Request>("{}").expect_err("no request");
    }
}
