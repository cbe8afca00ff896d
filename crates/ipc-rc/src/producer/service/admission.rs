//! The way in: from a connection to a participant.
//!
//! | step | what | when it fails |
//! |---|---|---|
//! | accept | the kernel identifies the process; one that is not allowed is told so, and nothing that it sent is read | the connection is closed |
//! | greet | the hello is read, with its descriptors | refused |
//! | prepare | version, vendor and device are checked; a counter file is made and registered. Nobody sees any of it | refused |
//! | seat | the welcome is sent, and the participant is in the table: one step for a thread that looks it up | [let go](Service::let_go) |
//!
//! The way out is [`Service::let_go`] for everybody, whatever went wrong. What another process
//! sent, and every connection, is [`Foreign`]: its close never keeps this thread.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, PoisonError};

use gpu_api::{Error, HostPtr, Result, WordPtr};

use crate::producer::notice::SessionNotice;
use crate::producer::roster::ledger_table::Leases;
use crate::producer::roster::peer::{Arrival, Peer};
use crate::producer::roster::place::{MOST_PARTICIPANTS, participant_id};
use crate::producer::service::state::{Greeting, Service, Watch};
use transport::os::closer::Foreign;
use transport::os::process;
use transport::os::socket::{self, Credentials, ReceiveOutcome};
use transport::shared::counter_file::{CounterFile, bytes_of};
use transport::trace_point;
use transport::wire::descriptor::{SealKey, Sealer};
use transport::wire::message::{
    DecodeError, MOST_BYTES, RefusalCode, ToParticipant, ToProducer, shown,
};
use zeroize::Zeroize;

/// Connections that have not said hello yet, at most.
const MOST_GREETINGS: usize = 256;

/// Connections accepted before the participants get their turn.
const ACCEPTS_A_TURN: usize = 64;

/// What a participant gets before anybody sees it.
#[derive(Debug)]
struct Prepared {
    arrival: Arrival,
    ledger: Arc<Leases>,
    file: Arc<CounterFile>,
    registered: Option<(HostPtr, WordPtr)>,
}

type Refused = (RefusalCode, String);

