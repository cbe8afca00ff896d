//! DLPack: the structs, capsules that are given out, and capsules that are taken in.
//!
//! The standard is `dlpack.h` of github.com/dmlc/dlpack; both the versioned capsule (1.x) and the one before are
//! spoken.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use gpu_ipc::{BackendKind, ReceivedBlock};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::array::{Keeper, Source, View};
use crate::block::Lent;
use crate::errors::{OrRaise, invalid, no_buffer, unsupported};
use crate::layout::{Dtype, Layout, MOST_DIMENSIONS};
use crate::part::Owner;
use crate::plain::Plain;

/// Host memory (`kDLCPU`).
pub(crate) const CPU: i32 = 1;
/// Memory of an NVIDIA GPU (`kDLCUDA`).
pub(crate) const CUDA: i32 = 2;
/// Pinned host memory (`kDLCUDAHost`).
pub(crate) const CUDA_HOST: i32 = 3;
/// Memory of an AMD GPU (`kDLROCM`).
pub(crate) const ROCM: i32 = 10;
/// Managed memory (`kDLCUDAManaged`).
pub(crate) const CUDA_MANAGED: i32 = 13;

const READ_ONLY: u64 = 1;
const VERSION: Version = Version { major: 1, minor: 1 };

const PLAIN: &CStr = c"dltensor";
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// `DLPackVersion`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct Version {
    pub major: u32,
    pub minor: u32,
}

/// `DLDevice`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct Device {
    pub kind: i32,
    pub id: i32,
}

impl Device {
    /// Returns DLPack's name of a device.
    pub fn of(gpu: &gpu_ipc::Gpu) -> Device {
        let id = gpu.device().0 as i32;
        match gpu.kind() {
            BackendKind::Cuda => Device { kind: CUDA, id },
            BackendKind::Hip => Device { kind: ROCM, id },
            _ => Device { kind: CPU, id: 0 },
        }
    }

    /// Returns the device as people name it.
    pub fn name(self) -> String {
        match self.kind {
            CPU => "host memory".into(),
            CUDA => format!("cuda:{}", self.id),
            CUDA_HOST => "pinned host memory".into(),
            ROCM => format!("hip:{}", self.id),
            CUDA_MANAGED => "managed memory".into(),
            other => format!("DLPack's device {other}:{}", self.id),
        }
    }
}

/// `DLTensor`.
#[repr(C)]
pub(crate) struct Tensor {
    pub data: *mut c_void,
    pub device: Device,
    pub dimensions: i32,
    pub dtype: Dtype,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}
const _: () = assert!(size_of::<Tensor>() == 48);

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(crate) struct ManagedVersioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    pub tensor: Tensor,
}

/// What keeps the memory behind an array that was given out.
#[allow(dead_code, reason = "held for its drop")]
#[derive(Clone)]
pub(crate) enum Holder {
    /// A lease of this process.
    Received(ReceivedBlock),
    /// A block of a session of this process.
    Lent(Lent),
    /// Memory of another allocator.
    Plain(Arc<Plain>),
    /// Addresses of an object.
    Part(Owner),
}

/// What a capsule that was given out points at. The deleter takes no lock of Python's.
#[repr(C)]
struct Given<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Vec<i64>,
    holder: Holder,
}

/// An array to give out.
pub(crate) struct Export<'a> {
    pub start: u64,
    pub layout: &'a Layout,
    pub device: Device,
    pub read_only: bool,
    pub holder: Holder,
}

