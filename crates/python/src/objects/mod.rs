//! Objects of a broker: memory that outlives the process that filled it.

pub(crate) mod broker;
pub(crate) mod object;
pub(crate) mod part;
pub(crate) mod scratch;
pub(crate) mod writer;
