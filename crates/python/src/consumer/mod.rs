//! The consumer: participants, and the arrays that they claim.

pub(crate) mod participant;
pub(crate) mod received;
