//! An array as it was read: where it lies, what it is, and what keeps its memory.

use std::ffi::c_void;
use std::mem;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::intern;
use pyo3::prelude::*;

use super::abi::{CPU, Device, Managed, ManagedVersioned};
use crate::data::layout::Layout;
use crate::interpreter::errors::unsupported;

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
pub(crate) enum Owner {
    /// Nothing: it is a block of the session.
    Nothing,
    #[allow(dead_code, reason = "held for its drop")]
    Object(Py<PyAny>),
    /// PyTorch's storage, and the range of it that was shared. The tensor alone would not do, since
    /// `tensor.data = other` gives the storage up.
    Storage {
        object: Py<PyAny>,
        first: u64,
        bytes: u64,
    },
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
    /// Its library says that it may not be written.
    pub read_only: bool,
    pub owner: Owner,
}

impl View {
    /// Returns the handle of the stream that the array's pending work is on; `asked` is where
    /// `__dlpack__` was told to have it waited for.
    pub fn pending(&self, asked: impl Fn() -> PyResult<Option<u64>>) -> PyResult<Option<u64>> {
        match self.source {
            Source::Exchange(raw) if self.device.kind != CPU => Ok(Some(raw)),
            Source::Interface(raw) => Ok(raw),
            Source::Dlpack if self.device.kind != CPU => asked(),
            _ => Ok(None),
        }
    }

    /// Returns the first byte that belongs to the array, how many do, and how many of them lie
    /// before its first element.
    pub fn span(&self) -> PyResult<(u64, u64, u64)> {
        let reach = self.layout.reach().and_then(|(before, after)| {
            let first = self.start.checked_sub(before)?;
            first.checked_add(before.checked_add(after)?)?;
            Some((first, before, before + after))
        });
        let Some((first, before, len)) = reach else {
            return Err(unsupported(
                "sharing this array",
                format!(
                    "{} with strides, or beyond the address space",
                    self.layout.dtype.name()
                ),
                "share a contiguous copy of it",
            ));
        };
        Ok((first, len, before))
    }
}

impl Owner {
    /// Takes hold of the storage that a range of a tensor lies in, or of an array that has none.
    pub fn storage_of(array: &Bound<'_, PyAny>, first: u64, bytes: u64) -> Owner {
        match array.call_method0(intern!(array.py(), "untyped_storage")) {
            Ok(storage) => Owner::Storage {
                object: storage.unbind(),
                first,
                bytes,
            },
            Err(_) => Owner::Object(array.clone().unbind()),
        }
    }

    /// Takes another hold of a storage; `None` for everything else.
    pub fn storage(&self, py: Python<'_>) -> Option<Owner> {
        let &Owner::Storage {
            ref object,
            first,
            bytes,
        } = self
        else {
            return None;
        };
        Some(Owner::Storage {
            object: object.clone_ref(py),
            first,
            bytes,
        })
    }

    /// Keeps a storage from here on wherever it lies.
    pub fn forget_place(&mut self) {
        *self = match mem::replace(self, Owner::Nothing) {
            Owner::Storage { object, .. } => Owner::Object(object),
            other => other,
        };
    }

    /// Says how a storage that was shared has been freed or moved since; `None` for what is as it
    /// was.
    pub fn was_freed(&self, py: Python<'_>) -> Option<String> {
        let &Owner::Storage {
            ref object,
            first,
            bytes,
        } = self
        else {
            return None;
        };
        let (start, len) = place_of(object.bind(py)).ok()?;
        let is_inside = start <= first && first.saturating_add(bytes) <= start.saturating_add(len);
        (!is_inside).then(|| {
            format!(
                "a storage was resized while others hold {bytes} bytes of it at {first:#x}: it is {len} bytes at \
                 {start:#x}. They read memory that its allocator uses again; share such tensors with copy=True"
            )
        })
    }
}

fn place_of(storage: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
    Ok((
        storage.call_method0("data_ptr")?.extract()?,
        storage.call_method0("nbytes")?.extract()?,
    ))
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
                    // SAFETY: the standard's deleter asks to be called once: this is the end of our
                    // only hold.
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
