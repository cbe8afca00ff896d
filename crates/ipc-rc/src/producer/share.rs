//! Sharing: a fence, a grant, a descriptor.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpu_api::{Error, ParticipantId, Result};

use crate::clock::Tick;
use crate::descriptor::{Descriptor, Fields, GrantKind};
use crate::message::ToParticipant;
use crate::producer::block::Block;
use crate::producer::core::Core;
use crate::producer::ledger::Entry;
use crate::producer::peer::Peer;
use crate::slot::Generation;
use crate::step::step;
use crate::stream::Stream;

/// Whom a lease is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum To {
    /// A participant that is connected: nobody else can claim it.
    Participant(ParticipantId),
}

/// After which work of the producer the contents may be read.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum After<'a> {
    /// All of it is done: nothing is queued.
    Done,
    /// What is queued on this stream at this moment.
    Stream(&'a Stream),
}

/// How a lease is granted.
#[derive(Clone, Copy, Debug)]
pub struct ShareOptions {
    user: [u8; 64],
    time_to_live: Option<Option<Duration>>,
}

impl Default for ShareOptions {
    fn default() -> ShareOptions {
        ShareOptions { user: [0; 64], time_to_live: None }
    }
}

impl ShareOptions {
    /// Puts 64 bytes of the user's own into the descriptor: shape, dtype, frame number.
    #[must_use]
    pub fn user(mut self, bytes: [u8; 64]) -> ShareOptions {
        self.user = bytes;
        self
    }

    /// Takes the grant back if nobody has claimed it after this time; `None` never does. Without this call the
    /// session's own time to live holds.
    #[must_use]
    pub fn time_to_live(mut self, time: Option<Duration>) -> ShareOptions {
        self.time_to_live = Some(time);
        self
    }
}

impl Core {
    pub(crate) fn share(
        &self,
        block: &Arc<Block>,
        to: To,
        after: After<'_>,
        options: &ShareOptions,
    ) -> Result<Descriptor> {
        self.check_open()?;
        let To::Participant(id) = to;
        let peers = self.peers.load();
        let peer = find(&peers, id).ok_or(Error::ParticipantGone { participant: id })?;
        if peer.gone.load(Ordering::Relaxed) {
            return Err(Error::ParticipantGone { participant: id });
        }
        // The fence comes first: if it cannot be queued, no descriptor may exist.
        let fence = match after {
            After::Done => None,
            After::Stream(stream) => {
                block.note_use(stream);
                Some(self.fences.queue(&self.gpu, stream, id, &peer.words)?)
            }
        };
        if fence.is_some() {
            self.waker.nudge();
        }
        let time_to_live = options.time_to_live.unwrap_or(self.time_to_live);
        let entry = peer.grant(block, Tick::now(), time_to_live, self.max_slots, |index, file| {
            self.outbox.push(peer, &ToParticipant::CounterFile { index, slots: file.slot_count() }, Some(file.fd()))
        })?;
        step!("share");
        let fields = Fields {
            backend: self.gpu.kind(),
            kind: GrantKind::Addressed,
            device: self.gpu.uuid(),
            session: self.id,
            participant: id,
            file: entry.file,
            slot: entry.slot,
            generation: entry.generation.get(),
            region: block.region().id(),
            offset: block.offset(),
            len: block.len(),
            fence,
        };
        Ok(Descriptor::encode(&fields, &options.user))
    }

    pub(crate) fn cancel(&self, block: &Arc<Block>, descriptor: &Descriptor) -> Result<bool> {
        self.check_fork()?;
        let fields = descriptor.fields();
        let foreign = |what, theirs: String, ours: String| Error::Mismatch {
            what,
            theirs,
            ours,
            remedy: "cancel with the block and the session that the descriptor was made by",
        };
        if fields.session != self.id {
            return Err(foreign("the descriptor's session", fields.session.to_string(), self.id.to_string()));
        }
        let peers = self.peers.load();
        let Some(peer) = find(&peers, fields.participant) else { return Ok(false) };
        let Some(generation) = Generation::new(fields.generation) else { return Ok(false) };
        let entry = Entry { file: fields.file, slot: fields.slot, generation };
        let place = |b: &Block| format!("region {} offset {}", b.region().id().0, b.offset());
        match peer.ledger.with_block(entry, |leased| (Arc::ptr_eq(leased, block), place(leased))) {
            None => return Ok(false),
            Some((false, leased)) => return Err(foreign("the descriptor's block", leased, place(block))),
            Some((true, _)) => {}
        }
        let taken = peer.ledger.revoke(entry);
        if taken.is_some() {
            self.revoked.fetch_add(1, Ordering::Relaxed);
            step!("cancel");
        }
        Ok(taken.is_some())
    }
}

/// How many low bits of a participant's number are its place in the table.
const PLACE_BITS: u32 = 12;

/// The most participants of a session at once.
pub(crate) const MOST_PARTICIPANTS: usize = 1 << PLACE_BITS;

/// Makes the number of a participant that takes a place; no two of a session are equal.
pub(crate) fn participant_id(serial: u64, place: usize) -> ParticipantId {
    ParticipantId((serial << PLACE_BITS) | place as u64)
}

/// Returns a participant's place in the table.
pub(crate) fn place_of(id: ParticipantId) -> usize {
    (id.0 as usize) & (MOST_PARTICIPANTS - 1)
}

/// Finds a participant.
pub(crate) fn find(peers: &[Option<Arc<Peer>>], id: ParticipantId) -> Option<&Arc<Peer>> {
    peers.get(place_of(id))?.as_ref().filter(|peer| peer.id == id)
}
