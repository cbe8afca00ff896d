//! Memory that all processes of a run share: what each counted stays counted, at whatever
//! instruction it is killed.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::time::{ClockId, clock_gettime};

/// The most processes at a time.
pub const MOST_MEMBERS: usize = 320;
/// Deaths that are timed at a time.
const DEATHS: usize = 256;
/// Grants whose claims are counted at a time.
const GRANTS: usize = 1 << 16;
/// Bits of a grant's word that count its claims.
const CLAIM_BITS: u32 = 16;

/// Something that is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Count {
    /// Leases claimed.
    Claims,
    /// Of these, leases of blocks that lie across pieces.
    Across,
    /// Contents that changed while they were held, and bytes given out while they were in use.
    EarlyReuse,
    /// Bytes given back twice, and grants claimed more often than they may be.
    DoubleRetire,
    /// Blocks that did not come back.
    LeakedBlocks,
    /// Processes forked.
    Forks,
    /// Duplicates that were refused.
    Refused,
    /// Leases forwarded.
    Forwards,
    /// Deaths whose blocks came back.
    Reclaims,
    /// Regions that were not given back at the end.
    LeakedRegions,
    /// Producers that took more and more, or gave back less than they took.
    Grown,
    /// Allocations that found no room on a device that has more than enough.
    OutOfMemory,
    /// Allocations that found no room on a device that is small on purpose.
    NoRoom,
    /// Grants that found no slot.
    Full,
    /// Calls that found no file descriptor.
    FewFiles,
    /// Writes armed for after a death.
    LateWrites,
    /// Of these, such as came after the quarantine: the machine had no time for them before.
    TooLate,
    /// Connections that said nothing.
    Silent,
    /// Connections that said half a hello, or anything.
    Nonsense,
    /// Connections that said hello and hung up.
    Abandoned,
    /// Connections that were shut for writing.
    HalfClosed,
    /// Connects whose time was over.
    GaveUp,
    /// Connections of a user that is not let in.
    Strangers,
    /// Connects as they should be, of processes that did all of that too.
    Visits,
}

impl Count {
    /// Says what is counted, to people.
    pub fn in_words(self) -> &'static str {
        match self {
            Count::Refused => "descriptors sent twice, and refused the second time",
            Count::Forwards => "leases forwarded",
            Count::NoRoom => "allocations without room, on devices that are small on purpose",
            Count::Full => "grants that found no slot, and were refused",
            Count::FewFiles => "calls that found no descriptor, where few are allowed on purpose",
            Count::LateWrites => "writes that a killed process had left to its GPU",
            Count::TooLate => {
                "of these, after the quarantine: the machine had no time for them before, which is no finding"
            }
            _ => "others",
        }
    }
}

const COUNTS: usize = Count::Visits as usize + 1;

/// How far a run is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    /// Everybody works.
    Work = 0,
    /// Producers share nothing more.
    Quiet = 1,
    /// Consumers take what is on its way, and let go.
    LetGo = 2,
    /// Producers look whether anybody still holds something.
    Settle = 3,
    /// Consumers end.
    Leave = 4,
    /// Producers look what is left, and end.
    Finish = 5,
}

/// One process, as the others see it.
#[derive(Debug)]
#[repr(C)]
pub struct Member {
    /// Rises while it works.
    pub beat: AtomicU64,
    /// Its number in the run, which is never used again; 0 when it cannot be reached.
    pub serial: AtomicU64,
    /// The serial of the producer that a consumer is connected to.
    pub producer: AtomicU64,
    /// Its number in the session.
    pub participant: AtomicU64,
    /// 1 once it has forked: its death alone proves nothing.
    pub forked: AtomicU32,
    /// For producers: 1 when it shall end on its own; 2 when it shares nothing more; 3 when it has
    /// looked whether anybody holds something. For consumers: 2 when it has let go of everything.
    pub ending: AtomicU32,
}

/// A death whose blocks have not come back yet.
#[derive(Debug)]
#[repr(C)]
struct Death {
    /// When, in nanoseconds; 0 for no death.
    at: AtomicU64,
    producer: AtomicU64,
    participant: AtomicU64,
}

/// What all processes see. All zeroes is a board on which nothing has happened.
#[derive(Debug)]
#[repr(C)]
pub struct Board {
    phase: AtomicU32,
    next_grant: AtomicU64,
    next_death: AtomicU64,
    slowest_reclaim: AtomicU64,
    counts: [AtomicU64; COUNTS],
    members: [Member; MOST_MEMBERS],
    deaths: [Death; DEATHS],
    grants: [AtomicU64; GRANTS],
}

