//! How an allocator is set up.

use std::path::PathBuf;

use gpu_api::DeviceId;

use super::chunk::UNIT;
use super::divisions::Divisions;

/// How much is taken from upstream at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Growth {
    /// First this many bytes, then twice as many each time.
    Doubling(u64),
    /// This many bytes each time, or just what is needed for a request above half of that.
    Fixed(u64),
    /// Everything up to the limit, at the first request.
    Whole,
}

impl Growth {
    /// 2 MiB first, which is what drivers round up to, then twice as many each time.
    pub const DEFAULT: Growth = Growth::Doubling(2 << 20);

    /// Lets the value of an environment variable decide: `true` grows, `false` takes everything at
    /// once, anything else changes nothing.
    #[must_use]
    pub fn overridden(self, value: Option<&str>) -> Growth {
        match (value, self) {
            (Some("true"), Growth::Whole) => Growth::DEFAULT,
            (Some("false"), _) => Growth::Whole,
            _ => self,
        }
    }
}

/// The share of slack unless another is set: nearly the time of TensorFlow's rule, and nearly the
/// memory of none.
const SLACK_SHARE: f64 = 0.125;

/// How a [`Bfc`](crate::Bfc) is set up.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct BfcOptions {
    /// What reports call it.
    pub name: String,
    /// The device that errors name.
    pub device: DeviceId,
    /// The most bytes taken from upstream.
    pub limit: u64,
    /// How much at a time.
    pub growth: Growth,
    /// The part of the limit from which on slack is cut off even when less than the request; 0 for
    /// 128 MiB.
    pub fragmentation_fraction: f64,
    /// The most slack of a chunk; what the fraction says when `None`.
    pub max_slack: Option<u64>,
    /// The most slack of a chunk, as a share of what is needed: from 0, which cuts everything off,
    /// to 1, which is TensorFlow's rule.
    pub max_slack_share: f64,
    /// Whether idle regions go back to upstream when a request does not fit otherwise.
    pub collect_regions: bool,
    /// The largest chunk that is cut up: a smaller request never gets a larger one. PyTorch's
    /// `max_split_size`.
    pub max_split: Option<u64>,
    /// The share of the limit from which on idle regions go back before a new one is taken.
    pub collect_from: Option<f64>,
    /// Into how many steps sizes between two powers of two are rounded up; not at all when `None`.
    pub round_up_divisions: Option<Divisions>,
    /// Where the heap is written down when a request fails: the first part of the files' names.
    pub memory_dump: Option<PathBuf>,
}

impl BfcOptions {
    /// Sets nothing but the name: no limit, growth from 2 MiB, an eighth of slack, idle regions
    /// given back when that helps.
    pub fn new(name: impl Into<String>) -> BfcOptions {
        BfcOptions {
            name: name.into(),
            device: DeviceId(0),
            limit: u64::MAX,
            growth: Growth::DEFAULT,
            fragmentation_fraction: 0.0,
            max_slack: None,
            max_slack_share: SLACK_SHARE,
            collect_regions: true,
            max_split: None,
            collect_from: None,
            round_up_divisions: None,
            memory_dump: None,
        }
    }

    /// Sets the most bytes taken from upstream.
    #[must_use]
    pub fn limit(mut self, bytes: u64) -> BfcOptions {
        self.limit = bytes;
        self
    }

    /// Sets how much is taken at a time.
    #[must_use]
    pub fn growth(mut self, growth: Growth) -> BfcOptions {
        self.growth = growth;
        self
    }

    /// Sets the device that errors name.
    #[must_use]
    pub fn device(mut self, device: DeviceId) -> BfcOptions {
        self.device = device;
        self
    }

    /// Sets the part of the limit from which on slack is always cut off.
    #[must_use]
    pub fn fragmentation_fraction(mut self, fraction: f64) -> BfcOptions {
        self.fragmentation_fraction = fraction;
        self
    }

