//! The keeper's loop: serves its socket, and starts the broker again when it dies.
//!
//! If the broker dies, the keeper starts it again, and it reads everything back. If the keeper
//! dies, the broker lives on and gives everything to the next keeper that listens in its directory;
//! the next keeper's own broker waits for the lock meanwhile, and ends with its keeper while it
//! waits. If both die, mappings stay valid, and
//! the rest is gone.
//!
//! A keeper is replaced without a moment in which the broker's death would lose anything: the next
//! one takes every descriptor over from the first before that ends.
//!
//! ```text
//! first  serves ─► hands over: takes no datagram ───────────────────► ends
//!                       ▲ asks      │ names, descriptors      ▲ has all
//! next        starts ───┘           └──► keeps them ──────────┘ ─► takes the lock, serves
//! ```
//!
//! What is sent to the first meanwhile is lost with its socket, and was not answered: the broker
//! asks again of the next. If the next one dies before it has all, the first goes on.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use gpu_api::{Error, Result};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use transport::os::poller::Poller;
use transport::os::socket::{
    ReceiveOutcome, SendOutcome, has_hung_up, is_lost, receive, receive_from, send,
};
use transport::trace_point;

use crate::keeper::depositor::{DepositError, Depositor, Incarnation};
use crate::keeper::notify::{NAMES_A_PACKET, Request, parse};
use crate::keeper::shelf::Shelf;
use crate::server::{lock, place};
use crate::wire::MOST_BYTES;

/// The name of the keeper's socket in the broker's directory.
pub const SOCKET: &str = "keeper";
/// The file whose lock is the right to keep in a directory.
const LOCK: &str = "keeper.lock";
/// A keeper that was told that everything was taken over: how long it may take to end.
const TAKES_TO_END: Duration = Duration::from_secs(60);
/// The variable of a broker's environment that says which keeper started it, in hexadecimal.
pub const STARTED_BY: &str = "GPU_IPC_KEEPER";
/// Descriptors kept for other uses than the shelf: sockets, pipes, those on their way.
const SPARE: usize = 512;
/// Readers that are written to, and leashes that are held.
const MOST_READERS: usize = 16;
/// A keeper that died as it started its broker: how long that may have its lock until it is another
/// program.
const TAKES_TO_START: Duration = Duration::from_secs(1);
/// A broker that dies before it served is started again later and later.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A connection that reads the shelf, or has read it and stays open to learn of the keeper's end.
#[derive(Debug)]
struct Reader {
    socket: OwnedFd,
    with_files: bool,
    after: Option<String>,
    done: bool,
}

/// A keeper.
#[derive(Debug)]
pub struct Keeper {
    socket: UnixDatagram,
    path: PathBuf,
    shelf: Shelf<OwnedFd>,
    readers: VecDeque<Reader>,
    incarnation: [u8; 16],
    /// The broker said that it serves.
    ready: bool,
    /// Brokers that were started.
    starts: u64,
    /// Tells when there is something to do; what it is, is found by looking at everything.
    poller: Poller,
    /// The next keeper, which takes everything over.
    heir: Option<Reader>,
    /// The next keeper has everything.
    is_replaced: bool,
    _lock: File,
}

/// How a keeper came to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// With its broker, which ended by itself.
    Broker(ExitStatus),
    /// Another keeper took everything over. The broker lives on.
    Replaced,
}

impl Keeper {
    /// Listens in a broker's directory, keeping at most `most` descriptors, or as many as the
    /// process may have.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] when another keeper is there, [`Error::System`] for what the system
    /// refuses.
    pub fn open(dir: &Path, most: Option<usize>) -> Result<Keeper> {
        place::prepare(dir)?;
        let most = most.unwrap_or_else(|| room(raise_file_limit()));
        let lock = lock::take_within(&dir.join(LOCK), TAKES_TO_START)?.ok_or(Error::refused(
            format!("another keeper is in {}", dir.display()),
            "use that one, take over from it with `--take-over`, or choose another directory",
        ))?;
        Keeper::begin(dir, Shelf::new(most), lock)
    }

