//! Sending and receiving whole packets, with the file descriptors that come with them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use gpu_api::{Error, Result};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::Uid;

use super::packet_socket::system_error;
use crate::os::closer::{Closer, Foreign};
use crate::os::poller::{is_now, poll_for};
use crate::wire::message::MOST_BYTES;

/// The most descriptors that the kernel passes with one packet (`SCM_MAX_FD`).
const MOST_FDS: usize = 253;

/// What became of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum SendOutcome {
    /// It is on its way, whole.
    Sent,
    /// The socket is full; nothing was sent. Poll for writing and send it again.
    Full,
    /// Nobody will ever read it.
    HungUp,
}

/// What there was to receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum ReceiveOutcome {
    /// A packet of this many bytes.
    Packet(usize),
    /// Nothing yet. Poll for reading.
    Empty,
    /// The other end is closed in every process that had it, and all its packets are read.
    HungUp,
}

/// Sends one packet with file descriptors; the receiver gets copies of them.
///
/// # Errors
///
/// What the kernel says when it is neither full nor hung up: too many descriptors in flight, no
/// memory.
pub fn send(fd: impl AsFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<SendOutcome> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty()
        && (fds.len() > MOST_FDS || !control.push(SendAncillaryMessage::ScmRights(fds)))
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "more than 253 file descriptors in one packet",
        ));
    }
    loop {
        match sendmsg(
            &fd,
            &[IoSlice::new(packet)],
            &mut control,
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        ) {
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
/// `InvalidData` for a packet that is empty or longer than any message, `EMFILE` when this process
/// had no room for the descriptors that came: the packet is lost then, and whatever came with it is
/// closed. [`is_lost`] tells these from errors after which the packet is still there.
pub fn receive(
    fd: impl AsFd,
    packet: &mut [u8; MOST_BYTES],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<ReceiveOutcome> {
    receive_from(fd, packet, fds).map(|(outcome, _)| outcome)
}

/// Receives as [`receive`] does, and says which user sent the packet, if the socket has the kernel
/// tell (`SO_PASSCRED`).
///
/// # Errors
///
/// As [`receive`].
pub fn receive_from(
    fd: impl AsFd,
    packet: &mut [u8; MOST_BYTES],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<(ReceiveOutcome, Option<Uid>)> {
    let mut came = Vec::new();
    let Some(got) = take(&fd, packet, RecvFlags::empty(), |fd| came.push(fd))? else {
        return Ok((ReceiveOutcome::Empty, None));
    };
    let outcome = got.outcome(&fd)?;
    fds.append(&mut came);
    Ok((outcome, got.from))
}

/// Receives one packet from a sender that may be hostile; this thread closes no descriptor that
/// comes with it.
///
/// The descriptors are taken while the packet still has its own copies, so that none of those is
/// the last. What finds no room among this process' descriptors stays in the socket's queue.
///
/// # Errors
///
/// As [`receive`]; after `EMFILE` the packet is still there.
pub fn receive_guarded(
    fd: impl AsFd,
    packet: &mut [u8; MOST_BYTES],
    closer: &Closer,
    fds: &mut Vec<Foreign>,
) -> io::Result<ReceiveOutcome> {
    let guard = |came| fds.push(closer.guard(came));
    let Some(got) = take(&fd, packet, RecvFlags::PEEK, guard)? else {
        return Ok(ReceiveOutcome::Empty);
    };
    let outcome = got.outcome(&fd);
    if !got.is_cut() && !matches!(outcome, Ok(ReceiveOutcome::HungUp)) {
        take(&fd, &mut [], RecvFlags::empty(), drop)?;
    }
    outcome
}

/// Says whether a packet was lost because of what it is: empty, too long, or with descriptors that
/// find no room here.
pub fn is_lost(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData || error.raw_os_error() == Some(libc::EMFILE)
}

/// What `recvmsg` said of one packet.
struct Received {
    bytes: usize,
    flags: ReturnFlags,
    from: Option<Uid>,
}

/// Reads one packet, or looks at it; `None` when there is none.
fn take(
    fd: &impl AsFd,
    packet: &mut [u8],
    flags: RecvFlags,
    mut each: impl FnMut(OwnedFd),
) -> Result<Option<Received>, Errno> {
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS), ScmCredentials(1))];
    // What is only to be dropped brings no descriptors in.
    let room = if packet.is_empty() { 0 } else { space.len() };
    let mut control = RecvAncillaryBuffer::new(&mut space[..room]);
    let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = loop {
        match recvmsg(fd, &mut [IoSliceMut::new(packet)], &mut control, flags) {
            Ok(got) => break got,
            // The other end closed while packets of ours were unread. That is told once, before the
            // packets that it sent; a refusal may be among them.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(e) => return Err(e),
        }
    };
    let mut from = None;
    for message in control.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(came) => came.for_each(&mut each),
            RecvAncillaryMessage::ScmCredentials(of) => from = Some(of.uid),
            _ => {}
        }
    }
    Ok(Some(Received {
        bytes: got.bytes,
        flags: got.flags,
        from,
    }))
}

