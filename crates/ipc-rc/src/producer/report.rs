//! A session's counts and holders, as data.

use std::fmt;
use std::sync::atomic::Ordering;

use allocators::{Holder, Reclaim, SourceUsage};

use crate::producer::blocks::count::Amount;
use crate::producer::core::Core;
use transport::os::clock::Tick;
use transport::wire::message::{MOST_HOLDERS, NUMBERS, ReportPage, ToParticipant};

/// A session at one moment. Numbers are of blocks unless they say bytes; a sum taken while others
/// work is a picture of that moment, not a transaction.
///
/// # Examples
///
/// ```
/// # use backend_host::{HostBackend, HostConfig};
/// # use gpu_api::{DeviceId, Gpu};
/// # let dir = tempfile::tempdir()?;
/// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// use ipc_rc::{After, Claims, Session, To};
///
/// let session = Session::builder(gpu).socket(dir.path().join("s")).open()?;
/// let block = session.alloc(4096)?;
/// let descriptor = block.share(To::Ticket(Claims::Once), After::Done)?;
/// drop(block); // the ticket keeps it
/// let stats = session.stats();
/// assert_eq!((stats.tickets, stats.limbo_blocks, stats.limbo_bytes), (1, 1, 4096));
/// # drop(descriptor);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Blocks that exist: with the producer, shared, or in limbo.
    pub live_blocks: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Blocks that the producer dropped and something still holds.
    pub limbo_blocks: u64,
    /// Their bytes.
    pub limbo_bytes: u64,
    /// Of those, blocks that wait for streams on which no event could be recorded: a thread
    /// synchronises these.
    pub unmarked_blocks: u64,
    /// Leases granted and not claimed.
    pub in_flight: u64,
    /// Leases claimed and not released.
    pub held: u64,
    /// Leases of participants that are dead or gone, until proof and quarantine are over.
    pub quarantined: u64,
    /// Bytes of the blocks behind those.
    pub quarantined_bytes: u64,
    /// Leases whose slot holds an invalid word: their blocks are barred until the holder's death.
    pub poisoned: u64,
    /// Blocks that are never used again, because the end of the work on them cannot be observed.
    /// They stay live, and in limbo once the producer dropped them.
    pub leaked_blocks: u64,
    /// Their bytes.
    pub leaked_bytes: u64,
    /// Grants taken back by cancel, by the addressee's death or by its goodbye, so far.
    pub revoked: u64,
    /// Grants taken back because they were not claimed in time, so far.
    pub expired: u64,
    /// Participants that died with leases or mappings and are buried, so far.
    pub deaths: u64,
    /// Words found corrupt so far.
    pub corrupt_words: u64,
    /// Tickets that can still be claimed.
    pub tickets: u64,
    /// Participants that are connected, or dead and not buried yet.
    pub participants: u64,
    /// Participants, and what each holds.
    pub holders: Vec<Holder>,
    /// What the session's source of regions holds.
    pub source: SourceUsage,
}

/// The blocks and leases that were left when a shutdown's time was over.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Nothing was held any more.
    pub clean: bool,
    /// Blocks that still exist.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of those, blocks that this process itself has: their [`SentBlock`](crate::SentBlock) is not
    /// dropped.
    pub own_blocks: u64,
    /// Blocks that are never used again, because the end of the work on them could not be observed,
    /// or their source of regions panicked. No wait ends them.
    pub leaked_blocks: u64,
    /// Their bytes.
    pub leaked_bytes: u64,
    /// Tickets that connected processes can still claim: they hold blocks too.
    pub tickets: u64,
    /// Participants that hold leases or mappings.
    pub holders: Vec<Holder>,
}

impl ShutdownReport {
    /// Says whether nothing is left but what never ends.
    pub(crate) fn is_only_leaked(&self) -> bool {
        self.blocks <= self.leaked_blocks && self.holders.is_empty()
    }
}

