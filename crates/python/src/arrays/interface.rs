//! The CUDA array interface, version 3.

use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::abi::{CUDA, Device};
use super::view::{Owner, Source, View};
use crate::data::layout::{Dtype, Layout};
use crate::interpreter::errors::{OrRaise, invalid, unsupported};

/// Describes an array in device memory; `stream` is where its user has to wait, `None` when nothing
/// is pending.
pub(crate) fn describe<'py>(
    py: Python<'py>,
    start: u64,
    layout: &Layout,
    read_only: bool,
    stream: Option<u64>,
) -> PyResult<Bound<'py, PyDict>> {
    let Some(((kind, _), bytes)) = layout.dtype.characters().zip(layout.dtype.bytes()) else {
        // An attribute error, so that `hasattr` says no.
        return Err(PyAttributeError::new_err(format!(
            "the CUDA array interface has no name for {}; take the array by DLPack",
            layout.dtype.name()
        )));
    };
    let interface = PyDict::new(py);
    let order = if bytes == 1 { '|' } else { '<' };
    interface.set_item("typestr", format!("{order}{kind}{bytes}"))?;
    interface.set_item("shape", PyTuple::new(py, &layout.shape)?)?;
    let strides = layout
        .strides
        .as_ref()
        .map(|strides| PyTuple::new(py, strides.iter().map(|s| s * bytes as i64)));
    interface.set_item("strides", strides.transpose()?)?;
    interface.set_item("data", (start, read_only))?;
    interface.set_item("version", 3)?;
    // The legacy default stream is 1 there; 0 is forbidden.
    interface.set_item("stream", stream.map(|raw| raw.max(1)))?;
    Ok(interface)
}

/// Reads an object that has the interface; `None` for one that has not.
pub(crate) fn read(object: &Bound<'_, PyAny>, device: i32) -> PyResult<Option<View>> {
    let Ok(interface) = object.getattr("__cuda_array_interface__") else {
        return Ok(None);
    };
    let interface = interface.cast_into::<PyDict>()?;
    let get = |name: &str| {
        interface
            .get_item(name)
            .map(|item| item.filter(|item| !item.is_none()))
    };
    let need = |name: &'static str| {
        get(name)?.ok_or_else(|| invalid(name, "missing", "in the CUDA array interface"))
    };
    let typestr: String = need("typestr")?.extract()?;
    let mut characters = typestr.chars();
    let (order, kind) = (
        characters.next().unwrap_or('?'),
        characters.next().unwrap_or('?'),
    );
    let bytes = characters.as_str().parse().unwrap_or(0);
    let dtype = Dtype::of_numpy(kind, bytes)
        .filter(|_| order != '>')
        .ok_or_else(|| {
            unsupported(
                "sharing an array of this type",
                format!("its typestr is `{typestr}`"),
                "view it as bytes",
            )
        })?;
    if get("mask")?.is_some() {
        return Err(unsupported(
            "sharing a masked array",
            "a mask is a second array",
            "share data and mask apart",
        ));
    }
    let shape: Vec<i64> = need("shape")?.extract()?;
    let strides = match get("strides")? {
        None => None,
        Some(strides) => {
            let strides: Vec<i64> = strides.extract()?;
            if strides.iter().any(|stride| stride % bytes as i64 != 0) {
                return Err(invalid(
                    "an array's strides",
                    format!("{strides:?}"),
                    "whole elements",
                ));
            }
            Some(
                strides
                    .into_iter()
                    .map(|stride| stride / bytes as i64)
                    .collect(),
            )
        }
    };
    let (start, read_only): (u64, bool) = need("data")?.extract()?;
    let stream: Option<u64> = get("stream")?.map(|stream| stream.extract()).transpose()?;
    Ok(Some(View {
        start,
        layout: Layout::new(dtype, shape, strides).or_raise()?,
        device: Device {
            kind: CUDA,
            id: device,
        },
        source: Source::Interface(stream),
        read_only,
        owner: Owner::Object(object.clone().unbind()),
    }))
}