    /// As [`open`](Keeper::open), and takes every descriptor over from the keeper that is in the
    /// directory, if one is. That keeper ends then, and its broker lives on.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] when this process may keep fewer descriptors than there are, and when the
    /// other keeper is of a version that hands nothing over: then that keeper goes on.
    /// [`Error::System`] for what the system refuses.
    pub fn take_over(dir: &Path, most: Option<usize>) -> Result<Keeper> {
        place::prepare(dir)?;
        let most = most.unwrap_or_else(|| room(raise_file_limit()));
        let mut shelf = Shelf::new(most);
        let path = dir.join(LOCK);
        if let Some(lock) = lock::take(&path)? {
            return Keeper::begin(dir, shelf, lock);
        }
        let refused = |why: String, remedy| Error::refused(why, remedy);
        let patience = match Depositor::new(&dir.join(SOCKET))?.take_over() {
            Ok(inventory) => {
                trace_point!("take_over.read");
                let count = inventory.files.len();
                for (name, file) in inventory.files {
                    if !shelf.store(name, file) {
                        return Err(refused(
                            format!(
                                "the keeper in {} has {count} descriptors, and this one may keep {most}",
                                dir.display()
                            ),
                            "raise `--most` or the limit of open files",
                        ));
                    }
                }
                let told = send(&inventory.leash, b"taken", &[]);
                // That it has gone meanwhile is told by its lock.
                told.map(drop)
                    .map_err(|e| Error::without_descriptors("telling the keeper before", e))?;
                trace_point!("take_over.told");
                TAKES_TO_END
            }
            // It has just ended, or does not know the question.
            Err(DepositError::Absent) => TAKES_TO_START,
            Err(error) => return Err(error.into()),
        };
        let lock = lock::take_within(&path, patience)?.ok_or_else(|| {
            refused(
                format!("the keeper in {} does not hand over: it is of an older version, or is handing over to another one", dir.display()),
                "end it and start this one: the broker gives it everything",
            )
        })?;
        Keeper::begin(dir, shelf, lock)
    }

    /// Listens with what it has.
    fn begin(dir: &Path, shelf: Shelf<OwnedFd>, lock: File) -> Result<Keeper> {
        let failed = |e: io::Error| {
            Error::system(
                "making the keeper's socket",
                "choose a shorter directory of this user",
                e,
            )
        };
        let (path, unfinished) = (dir.join(SOCKET), dir.join(".keeper.tmp"));
        remove(&unfinished).map_err(failed)?;
        let socket = UnixDatagram::bind(&unfinished).map_err(failed)?;
        fs::set_permissions(&unfinished, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        rustix::net::sockopt::set_socket_passcred(&socket, true).map_err(|e| failed(e.into()))?;
        socket.set_nonblocking(true).map_err(failed)?;
        // What a dead keeper left is replaced in one step, so nobody is refused while a keeper is
        // there.
        fs::rename(&unfinished, &path).map_err(failed)?;
        let poller = Poller::new()?;
        poller.add(socket.as_fd(), 0)?;
        let mut incarnation = [0; 16];
        rustix::rand::getrandom(&mut incarnation, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::system("getrandom", "allow getrandom in this sandbox", e))?;
        tracing::info!(
            dir = %dir.display(),
            most = shelf.most(),
            kept = shelf.len(),
            "the keeper listens"
        );
        Ok(Keeper {
            socket,
            path,
            shelf,
            readers: VecDeque::new(),
            incarnation,
            ready: false,
            starts: 0,
            poller,
            heir: None,
            is_replaced: false,
            _lock: lock,
        })
    }

    /// Returns the path of its socket, for `NOTIFY_SOCKET`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Serves a broker that another process starts, until another keeper takes over.
    pub fn run_alone(&mut self) {
        while !self.is_replaced {
            self.serve(None);
        }
    }

    /// Starts the broker and serves it until it ends by itself, or another keeper takes over; starts
    /// the broker again when it is killed or fails.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the broker cannot be started at all.
    pub fn run(&mut self, mut start: impl FnMut() -> Command) -> Result<End> {
        let mut pause = FIRST_PAUSE;
        loop {
            let mut command = start();
            command.env("NOTIFY_SOCKET", &self.path);
            command.env(STARTED_BY, Incarnation(self.incarnation).to_string());
            let remedy = "give the program and its arguments behind `--`";
            let mut child = command
                .spawn()
                .map_err(|e| Error::system("starting the broker", remedy, e))?;
            tracing::info!(
                pid = child.id(),
                kept = self.shelf.len(),
                "the broker is started"
            );
            self.ready = false;
            self.starts += 1;
            let Some(status) = self.serve_until_exit(&mut child)? else {
                return Ok(End::Replaced);
            };
            // 0: it was told to stop. 2: it was told nonsense, and would be again.
            if matches!(status.code(), Some(0 | 2)) {
                tracing::info!(%status, "the broker ended by itself");
                return Ok(End::Broker(status));
            }
            tracing::warn!(
                pid = child.id(),
                %status,
                kept = self.shelf.len(),
                "the broker died; it is started again"
            );
            pause = if self.ready {
                FIRST_PAUSE
            } else {
                (pause * 2).min(LONGEST_PAUSE)
            };
            self.serve_for(pause);
            if self.is_replaced {
                return Ok(End::Replaced);
            }
        }
    }

    /// Serves until the broker has ended, and returns how; nothing if another keeper took over.
    fn serve_until_exit(&mut self, child: &mut Child) -> Result<Option<ExitStatus>> {
        let failed = |e| Error::system("waiting for the broker", "use Linux 5.3 or later", e);
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pidfd = pidfd_open(pid.expect("a child has a number"), PidfdFlags::empty())
            .map_err(|e| failed(e.into()))?;
        self.poller.add(pidfd.as_fd(), 0)?;
        loop {
            self.serve(None);
            if self.is_replaced {
                return Ok(None);
            }
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok(Some(status));
            }
        }
    }

