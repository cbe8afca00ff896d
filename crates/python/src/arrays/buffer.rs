//! The buffer protocol (PEP 3118): arrays in host memory.

use std::ffi::c_int;
use std::ptr;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::ffi;
use pyo3::prelude::*;

use super::abi::{CPU, Device};
use super::export::Export;
use super::view::{Owner, Source, View};
use crate::data::layout::{Dtype, Layout, f_order};
use crate::interpreter::errors::{OrRaise, no_buffer, unsupported};

/// What a view of an array points at, until it is released.
struct Exported {
    shape: Box<[isize]>,
    strides: Box<[isize]>,
    _hold: Box<dyn Send>,
}

/// Fills a view of an array in host memory. The view keeps the array's hold.
///
/// What a caller asks for by its flags is given or refused as numpy does it: a caller that asks for
/// contiguous bytes in either order, or for none of the strides, gets no array with gaps.
///
/// # Safety
///
/// The array is valid while its hold is; `view` is what Python gave.
pub(crate) unsafe fn fill_array<H: Send + 'static>(
    object: &Bound<'_, PyAny>,
    export: Export<'_, H>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let layout = export.layout;
    let Some(((_, format), bytes)) = layout.dtype.characters().zip(layout.dtype.bytes()) else {
        return Err(no_buffer(format!(
            "the buffer protocol has no name for {}; take the array by DLPack",
            layout.dtype.name()
        )));
    };
    if export.read_only && flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
        return Err(no_buffer(
            "the memory is read-only, and was asked for to be written",
        ));
    }
    let asks = |flag: c_int| flags & flag == flag;
    let (in_c_order, in_f_order) = (layout.strides.is_none(), layout.is_in_f_order());
    if asks(ffi::PyBUF_C_CONTIGUOUS) && !in_c_order {
        return Err(no_buffer("the array is not in C order; copy it first"));
    }
    if asks(ffi::PyBUF_F_CONTIGUOUS) && !in_f_order {
        return Err(no_buffer(
            "the array is not in Fortran order; copy it first",
        ));
    }
    if asks(ffi::PyBUF_ANY_CONTIGUOUS) && !in_c_order && !in_f_order {
        return Err(no_buffer(
            "the array has gaps between its elements; copy it first",
        ));
    }
    if !asks(ffi::PyBUF_STRIDES) && !in_c_order {
        return Err(no_buffer(
            "the array is not in C order; ask for a view with strides, or copy it first",
        ));
    }
    if view.is_null() {
        return Err(no_buffer("there is no view to fill"));
    }
    // The stride of a single element is what the order makes it.
    let strides = if in_f_order && (!in_c_order || asks(ffi::PyBUF_F_CONTIGUOUS)) {
        f_order(&layout.shape)
    } else {
        layout.full_strides()
    };
    let mut exported = Box::new(Exported {
        shape: layout.shape.iter().map(|&length| length as isize).collect(),
        strides: strides
            .iter()
            .map(|&stride| stride as isize * bytes as isize)
            .collect(),
        _hold: Box::new(export.hold),
    });
    let (shape, strides) = (exported.shape.as_mut_ptr(), exported.strides.as_mut_ptr());
    let filled = ffi::Py_buffer {
        buf: ptr::with_exposed_provenance_mut(export.start as usize),
        obj: object.clone().into_ptr(),
        len: layout.nbytes().unwrap_or(0) as isize,
        itemsize: bytes as isize,
        readonly: c_int::from(export.read_only),
        ndim: if asks(ffi::PyBUF_ND) {
            layout.shape.len() as c_int
        } else {
            0
        },
        format: if asks(ffi::PyBUF_FORMAT) {
            format.as_ptr().cast_mut()
        } else {
            ptr::null_mut()
        },
        shape: if asks(ffi::PyBUF_ND) && !layout.shape.is_empty() {
            shape
        } else {
            ptr::null_mut()
        },
        strides: if asks(ffi::PyBUF_STRIDES) && !layout.shape.is_empty() {
            strides
        } else {
            ptr::null_mut()
        },
        suboffsets: ptr::null_mut(),
        internal: Box::into_raw(exported).cast(),
    };
    // SAFETY: `write` asks for a place that is valid and aligned: Python's own view, not null.
    unsafe { view.write(filled) };
    Ok(())
}

/// Gives up what a view of [`fill_array`] kept.
///
/// # Safety
///
/// `view` was filled by `fill_array` and is released once.
pub(crate) unsafe fn release_array(view: *mut ffi::Py_buffer) {
    // SAFETY: reading a field asks for a valid view: our caller vouches for it.
    let internal = unsafe { (*view).internal };
    if !internal.is_null() {
        // SAFETY: `Box::from_raw` asks for what `into_raw` gave, once: `fill_array` put it there.
        drop(unsafe { Box::from_raw(internal.cast::<Exported>()) });
    }
}

/// Reads an object that speaks the buffer protocol; `None` for one that does not.
pub(crate) fn read(object: &Bound<'_, PyAny>) -> PyResult<Option<View>> {
    let Ok(buffer) = PyUntypedBuffer::get(object) else {
        return Ok(None);
    };
    let format = buffer.format().to_str().unwrap_or("?").to_owned();
    let item = buffer.item_size() as u64;
    let refused = || {
        unsupported(
            "sharing a buffer of this element type",
            format!("its format is `{format}`"),
            "share an array that speaks DLPack",
        )
    };
    let (kind, native) = match format.strip_prefix(['@', '=', '<']).unwrap_or(&format) {
        "b" | "h" | "i" | "l" | "q" | "n" => ('i', true),
        "B" | "H" | "I" | "L" | "Q" | "N" | "c" => ('u', true),
        "e" | "f" | "d" => ('f', true),
        "Zf" | "Zd" => ('c', true),
        "?" => ('b', true),
        _ => ('u', false),
    };
    let dtype = Dtype::of_numpy(kind, item)
        .filter(|_| native)
        .ok_or_else(refused)?;
    let strides = buffer
        .strides()
        .iter()
        .map(|&stride| stride as i64 / item as i64)
        .collect();
    if buffer
        .strides()
        .iter()
        .any(|stride| stride % item as isize != 0)
    {
        return Err(refused());
    }
    let shape = buffer.shape().iter().map(|&length| length as i64).collect();
    let layout = Layout::new(dtype, shape, Some(strides)).or_raise()?;
    Ok(Some(View {
        start: buffer.buf_ptr().expose_provenance() as u64,
        layout,
        device: Device { kind: CPU, id: 0 },
        source: Source::Buffer,
        read_only: buffer.readonly(),
        owner: Owner::Buffer(buffer),
    }))
}
