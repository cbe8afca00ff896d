//! A broker in a process of Python's, for tests.

use std::path::PathBuf;
use std::sync::Arc;

use gpu_ipc::Error;
use gpu_ipc::broker::{Broker, Limits, Options};
use pyo3::prelude::*;

use crate::data::device;
use crate::interpreter::errors::OrRaise;

/// Be a broker until the process ends, for tests.
#[pyfunction(name = "_serve_broker")]
pub(crate) fn serve_broker(
    py: Python<'_>,
    dir: PathBuf,
    device: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let gpu = device::open(py, Some(device))?;
    let gpus = Arc::new(move || Ok::<_, Error>(vec![gpu.clone()]));
    let options = Options {
        dir,
        gpus,
        limits: Limits::default(),
        allowed: Default::default(),
        keeper: None,
    };
    let broker = py.detach(|| Broker::open(options)).or_raise()?;
    py.detach(|| broker.run())
}
