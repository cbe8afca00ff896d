//! Descriptors of several arrays in one piece of bytes, which goes through a pipe as fast as one
//! descriptor does.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `GIPM` |
//! | 4 | 4 | version: 1 |
//! | 8 | 8 | how many descriptors |
//! | 16 | 8 each | where each ends, counted from the end of this table |
//! | then | | the descriptors, each with checksums of its own |
//!
//! All numbers are little-endian.

use std::ffi::c_int;

use gpu_ipc::Error;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyList, PySlice, PyType};

use super::descriptor::{Descriptor, Tail};
use crate::interpreter::errors::{OrRaise, invalid};

const MAGIC: [u8; 4] = *b"GIPM";
const VERSION: u32 = 1;
const AT_ENDS: usize = 16;

/// The descriptors of several arrays, in their order: what ``share_many`` gives and ``claim_many``
/// takes.
///
/// It is a sequence of ``Descriptor`` that is kept as one piece of bytes. ``bytes(descriptors)``
/// gives them, ``Descriptors(data)`` reads them, and pickling carries them, without a Python object
/// for each.
#[pyclass(frozen, weakref, eq, hash, sequence, module = "gpu_ipc")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Descriptors {
    /// Its table was checked. What it points at is not.
    bytes: Box<[u8]>,
}

impl Descriptors {
    /// Writes down grants, each of the array that the tail beside it describes.
    pub fn new(grants: &[gpu_ipc::Descriptor], tails: &[Tail]) -> Descriptors {
        let lengths: Vec<usize> = tails.iter().map(Tail::whole).collect();
        let mut bytes = begin(&lengths);
        for (grant, tail) in grants.iter().zip(tails) {
            tail.append(grant, &mut bytes);
        }
        Descriptors {
            bytes: bytes.into_boxed_slice(),
        }
    }

    /// Reads what supports the buffer protocol.
    ///
    /// # Errors
    ///
    /// `BadDescriptor` for bytes of anything else.
    pub fn of_bytes(data: &Bound<'_, PyAny>) -> PyResult<Descriptors> {
        let bytes = match data.cast::<PyBytes>() {
            Ok(bytes) => bytes.as_bytes().into(),
            Err(_) => PyBuffer::<u8>::get(data)?.to_vec(data.py())?.into(),
        };
        Descriptors::decode(bytes).or_raise()
    }

    /// Reads what somebody sent. Each descriptor is checked when it is taken out.
    ///
    /// # Errors
    ///
    /// [`Error::BadDescriptor`] naming what is wrong with the table.
    fn decode(bytes: Box<[u8]>) -> Result<Descriptors, Error> {
        let bad = |what, got: String, must: &str| Error::BadDescriptor {
            what,
            got,
            must: must.into(),
        };
        if bytes.len() < AT_ENDS || bytes[..4] != MAGIC || bytes[4..8] != VERSION.to_le_bytes() {
            let got = format!("{} bytes that begin otherwise", bytes.len());
            return Err(bad(
                "the list of descriptors",
                got,
                "what `share_many` wrote, whole",
            ));
        }
        let len = bytes.len();
        let list = Descriptors { bytes };
        let count = list.number(8);
        let table = count
            .checked_mul(8)
            .and_then(|table| table.checked_add(AT_ENDS))
            .filter(|&end| end <= len);
        let Some(table) = table else {
            return Err(bad(
                "the number of descriptors",
                count.to_string(),
                "that of the bytes that follow",
            ));
        };
        let mut last = 0;
        for end in (0..count).map(|n| list.number(AT_ENDS + 8 * n)) {
            if end < last {
                return Err(bad(
                    "where a descriptor ends",
                    end.to_string(),
                    "not before where it begins",
                ));
            }
            last = end;
        }
        if last != len - table {
            return Err(bad(
                "the length of the descriptors",
                (len - table).to_string(),
                &last.to_string(),
            ));
        }
        Ok(list)
    }

    fn number(&self, at: usize) -> usize {
        let number = u64::from_le_bytes(std::array::from_fn(|n| self.bytes[at + n]));
        // What no address reaches is refused with the rest.
        usize::try_from(number).unwrap_or(usize::MAX)
    }

    fn len(&self) -> usize {
        self.number(8)
    }

    /// Returns the bytes of one; `n` is below the length.
    fn of(&self, n: usize) -> &[u8] {
        let table = AT_ENDS + 8 * self.len();
        let start = if n == 0 {
            0
        } else {
            self.number(AT_ENDS + 8 * (n - 1))
        };
        &self.bytes[table + start..table + self.number(AT_ENDS + 8 * n)]
    }

