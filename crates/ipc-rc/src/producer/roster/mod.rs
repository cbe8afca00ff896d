//! The roster: who is connected, what each was told, and what waits to be sent to it.

pub(crate) mod outbox;
pub(crate) mod peer;
pub(crate) mod told;
