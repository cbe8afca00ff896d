//! The broker's end of a keeper's socket: gives, takes back, and never believes without reading
//! back.
//!
//! Every call waits for the keeper, so they are made on a thread of their own. A keeper that dies
//! ends each wait: what was sent to it, pipes and sockets among it, is closed by the kernel. A
//! keeper that is stopped blocks the waiting thread.

use std::collections::BTreeSet;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use gpu_api::{Error, Result};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg_addr, socket_with, socketpair,
};
use transport::os::socket::{ReceiveOutcome, receive, wait_ready};
use transport::trace_point;

use crate::keeper::notify::{Request, encode};
use crate::server::bequest::Label;

/// Why the keeper does not have a descriptor that it was given.
#[derive(Debug)]
pub enum DepositError {
    /// No keeper listens, or another one than before.
    Absent,
    /// It is there, and does not have it: it is full.
    Refused(String),
    /// The system failed here.
    System(Error),
}

impl From<Error> for DepositError {
    fn from(error: Error) -> DepositError {
        DepositError::System(error)
    }
}

impl From<DepositError> for Error {
    fn from(error: DepositError) -> Error {
        let why = match error {
            DepositError::System(error) => return error,
            DepositError::Refused(why) => why,
            DepositError::Absent => "the keeper has gone".into(),
        };
        Error::Refused {
            why,
            remedy: "start keeper and broker of one version",
        }
    }
}

/// Names one run of a keeper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Incarnation(pub [u8; 16]);

impl std::fmt::Display for Incarnation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What a keeper said that it has.
#[derive(Debug)]
pub struct Inventory {
    /// Which keeper.
    pub incarnation: Incarnation,
    /// The names.
    pub names: BTreeSet<String>,
    /// With descriptors, if they were asked for.
    pub files: Vec<(String, OwnedFd)>,
    /// Hangs up when the keeper ends.
    pub leash: OwnedFd,
}

/// A broker's way to its keeper.
#[derive(Debug)]
pub struct Depositor {
    path: PathBuf,
    socket: OwnedFd,
    /// The keeper that has everything.
    fed: Option<Incarnation>,
}

