//! Sharing: a fence, a grant, a descriptor.

use std::sync::Arc;
use std::time::Duration;

use gpu_api::{Access, Error, ParticipantId, Result};

use crate::gone::Gone;
use crate::producer::blocks::block::Block;
use crate::producer::core::Core;
use crate::producer::fences::fence::{Addressee, UNCAPTURED};
use crate::producer::fences::ticket_event::TicketEvent;
use crate::producer::grants::ledger::{Granted, Granting, Refusal};
use crate::producer::grants::slot_group::Terms;
use crate::producer::grants::ticket::Claims;
use crate::producer::roster::ledger_table::Leases;
use crate::producer::roster::peer::Peer;
use crate::producer::roster::place::place_of;
use crate::producer::roster::table::{find, seated};
use crate::stream::{Stream, advise};
use transport::os::clock::Tick;
use transport::shared::counter_file::CounterFile;
use transport::trace_point;
use transport::wire::descriptor::{Descriptor, Fence, Fields, GrantKind, Sealer};
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{Extent, TicketId, ToParticipant};

/// The addressee of a lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum To {
    /// A connected participant: no other can claim the lease, and its claim is one atomic
    /// operation.
    Participant(ParticipantId),
    /// The session's participants that claim first, up to a number of claims: for queues and
    /// broadcasts whose readers are not known. Each claim asks the producer.
    Ticket(Claims),
}

/// The producer's work after which the contents may be read.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum After<'a> {
    /// All of it is done: nothing is queued.
    Done,
    /// The work queued on this stream of the session's device at this moment; for the default
    /// stream of each thread (handle 2) on the calling thread's.
    Stream(&'a Stream),
}

/// How a lease is granted.
///
/// # Examples
///
/// ```
/// # use backend_host::{HostBackend, HostConfig};
/// # use gpu_api::{DeviceId, Gpu};
/// # let dir = tempfile::tempdir()?;
/// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// use std::time::Duration;
///
/// use ipc_rc::{After, Claims, Session, ShareOptions, To};
///
/// let session = Session::builder(gpu).socket(dir.path().join("s")).open()?;
/// let block = session.alloc(4096)?;
/// let mut shape = [0; 64];
/// shape[..8].copy_from_slice(&1024u64.to_le_bytes());
/// let options = ShareOptions::default().user(shape).time_to_live(Some(Duration::from_secs(5)));
/// let descriptor = block.share_with(To::Ticket(Claims::Once), After::Done, &options)?;
/// assert_eq!(descriptor.user()[..8], 1024u64.to_le_bytes());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ShareOptions {
    pub(crate) user: [u8; 64],
    pub(crate) time_to_live: Option<Option<Duration>>,
    access: Access,
}

impl Default for ShareOptions {
    fn default() -> ShareOptions {
        ShareOptions {
            user: [0; 64],
            time_to_live: None,
            access: Access::ReadWrite,
        }
    }
}

impl ShareOptions {
    /// Puts 64 user bytes into the descriptor: shape, dtype, frame number. [`Descriptor::user`]
    /// reads them.
    #[must_use]
    pub fn user(mut self, bytes: [u8; 64]) -> ShareOptions {
        self.user = bytes;
        self
    }

    /// Takes the grant back if it is unclaimed after this time; `None` never does. Without this
    /// call the session's own time to live holds.
    #[must_use]
    pub fn time_to_live(mut self, time: Option<Duration>) -> ShareOptions {
        self.time_to_live = Some(time);
        self
    }

    /// Grants the block to be read only: the participant maps it so that a write faults, and what
    /// it forwards is read-only too. What the device or the kernel enforces, and what is left to the
    /// participant, is in `SECURITY.md`.
    ///
    /// The share is [`Error::Unsupported`] for memory that other processes open by a handle, which
    /// is always writable, and on a device that maps nothing read-only (`Caps::read_only`). A
    /// participant of the producer's own process has the producer's address; there the library's
    /// own writes are refused, and no others.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// use ipc_rc::{After, Participant, Session, ShareOptions, Stream, To, Wait};
    ///
    /// let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// let reader = Participant::builder(gpu.clone()).connect(session.socket_path())?;
    /// let weights = session.alloc(4096)?;
    /// let options = ShareOptions::default().read_only();
    /// let descriptor = weights.share_with(To::Participant(reader.id()), After::Done, &options)?;
    /// let received = reader.claim(descriptor.as_bytes(), Wait::Host, None)?;
    /// assert!(received.is_read_only());
    /// assert!(Stream::create(&gpu)?.write(&received, &[1]).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn read_only(mut self) -> ShareOptions {
        self.access = Access::ReadOnly;
        self
    }
}

