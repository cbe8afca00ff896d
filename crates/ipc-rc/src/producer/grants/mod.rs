//! Grants: which slot or ticket stands for which block.

pub(crate) mod lapse;
pub(crate) mod ledger;
pub(crate) mod slot_group;
pub(crate) mod ticket;