impl Export<'_> {
    fn tensor(&self) -> Tensor {
        let is_empty = self.layout.elements() == Some(0);
        Tensor {
            data: if is_empty { ptr::null_mut() } else { ptr::with_exposed_provenance_mut(self.start as usize) },
            device: self.device,
            dimensions: self.layout.shape.len() as i32,
            dtype: self.layout.dtype,
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        }
    }

    /// Gives the array out as the standard's versioned struct, which the taker deletes.
    pub fn versioned(self) -> *mut ManagedVersioned {
        let managed = ManagedVersioned {
            version: VERSION,
            context: ptr::null_mut(),
            deleter: Some(delete_given),
            flags: if self.read_only { READ_ONLY } else { 0 },
            tensor: self.tensor(),
        };
        let (shape, strides) = (self.layout.shape.clone(), self.layout.full_strides());
        let mut given = Box::new(Given { managed, shape, strides, holder: self.holder });
        given.managed.tensor.shape = given.shape.as_mut_ptr();
        given.managed.tensor.strides = given.strides.as_mut_ptr();
        Box::into_raw(given).cast()
    }

    /// Gives the array out as the struct before 1.0, which cannot say that it is read-only.
    fn plain(self) -> *mut Managed {
        let managed = Managed { tensor: self.tensor(), context: ptr::null_mut(), deleter: Some(delete_given) };
        let (shape, strides) = (self.layout.shape.clone(), self.layout.full_strides());
        let mut given = Box::new(Given { managed, shape, strides, holder: self.holder });
        given.managed.tensor.shape = given.shape.as_mut_ptr();
        given.managed.tensor.strides = given.strides.as_mut_ptr();
        Box::into_raw(given).cast()
    }

    /// Gives the array out as a capsule, versioned if the consumer knows that.
    pub fn capsule(self, py: Python<'_>, versioned: bool) -> PyResult<Bound<'_, PyAny>> {
        if versioned {
            let managed = self.versioned();
            // SAFETY: `capsule_of` asks for a struct of that name: just made.
            unsafe { capsule_of(py, managed.cast(), VERSIONED, drop_versioned_capsule) }
        } else if self.read_only {
            Err(no_buffer(
                "the lease is read-only, and this consumer asks in a way that cannot say so (DLPack before 1.0); \
                 received.without_read_only_flag() hands it out all the same",
            ))
        } else {
            let managed = self.plain();
            // SAFETY: as above.
            unsafe { capsule_of(py, managed.cast(), PLAIN, drop_plain_capsule) }
        }
    }
}

/// Deletes what [`Export`] gave out, on whichever thread.
unsafe extern "C" fn delete_given<M>(managed: *mut M) {
    // SAFETY: `Box::from_raw` asks for what `into_raw` gave, once: the struct is the first field of the box's value,
    // and the standard asks its taker to delete it once.
    drop(unsafe { Box::from_raw(managed.cast::<Given<M>>()) });
}

/// # Safety
///
/// `managed` is a live struct of the kind that `name` says.
unsafe fn capsule_of<'py>(
    py: Python<'py>,
    managed: *mut c_void,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: `PyCapsule_New` asks for a pointer that is not null and a name that outlives the capsule: a box's,
    // static.
    let capsule = unsafe { ffi::PyCapsule_New(managed, name.as_ptr(), Some(destructor)) };
    // SAFETY: `from_owned_ptr_or_err` asks for an owned reference or null with an exception set: `PyCapsule_New` gives
    // that.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

unsafe extern "C" fn drop_versioned_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: `pointer_of` asks for a capsule: Python calls us with it.
    let managed = unsafe { pointer_of(capsule, VERSIONED) }.cast::<ManagedVersioned>();
    if !managed.is_null() {
        // SAFETY: `delete_given` asks for what we gave out and nobody took: the name says so.
        unsafe { delete_given(managed) };
    }
}

unsafe extern "C" fn drop_plain_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    let managed = unsafe { pointer_of(capsule, PLAIN) }.cast::<Managed>();
    if !managed.is_null() {
        // SAFETY: as above.
        unsafe { delete_given(managed) };
    }
}

/// Returns what a capsule of this name points at; null for one of another name.
///
/// # Safety
///
/// `capsule` is a capsule, and the interpreter's lock is held.
unsafe fn pointer_of(capsule: *mut ffi::PyObject, name: &CStr) -> *mut c_void {
    // SAFETY: `PyCapsule_IsValid` asks for the lock, and takes any object.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return ptr::null_mut();
    }
    // SAFETY: `PyCapsule_GetPointer` asks for a valid capsule of that name: just asked.
    unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) }
}

/// What somebody else gave us by DLPack, until it is deleted.
pub(crate) enum Taken {
    Versioned(*mut c_void),
    Plain(*mut c_void),
}

// SAFETY: the standard lets the taker delete it on any thread.
unsafe impl Send for Taken {}
// SAFETY: nothing of it is read through a shared reference but its address.
unsafe impl Sync for Taken {}

