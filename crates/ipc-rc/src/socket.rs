//! The control socket: whole packets with file descriptors, between processes of one host.
//!
//! 1. `directory`: where sockets lie by default, and the removal of those whose owner died.
//! 2. `listener`: a producer's end. Its name appears only once it listens.
//! 3. Here: a participant's end, and sending and receiving on either.
//!
//! Nothing here blocks. Whoever has to wait polls the descriptor.

mod directory;
mod listener;
#[cfg(test)]
mod scratch;

pub(crate) use directory::{list, runtime_dir, sweep_stale};
pub(crate) use listener::{Listener, Place};

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};

use gpu_api::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};

use crate::message::MOST_BYTES;

/// The most descriptors that the kernel passes with one packet (`SCM_MAX_FD`).
const MOST_FDS: usize = 253;

/// The longest path of a socket: `sun_path` without the final zero.
const MOST_PATH: usize = 107;

/// What became of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum SendOutcome {
    /// It is on its way, whole.
    Sent,
    /// There is no room; nothing was sent. Poll for writing and send it again.
    Full,
    /// Nobody will ever read it.
    HungUp,
}

/// What there was to receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum ReceiveOutcome {
    /// A packet of so many bytes.
    Packet(usize),
    /// Nothing yet. Poll for reading.
    Empty,
    /// The other end is closed in every process that had it, and all its packets are read.
    HungUp,
}

/// Connects to a producer's socket.
///
/// # Errors
///
/// [`Error::Connect`] when nobody answers at that path; [`is_backlog_full`] tells the one case in which the same call
/// can succeed a moment later. [`Error::Invalid`] for a path that is too long, [`Error::System`] when no file
/// descriptor is left.
fn connect(path: &Path) -> Result<OwnedFd> {
    let address = address_of(path)?;
    let socket = new_socket()?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(socket),
        Err(e) => Err(connect_error(path, e)),
    }
}

/// Says whether a `connect` failed only because more participants came at once than the producer had taken in.
fn is_backlog_full(error: &Error) -> bool {
    matches!(error, Error::Connect { source: Some(e), .. } if Errno::from_io_error(e) == Some(Errno::AGAIN))
}

/// Connects, trying again while the producer's backlog is full.
///
/// # Errors
///
/// As [`connect`].
pub(crate) fn connect_within(path: &Path, deadline: Option<Instant>) -> Result<OwnedFd> {
    loop {
        match connect(path) {
            Err(error) if is_backlog_full(&error) && deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                // A full backlog wakes nobody when it empties.
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done,
        }
    }
}

/// Sends one packet with file descriptors; the receiver gets copies of them.
///
/// # Errors
///
/// What the kernel says when it is neither full nor hung up: too many descriptors in flight, no memory.
pub(crate) fn send(fd: impl AsFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<SendOutcome> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && (fds.len() > MOST_FDS || !control.push(SendAncillaryMessage::ScmRights(fds))) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "more than 253 file descriptors in one packet"));
    }
    loop {
        match sendmsg(&fd, &[IoSlice::new(packet)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(SendOutcome::Sent),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(SendOutcome::Full),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => return Ok(SendOutcome::HungUp),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Receives one packet; its file descriptors are appended to `fds`, closed at exec.
///
/// # Errors
///
/// `InvalidData` for a packet that is empty or longer than any message, `EMFILE` when this process had no room for
/// the descriptors that came: the packet is lost then, and whatever came with it is closed.
pub(crate) fn receive(
    fd: impl AsFd,
    packet: &mut [u8; MOST_BYTES],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<ReceiveOutcome> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut parts = [IoSliceMut::new(packet)];
        match recvmsg(&fd, &mut parts, &mut control, RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => break got,
            // The other end closed while packets of ours were unread. That is told once, before the packets that it
            // sent; a refusal may be among them.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => return Ok(ReceiveOutcome::Empty),
            Err(e) => return Err(e.into()),
        }
    };
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // The room here is for as many as the kernel passes, so what was cut off found no free descriptor.
        return Err(Errno::MFILE.into());
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet longer than any message"));
    }
    if got.bytes == 0 {
        // An empty packet reads like the end; only the kernel's own word counts, because a death is proved with it.
        return if has_hung_up(&fd) {
            Ok(ReceiveOutcome::HungUp)
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, "an empty packet"))
        };
    }
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            fds.extend(came);
        }
    }
    Ok(ReceiveOutcome::Packet(got.bytes))
}

