//! Leases that this process holds, and how they end.

pub(crate) mod handle_count;
pub(crate) mod lease;
pub(crate) mod release_queue;
