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

use std::os::fd::AsFd;
use std::sync::Arc;

use gpu_api::lock::Acquire;
use gpu_api::{BackendKind, DeviceUuid, HostPtr, ParticipantId, Result, WordPtr};

use crate::producer::notice::SessionNotice;
use crate::producer::roster::ledger_table::Leases;
use crate::producer::roster::peer::{Arrival, Peer};
use crate::producer::roster::place::{MOST_PARTICIPANTS, participant_id};
use crate::producer::service::state::Service;
use transport::os::closer::Foreign;
use transport::os::process;
use transport::os::socket;
use transport::server::{Door, First, Greeting, Newcomer, Proof, Refused, Seat, Server, failed};
use transport::shared::counter_file::CounterFile;
use transport::trace_point;
use transport::wire::descriptor::{SealKey, Sealer};
use transport::wire::message::{MOST_BYTES, RefusalCode, ToParticipant, ToProducer, shown};
use zeroize::Zeroize;

/// What a participant gets before any thread sees it.
#[derive(Debug)]
pub(crate) struct Prepared {
    arrival: Arrival,
    ledger: Arc<Leases>,
    file: Arc<CounterFile>,
    registered: Option<(HostPtr, WordPtr)>,
}

impl Server for Service {
    type Id = ParticipantId;
    type Said = ToProducer;
    type Prepared = Prepared;
    const TAKES_FDS: bool = true;

    fn door(&mut self) -> &mut Door<ParticipantId> {
        &mut self.door
    }

    fn seat(&self, id: ParticipantId) -> Option<Arc<Seat>> {
        Some(self.core.roster.find(id)?.seat.clone())
    }

    fn write_refusal((code, why): Refused, packet: &mut [u8; MOST_BYTES]) -> usize {
        ToParticipant::Refused { code, why }.encode(packet)
    }

    fn greet(
        &mut self,
        from: &Greeting,
        said: ToProducer,
        fds: Vec<Foreign>,
    ) -> Result<First<Prepared>, Refused> {
        let mut bytes = [0; MOST_BYTES];
        match said {
            ToProducer::Inspect { request, from: at } => {
                let len = self.core.report(request, at).encode(&mut bytes);
                // What finds no room is asked for again.
                let _ = socket::send(from.socket.as_fd(), &bytes[..len], &[]);
                Ok(First::Stays)
            }
            ToProducer::TakeSnapshot { request } => {
                // The last of its connection: who asks again and reads nothing must not pile files
                // up.
                let (answer, file) = self.core.snapshot(request);
                let len = answer.encode(&mut bytes);
                let file: Vec<_> = file.iter().map(AsFd::as_fd).collect();
                let _ = socket::send(from.socket.as_fd(), &bytes[..len], &file);
                Ok(First::Ends)
            }
            ToProducer::Hello {
                backend,
                device,
                sign,
                name,
                ..
            } => self
                .prepare(backend, device, sign, name, fds)
                .map(First::Seat),
            _ => Err((
                RefusalCode::Protocol,
                "the first message must be Hello".into(),
            )),
        }
    }

    /// Seats a participant whose hello was good, or lets it go again.
    fn admit(&mut self, key: u64, socket: Foreign, prepared: Prepared) {
        let Prepared {
            arrival,
            ledger,
            file,
            registered,
        } = prepared;
        // From here on there is something to let go of.
        let id = arrival.id;
        let gpu = &self.core.facts.gpu;
        let peer = Arc::new(Peer::new(arrival, socket, gpu, ledger, &file, registered));
        if let Err(error) = self.welcome(key, &peer, &file) {
            self.refuse(&peer.seat.socket, failed(&error));
            self.let_go(&peer);
            return;
        }
        trace_point!("welcome");
        tracing::debug!(participant = %id, pid = peer.seat.pid, name = %peer.name, "a participant is connected");
        self.core
            .notices
            .push(SessionNotice::Joined { participant: id });
        self.core.wakeups.announce_change();
    }

    fn obey(
        &mut self,
        id: ParticipantId,
        said: ToProducer,
        fds: Vec<Foreign>,
    ) -> Result<(), &'static str> {
        let Some(peer) = self.core.roster.find(id) else {
            return Ok(());
        };
        self.answer(&peer, said, fds)
    }

    fn silenced(&mut self, id: ParticipantId) {
        if let Some(peer) = self.core.roster.find(id) {
            self.close(&peer);
        }
    }

    fn noted(&mut self, id: ParticipantId, proof: Proof) {
        self.note_departure(id, proof);
    }
}

impl Service {
    /// Takes in the connections that the application passed on.
    pub(super) fn accept_arrivals(&mut self) {
        let arrivals = std::mem::take(&mut *self.core.arrivals.acquire());
        arrivals
            .into_iter()
            .for_each(|socket| self.take_over(socket));
    }

    /// Checks a hello, and makes what the participant needs. After an error nothing was made.
    fn prepare(
        &mut self,
        backend: BackendKind,
        device: DeviceUuid,
        sign: u32,
        name: String,
        fds: Vec<Foreign>,
    ) -> Result<Prepared, Refused> {
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
        let newcomer = Newcomer::of(fds)?;
        let id = participant_id(self.next_serial, place);
        let key = SealKey::random().map_err(|e| failed(&e))?;
        let file =
            Arc::new(CounterFile::create(Leases::next_file_slots(0)).map_err(|e| failed(&e))?);
        // SAFETY: `register` asks for a file that stays mapped until `unregister_words`: the peer
        // keeps the file, and its registrations are ended before the peer goes, or leaked with it.
        let words = unsafe { file.register(&core.facts.gpu) }.map_err(|e| failed(&e))?;
        let arrival = Arrival {
            id,
            name: if name.is_empty() {
                process::command_of(newcomer.pid)
            } else {
                shown(&name)
            },
            sealer: Sealer::new(&key, &core.facts.names_for(id)),
            key,
            newcomer,
            sign,
        };
        self.next_serial += 1;
        Ok(Prepared {
            arrival,
            ledger: self.core.roster.ledgers.reserve(place),
            registered: words.map(|words| (file.start(), words)),
            file,
        })
    }

    /// Welcomes a participant and puts it into the table. After an error it is in no table.
    fn welcome(&mut self, key: u64, peer: &Arc<Peer>, file: &Arc<CounterFile>) -> Result<()> {
        let id = peer.id;
        self.door.seat(key, id, &peer.seat)?;
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
            self.door.welcome(&peer.seat, &bytes[..len], file.fd())
        });
        // Keys went with it.
        bytes[..len].zeroize();
        seated
    }
}
