//! A visitor of a run: it opens connections to a producer and abandons them, in every way that
//! connects go wrong, and by chance many at a time; and between that it connects as one should, and
//! must be let in.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpu_ipc::backend::thread;
use gpu_ipc::{Error, Gpu, Participant};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown,
    SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{PidfdFlags, Uid, getpid, pidfd_open};

use super::borrower::is_few_files;
use super::message;
use super::seat::Seat;
use super::shared_stats::{Board, Count, Phase};
use gpu_ipc_cli::device::explain;
use harness::rng::Dice;

/// How long an honest connect may take: a producer may be stopped.
const PATIENCE: Duration = Duration::from_secs(4);
/// More connections at once than a session keeps of those that say nothing.
const CROWD: u64 = 300;
/// Connects in a row that wait for no answer.
const RETRIES: u64 = 500;
/// A user that no producer lets in.
const NOBODY: u32 = 65_534;
/// The numbers of a hello and of a refusal, by docs/WIRE.md.
const HELLO: u16 = 1;
const REFUSED: u16 = 130;

/// Says whether this process can pass for another user.
pub fn can_be_nobody() -> bool {
    rustix::process::geteuid().is_root()
}

/// Lives until its producer, or the run, ends.
pub fn run(seat: &Seat) -> Result<(), String> {
    let me = seat.board.member(seat.slot);
    let visitor = Visitor {
        board: seat.board,
        gpu: seat.gpu()?.gpu,
        path: message::session(&seat.dir, seat.producer),
        own: pidfd_open(getpid(), PidfdFlags::empty()).map_err(|e| format!("pidfd_open: {e}"))?,
    };
    let mut dice = Dice::new(seat.seed, seat.serial);
    // Nobody's partner: nothing is lent to it.
    me.producer.store(0, Ordering::Relaxed);
    me.serial.store(seat.serial, Ordering::Release);
    while seat.board.phase() == Phase::Work {
        let beat = || me.beat.fetch_add(1, Ordering::Relaxed);
        beat();
        let there = match dice.below(100) {
            0..20 => visitor.say_nothing(1 + dice.below(32), &mut dice),
            20..22 => visitor.say_nothing(CROWD, &mut dice),
            22..42 => visitor.talk_nonsense(&mut dice),
            42..60 => visitor.abandon(&mut dice),
            60..72 => visitor.shut_half(&mut dice),
            72..74 => visitor.give_up(RETRIES, beat)?,
            74..80 => visitor.pass_for_nobody()?,
            _ => visitor.visit()?,
        };
        if !there {
            return Ok(());
        }
        std::thread::sleep(Duration::from_micros(dice.below(20_000)));
    }
    Ok(())
}

struct Visitor {
    board: &'static Board,
    gpu: Gpu,
    path: PathBuf,
    own: OwnedFd,
}

/// Says whether the producer is still there, for a process that could not connect to it.
fn is_there(path: &Path) -> bool {
    !matches!(dial(path), Err(Errno::CONNREFUSED | Errno::NOENT))
}

/// Says whether the producer is gone, or goes within a time. A socket that takes connections is no
/// proof that it lives, since a forked child keeps it; and a process that dies closes its
/// connections before it is dead.
fn goes(path: &Path, within: Duration) -> bool {
    let socket = match dial(path) {
        Ok(socket) => socket,
        Err(error) => return matches!(error, Errno::CONNREFUSED | Errno::NOENT),
    };
    let Ok(listener) = rustix::net::sockopt::socket_peercred(&socket) else {
        return false;
    };
    match pidfd_open(listener.pid, PidfdFlags::empty()) {
        Ok(listener) => {
            let within = rustix::event::Timespec {
                tv_sec: within.as_secs() as i64,
                tv_nsec: 0,
            };
            let mut fds = [rustix::event::PollFd::new(
                &listener,
                rustix::event::PollFlags::IN,
            )];
            rustix::event::poll(&mut fds, Some(&within)) == Ok(1)
        }
        Err(error) => error == Errno::SRCH,
    }
}

/// Connects, and says nothing; fails with `AGAIN` when too many wait already.
fn dial(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Sends bytes with descriptors; a peer that hung up has not heard them.
fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fits = fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds));
    debug_assert!(fits, "at most eight descriptors");
    let _ = rustix::net::sendmsg(
        socket,
        &[std::io::IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    );
}

impl Visitor {
    fn hello(&self) -> Vec<u8> {
        let mut packet = b"GI\x02\x00".to_vec();
        packet.extend(HELLO.to_le_bytes());
        // One descriptor, and no request.
        packet.extend(1u16.to_le_bytes());
        packet.extend([0; 8]);
        packet.extend([self.gpu.kind() as u8, 0]);
        // No descendants, no name.
        packet.extend([0; 6]);
        packet.extend(self.gpu.uuid().0);
        packet.extend([0; 2]);
        packet
    }