    fn get(&self, n: usize) -> PyResult<Descriptor> {
        Descriptor::decode(self.of(n)).or_raise()
    }

    fn slice(&self, slice: &Bound<'_, PySlice>) -> PyResult<Descriptors> {
        let all = isize::try_from(self.len()).unwrap_or(isize::MAX);
        let range = slice.indices(all)?;
        let places =
            (0..range.slicelength).map(|n| (range.start + range.step * n as isize) as usize);
        let lengths: Vec<usize> = places.clone().map(|place| self.of(place).len()).collect();
        let mut bytes = begin(&lengths);
        places.for_each(|place| bytes.extend_from_slice(self.of(place)));
        Ok(Descriptors {
            bytes: bytes.into_boxed_slice(),
        })
    }
}

/// Writes the table of a list, with room for what follows.
fn begin(lengths: &[usize]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(AT_ENDS + 8 * lengths.len() + lengths.iter().sum::<usize>());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(lengths.len() as u64).to_le_bytes());
    let mut end = 0u64;
    for &length in lengths {
        end += length as u64;
        bytes.extend_from_slice(&end.to_le_bytes());
    }
    bytes
}

#[pymethods]
impl Descriptors {
    /// Read a list from the bytes that ``bytes(descriptors)`` gave, or make one of descriptors.
    ///
    /// Args:
    ///     data: the bytes; or an iterable of descriptors, or of their bytes.
    ///
    /// Raises:
    ///     BadDescriptor: the bytes are no list. A single descriptor among them that is wrong is found when it is taken
    ///         out or claimed.
    #[new]
    #[pyo3(signature = (data, /))]
    fn py_new(data: &Bound<'_, PyAny>) -> PyResult<Descriptors> {
        if data.is_instance_of::<PyBytes>() || PyBuffer::<u8>::get(data).is_ok() {
            return Descriptors::of_bytes(data);
        }
        let Ok(items) = data.try_iter() else {
            return Err(invalid(
                "a list of descriptors",
                data.get_type(),
                "its bytes, or an iterable of descriptors",
            ));
        };
        let items = items
            .map(|one| Descriptor::of(&one?))
            .collect::<PyResult<Vec<_>>>()?;
        let lengths: Vec<usize> = items.iter().map(|one| one.get().as_bytes().len()).collect();
        let mut bytes = begin(&lengths);
        items
            .iter()
            .for_each(|one| bytes.extend_from_slice(one.get().as_bytes()));
        Ok(Descriptors {
            bytes: bytes.into_boxed_slice(),
        })
    }

    fn __len__(&self) -> usize {
        self.len()
    }

    fn __getitem__<'py>(
        &self,
        py: Python<'py>,
        place: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Ok(slice) = place.cast::<PySlice>() {
            return Ok(Bound::new(py, self.slice(slice)?)?.into_any());
        }
        let index = place.extract::<isize>();
        if let Err(error) = &index
            && error.is_instance_of::<PyTypeError>(py)
        {
            let got = place.get_type();
            return Err(PyTypeError::new_err(format!(
                "a place in descriptors is an integer or a slice, not {got}"
            )));
        }
        // A number that no address reaches is beyond the end as well.
        let index = index.ok().and_then(|n| {
            if n < 0 {
                n.checked_add_unsigned(self.len())
            } else {
                Some(n)
            }
        });
        let index = index
            .and_then(|n| usize::try_from(n).ok())
            .filter(|&n| n < self.len());
        let index = index.ok_or_else(|| {
            PyIndexError::new_err(format!("{place} of {} descriptors", self.len()))
        })?;
        Ok(Bound::new(py, self.get(index)?)?.into_any())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let all = (0..self.len())
            .map(|n| Py::new(py, self.get(n)?))
            .collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, all)?.try_iter()
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.bytes)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (Bound<'py, PyBytes>,)) {
        (slf.get_type(), (slf.get().__bytes__(slf.py()),))
    }

    fn __repr__(&self) -> String {
        // As a descriptor's: what each grants is not for logs.
        format!("<gpu_ipc.Descriptors of {} arrays>", self.len())
    }

    // SAFETY: Python calls it as the protocol says: `view` is its own to fill, or null.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let bytes = &slf.get().bytes;
        let (start, len) = (bytes.as_ptr().cast_mut().cast(), bytes.len() as isize);
        // SAFETY: `PyBuffer_FillInfo` asks for an object that keeps the bytes: frozen, and a box's
        // do not move; and for a view or null, which is an error there. They are read-only, so
        // nobody writes through the pointer.
        let done = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 1, flags) };
        if done == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}
