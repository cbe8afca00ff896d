//! Tickets: grants to the participants that ask first.
//!
//! A ticket's descriptor names a row here instead of a slot. A participant that claims it asks over
//! its socket and is granted a slot in its own counter file; so no participant writes in another's
//! file or can end another's lease.
//!
//! | row | holds | ends by |
//! |---|---|---|
//! | counted: one claim or n | the block, until the last claim | its last claim, cancel, its time to live |
//! | unlimited: a broadcast | nothing | the drop of its `SentBlock`, cancel, its time to live |
//!
//! All end with a closing session once no connected process is left to claim them.
//!
//! A participant claims a counted ticket once; asked again, the row gives the same lease, so a lost
//! answer loses nothing. A broadcast gives a participant one unclaimed lease at a time: the same
//! until that is claimed, then the next. A repeated question that comes after its answer was
//! claimed may so be given a lease that no claim waits for. It is the answer to the participant's
//! next claim, and is taken back when the broadcast ends.
//!
//! A row that has ended answers why until its place is used again, which is not before
//! [`REMEMBERED`] others have ended after it. Then its generation differs and the answer is `Stale`.
//!
//! A claim counts when the lease is granted. A participant that dies between that and its first use
//! has spent its claim: a ticket is never claimed more often than it states, and the block comes
//! back. So has one that abandons its claim, which gives the lease back; of a broadcast it may
//! claim again.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use gpu_api::lock::Acquire;
use gpu_api::{Error, ParticipantId, Result};

use crate::producer::blocks::block::Block;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::fences::ticket_event::TicketEvent;
use transport::os::clock::Tick;
use transport::shared::slot::Generation;
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{Extent, Granted, Outcome, TicketId};

/// How often a ticket can be claimed, each time by another participant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Claims {
    /// By the first participant that asks: for queues.
    Once,
    /// By the first participants, up to this number. The block is held until all have claimed.
    Times(NonZeroU32),
    /// By all participants, each as often as it likes, until the block's
    /// [`SentBlock`](crate::SentBlock) is dropped: a broadcast. Such a ticket is not counted by
    /// [`outstanding`](crate::SentBlock::outstanding): a pool that writes blocks again revokes it
    /// first.
    Unlimited,
}

/// Ended rows that still answer why, at least.
const REMEMBERED: usize = 4096;
/// Live tickets of a session, at most.
const MOST_LIVE: usize = 1 << 20;
/// Claimants of one ticket after which those that are gone are forgotten.
const MANY_CLAIMANTS: usize = 64;

/// A session's tickets.
#[derive(Debug, Default)]
pub(crate) struct Tickets {
    table: Mutex<Table>,
    /// Changed under the lock, read without it.
    live: AtomicUsize,
}

#[derive(Debug)]
struct Table {
    rows: Vec<Row>,
    /// Rows that have ended, the longest ago first.
    ended: VecDeque<u32>,
    /// Unlimited tickets by their block's address, which is its own while it lives.
    unlimited: HashMap<usize, Vec<u32>>,
    /// No row lapses before this.
    first_lapse: Tick,
}

impl Default for Table {
    fn default() -> Table {
        Table {
            rows: Vec::new(),
            ended: VecDeque::new(),
            unlimited: HashMap::new(),
            first_lapse: Tick::NEVER,
        }
    }
}

#[derive(Debug)]
struct Row {
    generation: Generation,
    state: TicketState,
    given: Vec<(ParticipantId, Granted)>,
}

#[derive(Debug)]
enum TicketState {
    Live(Live),
    Revoked,
    Used,
}

#[derive(Debug)]
struct Live {
    hold: Hold,
    place: Extent,
    point: Option<Arc<TicketEvent>>,
    time_to_live: Option<Duration>,
    lapses: Tick,
}

#[derive(Debug)]
enum Hold {
    Counted(Arc<Block>, u32),
    Unlimited(Weak<Block>),
}

/// What a claimant may be granted.
#[derive(Debug)]
pub(crate) struct Plan {
    pub block: Arc<Block>,
    pub place: Extent,
    pub point: Option<Arc<TicketEvent>>,
    pub time_to_live: Option<Duration>,
    /// It is a broadcast.
    pub again: bool,
    /// What a broadcast gave the claimant last. While that is unclaimed, it is the answer.
    pub last: Option<Granted>,
}

/// What a ticket leaves when it ends before its last claim.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Ended {
    /// It was live until now.
    pub was_live: bool,
    /// What held the block: dropped with no lock held.
    pub block: Option<Arc<Block>>,
    /// The leases that it gave: those that are unclaimed are to be taken back.
    pub given: Vec<(ParticipantId, Granted)>,
}

fn key_of(block: &Arc<Block>) -> usize {
    Arc::as_ptr(block) as usize
}

impl Tickets {
    /// Counts the tickets that can still be claimed.
    pub fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Returns a time before which no ticket lapses.
    pub fn first_lapse(&self) -> Tick {
        self.table.acquire().first_lapse
    }

