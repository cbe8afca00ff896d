//! How a pool of buffers is set up.

/// What sizes are rounded up to, so that more requests are of one size.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum Rounding {
    /// Nothing.
    #[default]
    None,
    /// The next power of two.
    PowerOfTwo,
    /// The next multiple, of at least 1.
    MultipleOf(u64),
    /// A rule of your own: from what is asked for to at least as much, or `None` for more than can
    /// be said. Less than what is asked for counts as `None`.
    Custom(fn(u64) -> Option<u64>),
}

impl Rounding {
    /// Rounds a request's bytes up; `None` for more than can be said.
    pub(crate) fn round(self, bytes: u64) -> Option<u64> {
        match self {
            Rounding::None => Some(bytes),
            Rounding::PowerOfTwo => bytes.checked_next_power_of_two(),
            Rounding::MultipleOf(step) => bytes.checked_next_multiple_of(step.max(1)),
            Rounding::Custom(rule) => rule(bytes).filter(|&rounded| rounded >= bytes),
        }
    }
}

/// How a [`Pool`](crate::Pool) is set up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolOptions {
    /// What reports call it.
    pub name: String,
    /// The most buffers kept; 0 keeps none.
    pub buffers: usize,
    /// The most bytes kept.
    pub bytes: u64,
    /// Whether the most buffers grow when many are evicted and many requests miss.
    pub auto_resize: bool,
    /// What sizes are rounded up to.
    pub rounding: Rounding,
}

impl PoolOptions {
    /// Keeps up to 100 buffers, and more when that is too few, of up to 1 GiB.
    pub fn new(name: impl Into<String>) -> PoolOptions {
        PoolOptions {
            name: name.into(),
            buffers: 100,
            bytes: 1 << 30,
            auto_resize: true,
            rounding: Rounding::None,
        }
    }

    /// Sets the most buffers kept.
    #[must_use]
    pub fn buffers(mut self, buffers: usize) -> PoolOptions {
        self.buffers = buffers;
        self
    }

    /// Sets the most bytes kept.
    #[must_use]
    pub fn bytes(mut self, bytes: u64) -> PoolOptions {
        self.bytes = bytes;
        self
    }

    /// Sets whether the most buffers grow.
    #[must_use]
    pub fn auto_resize(mut self, grows: bool) -> PoolOptions {
        self.auto_resize = grows;
        self
    }

    /// Sets what sizes are rounded up to.
    #[must_use]
    pub fn rounding(mut self, rounding: Rounding) -> PoolOptions {
        self.rounding = rounding;
        self
    }
}
