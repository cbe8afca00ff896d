//! The carrier: does what its gateway asks, and ends with it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::memory::{Access, Mapped, Retired};
use super::packet::{Ask, Packet, Said, receive, send};
use super::{SLOT, SLOTS, cage};
use crate::error::{Error, Result};
use crate::transport::{
    Pair, Peer, Place, Progress, Registration, RemoteSpan, Span, Transfer, Transport,
};

/// How often reads are looked at: their bytes move when they are.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000,
};
/// For so long after something has happened without a pause.
const SPIN: Duration = Duration::from_micros(200);

/// What the carrier has.
struct Worker {
    engine: Arc<dyn Transport>,
    socket: OwnedFd,
    slots: Option<(Mapped, Box<dyn Registration>)>,
    lent: BTreeMap<u64, Lent>,
    peers: BTreeMap<u64, Box<dyn Peer>>,
    reads: Vec<(u64, Box<dyn Transfer>)>,
    retired: Retired,
}

struct Lent {
    memory: Vec<Mapped>,
    registration: Box<dyn Registration>,
}

/// Carries for the process at the other end of standard input, until that ends: with the engine that
/// `start` starts, whose library is in one of `folders`, caged, and as this user where the system
/// allows. No other thread may run yet.
///
/// # Errors
///
/// What keeps the engine from starting; the other end is told.
pub fn run(
    user: Option<u32>,
    folders: &[PathBuf],
    start: impl FnOnce() -> Result<Arc<dyn Transport>>,
) -> Result<()> {
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3);
    let socket = socket.map_err(|e| Error::Unavailable {
        what: "the socket of a carrier".into(),
        why: e.to_string(),
        remedy: "a gateway starts it, and nobody else",
    })?;
    let mut lacks = cage::hide_files(folders);
    // Before the rest of the cage: it loads libraries, and opens devices.
    let started = start().and_then(|engine| {
        lacks.extend(cage::enter(user)?);
        Ok((engine, lacks))
    });
    let (engine, lacks) = match started {
        Ok(started) => started,
        Err(error) => {
            let failed = Packet::plain(0, Said::Failed(error.to_string()));
            // Who has gone is not told.
            let _ = send(socket.as_fd(), &failed);
            return Err(error);
        }
    };
    let mut worker = Worker {
        engine,
        socket,
        slots: None,
        lent: BTreeMap::new(),
        peers: BTreeMap::new(),
        reads: Vec::new(),
        retired: Retired::default(),
    };
    let ended = worker.serve(lacks);
    if let Err(error) = &ended {
        tracing::warn!(%error, "the carrier ends");
    }
    // Reads may be under way, and no destructor may unmap what they write to.
    // SAFETY: `_exit` ends the process, and returns to nobody.
    unsafe { libc::_exit(i32::from(ended.is_err())) }
}

