//! What is a mapping of the names of its parts to arrays.

use gpu_ipc::broker::Layout;
use pyo3::prelude::*;

use super::part::Part;

/// An object with parts; [`parts_methods`] makes it a mapping.
pub(crate) trait Parts {
    /// Asks its layout something, with no lock of Python's held.
    fn with_layout<T: Send>(
        &self,
        py: Python<'_>,
        question: impl Fn(&Layout) -> T + Send + Sync,
    ) -> PyResult<T>;

    /// Returns a part; of a name that it does not have, `KeyError`.
    fn part(&self, py: Python<'_>, name: &str) -> PyResult<Part>;
}

/// Lists the names of parts, in their order.
pub(crate) fn names_of(layout: &Layout) -> Vec<String> {
    layout
        .parts()
        .iter()
        .map(|part| part.spec.name.clone())
        .collect()
}

/// Gives a class that has [`Parts`] the methods of a mapping.
macro_rules! parts_methods {
    ($class:ty) => {
        const _: () = {
            use $crate::objects::mapping::{Parts, names_of};
            use $crate::objects::part::Part;

            #[pyo3::pymethods]
            impl $class {
                fn __getitem__(&self, py: pyo3::Python<'_>, name: &str) -> pyo3::PyResult<Part> {
                    self.part(py, name)
                }

                fn __len__(&self, py: pyo3::Python<'_>) -> pyo3::PyResult<usize> {
                    self.with_layout(py, |layout| layout.parts().len())
                }

                fn __contains__(&self, py: pyo3::Python<'_>, name: &str) -> pyo3::PyResult<bool> {
                    self.with_layout(py, |layout| layout.part(name).is_some())
                }

                fn __iter__<'py>(
                    &self,
                    py: pyo3::Python<'py>,
                ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                    use pyo3::IntoPyObject;
                    use pyo3::types::PyAnyMethods;
                    Ok(self.keys(py)?.into_pyobject(py)?.try_iter()?.into_any())
                }

                /// The names of the parts, in their order.
                fn keys(&self, py: pyo3::Python<'_>) -> pyo3::PyResult<Vec<String>> {
                    self.with_layout(py, names_of)
                }

                /// The parts, in the order of their names.
                fn values(&self, py: pyo3::Python<'_>) -> pyo3::PyResult<Vec<Part>> {
                    self.keys(py)?
                        .iter()
                        .map(|name| self.part(py, name))
                        .collect()
                }

                /// Names and parts.
                fn items(&self, py: pyo3::Python<'_>) -> pyo3::PyResult<Vec<(String, Part)>> {
                    self.keys(py)?
                        .into_iter()
                        .map(|name| Ok((name.clone(), self.part(py, &name)?)))
                        .collect()
                }
            }
        };
    };
}

pub(crate) use parts_methods;
