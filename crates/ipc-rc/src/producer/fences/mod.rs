//! Fences: what the producer's streams have yet to do before a block may be read.

// Tests: `tests/processes/order.rs`.

pub(crate) mod fence;
pub(crate) mod progress;
pub(crate) mod ticket_event;
pub(crate) mod words;
