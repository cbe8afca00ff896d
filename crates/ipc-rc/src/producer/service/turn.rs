//! The session's own thread: its socket, its participants' deaths, and collecting when nobody else does.
//!
//! It never makes a driver call that can block: those go to [`Blocking`]. It sleeps in epoll, and gets up by itself
//! only for what the kernel does not announce: a GPU's store of RELEASED, the end of a time to live or of a
//! quarantine. While something waits for leases to end it looks every 50 µs, rising to 10 ms.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu_api::{ParticipantId, Reclaim, RegionId, Result};

use crate::gpu_event::GpuEvent;
use crate::producer::blocks::block::keep_for_ever;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::core::Core;
use crate::producer::grants::ledger::Effort;
use crate::producer::notice::SessionNotice;
use crate::producer::roster::peer::Peer;
use crate::producer::service::admission::Greeting;
use crate::producer::share::{find, place_of};
use channel::os::blocking::Blocking;
use channel::os::clock::Tick;
use channel::os::closer::Closer;
use channel::os::poller::Poller;
use channel::os::process;
use channel::os::socket::{self, Listener};
use channel::trace_point;
use channel::wire::message::ToParticipant;

/// The shortest and the longest time between two looks at leases.
const POLL: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));
/// The least time between two looks at times to live, as a multiple of what a look takes.
const REST: u32 = 20;

/// What a descriptor that epoll reports stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Watch {
    Listener,
    Waker,
    Greeting,
    Socket(ParticipantId),
    Process(ParticipantId),
    Descendant(ParticipantId, usize),
}

/// The thread's state.
#[derive(Debug)]
pub(crate) struct Service {
    pub(super) core: Arc<Core>,
    pub(super) listener: Option<Listener>,
    pub(super) allowed: Vec<u32>,
    pub(super) own_pidfd: OwnedFd,
    poller: Poller,
    pub(super) watches: HashMap<u64, Watch>,
    /// Connections that have not said hello yet, the oldest first.
    pub(super) greetings: BTreeMap<u64, Greeting>,
    /// Closes what others sent.
    pub(super) closer: Closer,
    /// Connections are left in the backlog for a while.
    is_deaf: bool,
    next_key: u64,
    pub(super) next_serial: u64,
    poll: Duration,
    /// Asked whether the context works. Made at the start: that one cannot be made later says nothing.
    probe: GpuEvent,
    broken: bool,
    /// A mapping has gone since the last look.
    pub(super) unmapped: bool,
    blocking: Blocking,
    /// Participants that are gone but into whose words a stream of ours may still write.
    leaving: Vec<Arc<Peer>>,
    asked: Vec<ParticipantId>,
    /// Mapped regions of returned tokens, that participants were asked to unmap.
    wanted: Vec<RegionId>,
}

impl Service {
    /// Makes the state; the caller runs it on a thread.
    pub fn new(core: Arc<Core>, listener: Listener, allowed: Vec<u32>) -> Result<Service> {
        let mut service = Service {
            own_pidfd: process::own_pidfd()?,
            poller: Poller::new()?,
            listener: None,
            allowed,
            watches: HashMap::new(),
            greetings: BTreeMap::new(),
            closer: Closer::default(),
            is_deaf: false,
            next_key: 0,
            next_serial: 1,
            poll: POLL.0,
            probe: GpuEvent::new(&core.gpu)?,
            broken: false,
            unmapped: false,
            blocking: Blocking::default(),
            leaving: Vec::new(),
            asked: Vec::new(),
            wanted: Vec::new(),
            core,
        };
        service.watch(listener.as_fd(), Watch::Listener)?;
        let core = service.core.clone();
        service.watch(core.waker.fd(), Watch::Waker)?;
        service.listener = Some(listener);
        Ok(service)
    }

    /// Runs until nothing is left to do, ever.
    pub fn run(mut self) {
        // Whatever panics, a source of regions or whoever listens to the log, somebody is told.
        let ran = catch_unwind(AssertUnwindSafe(|| {
            while !self.is_finished() {
                self.turn();
            }
        }));
        match ran {
            Ok(()) => self.finish(),
            Err(_) => self.fail(),
        }
    }