impl Core {
    /// Shares a part of a block: all of it, or what a participant forwards.
    #[inline]
    pub(crate) fn share(
        &self,
        block: &Arc<Block>,
        place: Extent,
        to: To,
        after: After<'_>,
        options: &ShareOptions,
    ) -> Result<Descriptor> {
        self.check_open()?;
        let place = self.place_with(options.access, block, place)?;
        let time_to_live = options.time_to_live.unwrap_or(self.facts.time_to_live);
        let now = Tick::now();
        let (named, sealer) = match to {
            To::Participant(id) => {
                // The fence comes first: if it cannot be queued, no descriptor may exist.
                let fence = match after {
                    After::Done => None,
                    After::Stream(stream) => {
                        let peer = self.roster.addressee(id)?;
                        let stream = stream.behind().map_err(|error| advise(error, UNCAPTURED))?;
                        block.note_use(stream, &self.fences);
                        let fence = self
                            .fences
                            .queue(&self.facts.gpu, stream, id, &peer.words)?;
                        // The thread has to notice when the context breaks before the value is
                        // written.
                        self.wakeups.thread.remind();
                        Some(fence)
                    }
                };
                let terms = Terms::new(now, time_to_live, options.access);
                let (lease, sealer) = self.grant_to(id, block, terms)?;
                (Named::Lease(id, lease, fence), sealer)
            }
            To::Ticket(claims) => {
                let point = match after {
                    After::Done => None,
                    After::Stream(stream) => Some(self.mark(block, stream)?),
                };
                return self.share_by_ticket((block, place), claims, point, options);
            }
        };
        if let Some(time) = time_to_live {
            self.watch_lapse(now.after(time));
        }
        trace_point!("share");
        Ok(self.describe(&sealer, place, named, &options.user))
    }

    /// Marks the work queued on a stream that touches a block.
    pub(crate) fn mark(&self, block: &Block, stream: &Stream) -> Result<Arc<TicketEvent>> {
        let stream = stream.behind().map_err(|error| advise(error, UNCAPTURED))?;
        block.note_use(stream, &self.fences);
        TicketEvent::mark(&self.facts.gpu, stream).map(Arc::new)
    }

    /// Shares with the participants that claim first, after a point of a stream's work.
    pub(crate) fn share_by_ticket(
        &self,
        (block, place): (&Arc<Block>, Extent),
        claims: Claims,
        point: Option<Arc<TicketEvent>>,
        options: &ShareOptions,
    ) -> Result<Descriptor> {
        self.check_open()?;
        let place = self.place_with(options.access, block, place)?;
        let time_to_live = options.time_to_live.unwrap_or(self.facts.time_to_live);
        let now = Tick::now();
        let ticket = self
            .tickets
            .issue((block, place), claims, point, now, time_to_live)?;
        if let Some(time) = time_to_live {
            self.watch_lapse(now.after(time));
        }
        trace_point!("share");
        Ok(self.describe(
            &self.ticket_sealer,
            place,
            Named::Ticket(ticket),
            &options.user,
        ))
    }