impl Received {
    /// Says whether descriptors were cut off: the room is for as many as the kernel passes, so they
    /// found no free number here.
    fn is_cut(&self) -> bool {
        self.flags.contains(ReturnFlags::CTRUNC)
    }

    fn outcome(&self, fd: &impl AsFd) -> io::Result<ReceiveOutcome> {
        let invalid = |why| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        if self.is_cut() {
            Err(Errno::MFILE.into())
        } else if self.flags.contains(ReturnFlags::TRUNC) {
            invalid("a packet longer than any message")
        } else if self.bytes > 0 {
            Ok(ReceiveOutcome::Packet(self.bytes))
        } else if has_hung_up(fd) {
            // An empty packet reads like the end; only the kernel's own word counts, because a
            // death is proved with it.
            Ok(ReceiveOutcome::HungUp)
        } else {
            invalid("an empty packet")
        }
    }
}

/// Ends a connection, for all copies of both ends. Sent packets can still be read.
pub fn hang_up(fd: impl AsFd) {
    // The only failure is a connection that has ended: that is what is wanted.
    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
}

/// Says whether the other end is closed in every process that had it. Packets of it may still be
/// unread.
pub fn has_hung_up(fd: impl AsFd) -> bool {
    is_now(fd, PollFlags::HUP)
}