    /// Connects; whether the producer is there is looked at where it cannot.
    fn dial(&self) -> Result<Option<OwnedFd>, Errno> {
        match dial(&self.path) {
            Ok(socket) => Ok(Some(socket)),
            Err(Errno::CONNREFUSED | Errno::NOENT) => Err(Errno::CONNREFUSED),
            // Its backlog is full, or this process has no descriptor left.
            Err(_) => Ok(None),
        }
    }

    /// Opens connections that say nothing, and closes them after a while.
    fn say_nothing(&self, many: u64, dice: &mut Dice) -> bool {
        let mut silent = Vec::new();
        for _ in 0..many {
            match self.dial() {
                Ok(socket) => silent.extend(socket),
                Err(_) => return false,
            }
        }
        self.board.add(Count::Silent, silent.len() as u64);
        std::thread::sleep(Duration::from_millis(dice.below(50)));
        true
    }

    /// Says half a hello, or anything at all, with descriptors that nobody asked for.
    fn talk_nonsense(&self, dice: &mut Dice) -> bool {
        let Ok(socket) = self.dial() else {
            return false;
        };
        let Some(socket) = socket else { return true };
        let mut bytes = self.hello();
        match dice.below(3) {
            0 => bytes.truncate(dice.below(bytes.len() as u64) as usize),
            1 => bytes.iter_mut().for_each(|byte| *byte = dice.throw() as u8),
            _ => {
                let place = dice.below(bytes.len() as u64) as usize;
                bytes[place] ^= 1 << dice.below(8);
            }
        }
        let pipe = rustix::pipe::pipe();
        let mut fds = vec![self.own.as_fd(); dice.below(6) as usize];
        if let Ok((reader, _)) = &pipe {
            fds.push(reader.as_fd());
        }
        for _ in 0..=dice.below(3) {
            send(&socket, &bytes, &fds);
        }
        self.board.count(Count::Nonsense);
        true
    }

    /// Says hello and hangs up, or waits for the welcome first.
    fn abandon(&self, dice: &mut Dice) -> bool {
        let Ok(socket) = self.dial() else {
            return false;
        };
        let Some(socket) = socket else { return true };
        send(&socket, &self.hello(), &[self.own.as_fd()]);
        if dice.in_thousand(500) {
            std::thread::sleep(Duration::from_micros(dice.below(2000)));
        }
        self.board.count(Count::Abandoned);
        true
    }

    /// Shuts its end for writing, before its hello or after it, and stays a while.
    fn shut_half(&self, dice: &mut Dice) -> bool {
        let Ok(socket) = self.dial() else {
            return false;
        };
        let Some(socket) = socket else { return true };
        if dice.in_thousand(700) {
            send(&socket, &self.hello(), &[self.own.as_fd()]);
        }
        let _ = rustix::net::shutdown(&socket, Shutdown::Write);
        std::thread::sleep(Duration::from_millis(dice.below(30)));
        self.board.count(Count::HalfClosed);
        true
    }

    /// Connects again and again by the library, and waits for no answer.
    fn give_up<T>(&self, times: u64, beat: impl Fn() -> T) -> Result<bool, String> {
        for _ in 0..times {
            beat();
            if self.board.phase() != Phase::Work {
                break;
            }
            match Participant::builder(self.gpu.clone())
                .timeout(Some(Duration::ZERO))
                .connect(&self.path)
            {
                // It answered before it was asked for.
                Ok(participant) => drop(participant),
                Err(Error::Deadline { .. }) => self.board.count(Count::GaveUp),
                Err(error) => return self.is_lawful(error),
            }
        }
        Ok(true)
    }

