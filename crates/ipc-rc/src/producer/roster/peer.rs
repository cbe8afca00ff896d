//! A participant, as its producer knows it.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use allocators::{Holder, Region};
use gpu_api::lock::Acquire;
use gpu_api::{Access, Error, Gpu, HostPtr, ParticipantId, RegionId, Result, WordPtr};

use crate::gone::Gone;
use crate::producer::blocks::block::Block;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::fences::words::Words;
use crate::producer::grants::ledger::{Granted, Refusal};
use crate::producer::grants::slot_group::{Effort, Terms};
use crate::producer::notice::Departure;
use crate::producer::roster::ledger_table::Leases;
use crate::producer::roster::told::Told;
use transport::os::clock::Tick;
use transport::os::closer::Foreign;
use transport::server::{Newcomer, Proof, Seat};
use transport::shared::counter_file::CounterFile;
use transport::wire::descriptor::{Descriptor, KeptSealer, SealKey, Sealer};
use transport::wire::message::RefusalCode;

/// How far a participant has gone, beside the proof of its death.
#[derive(Debug, Default)]
pub(crate) struct Leaving {
    /// It said goodbye: its leases have ended, and what it maps goes with it.
    pub said_goodbye: bool,
    /// When its connection was seen to have ended.
    pub hung_up: Option<Instant>,
    /// The process has exited, and a child that it forked still had the connection.
    pub is_outlived: bool,
    /// When its death was proven, or the driver's last sign of life went. The quarantine follows.
    pub proven: Option<Instant>,
}

/// How long the end of a connection waits for the end of its process, which tells a death from a
/// lost connection. A dying process closes its sockets a moment before its pidfd becomes readable.
const EXIT_FOLLOWS: Duration = Duration::from_millis(100);

/// How long it waits for a process that the kernel is already ending. A driver takes the process's
/// contexts down in between, which took NVIDIA's more than 100 ms on a GPU with other users.
const EXIT_LASTS: Duration = Duration::from_secs(30);

/// The least quarantine where a forked child had the connection last. The child's end is told by the
/// hang-up alone, which comes before the driver stops the GPU's work: on two busy H200 a write came
/// more than 100 ms after it, and the driver took up to 450 ms to take a context down.
const OUTLIVED: Duration = Duration::from_secs(2);

impl Leaving {
    /// Returns how long after the proof what it held is kept from reuse, where `needed` is what the
    /// device's driver needs after the end of all processes.
    pub fn quarantine(&self, needed: Duration) -> Duration {
        if self.is_outlived {
            needed.max(OUTLIVED)
        } else {
            needed
        }
    }

    /// Returns how the participant went, and `None` while that may still become known.
    /// `is_exiting` asks whether the kernel is ending the process.
    pub fn departure(
        &self,
        proof: Proof,
        now: Instant,
        is_exiting: impl FnOnce() -> bool,
    ) -> Option<Departure> {
        if self.said_goodbye {
            Some(Departure::Goodbye)
        } else if proof.exited {
            Some(Departure::Died)
        } else {
            let left = self.until_departed(proof, now, is_exiting)?;
            left.is_zero().then_some(Departure::ConnectionLost)
        }
    }

    /// Returns how long the end of the process is still waited for after the end of its connection.
    pub fn until_departed(
        &self,
        proof: Proof,
        now: Instant,
        is_exiting: impl FnOnce() -> bool,
    ) -> Option<Duration> {
        let hung_up = self
            .hung_up
            .filter(|_| !self.said_goodbye && !proof.exited)?;
        let since = now.duration_since(hung_up);
        let follows = EXIT_FOLLOWS.saturating_sub(since);
        if follows.is_zero() && is_exiting() {
            return Some(EXIT_LASTS.saturating_sub(since));
        }
        Some(follows)
    }
}

/// What a participant wished for: a descriptor to forward, or that a deposit is kept, for which
/// there is nothing to say.
pub(crate) type Granting = Result<Option<Box<Descriptor>>, (RefusalCode, String)>;