    /// Serves the socket alone for a while: for tests, and between two brokers.
    pub fn serve_for(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while let Some(left) = end
            .checked_duration_since(Instant::now())
            .filter(|left| !left.is_zero() && !self.is_replaced)
        {
            self.serve(Some(left));
        }
    }

    /// Waits once, and does what there is to do.
    fn serve(&mut self, timeout: Option<Duration>) {
        self.poller.wait(timeout);
        while self.heir.is_none() && self.hear() {}
        self.hand_over();
        let (shelf, incarnation, poller) = (&self.shelf, &self.incarnation, &self.poller);
        self.readers.retain_mut(|reader| {
            let stays = reader.go_on(shelf, incarnation, poller);
            if !stays {
                // The sender may have a copy: the watch does not end with this one.
                poller.remove(reader.socket.as_fd());
            }
            stays
        });
    }

    /// Goes on handing everything over, if another keeper asks for it.
    fn hand_over(&mut self) {
        let Some(heir) = &mut self.heir else {
            return;
        };
        let was_done = heir.done;
        let mut stays = heir.go_on(&self.shelf, &self.incarnation, &self.poller);
        if heir.done {
            if !was_done {
                self.poller.resume(heir.socket.as_fd(), 0);
                trace_point!("hand_over.written");
            }
            let (mut bytes, mut fds) = ([0; MOST_BYTES], Vec::new());
            match receive(&heir.socket, &mut bytes, &mut fds) {
                Ok(ReceiveOutcome::Packet(_)) => self.is_replaced = true,
                Ok(ReceiveOutcome::Empty) => {}
                Ok(ReceiveOutcome::HungUp) | Err(_) => stays = false,
            }
        }
        if self.is_replaced {
            tracing::info!(
                kept = self.shelf.len(),
                "another keeper has everything; this one ends"
            );
            trace_point!("hand_over.done");
        } else if !stays {
            tracing::warn!("the keeper that was to take over has gone; this one goes on");
            self.poller.remove(heir.socket.as_fd());
            self.heir = None;
            self.poller.resume(self.socket.as_fd(), 0);
        }
    }

    /// Takes one datagram, and says whether there was one.
    fn hear(&mut self) -> bool {
        let (mut bytes, mut fds) = ([0; MOST_BYTES], Vec::new());
        match receive_from(&self.socket, &mut bytes, &mut fds) {
            Ok((ReceiveOutcome::Packet(_), uid)) if uid != Some(rustix::process::geteuid()) => {
                tracing::warn!(?uid, "a stranger spoke to the keeper");
            }
            Ok((ReceiveOutcome::Packet(len), _)) => match parse(&bytes[..len], fds.len()) {
                Ok(request) => self.obey(request, fds.pop()),
                Err(why) => tracing::warn!(%why, "a datagram is passed over"),
            },
            Err(error) if is_lost(&error) => tracing::warn!(%error, "a datagram is lost"),
            Ok(_) | Err(_) => return false,
        }
        true
    }

