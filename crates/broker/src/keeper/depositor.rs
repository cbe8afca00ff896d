//! The broker's end of a keeper's socket: gives, takes back, and never believes without reading
//! back.
//!
//! Every call waits for the keeper, so they are made on a thread of their own. A keeper that dies
//! ends each wait: what was sent to it, sockets among it, is closed by the kernel. A keeper that is
//! stopped blocks the waiting thread; its [`Pulse`] says for how long.

use std::cell::Cell;
use std::collections::{BTreeSet, HashSet};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpu_api::{Error, Result};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg_addr, socket_with, socketpair,
};
use transport::os::socket::{ReceiveOutcome, receive, wait_ready};
use transport::trace_point;

use crate::keeper::notify::{NAMES_A_PACKET, Request, encode};
use crate::keeper::pulse::Pulse;
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
        Error::refused(why, "start keeper and broker of one version")
    }
}

/// Objects that are given to a new keeper before it is asked whether it has them.
const FED_TOGETHER: usize = 64;

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
    /// How many it keeps, the most that it keeps, and how many brokers it started, if it was asked
    /// for names and is not of an older version.
    numbers: Option<[u64; 3]>,
    /// Hangs up when the keeper ends.
    pub leash: OwnedFd,
}

/// A broker's way to its keeper.
#[derive(Debug)]
pub struct Depositor {
    path: PathBuf,
    socket: OwnedFd,
    /// The keeper that everything is given to.
    fed: Option<Incarnation>,
    /// The keeper that cannot be asked for names: it is of an older version, and lists all.
    lists: Cell<Option<Incarnation>>,
    pulse: Arc<Pulse>,
}

/// A keeper that was given everything.
#[derive(Debug)]
pub struct Fed {
    /// Hangs up when it ends.
    pub leash: OwnedFd,
    /// The numbers of the objects for which it has no room.
    pub without: Vec<u64>,
}

/// An object to be given to a keeper.
#[derive(Debug)]
pub struct Given<'a> {
    /// Its number.
    pub seq: u64,
    /// Its manifest.
    pub manifest: BorrowedFd<'a>,
    /// Its regions, in order.
    pub regions: Vec<BorrowedFd<'a>>,
}

