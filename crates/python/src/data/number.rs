//! Whole numbers that callers give: sizes, counts, epochs.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::interpreter::errors::invalid;

/// A number from 0 to 2^64 - 1. Another one is `Invalid`, which is a `ValueError`; what is no whole
/// number is Python's own `TypeError`.
#[derive(Clone, Copy)]
pub(crate) struct Whole(pub u64);

impl Whole {
    /// Returns it as a length; what no address reaches is the most that one does.
    pub fn count(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl From<Whole> for u64 {
    fn from(number: Whole) -> u64 {
        number.0
    }
}

impl<'py> FromPyObject<'_, 'py> for Whole {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Whole> {
        object.extract::<u64>().map(Whole).map_err(|error| {
            if error.is_instance_of::<PyOverflowError>(object.py()) {
                let got = object
                    .repr()
                    .map_or_else(|_| "?".into(), |got| got.to_string());
                invalid("a number", got, "from 0 to 18446744073709551615")
            } else {
                error
            }
        })
    }
}
