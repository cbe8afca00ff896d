//! Arrays that are given out by DLPack: the standard's structs, and capsules of them.

use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;

use super::abi::{
    Device, Managed, ManagedVersioned, PLAIN, READ_ONLY, Tensor, VERSION, VERSIONED, pointer_of,
};
use super::view::Taken;
use crate::data::layout::Layout;
use crate::interpreter::errors::no_buffer;

/// An array to give out, and what keeps its memory.
pub(crate) struct Export<'a, H> {
    pub start: u64,
    pub layout: &'a Layout,
    pub device: Device,
    pub read_only: bool,
    pub hold: H,
}

/// What the standard's struct is the beginning of, until its taker deletes it. That takes no lock
/// of Python's.
#[repr(C)]
struct Given<M, H> {
    managed: M,
    /// The shape, then the strides: the struct points at both.
    numbers: Vec<i64>,
    hold: H,
}

impl<H: Send> Export<'_, H> {
    /// Describes the array, with the numbers that the description points at.
    fn tensor(&self) -> (Tensor, Vec<i64>) {
        let (shape, is_empty) = (&self.layout.shape, self.layout.elements() == Some(0));
        let mut numbers = Vec::with_capacity(2 * shape.len());
        numbers.extend_from_slice(shape);
        numbers.extend(self.layout.full_strides());
        let (lengths, strides) = numbers.split_at_mut(shape.len());
        let tensor = Tensor {
            data: if is_empty {
                ptr::null_mut()
            } else {
                ptr::with_exposed_provenance_mut(self.start as usize)
            },
            device: self.device,
            dimensions: shape.len() as i32,
            dtype: self.layout.dtype,
            shape: lengths.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        (tensor, numbers)
    }

    /// Gives the array out as the standard's versioned struct, which the taker deletes.
    pub fn versioned(self) -> *mut ManagedVersioned {
        let (tensor, numbers) = self.tensor();
        let managed = ManagedVersioned {
            version: VERSION,
            context: ptr::null_mut(),
            deleter: Some(delete::<ManagedVersioned, H>),
            flags: if self.read_only { READ_ONLY } else { 0 },
            tensor,
        };
        Box::into_raw(Box::new(Given {
            managed,
            numbers,
            hold: self.hold,
        }))
        .cast()
    }

    /// Gives the array out as the struct before 1.0, which cannot say that it is read-only.
    fn plain(self) -> *mut Managed {
        let (tensor, numbers) = self.tensor();
        let managed = Managed {
            tensor,
            context: ptr::null_mut(),
            deleter: Some(delete::<Managed, H>),
        };
        Box::into_raw(Box::new(Given {
            managed,
            numbers,
            hold: self.hold,
        }))
        .cast()
    }

    /// Gives the array out as a capsule, versioned if the consumer knows that.
    pub fn capsule(self, py: Python<'_>, versioned: bool) -> PyResult<Bound<'_, PyAny>> {
        if versioned {
            let managed = self.versioned();
            // SAFETY: `capsule_of` asks for a struct of that name: just made.
            unsafe { capsule_of(py, managed.cast(), VERSIONED, drop_versioned_capsule) }
        } else if self.read_only {
            Err(no_buffer(
                "the memory is read-only, and this consumer asks in a way that cannot say so (DLPack before 1.0); \
                 without_read_only_flag() hands it out all the same",
            ))
        } else {
            let managed = self.plain();
            // SAFETY: as above.
            unsafe { capsule_of(py, managed.cast(), PLAIN, drop_plain_capsule) }
        }
    }
}

/// Deletes what [`Export`] gave out, on whichever thread.
unsafe extern "C" fn delete<M, H>(managed: *mut M) {
    // SAFETY: `Box::from_raw` asks for what `into_raw` gave, once: the struct is the first field of
    // the box's value, and the standard asks its taker to delete it once.
    drop(unsafe { Box::from_raw(managed.cast::<Given<M, H>>()) });
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
    // SAFETY: `PyCapsule_New` asks for a pointer that is not null and a name that outlives the
    // capsule: a box's, static.
    let capsule = unsafe { ffi::PyCapsule_New(managed, name.as_ptr(), Some(destructor)) };
    // SAFETY: `from_owned_ptr_or_err` asks for an owned reference or null with an exception set:
    // `PyCapsule_New` gives that.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

unsafe extern "C" fn drop_versioned_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: `pointer_of` asks for a capsule: Python calls us with it.
    let managed = unsafe { pointer_of(capsule, VERSIONED) };
    if !managed.is_null() {
        // We gave it out, and nobody took it: the name says so.
        drop(Taken::Versioned(managed));
    }
}

unsafe extern "C" fn drop_plain_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    let managed = unsafe { pointer_of(capsule, PLAIN) };
    if !managed.is_null() {
        // As above.
        drop(Taken::Plain(managed));
    }
}