    /// Cuts off slack of this many bytes or more, whatever the request: more chunks, less that
    /// nobody can use.
    #[must_use]
    pub fn max_slack(mut self, bytes: u64) -> BfcOptions {
        self.max_slack = Some(bytes);
        self
    }

    /// Cuts off slack of this share of what is needed or more: 0 cuts everything off, 1 is
    /// TensorFlow's rule, which takes the least time and the most memory. `docs/ALLOCATORS.md` has
    /// both for several shares.
    #[must_use]
    pub fn max_slack_share(mut self, share: f64) -> BfcOptions {
        self.max_slack_share = share;
        self
    }

    /// Sets whether idle regions go back to upstream when a request does not fit otherwise.
    #[must_use]
    pub fn collect_regions(mut self, collect: bool) -> BfcOptions {
        self.collect_regions = collect;
        self
    }

    /// Keeps chunks above this size whole, for requests above it, so that small ones do not break
    /// them up.
    #[must_use]
    pub fn max_split(mut self, bytes: Option<u64>) -> BfcOptions {
        self.max_split = bytes;
        self
    }

    /// Gives idle regions back before a new one is taken, from this share of the limit on.
    #[must_use]
    pub fn collect_from(mut self, share: Option<f64>) -> BfcOptions {
        self.collect_from = share;
        self
    }

    /// Rounds sizes up to one of several steps between two powers of two, so that more sizes are
    /// equal.
    #[must_use]
    pub fn round_up_divisions(mut self, divisions: Option<Divisions>) -> BfcOptions {
        self.round_up_divisions = divisions;
        self
    }

    /// Writes the heap to a file, as JSON, whenever a request fails; the files' names begin so.
    #[must_use]
    pub fn memory_dump(mut self, prefix: Option<PathBuf>) -> BfcOptions {
        self.memory_dump = prefix;
        self
    }

    /// Returns the bytes to take for a request.
    pub(crate) fn rounded(&self, bytes: u64) -> Option<u64> {
        self.round_up_divisions
            .map_or(Some(bytes), |divisions| divisions.rounded(bytes))
    }

    /// Returns the slack that is always cut off.
    pub(crate) fn slack(&self) -> u64 {
        if let Some(bytes) = self.max_slack {
            bytes
        } else if self.fragmentation_fraction > 0.0 {
            (self.limit as f64 * self.fragmentation_fraction) as u64
        } else {
            128 << 20
        }
    }

    /// Returns the bytes of the first region.
    pub(crate) fn first_region(&self) -> u64 {
        let bytes = match self.growth {
            Growth::Doubling(bytes) | Growth::Fixed(bytes) => bytes.min(self.limit),
            Growth::Whole => self.limit,
        };
        round_down(bytes).max(UNIT)
    }
}

/// Rounds bytes down to units.
pub(crate) fn round_down(bytes: u64) -> u64 {
    bytes / UNIT * UNIT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn force_allow_growth() {
        let first = |growth: Growth, value| {
            BfcOptions::new("bfc")
                .limit(1 << 31)
                .growth(growth.overridden(value))
                .first_region()
        };
        assert_eq!(first(Growth::DEFAULT, None), 2 << 20);
        assert_eq!(first(Growth::DEFAULT, Some("unparseable")), 2 << 20);
        assert_eq!(first(Growth::Whole, Some("true")), 2 << 20);
        assert_eq!(first(Growth::DEFAULT, Some("false")), 1 << 31);
        assert_eq!(first(Growth::Whole, Some("unparseable")), 1 << 31);
    }

    #[test]
    fn the_first_region_is_never_above_the_limit() {
        assert_eq!(
            BfcOptions::new("bfc").limit(1 << 20).first_region(),
            1 << 20
        );
        assert_eq!(
            BfcOptions::new("bfc").limit((1 << 20) + 255).first_region(),
            1 << 20
        );
    }
}
