//! The session's own thread: its socket, its participants' deaths, and collecting when no other
//! thread does.
//!
//! It never makes a driver call that can block: those go to
//! [`Blocking`](transport::os::blocking::Blocking). It sleeps in epoll, and gets up by itself only
//! for what the kernel does not announce: a GPU's store of RELEASED, the end of a time to live or
//! of a quarantine. While something waits for leases to end it looks every 50 µs, rising to 10 ms.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use allocators::Reclaim;
use gpu_api::{Result, thread};

use crate::producer::blocks::block::keep_for_ever;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::core::Core;
use crate::producer::grants::slot_group::Effort;
use crate::producer::notice::SessionNotice;
use crate::producer::service::state::{POLL, Service};
use transport::os::clock::Tick;
use transport::os::socket::{self, Listener};
use transport::server::Server;
use transport::wire::message::ToParticipant;

/// The least time between two looks at times to live, as a multiple of what a look takes.
const REST: u32 = 20;

/// Starts the thread of a session.
///
/// # Errors
///
/// What the kernel refuses.
pub(crate) fn start(core: Arc<Core>, listener: Listener, allowed: Vec<u32>) -> Result<()> {
    let service = Service::new(core, listener, allowed)?;
    thread::start("gpu-ipc-session", move || service.run()).map(drop)
}

/// How long after the close a connection that was made before it may take to say hello. A participant
/// says it at once.
const LAST_HELLO: Duration = Duration::from_secs(10);