/// Says whether the other end is closed in every process that had it. Packets of it may still be unread.
pub(crate) fn has_hung_up(fd: impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        let mut fds = [PollFd::new(&fd, PollFlags::empty())];
        match poll(&mut fds, Some(&now)) {
            Ok(_) => return fds[0].revents().contains(PollFlags::HUP),
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Waits until a socket can be read or written, or its other end is closed.
///
/// # Errors
///
/// [`Error::Deadline`] naming `what`.
pub(crate) fn wait_ready(
    socket: BorrowedFd<'_>,
    flags: PollFlags,
    what: &'static str,
    deadline: Option<Instant>,
) -> Result<()> {
    let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
    if left == Some(Duration::ZERO) {
        return Err(Error::Deadline { what });
    }
    let timeout = left.map(|t| Timespec { tv_sec: t.as_secs().min(3600) as i64, tv_nsec: i64::from(t.subsec_nanos()) });
    match poll(&mut [PollFd::new(&socket, flags)], timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(system_error("poll", e)),
    }
}

/// Returns the user whose process called `connect`.
pub(crate) fn peer_uid(fd: impl AsFd) -> io::Result<u32> {
    // rustix reads the same option into a pid that must not be 0, which it is for a peer in a hidden namespace.
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `getsockopt` asks for
    // - `len` writable bytes: `peer` lives on this frame and is as long as `len` says;
    // - a place for the length: `len` lives there too.
    // Any bytes are a good `ucred`.
    let answer = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    if answer == 0 { Ok(peer.uid) } else { Err(io::Error::last_os_error()) }
}

/// Returns a pidfd of the process that called `connect`; `None` before Linux 6.5 and for a process that is gone.
///
/// It names the wrong process for a connection that was passed on or inherited, so it serves only for a peer that
/// never said hello.
pub(crate) fn peer_pidfd(fd: impl AsFd) -> Option<OwnedFd> {
    let mut pidfd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: as in `peer_uid`, with an integer.
    let answer = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut pidfd).cast(),
            &raw mut len,
        )
    };
    if answer != 0 || pidfd < 0 {
        return None;
    }
    // SAFETY: `OwnedFd::from_raw_fd` asks for an open descriptor that nobody else owns: the kernel has just made it
    // for this call.
    Some(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// Makes a socket that came from elsewhere fit for use here: it must be a Unix socket of whole packets, and does not
/// block afterwards.
///
/// # Errors
///
/// [`Error::Invalid`] for any other descriptor.
pub(crate) fn take_over(socket: &OwnedFd) -> Result<()> {
    let domain = rustix::net::sockopt::socket_domain(socket);
    let kind = rustix::net::sockopt::socket_type(socket);
    if (domain, kind) != (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) {
        return Err(Error::Invalid {
            what: "the connection",
            got: format!("descriptor {}, which is something else", socket.as_raw_fd()),
            must: "a Unix socket of type SOCK_SEQPACKET",
        });
    }
    rustix::io::ioctl_fionbio(socket, true).map_err(|e| system_error("making a socket not block", e))?;
    rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::CLOEXEC).map_err(|e| system_error("fcntl", e))
}

fn new_socket() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
        .map_err(|e| system_error("socket", e))
}

