//! Whom to serve.

use std::time::Duration;

/// Reads of one object that a host serves at a time, so that each gets the whole link.
pub const READS_AT_ONCE: u32 = 1;
/// Reads of one object that a host serves at a time at most, those that do not count among them.
const READS_IN_ALL: u32 = 8;
/// Reads of an object after which its origin steps aside, if others serve.
const ORIGIN_READS: u32 = 2;

/// What a host that has an object knows of its own service.
#[derive(Clone, Copy, Debug)]
pub struct Desk<'a> {
    /// Whether the object was committed here first.
    pub origin: bool,
    /// The age of each read of it at this moment.
    pub reads: &'a [Duration],
    /// What a read takes when nothing is in its way: the object's size over the best rate of this
    /// host's own link.
    pub expected: Duration,
    /// Reads of it that were admitted and did not fail, those of this moment among them.
    pub admitted: u32,
    /// Other hosts that have it, as far as the asker and this host have heard.
    pub others: u32,
}

/// The answer to a host that asks for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It may read.
    Admit,
    /// As many read as may at a time.
    Busy,
    /// The origin has served its share, and others have the object.
    OthersServe,
}

impl Desk<'_> {
    /// Counts the reads that take this host's link.
    ///
    /// A read that has lasted half as long again as expected has a slow reader, or a dead one: it
    /// leaves most of the link to others, and does not count.
    #[must_use]
    pub fn counted(&self) -> u32 {
        self.reads
            .iter()
            .filter(|&&age| age <= self.expected + self.expected / 2)
            .count() as u32
    }

    /// Returns the reads to announce: an origin that has stepped aside says that it is full.
    #[must_use]
    pub fn announced(&self) -> u32 {
        announced(self.origin, self.counted(), self.admitted, self.others)
    }

    fn aside(&self) -> bool {
        steps_aside(self.origin, self.admitted, self.others)
    }
}

/// Returns the reads that a host counts as having, for one that knows `others` that have the object
/// too: an origin that steps aside for them counts as full.
#[must_use]
pub fn announced(origin: bool, reads: u32, admitted: u32, others: u32) -> u32 {
    if steps_aside(origin, admitted, others) {
        READS_AT_ONCE.max(reads)
    } else {
        reads
    }
}

fn steps_aside(origin: bool, admitted: u32, others: u32) -> bool {
    origin && others > 0 && admitted >= ORIGIN_READS
}

/// Decides whether to serve a host that asks.
///
/// A request of last resort finds room for one more, and is not pointed to the others: they failed
/// it.
#[must_use]
pub fn admit(desk: &Desk<'_>, last_resort: bool) -> Admission {
    let room = READS_AT_ONCE + u32::from(last_resort);
    if desk.counted() >= room || desk.reads.len() as u32 >= READS_IN_ALL {
        Admission::Busy
    } else if desk.aside() && !last_resort {
        Admission::OthersServe
    } else {
        Admission::Admit
    }
}
