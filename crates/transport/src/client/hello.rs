//! The way in as a client walks it: a socket, the processes that its hello names, the hello, and
//! the server's first message.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use gpu_api::{Error, Gpu, Result};
use rustix::event::PollFlags;
use zeroize::Zeroize;

use crate::os::process;
use crate::os::socket::{self, Connecting, ReceiveOutcome, SendOutcome};
use crate::trace_point;
use crate::wire::packet::MOST_BYTES;
use crate::wire::table::{self, Message};

/// The processes whose ends prove that this one's work on the device has ended.
#[derive(Debug)]
pub struct Kin {
    own: OwnedFd,
    descendants: Vec<OwnedFd>,
}

impl Kin {
    /// Finds this process' descendants that keep the device's files.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when no descriptor is left, or `/proc` cannot be read.
    pub fn find(gpu: &Gpu) -> Result<Kin> {
        let descendants = process::descendants_holding(gpu.backend().device_files())?;
        Ok(Kin {
            own: process::own_pidfd()?,
            descendants,
        })
    }

    /// Counts the descendants, as a hello says it.
    pub fn descendants(&self) -> u16 {
        u16::try_from(self.descendants.len()).unwrap_or(u16::MAX)
    }
}

/// Connects to a server, and finds the processes that the hello is to name.
///
/// The socket is made first: a child that is forked while the others are counted has a copy of it,
/// and so keeps the proof of this process' death from being complete. It is connected last: a
/// server closes connections that are silent for too long.
///
/// # Errors
///
/// [`Error::Connect`] when no server listens there; as [`Kin::find`].
pub fn connect(path: &Path, gpu: &Gpu, deadline: Option<Instant>) -> Result<(OwnedFd, Kin)> {
    let socket = Connecting::new()?;
    let kin = Kin::find(gpu)?;
    Ok((socket.connect_within(path, deadline)?, kin))
}

/// Says hello and waits for the first message, which comes with its version and descriptors. `None`
/// when the server hung up without one.
///
/// # Errors
///
/// [`Error::Deadline`] naming `awaited`, [`Error::Mismatch`] for what is no message of the protocol,
/// [`Error::System`] for what the kernel refuses.
pub fn say_hello<A: Message>(
    socket: &OwnedFd,
    hello: &impl Message,
    kin: &Kin,
    awaited: &'static str,
    deadline: Option<Instant>,
) -> Result<Option<(A, u16, Vec<OwnedFd>)>> {
    let mut bytes = [0; MOST_BYTES];
    let len = table::encode(hello, &mut bytes, A::PROTOCOL.versions.highest);
    let named = std::iter::once(&kin.own).chain(&kin.descendants);
    let named: Vec<BorrowedFd<'_>> = named.map(AsFd::as_fd).collect();
    trace_point!("hello");
    match socket::send(socket, &bytes[..len], &named) {
        // One that has hung up may have said why.
        Ok(SendOutcome::Sent | SendOutcome::HungUp) => {}
        Ok(SendOutcome::Full) => return Ok(None),
        Err(e) => return Err(Error::without_descriptors("sendmsg", e)),
    }
    loop {
        let mut fds = Vec::new();
        match socket::receive(socket, &mut bytes, &mut fds) {
            Ok(ReceiveOutcome::Packet(len)) => {
                let answer = table::decode(&bytes[..len], fds.len());
                // Keys may have come with it.
                bytes[..len].zeroize();
                let (answer, version) = answer?;
                return Ok(Some((answer, version, fds)));
            }
            Ok(ReceiveOutcome::HungUp) => return Ok(None),
            Ok(ReceiveOutcome::Empty) => {
                socket::wait_ready(socket.as_fd(), PollFlags::IN, awaited, deadline)?;
            }
            Err(e) => return Err(Error::without_descriptors("recvmsg", e)),
        }
    }
}