impl Board {
    /// Makes a file for one, or opens the one that is there.
    pub fn open(path: &Path) -> io::Result<&'static Board> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        file.set_len(size_of::<Board>() as u64)?;
        map(&file)
    }

    /// Returns how far the run is.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Work,
            1 => Phase::Quiet,
            2 => Phase::LetGo,
            3 => Phase::Settle,
            4 => Phase::Leave,
            _ => Phase::Finish,
        }
    }

    /// Goes on to a phase.
    pub fn enter(&self, phase: Phase) {
        self.phase.store(phase as u32, Ordering::Release);
    }

    /// Counts something once.
    pub fn count(&self, what: Count) {
        self.add(what, 1);
    }

    /// Counts something so often.
    pub fn add(&self, what: Count, times: u64) {
        self.counts[what as usize].fetch_add(times, Ordering::Relaxed);
    }

    /// Says how often something was counted.
    pub fn counted(&self, what: Count) -> u64 {
        self.counts[what as usize].load(Ordering::Relaxed)
    }

    /// Returns a process' place.
    pub fn member(&self, place: usize) -> &Member {
        &self.members[place]
    }

    /// Returns the serials and numbers of the participants that are connected to a producer.
    pub fn partners(&self, producer: u64) -> Vec<(u64, u64)> {
        let of = |member: &Member| {
            let serial = member.serial.load(Ordering::Acquire);
            (serial != 0 && member.producer.load(Ordering::Relaxed) == producer)
                .then(|| (serial, member.participant.load(Ordering::Relaxed)))
        };
        self.members.iter().filter_map(of).collect()
    }

    /// Numbers a grant: never 0.
    pub fn next_grant(&self) -> u64 {
        self.next_grant.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Counts the claim of a grant, and says whether it may be claimed so often. `most` is 0 for
    /// any number.
    pub fn claimed(&self, grant: u64, most: u64) -> bool {
        self.count(Count::Claims);
        if most == 0 {
            return true;
        }
        let word = &self.grants[grant as usize % GRANTS];
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            let before = match (seen >> CLAIM_BITS).cmp(&grant) {
                std::cmp::Ordering::Equal => seen & ((1 << CLAIM_BITS) - 1),
                std::cmp::Ordering::Less => 0,
                // So old that a later grant has its place.
                std::cmp::Ordering::Greater => return true,
            };
            let after = (grant << CLAIM_BITS) | (before + 1);
            match word.compare_exchange_weak(seen, after, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return before < most,
                Err(other) => seen = other,
            }
        }
    }

    /// Notes a death whose blocks shall come back.
    pub fn note_death(&self, producer: u64, participant: u64) {
        let death = &self.deaths[self.next_death.fetch_add(1, Ordering::Relaxed) as usize % DEATHS];
        death.at.store(0, Ordering::Relaxed);
        death.producer.store(producer, Ordering::Relaxed);
        death.participant.store(participant, Ordering::Relaxed);
        death.at.store(nanoseconds(), Ordering::Release);
    }

    /// Takes the time that a producer was stopped off that of the deaths it has to notice.
    pub fn excuse_deaths(&self, producer: u64, stopped: Duration) {
        let (now, stopped) = (
            nanoseconds(),
            u64::try_from(stopped.as_nanos()).unwrap_or(u64::MAX),
        );
        for death in self
            .deaths
            .iter()
            .filter(|death| death.producer.load(Ordering::Relaxed) == producer)
        {
            let at = death.at.load(Ordering::Relaxed);
            if at != 0 {
                // One that came while it was stopped begins when it goes on.
                let _ = death.at.compare_exchange(
                    at,
                    at.saturating_add(stopped).min(now),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
            }
        }
    }

    /// Ends the time of the deaths that a producer had to notice and did not: it is dead itself.
    /// They took at least so long.
    pub fn end_deaths(&self, producer: u64) {
        for death in self
            .deaths
            .iter()
            .filter(|death| death.producer.load(Ordering::Relaxed) == producer)
        {
            let at = death.at.swap(0, Ordering::Relaxed);
            if at != 0 {
                self.slowest_reclaim
                    .fetch_max(nanoseconds().saturating_sub(at), Ordering::Relaxed);
            }
        }
    }

    /// Takes the time of deaths whose participants hold nothing more.
    pub fn time_reclaims(&self, producer: u64, holders: &[u64]) {
        for death in self
            .deaths
            .iter()
            .filter(|death| death.producer.load(Ordering::Relaxed) == producer)
        {
            let at = death.at.load(Ordering::Acquire);
            if at != 0 && !holders.contains(&death.participant.load(Ordering::Relaxed)) {
                let taken = death
                    .at
                    .compare_exchange(at, 0, Ordering::Relaxed, Ordering::Relaxed);
                if taken.is_ok() {
                    self.count(Count::Reclaims);
                    self.slowest_reclaim
                        .fetch_max(nanoseconds().saturating_sub(at), Ordering::Relaxed);
                }
            }
        }
    }

    /// Says whether deaths are noted that a producer has to notice.
    pub fn has_deaths(&self, producer: u64) -> bool {
        let of = |death: &Death| death.producer.load(Ordering::Relaxed) == producer;
        self.deaths
            .iter()
            .any(|death| of(death) && death.at.load(Ordering::Relaxed) != 0)
    }

    /// Returns the longest time from a death to the return of its blocks, in milliseconds.
    pub fn slowest_reclaim_ms(&self) -> f64 {
        self.slowest_reclaim.load(Ordering::Relaxed) as f64 / 1e6
    }
}

