//! What the journal of a pool says of a block: that its contents are whole.

use gpu_ipc::broker::pool::{self, Key};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::number::Whole;
use crate::interpreter::errors::invalid;

/// A block of a pool whose contents are whole.
#[pyclass(frozen, eq, hash, weakref, module = "gpu_ipc")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Sealed(pub pool::Sealed);

#[pymethods]
impl Sealed {
    /// The number of the block.
    #[getter]
    fn block(&self) -> u32 {
        self.0.block
    }

    /// What its contents are called: the 16 bytes that it was sealed with.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.key.0)
    }

    /// How often the block was given up before these contents were written; 1 for the first.
    #[getter]
    fn generation(&self) -> u32 {
        self.0.generation
    }

    fn __repr__(&self) -> String {
        let key: String = self
            .0
            .key
            .0
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let (block, generation) = (self.0.block, self.0.generation);
        format!("<gpu_ipc.Sealed block {block}, key {key}, generation {generation}>")
    }
}

/// Reads the number of a block.
pub(crate) fn block(number: Whole) -> PyResult<u32> {
    u32::try_from(number.0).map_err(|_| {
        invalid(
            "a block of a pool",
            format!("block {}", number.0),
            "below the number of blocks; create the pool with a longer journal",
        )
    })
}

/// Reads a key.
pub(crate) fn key(bytes: &[u8]) -> PyResult<Key> {
    bytes.try_into().map(Key).map_err(|_| {
        invalid(
            "the key of a block",
            format!("{} bytes long", bytes.len()),
            "16 bytes, such as a digest of the block's contents",
        )
    })
}

/// Return the bytes of a pool's journal for so many blocks, as ``Broker.create_pool`` wants them.
///
/// A journal has room for 128 blocks at least and 2,097,024 at most.
#[pyfunction]
pub(crate) fn journal_bytes(blocks: Whole) -> PyResult<u64> {
    Ok(pool::bytes_for(block(blocks)?))
}