impl<'a> Given<'a> {
    /// Lists its descriptors in the order in which they are given: the manifest last, so that it is
    /// there only if all regions are.
    fn files(&self) -> Vec<(Label, BorrowedFd<'a>)> {
        let regions = self.regions.iter().enumerate();
        regions
            .map(|(i, region)| (Label::Region(self.seq, i as u8), *region))
            .chain([(Label::Manifest(self.seq), self.manifest)])
            .collect()
    }
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
            lists: Cell::new(None),
            pulse: Arc::new(Pulse::new()),
        })
    }

    /// Returns what is known of the keeper without asking it.
    pub fn pulse(&self) -> Arc<Pulse> {
        self.pulse.clone()
    }

    /// Asks what the keeper has.
    ///
    /// # Errors
    ///
    /// [`DepositError::Absent`] when none listens or it dies meanwhile.
    pub fn inventory(&self, with_files: bool) -> Result<Inventory, DepositError> {
        self.ask(if with_files {
            &Request::Read
        } else {
            &Request::List
        })
    }

    /// Asks a keeper to hand everything over. It takes no datagram from then on: it ends once a
    /// packet is written to the leash, and goes on when that is closed.
    ///
    /// # Errors
    ///
    /// [`DepositError::Absent`] when none listens, it dies meanwhile, or is of an older version.
    pub fn take_over(&self) -> Result<Inventory, DepositError> {
        self.ask(&Request::HandOver)
    }

    fn ask(&self, request: &Request) -> Result<Inventory, DepositError> {
        let with_files = matches!(request, Request::Read | Request::HandOver);
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| Error::without_descriptors("socketpair", e))?;
        self.tell(request, &[theirs.as_fd()])?;
        drop(theirs);
        let mut files = Vec::new();
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
                    let _asked = self.pulse.ask();
                    wait_ready(ours.as_fd(), PollFlags::IN, "the keeper", None)?;
                    continue;
                }
            };
            if let [b'.', end @ ..] = &packet[..len] {
                let (incarnation, numbers) = read_end(end).ok_or_else(nonsense)?;
                return Ok(Inventory {
                    incarnation,
                    names,
                    files,
                    numbers,
                    leash: ours,
                });
            }
            let text = str::from_utf8(&packet[..len]).map_err(|_| nonsense())?;
            let page: Vec<String> = text.lines().map(str::to_owned).collect();
            if with_files {
                if page.len() != fds.len() {
                    return Err(nonsense());
                }
                files.extend(page.iter().cloned().zip(fds));
            }
            names.extend(page);
        }
    }

    /// Asks which of some names the keeper has; all that was sent before has been done then. The
    /// answer takes as long however many it has.
    ///
    /// # Errors
    ///
    /// [`DepositError::Absent`] when the keeper is not the one that everything is given to.
    pub fn has(&self, names: &[String]) -> Result<HashSet<String>, DepositError> {
        let mut there = HashSet::new();
        let mut pages: Vec<&[String]> = names.chunks(NAMES_A_PACKET).collect();
        if pages.is_empty() {
            pages.push(&[]);
        }
        for page in pages {
            let known_to_list = self.fed.is_some() && self.lists.get() == self.fed;
            let answer = if known_to_list {
                Err(DepositError::Absent)
            } else {
                self.ask(&Request::Has(page.to_vec()))
            };
            let answer = match answer {
                // It has ended, or is of an older version, which lets the question go.
                Err(DepositError::Absent) => {
                    let all = self.inventory(false)?;
                    if self.fed == Some(all.incarnation) {
                        self.lists.set(self.fed);
                    }
                    all
                }
                answer => answer?,
            };
            if self.fed != Some(answer.incarnation) {
                return Err(DepositError::Absent);
            }
            let [kept, most, starts] = answer.numbers.unwrap_or([answer.names.len() as u64, 0, 0]);
            self.pulse.count(kept, most, starts);
            there.extend(
                page.iter()
                    .filter(|name| answer.names.contains(*name))
                    .cloned(),
            );
        }
        Ok(there)
    }

    /// Tells the keeper that the broker serves.
    pub fn ready(&self) {
        // Without a keeper nobody needs to know.
        let _ = self.tell(&Request::Ready, &[]);
    }

    /// Says that this keeper has everything from here on.
    ///
    /// # Errors
    ///
    /// As [`has`](Depositor::has): it may have ended meanwhile.
    pub fn is_fed(&mut self, keeper: Incarnation) -> Result<(), DepositError> {
        self.fed = Some(keeper);
        self.has(&[]).map(drop)
    }

    /// Says that no keeper has everything from here on.
    pub fn is_lost(&mut self) {
        self.fed = None;
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

    /// Gives everything to the keeper that listens, object by object in the order given, each whole.
    /// What it has already (from a keeper before it) is not given again. `first` is given before what
    /// belongs to nothing is taken out, then the objects, then `last`.
    ///
    /// # Errors
    ///
    /// [`DepositError::Absent`] when the keeper is gone; [`DepositError::Refused`] when it does not
    /// take `first`.
    pub fn feed(
        &mut self,
        first: &[(Label, BorrowedFd<'_>)],
        objects: &[Given<'_>],
        last: &[(String, BorrowedFd<'_>)],
    ) -> Result<Fed, DepositError> {
        let inventory = self.inventory(false)?;
        self.fed = Some(inventory.incarnation);
        match self.feed_beside(inventory.names, first, objects, last) {
            Ok(without) => Ok(Fed {
                leash: inventory.leash,
                without,
            }),
            Err(error) => {
                self.fed = None;
                Err(error)
            }
        }
    }

    fn feed_beside(
        &self,
        there: BTreeSet<String>,
        first: &[(Label, BorrowedFd<'_>)],
        objects: &[Given<'_>],
        last: &[(String, BorrowedFd<'_>)],
    ) -> Result<Vec<u64>, DepositError> {
        let of_objects = objects.iter().flat_map(Given::files);
        let wanted: HashSet<String> = of_objects
            .map(|(label, _)| label.to_string())
            .chain(first.iter().map(|(label, _)| label.to_string()))
            .chain(last.iter().map(|(name, _)| name.clone()))
            .collect();
        let stale: Vec<String> = there
            .iter()
            .filter(|name| !wanted.contains(*name) && Label::parse(name).is_some())
            .cloned()
            .collect();
        // A keeper that took these over from one before it has the history at every moment.
        self.store(first, "feed.tombs")?;
        self.remove_names(&stale)?;
        let mut without = Vec::new();
        for batch in objects.chunks(FED_TOGETHER) {
            let mut sent: Vec<(u64, Vec<String>)> = Vec::new();
            let mut room = self.pulse.room();
            for object in batch {
                let missing: Vec<_> = object
                    .files()
                    .into_iter()
                    .map(|(label, file)| (label.to_string(), file))
                    .filter(|(name, _)| !there.contains(name))
                    .collect();
                let needed = missing.len() as u64;
                if room.is_some_and(|room| needed > room) {
                    without.push(object.seq);
                    continue;
                }
                room = room.map(|room| room - needed);
                for (name, file) in &missing {
                    self.tell(&Request::Store(name.clone()), &[*file])?;
                    trace_point!("feed.stored");
                }
                trace_point!("feed.given");
                sent.push((
                    object.seq,
                    missing.into_iter().map(|(name, _)| name).collect(),
                ));
            }
            let names: Vec<String> = sent.iter().flat_map(|(_, names)| names.clone()).collect();
            let taken = self.has(&names)?;
            for (seq, mut names) in sent {
                if names.iter().any(|name| !taken.contains(name)) {
                    without.push(seq);
                    // The manifest first, as in `keep`.
                    names.reverse();
                    self.remove_names(&names)?;
                }
            }
        }
        // What another version left is given as it is, and is not worth an object.
        for (name, file) in last {
            self.tell(&Request::Store(name.clone()), &[*file])?;
        }
        self.has(&[])?;
        Ok(without)
    }

    /// Stores a descriptor under a name that may be of no broker's giving, and asks whether it is
    /// there.
    ///
    /// # Errors
    ///
    /// As [`store`](Depositor::store).
    pub fn give(&self, name: &str, file: BorrowedFd<'_>) -> Result<(), DepositError> {
        self.tell(&Request::Store(name.into()), &[file])?;
        if self.has(&[name.into()])?.contains(name) {
            Ok(())
        } else {
            Err(DepositError::Refused(format!(
                "the keeper did not take {name}"
            )))
        }
    }

    /// Stores descriptors, and asks whether all are there.
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
        let names: Vec<String> = files.iter().map(|(label, _)| label.to_string()).collect();
        let taken = self.has(&names)?;
        match names.iter().find(|name| !taken.contains(*name)) {
            None => Ok(()),
            Some(name) => {
                let (has, most) = (self.pulse.kept(), self.pulse.most());
                let of = if most > 0 {
                    format!(" of at most {most}")
                } else {
                    String::new()
                };
                Err(DepositError::Refused(format!(
                    "the keeper has {has} descriptors{of} and did not take {name}"
                )))
            }
        }
    }

    /// Takes descriptors out, in order, and asks whether none is there.
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
        let left = self.has(names)?;
        match names.iter().find(|name| left.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(DepositError::Refused(format!(
                "the keeper did not close {name}"
            ))),
        }
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
        // The queue of a keeper that is stopped fills, and the send waits.
        let _asked = self.pulse.ask();
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

/// Reads the packet that ends an answer, behind its `.`.
fn read_end(end: &[u8]) -> Option<(Incarnation, Option<[u64; 3]>)> {
    let (incarnation, numbers) = end.split_first_chunk::<16>()?;
    let (numbers, rest) = numbers.as_chunks::<8>();
    let numbers = match (numbers, rest) {
        ([], []) => None,
        ([kept, most, starts], []) => Some([*kept, *most, *starts].map(u64::from_le_bytes)),
        _ => return None,
    };
    Some((Incarnation(*incarnation), numbers))
}

fn nonsense() -> DepositError {
    DepositError::Refused(
        "the keeper answers nonsense: broker and keeper must be of one version".into(),
    )
}