    /// Makes a ticket of a part of a block.
    ///
    /// # Errors
    ///
    /// [`Error::Exhausted`] when a million are live, [`Error::Invalid`] for an unlimited one of a
    /// block whose `SentBlock` was dropped: it would end at once.
    pub fn issue(
        &self,
        (block, place): (&Arc<Block>, Extent),
        claims: Claims,
        point: Option<Arc<TicketEvent>>,
        now: Tick,
        time_to_live: Option<Duration>,
    ) -> Result<TicketId> {
        let mut table = self.table.acquire();
        if self.live() >= MOST_LIVE {
            return Err(Error::exhausted(
                "tickets of a session",
                MOST_LIVE as u64,
                "let some be claimed, cancel them, or give them a shorter time to live",
            ));
        }
        let hold = match claims {
            Claims::Once => Hold::Counted(block.clone(), 1),
            Claims::Times(claims) => Hold::Counted(block.clone(), claims.get()),
            Claims::Unlimited => Hold::Unlimited(Arc::downgrade(block)),
        };
        let lapses = time_to_live.map_or(Tick::NEVER, |time| now.after(time));
        table.first_lapse = table.first_lapse.min(lapses);
        let state = TicketState::Live(Live {
            hold,
            place,
            point,
            time_to_live,
            lapses,
        });
        let former = table.reusable();
        let last = former.map_or(Generation::ZERO, |n| table.rows[n as usize].generation);
        let row = Row {
            generation: last.next(),
            state,
            given: Vec::new(),
        };
        let number = former.unwrap_or(table.rows.len() as u32);
        match table.rows.get_mut(number as usize) {
            Some(former) => *former = row,
            None => table.rows.push(row),
        }
        if claims == Claims::Unlimited {
            // Before the look: the drop of the `SentBlock` sets limbo and then asks for tickets, so
            // one of the two sees the other.
            block.note_tickets();
            if block.is_in_limbo() {
                table.end(number, TicketState::Revoked);
                return Err(Error::invalid(
                    "an unlimited ticket",
                    "of a block that its producer dropped",
                    "made while the producer keeps the block; name how many claims instead",
                ));
            }
            table
                .unlimited
                .entry(key_of(block))
                .or_default()
                .push(number);
        }
        self.live.fetch_add(1, Ordering::Relaxed);
        Ok(TicketId {
            number,
            generation: last.next(),
        })
    }

    /// Decides a claim: the earlier lease again, a grant, or a refusal with its reason.
    pub fn look(&self, claimant: ParticipantId, ticket: TicketId) -> Result<Plan, Outcome> {
        let table = self.table.acquire();
        let row = table.find(ticket).ok_or(Outcome::Stale)?;
        let last = row.given.iter().find(|(id, _)| *id == claimant);
        let last = last.map(|(_, granted)| *granted);
        if let Some(granted) = last.filter(|granted| !granted.again) {
            return Err(Outcome::Granted(granted));
        }
        let live = match &row.state {
            TicketState::Live(live) if live.lapses <= Tick::now() => return Err(Outcome::Revoked),
            TicketState::Live(live) => live,
            TicketState::Revoked => return Err(Outcome::Revoked),
            TicketState::Used => return Err(Outcome::AlreadyClaimed),
        };
        let block = match &live.hold {
            Hold::Counted(block, _) => block.clone(),
            Hold::Unlimited(block) => block.upgrade().ok_or(Outcome::Revoked)?,
        };
        Ok(Plan {
            block,
            place: live.place,
            point: live.point.clone(),
            time_to_live: live.time_to_live,
            again: matches!(live.hold, Hold::Unlimited(_)),
            last,
        })
    }

    /// Notes what a claimant was granted, and counts the claim. `connected` says whether a
    /// participant still is.
    ///
    /// # Errors
    ///
    /// What the ticket has become since it was looked at: the grant is to be taken back.
    pub fn note(
        &self,
        claimant: ParticipantId,
        ticket: TicketId,
        granted: Granted,
        connected: impl Fn(ParticipantId) -> bool,
    ) -> Result<(), Outcome> {
        let mut table = self.table.acquire();
        let row = table.find_mut(ticket).ok_or(Outcome::Stale)?;
        let used = match &mut row.state {
            TicketState::Revoked => return Err(Outcome::Revoked),
            TicketState::Used => return Err(Outcome::AlreadyClaimed),
            TicketState::Live(live) => match &mut live.hold {
                Hold::Unlimited(_) => false,
                Hold::Counted(_, left) => {
                    *left -= 1;
                    *left == 0
                }
            },
        };
        if row.given.len() >= MANY_CLAIMANTS && row.given.len() == row.given.capacity() {
            row.given.retain(|(id, _)| connected(*id));
        }
        match row.given.iter_mut().find(|(id, _)| *id == claimant) {
            Some((_, last)) => *last = granted,
            None => row.given.push((claimant, granted)),
        }
        let ended = used.then(|| self.end(&mut table, ticket.number, TicketState::Used));
        // The last hold on the block may go with it: not under the lock.
        drop(table);
        drop(ended);
        Ok(())
    }