fn address_of(path: &Path) -> Result<SocketAddrUnix> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > MOST_PATH || bytes.contains(&0) {
        return Err(Error::Invalid {
            what: "socket path",
            got: format!("{} ({} bytes)", path.display(), bytes.len()),
            must: "1 to 107 bytes without a zero: that is what a socket address holds",
        });
    }
    SocketAddrUnix::new(path).map_err(|e| system_error("making a socket address", e))
}

fn connect_error(path: &Path, e: Errno) -> Error {
    let is_socket = || std::fs::metadata(path).is_ok_and(|m| m.file_type().is_socket());
    let (why, remedy) = match e {
        Errno::NOENT => ("there is no such socket", "start the producer, or correct the path"),
        Errno::CONNREFUSED if is_socket() => ("nobody listens there any more", "start the producer again"),
        Errno::CONNREFUSED => ("it is not a socket", "give the path of a session's socket"),
        Errno::ACCESS | Errno::PERM => {
            ("this user may not", "name the user in `allow_uids`, and let it enter the socket's directory")
        }
        Errno::AGAIN => ("too many participants connect at this moment", "connect again"),
        Errno::PROTOTYPE => ("another kind of socket listens there", "give the path of a session's socket"),
        _ => ("the system refused", "correct the path"),
    };
    Error::Connect { path: path.display().to_string(), why: why.into(), remedy, source: Some(e.into()) }
}

/// Makes the error of a call that works on a socket or on its directory.
fn system_error(call: &'static str, e: Errno) -> Error {
    let remedy = match e {
        Errno::MFILE | Errno::NFILE => "raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files",
        Errno::NOSPC | Errno::DQUOT => "free space in the socket's directory, or choose another",
        Errno::ACCESS | Errno::PERM | Errno::ROFS => "let this user write in the socket's directory, or choose another",
        Errno::NOENT | Errno::NOTDIR => "create the socket's directory, and mount /proc",
        Errno::NOMEM | Errno::NOBUFS => "free memory",
        _ => "choose another directory for the socket",
    };
    Error::system(call, remedy, e)
}

