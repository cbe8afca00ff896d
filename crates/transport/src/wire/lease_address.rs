//! Where a lease is written down.

use crate::shared::slot::Generation;

/// Where a lease is written down.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct LeaseAddress {
    /// The counter file, counted from 0.
    pub file: u32,
    /// The slot in it.
    pub slot: u32,
    /// The slot's generation.
    pub generation: Generation,
}
