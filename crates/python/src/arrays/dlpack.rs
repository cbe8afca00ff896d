//! Arrays of other libraries by DLPack's capsules, versioned or of the version before.

use std::ffi::CStr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use super::abi::{
    CUDA, CUDA_MANAGED, Managed, ManagedVersioned, PLAIN, PLAIN_USED, READ_ONLY, ROCM, Tensor,
    VERSION, VERSIONED, VERSIONED_USED, pointer_of,
};
use super::view::{Owner, Source, Taken, View};
use crate::data::layout::{Layout, MOST_DIMENSIONS};
use crate::interpreter::errors::{OrRaise, invalid, unsupported};

/// Reads an object that speaks DLPack; `None` for one that does not.
///
/// `stream` is where the object's own queued work is to be waited for; `None` asks for no order.
pub(crate) fn read(object: &Bound<'_, PyAny>, stream: Option<i64>) -> PyResult<Option<View>> {
    let py = object.py();
    let Ok(method) = object.getattr(intern!(py, "__dlpack__")) else {
        return Ok(None);
    };
    let keywords = PyDict::new(py);
    keywords.set_item(intern!(py, "max_version"), (VERSION.major, VERSION.minor))?;
    // Host memory knows no streams, and says so by refusing -1.
    let device = object
        .call_method0(intern!(py, "__dlpack_device__"))?
        .extract::<(i32, i32)>()?;
    if matches!(device.0, CUDA | ROCM | CUDA_MANAGED) {
        keywords.set_item(intern!(py, "stream"), stream.unwrap_or(-1))?;
    }
    let capsule = match method.call((), Some(&keywords)) {
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
            keywords.del_item("max_version")?;
            method.call((), Some(&keywords))?
        }
        Err(error) if error.is_instance_of::<PyBufferError>(py) => {
            let refused = unsupported(
                "sharing this array",
                format!("its library does not give it out: {}", error.value(py)),
                "share a view of another element type (`x.view(numpy.uint16)`), or a copy",
            );
            refused.set_cause(py, Some(error));
            return Err(refused);
        }
        capsule => capsule?,
    };
    take(capsule.cast::<PyCapsule>()?).map(Some)
}

fn take(capsule: &Bound<'_, PyCapsule>) -> PyResult<View> {
    let raw = capsule.as_ptr();
    // SAFETY: `pointer_of` asks for a capsule.
    let versioned = unsafe { pointer_of(raw, VERSIONED) };
    if !versioned.is_null() {
        rename(capsule, VERSIONED_USED)?;
        let taken = Taken::Versioned(versioned);
        let managed = versioned.cast::<ManagedVersioned>();
        // SAFETY: reading the version asks for a live struct: ours since the capsule was renamed.
        let version = unsafe { (*managed).version };
        if version.major != VERSION.major {
            return Err(unsupported(
                "taking this DLPack capsule",
                format!(
                    "its version is {}.{}, this library reads 1.x",
                    version.major, version.minor
                ),
                "use versions of both that know DLPack 1",
            ));
        }
        // SAFETY: as above, of a version whose fields are these.
        let managed = unsafe { &*managed };
        return Ok(View {
            read_only: managed.flags & READ_ONLY != 0,
            ..view_of(&managed.tensor, Owner::Taken(taken))?
        });
    }
    // SAFETY: as above.
    let plain = unsafe { pointer_of(raw, PLAIN) };
    if plain.is_null() {
        return Err(invalid(
            "what __dlpack__ gave",
            "another capsule, or a used one",
            "a fresh DLPack capsule",
        ));
    }
    rename(capsule, PLAIN_USED)?;
    let taken = Taken::Plain(plain);
    // SAFETY: reading asks for a live struct: ours since the capsule was renamed.
    view_of(
        unsafe { &(*plain.cast::<Managed>()).tensor },
        Owner::Taken(taken),
    )
}

fn rename(capsule: &Bound<'_, PyCapsule>, name: &'static CStr) -> PyResult<()> {
    // SAFETY: `PyCapsule_SetName` asks for a capsule and a name that outlives it: static.
    let done = unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), name.as_ptr()) };
    if done == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(capsule.py()))
    }
}

/// Reads the standard's description of an array.
pub(crate) fn view_of(tensor: &Tensor, owner: Owner) -> PyResult<View> {
    let dimensions = usize::try_from(tensor.dimensions)
        .ok()
        .filter(|&n| n <= MOST_DIMENSIONS);
    let dimensions = dimensions.ok_or_else(|| {
        invalid(
            "the number of dimensions",
            tensor.dimensions,
            "from 0 to 64",
        )
    })?;
    let list = |from: *const i64| match (dimensions, from.is_null()) {
        (0, _) => Some(Vec::new()),
        (_, true) => None,
        // SAFETY: `from_raw_parts` asks for `dimensions` numbers: the standard promises one for
        // each dimension.
        _ => Some(unsafe { std::slice::from_raw_parts(from, dimensions) }.to_vec()),
    };
    let shape =
        list(tensor.shape).ok_or_else(|| invalid("an array's shape", "missing", "given"))?;
    let layout = Layout::new(tensor.dtype, shape, list(tensor.strides)).or_raise()?;
    Ok(View {
        start: (tensor.data.expose_provenance() as u64).wrapping_add(tensor.byte_offset),
        layout,
        device: tensor.device,
        source: Source::Dlpack,
        read_only: false,
        owner,
    })
}