impl Service {
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTS_A_TURN {
            let Some(listener) = &self.listener else {
                return;
            };
            if self.closer.is_crowded() {
                // Each takes a descriptor until it is closed: those that come wait in the backlog.
                self.pause_listening();
                return;
            }
            match listener.accept() {
                Ok(Some(socket)) => self.take_in(socket),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    return;
                }
            }
        }
    }

    /// Takes in the connections that the application passed on.
    pub(super) fn accept_arrivals(&mut self) {
        let arrivals = std::mem::take(
            &mut *self
                .core
                .arrivals
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        arrivals.into_iter().for_each(|socket| self.take_in(socket));
    }

    /// Waits for a connection's hello, or refuses it before that.
    fn take_in(&mut self, socket: OwnedFd) {
        let socket = self.closer.guard(socket);
        let of = match self.may_connect(&socket) {
            Ok(of) => of,
            Err(refused) => return refuse(&socket, refused),
        };
        if self.greetings.len() >= MOST_GREETINGS {
            self.hang_up_on_a_silent_one();
        }
        match self.watch(socket.as_fd(), Watch::Greeting) {
            Ok(key) => drop(self.greetings.insert(key, Greeting { socket, of })),
            Err(error) => refuse(&socket, internal(&error)),
        }
    }

    /// Makes room for a connection: the process with the most silent connections loses its oldest.
    /// A participant says hello at once, so a silent process keeps out only itself.
    fn hang_up_on_a_silent_one(&mut self) {
        let mut silent: HashMap<Credentials, (usize, u64)> = HashMap::new();
        for (&key, greeting) in &self.greetings {
            let of = silent.entry(greeting.of).or_insert((0, key));
            of.0 += 1;
        }
        let Some((_, key)) = silent
            .into_values()
            .max_by_key(|&(count, oldest)| (count, u64::MAX - oldest))
        else {
            return;
        };
        // It may have spoken since epoll was asked.
        self.greet(key);
        if let Some(greeting) = self.greetings.remove(&key) {
            self.unwatch(key, greeting.socket.as_fd());
            tracing::warn!(
                pid = greeting.of.pid,
                "too many connections say nothing: the oldest is closed"
            );
        }
    }

    pub(super) fn greet(&mut self, key: u64) {
        let Some(greeting) = self.greetings.remove(&key) else {
            return;
        };
        let mut bytes = [0; MOST_BYTES];
        let mut fds = Vec::new();
        let socket = &greeting.socket;
        let len = match socket::receive_guarded(socket.as_fd(), &mut bytes, &self.closer, &mut fds)
        {
            Ok(ReceiveOutcome::Packet(len)) => len,
            Ok(ReceiveOutcome::Empty) => {
                self.greetings.insert(key, greeting);
                return;
            }
            Ok(ReceiveOutcome::HungUp) => return self.unwatch(key, socket.as_fd()),
            Err(error) => {
                self.unwatch(key, socket.as_fd());
                return refuse(socket, unreceived(error));
            }
        };
        match ToProducer::decode(&bytes[..len], fds.len()) {
            Ok(ToProducer::Inspect { request, from }) => {
                let len = self.core.report(request, from).encode(&mut bytes);
                // What finds no room is asked for again.
                let _ = socket::send(socket.as_fd(), &bytes[..len], &[]);
                self.greetings.insert(key, greeting);
            }
            Ok(ToProducer::TakeSnapshot { request }) => {
                self.unwatch(key, socket.as_fd());
                // The last of its connection: who asks again and reads nothing must not pile files
                // up.
                let (answer, file) = self.core.snapshot(request);
                let len = answer.encode(&mut bytes);
                let file: Vec<_> = file.iter().map(AsFd::as_fd).collect();
                let _ = socket::send(socket.as_fd(), &bytes[..len], &file);
            }
            said => match self.prepare(said, fds) {
                Ok(prepared) => self.admit(key, greeting.socket, prepared),
                Err(refused) => {
                    self.unwatch(key, socket.as_fd());
                    refuse(socket, refused);
                }
            },
        }
    }

    fn may_connect(&self, socket: &Foreign) -> Result<Credentials, Refused> {
        let of = socket::credentials(socket.as_fd())
            .map_err(|e| (RefusalCode::Failed, e.to_string()))?;
        if of.uid == rustix::process::geteuid().as_raw() || self.allowed.contains(&of.uid) {
            return Ok(of);
        }
        Err((
            RefusalCode::User,
            format!(
                "uid {} is not allowed; add it with SessionBuilder::allow_uids",
                of.uid
            ),
        ))
    }

    /// Checks a hello, and makes what the participant needs. After an error nothing was made.
    fn prepare(
        &mut self,
        said: Result<ToProducer, DecodeError>,
        fds: Vec<Foreign>,
    ) -> Result<Prepared, Refused> {
        let (backend, device, name) = match said {
            Ok(ToProducer::Hello {
                backend,
                device,
                name,
                ..
            }) => (backend, device, name),
            Ok(_) => {
                return Err((
                    RefusalCode::Protocol,
                    "the first message must be Hello".into(),
                ));
            }
            Err(error @ DecodeError::Version { .. }) => {
                return Err((RefusalCode::Version, error.to_string()));
            }
            Err(error) => return Err((RefusalCode::Protocol, error.to_string())),
        };
        let core = &self.core;
        if backend != core.facts.gpu.kind() || device != core.facts.gpu.uuid() {
            let why = format!(
                "the participant opened {backend} device {device}, the session is on {} device {}",
                core.facts.gpu.kind(),
                core.facts.gpu.uuid()
            );
            return Err((RefusalCode::Device, why));
        }
        let Some(place) = core.roster.vacant_place() else {
            return Err((
                RefusalCode::Limit,
                format!("the session has {MOST_PARTICIPANTS} participants already"),
            ));
        };
        for fd in &fds {
            if !process::is_pidfd(fd.as_fd()).map_err(|e| internal(&e))? {
                return Err((
                    RefusalCode::Protocol,
                    "a descriptor of the hello is not a pidfd".into(),
                ));
            }
        }
        let mut fds = fds.into_iter();
        let Some(pidfd) = fds.next() else {
            return Err((
                RefusalCode::Protocol,
                "the hello came without a pidfd".into(),
            ));
        };
        let pid = process::pid_of(pidfd.as_fd()).map_err(|e| internal(&e))?;
        let id = participant_id(self.next_serial, place);
        let key = SealKey::random().map_err(|e| internal(&e))?;
        let arrival = Arrival {
            id,
            pid,
            name: if name.is_empty() {
                process::command_of(pid)
            } else {
                shown(&name)
            },
            local: process::same_process(pidfd.as_fd()).map_err(|e| internal(&e))?,
            sealer: Sealer::new(&key, &core.facts.names_for(id)),
            key,
            pidfd,
            descendants: fds.collect(),
        };
        let file =
            Arc::new(CounterFile::create(Leases::next_file_slots(0)).map_err(|e| internal(&e))?);
        let registered = if core.facts.gpu.caps().stream_writes {
            // SAFETY: `register_words` asks for bytes that stay mapped until `unregister_words`:
            // the peer keeps the file, and its registrations are ended before the peer goes, or
            // leaked with it.
            let words = unsafe {
                core.facts
                    .gpu
                    .backend()
                    .register_words(file.start(), file.bytes())
            };
            Some((file.start(), words.map_err(|e| internal(&e))?))
        } else {
            None
        };
        self.next_serial += 1;
        Ok(Prepared {
            arrival,
            ledger: self.core.roster.ledgers.reserve(place),
            file,
            registered,
        })
    }

    /// Seats a participant whose hello was good, or lets it go again.
    fn admit(&mut self, key: u64, socket: Foreign, prepared: Prepared) {
        let Prepared {
            arrival,
            ledger,
            file,
            registered,
        } = prepared;
        let (id, pid) = (arrival.id, arrival.pid);
        // From here on there is something to let go of.
        let peer = Arc::new(Peer::new(
            arrival,
            &self.core.facts.gpu,
            socket,
            ledger,
            &file,
            registered,
        ));
        self.watches.insert(key, Watch::Socket(id));
        if let Err(error) = self.seat(&peer, &file) {
            refuse(&peer.socket, internal(&error));
            self.let_go(&peer);
            return;
        }
        trace_point!("welcome");
        tracing::debug!(participant = %id, pid, name = %peer.name, "a participant is connected");
        self.core
            .notices
            .push(SessionNotice::Joined { participant: id });
        self.core.wakeups.announce_change();
    }

    /// Welcomes a participant and puts it into the table. After an error it is in no table.
    fn seat(&mut self, peer: &Arc<Peer>, file: &Arc<CounterFile>) -> Result<()> {
        let id = peer.id;
        self.watch(peer.pidfd.as_fd(), Watch::Process(id))?;
        for (n, descendant) in peer.descendants.iter().enumerate() {
            self.watch(descendant.as_fd(), Watch::Descendant(id, n))?;
        }
        debug_assert!(file.bytes() == bytes_of(file.slot_count()));
        let message = ToParticipant::Welcome {
            session: self.core.facts.id,
            participant: id,
            pid: std::process::id(),
            slots: file.slot_count(),
            max_slots: self.core.facts.max_slots,
            key: peer.key.clone(),
            ticket_key: self.core.facts.ticket_key.clone(),
        };
        let mut bytes = [0; MOST_BYTES];
        let len = message.encode(&mut bytes);
        let seated = self.core.roster.seat(peer, || {
            match socket::send(
                peer.socket.as_fd(),
                &bytes[..len],
                &[self.own_pidfd.as_fd(), file.fd()],
            ) {
                Ok(socket::SendOutcome::Sent) => Ok(()),
                Ok(_) => Err(Error::ParticipantGone { participant: id }),
                Err(e) => Err(Error::system(
                    "sendmsg",
                    "raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files",
                    e,
                )),
            }
        });
        // Keys went with it.
        bytes[..len].zeroize();
        seated
    }
}

/// Says why a participant's side failed here. The cause goes along: the other side has no other way
/// to it.
fn internal(error: &Error) -> Refused {
    let cause =
        std::error::Error::source(error).map_or(String::new(), |cause| format!(": {cause}"));
    (RefusalCode::Failed, format!("{error}{cause}"))
}

/// Says why a hello did not come in: it is none, or no descriptor is left for those that it brings.
fn unreceived(error: io::Error) -> Refused {
    match error.kind() {
        io::ErrorKind::InvalidData => (RefusalCode::Protocol, error.to_string()),
        _ => internal(&Error::system(
            "recvmsg",
            "raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files",
            error,
        )),
    }
}

/// Tells a refused process why. An error is ignored: the process is gone.
fn refuse(socket: &Foreign, (code, why): Refused) {
    let pid = socket::credentials(socket.as_fd()).map_or(0, |of| of.pid);
    tracing::warn!(pid, %why, "a participant is refused");
    let mut bytes = [0; MOST_BYTES];
    let len = ToParticipant::Refused { code, why }.encode(&mut bytes);
    let _ = socket::send(socket.as_fd(), &bytes[..len], &[]);
}
