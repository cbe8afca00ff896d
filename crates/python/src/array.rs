//! From any array to an address, a layout, and what keeps the memory.

use gpu_ipc::Gpu;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use crate::dlpack::{CPU, CUDA, CUDA_HOST, CUDA_MANAGED, Device, ROCM, Taken};
use crate::errors::{invalid, unsupported};
use crate::exchange::Table;
use crate::layout::Layout;
use crate::{buffer, dlpack, interface};

/// How an array was read, and where its pending work is.
pub(crate) enum Source {
    /// By `__dlpack__`: its work is waited for where the call said.
    Dlpack,
    /// By DLPack's C functions: the stream that its library uses at this moment.
    Exchange(u64),
    /// By the CUDA array interface: the stream that it names, if it does.
    Interface(Option<u64>),
    /// By the buffer protocol: host memory has no pending work.
    Buffer,
}

/// What keeps the memory behind an array; dropped with the interpreter's lock held.
pub(crate) enum Keeper {
    /// Nothing: it is a block of the session.
    Nothing,
    #[allow(dead_code, reason = "held for its drop")]
    Object(Py<PyAny>),
    /// PyTorch's storage: the tensor alone would not do, since `tensor.data = other` gives the storage up.
    Storage { object: Py<PyAny>, start: u64, bytes: u64 },
    #[allow(dead_code, reason = "held for its drop")]
    Taken(Taken),
    #[allow(dead_code, reason = "held for its drop")]
    Buffer(PyUntypedBuffer),
}

/// An array as it was read.
pub(crate) struct View {
    /// The address of the first element.
    pub start: u64,
    pub layout: Layout,
    pub device: Device,
    pub source: Source,
    pub keeper: Keeper,
}

impl View {
    /// Returns the handle of the stream that the array's pending work is on; `asked` is where `__dlpack__` was told to
    /// have it waited for.
    pub fn pending(&self, asked: impl Fn() -> PyResult<Option<u64>>) -> PyResult<Option<u64>> {
        match self.source {
            Source::Exchange(raw) if self.device.kind != CPU => Ok(Some(raw)),
            Source::Interface(raw) => Ok(raw),
            Source::Dlpack if self.device.kind != CPU => asked(),
            _ => Ok(None),
        }
    }

    /// Returns the first byte that belongs to the array, how many do, and the layout from there on.
    pub fn span(&self) -> PyResult<(u64, u64, Layout)> {
        let reach = self.layout.reach().and_then(|(before, after)| {
            let first = self.start.checked_sub(before)?;
            first.checked_add(before.checked_add(after)?)?;
            Some((first, before, before + after))
        });
        let Some((first, before, len)) = reach else {
            return Err(unsupported(
                "sharing this array",
                format!("{} with strides, or beyond the address space", self.layout.dtype.name()),
                "share a contiguous copy of it",
            ));
        };
        Ok((first, len, Layout { offset: before, ..self.layout.clone() }))
    }
}

/// Reads any array. Work that its library has queued is waited for by `order`, a stream's handle, where the array's
/// protocol can do that and the caller gave no stream of its own.
pub(crate) fn read(gpu: &Gpu, object: &Bound<'_, PyAny>, order: impl Fn() -> PyResult<Option<u64>>) -> PyResult<View> {
    if let Some(table) = Table::of(&object.get_type())
        && let Some(view) = table.read(object, Keeper::Nothing)
    {
        let view = view?;
        refuse_lazy(object)?;
        return Ok(View { keeper: storage_of(object)?, ..view });
    }
    let stream = order()?.map(|raw| i64::try_from(raw).unwrap_or(-1));
    if let Some(view) = dlpack::read(object, stream)? {
        return Ok(view);
    }
    if let Some(view) = interface::read(object, gpu.device().0 as i32)? {
        return Ok(view);
    }
    buffer::read(object)?.ok_or_else(|| {
        invalid(
            "what to share",
            object.get_type(),
            "an array that speaks DLPack, the CUDA array interface or the buffer protocol, or a gpu_ipc.Block",
        )
    })
}

/// Refuses PyTorch's views whose elements are not what lies in memory.
fn refuse_lazy(tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    for (asked, remedy) in [("is_conj", "share tensor.resolve_conj()"), ("is_neg", "share tensor.resolve_neg()")] {
        if let Ok(method) = tensor.getattr(asked)
            && method.call0()?.is_truthy()?
        {
            return Err(unsupported("sharing this tensor", format!("its {asked} bit is set"), remedy));
        }
    }
    Ok(())
}

/// Takes hold of a tensor's storage.
fn storage_of(tensor: &Bound<'_, PyAny>) -> PyResult<Keeper> {
    let Ok(storage) = tensor.call_method0("untyped_storage") else {
        return Ok(Keeper::Object(tensor.clone().unbind()));
    };
    let (start, bytes) = place_of(&storage)?;
    Ok(Keeper::Storage { object: storage.unbind(), start, bytes })
}

fn place_of(storage: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
    Ok((storage.call_method0("data_ptr")?.extract()?, storage.call_method0("nbytes")?.extract()?))
}

impl Keeper {
    /// Says how a storage that was shared has been freed or moved since; `None` for what is as it was.
    pub fn was_freed(&self, py: Python<'_>) -> Option<String> {
        let Keeper::Storage { object, start, bytes } = self else { return None };
        let (now, left) = place_of(object.bind(py)).ok()?;
        (now != *start || left < *bytes).then(|| {
            format!(
                "a shared storage was resized while others hold it: {bytes} bytes at {start:#x} became {left} at \
                 {now:#x}. They read memory that its allocator uses again; share such tensors with copy=True"
            )
        })
    }
}

/// Says why an array cannot be shared from a device without a copy; `None` when it can be tried.
pub(crate) fn refusal(ours: Device, theirs: Device, bytes: u64) -> Option<PyErr> {
    if ours == theirs {
        return None;
    }
    let why = format!("the array is in {}, the session is on {}", theirs.name(), ours.name());
    Some(match theirs.kind {
        CPU | CUDA_HOST | CUDA_MANAGED => unsupported(
            "sharing this array without a copy",
            format!("{why}, and that memory has no handle for other processes ({bytes} bytes)"),
            "pass copy=True, which copies it into the session's memory, or move it to the device first",
        ),
        CUDA | ROCM => unsupported(
            "sharing this array",
            why,
            "share it with a session of its own device, or copy it to this one first",
        ),
        _ => unsupported("sharing this array", why, "copy it to the session's device first"),
    })
}
