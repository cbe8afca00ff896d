//! What Python programs name and read: types that only hold data.

// Tests: `crates/python/tests/test_share.py`.

pub(crate) mod addressee;
pub(crate) mod deposit;
pub(crate) mod descriptor;
pub(crate) mod descriptors;
pub(crate) mod device;
pub(crate) mod layout;
pub(crate) mod notice;
pub(crate) mod number;
pub(crate) mod sealed;
pub(crate) mod stats;
pub(crate) mod stream;
