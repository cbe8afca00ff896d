//! What a run came to, beside the optimum.

use std::time::Duration;

use serde::Serialize;

use crate::scenario::{Host, LINK, SIZE, Trouble, one_read};

/// The figures of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Hosts, the origin among them.
    pub hosts: u32,
    /// What was wrong with them.
    pub trouble: Trouble,
    /// Hosts that lived and did not get the object. Anything but 0 is a defect.
    pub unfilled: u32,
    /// Hosts that died.
    pub died: u32,
    /// The time until the last host had the object, in times of one read over a whole link.
    pub rounds: f64,
    /// What no plan that forwards whole objects beats, in the same unit.
    pub optimum: f64,
    /// The longest chain of reads from the origin.
    pub depth: u32,
    /// Reads that the origin admitted.
    pub origin_reads: u32,
    /// Bytes that left the origin, in objects.
    pub origin_sent: f64,
    /// Bytes on the busiest link, in objects.
    pub busiest: f64,
    /// Bytes over the network for each host that got the object, in objects.
    pub read_per_host: f64,
    /// Requests for a lease for each host that got the object.
    pub asked_per_host: f64,
}

/// Returns the least number of rounds in which hosts that forward whole objects can be filled.
///
/// With whole links the number of hosts that have the object at most doubles in the time of one
/// read, so `n` take `ceil(log2 n)` of them. (Give a host that has it the weight 1, and a read of
/// which the part `p` has come `2^p - 1`. A host's weight and that of the reads it serves grow at
/// most as `2^t`, however it shares its link.) And nobody is filled faster than its own link is.
///
/// An engine that forwards pieces before the object is whole could come near one round. It would
/// serve bytes that nobody has confirmed.
#[must_use]
pub fn optimum(living: &[&Host]) -> f64 {
    let doublings = (living.len() as u32).next_power_of_two().trailing_zeros();
    let slowest = living
        .iter()
        .map(|host| LINK / host.link)
        .fold(0.0, f64::max);
    if living.len() < 2 {
        0.0
    } else {
        f64::from(doublings).max(slowest)
    }
}

/// Returns a time in rounds.
#[must_use]
pub fn rounds(time: Duration) -> f64 {
    time.as_secs_f64() / one_read().as_secs_f64()
}

/// Returns bytes in objects.
#[must_use]
pub fn objects(bytes: f64) -> f64 {
    bytes / SIZE
}