impl fmt::Display for ShutdownReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.clean {
            return f.write_str("nothing is held");
        }
        write!(f, "{} blocks of {} bytes are held", self.blocks, self.bytes)?;
        if self.own_blocks > 0 {
            write!(f, "; {} by this process itself: drop them", self.own_blocks)?;
        }
        if self.tickets > 0 {
            write!(
                f,
                "; {} tickets that connected processes can still claim hold some of them",
                self.tickets
            )?;
        }
        if self.leaked_blocks > 0 {
            write!(
                f,
                "; {} blocks of {} bytes are leaked and never come back",
                self.leaked_blocks, self.leaked_bytes
            )?;
        }
        for Holder {
            participant,
            pid,
            command,
            leases,
            mappings,
            ..
        } in &self.holders
        {
            write!(
                f,
                "; {participant} ({command}, process {pid}) has {leases} leases and {mappings} mappings"
            )?;
        }
        Ok(())
    }
}

impl Stats {
    /// Lists the numbers in the order of the fields, as a message has them.
    fn each(&mut self) -> [&mut u64; NUMBERS] {
        [
            &mut self.live_blocks,
            &mut self.live_bytes,
            &mut self.limbo_blocks,
            &mut self.limbo_bytes,
            &mut self.unmarked_blocks,
            &mut self.in_flight,
            &mut self.held,
            &mut self.quarantined,
            &mut self.quarantined_bytes,
            &mut self.poisoned,
            &mut self.leaked_blocks,
            &mut self.leaked_bytes,
            &mut self.revoked,
            &mut self.expired,
            &mut self.deaths,
            &mut self.corrupt_words,
            &mut self.tickets,
            &mut self.participants,
            &mut self.source.regions,
            &mut self.source.reserved,
            &mut self.source.in_use,
            &mut self.source.pinned,
        ]
    }

    /// Reads what [`each`](Stats::each) listed.
    pub(crate) fn from_numbers(numbers: &[u64; NUMBERS]) -> Stats {
        let mut stats = Stats::default();
        stats
            .each()
            .into_iter()
            .zip(numbers)
            .for_each(|(field, number)| *field = *number);
        stats
    }
}

/// The blocks in limbo from which on a session warns: PyTorch's number
/// (`CUDA_IPC_WARN_AFTER_X_BLOCKS_IN_LIMBO`).
const MANY_IN_LIMBO: u64 = 1000;
/// The most holders that a warning names.
const NAMED: usize = 8;

impl Core {
    /// Warns, once, that very many blocks were dropped and are still held.
    pub fn warn_of_limbo(&self, limbo: Amount) {
        if limbo.blocks >= MANY_IN_LIMBO && !self.warned_of_limbo.swap(true, Ordering::Relaxed) {
            let (blocks, bytes, holders) = (limbo.blocks, limbo.bytes, self.name_holders());
            tracing::warn!(
                blocks,
                bytes,
                holders,
                "very many blocks were dropped and are still held"
            );
        }
    }

    /// Warns that the last handle of the session goes while blocks are held: they stay until their
    /// holders let go.
    pub fn warn_of_end(&self) {
        let live = self.memory.live.sum();
        let leases: u64 = self.holders().iter().map(|holder| holder.leases).sum();
        if leases > 0 {
            let (blocks, bytes, holders) = (live.blocks, live.bytes, self.name_holders());
            tracing::warn!(
                blocks,
                bytes,
                holders,
                "a session ends while others hold blocks of it"
            );
        }
    }

    fn name_holders(&self) -> String {
        let mut holders = self.holders();
        holders.retain(|holder| holder.leases > 0);
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        let name = |holder: &Holder| {
            format!(
                "process {} ({}): {} leases, {} bytes",
                holder.pid, holder.command, holder.leases, holder.bytes
            )
        };
        let mut named: Vec<String> = holders.iter().take(NAMED).map(name).collect();
        if holders.len() > NAMED {
            named.push(format!("{} more", holders.len() - NAMED));
        }
        named.join("; ")
    }
}