impl Worker {
    fn serve(&mut self, lacks: Vec<String>) -> std::io::Result<()> {
        let mut quiet = Instant::now();
        let mut lacks = Some(lacks);
        loop {
            let pause = match self.reads.is_empty() {
                true => None,
                false if quiet.elapsed() < SPIN => Some(Timespec::default()),
                false => Some(LOOK),
            };
            match poll(
                &mut [PollFd::new(&self.socket, PollFlags::IN)],
                pause.as_ref(),
            ) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => {
                    if !self.hear(&mut lacks)? {
                        return Ok(());
                    }
                    quiet = Instant::now();
                }
                Err(error) => return Err(error.into()),
            }
            if self.look()? {
                quiet = Instant::now();
            }
        }
    }

    /// Does what was asked for. Says whether there is anybody who asks.
    fn hear(&mut self, lacks: &mut Option<Vec<String>>) -> std::io::Result<bool> {
        loop {
            let packet = match receive::<Ask>(self.socket.as_fd(), true, false) {
                Ok(Some(packet)) => packet,
                Ok(None) => return Ok(false),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            };
            let number = packet.number;
            let (said, attached) = match self.act(packet, lacks) {
                Ok(Some(answer)) => answer,
                Ok(None) => continue,
                Err(why) => (Said::Failed(why), Vec::new()),
            };
            self.say(Packet {
                attached,
                ..Packet::plain(number, said)
            })?;
        }
    }

    fn say(&self, packet: Packet<Said>) -> std::io::Result<()> {
        send(self.socket.as_fd(), &packet).or_else(|error| match error.kind() {
            // Too long to be said.
            std::io::ErrorKind::Other => {
                let failed = Said::Failed(format!("an answer: {error}"));
                send(self.socket.as_fd(), &Packet::plain(packet.number, failed))
            }
            _ => Err(error),
        })
    }

    /// Does one thing, and returns what is to be said.
    fn act(
        &mut self,
        packet: Packet<Ask>,
        lacks: &mut Option<Vec<String>>,
    ) -> std::result::Result<Option<(Said, Vec<u8>)>, String> {
        let plain = |said| Ok(Some((said, Vec::new())));
        let text = |error: Error| error.to_string();
        let number = packet.number;
        match packet.body {
            Ask::Slots(bytes) => {
                let file = packet.files.first().ok_or("no descriptor of slots")?;
                let memory = self.map(file.as_fd(), bytes, Access::ReadWrite)?;
                let span = [span(&memory, bytes)];
                // SAFETY: `register`: the slots are mapped until this process ends.
                let registration = unsafe { self.engine.register(&span) }.map_err(text)?;
                self.slots = Some((memory, registration));
                plain(Said::Ready(lacks.take().unwrap_or_default()))
            }
            Ask::Lend(bytes) => {
                if bytes.len() != packet.files.len() {
                    return Err("as many descriptors as ranges are wanted".into());
                }
                let map = |(file, &bytes): (&OwnedFd, &u64)| {
                    self.map(file.as_fd(), bytes, Access::ReadOnly)
                };
                let memory: Vec<Mapped> = packet
                    .files
                    .iter()
                    .zip(&bytes)
                    .map(map)
                    .collect::<std::result::Result<_, _>>()?;
                let spans: Vec<Span> = memory
                    .iter()
                    .zip(&bytes)
                    .map(|(one, &bytes)| span(one, bytes))
                    .collect();
                // SAFETY: `register`: the memory is mapped until the registration is dropped, and
                // zeroes are after that.
                let registration = unsafe { self.engine.register(&spans) }.map_err(text)?;
                self.lent.insert(
                    number,
                    Lent {
                        memory,
                        registration,
                    },
                );
                plain(Said::Lent(spans.iter().map(|span| span.address).collect()))
            }
            Ask::Metadata(lent) => {
                let number = |one: &u64| {
                    let lent = self.lent.get(one).ok_or("the lending has ended")?;
                    Ok::<_, String>(lent.registration.number())
                };
                let numbers: Vec<u64> = lent
                    .iter()
                    .map(number)
                    .collect::<std::result::Result<_, _>>()?;
                let metadata = self.engine.metadata(&numbers).map_err(text)?;
                Ok(Some((Said::Metadata, metadata)))
            }
            Ask::End(lent) => {
                if let Some(Lent {
                    memory,
                    registration,
                }) = self.lent.remove(&lent)
                {
                    drop(registration);
                    memory.into_iter().for_each(|one| self.retired.retire(one));
                }
                Ok(None)
            }
            Ask::Load => {
                let peer = self.engine.load_peer(&packet.attached).map_err(text)?;
                self.peers.insert(number, peer);
                plain(Said::Loaded)
            }
            Ask::Forget(peer) => {
                // One that is read from goes when those reads have.
                self.peers.remove(&peer);
                Ok(None)
            }
            Ask::Read {
                peer,
                from,
                bytes,
                at,
            } => {
                let read = self.read(peer, from, bytes, at)?;
                self.reads.push((number, read));
                Ok(None)
            }
        }
    }

    fn map(
        &self,
        file: BorrowedFd<'_>,
        bytes: u64,
        access: Access,
    ) -> std::result::Result<Mapped, String> {
        let has = rustix::fs::fstat(file).map(|stat| stat.st_size.cast_unsigned());
        match has {
            // A read behind its end would end this process.
            Ok(has) if has < bytes => Err(format!("a file of {has} bytes for {bytes}")),
            Ok(_) => Mapped::map(file, bytes, access).map_err(|e| format!("mmap: {e}")),
            Err(error) => Err(format!("fstat: {error}")),
        }
    }

    fn read(
        &self,
        peer: u64,
        from: u64,
        bytes: u64,
        at: u64,
    ) -> std::result::Result<Box<dyn Transfer>, String> {
        let (slots, _) = self.slots.as_ref().ok_or("there are no slots")?;
        let peer = self.peers.get(&peer).ok_or("the peer was forgotten")?;
        if bytes == 0 || bytes > SLOT || !at.is_multiple_of(SLOT) || at / SLOT >= SLOTS as u64 {
            return Err(format!("{bytes} bytes at {at} are in no slot"));
        }
        let (place, address) = (Place::Host, slots.at(at) as u64);
        let pair = Pair {
            from: RemoteSpan {
                address: from,
                bytes,
                place,
            },
            to: Span {
                address,
                bytes,
                place,
            },
        };
        // SAFETY: `Peer::read`: the slots stay mapped until this process ends, and the other end
        // uses one again when its read was answered.
        unsafe { peer.read(&[pair]) }.map_err(|error| match error {
            Error::Transfer { why } => why,
            other => other.to_string(),
        })
    }

    /// Takes reads further, and says whether one has ended.
    fn look(&mut self) -> std::io::Result<bool> {
        let mut ended = Vec::new();
        self.reads.retain_mut(|(number, transfer)| {
            let said = match transfer.poll() {
                Ok(Progress::Running { .. }) => return true,
                Ok(Progress::Done) => Said::Read,
                Err(Error::Transfer { why }) => Said::Failed(why),
                Err(other) => Said::Failed(other.to_string()),
            };
            ended.push((*number, said));
            false
        });
        let some = !ended.is_empty();
        for (number, said) in ended {
            self.say(Packet::plain(number, said))?;
        }
        Ok(some)
    }
}

fn span(memory: &Mapped, bytes: u64) -> Span {
    Span {
        address: memory.at(0) as u64,
        bytes,
        place: Place::Host,
    }
}