    /// Tells everybody that nobody looks after the session any more. What is held stays: this end proves nothing.
    fn fail(mut self) {
        self.core.fail();
        if let Some(listener) = self.listener.take() {
            let _ = listener.unlink();
        }
        self.core.is_unlinked.store(true, Ordering::Relaxed);
        for peer in self.core.peers.load().iter().flatten() {
            socket::hang_up(&peer.socket);
        }
        self.core.notices.push(SessionNotice::Failed);
        self.core.announce_change();
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self) {
        let closing = self.core.closing.load(Ordering::Relaxed);
        if closing && let Some(listener) = self.listener.take() {
            if let Err(error) = listener.unlink() {
                tracing::warn!(%error, "the session's socket file stays; the next session to open removes it");
            }
            self.core.is_unlinked.store(true, Ordering::Relaxed);
            self.core.announce_change();
            for peer in self.core.peers.load().iter().flatten() {
                // One who cannot be told sees the hang-up.
                let _ = self.core.outbox.push(peer, &ToParticipant::Closing, None);
            }
        }
        self.core.waker.doze();
        let timeout = self.time_to_sleep();
        if timeout.is_some_and(|timeout| timeout <= POLL.1) {
            self.core.waker.will_rise_soon();
        }
        let ready = self.poller.wait(timeout);
        self.core.waker.rise();
        for &key in &ready {
            match self.watches.get(&key).copied() {
                None | Some(Watch::Waker) => {}
                Some(Watch::Listener) => self.accept(),
                Some(Watch::Greeting) => self.greet(key),
                Some(Watch::Socket(id)) => self.hear(key, id),
                Some(Watch::Process(id)) => self.note(key, id, |peer| peer.proof().exited = true),
                Some(Watch::Descendant(id, _)) => self.note(key, id, |peer| peer.proof().descendants -= 1),
            }
        }
        self.accept_arrivals();
        self.listen_again();
        self.flush();
        self.expire();
        // Before the burials: what a participant has ended before it went keeps it no longer, and nothing else may wake this
        // thread.
        let found = self.core.collect(Effort::Marked);
        self.bury();
        self.core.tell_of_releases();
        self.look_after_tokens();
        self.watch_context();
        self.synchronize_unmarked();
        self.trim_unmapped();
        self.poll = if found.blocks > 0 || !ready.is_empty() { POLL.0 } else { (self.poll * 2).min(POLL.1) };
        if closing {
            self.ask_when_closing();
        }
        self.leave();
    }