/// Waits until a socket can be read or written, or its other end is closed.
///
/// # Errors
///
/// [`Error::Deadline`] naming `what`.
pub fn wait_ready(
    socket: BorrowedFd<'_>,
    flags: PollFlags,
    what: &'static str,
    deadline: Option<Instant>,
) -> Result<()> {
    let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
    if left == Some(Duration::ZERO) {
        return Err(Error::deadline(what));
    }
    match poll_for(&mut [PollFd::new(&socket, flags)], left) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(system_error("poll", e)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::connect::connect;
    use super::super::scratch::{self, in_own_process};
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::path::Path;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a socket pair")
    }

    fn receive_alone(fd: &OwnedFd) -> io::Result<ReceiveOutcome> {
        let mut fds = Vec::new();
        let outcome = receive(fd, &mut [0; MOST_BYTES], &mut fds);
        assert!(fds.is_empty(), "descriptors came that nobody sent");
        outcome
    }

    #[test]
    fn a_packet_arrives_whole_with_its_descriptors() {
        in_own_process(
            "os::socket::transfer::tests::a_packet_arrives_whole_with_its_descriptors",
            || {
                let (a, b) = pair();
                let (mut reader, writer) = io::pipe().expect("a pipe");
                assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::Empty);
                assert_eq!(send(&a, b"one", &[]).expect("send"), SendOutcome::Sent);
                assert_eq!(
                    send(&a, &[7; MOST_BYTES], &[writer.as_fd(), a.as_fd()]).expect("send"),
                    SendOutcome::Sent
                );
                drop(writer);

                let (mut packet, mut fds) = ([0; MOST_BYTES], Vec::new());
                assert_eq!(
                    receive(&b, &mut packet, &mut fds).expect("receive"),
                    ReceiveOutcome::Packet(3)
                );
                assert_eq!(&packet[..3], b"one");
                assert!(fds.is_empty());
                assert_eq!(
                    receive(&b, &mut packet, &mut fds).expect("receive"),
                    ReceiveOutcome::Packet(MOST_BYTES)
                );
                assert_eq!(packet, [7; MOST_BYTES]);
                assert_eq!(fds.len(), 2);
                for fd in &fds {
                    assert!(
                        rustix::io::fcntl_getfd(fd)
                            .expect("fcntl")
                            .contains(rustix::io::FdFlags::CLOEXEC)
                    );
                }
                std::fs::File::from(fds.swap_remove(0))
                    .write_all(b"!")
                    .expect("write");
                let mut text = String::new();
                reader.read_to_string(&mut text).expect("the pipe's end");
                assert_eq!(text, "!");
            },
        );
    }

    #[test]
    fn what_was_sent_before_a_hang_up_is_still_read() {
        in_own_process(
            "os::socket::transfer::tests::what_was_sent_before_a_hang_up_is_still_read",
            || {
                let (a, b) = pair();
                assert_eq!(
                    send(&b, b"never read", &[]).expect("send"),
                    SendOutcome::Sent
                );
                assert_eq!(send(&a, b"refused", &[]).expect("send"), SendOutcome::Sent);
                drop(a);
                assert!(has_hung_up(&b));
                let outcome = receive(&b, &mut [0; MOST_BYTES], &mut Vec::new()).expect("receive");
                assert_eq!(outcome, ReceiveOutcome::Packet(7));
                assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::HungUp);
                assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::HungUp);
                assert_eq!(send(&b, b"x", &[]).expect("send"), SendOutcome::HungUp);
            },
        );
    }

    #[test]
    fn a_copy_of_the_other_end_keeps_it_from_hanging_up() {
        in_own_process(
            "os::socket::transfer::tests::a_copy_of_the_other_end_keeps_it_from_hanging_up",
            || {
                let (a, b) = pair();
                let copy = a.try_clone().expect("dup");
                drop(a);
                assert!(!has_hung_up(&b));
                assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::Empty);
                drop(copy);
                assert!(has_hung_up(&b));
                assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::HungUp);
            },
        );
    }

    #[test]
    fn an_empty_packet_is_no_hang_up() {
        let (a, b) = pair();
        assert_eq!(send(&a, b"", &[]).expect("send"), SendOutcome::Sent);
        assert_eq!(
            receive_alone(&b).expect_err("an empty packet").kind(),
            io::ErrorKind::InvalidData
        );
        assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::Empty);
    }

    #[test]
    fn a_packet_that_is_too_long_is_refused_and_its_descriptors_are_closed() {
        in_own_process(
            "os::socket::transfer::tests::a_packet_that_is_too_long_is_refused_and_its_descriptors_are_closed",
            || {
                let (a, b) = pair();
                let (mut reader, writer) = io::pipe().expect("a pipe");
                assert_eq!(
                    send(&a, &[0; MOST_BYTES + 1], &[writer.as_fd()]).expect("send"),
                    SendOutcome::Sent
                );
                drop(writer);
                assert_eq!(
                    receive_alone(&b).expect_err("too long").kind(),
                    io::ErrorKind::InvalidData
                );
                assert_eq!(reader.read(&mut [0]).expect("the pipe's end"), 0);
            },
        );
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
            assert_eq!(
                receive(&b, &mut packet, &mut Vec::new()).expect("receive"),
                ReceiveOutcome::Packet(4)
            );
            assert_eq!(packet[..4], expected.to_le_bytes());
        }
        assert_eq!(receive_alone(&b).expect("receive"), ReceiveOutcome::Empty);
        assert_eq!(send(&a, b"again", &[]).expect("send"), SendOutcome::Sent);
    }

    #[test]
    fn as_many_descriptors_go_as_the_kernel_passes_and_no_more() {
        let (a, b) = pair();
        let many = vec![a.as_fd(); MOST_FDS + 1];
        assert_eq!(
            send(&a, b"x", &many).expect_err("one too many").kind(),
            io::ErrorKind::InvalidInput
        );
        assert_eq!(send(&a, b"x", &many[1..]).expect("send"), SendOutcome::Sent);
        let mut fds = Vec::new();
        assert_eq!(
            receive(&b, &mut [0; MOST_BYTES], &mut fds).expect("receive"),
            ReceiveOutcome::Packet(1)
        );
        assert_eq!(fds.len(), MOST_FDS);
    }

    #[test]
    fn a_receiver_without_room_for_descriptors_says_so_and_keeps_none() {
        in_own_process(
            "os::socket::transfer::tests::a_receiver_without_room_for_descriptors_says_so_and_keeps_none",
            || {
                let (a, b) = pair();
                let (mut reader, writer) = io::pipe().expect("a pipe");
                assert_eq!(
                    send(&a, b"x", &[writer.as_fd(), writer.as_fd()]).expect("send"),
                    SendOutcome::Sent
                );
                drop(writer);
                // The pipe's end left one number free below the limit, which is enough for one of
                // the two.
                let free = rustix::io::fcntl_dupfd_cloexec(&a, 0).expect("dup");
                scratch::limit_files_to(free.as_raw_fd() + 1);
                let last = free.as_raw_fd();
                drop(free);
                assert_eq!(
                    receive_alone(&b).expect_err("no room").raw_os_error(),
                    Some(libc::EMFILE)
                );
                assert_eq!(reader.read(&mut [0]).expect("the pipe's end"), 0);
                scratch::limit_files_to(last);
                assert_eq!(
                    connect(Path::new("/nowhere"))
                        .expect_err("no descriptor left")
                        .to_string(),
                    "socket failed; raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files"
                );
            },
        );
    }
}