    /// Returns the lease that a ticket gave a claimant last.
    pub fn given(&self, claimant: ParticipantId, ticket: TicketId) -> Option<LeaseAddress> {
        let table = self.table.acquire();
        let mut given = table.find(ticket)?.given.iter();
        let (_, granted) = given.find(|(id, _)| *id == claimant)?;
        Some(granted.lease)
    }

    /// Ends a ticket before its last claim. With a block, only a ticket of that block.
    ///
    /// # Errors
    ///
    /// What identifies the block that the ticket is of, when it is another.
    pub fn revoke(
        &self,
        ticket: TicketId,
        block: Option<&Arc<Block>>,
    ) -> Result<Ended, Option<Arc<Block>>> {
        let mut table = self.table.acquire();
        let Some(row) = table.find(ticket) else {
            return Ok(Ended::default());
        };
        if let (Some(block), TicketState::Live(live)) = (block, &row.state) {
            let of = match &live.hold {
                Hold::Counted(of, _) => Some(of.clone()),
                Hold::Unlimited(of) => of.upgrade(),
            };
            if !of.as_ref().is_some_and(|of| Arc::ptr_eq(of, block)) {
                return Err(of);
            }
        }
        let given = row.given.clone();
        let mut ended = self.end(&mut table, ticket.number, TicketState::Revoked);
        // Of a counted ticket too: a lease that was given and not claimed is taken back.
        ended.given = given;
        Ok(ended)
    }

    /// Ends the broadcasts of a block, and returns the leases that they gave.
    pub fn end_of(&self, block: &Arc<Block>) -> Vec<(ParticipantId, Granted)> {
        let mut table = self.table.acquire();
        let numbers = table.unlimited.remove(&key_of(block)).unwrap_or_default();
        let end = |number| self.end(&mut table, number, TicketState::Revoked).given;
        numbers.into_iter().flat_map(end).collect()
    }

    /// Ends the tickets whose time to live is over, moving what they held to `out`; returns how
    /// many there were.
    pub fn expire(&self, now: Tick, out: &mut ReclaimedBlocks<Arc<Block>>) -> u64 {
        let mut table = self.table.acquire();
        if table.first_lapse > now {
            return 0;
        }
        let mut next = Tick::NEVER;
        let mut due = Vec::new();
        for (number, row) in (0..).zip(&table.rows) {
            match &row.state {
                TicketState::Live(live) if live.lapses <= now => due.push(number),
                TicketState::Live(live) => next = next.min(live.lapses),
                _ => {}
            }
        }
        table.first_lapse = next;
        for &number in &due {
            // What it gave lapses by itself.
            out.extend(self.end(&mut table, number, TicketState::Revoked).block);
        }
        due.len() as u64
    }

    /// Ends every ticket, moving what they held to `out`; returns how many there were.
    pub fn end_all(&self, out: &mut ReclaimedBlocks<Arc<Block>>) -> u64 {
        let mut table = self.table.acquire();
        let before = self.live();
        for number in 0..table.rows.len() as u32 {
            out.extend(self.end(&mut table, number, TicketState::Revoked).block);
        }
        table.first_lapse = Tick::NEVER;
        (before - self.live()) as u64
    }

    fn end(&self, table: &mut Table, number: u32, state: TicketState) -> Ended {
        let mut ended = Ended::default();
        let Some(live) = table.end(number, state) else {
            return ended;
        };
        self.live.fetch_sub(1, Ordering::Relaxed);
        ended.was_live = true;
        match live.hold {
            Hold::Counted(block, _) => ended.block = Some(block),
            Hold::Unlimited(block) => {
                // A claimant that asks again is told that it ended.
                ended.given = std::mem::take(&mut table.rows[number as usize].given);
                let key = block.as_ptr() as usize;
                if let Some(numbers) = table.unlimited.get_mut(&key) {
                    numbers.retain(|&other| other != number);
                    if numbers.is_empty() {
                        table.unlimited.remove(&key);
                    }
                }
            }
        }
        ended
    }
}

impl Table {
    fn find(&self, ticket: TicketId) -> Option<&Row> {
        self.rows
            .get(ticket.number as usize)
            .filter(|row| row.generation == ticket.generation)
    }

    fn find_mut(&mut self, ticket: TicketId) -> Option<&mut Row> {
        self.rows
            .get_mut(ticket.number as usize)
            .filter(|row| row.generation == ticket.generation)
    }

    fn end(&mut self, number: u32, state: TicketState) -> Option<Live> {
        let row = self.rows.get_mut(number as usize)?;
        match std::mem::replace(&mut row.state, state) {
            TicketState::Live(live) => {
                self.ended.push_back(number);
                Some(live)
            }
            ended => {
                row.state = ended;
                None
            }
        }
    }

    /// Takes the row that ended longest ago, if enough have ended since.
    fn reusable(&mut self) -> Option<u32> {
        (self.ended.len() > REMEMBERED)
            .then(|| self.ended.pop_front())
            .flatten()
    }
}
