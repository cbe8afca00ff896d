//! The four protocols of arrays: DLPack's capsules and its C functions, the CUDA array interface,
//! the buffer protocol.

// Tests: `crates/python/tests/test_exchange.py`, `crates/python/tests/test_buffer.py`.

pub(crate) mod abi;
pub(crate) mod buffer;
pub(crate) mod class;
pub(crate) mod dlpack;
pub(crate) mod exchange;
pub(crate) mod export;
pub(crate) mod interface;
pub(crate) mod read;
pub(crate) mod view;