impl Core {
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            holders: self.holders(),
            ..self.sums()
        }
    }

    /// Answers an inspection of the session, with its holders from an index on.
    pub(crate) fn report(&self, request: u64, from: u32) -> ToParticipant {
        let now = Tick::now();
        let peers = self.roster.peers();
        let mut holders = Vec::new();
        let mut next = None;
        for (place, peer) in (0..).zip(peers.iter()).skip(from as usize) {
            let Some(peer) = peer else { continue };
            if holders.len() == MOST_HOLDERS {
                next = Some(place);
                break;
            }
            holders.push(peer.holder(now));
        }
        let page = ReportPage {
            session: self.facts.id,
            device: self.facts.gpu.uuid(),
            backend: self.facts.backend,
            pid: std::process::id(),
            age_ms: u64::try_from(now.since(self.facts.start).as_millis()).unwrap_or(u64::MAX),
            numbers: self.sums().each().map(|number| *number),
            next,
            holders,
        };
        ToParticipant::Report {
            request,
            page: Box::new(page),
        }
    }

    fn sums(&self) -> Stats {
        let memory = &self.memory;
        let (live, limbo, leaked) = (memory.live.sum(), memory.limbo.sum(), memory.leaked.sum());
        let tallies = &self.tallies;
        let now = Tick::now();
        let mut stats = Stats {
            live_blocks: live.blocks,
            live_bytes: live.bytes,
            limbo_blocks: limbo.blocks,
            limbo_bytes: limbo.bytes,
            unmarked_blocks: self.pending.unmarked() as u64,
            leaked_blocks: leaked.blocks,
            leaked_bytes: leaked.bytes,
            revoked: tallies.revoked.load(Ordering::Relaxed),
            expired: tallies.expired.load(Ordering::Relaxed),
            deaths: tallies.deaths.load(Ordering::Relaxed),
            corrupt_words: tallies.corrupt_words.load(Ordering::Relaxed),
            tickets: self.tickets.live() as u64,
            source: memory
                .ask_source(|source| source.usage())
                .unwrap_or_default(),
            ..Stats::default()
        };
        for peer in self.roster.peers().iter().flatten() {
            stats.participants += 1;
            let tally = peer.ledger.tally(now, |block| block.len());
            stats.in_flight += tally.in_flight;
            stats.held += tally.held;
            stats.poisoned += tally.corrupt;
            stats.corrupt_words += peer.ledger.corrupt_words() as u64;
            if peer.gone.load(Ordering::Relaxed) {
                stats.quarantined += tally.in_flight + tally.held + tally.corrupt;
                stats.quarantined_bytes += tally.bytes;
            }
        }
        stats
    }

    pub(crate) fn shutdown_report(&self) -> ShutdownReport {
        let (leaked, live) = (self.memory.leaked.sum(), self.memory.live.sum());
        let holders: Vec<Holder> = self
            .holders()
            .into_iter()
            .filter(|holder| holder.leases > 0 || holder.mappings > 0)
            .collect();
        ShutdownReport {
            clean: live.blocks == 0 && holders.is_empty(),
            blocks: live.blocks,
            bytes: live.bytes,
            // Read after: a block that is dropped meanwhile is nobody's own.
            own_blocks: live.blocks.saturating_sub(self.memory.limbo.sum().blocks),
            leaked_blocks: leaked.blocks,
            leaked_bytes: leaked.bytes,
            tickets: self.tickets.live() as u64,
            holders,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_arrives_in_its_field() {
        let numbers: [u64; NUMBERS] = std::array::from_fn(|n| n as u64 + 100);
        let mut stats = Stats::from_numbers(&numbers);
        assert_eq!(stats.each().map(|number| *number), numbers);
        assert_eq!(
            (
                stats.live_blocks,
                stats.unmarked_blocks,
                stats.held,
                stats.revoked
            ),
            (100, 104, 106, 112)
        );
        assert_eq!(
            (stats.expired, stats.participants, stats.source.pinned),
            (113, 117, 121)
        );
    }
}
