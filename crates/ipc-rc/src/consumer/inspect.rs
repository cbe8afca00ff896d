//! Inspects a session from outside: its blocks and their holders.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::string::FromUtf8Error;
use std::time::{Duration, Instant};

use gpu_api::{BackendKind, DeviceUuid, Error, Result};
use rustix::event::PollFlags;

use crate::consumer::connection::question::{Answer, Key, No, Question};
use crate::consumer::connection::questions::{Interest, Look, Questions};
use crate::producer::report::Stats;
use transport::client::Unsent;
use transport::os::process;
use transport::os::socket::{self, ReceiveOutcome, SendOutcome};
use transport::shared::sealed_file;
use transport::wire::descriptor::SessionId;
use transport::wire::message::{MOST_BYTES, ReportPage, ToParticipant};

/// What a session told of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SessionReport {
    /// The session.
    pub session: SessionId,
    /// The producer's process, as this process sees it where it can.
    pub pid: u32,
    /// The command that it runs, for reading only; `?` if unknown.
    pub command: String,
    /// The vendor.
    pub backend: BackendKind,
    /// The device.
    pub device: DeviceUuid,
    /// Since when it is open.
    pub age: Duration,
    /// Its counts and holders. The pids of holders are as the producer sees them.
    pub stats: Stats,
}

/// Lists the sockets of the sessions of this user that are alive, in the runtime directory: the one
/// that is named, or where sessions put theirs unless told otherwise.
///
/// # Errors
///
/// [`Error::Invalid`] for a directory that others can write, [`Error::System`] when it cannot be
/// read.
pub fn sessions(runtime_dir: Option<&Path>) -> Result<Vec<PathBuf>> {
    let dir = socket::runtime_dir(runtime_dir)?;
    socket::sweep_stale(&dir)?;
    socket::list(&dir)
}

/// Asks a session for its counts and holders, without becoming a participant.
///
/// # Errors
///
/// [`Error::Connect`] when no process listens there, [`Error::Deadline`] when the session does not
/// answer within `timeout` (its process hangs or is stopped), [`Error::Refused`] for a user that
/// may not connect.
///
/// # Examples
///
/// ```
/// # use backend_host::{HostBackend, HostConfig};
/// # use gpu_api::{DeviceId, Gpu};
/// # let dir = tempfile::tempdir()?;
/// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// # use ipc_rc::{Session, inspect};
/// # use std::time::Duration;
/// # let session = Session::builder(gpu).socket(dir.path().join("s")).open()?;
/// # let block = session.alloc(4096)?;
/// // Those in the runtime directory are what `sessions(None)` lists.
/// let report = inspect(session.socket_path(), Some(Duration::from_secs(10)))?;
/// println!("process {} ({}): {} bytes", report.pid, report.command, report.stats.live_bytes);
/// for holder in &report.stats.holders {
///     println!("process {} holds {} bytes since {:?}", holder.pid, holder.bytes, holder.oldest);
/// }
/// assert_eq!((report.session, report.stats.live_bytes), (session.id(), 4096));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn inspect(path: impl AsRef<Path>, timeout: Option<Duration>) -> Result<SessionReport> {
    let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
    let socket = socket::connect_within(path.as_ref(), deadline)?;
    let seen =
        socket::peer_pidfd(socket.as_fd()).and_then(|pidfd| process::pid_of(pidfd.as_fd()).ok());
    let mut asked = Questions::default();
    let mut report = None;
    let mut from = Some(0);
    while let Some(place) = from {
        let question = Interest::new(Key::Report(place), Question::Report);
        let what = "the session's report";
        let Answer::Report(page) = ask(&socket, &mut asked, question, what, deadline)? else {
            break;
        };
        // A session that always names a further page would keep us for ever.
        from = page.next.filter(|&next| next > place);
        let report = report.get_or_insert_with(|| report_of(&page, seen.filter(|&pid| pid != 0)));
        report.stats.holders.extend(page.holders);
    }
    report.ok_or(Error::deadline("the session's report"))
}