    fn obey(&mut self, request: Request, fd: Option<OwnedFd>) {
        match (request, fd) {
            (Request::Store(name), Some(fd)) => {
                let taken = self.shelf.store(name, fd);
                let kept = self.shelf.len();
                if taken {
                    tracing::debug!(kept, "a descriptor is kept");
                } else {
                    tracing::warn!(kept, "a descriptor is closed: the keeper is full");
                }
                trace_point!("keeper.stored");
            }
            (Request::Remove(name), _) => {
                let closed = self.shelf.remove(&name).is_some();
                tracing::debug!(
                    name,
                    closed,
                    kept = self.shelf.len(),
                    "a descriptor is closed"
                );
                trace_point!("keeper.removed");
            }
            (Request::Has(names), Some(socket)) => {
                trace_point!("keeper.asked");
                self.say_which(&names, &socket);
                trace_point!("keeper.answered");
            }
            (request @ (Request::List | Request::Read), Some(socket)) => {
                if self.readers.len() >= MOST_READERS
                    && let Some(oldest) = self.readers.pop_front()
                {
                    self.poller.remove(oldest.socket.as_fd());
                }
                if let Err(error) = self.poller.add(socket.as_fd(), 0) {
                    return tracing::warn!(%error, "the shelf cannot be read by this descriptor");
                }
                self.poller.await_room(socket.as_fd(), 0);
                let with_files = request == Request::Read;
                self.readers.push_back(Reader {
                    socket,
                    with_files,
                    after: None,
                    done: false,
                });
                trace_point!("keeper.listed");
            }
            (Request::HandOver, Some(socket)) => {
                if let Err(error) = self.poller.add(socket.as_fd(), 0) {
                    return tracing::warn!(%error, "nothing can be handed over by this descriptor");
                }
                self.poller.await_room(socket.as_fd(), 0);
                // What comes meanwhile is not taken: it would be here, and not there.
                self.poller.pause(self.socket.as_fd(), 0);
                trace_point!("hand_over.begun");
                self.heir = Some(Reader {
                    socket,
                    with_files: true,
                    after: None,
                    done: false,
                });
            }
            (Request::Ready, _) => {
                self.ready = true;
                tracing::info!(kept = self.shelf.len(), "the broker serves");
                trace_point!("keeper.ready");
            }
            // It is passed by closing what came with it.
            (Request::Barrier, Some(barrier)) => drop(barrier),
            _ => {}
        }
    }
}

impl Keeper {
    /// Writes which of some names are kept, and how many in all. Both packets fit into a socket that
    /// nothing was written to.
    fn say_which(&self, names: &[String], socket: &OwnedFd) {
        let kept = names.iter().filter(|name| self.shelf.has(name));
        let text: String = kept.flat_map(|name| [name.as_str(), "\n"]).collect();
        let mut end = vec![b'.'];
        end.extend_from_slice(&self.incarnation);
        for number in [
            self.shelf.len() as u64,
            self.shelf.most() as u64,
            self.starts,
        ] {
            end.extend_from_slice(&number.to_le_bytes());
        }
        for packet in [text.as_bytes(), &end] {
            if !packet.is_empty() && send(socket, packet, &[]).is_err() {
                return;
            }
        }
    }
}

impl Reader {
    /// Writes as much as goes, and says whether the reader is still there.
    fn go_on(&mut self, shelf: &Shelf<OwnedFd>, incarnation: &[u8; 16], poller: &Poller) -> bool {
        while !self.done {
            let page: Vec<(&str, &OwnedFd)> =
                shelf.page(self.after.as_deref(), NAMES_A_PACKET).collect();
            let (mut text, mut fds) = (Vec::new(), Vec::new());
            for (name, file) in &page {
                text.extend_from_slice(name.as_bytes());
                text.push(b'\n');
                if self.with_files {
                    fds.push(file.as_fd());
                }
            }
            if page.is_empty() {
                text.push(b'.');
                text.extend_from_slice(incarnation);
            }
            match send(&self.socket, &text, &fds) {
                Ok(SendOutcome::Sent) => {}
                Ok(SendOutcome::Full) => return true,
                // Too many descriptors are on their way to the reader: it takes them as it reads.
                Err(e) if Errno::from_io_error(&e) == Some(Errno::TOOMANYREFS) => return true,
                Ok(SendOutcome::HungUp) | Err(_) => return false,
            }
            match page.last() {
                Some((last, _)) => self.after = Some((*last).to_owned()),
                None => {
                    self.done = true;
                    poller.pause(self.socket.as_fd(), 0);
                }
            }
        }
        !has_hung_up(&self.socket)
    }
}

/// Raises the limit of open files to what the system allows this process, and returns it.
pub fn raise_file_limit() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let current = if setrlimit(Resource::Nofile, raised).is_ok() {
        limit.maximum
    } else {
        limit.current
    };
    current.map_or(1 << 20, |limit| usize::try_from(limit).unwrap_or(1 << 20))
}

/// Returns how many of a process' descriptors the shelf may have: at least half of them.
fn room(files: usize) -> usize {
    files - SPARE.min(files / 2)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_few_descriptors_keeps_half_of_them() {
        assert_eq!(
            [0, 1, 256, 1024, 65_536].map(room),
            [0, 1, 128, 512, 65_024]
        );
    }
}
