//! Segments of a pool without PyTorch, for tests of its allocator on host memory.

use pyo3::prelude::*;

use crate::objects::pool::Pool;

/// Have the segments that PyTorch's allocator takes lie in a part of a pool, as ``Pool.torch_pool``
/// does.
#[pyfunction(name = "_take_segments")]
pub(crate) fn take_segments(pool: &Pool, part: Option<&str>) -> PyResult<()> {
    pool.use_part(part)
}
