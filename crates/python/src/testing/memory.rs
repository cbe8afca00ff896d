//! Memory of other allocators, for tests: the driver's, and segments as PyTorch's pool has them.

use std::sync::Arc;

use gpu_ipc::Gpu;
use gpu_ipc::backend::{DevicePtr, Sharing};
use pyo3::prelude::*;

use crate::arrays::class::{Array, protocol_methods};
use crate::data::device;
use crate::data::layout::Layout;
use crate::data::stream::ConsumerStream;
use crate::interpreter::errors::OrRaise;
use crate::producer::session::Session;
use crate::producer::shared::Lent;

/// An allocation of the driver.
#[pyclass(frozen, weakref, name = "_PlainMemory", module = "gpu_ipc._gpu_ipc")]
pub(crate) struct PlainMemory {
    plain: Arc<Plain>,
    layout: Layout,
}

/// An allocation of the driver, freed by its drop.
pub(crate) struct Plain {
    gpu: Gpu,
    base: DevicePtr,
}

impl Drop for Plain {
    fn drop(&mut self) {
        // SAFETY: `free` asks for memory of `alloc` that nothing touches and nobody has open: the
        // owner's last hold ends here, and adoption keeps one until everybody has unmapped it.
        let _ = unsafe { self.gpu.backend().free(self.base) };
    }
}

#[pymethods]
impl PlainMemory {
    #[new]
    #[pyo3(signature = (nbytes, device=None, *, by_handle=false))]
    fn new(
        py: Python<'_>,
        nbytes: u64,
        device: Option<&Bound<'_, PyAny>>,
        by_handle: bool,
    ) -> PyResult<PlainMemory> {
        let gpu = device::open(py, device)?;
        let sharing = if by_handle {
            Sharing::Handle
        } else {
            Sharing::Fd
        };
        let base = py
            .detach(|| gpu.backend().alloc(gpu.device(), nbytes, sharing))
            .or_raise()?
            .base;
        Ok(PlainMemory {
            plain: Arc::new(Plain { gpu, base }),
            layout: Layout::bytes(nbytes),
        })
    }
}

impl Array for PlainMemory {
    type Hold = Arc<Plain>;

    fn gpu(&self) -> &Gpu {
        &self.plain.gpu
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn hold(&self) -> PyResult<(u64, Arc<Plain>)> {
        Ok((self.plain.base.0, self.plain.clone()))
    }

    fn use_on(&self, _: Python<'_>, _: &Arc<Plain>, _: ConsumerStream) -> PyResult<()> {
        Ok(())
    }
}

protocol_methods!(PlainMemory);

/// A segment of a session's memory, as PyTorch's pool has them, on any device.
#[pyclass(frozen, weakref, name = "_Segment", module = "gpu_ipc._gpu_ipc")]
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
        Ok(Segment {
            lent: Lent::new(block, shared, true),
            layout: Layout::bytes(nbytes),
        })
    }
}

impl Array for Segment {
    type Hold = Lent;

    fn gpu(&self) -> &Gpu {
        &self.lent.session().gpu
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn hold(&self) -> PyResult<(u64, Lent)> {
        Ok((self.lent.start(), self.lent.clone()))
    }

    fn use_on(&self, _: Python<'_>, _: &Lent, _: ConsumerStream) -> PyResult<()> {
        Ok(())
    }
}

protocol_methods!(Segment);
