//! What the two sides of a step say to each other: short packets, with or without a file
//! descriptor.

use std::io::{IoSlice, IoSliceMut, stdin};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// What a side says that was left alone.
pub(crate) const GONE: &str = "the other side is gone";

/// One end of a pair of connected packet sockets.
pub(crate) struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// Takes the end that stands where the standard input would be.
    pub(crate) fn from_stdin() -> Result<Channel, String> {
        let socket = stdin()
            .as_fd()
            .try_clone_to_owned()
            .map_err(|error| format!("no socket: {error}"))?;
        Ok(Channel { socket })
    }

    /// Sends bytes, and a descriptor beside them.
    pub(crate) fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), String> {
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
        .map(|_| ())
        .map_err(|errno| format!("{GONE}: {errno}"))
    }

    /// Receives exactly `N` bytes, and the descriptor beside them.
    pub(crate) fn receive<const N: usize>(&self) -> Result<([u8; N], Option<OwnedFd>), String> {
        let mut bytes = [0; N];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes)];
        let message = rustix::net::recvmsg(
            &self.socket,
            &mut into,
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
        .map_err(|errno| format!("{GONE}: {errno}"))?;
        if message.bytes != N {
            return Err(GONE.to_owned());
        }
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        Ok((bytes, fd))
    }

    /// Tells the other side that this one has come to a point.
    pub(crate) fn tell(&self, point: u8) -> Result<(), String> {
        self.send(&[point], None)
    }

    /// Waits until the other side has come to a point.
    pub(crate) fn await_point(&self, point: u8) -> Result<(), String> {
        let ([told], _) = self.receive()?;
        if told == point {
            Ok(())
        } else {
            Err(format!("the other side is at {told}, not at {point}"))
        }
    }
}