/// One participant.
#[derive(Debug)]
pub(crate) struct Peer {
    pub id: ParticipantId,
    /// What it calls itself, or else the command that it runs.
    pub name: String,
    /// Of the descriptors that are addressed to it.
    pub key: SealKey,
    pub sealer: KeptSealer,
    pub seat: Arc<Seat>,
    /// Files that the driver shows while GPU work of the process may run, with their inodes: a pid
    /// is used again.
    signs_of_life: Vec<(PathBuf, u64)>,
    /// At its place; its own until it leaves.
    pub ledger: Arc<Leases>,
    pub words: Words,
    leaving: Mutex<Leaving>,
    /// No grant is made to it any more.
    pub gone: AtomicBool,
    told: Mutex<Told<Arc<Region>, Granting>>,
    files: Mutex<Vec<Arc<CounterFile>>>,
    registrations: Mutex<Vec<HostPtr>>,
}

/// What comes with a participant that said hello.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub id: ParticipantId,
    /// What it calls itself, or else the command that it runs.
    pub name: String,
    pub key: SealKey,
    pub sealer: Sealer,
    pub newcomer: Newcomer,
    /// The number under which the driver shows its GPU work, as it says.
    pub sign: u32,
}

/// Finds the inode of a file, if it is there.
fn with_inode(path: PathBuf) -> Option<(PathBuf, u64)> {
    let inode = path.metadata().ok()?.ino();
    Some((path, inode))
}

impl Peer {
    /// Says whether the driver showed the life of the process when it connected.
    pub fn is_shown(&self) -> bool {
        !self.signs_of_life.is_empty()
    }

    /// Says whether the driver shows that GPU work of the process may still run.
    pub fn shows_life(&self) -> bool {
        self.signs_of_life
            .iter()
            .any(|sign| with_inode(sign.0.clone()).as_ref() == Some(sign))
    }

    /// Makes the record. `registered` is where the first counter file starts and where streams see
    /// it.
    pub fn new(
        arrival: Arrival,
        socket: Foreign,
        gpu: &Gpu,
        ledger: Arc<Leases>,
        file: &Arc<CounterFile>,
        registered: Option<(HostPtr, WordPtr)>,
    ) -> Peer {
        let seat = arrival.newcomer.sit_down(socket);
        Peer {
            id: arrival.id,
            name: arrival.name,
            key: arrival.key,
            sealer: arrival.sealer.into(),
            leaving: Mutex::default(),
            signs_of_life: gpu
                .backend()
                .signs_of_life(seat.pid, arrival.sign)
                .into_iter()
                .filter_map(with_inode)
                .collect(),
            words: Words::new(file.clone(), registered.map(|(_, words)| words)),
            seat: Arc::new(seat),
            ledger,
            gone: AtomicBool::new(false),
            told: Mutex::default(),
            files: Mutex::new(vec![file.clone()]),
            registrations: Mutex::new(registered.iter().map(|(start, _)| *start).collect()),
        }
    }

    /// Begins to be granted leases, in its first counter file.
    pub fn open_ledger(&self) {
        self.ledger.open(self.id, *self.sealer);
        self.ledger.add_file(&self.files.acquire()[0]);
    }

    /// Returns its holdings.
    pub fn holder(&self, now: Tick) -> Holder {
        let tally = self.ledger.tally(now, |block| block.len());
        Holder {
            participant: self.id,
            pid: self.seat.pid,
            command: self.name.clone(),
            leases: tally.in_flight + tally.held + tally.corrupt,
            bytes: tally.bytes,
            mappings: self.mappings() as u64,
            oldest: tally.oldest,
            dying: self.gone.load(Ordering::Relaxed),
        }
    }

    /// Grants a lease. When all slots are in use it collects leases that have ended, which finds
    /// those on blocks that live on; when that gives no room it adds a counter file within the quota.
    ///
    /// `announce` sends the participant a file that was added, before any of its slots is granted.
    /// One that does not arrive is asked for. `retire` drops what a collect gives back.
    pub fn grant(
        &self,
        block: &Arc<Block>,
        terms: Terms,
        max_slots: u64,
        announce: impl Fn(u32, &CounterFile),
        retire: impl Fn(&mut ReclaimedBlocks<Arc<Block>>),
    ) -> Result<Granted> {
        let grant = || self.ledger.grant_sealed(self.id, block, terms);
        loop {
            match grant() {
                Ok(granted) => return Ok(granted),
                Err(Refusal::Gone) => {
                    return Err(Gone::Participant(self.id).into());
                }
                Err(Refusal::Full) => {}
            }
            let mut ended = ReclaimedBlocks::new();
            self.ledger.collect(Effort::Marked, &mut ended);
            if !ended.is_empty() {
                retire(&mut ended);
                if let Ok(entry) = grant() {
                    return Ok(entry);
                }
            }
            let mut files = self.files.acquire();
            let have: u64 = files.iter().map(|file| u64::from(file.slot_count())).sum();
            // Another thread may have added a file while this one waited for the lock.
            if let Ok(granted) = grant() {
                return Ok(granted);
            }
            let slots = Leases::next_file_slots(files.len() as u32);
            if have + u64::from(slots) > max_slots {
                return Err(Error::exhausted(
                    "lease slots of a participant",
                    have,
                    "let it release some, or raise the session's `max_slots` (`max_leases` in Python and C)",
                ));
            }
            let file = Arc::new(CounterFile::create(slots)?);
            announce(files.len() as u32, &file);
            self.ledger.add_file(&file);
            files.push(file);
        }
    }

