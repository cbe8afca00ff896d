//! What one host has heard from others and seen itself.

use std::time::Duration;

/// What a host knows about one object that it wants.
///
/// All times are this host's own monotonic clock, from any zero. `H` names a host: an address, a
/// number, a string.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, H> {
    /// This host.
    pub me: H,
    /// When the decision is taken.
    pub now: Duration,
    /// When this host began to want the object.
    pub wanted_since: Duration,
    /// What one read of the object takes when nothing is in its way: the object's size over the
    /// best rate of this host's own link.
    pub expected: Duration,
    /// Hosts that announce the object. The order has no influence; of a host named twice the entry
    /// with more reads counts.
    pub sources: &'a [Source<H>],
    /// What went wrong for this host with others. Of a host named twice the entry that bars longest
    /// counts.
    pub troubles: &'a [Trouble<H>],
    /// Draws between equals. A gateway takes another for each decision, or all hosts of a cluster
    /// would draw alike.
    pub seed: u64,
}

/// A host that announces the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source<H> {
    /// Its name.
    pub host: H,
    /// Whether the object was committed there first.
    pub origin: bool,
    /// When this host first heard the announcement.
    pub heard: Duration,
    /// The reads that it says it serves.
    pub reads: u32,
    /// The reads that it says it serves at most at a time.
    pub limit: u32,
}

/// What this host saw go wrong with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trouble<H> {
    /// The other host.
    pub host: H,
    /// What happened last.
    pub kind: TroubleKind,
    /// How often it happened without a read that succeeded in between, at least 1.
    pub times: u32,
    /// When it last happened.
    pub at: Duration,
}

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TroubleKind {
    /// It declined, being busy. It is alive and may serve later.
    Refused,
    /// The read failed, stalled or was not confirmed, or the host did not answer.
    Failed,
    /// The read was given up because it was slow.
    Slow,
}

/// Pauses that a refusal bars its host, at first and at most.
const REFUSED: (u32, u32) = (1, 8);
/// Pauses that a failure bars its host, at first and at most.
const FAILED: (u32, u32) = (4, 256);
/// Pauses that slowness bars its host, at first and at most: eight reads, since it will be slow
/// again.
const SLOW: (u32, u32) = (64, 512);
/// A host out of patience has waited as many reads without hearing of a further source.
const PATIENCE: u32 = 4;

impl<H: Copy + Ord> View<'_, H> {
    /// Returns how long a host waits before it looks again: an eighth of a read, from 10 ms to 1 s.
    #[must_use]
    pub fn pause(&self) -> Duration {
        (self.expected / 8).clamp(Duration::from_millis(10), Duration::from_secs(1))
    }

    /// Returns the other hosts that announce the object, each once, in their order.
    pub(crate) fn others(&self) -> Vec<Source<H>> {
        let mut others: Vec<_> = self
            .sources
            .iter()
            .copied()
            .filter(|source| source.host != self.me)
            .collect();
        others.sort_by_key(|source| (source.host, std::cmp::Reverse(source.reads)));
        others.dedup_by_key(|source| source.host);
        others
    }

    /// Returns when a host may be asked again, if it may not be asked at this moment.
    pub(crate) fn barred_until(&self, host: H) -> Option<Duration> {
        self.bars(host, |_| true)
    }

    /// Says whether a host failed this one or was slow, and so recently that it does not count as
    /// serving.
    pub(crate) fn has_failed(&self, host: H) -> bool {
        self.bars(host, |kind| kind != TroubleKind::Refused)
            .is_some()
    }

    fn bars(&self, host: H, counts: impl Fn(TroubleKind) -> bool) -> Option<Duration> {
        let troubles = self
            .troubles
            .iter()
            .filter(|trouble| trouble.host == host && counts(trouble.kind));
        let ends = troubles.map(|trouble| {
            let (first, most) = match trouble.kind {
                TroubleKind::Refused => REFUSED,
                TroubleKind::Failed => FAILED,
                TroubleKind::Slow => SLOW,
            };
            let doublings = trouble.times.saturating_sub(1).min(8);
            trouble
                .at
                .saturating_add(self.pause() * (first << doublings).min(most))
        });
        ends.max().filter(|&end| end > self.now)
    }

    /// Says whether this host has waited in vain for so long that it asks hosts which seem busy,
    /// and the origin too.
    ///
    /// A further source shows that the object spreads, so the wait counts from the newest one. That
    /// time is this host's own first hearing: no announcement can put it off twice.
    pub(crate) fn out_of_patience(&self, serving: &[Source<H>]) -> bool {
        let newest = serving
            .iter()
            .map(|source| source.heard)
            .max()
            .unwrap_or_default();
        let wait = self.now.saturating_sub(newest.max(self.wanted_since));
        wait > (self.expected * PATIENCE).max(self.pause() * PATIENCE)
    }
}
