//! What the two processes of a case say to each other: short packets, with or without a file
//! descriptor.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// One end of a pair of connected packet sockets.
#[derive(Debug)]
pub struct Pipe {
    socket: OwnedFd,
}

impl Pipe {
    /// Takes an end.
    pub fn new(socket: OwnedFd) -> Pipe {
        Pipe { socket }
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: &[u8]) {
        self.send_with(bytes, None);
    }

    /// Sends bytes and a file descriptor.
    pub fn send_fd(&mut self, bytes: &[u8], fd: BorrowedFd<'_>) {
        self.send_with(bytes, Some(fd));
    }

    fn send_with(&mut self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(fd) = &fd {
            control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
        }
        rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
        .expect("the other process reads");
    }

    /// Receives bytes, of which there are exactly `N`.
    pub fn receive<const N: usize>(&mut self) -> [u8; N] {
        self.receive_with().0
    }

    /// Receives bytes and a file descriptor.
    pub fn receive_fd<const N: usize>(&mut self) -> ([u8; N], OwnedFd) {
        let (bytes, fd) = self.receive_with();
        (bytes, fd.expect("a file descriptor came with the packet"))
    }

    fn receive_with<const N: usize>(&mut self) -> ([u8; N], Option<OwnedFd>) {
        let mut bytes = [0; N];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = rustix::net::recvmsg(
            self.socket.as_fd(),
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        assert_eq!(
            message.expect("the other process writes").bytes,
            N,
            "the other process is gone, or says more"
        );
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        (bytes, fd)
    }

    /// Waits until the other process has come to the same point.
    pub fn meet(&mut self) {
        self.send(b"!");
        assert_eq!(&self.receive::<1>(), b"!");
    }
}
