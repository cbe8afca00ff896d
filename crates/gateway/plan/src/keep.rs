//! Whether to go on with a read.

use std::time::Duration;

use crate::view::{Source, View};

/// A read on its way.
#[derive(Clone, Copy, Debug)]
pub struct Reading<H> {
    /// The host that serves it.
    pub host: H,
    /// The time since it began.
    pub elapsed: Duration,
    /// The time since its last byte came.
    pub idle: Duration,
    /// Bytes that have come.
    pub done: u64,
    /// Bytes of the object.
    pub size: u64,
    /// Reads of this object that this host gave up because they were slow.
    pub given_up: u32,
}

/// What becomes of the read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on.
    Keep,
    /// Nothing has come for a whole read's time. The transfer may stay open for ever: its memory
    /// goes with the gateway.
    Stalled,
    /// It is slow, and another host serves.
    Slow,
}

/// Multiples of the expected time that a read may take at first.
const SLOW: u128 = 4;
/// Reads given up that double it.
const DOUBLED_BY: u32 = 4;
/// The shortest silence that counts as a stall.
const STALL: Duration = Duration::from_secs(2);

/// Decides whether a read goes on.
///
/// A read that would take over four times the expected time is given up once an eighth of the
/// expected time has passed, if another replica serves that did not fail. So little has come by
/// then that waiting for the other costs less. Four reads given up double the factor, so a host
/// whose own link is slower than it knows keeps its read at last. A host that reports no load and
/// serves everybody badly is left this way.
#[must_use]
pub fn keep<H: Copy + Ord>(view: &View<'_, H>, reading: &Reading<H>) -> Verdict {
    if reading.idle > STALL.max(view.expected) {
        return Verdict::Stalled;
    }
    let factor = SLOW << (reading.given_up / DOUBLED_BY).min(32);
    // Compares elapsed / done * size with factor * expected, without a division by 0.
    let projected = reading
        .elapsed
        .as_nanos()
        .saturating_mul(u128::from(reading.size));
    let allowed = view
        .expected
        .as_nanos()
        .saturating_mul(factor)
        .saturating_mul(u128::from(reading.done));
    if reading.elapsed < view.expected / 8 || projected <= allowed {
        return Verdict::Keep;
    }
    let serves = |source: Source<H>| {
        !source.origin && source.host != reading.host && !view.has_failed(source.host)
    };
    if view.others().into_iter().any(serves) {
        Verdict::Slow
    } else {
        Verdict::Keep
    }
}