impl Depositor {
    /// Makes one for the keeper that listens, or will listen, at a path.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn new(path: &Path) -> Result<Depositor> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| Error::without_descriptors("socket", e))?;
        Ok(Depositor {
            path: path.into(),
            socket,
            fed: None,
        })
    }

    /// Asks what the keeper has.
    ///
    /// # Errors
    ///
    /// [`DepositError::Absent`] when none listens or it dies meanwhile.
    pub fn inventory(&self, with_files: bool) -> Result<Inventory, DepositError> {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| Error::without_descriptors("socketpair", e))?;
        self.tell(
            if with_files {
                &Request::Read
            } else {
                &Request::List
            },
            &[theirs.as_fd()],
        )?;
        drop(theirs);
        let mut inventory = Vec::new();
        let mut names = BTreeSet::new();
        let mut packet = [0; transport::wire::message::MOST_BYTES];
        loop {
            let mut fds = Vec::new();
            let received = receive(&ours, &mut packet, &mut fds);
            let len = match received
                .map_err(|e| Error::without_descriptors("recvmsg from the keeper", e))?
            {
                ReceiveOutcome::Packet(len) => len,
                ReceiveOutcome::HungUp => return Err(DepositError::Absent),
                ReceiveOutcome::Empty => {
                    wait_ready(ours.as_fd(), PollFlags::IN, "the keeper", None)?;
                    continue;
                }
            };
            if let [b'.', incarnation @ ..] = &packet[..len] {
                let Ok(incarnation) = incarnation.try_into() else {
                    return Err(nonsense());
                };
                return Ok(Inventory {
                    incarnation: Incarnation(incarnation),
                    names,
                    files: inventory,
                    leash: ours,
                });
            }
            let text = str::from_utf8(&packet[..len]).map_err(|_| nonsense())?;
            let page: Vec<String> = text.lines().map(str::to_owned).collect();
            if with_files {
                if page.len() != fds.len() {
                    return Err(nonsense());
                }
                inventory.extend(page.iter().cloned().zip(fds));
            }
            names.extend(page);
        }
    }

    /// Tells the keeper that the broker serves.
    pub fn ready(&self) {
        // Without a keeper nobody needs to know.
        let _ = self.tell(&Request::Ready, &[]);
    }

    /// Says that this keeper has everything from here on.
    pub fn is_fed(&mut self, keeper: Incarnation) {
        self.fed = Some(keeper);
    }

    /// Says which keeper has everything.
    pub fn fed(&self) -> Option<Incarnation> {
        self.fed
    }

    /// Gives an object to the keeper: first its regions, then, when they are there, its manifest.
    ///
    /// # Errors
    ///
    /// [`DepositError::Absent`] when the keeper is not the one that has everything; then it may
    /// have a part of this. [`DepositError::Refused`] when it does not take all; then it has none
    /// of it.
    pub fn keep(
        &self,
        seq: u64,
        manifest: BorrowedFd<'_>,
        regions: &[BorrowedFd<'_>],
    ) -> Result<(), DepositError> {
        let labels: Vec<Label> = (0..regions.len() as u8)
            .map(|region| Label::Region(seq, region))
            .collect();
        let all: Vec<(Label, BorrowedFd<'_>)> =
            labels.into_iter().zip(regions.iter().copied()).collect();
        let kept = self.store(&all, "deposit.regions").and_then(|()| {
            trace_point!("deposit.regions.there");
            self.store(&[(Label::Manifest(seq), manifest)], "deposit.manifest")
        });
        if matches!(
            kept,
            Err(DepositError::Refused(_) | DepositError::System(_))
        ) {
            // The manifest first: without it the rest is garbage that the next broker closes.
            let labels = std::iter::once(Label::Manifest(seq))
                .chain(all.into_iter().map(|(label, _)| label));
            let _ = self.remove(labels);
        }
        kept
    }

    /// Gives everything to a keeper that is new: all regions, then all manifests, so that no object
    /// is there in part.
    ///
    /// # Errors
    ///
    /// As [`keep`](Depositor::keep).
    pub fn feed(
        &mut self,
        keeper: Incarnation,
        regions: &[(Label, BorrowedFd<'_>)],
        manifests: &[(Label, BorrowedFd<'_>)],
    ) -> Result<(), DepositError> {
        self.fed = Some(keeper);
        let fed = self
            .store(regions, "feed.regions")
            .and_then(|()| self.store(manifests, "feed.manifests"));
        if fed.is_err() {
            self.fed = None;
        }
        fed
    }

    /// Stores descriptors, and reads back that all are there.
    ///
    /// # Errors
    ///
    /// As [`keep`](Depositor::keep), but for what was taken, which stays.
    pub fn store(
        &self,
        files: &[(Label, BorrowedFd<'_>)],
        step: &'static str,
    ) -> Result<(), DepositError> {
        for (label, file) in files {
            self.tell(&Request::Store(label.to_string()), &[*file])?;
            tracing::trace!(target: "gpu_ipc::step", step, %label);
        }
        self.barrier()?;
        let inventory = self.inventory(false)?;
        if self.fed != Some(inventory.incarnation) {
            return Err(DepositError::Absent);
        }
        match files
            .iter()
            .find(|(label, _)| !inventory.names.contains(&label.to_string()))
        {
            None => Ok(()),
            Some((label, _)) => {
                let has = inventory.names.len();
                Err(DepositError::Refused(format!(
                    "the keeper has {has} descriptors and did not take {label}"
                )))
            }
        }
    }

    /// Takes descriptors out, in order, and reads back that none is there.
    ///
    /// # Errors
    ///
    /// [`DepositError::Absent`] when no keeper listens, [`DepositError::Refused`] when it keeps
    /// one.
    pub fn remove(&self, labels: impl IntoIterator<Item = Label>) -> Result<(), DepositError> {
        let names: Vec<String> = labels.into_iter().map(|label| label.to_string()).collect();
        self.remove_names(&names)
    }

    /// As [`remove`](Depositor::remove), for names that may be of no broker's giving.
    ///
    /// # Errors
    ///
    /// As [`remove`](Depositor::remove).
    pub fn remove_names(&self, names: &[String]) -> Result<(), DepositError> {
        for name in names {
            self.tell(&Request::Remove(name.clone()), &[])?;
            trace_point!("forget.removed");
        }
        self.barrier()?;
        let left = self.inventory(false)?.names;
        match names.iter().find(|name| left.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(DepositError::Refused(format!(
                "the keeper did not close {name}"
            ))),
        }
    }

    /// Waits until all that was sent before has been done, or the keeper is gone.
    fn barrier(&self) -> Result<(), DepositError> {
        let (mut ours, theirs) =
            std::io::pipe().map_err(|e| Error::without_descriptors("pipe", e))?;
        self.tell(&Request::Barrier, &[theirs.as_fd()])?;
        drop(theirs);
        // Nothing is ever written: the end comes when the last copy of the other end is closed.
        ours.read(&mut [0])
            .map_err(|e| Error::system("reading a barrier", "report this", e))?;
        Ok(())
    }

    fn tell(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), DepositError> {
        let text = encode(request);
        let address = SocketAddrUnix::new(&self.path).map_err(|e| {
            Error::system(
                "making the keeper's address",
                "choose a shorter directory",
                e,
            )
        })?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        loop {
            let parts = [IoSlice::new(text.as_bytes())];
            match sendmsg_addr(
                &self.socket,
                &address,
                &parts,
                &mut control,
                SendFlags::NOSIGNAL,
            ) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::CONNREFUSED | Errno::NOENT | Errno::CONNRESET | Errno::PIPE) => {
                    return Err(DepositError::Absent);
                }
                Err(Errno::TOOMANYREFS) => std::thread::yield_now(),
                Err(e) => {
                    return Err(Error::system(
                        "sendmsg to the keeper",
                        "check that the keeper runs",
                        e,
                    )
                    .into());
                }
            }
        }
    }
}

fn nonsense() -> DepositError {
    DepositError::Refused(
        "the keeper answers nonsense: broker and keeper must be of one version".into(),
    )
}
