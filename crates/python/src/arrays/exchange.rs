//! DLPack's table of C functions (`__dlpack_c_exchange_api__`, DLPack 1.3): PyTorch's tensors
//! without a Python call each.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use super::abi::{CPU, Device, ManagedVersioned, Tensor, VERSION, Version};
use super::dlpack::view_of;
use super::export::Export;
use super::view::{Owner, Source, View};
use crate::data::layout::Dtype;
use crate::interpreter::errors::unsupported;

/// Types that are remembered; they stay as long as the process.
const MOST_TYPES: usize = 16;

const NAME: &CStr = c"dlpack_exchange_api";

/// Older tables behind a table of another version that are looked at.
const MOST_VERSIONS: usize = 8;

/// Returns the type of PyTorch's tensors.
fn torch_tensor(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static TENSOR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    TENSOR.import(py, "torch", "Tensor")
}

/// Returns the handle of PyTorch's current stream; `None` for host memory, which has none.
pub(crate) fn current_stream(py: Python<'_>, device: Device) -> PyResult<Option<u64>> {
    if device.kind == CPU {
        return Ok(None);
    }
    if let Some(stream) = Table::of(torch_tensor(py)?).and_then(|table| table.stream(py, device)) {
        return Ok(Some(stream));
    }
    let current = py
        .import("torch.cuda")?
        .call_method1("current_stream", (device.id,))?;
    current.getattr("cuda_stream")?.extract().map(Some)
}

/// Makes a tensor of PyTorch's, the fast way where its version has it.
pub(crate) fn tensor<'py, H: Send>(
    py: Python<'py>,
    export: Export<'_, H>,
) -> PyResult<Bound<'py, PyAny>> {
    if let Some(table) =
        Table::of(torch_tensor(py)?).filter(|table| table.object_from_managed.is_some())
    {
        return table.object(py, export);
    }
    let capsule = export.capsule(py, true)?;
    py.import("torch.utils.dlpack")?
        .call_method1("from_dlpack", (capsule,))
}

/// `DLPackExchangeAPIHeader`, which every version's table begins with.
#[repr(C)]
struct Header {
    version: Version,
    /// That of the same library's table of an older version; null where there is none.
    previous: *const Header,
}

/// `DLPackExchangeAPI` of version 1. It lives as long as the process, so it is copied nowhere.
#[repr(C)]
pub(crate) struct Table {
    _header: Header,
    _allocate: *const c_void,
    _managed_from_object: *const c_void,
    object_from_managed:
        Option<unsafe extern "C" fn(*mut ManagedVersioned, *mut *mut c_void) -> c_int>,
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int>,
    current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

// SAFETY: nobody writes to it, and the standard lets its functions be called on any thread with the
// interpreter's lock.
unsafe impl Sync for Table {}

impl Table {
    /// Finds the table of a type of arrays. Looking for what a type lacks costs an exception, so
    /// types are remembered.
    pub fn of(class: &Bound<'_, PyType>) -> Option<&'static Table> {
        static KNOWN: Mutex<Vec<(Py<PyType>, Option<&'static Table>)>> = Mutex::new(Vec::new());
        // No call of Python's is made with the lock held.
        let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, table)) = known().iter().find(|(known, _)| known.is(class)) {
            return *table;
        }
        let table = Table::look_up(class);
        let mut known = known();
        if known.len() < MOST_TYPES {
            known.push((class.clone().unbind(), table));
        }
        table
    }

    fn look_up(class: &Bound<'_, PyType>) -> Option<&'static Table> {
        let capsule = class
            .getattr(intern!(class.py(), "__dlpack_c_exchange_api__"))
            .ok()?;
        // SAFETY: `PyCapsule_IsValid` takes any object.
        if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME.as_ptr()) } == 0 {
            return None;
        }
        // SAFETY: `PyCapsule_GetPointer` asks for a valid capsule of that name: just asked.
        let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) };
        let mut place = table.cast::<Header>().cast_const();
        for _ in 0..MOST_VERSIONS {
            // SAFETY: `as_ref` asks for null or a valid value: the standard promises one that lives
            // as long as the process.
            let header = unsafe { place.as_ref() }?;
            if header.version.major == VERSION.major {
                // SAFETY: as above; the standard promises that the header of this version begins
                // this table.
                return unsafe { place.cast::<Table>().as_ref() };
            }
            place = header.previous;
        }
        None
    }

    /// Reads an array of the table's type; `None` where the table cannot.
    pub fn read(&self, object: &Bound<'_, PyAny>) -> Option<PyResult<View>> {
        let mut tensor = Tensor {
            data: ptr::null_mut(),
            device: Device { kind: 0, id: 0 },
            dimensions: 0,
            dtype: Dtype::U8,
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        let function = self.tensor_from_object?;
        // SAFETY: the standard asks for an object of the table's type and for a struct to fill, and
        // sets an exception when it fails.
        if unsafe { function(object.as_ptr().cast(), &raw mut tensor) } != 0 {
            // The ordinary way gives the better error.
            drop(PyErr::take(object.py()));
            return None;
        }
        // Where nobody says what to wait for, the ordinary way does. Host memory has nothing to
        // wait for.
        let stream = if tensor.device.kind == CPU {
            0
        } else {
            self.stream(object.py(), tensor.device)?
        };
        Some(view_of(&tensor, Owner::Nothing).map(|view| View {
            source: Source::Exchange(stream),
            ..view
        }))
    }

    /// Returns the handle of the stream that the array library queues its work on at this moment;
    /// `None` where the table cannot.
    fn stream(&self, py: Python<'_>, device: Device) -> Option<u64> {
        let mut stream = ptr::null_mut();
        let function = self.current_stream?;
        // SAFETY: the standard asks for a place to write a pointer to, and sets an exception when
        // it fails.
        if unsafe { function(device.kind, device.id, &raw mut stream) } != 0 {
            drop(PyErr::take(py));
            return None;
        }
        Some(stream.expose_provenance() as u64)
    }

    /// Makes an array of the table's type.
    fn object<'py, H: Send>(
        &self,
        py: Python<'py>,
        export: Export<'_, H>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(function) = self.object_from_managed else {
            return Err(unsupported(
                "a tensor by this table",
                "it makes none",
                "update PyTorch",
            ));
        };
        let Export {
            start,
            layout,
            device,
            read_only,
            hold,
        } = export;
        // The standard gives the struct away also when the function fails, and PyTorch does not
        // delete it then.
        let kept = Arc::new(Mutex::new(Some(hold)));
        let managed = Export {
            start,
            layout,
            device,
            read_only,
            hold: kept.clone(),
        }
        .versioned();
        let mut object = ptr::null_mut();
        // SAFETY: the standard asks for a struct that it takes over, and for a place to write an
        // owned reference to.
        let code = unsafe { function(managed, &raw mut object) };
        if code != 0 {
            drop(kept.lock().unwrap_or_else(PoisonError::into_inner).take());
            return Err(PyErr::fetch(py));
        }
        // SAFETY: `from_owned_ptr_or_err` asks for an owned reference: the standard gives one.
        unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) }
    }
}