    /// Says after what time there may be something to do that no descriptor tells of; `None` for never.
    fn time_to_sleep(&mut self) -> Option<Duration> {
        let now = Tick::now();
        let core = &self.core;
        let next_lapse = Tick::from_millis(core.next_lapse.load(Ordering::Relaxed));
        let mut until_due = (next_lapse != Tick::NEVER).then(|| next_lapse.since(now).max(Duration::from_millis(1)));
        for peer in core.peers.load().iter().flatten() {
            if let Some(complete) = peer.proof().complete {
                let left = core.quarantine.saturating_sub(complete.elapsed());
                until_due = Some(until_due.map_or(left, |due| due.min(left)));
            }
        }
        let settling = !self.leaving.is_empty()
            && (core.own_work.waiting() > 0 || core.fences.has_proofs() || core.lanes.owe(&core.fences));
        let limbo = core.limbo.sum();
        core.warn_of_limbo(limbo);
        let waits = limbo.blocks > 0
            || core.waiters.load(Ordering::Relaxed) > 0
            || core.closing.load(Ordering::Relaxed)
            || settling;
        let reminded = core.waker.take_reminder();
        let words = || core.peers.load().iter().flatten().any(|peer| peer.words.are_awaited());
        let unseen = core.has_leases() || settling || core.closing.load(Ordering::Relaxed);
        // A release that another thread saw is told by this one.
        let watches = core.watches_releases.load(Ordering::Relaxed);
        let poll = if (waits && unseen) || watches {
            Some(self.poll)
        } else if reminded || core.outbox.is_waiting() || self.is_deaf || words() {
            Some(POLL.1)
        } else {
            None
        };
        match (until_due, poll) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn is_finished(&self) -> bool {
        self.core.closing.load(Ordering::Relaxed)
            // The turn that takes it removes the socket's name; a shutdown may come before the first turn.
            && self.listener.is_none()
            && self.core.live.sum().blocks == 0
            && self.leaving.is_empty()
            && self.core.peers.load().iter().flatten().all(|peer| {
                // A stream of ours that has yet to write a word must find it.
                peer.mappings() == 0 && (self.broken || !peer.words.are_owed())
            })
    }

    /// Gives up what the session keeps.
    fn finish(&mut self) {
        // Taking the table ends the cycle of core, participants, rows, blocks and core.
        let peers = self.core.peers.swap(Arc::default());
        for peer in peers.iter().flatten() {
            self.unregister(peer.clone());
        }
        tracing::debug!(session = %self.core.id, "session closed");
    }

    /// Has the regions of returned tokens unmapped, and tells the application of those that are.
    fn look_after_tokens(&mut self) {
        let mapped = self.core.tell_of_tokens();
        let asked: Vec<RegionId> = mapped.iter().copied().filter(|region| !self.wanted.contains(region)).collect();
        self.core.ask_to_unmap_these(&asked);
        self.wanted = mapped;
    }

    /// Leaves connections in the backlog until fewer wait for their close.
    pub(super) fn pause_listening(&mut self) {
        self.listen(false);
    }

    fn listen_again(&mut self) {
        if self.is_deaf && !self.closer.is_crowded() {
            self.listen(true);
        }
    }

    fn listen(&mut self, listens: bool) {
        let Some(listener) = &self.listener else { return };
        let key = self.watches.iter().find(|(_, watch)| **watch == Watch::Listener).map(|(&key, _)| key);
        let Some(key) = key else { return };
        if listens {
            self.poller.resume(listener.as_fd(), key);
        } else {
            self.poller.pause(listener.as_fd(), key);
        }
        self.is_deaf = !listens;
    }

    /// Reads no more of a participant that speaks nonsense or has shut its end for writing: its hang-up alone is awaited.
    pub(super) fn silence(&mut self, key: u64, peer: &Arc<Peer>) {
        self.poller.pause(peer.socket.as_fd(), key);
        self.close(peer);
    }

    pub(super) fn watch(&mut self, fd: BorrowedFd<'_>, watch: Watch) -> Result<u64> {
        let key = self.next_key;
        self.poller.add(fd, key)?;
        self.next_key += 1;
        self.watches.insert(key, watch);
        Ok(key)
    }

    pub(super) fn unwatch(&mut self, key: u64, fd: BorrowedFd<'_>) {
        self.watches.remove(&key);
        self.poller.remove(fd);
    }

    pub(super) fn peer(&self, id: ParticipantId) -> Option<Arc<Peer>> {
        find(&self.core.peers.load(), id).cloned()
    }

    /// Takes a token of the proof of death, and acts on it.
    pub(super) fn note(&mut self, key: u64, id: ParticipantId, token: impl FnOnce(&Peer)) {
        let Some(peer) = self.peer(id) else { return };
        match self.watches.get(&key).copied() {
            Some(Watch::Socket(_)) => self.unwatch(key, peer.socket.as_fd()),
            Some(Watch::Process(_)) => self.unwatch(key, peer.pidfd.as_fd()),
            Some(Watch::Descendant(_, n)) => self.unwatch(key, peer.descendants[n].as_fd()),
            _ => return,
        }
        token(&peer);
        let lost = {
            let proof = peer.proof();
            proof.exited || proof.hung_up
        };
        if lost {
            self.close(&peer);
        }
        let mut proof = peer.proof();
        if proof.is_complete() && proof.complete.is_none() {
            proof.complete = Some(Instant::now());
            trace_point!("death");
            tracing::debug!(participant = %id, pid = peer.pid, "a participant is proven dead; the quarantine begins");
        }
    }

    /// Grants nothing more and takes back what was not claimed.
    pub(super) fn close(&self, peer: &Arc<Peer>) {
        let mut out = ReclaimedBlocks::new();
        peer.close(&mut out);
        self.core.revoked.fetch_add(out.len() as u64, Ordering::Relaxed);
        self.core.retire(&mut out);
        self.core.announce_change();
    }

    fn flush(&self) {
        if self.core.outbox.is_waiting() {
            for peer in self.core.peers.load().iter().flatten() {
                self.core.outbox.flush(peer);
            }
        }
    }

    /// Takes back what was not claimed in time, when something is due.
    fn expire(&mut self) {
        let now = Tick::now();
        if now.millis() < self.core.next_lapse.load(Ordering::Relaxed) {
            return;
        }
        // Before the look: what is granted behind it lowers this again.
        self.core.next_lapse.store(Tick::NEVER.millis(), Ordering::Relaxed);
        let began = Instant::now();
        let mut next = Tick::NEVER;
        let (mut out, mut lapsed) = (ReclaimedBlocks::new(), Vec::new());
        let mut grants = 0;
        for peer in self.core.peers.load().iter().flatten() {
            next = next.min(peer.ledger.expire(now, &mut out, &mut lapsed));
            grants += lapsed.len() as u64;
            lapsed.drain(..).for_each(|lease| self.core.tell_revoked(peer, lease));
        }
        grants += self.core.tickets.expire(now, &mut out);
        next = next.min(self.core.tickets.first_lapse());
        if next != Tick::NEVER {
            let next = next.max(Tick::now().after(began.elapsed() * REST));
            self.core.next_lapse.fetch_min(next.millis(), Ordering::Relaxed);
        }
        if grants > 0 {
            self.core.expired.fetch_add(grants, Ordering::Relaxed);
            tracing::warn!(grants, "grants were not claimed within their time to live and are taken back");
            self.core.retire(&mut out);
        }
    }

    /// Ends what the dead held, once the proof is complete and the quarantine over; and what the departed left.
    fn bury(&mut self) {
        let now = Instant::now();
        let peers = self.core.peers.load_full();
        for peer in peers.iter().flatten() {
            let (dead, hung_up) = {
                let mut proof = peer.proof();
                if proof.complete.is_some() && peer.shows_life() {
                    // The driver's own sign is the last: the quarantine begins when it is gone.
                    proof.complete = Some(now);
                }
                let over = proof.complete.is_some_and(|complete| now.duration_since(complete) >= self.core.quarantine);
                (over, proof.hung_up)
            };
            // Nobody speaks for it any more, and it has nothing: it needs no proof of its death, and may not be dead.
            if hung_up && peer.ledger.is_empty() && peer.mappings() == 0 {
                self.let_go(peer);
                self.core.notices.push(SessionNotice::Left { participant: peer.id });
                self.core.announce_change();
            } else if dead {
                let mut out = ReclaimedBlocks::new();
                peer.ledger.bury(&mut out);
                let grave = out.len();
                self.let_go(peer);
                self.core.deaths.fetch_add(1, Ordering::Relaxed);
                if self.core.gpu.caps().shared_context {
                    // In a shared context a process' death proves nothing about its GPU work.
                    out.drain().for_each(|block| block.leak());
                } else {
                    self.core.retire(&mut out);
                }
                trace_point!("bury");
                tracing::debug!(participant = %peer.id, leases = grave, "a dead participant's leases are ended");
                self.core.notices.push(SessionNotice::Left { participant: peer.id });
                self.core.announce_change();
            }
        }
    }

    /// The one way out: a participant's watches, kept messages, place and mappings go, and it stays among those that leave
    /// until no stream of ours owes it a word. Also for one whose welcome failed, which was in no table.
    pub(super) fn let_go(&mut self, peer: &Arc<Peer>) {
        peer.gone.store(true, Ordering::Relaxed);
        let unmapped = peer.forget_mappings();
        self.unmapped |= !unmapped.is_empty();
        self.core.note_unpinned(&unmapped);
        self.watches.retain(|_, watch| {
            let (is_its, fd) = match *watch {
                Watch::Socket(id) => (id == peer.id, &peer.socket),
                Watch::Process(id) => (id == peer.id, &peer.pidfd),
                Watch::Descendant(id, n) if id == peer.id => (true, &peer.descendants[n]),
                _ => return true,
            };
            if is_its {
                self.poller.remove(fd.as_fd());
            }
            !is_its
        });
        self.core.outbox.forget(peer.id);
        peer.words.close();
        peer.words.want_proof();
        self.core.fences.forget(peer.id);
        self.core.corrupt_words.fetch_add(peer.ledger.corrupt_words() as u64, Ordering::Relaxed);
        let place = place_of(peer.id);
        self.core.peers.rcu(|peers| {
            let mut peers = Vec::clone(peers);
            if let Some(seat) = peers.get_mut(place).filter(|seat| seat.as_ref().is_some_and(|it| it.id == peer.id)) {
                *seat = None;
            }
            peers
        });
        peer.ledger.leave();
        self.asked.retain(|id| *id != peer.id);
        self.leaving.push(peer.clone());
    }

    /// Lets go of participants into whose words no stream of ours writes any more.
    fn leave(&mut self) {
        if self.leaving.is_empty() {
            return;
        }
        let core = &self.core;
        core.lanes.settle(&core.fences);
        core.fences.look_at_proofs();
        let broken = self.broken;
        let (gone, stay) =
            std::mem::take(&mut self.leaving).into_iter().partition(|peer| broken || !peer.words.are_owed());
        self.leaving = stay;
        let gone: Vec<Arc<Peer>> = gone;
        for peer in gone {
            self.unregister(peer);
        }
        self.core.settles.store(!self.leaving.is_empty(), Ordering::Relaxed);
    }

    /// Ends the registrations of a participant that is gone, and lets go of its counter files after that.
    pub(super) fn unregister(&mut self, peer: Arc<Peer>) {
        let gpu = self.core.gpu.clone();
        self.blocking.run(move || {
            for start in peer.take_registrations() {
                // SAFETY: `unregister_words` asks for
                // - a registration that was not ended: `take_registrations` gives each once;
                // - no unfinished operation on its words: a participant is let go only when every value that was
                //   queued for it has been reached, or can never be because the context is broken.
                if let Err(error) = unsafe { gpu.backend().unregister_words(start) } {
                    tracing::warn!(%error, "a counter file stays registered, and so mapped");
                    std::mem::forget(peer);
                    return;
                }
            }
        });
    }

    /// While somebody may wait for a word that a stream of ours has yet to write, asks whether the context still works.
    /// Once it does not, whoever waits is told.
    fn watch_context(&mut self) {
        let peers = self.core.peers.load();
        let awaited = || peers.iter().flatten().filter(|peer| peer.words.are_awaited());
        if awaited().next().is_none() {
            return;
        }
        if !self.broken {
            let Err(error) = self.probe.is_passed() else { return };
            self.broken = true;
            tracing::error!(%error, "the producer's context is broken; whoever waits for its streams is told");
        }
        awaited().for_each(|peer| peer.words.poison());
    }

    /// Waits for streams of dropped blocks on which no event could be recorded.
    fn synchronize_unmarked(&mut self) {
        for unmarked in self.core.own_work.take_unmarked() {
            let core = self.core.clone();
            self.blocking.run(move || {
                if let Err((block, error)) = core.own_work.synchronize(unmarked) {
                    keep_for_ever(block, &error);
                }
                core.announce_change();
            });
        }
    }

    /// Gives regions back to the driver that were asked for and that nobody maps any more.
    fn trim_unmapped(&mut self) {
        if self.unmapped && self.core.trims.load(Ordering::Relaxed) {
            self.unmapped = false;
            let core = self.core.clone();
            self.blocking.run(move || {
                if let Err(error) = core.source.trim() {
                    tracing::warn!(%error, "a region that nobody maps cannot be given back and is leaked");
                }
                core.announce_change();
            });
        }
    }

    /// A closing session asks those who hold no lease to unmap.
    fn ask_when_closing(&mut self) {
        for peer in self.core.peers.load().iter().flatten() {
            if peer.mappings() > 0 && peer.ledger.is_empty() && !self.asked.contains(&peer.id) {
                self.asked.push(peer.id);
                for region in peer.mapped() {
                    self.core.ask_to_unmap_one(peer, region);
                }
            }
        }
        self.core.collect_all();
    }
}