    /// Shares several blocks after one stream with one fence for each addressee.
    pub(crate) fn share_many<'u>(
        &self,
        grants: &[(&Arc<Block>, To)],
        user: impl Fn(usize) -> &'u [u8; 64],
        after: After<'_>,
        options: &ShareOptions,
    ) -> Result<Vec<Descriptor>> {
        self.check_open()?;
        let time_to_live = options.time_to_live.unwrap_or(self.facts.time_to_live);
        let now = Tick::now();
        let terms = Terms::new(now, time_to_live, options.access);
        // Before anything is queued or granted, as far as it can be.
        for (block, _) in grants {
            self.place_with(options.access, block, block.extent())?;
        }
        let mut point = None;
        let mut fences = None;
        if let After::Stream(stream) = after {
            let stream = stream.behind().map_err(|error| advise(error, UNCAPTURED))?;
            grants
                .iter()
                .for_each(|(block, _)| block.note_use(stream, &self.fences));
            if grants.iter().any(|(_, to)| matches!(to, To::Ticket(_))) {
                point = Some(Arc::new(TicketEvent::mark(&self.facts.gpu, stream)?));
            }
            fences = Some(self.fence_all(grants, stream)?);
            self.wakeups.thread.remind();
        }
        let mut descriptors = Vec::with_capacity(grants.len());
        let mut begun = self.begin_grants(grants);
        for (n, (block, to)) in grants.iter().enumerate() {
            let mut place = block.extent();
            place.region = place.region.with_access(options.access);
            let named = match *to {
                To::Participant(id) => {
                    let place = place_of(id);
                    let fence = fences.as_ref().and_then(|fences| fences[place]);
                    let ledger = begun.get_mut(place).and_then(Option::as_mut);
                    let lease =
                        ledger.and_then(|ledger| ledger.grant_sealed(id, block, terms).ok());
                    let lease = lease.map_or_else(
                        || {
                            // This waits for locks, and the tickets' table below too.
                            begun.clear();
                            self.grant_to(id, block, terms)
                        },
                        Ok,
                    );
                    lease.map(|(lease, sealer)| (Named::Lease(id, lease, fence), sealer))
                }
                To::Ticket(claims) => {
                    begun.clear();
                    self.tickets
                        .issue((block, place), claims, point.clone(), now, time_to_live)
                        .map(|ticket| (Named::Ticket(ticket), *self.ticket_sealer))
                }
            };
            match named {
                Ok((named, sealer)) => {
                    descriptors.push(self.describe(&sealer, place, named, user(n)));
                }
                Err(error) => {
                    // All or nothing. What somebody could have claimed meanwhile nobody has a
                    // descriptor of.
                    for ((block, _), descriptor) in grants.iter().zip(&descriptors) {
                        let _ = self.revoke(descriptor, Some(block));
                    }
                    return Err(error);
                }
            }
        }
        drop(begun);
        if let Some(time) = time_to_live {
            self.watch_lapse(now.after(time));
        }
        trace_point!("share");
        Ok(descriptors)
    }

    /// Locks a shard of each addressee's ledger, by place, as far as they are free, and reads what
    /// the first grant in each touches.
    ///
    /// An atomic operation waits for all loads before it. So what is in no near cache would come
    /// line by line while grants lock and unlock in turn; read in a loop without such operations it
    /// comes for all ledgers at once.
    fn begin_grants(
        &self,
        grants: &[(&Arc<Block>, To)],
    ) -> Vec<Option<Granting<'_, Arc<Block>, CounterFile>>> {
        let ledgers = &self.roster.ledgers;
        let mut begun = Vec::new();
        begun.resize_with(ledgers.used(), || None);
        for (_, to) in grants {
            let To::Participant(id) = to else { continue };
            let place = place_of(*id);
            if let Some(free @ None) = begun.get_mut(place) {
                *free = ledgers.get(place).and_then(Leases::begin);
            }
        }
        begun.iter().flatten().for_each(Granting::look_ahead);
        begun
    }

    /// Queues one value for every participant among the grants, and returns the fences by place.
    fn fence_all(
        &self,
        grants: &[(&Arc<Block>, To)],
        stream: &Stream,
    ) -> Result<Vec<Option<Fence>>> {
        let mut peers = self.roster.peers();
        let known = |peers: &[Option<Arc<Peer>>], to: &To| match to {
            To::Participant(id) => find(peers, *id).is_some(),
            To::Ticket(_) => true,
        };
        if !grants.iter().all(|(_, to)| known(&peers, to)) {
            self.roster.await_seating();
            peers = self.roster.peers();
        }
        let mut addressees: Vec<Addressee<'_>> = Vec::new();
        let mut seen = vec![false; peers.len()];
        for (_, to) in grants {
            let To::Participant(id) = *to else { continue };
            let peer = seated(&peers, id)?;
            if !std::mem::replace(&mut seen[place_of(id)], true) {
                addressees.push(Addressee {
                    id,
                    words: &peer.words,
                    fence: None,
                });
            }
        }
        self.fences
            .queue_many(&self.facts.gpu, stream, &mut addressees)?;
        let mut fences = vec![None; peers.len()];
        addressees
            .into_iter()
            .for_each(|to| fences[place_of(to.id)] = to.fence);
        Ok(fences)
    }

    /// Grants what a participant forwards, to the recipient that it names. Called by the session's
    /// thread alone.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the participant has no such lease, and as [`share`](Core::share).
    pub(crate) fn forward(&self, from: &Peer, wanted: &Wanted, to: To) -> Result<Descriptor> {
        let (block, access) = from
            .ledger
            .with_lease(wanted.lease, |block, access| (block.clone(), access))
            .ok_or(Error::invalid(
                "the lease to forward",
                "none of yours",
                "a lease that is held",
            ))?;
        let (place, all) = (wanted.place_in(&block), block.extent());
        let Some(place) = place else {
            let (offset, len) = wanted.part;
            return Err(Error::invalid(
                "the part to forward",
                format!(
                    "{len} bytes at offset {offset}, of a block of {} at {}",
                    all.len, all.offset
                ),
                "inside the block, and not empty",
            ));
        };
        // The forwarder has waited for the producer's work, and says that its own is done.
        self.share(
            &block,
            place,
            to,
            After::Done,
            &ShareOptions {
                user: wanted.user,
                time_to_live: None,
                access,
            },
        )
    }

    /// Grants a lease to the participant of this number. The ledger's lock alone is taken, unless
    /// its slots are all in use.
    #[inline]
    fn grant_to(&self, id: ParticipantId, block: &Arc<Block>, terms: Terms) -> Result<Granted> {
        let ledger = self.roster.ledgers.get(place_of(id));
        let ledger = ledger.ok_or(Gone::Participant(id))?;
        match ledger.grant_sealed(id, block, terms) {
            Ok(granted) => Ok(granted),
            Err(Refusal::Gone | Refusal::Full) => {
                self.grant(&self.roster.addressee(id)?, block, terms)
            }
        }
    }

    /// Grants a lease in a participant's own file.
    pub(crate) fn grant(
        &self,
        peer: &Arc<Peer>,
        block: &Arc<Block>,
        terms: Terms,
    ) -> Result<Granted> {
        let announce = |index, file: &CounterFile| {
            let message = ToParticipant::CounterFile {
                request: 0,
                index,
                slots: file.slot_count(),
            };
            if let Err(error) = self.roster.outbox.push(peer, &message, Some(file.fd())) {
                tracing::debug!(participant = %peer.id, %error, "a counter file is not announced");
            }
        };
        let retire = |ended: &mut _| {
            self.retire(ended);
        };
        let max_slots = self.facts.max_slots;
        peer.grant(block, terms, max_slots, announce, retire)
    }

    #[inline]
    fn describe(
        &self,
        sealer: &Sealer,
        place: Extent,
        named: Named,
        user: &[u8; 64],
    ) -> Descriptor {
        let (kind, participant, file, slot, generation, fence) = match named {
            Named::Lease(id, lease, fence) => (
                GrantKind::Addressed,
                id,
                lease.file,
                lease.slot,
                lease.generation,
                fence,
            ),
            Named::Ticket(ticket) => (
                GrantKind::Ticket,
                ParticipantId(0),
                0,
                ticket.number,
                ticket.generation,
                None,
            ),
        };
        let fields = Fields {
            backend: self.facts.backend,
            kind,
            device: self.facts.gpu.uuid(),
            session: self.facts.id,
            participant,
            file,
            slot,
            generation: generation.get(),
            region: place.region,
            offset: place.offset,
            len: place.len,
            fence,
        };
        sealer.encode(&fields, user)
    }
}

/// What a participant asks to forward.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// The lease that gives the right.
    pub lease: LeaseAddress,
    /// Where in its region the part begins, and its bytes.
    pub part: (u64, u64),
    pub user: [u8; 64],
}

impl Wanted {
    /// Returns where the part lies, if it is one of the block.
    fn place_in(&self, block: &Block) -> Option<Extent> {
        let ((offset, len), all) = (self.part, block.extent());
        let behind = offset.checked_sub(all.offset)?.checked_add(len)?;
        (len > 0 && behind <= all.len).then_some(Extent { offset, len, ..all })
    }
}

/// What a descriptor names.
enum Named {
    Lease(ParticipantId, LeaseAddress, Option<Fence>),
    Ticket(TicketId),
}
