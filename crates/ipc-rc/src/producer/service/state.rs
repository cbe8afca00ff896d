//! The state of the session's thread: what it waits for, and participants that are joining or
//! leaving.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu_api::{ParticipantId, RegionId, Result};

use crate::gpu_event::GpuEvent;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::core::Core;
use crate::producer::fences::ticket_event::TicketStreams;
use crate::producer::roster::peer::Peer;
use transport::os::blocking::Blocking;
use transport::os::socket::Listener;
use transport::server::Door;

/// The shortest and the longest time between two looks at leases.
pub(super) const POLL: (Duration, Duration) =
    (Duration::from_micros(50), Duration::from_millis(10));

/// The thread's state.
#[derive(Debug)]
pub(crate) struct Service {
    pub(super) core: Arc<Core>,
    pub(super) door: Door<ParticipantId>,
    /// When the session was seen to be closing.
    pub(super) closed_at: Option<Instant>,
    /// Streams that wait for tickets' events.
    pub(super) ticket_streams: TicketStreams,
    pub(super) next_serial: u64,
    pub(super) poll: Duration,
    /// Asked whether the context works. Made at the start: that one cannot be made later says
    /// nothing.
    pub(super) probe: GpuEvent,
    pub(super) broken: bool,
    /// A mapping has gone since the last look.
    pub(super) unmapped: bool,
    pub(super) blocking: Blocking,
    /// Participants that are gone but into whose words a stream of ours may still write.
    pub(super) leaving: Vec<Arc<Peer>>,
    pub(super) asked: Vec<ParticipantId>,
    /// Mapped regions of returned tokens, that participants were asked to unmap.
    pub(super) wanted: Vec<RegionId>,
}

impl Service {
    /// Makes the state.
    pub fn new(core: Arc<Core>, listener: Listener, allowed: Vec<u32>) -> Result<Service> {
        let listener = Arc::new(listener);
        core.life.listens_on(&listener);
        Ok(Service {
            door: Door::new(listener, core.wakeups.thread.fd(), allowed)?,
            closed_at: None,
            ticket_streams: TicketStreams::default(),
            next_serial: 1,
            poll: POLL.0,
            probe: GpuEvent::new(&core.facts.gpu)?,
            broken: false,
            unmapped: false,
            blocking: Blocking::default(),
            leaving: Vec::new(),
            asked: Vec::new(),
            wanted: Vec::new(),
            core,
        })
    }

    /// Grants nothing more, and takes unclaimed grants back.
    pub(super) fn close(&self, peer: &Arc<Peer>) {
        let mut out = ReclaimedBlocks::new();
        peer.close(&mut out);
        self.core
            .tallies
            .revoked
            .fetch_add(out.len() as u64, Ordering::Relaxed);
        self.core.retire(&mut out);
        self.core.wakeups.announce_change();
    }
}