fn report_of(page: &ReportPage, seen: Option<u32>) -> SessionReport {
    SessionReport {
        session: page.session,
        pid: seen.unwrap_or(page.pid),
        command: seen.map_or_else(|| "?".into(), process::command_of),
        backend: page.backend,
        device: page.device,
        age: Duration::from_millis(page.age_ms),
        stats: Stats::from_numbers(&page.numbers),
    }
}

/// Asks a session what its source of regions looks like, without becoming a participant: the JSON
/// object that [`RegionSource::snapshot`](allocators::RegionSource::snapshot) made. The session makes
/// it on the thread that answers everybody.
///
/// That it is text of at most 16 MiB which nobody can change any more has been checked, and nothing
/// else: another process wrote it.
///
/// # Errors
///
/// As [`inspect`]; [`Error::Refused`] also when the source has none; [`Error::Invalid`] when what
/// came is not sealed, of another size than was said, or no text.
pub fn snapshot(path: impl AsRef<Path>, timeout: Option<Duration>) -> Result<String> {
    let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
    let socket = socket::connect_within(path.as_ref(), deadline)?;
    let question = Interest::new(Key::Snapshot, Question::Snapshot);
    let (mut asked, what) = (Questions::default(), "the session's snapshot");
    match ask(&socket, &mut asked, question, what, deadline)? {
        Answer::Snapshot {
            len,
            file: Some(file),
        } => text_of(&file, len),
        _ => Err(refused("the snapshot came without its file")),
    }
}

/// Reads a snapshot of which nothing is known but that it is text.
fn text_of(file: &OwnedFd, len: u64) -> Result<String> {
    let bytes = sealed_file::read(file.as_fd(), len..=len)?;
    let end = |e: FromUtf8Error| e.utf8_error().valid_up_to();
    String::from_utf8(bytes).map_err(|e| Error::invalid("a snapshot's good bytes", end(e), "all"))
}

fn refused(why: &str) -> Error {
    Error::refused(why, "look at the producer's log")
}

