//! The buffer protocol (PEP 3118): bytes of a descriptor, arrays in host memory.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;

use gpu_ipc::{BackendKind, Gpu};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::array::{Keeper, Source, View};
use crate::dlpack::{CPU, Device, Holder};
use crate::errors::{OrRaise, no_buffer, unsupported};
use crate::layout::{Dtype, Layout};

/// Fills a view of plain read-only bytes.
///
/// # Safety
///
/// `bytes` live as long as `object` and do not move; `view` is what Python gave.
pub(crate) unsafe fn fill_bytes(
    object: &Bound<'_, PyAny>,
    bytes: &[u8],
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let start = bytes.as_ptr().cast_mut().cast::<c_void>();
    // SAFETY: `PyBuffer_FillInfo` asks for an object that keeps the bytes, for bytes, and for a view or null, which is
    // an error there: our caller vouches for them. The bytes are read-only, so nobody writes through the pointer.
    let done = unsafe { ffi::PyBuffer_FillInfo(view, object.as_ptr(), start, bytes.len() as isize, 1, flags) };
    if done == 0 { Ok(()) } else { Err(PyErr::fetch(object.py())) }
}

/// What a view of an array points at, until it is released.
struct Exported {
    shape: Vec<isize>,
    strides: Vec<isize>,
    format: CString,
    _holder: Holder,
}

/// Fills a view of an array in host memory. The view keeps `holder`.
///
/// # Safety
///
/// `start` is the first element, and the array of that layout is valid while `holder` is; `view` is what Python gave.
pub(crate) unsafe fn fill_array(
    object: &Bound<'_, PyAny>,
    start: u64,
    layout: &Layout,
    read_only: bool,
    holder: Holder,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let Some((characters, bytes)) = layout.dtype.characters().zip(layout.dtype.bytes()) else {
        return Err(no_buffer(format!(
            "the buffer protocol has no name for {}; take the array by DLPack",
            layout.dtype.name()
        )));
    };
    if read_only && flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
        return Err(no_buffer("the lease is read-only; connect without `read_only`"));
    }
    let is_plain = layout.strides.is_none();
    let asks = |flag: c_int| flags & flag == flag;
    if !is_plain && (!asks(ffi::PyBUF_STRIDES) || asks(ffi::PyBUF_C_CONTIGUOUS)) {
        return Err(no_buffer("the array has gaps between its elements; ask for a view with strides"));
    }
    if asks(ffi::PyBUF_F_CONTIGUOUS) && layout.shape.len() > 1 {
        return Err(no_buffer("the array is not in Fortran order"));
    }
    if view.is_null() {
        return Err(no_buffer("there is no view to fill"));
    }
    let mut exported = Box::new(Exported {
        shape: layout.shape.iter().map(|&length| length as isize).collect(),
        strides: layout.full_strides().iter().map(|&stride| stride as isize * bytes as isize).collect(),
        format: CString::new(characters.1).unwrap_or_default(),
        _holder: holder,
    });
    let shape = exported.shape.as_mut_ptr();
    let strides = exported.strides.as_mut_ptr();
    let format = exported.format.as_ptr().cast_mut();
    let filled = ffi::Py_buffer {
        buf: ptr::with_exposed_provenance_mut(start as usize),
        obj: object.clone().into_ptr(),
        len: layout.nbytes().unwrap_or(0) as isize,
        itemsize: bytes as isize,
        readonly: c_int::from(read_only),
        ndim: layout.shape.len() as c_int,
        format: if asks(ffi::PyBUF_FORMAT) { format } else { ptr::null_mut::<c_char>() },
        shape: if asks(ffi::PyBUF_ND) { shape } else { ptr::null_mut() },
        strides: if asks(ffi::PyBUF_STRIDES) { strides } else { ptr::null_mut() },
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
    let Ok(buffer) = PyUntypedBuffer::get(object) else { return Ok(None) };
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
    let dtype = Dtype::of_numpy(kind, item).filter(|_| native).ok_or_else(refused)?;
    let strides = buffer.strides().iter().map(|&stride| stride as i64 / item as i64).collect();
    if buffer.strides().iter().any(|stride| stride % item as isize != 0) {
        return Err(refused());
    }
    let shape = buffer.shape().iter().map(|&length| length as i64).collect();
    let layout = Layout::new(dtype, shape, Some(strides)).or_raise()?;
    Ok(Some(View {
        start: buffer.buf_ptr().expose_provenance() as u64,
        layout,
        device: Device { kind: CPU, id: 0 },
        source: Source::Buffer,
        keeper: Keeper::Buffer(buffer),
    }))
}

/// Refuses the buffer protocol elsewhere than on the host backend.
pub(crate) fn only_host(gpu: &Gpu) -> PyResult<()> {
    match gpu.kind() {
        BackendKind::Host => Ok(()),
        kind => Err(no_buffer(format!("the memory is on a {kind} device; take the array by DLPack"))),
    }
}
