//! Grants: which slot or ticket stands for which block.

pub(crate) mod ledger;
pub(crate) mod ledger_table;
pub(crate) mod slot_group;
pub(crate) mod ticket;