impl Drop for Taken {
    fn drop(&mut self) {
        match *self {
            Taken::Versioned(managed) => {
                let managed = managed.cast::<ManagedVersioned>();
                // SAFETY: reading a field asks for a live struct: nobody else deletes it.
                if let Some(deleter) = unsafe { (*managed).deleter } {
                    // SAFETY: the standard's deleter asks to be called once: this is the end of our only hold.
                    unsafe { deleter(managed) };
                }
            }
            Taken::Plain(managed) => {
                let managed = managed.cast::<Managed>();
                // SAFETY: as above.
                if let Some(deleter) = unsafe { (*managed).deleter } {
                    // SAFETY: as above.
                    unsafe { deleter(managed) };
                }
            }
        }
    }
}

/// Reads an object that speaks DLPack; `None` for one that does not.
///
/// `stream` is where the object's own queued work is to be waited for; `None` asks for no order.
pub(crate) fn read(object: &Bound<'_, PyAny>, stream: Option<i64>) -> PyResult<Option<View>> {
    let py = object.py();
    let Ok(method) = object.getattr("__dlpack__") else { return Ok(None) };
    let keywords = PyDict::new(py);
    keywords.set_item("max_version", (VERSION.major, VERSION.minor))?;
    // Host memory knows no streams, and says so by refusing -1.
    let device = object.call_method0("__dlpack_device__")?.extract::<(i32, i32)>()?;
    if matches!(device.0, CUDA | ROCM | CUDA_MANAGED) {
        keywords.set_item("stream", stream.unwrap_or(-1))?;
    }
    let capsule = match method.call((), Some(&keywords)) {
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
            keywords.del_item("max_version")?;
            method.call((), Some(&keywords))?
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
                format!("its version is {}.{}, this library reads 1.x", version.major, version.minor),
                "use versions of both that know DLPack 1",
            ));
        }
        // SAFETY: as above, of a version whose fields are these.
        return view_of(unsafe { &(*managed).tensor }, Keeper::Taken(taken));
    }
    // SAFETY: as above.
    let plain = unsafe { pointer_of(raw, PLAIN) };
    if plain.is_null() {
        return Err(invalid("what __dlpack__ gave", "another capsule, or a used one", "a fresh DLPack capsule"));
    }
    rename(capsule, PLAIN_USED)?;
    let taken = Taken::Plain(plain);
    // SAFETY: reading asks for a live struct: ours since the capsule was renamed.
    view_of(unsafe { &(*plain.cast::<Managed>()).tensor }, Keeper::Taken(taken))
}

fn rename(capsule: &Bound<'_, PyCapsule>, name: &'static CStr) -> PyResult<()> {
    // SAFETY: `PyCapsule_SetName` asks for a capsule and a name that outlives it: static.
    let done = unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), name.as_ptr()) };
    if done == 0 { Ok(()) } else { Err(PyErr::fetch(capsule.py())) }
}

/// Reads the standard's description of an array.
pub(crate) fn view_of(tensor: &Tensor, keeper: Keeper) -> PyResult<View> {
    let dimensions = usize::try_from(tensor.dimensions).ok().filter(|&n| n <= MOST_DIMENSIONS);
    let dimensions =
        dimensions.ok_or_else(|| invalid("the number of dimensions", tensor.dimensions, "from 0 to 64"))?;
    let list = |from: *const i64| match (dimensions, from.is_null()) {
        (0, _) => Some(Vec::new()),
        (_, true) => None,
        // SAFETY: `from_raw_parts` asks for `dimensions` numbers: the standard promises one for each dimension.
        _ => Some(unsafe { std::slice::from_raw_parts(from, dimensions) }.to_vec()),
    };
    let shape = list(tensor.shape).ok_or_else(|| invalid("an array's shape", "missing", "given"))?;
    let layout = Layout::new(tensor.dtype, shape, list(tensor.strides)).or_raise()?;
    Ok(View {
        start: (tensor.data.expose_provenance() as u64).wrapping_add(tensor.byte_offset),
        layout,
        device: tensor.device,
        source: Source::Dlpack,
        keeper,
    })
}

/// Refuses what a consumer of `__dlpack__` asks for and cannot have.
pub(crate) fn check_request(ours: Device, asked: Option<(i32, i32)>, copy: Option<bool>) -> PyResult<()> {
    if let Some((kind, id)) = asked
        && (kind, id) != (ours.kind, ours.id)
    {
        let theirs = Device { kind, id }.name();
        return Err(no_buffer(format!(
            "the array is in {}, not in {theirs}; move it with the array library",
            ours.name()
        )));
    }
    if copy == Some(true) {
        return Err(no_buffer("a copy was asked for; take the array as it is and copy it with the array library"));
    }
    Ok(())
}