/// Maps a file of the right length as a value all of whose fields are atomic, until the process
/// ends.
pub fn map<T: Shared>(file: &std::fs::File) -> io::Result<&'static T> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    if file.metadata()?.len() < size_of::<T>() as u64 {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    // SAFETY: `mmap` at no address of ours replaces no mapping.
    let page = unsafe {
        mmap(
            std::ptr::null_mut(),
            size_of::<T>(),
            access,
            MapFlags::SHARED,
            file,
            0,
        )
    }?;
    // SAFETY: the pointer is page-aligned and valid for the whole type, because the file has that
    // length and only ever grows; it is never unmapped; others change the memory, and every field
    // is atomic, for which any bits are valid.
    Ok(unsafe { &*page.cast::<T>() })
}

/// Made of atomic integers alone.
///
/// # Safety
///
/// Every field is an atomic integer or made of such, and the layout is the same in every process.
pub unsafe trait Shared {}

// SAFETY: its fields are atomic integers, arrays and structs of them, and it and they are
// `repr(C)`.
unsafe impl Shared for Board {}

/// Reads the same clock in microseconds.
pub fn microseconds() -> u64 {
    nanoseconds() / 1000
}

/// Reads the clock that all processes of a host share, pid namespaces or not.
fn nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_claimed_no_more_often_than_it_may() {
        let dir = tempfile::tempdir().expect("a directory");
        let board = Board::open(&dir.path().join("board")).expect("a board");
        assert!(board.claimed(1, 1));
        assert!(
            !board.claimed(1, 1),
            "a second claim of what may be claimed once"
        );
        assert!(board.claimed(2, 2) && board.claimed(2, 2) && !board.claimed(2, 2));
        assert!((0..10).all(|_| board.claimed(3, 0)));
        let later = 1 + GRANTS as u64;
        assert!(board.claimed(later, 1));
        assert!(board.claimed(1, 1), "nobody knows any more");
        assert!(!board.claimed(later, 1));
        assert_eq!(board.counted(Count::Claims), 18);
    }

    #[test]
    fn a_death_is_timed_when_nothing_is_held_any_more() {
        let dir = tempfile::tempdir().expect("a directory");
        let board = Board::open(&dir.path().join("board")).expect("a board");
        board.note_death(7, 1);
        board.time_reclaims(7, &[1]);
        board.time_reclaims(8, &[]);
        assert!(board.has_deaths(7));
        assert_eq!(board.slowest_reclaim_ms(), 0.0);
        board.time_reclaims(7, &[2]);
        assert!(!board.has_deaths(7));
        assert!(board.slowest_reclaim_ms() > 0.0);
        assert_eq!(board.counted(Count::Reclaims), 1);
    }

    #[test]
    fn a_death_counts_when_its_producer_dies_first_and_stops_do_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let board = Board::open(&dir.path().join("board")).expect("a board");
        board.note_death(7, 1);
        board.excuse_deaths(7, Duration::from_secs(3_600));
        let before = nanoseconds();
        board.end_deaths(7);
        let passed = (nanoseconds() - before) as f64 / 1e6;
        assert!(!board.has_deaths(7) && board.counted(Count::Reclaims) == 0);
        assert!(
            board.slowest_reclaim_ms() <= passed + 1e3,
            "the stop was counted"
        );
        board.note_death(8, 1);
        while nanoseconds() < before + 5_000_000 {}
        board.end_deaths(8);
        assert!(board.slowest_reclaim_ms() > 0.0, "it was forgotten");
    }
}