#[cfg(test)]
mod tests {
    use super::scratch::{ScratchDir, in_own_process};
    use super::*;
    use crate::process::same_process;
    use rustix::net::socketpair;
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixDatagram, UnixListener};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a socket pair")
    }

    fn receive_alone(fd: &OwnedFd) -> io::Result<ReceiveOutcome> {
        let mut fds = Vec::new();
        let outcome = receive(fd, &mut [0; MOST_BYTES], &mut fds);
        assert!(fds.is_empty(), "descriptors came that nobody sent");
        outcome
    }

    #[test]
    fn a_packet_arrives_whole_with_its_descriptors() {
        in_own_process("socket::tests::a_packet_arrives_whole_with_its_descriptors", || {
            let (a, b) = pair();
            let (mut reader, writer) = io::pipe().expect("a pipe");
            assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::Empty);
            assert_eq!(send(&a, b"one", &[]).expect("send"), SendOutcome::Sent);
            assert_eq!(send(&a, &[7; MOST_BYTES], &[writer.as_fd(), a.as_fd()]).expect("send"), SendOutcome::Sent);
            drop(writer);

            let (mut packet, mut fds) = ([0; MOST_BYTES], Vec::new());
            assert_eq!(receive(&b, &mut packet, &mut fds).expect("receive"), ReceiveOutcome::Packet(3));
            assert_eq!(&packet[..3], b"one");
            assert!(fds.is_empty());
            assert_eq!(receive(&b, &mut packet, &mut fds).expect("receive"), ReceiveOutcome::Packet(MOST_BYTES));
            assert_eq!(packet, [7; MOST_BYTES]);
            assert_eq!(fds.len(), 2);
            for fd in &fds {
                assert!(rustix::io::fcntl_getfd(fd).expect("fcntl").contains(rustix::io::FdFlags::CLOEXEC));
            }
            std::fs::File::from(fds.swap_remove(0)).write_all(b"!").expect("write");
            let mut text = String::new();
            reader.read_to_string(&mut text).expect("the pipe's end");
            assert_eq!(text, "!");
        });
    }

    #[test]
    fn what_was_sent_before_a_hang_up_is_still_read() {
        in_own_process("socket::tests::what_was_sent_before_a_hang_up_is_still_read", || {
            let (a, b) = pair();
            assert_eq!(send(&b, b"never read", &[]).expect("send"), SendOutcome::Sent);
            assert_eq!(send(&a, b"refused", &[]).expect("send"), SendOutcome::Sent);
            drop(a);
            assert!(has_hung_up(&b));
            let outcome = receive(&b, &mut [0; MOST_BYTES], &mut Vec::new()).expect("receive");
            assert_eq!(outcome, ReceiveOutcome::Packet(7));
            assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::HungUp);
            assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::HungUp);
            assert_eq!(send(&b, b"x", &[]).expect("send"), SendOutcome::HungUp);
        });
    }

    #[test]
    fn a_copy_of_the_other_end_keeps_it_from_hanging_up() {
        in_own_process("socket::tests::a_copy_of_the_other_end_keeps_it_from_hanging_up", || {
            let (a, b) = pair();
            let copy = a.try_clone().expect("dup");
            drop(a);
            assert!(!has_hung_up(&b));
            assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::Empty);
            drop(copy);
            assert!(has_hung_up(&b));
            assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::HungUp);
        });
    }

    #[test]
    fn an_empty_packet_is_no_hang_up() {
        let (a, b) = pair();
        assert_eq!(send(&a, b"", &[]).expect("send"), SendOutcome::Sent);
        assert_eq!(receive_alone(&b).expect_err("an empty packet").kind(), io::ErrorKind::InvalidData);
        assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::Empty);
    }

    #[test]
    fn a_packet_that_is_too_long_is_refused_and_its_descriptors_are_closed() {
        in_own_process("socket::tests::a_packet_that_is_too_long_is_refused_and_its_descriptors_are_closed", || {
            let (a, b) = pair();
            let (mut reader, writer) = io::pipe().expect("a pipe");
            assert_eq!(send(&a, &[0; MOST_BYTES + 1], &[writer.as_fd()]).expect("send"), SendOutcome::Sent);
            drop(writer);
            assert_eq!(receive_alone(&b).expect_err("too long").kind(), io::ErrorKind::InvalidData);
            assert_eq!(reader.read(&mut [0]).expect("the pipe's end"), 0);
        });
    }

    #[test]
    fn a_full_socket_says_so_and_loses_nothing() {
        let (a, b) = pair();
        let mut sent = 0u32;
        while send(&a, &sent.to_le_bytes(), &[]).expect("send") == SendOutcome::Sent {
            sent += 1;
        }
        let mut packet = [0; MOST_BYTES];
        for expected in 0..sent {
            assert_eq!(receive(&b, &mut packet, &mut Vec::new()).expect("receive"), ReceiveOutcome::Packet(4));
            assert_eq!(packet[..4], expected.to_le_bytes());
        }
        assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::Empty);
        assert_eq!(send(&a, b"again", &[]).expect("send"), SendOutcome::Sent);
    }

    #[test]
    fn as_many_descriptors_go_as_the_kernel_passes_and_no_more() {
        let (a, b) = pair();
        let many = vec![a.as_fd(); MOST_FDS + 1];
        assert_eq!(send(&a, b"x", &many).expect_err("one too many").kind(), io::ErrorKind::InvalidInput);
        assert_eq!(send(&a, b"x", &many[1..]).expect("send"), SendOutcome::Sent);
        let mut fds = Vec::new();
        assert_eq!(receive(&b, &mut [0; MOST_BYTES], &mut fds).expect("receive"), ReceiveOutcome::Packet(1));
        assert_eq!(fds.len(), MOST_FDS);
    }

    #[test]
    fn a_receiver_without_room_for_descriptors_says_so_and_keeps_none() {
        in_own_process("socket::tests::a_receiver_without_room_for_descriptors_says_so_and_keeps_none", || {
            let (a, b) = pair();
            let (mut reader, writer) = io::pipe().expect("a pipe");
            assert_eq!(send(&a, b"x", &[writer.as_fd(), writer.as_fd()]).expect("send"), SendOutcome::Sent);
            drop(writer);
            // The pipe's end left one number free below the limit, which is enough for one of the two.
            let free = rustix::io::fcntl_dupfd_cloexec(&a, 0).expect("dup");
            scratch::limit_files_to(free.as_raw_fd() + 1);
            let last = free.as_raw_fd();
            drop(free);
            assert_eq!(receive_alone(&b).expect_err("no room").raw_os_error(), Some(libc::EMFILE));
            assert_eq!(reader.read(&mut [0]).expect("the pipe's end"), 0);
            scratch::limit_files_to(last);
            assert_eq!(
                connect(Path::new("/nowhere")).expect_err("no descriptor left").to_string(),
                "socket failed; raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files"
            );
        });
    }

    #[test]
    fn the_peer_is_who_connected() {
        let dir = ScratchDir::new();
        let listener = Listener::bind(&Place::Path { path: dir.join("s"), others: false }).expect("bind");
        let _here = connect(listener.path()).expect("connect");
        let there = listener.accept().expect("accept").expect("one that waits");
        assert_eq!(peer_uid(&there).expect("its user"), rustix::process::geteuid().as_raw());
        let pidfd = peer_pidfd(&there).expect("Linux 6.5 or later");
        assert!(same_process(pidfd.as_fd()).expect("a readable /proc"));
        let (no_socket, _) = io::pipe().expect("a pipe");
        assert!(peer_uid(&no_socket).is_err());
        assert!(peer_pidfd(&no_socket).is_none());
    }

    fn refusal(path: &Path) -> String {
        connect(path).expect_err("a connect that nobody answers").to_string()
    }

    #[test]
    fn every_failed_connect_says_why_and_what_to_do() {
        in_own_process("socket::tests::every_failed_connect_says_why_and_what_to_do", || {
            let dir = ScratchDir::new();
            let at = |name: &str, text: &str| {
                let path = dir.join(name);
                assert_eq!(refusal(&path), format!("cannot connect to {}: {text}", path.display()));
            };
            at("absent", "there is no such socket; start the producer, or correct the path");

            std::fs::write(dir.join("file"), "").expect("a file");
            at("file", "it is not a socket; give the path of a session's socket");

            drop(UnixDatagram::bind(dir.join("dead")).expect("bind"));
            at("dead", "nobody listens there any more; start the producer again");

            let _stream = UnixListener::bind(dir.join("stream")).expect("bind");
            at("stream", "another kind of socket listens there; give the path of a session's socket");

            let full = new_socket().expect("a socket");
            rustix::net::bind(&full, &address_of(&dir.join("full")).expect("an address")).expect("bind");
            rustix::net::listen(&full, 0).expect("listen");
            let mut waiting = Vec::new();
            let error = loop {
                match connect(&dir.join("full")) {
                    Ok(connection) => waiting.push(connection),
                    Err(error) => break error,
                }
            };
            assert!(is_backlog_full(&error), "{error}");
            at("full", "too many participants connect at this moment; connect again");

            let denied = connect_error(Path::new("/x"), Errno::ACCESS);
            assert!(!is_backlog_full(&denied));
            assert_eq!(
                denied.to_string(),
                "cannot connect to /x: this user may not; \
                 name the user in `allow_uids`, and let it enter the socket's directory"
            );
            assert_eq!(
                refusal(Path::new(&"x".repeat(108))),
                format!(
                    "socket path is {} (108 bytes), but must be \
                     1 to 107 bytes without a zero: that is what a socket address holds",
                    "x".repeat(108)
                )
            );
            assert!(refusal(Path::new("")).contains("(0 bytes)"));
        });
    }
}
