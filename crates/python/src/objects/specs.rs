//! What an object or a pool is to hold, as callers say it: parts, groups and readers.

use std::collections::HashMap;

use gpu_ipc::Gpu;
use gpu_ipc::broker::{DType, Dimension, Layout, PartSpec, Readers};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::arrays::read;
use crate::arrays::view::View;
use crate::data::layout::Dtype;
use crate::interpreter::errors::{OrRaise, invalid, unsupported};

/// Reads who may open what is made.
pub(super) fn readers_of(given: &Bound<'_, PyAny>) -> PyResult<Readers> {
    if given
        .extract::<&str>()
        .is_ok_and(|text| text == "everybody")
    {
        return Ok(Readers::Everybody);
    }
    if let Ok(named) = given.cast::<PyDict>()
        && named.len() == 1
    {
        for (kind, of) in [
            ("uids", Readers::Uids as fn(Vec<u32>) -> _),
            ("gids", Readers::Gids),
        ] {
            if let Some(numbers) = named.get_item(kind)?
                && let Ok(numbers) = numbers.extract()
            {
                return Ok(of(numbers));
            }
        }
    }
    Err(invalid(
        "the readers",
        given.repr()?,
        "None, \"everybody\", {\"uids\": [...]} or {\"gids\": [...]}",
    ))
}

/// Puts the parts that names stand for in the place of those of mappings.
pub(super) fn expanded(parts: &Bound<'_, PyDict>, names: Vec<String>) -> PyResult<Vec<String>> {
    let objects = parts.py().import("gpu_ipc._objects")?;
    objects.call_method1("expanded", (parts, names))?.extract()
}

/// Packs parts, each group apart; what no group names is one more, the first.
pub(super) fn layout_of(
    parts: &Bound<'_, PyDict>,
    specs: Vec<PartSpec>,
    groups: Vec<Vec<String>>,
    meta: Option<Vec<u8>>,
) -> PyResult<Layout> {
    let meta = meta.unwrap_or_default();
    if groups.is_empty() {
        return Layout::pack(specs, &meta).or_raise();
    }
    let mut place = HashMap::new();
    let mut packed = vec![Vec::new(); groups.len() + 1];
    for (at, names) in groups.into_iter().enumerate() {
        for name in expanded(parts, names)? {
            if !parts.contains(&name)? {
                return Err(invalid(
                    "a group of parts",
                    format!("`{name}`"),
                    "of parts of the object",
                ));
            }
            if place.insert(name.clone(), at + 1).is_some() {
                return Err(invalid(
                    "the groups of parts",
                    format!("`{name}` twice"),
                    "apart from each other",
                ));
            }
        }
    }
    for spec in specs {
        packed[place.get(&spec.name).copied().unwrap_or(0)].push(spec);
    }
    Layout::pack_groups(packed, &meta).or_raise()
}

/// Describes a part by an array like it, or by a pair of type and shape.
pub(super) fn spec_of_what(gpu: &Gpu, name: String, what: &Bound<'_, PyAny>) -> PyResult<PartSpec> {
    let (dtype, shape) = match what.cast::<PyTuple>() {
        Ok(pair) => {
            let (dtype, shape): (String, Vec<u64>) = pair.extract()?;
            let known = Dtype::of_name(&dtype);
            (
                known.ok_or_else(|| {
                    invalid("an element type", dtype, "a name such as `bfloat16`")
                })?,
                shape,
            )
        }
        Err(_) => {
            let layout = read::read(gpu, what, || Ok(None))?.layout;
            (
                layout.dtype,
                layout.shape.iter().map(|&length| length as u64).collect(),
            )
        }
    };
    PartSpec::contiguous(name, dtype_of(dtype), &shape).or_raise()
}

/// Lays nested mappings out flat.
pub(super) fn flat<'py>(
    py: Python<'py>,
    parts: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    Ok(py
        .import("gpu_ipc._objects")?
        .call_method1("flat", (parts,))?
        .cast_into::<PyDict>()?)
}

fn dtype_of(dtype: Dtype) -> DType {
    DType {
        code: dtype.code,
        bits: dtype.bits,
        lanes: dtype.lanes,
    }
}

/// Describes an array as a part: its elements lie there as they lie here.
pub(super) fn spec_of(name: &str, view: &View) -> PyResult<PartSpec> {
    let ((_, len, _), layout) = (view.span()?, &view.layout);
    let strides = layout.full_strides();
    let dimensions = layout.shape.iter().zip(&strides).map(|(&extent, &stride)| {
        let stride = u64::try_from(stride).map_err(|_| {
            unsupported(
                "putting this array into an object",
                "it runs backwards",
                "put a contiguous copy of it",
            )
        })?;
        Ok(Dimension {
            extent: extent as u64,
            stride,
        })
    });
    let dimensions = dimensions.collect::<PyResult<Vec<_>>>()?;
    let spec = PartSpec {
        name: name.into(),
        dtype: dtype_of(layout.dtype),
        dimensions,
        len,
    };
    spec.check().or_raise()?;
    Ok(spec)
}