/// Asks a question by the rules of [`questions`](crate::consumer::connection::questions), and waits
/// for what becomes of it.
fn ask(
    socket: &OwnedFd,
    asked: &mut Questions,
    mut question: Interest,
    what: &'static str,
    deadline: Option<Instant>,
) -> Result<Answer> {
    let mut bytes = [0; MOST_BYTES];
    loop {
        match question.look(asked, Instant::now()) {
            Look::Take(answer) => return Ok(answer),
            Look::Refused(no, _) => return Err(no.into()),
            _ => {}
        }
        asked.send_due(Instant::now(), |message, _| {
            let len = message.encode(&mut bytes);
            match socket::send(socket.as_fd(), &bytes[..len], &[]) {
                // One that has hung up may have said why.
                Ok(SendOutcome::Sent | SendOutcome::HungUp) => Ok(()),
                Ok(SendOutcome::Full) | Err(_) => Err(Unsent),
            }
        });
        let mut fds = Vec::new();
        match socket::receive(socket.as_fd(), &mut bytes, &mut fds) {
            Ok(ReceiveOutcome::Packet(len)) => {
                let (request, said) = match ToParticipant::decode(&bytes[..len], fds.len())? {
                    ToParticipant::Refused { code, why } => {
                        return Err(No { code, why }.into());
                    }
                    ToParticipant::Report { request, page } => (request, Ok(Answer::Report(page))),
                    ToParticipant::Snapshot { request, len } => (
                        request,
                        Ok(Answer::Snapshot {
                            len,
                            file: fds.pop(),
                        }),
                    ),
                    ToParticipant::Declined { request, code, why } => {
                        (request, Err(No { code, why }))
                    }
                    _ => continue,
                };
                if let Some(key) = asked.key_of(request) {
                    asked.hear(request, key, said, Instant::now());
                }
            }
            Ok(ReceiveOutcome::HungUp) => return Err(refused("it closed the connection")),
            Ok(ReceiveOutcome::Empty) => {
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return Err(Error::deadline(what));
                }
                let until = [deadline, asked.next_due()].into_iter().flatten().min();
                let _ = socket::wait_ready(socket.as_fd(), PollFlags::IN, what, until);
            }
            Err(source) => return Err(Error::without_descriptors("recvmsg", source)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;

    use super::*;
    use transport::os::socket::{Endpoint, Listener};
    use transport::wire::message::{RefusalCode, ToProducer};

    /// Long enough for the slowest machine: a wait that takes longer fails the test.
    const WATCHDOG: Option<Duration> = Some(Duration::from_secs(60));

    /// Asks a producer that answers with these packets, and closes the connection behind them.
    fn ask_one_that_says(answers: &[(ToParticipant, Option<BorrowedFd<'_>>)]) -> Result<String> {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = Listener::bind(&Endpoint::Path {
            path: dir.path().join("s"),
            others: false,
        })
        .expect("bind");
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| snapshot(listener.path(), WATCHDOG));
            let socket = loop {
                match listener.accept(|_| {}).expect("accept") {
                    Some(socket) => break socket,
                    None => std::thread::yield_now(),
                }
            };
            let (mut bytes, mut fds) = ([0; MOST_BYTES], Vec::new());
            socket::wait_ready(socket.as_fd(), PollFlags::IN, "the question", None)
                .expect("it asks");
            let Ok(ReceiveOutcome::Packet(len)) =
                socket::receive(socket.as_fd(), &mut bytes, &mut fds)
            else {
                panic!("no question");
            };
            assert_eq!(
                ToProducer::decode(&bytes[..len], 0),
                Ok(ToProducer::TakeSnapshot { request: 1 })
            );
            for (answer, fd) in answers {
                let len = answer.encode(&mut bytes);
                let fds: Vec<_> = fd.iter().copied().collect();
                let sent = socket::send(socket.as_fd(), &bytes[..len], &fds).expect("sent");
                assert_eq!(sent, SendOutcome::Sent);
            }
            drop(socket);
            asking.join().expect("no panic")
        })
    }

    #[test]
    fn a_good_snapshot_arrives_whole_behind_what_nobody_asked_for() {
        let text = "{\"a\":1}".repeat(1000);
        let file = sealed_file::create("text", text.as_bytes()).expect("a memfd");
        let len = text.len() as u64;
        let answers = [
            (ToParticipant::Closing {}, None),
            (
                ToParticipant::Snapshot { request: 2, len },
                Some(file.as_fd()),
            ),
            (
                ToParticipant::Snapshot { request: 1, len },
                Some(file.as_fd()),
            ),
        ];
        assert_eq!(ask_one_that_says(&answers).expect("a snapshot"), text);
    }

    #[test]
    fn a_producer_that_means_harm_gets_an_error_and_no_more() {
        let file = sealed_file::create("text", b"{}").expect("a memfd");
        let no_text = sealed_file::create("text", b"\xff{}").expect("a memfd");
        let open = std::fs::File::open("/dev/zero").expect("a file");
        let cases = [
            (
                ToParticipant::Snapshot { request: 1, len: 3 },
                Some(file.as_fd()),
                "the size of a sealed file",
            ),
            (
                ToParticipant::Snapshot { request: 1, len: 2 },
                Some(open.as_fd()),
                "a file's seals",
            ),
            (
                ToParticipant::Snapshot { request: 1, len: 3 },
                Some(no_text.as_fd()),
                "a snapshot's good bytes is 0",
            ),
            (
                ToParticipant::Snapshot { request: 1, len: 2 },
                None,
                "file descriptors",
            ),
            (
                ToParticipant::Closing {},
                Some(file.as_fd()),
                "file descriptors",
            ),
            (ToParticipant::Closing {}, None, "it closed the connection"),
        ];
        for (answer, fd, expected) in cases {
            let error = ask_one_that_says(&[(answer, fd)])
                .expect_err("harm")
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_refusal_says_why_and_what_to_do() {
        let why = || "the session's source of regions has no snapshot".to_owned();
        let declined = ToParticipant::Declined {
            request: 1,
            code: RefusalCode::Snapshot,
            why: why(),
        };
        let refused = ToParticipant::Refused {
            code: RefusalCode::User,
            why: "uid 7".into(),
        };
        for (answer, parts) in [
            (declined, [why().as_str(), "Arena"]),
            (refused, ["uid 7", "allow_uids"]),
        ] {
            let error = ask_one_that_says(&[(answer, None)])
                .expect_err("a refusal")
                .to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
