//! From any array to its address and layout, by the first protocol that it speaks.

use gpu_ipc::Gpu;
use pyo3::intern;
use pyo3::prelude::*;

use super::abi::{CPU, CUDA, CUDA_HOST, CUDA_MANAGED, Device, ROCM};
use super::exchange::Table;
use super::view::{Owner, View};
use super::{buffer, dlpack, interface};
use crate::interpreter::errors::{invalid, unsupported};

/// Reads any array. Work that its library has queued is waited for by `order`, a stream's handle,
/// where the array's protocol can do that and the caller gave no stream of its own.
pub(crate) fn read(
    gpu: &Gpu,
    object: &Bound<'_, PyAny>,
    order: impl Fn() -> PyResult<Option<u64>>,
) -> PyResult<View> {
    if let Some(table) = Table::of(&object.get_type())
        && let Some(view) = table.read(object)
    {
        let view = view?;
        refuse_lazy(object, &view)?;
        let (first, bytes, _) = view.span()?;
        return Ok(View {
            owner: Owner::storage_of(object, first, bytes),
            ..view
        });
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
fn refuse_lazy(tensor: &Bound<'_, PyAny>, view: &View) -> PyResult<()> {
    let py = tensor.py();
    let says = |method| {
        tensor
            .call_method0(method)
            .is_ok_and(|said| said.is_truthy().unwrap_or(false))
    };
    // Only complex numbers have a conjugate. A part of one may be negated, and is real.
    if view.layout.dtype.is_complex() && says(intern!(py, "is_conj")) {
        return Err(unsupported(
            "sharing this tensor",
            "its is_conj bit is set",
            "share tensor.resolve_conj()",
        ));
    }
    if says(intern!(py, "is_neg")) {
        return Err(unsupported(
            "sharing this tensor",
            "its is_neg bit is set",
            "share tensor.resolve_neg()",
        ));
    }
    Ok(())
}

/// Says why an array cannot be shared from a device without a copy; `None` when it can be tried.
pub(crate) fn refusal(ours: Device, theirs: Device, bytes: u64) -> Option<PyErr> {
    if ours == theirs {
        return None;
    }
    let why = format!(
        "the array is in {}, the session is on {}",
        theirs.name(),
        ours.name()
    );
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
        _ => unsupported(
            "sharing this array",
            why,
            "copy it to the session's device first",
        ),
    })
}
