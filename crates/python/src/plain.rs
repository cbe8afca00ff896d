//! Memory of other allocators, for tests: the driver's, and segments as PyTorch's pool has them.

use std::sync::Arc;

use gpu_ipc::Gpu;
use gpu_ipc::backend::Sharing;
use pyo3::prelude::*;

use crate::block::{Kind, Lent};
use crate::device;
use crate::dlpack::{Device, Export, Holder, check_request};
use crate::errors::OrRaise;
use crate::layout::Layout;
use crate::session::Session;

/// An allocation of the driver. Speaks DLPack.
#[pyclass(frozen, name = "_PlainMemory", module = "gpu_ipc._gpu_ipc")]
pub(crate) struct PlainMemory {
    plain: Arc<Plain>,
    layout: Layout,
}

/// An allocation of the driver, freed by its drop.
pub(crate) struct Plain {
    gpu: Gpu,
    base: gpu_ipc::backend::DevicePtr,
}

impl Drop for Plain {
    fn drop(&mut self) {
        // SAFETY: `free` asks for memory of `alloc` that nothing touches and nobody has open: the owner's last hold
        // ends here, and adoption keeps one until everybody has unmapped it.
        let _ = unsafe { self.gpu.backend().free(self.base) };
    }
}

#[pymethods]
impl PlainMemory {
    #[new]
    #[pyo3(signature = (nbytes, device=None))]
    fn new(py: Python<'_>, nbytes: u64, device: Option<&Bound<'_, PyAny>>) -> PyResult<PlainMemory> {
        let gpu = device::open(py, device)?;
        let base = py.detach(|| gpu.backend().alloc(gpu.device(), nbytes, Sharing::Fd)).or_raise()?.base;
        Ok(PlainMemory { plain: Arc::new(Plain { gpu, base }), layout: Layout::bytes(nbytes) })
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let device = Device::of(&self.plain.gpu);
        let _ = stream;
        check_request(device, dl_device, copy)?;
        let holder = Holder::Plain(self.plain.clone());
        let export = Export { start: self.plain.base.0, layout: &self.layout, device, read_only: false, holder };
        export.capsule(py, max_version.is_some_and(|(major, _)| major >= 1))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = Device::of(&self.plain.gpu);
        (device.kind, device.id)
    }
}

/// A segment of a session's memory, as PyTorch's pool has them, on any device. Speaks DLPack.
#[pyclass(frozen, name = "_Segment", module = "gpu_ipc._gpu_ipc")]
pub(crate) struct Segment {
    lent: Lent,
    layout: Layout,
}

#[pymethods]
impl Segment {
    #[new]
    fn new(py: Python<'_>, session: &Session, nbytes: u64) -> PyResult<Segment> {
        let shared = session.shared();
        let block = py.detach(|| shared.session.alloc(nbytes)).or_raise()?;
        Ok(Segment { lent: Lent::new(block, shared, Kind::Segment), layout: Layout::bytes(nbytes) })
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let device = Device::of(&self.lent.owned().session.gpu);
        let _ = stream;
        check_request(device, dl_device, copy)?;
        let holder = Holder::Lent(self.lent.clone());
        let export = Export { start: self.lent.start(), layout: &self.layout, device, read_only: false, holder };
        export.capsule(py, max_version.is_some_and(|(major, _)| major >= 1))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = Device::of(&self.lent.owned().session.gpu);
        (device.kind, device.id)
    }
}