    /// Returns one of its counter files.
    pub fn file(&self, index: u32) -> Option<Arc<CounterFile>> {
        self.files.acquire().get(index as usize).cloned()
    }

    /// Notes that it may map a region so, before it learns how.
    pub fn note_mapping(&self, region: &Arc<Region>, access: Access) {
        self.told()
            .note_mapping(region.id().with_access(access), || {
                region.pin();
                region.clone()
            });
    }

    /// Notes that it has not mapped a region, and returns it if it might have.
    pub fn note_unmapping(&self, region: RegionId) -> Option<Arc<Region>> {
        let region = self.told().note_unmapping(region)?;
        region.unpin();
        Some(region)
    }

    /// Locks what it was told.
    pub fn told(&self) -> MutexGuard<'_, Told<Arc<Region>, Granting>> {
        self.told.acquire()
    }

    /// Counts the regions that it may have mapped.
    pub fn mappings(&self) -> usize {
        self.told().mapped().len()
    }

    /// Lists the regions that it may have mapped.
    pub fn mapped(&self) -> Vec<RegionId> {
        self.told().mapped().collect()
    }

    /// Gives up all its regions and returns them: it is proven dead, or has said goodbye.
    pub fn forget_mappings(&self) -> Vec<Arc<Region>> {
        let regions: Vec<Arc<Region>> = self.told().forget_mappings().collect();
        regions.iter().for_each(|region| region.unpin());
        regions
    }

    /// Takes back the unclaimed and refuses what comes.
    pub fn close(&self, out: &mut ReclaimedBlocks<Arc<Block>>) {
        self.gone.store(true, Ordering::Relaxed);
        self.ledger.close(out);
    }

    /// Takes the registrations, to end them on a thread that may block.
    pub fn take_registrations(&self) -> Vec<HostPtr> {
        std::mem::take(&mut *self.registrations.acquire())
    }

    /// Locks how far it has gone.
    pub fn leaving(&self) -> MutexGuard<'_, Leaving> {
        self.leaving.acquire()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_forked_child_kept_the_connection_of_rests_for_longer() {
        let needed = Duration::from_millis(100);
        let mut leaving = Leaving::default();
        assert_eq!(leaving.quarantine(needed), needed);
        leaving.is_outlived = true;
        assert_eq!(leaving.quarantine(needed), OUTLIVED);
        assert_eq!(leaving.quarantine(2 * OUTLIVED), 2 * OUTLIVED);
    }

    /// The kernel's last step may come seconds after the sockets are closed.
    #[test]
    fn a_process_that_is_being_ended_is_waited_for_before_its_connection_counts_as_lost() {
        let began = Instant::now();
        let leaving = Leaving {
            hung_up: Some(began),
            ..Leaving::default()
        };
        let hung_up = Proof {
            hung_up: true,
            ..Proof::default()
        };
        let at = |after| began + after;
        let soon = at(EXIT_FOLLOWS / 2);
        assert_eq!(leaving.departure(hung_up, soon, || false), None);
        let later = at(EXIT_FOLLOWS);
        let lost = Some(Departure::ConnectionLost);
        assert_eq!(leaving.departure(hung_up, later, || false), lost);
        assert_eq!(leaving.departure(hung_up, later, || true), None);
        let left = leaving.until_departed(hung_up, later, || true);
        assert_eq!(left, Some(EXIT_LASTS - EXIT_FOLLOWS));
        assert_eq!(leaving.departure(hung_up, at(EXIT_LASTS), || true), lost);
        let exited = Proof {
            exited: true,
            ..hung_up
        };
        let died = Some(Departure::Died);
        assert_eq!(leaving.departure(exited, at(EXIT_LASTS), || true), died);
    }
}