    /// Connects as a user that the session does not let in, and must be refused.
    fn pass_for_nobody(&self) -> Result<bool, String> {
        if !can_be_nobody() {
            return Ok(true);
        }
        // That user may not enter the directory: the socket itself is what is connected to.
        let Ok(socket) =
            rustix::fs::open(&self.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        else {
            return Ok(is_there(&self.path));
        };
        let link = PathBuf::from(format!("/proc/self/fd/{}", socket.as_raw_fd()));
        // A thread's user is its own.
        let dialled = thread::start("gpu-ipc-nobody", move || {
            rustix::thread::set_thread_res_uid(None, Uid::from_raw(NOBODY), None)?;
            dial(&link)
        });
        let dialled = dialled
            .map_err(|e| explain(&e))?
            .join()
            .map_err(|_| "a thread panicked".to_owned())?;
        let Ok(connection) = dialled else {
            return Ok(is_there(&self.path));
        };
        send(&connection, &self.hello(), &[self.own.as_fd()]);
        let mut bytes = [0; 512];
        let deadline = rustix::event::Timespec {
            tv_sec: PATIENCE.as_secs() as i64,
            tv_nsec: 0,
        };
        let mut fds = [rustix::event::PollFd::new(
            &connection,
            rustix::event::PollFlags::IN,
        )];
        let _ = rustix::event::poll(&mut fds, Some(&deadline));
        match rustix::net::recv(&connection, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((len, _)) if len >= 6 => {
                let number = u16::from_le_bytes([bytes[4], bytes[5]]);
                if number != REFUSED {
                    return Err(format!(
                        "user {NOBODY} heard message {number}, and no refusal"
                    ));
                }
                self.board.count(Count::Strangers);
                Ok(true)
            }
            // It died, or is stopped.
            _ => Ok(is_there(&self.path)),
        }
    }

    /// Connects as one should, and leaves.
    fn visit(&self) -> Result<bool, String> {
        match Participant::builder(self.gpu.clone())
            .timeout(Some(PATIENCE))
            .connect(&self.path)
        {
            Ok(participant) => {
                drop(participant);
                self.board.count(Count::Visits);
                Ok(true)
            }
            // Stopped.
            Err(Error::Deadline { .. }) => Ok(true),
            Err(error) => self.is_lawful(error),
        }
    }

    /// Says whether the producer is there, after an error that a connect may end with; any other is
    /// a finding.
    fn is_lawful(&self, error: Error) -> Result<bool, String> {
        match error {
            Error::Connect { .. } | Error::Other(_) => Ok(is_there(&self.path)),
            // A session that ends, or that is killed, closes who comes late.
            Error::Refused { .. }
                if fs::metadata(&self.path).is_err() || goes(&self.path, PATIENCE) =>
            {
                Ok(false)
            }
            // Too many are on their way to a producer that is stopped.
            error if is_few_files(&error) => {
                self.board.count(Count::FewFiles);
                Ok(true)
            }
            error => Err(explain(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use gpu_ipc::Session;
    use gpu_ipc::backend::DeviceId;
    use gpu_ipc::host::{HostBackend, HostConfig};

    use super::*;

    #[test]
    fn every_kind_of_visit_is_counted_and_leaves_no_row() {
        let dir = tempfile::tempdir().expect("a directory");
        let board = Board::open(&dir.path().join("board")).expect("a board");
        let host = HostBackend::new(HostConfig::default()).expect("it opens");
        let gpu = Gpu::new(host, DeviceId(0)).expect("there is a device");
        let path = dir.path().join("s");
        let builder = Session::builder(gpu.clone())
            .socket(&path)
            .quarantine(Duration::ZERO)
            .allow_uids([NOBODY - 1]);
        let session = builder.open().expect("a session");
        let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("a pidfd");
        let visitor = Visitor {
            board,
            gpu,
            path,
            own,
        };
        let mut dice = Dice::new(1, 1);
        let mut counts = vec![
            Count::Silent,
            Count::Nonsense,
            Count::Abandoned,
            Count::HalfClosed,
            Count::Visits,
        ];
        assert!(visitor.say_nothing(CROWD, &mut dice));
        assert!((0..9).all(|_| visitor.talk_nonsense(&mut dice)));
        assert!((0..9).all(|_| visitor.abandon(&mut dice)));
        assert!((0..9).all(|_| visitor.shut_half(&mut dice)));
        assert_eq!(visitor.visit(), Ok(true));
        assert_eq!(visitor.give_up(20, || ()), Ok(true));
        if can_be_nobody() {
            // A queue of connections that is full is no refusal: the next try may find room.
            let begun = std::time::Instant::now();
            while board.counted(Count::Strangers) == 0 && begun.elapsed() < PATIENCE {
                assert_eq!(visitor.pass_for_nobody(), Ok(true));
            }
            counts.push(Count::Strangers);
        }
        let missing: Vec<Count> = counts
            .into_iter()
            .filter(|&what| board.counted(what) == 0)
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
        while session.stats().participants > 0 {
            std::thread::yield_now();
        }
        assert!(session.shutdown(PATIENCE).clean);
        assert_eq!(visitor.visit(), Ok(false));
    }

    #[test]
    fn a_dead_producer_is_gone_although_a_child_keeps_its_socket() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("s");
        let kept = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let kept = kept.expect("a socket");
        rustix::net::bind(&kept, &SocketAddrUnix::new(&path).expect("it is short"))
            .expect("it is free");
        let listener = kept.try_clone().expect("a descriptor");
        let mut producer = Command::new("cat");
        // SAFETY: `pre_exec` asks for async-signal-safe calls: `listen` is one.
        unsafe { producer.pre_exec(move || Ok(rustix::net::listen(&listener, 16)?)) };
        let mut producer = harness::Lines::start(&mut producer);
        assert!(!goes(&path, Duration::ZERO), "it lives");
        producer.signal(rustix::process::Signal::KILL);
        // A zombie is dead, too.
        assert!(goes(&path, PATIENCE), "it is dead");
        producer.wait();
        assert!(is_there(&path), "its socket takes connections");
        assert!(goes(&path, Duration::ZERO), "it is gone");
    }
}
