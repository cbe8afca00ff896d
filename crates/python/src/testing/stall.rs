//! GPU work that does not end, for tests of what the death of a producer leaves.

use pyo3::prelude::*;

use crate::data::stream::Stream;
use crate::interpreter::errors::OrRaise;

/// Queue work on a stream that ends only with the process.
#[pyfunction(name = "_stall")]
pub(crate) fn stall(py: Python<'_>, stream: &Stream) -> PyResult<()> {
    let stream = stream.native();
    py.detach(|| {
        let forever = Box::new(|| {
            loop {
                std::thread::park();
            }
        });
        // SAFETY: `host_function` asks for a live stream: `stream` keeps it; and for a function
        // that makes no call of the driver: it makes none.
        unsafe { stream.gpu().backend().host_function(stream.raw(), forever) }
    })
    .or_raise()
}