impl Service {
    /// Runs until nothing is left to do, ever.
    fn run(mut self) {
        // A source of regions or a subscriber of the log may panic: the caller is told.
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

    /// Tells all participants that the session's thread has ended. Held blocks stay: this end
    /// proves nothing.
    fn fail(mut self) {
        self.core.fail();
        drop(self.door.close());
        for peer in self.core.roster.peers().iter().flatten() {
            socket::hang_up(&peer.seat.socket);
        }
        self.core.notices.push(SessionNotice::Failed);
        self.core.wakeups.announce_change();
        // Last: a subscriber that panics does so here as well.
        tracing::error!(
            session = %self.core.facts.id,
            "the session's thread panicked: nothing more is shared, and participants are told"
        );
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self) {
        let closing = self.core.life.is_closing();
        if closing && self.door.close().is_some() {
            self.closed_at = Some(Instant::now());
            for peer in self.core.roster.peers().iter().flatten() {
                // One who cannot be told sees the hang-up.
                let _ = self
                    .core
                    .roster
                    .outbox
                    .push(peer, &ToParticipant::Closing {}, None);
            }
        }
        self.core.wakeups.thread.doze();
        let timeout = self.time_to_sleep();
        if timeout.is_some_and(|timeout| timeout <= POLL.1) {
            self.core.wakeups.thread.will_rise_soon();
        }
        let ready = self.door.watches.wait(timeout);
        self.core.wakeups.thread.rise();
        let is_idle = ready.len() == 0;
        ready.for_each(|key| self.dispatch(key));
        self.accept_arrivals();
        self.door.listen_again();
        self.core.roster.flush();
        self.expire();
        // Before the burials: what a participant has ended before it went keeps it no longer, and
        // nothing else may wake this thread.
        let found = self.core.collect(Effort::Marked);
        self.bury();
        if self.core.releases.take() {
            self.core.notices.push(SessionNotice::TryAgain);
        }
        self.look_after_tokens();
        self.watch_context();
        self.synchronize_unmarked();
        self.trim_unmapped();
        self.poll = if found.blocks > 0 || !is_idle {
            POLL.0
        } else {
            (self.poll * 2).min(POLL.1)
        };
        if closing {
            self.end_unclaimable();
            self.ask_when_closing();
        }
        self.leave();
    }

    /// Says after what time there may be something to do that no descriptor tells of; `None` for
    /// never.
    fn time_to_sleep(&mut self) -> Option<Duration> {
        let now = Tick::now();
        let core = &self.core;
        let next_lapse = core.next_lapse.get();
        let mut until_due = (next_lapse != Tick::NEVER)
            .then(|| next_lapse.since(now).max(Duration::from_millis(1)));
        for peer in core.roster.peers().iter().flatten() {
            let due = {
                let leaving = peer.leaving();
                leaving.proven.map_or_else(
                    || {
                        // After that it stays for what it holds alone.
                        let is_exiting = || peer.seat.is_exiting();
                        let proof = peer.seat.proof();
                        let left = leaving.until_departed(proof, Instant::now(), is_exiting);
                        let is_idle = || core.has_nothing(peer);
                        left.filter(|left| !left.is_zero() || is_idle())
                    },
                    |proven| {
                        Some(
                            core.facts
                                .quarantine_of(peer, &leaving)
                                .saturating_sub(proven.elapsed()),
                        )
                    },
                )
            };
            if let Some(left) = due {
                until_due = Some(until_due.map_or(left, |due| due.min(left)));
            }
        }
        let settling = !self.leaving.is_empty()
            && (core.pending.waiting() > 0
                || core.fences.has_proofs()
                || self.ticket_streams.owe(&core.fences));
        let limbo = core.memory.limbo.sum();
        core.warn_of_limbo(limbo);
        let waits =
            limbo.blocks > 0 || core.wakeups.has_waiters() || core.life.is_closing() || settling;
        let reminded = core.wakeups.thread.take_reminder();
        let words = || {
            core.roster
                .peers()
                .iter()
                .flatten()
                .any(|peer| peer.words.are_awaited())
        };
        let unseen = core.has_leases() || settling || core.life.is_closing();
        // A release that another thread saw is told by this one.
        let watches = core.releases.is_any();
        let poll = if (waits && unseen) || watches {
            Some(self.poll)
        } else if reminded || core.roster.outbox.is_waiting() || self.door.is_deaf() || words() {
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
        self.core.life.is_closing()
            // The turn that takes it tells the participants; a shutdown may come before the first
            // turn.
            && !self.door.listens()
            && self.core.memory.is_only_leaked()
            && self.leaving.is_empty()
            && self.core.roster.peers().iter().flatten().all(|peer| {
                // A stream of ours that has yet to write a word must find it.
                peer.mappings() == 0 && (self.broken || !peer.words.are_owed())
            })
    }

    /// Gives up what the session keeps.
    fn finish(&mut self) {
        let peers = self.core.roster.take_all();
        for peer in peers.iter().flatten() {
            self.unregister(peer.clone());
        }
        tracing::debug!(session = %self.core.facts.id, "session closed");
    }

    /// Has the regions of returned tokens unmapped, and tells the application of those that are.
    fn look_after_tokens(&mut self) {
        let mapped = self.core.memory.tokens.tell(&self.core.notices);
        if mapped
            .iter()
            .any(|region| self.wanted.binary_search(region).is_err())
        {
            self.core.roster.ask_to_unmap(|region| {
                mapped.binary_search(&region).is_ok() && self.wanted.binary_search(&region).is_err()
            });
        }
        self.wanted = mapped;
    }

    /// Takes back grants that were not claimed in time.
    fn expire(&mut self) {
        let now = Tick::now();
        if now < self.core.next_lapse.get() {
            return;
        }
        self.core.next_lapse.reset();
        let began = Instant::now();
        let mut next = Tick::NEVER;
        let (mut out, mut lapsed) = (ReclaimedBlocks::new(), Vec::new());
        let mut grants = 0;
        for peer in self.core.roster.peers().iter().flatten() {
            next = next.min(peer.ledger.expire(now, &mut out, &mut lapsed));
            grants += lapsed.len() as u64;
            lapsed
                .drain(..)
                .for_each(|lease| self.core.roster.tell_revoked(peer, lease));
        }
        grants += self.core.tickets.expire(now, &mut out);
        next = next.min(self.core.tickets.first_lapse());
        if next != Tick::NEVER {
            let next = next.max(Tick::now().after(began.elapsed() * REST));
            // This is the thread.
            let _ = self.core.next_lapse.note(next);
        }
        if grants > 0 {
            self.core
                .tallies
                .expired
                .fetch_add(grants, Ordering::Relaxed);
            tracing::warn!(
                grants,
                "grants were not claimed within their time to live and are taken back"
            );
            self.core.retire(&mut out);
        }
    }

    /// Waits for streams of dropped blocks on which no event could be recorded.
    fn synchronize_unmarked(&mut self) {
        for unmarked in self.core.pending.take_unmarked() {
            let core = self.core.clone();
            self.blocking.run(move || {
                if let Err((block, error)) = core.pending.synchronize(unmarked) {
                    keep_for_ever(block, &error);
                }
                core.wakeups.announce_change();
            });
        }
    }

    /// Returns to the driver requested regions that no participant maps any more.
    fn trim_unmapped(&mut self) {
        if self.unmapped && self.core.trims.load(Ordering::Relaxed) {
            self.unmapped = false;
            let core = self.core.clone();
            self.blocking.run(move || {
                if let Err(error) = core.memory.source.trim() {
                    tracing::warn!(%error, "a region that nobody maps cannot be given back and is leaked");
                }
                core.wakeups.announce_change();
            });
        }
    }

    /// A closing session ends its tickets once no process is left that could claim one: the socket
    /// is closed, nothing that connected before may still say hello, and every participant has hung
    /// up, said goodbye or been silenced. Asked each time: a share that saw the session open may
    /// make one more.
    fn end_unclaimable(&mut self) {
        if self.closed_at.is_some_and(|at| at.elapsed() >= LAST_HELLO) {
            self.evict_all("a connection that says nothing is closed after its session");
        }
        let can_claim =
            self.door.is_open() || self.core.has_arrivals() || self.core.roster.has_claimants();
        if can_claim || self.core.tickets.live() == 0 {
            return;
        }
        let mut out = ReclaimedBlocks::new();
        let tickets = self.core.tickets.end_all(&mut out);
        self.core
            .tallies
            .revoked
            .fetch_add(tickets, Ordering::Relaxed);
        tracing::debug!(
            session = %self.core.facts.id,
            tickets,
            "tickets that no process can claim any more are ended"
        );
        self.core.retire(&mut out);
        self.core.wakeups.announce_change();
    }

    /// A closing session asks participants without a lease to unmap.
    fn ask_when_closing(&mut self) {
        for peer in self.core.roster.peers().iter().flatten() {
            if peer.mappings() > 0 && peer.ledger.is_empty() && !self.asked.contains(&peer.id) {
                self.asked.push(peer.id);
                for region in peer.mapped() {
                    self.core.roster.ask_to_unmap_one(peer, region);
                }
            }
        }
        self.core.collect_all();
    }
}
