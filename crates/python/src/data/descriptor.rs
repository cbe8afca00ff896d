//! Descriptors: the bytes that travel, with the array's layout behind the library's own.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 192 | the library's descriptor, which alone says what may be claimed |
//! | 192 | 4 | magic `GIPL`; a descriptor that ends before is of plain bytes |
//! | 196 | 1 | version: 2 |
//! | 197 | 3 | element type: DLPack's code and bits; number of dimensions |
//! | 200 | 2 | element type: lanes |
//! | 202 | 2 | 1 when strides follow the shape, else 0 |
//! | 204 | 4 | bytes of the user's own |
//! | 208 | 8 | offset of the first element in the block, in bytes |
//! | 216 | 8 each | shape; strides in elements, if there are any; then the user's own bytes |
//!
//! All numbers are little-endian. The 64 user bytes of the library's descriptor vouch for what is
//! behind it, the tail:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 32 | magic `GIPL`, then zeros |
//! | 32 | 32 | SHA-256 of the tail |
//!
//! The library's keyed checksum covers the user bytes. So a carrier, who has no key, cannot alter the
//! tail: one that does not fit the user bytes is refused when it is read, and user bytes that were
//! altered with it are refused by the claim.

use std::ffi::c_int;

use gpu_ipc::Error;
use pyo3::buffer::PyBuffer;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};
use sha2::{Digest, Sha256};

use super::addressee::ParticipantId;
use super::layout::{Dtype, Layout, MOST_DIMENSIONS, layout_methods};
use crate::interpreter::errors::{OrRaise, invalid, raise};

const MAGIC: [u8; 4] = *b"GIPL";
const VERSION: u8 = 2;
const AT_SHAPE: usize = 216;
/// The user bytes before the digest.
const MARK: [u8; 32] = {
    let mut mark = [0; 32];
    mark.split_at_mut(MAGIC.len()).0.copy_from_slice(&MAGIC);
    mark
};

/// The most bytes of the user's own in a descriptor.
pub(crate) const MOST_META: usize = 1 << 20;

/// What stands behind the library's descriptor, and the user bytes that vouch for it.
pub(crate) struct Tail {
    bytes: Vec<u8>,
    user: [u8; 64],
    meta: usize,
}

impl Tail {
    /// Writes down what of a block the array is, and bytes of the user's own.
    pub fn of(layout: &Layout, meta: &[u8]) -> Tail {
        let strides = layout.strides.as_deref().unwrap_or(&[]);
        let numbers = layout.shape.iter().chain(strides);
        let len = AT_SHAPE - gpu_ipc::Descriptor::BYTES + 8 * numbers.clone().count() + meta.len();
        let mut bytes = Vec::with_capacity(len);
        bytes.extend_from_slice(&MAGIC);
        let dimensions = u8::try_from(layout.shape.len()).unwrap_or(u8::MAX);
        bytes.extend_from_slice(&[VERSION, layout.dtype.code, layout.dtype.bits, dimensions]);
        bytes.extend_from_slice(&layout.dtype.lanes.to_le_bytes());
        bytes.extend_from_slice(&u16::from(layout.strides.is_some()).to_le_bytes());
        bytes.extend_from_slice(&u32::try_from(meta.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend_from_slice(&layout.offset.to_le_bytes());
        numbers.for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        bytes.extend_from_slice(meta);
        Tail {
            user: user_bytes(&bytes),
            meta: meta.len(),
            bytes,
        }
    }

    /// Returns the user bytes to share with.
    pub fn user(&self) -> &[u8; 64] {
        &self.user
    }

    /// Counts the bytes of a whole descriptor.
    pub fn whole(&self) -> usize {
        gpu_ipc::Descriptor::BYTES + self.bytes.len()
    }

    /// Appends a whole descriptor. The grant was made with the tail's user bytes.
    pub fn append(&self, grant: &gpu_ipc::Descriptor, bytes: &mut Vec<u8>) {
        debug_assert_eq!(
            grant.user(),
            &self.user,
            "a grant without its tail's digest"
        );
        bytes.extend_from_slice(grant.as_bytes());
        bytes.extend_from_slice(&self.bytes);
    }
}

/// Computes the user bytes that vouch for a tail.
fn user_bytes(tail: &[u8]) -> [u8; 64] {
    let mut user = [0; 64];
    let (mark, digest) = user.split_at_mut(MARK.len());
    mark.copy_from_slice(&MARK);
    digest.copy_from_slice(&Sha256::digest(tail));
    user
}

/// A grant of one array, as plain bytes for any transport.
///
/// ``bytes(descriptor)`` gives the bytes, ``Descriptor(data)`` reads them; pickling carries them.
/// Copies are copies of the same grant: an addressed one is claimed once.
#[pyclass(frozen, weakref, eq, hash, module = "gpu_ipc")]
#[derive(PartialEq, Eq, Hash, Clone)]
pub(crate) struct Descriptor {
    bytes: Box<[u8]>,
    layout: Layout,
    /// How many bytes of the user's own stand at the end.
    meta: usize,
}

impl Descriptor {
    /// Writes down a grant and what of it the array is. The grant was made with the tail's user
    /// bytes.
    pub fn new(grant: &gpu_ipc::Descriptor, layout: Layout, tail: &Tail) -> Descriptor {
        let mut bytes = Vec::with_capacity(tail.whole());
        tail.append(grant, &mut bytes);
        Descriptor {
            bytes: bytes.into_boxed_slice(),
            layout,
            meta: tail.meta,
        }
    }

    /// Reads what somebody sent.
    ///
    /// # Errors
    ///
    /// [`Error::BadDescriptor`] naming the first field that is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Descriptor, Error> {
        let grant =
            gpu_ipc::Descriptor::decode(bytes.get(..gpu_ipc::Descriptor::BYTES).unwrap_or(bytes))?;
        let bad = |what, got: String, must: &str| Error::BadDescriptor {
            what,
            got,
            must: must.into(),
        };
        let tail = &bytes[gpu_ipc::Descriptor::BYTES..];
        let user = grant.user();
        if tail.is_empty() && !user.starts_with(&MARK) {
            return Ok(Descriptor {
                bytes: bytes.into(),
                layout: Layout::bytes(grant.len()),
                meta: 0,
            });
        }
        if user_bytes(tail) != *user {
            return Err(bad(
                "the layout",
                format!("{} bytes with another digest", tail.len()),
                "what `share` wrote, whole",
            ));
        }
        if bytes.len() < AT_SHAPE || !tail.starts_with(&MAGIC) || bytes[196] != VERSION {
            return Err(bad(
                "the layout",
                format!("{} bytes", tail.len()),
                "of version 2: use the same version of gpu_ipc on both sides",
            ));
        }
        let number = |at: usize| i64::from_le_bytes(std::array::from_fn(|n| bytes[at + n]));
        let dtype = Dtype {
            code: bytes[197],
            bits: bytes[198],
            lanes: u16::from_le_bytes([bytes[200], bytes[201]]),
        };
        let (dimensions, flags) = (
            usize::from(bytes[199]),
            u16::from_le_bytes([bytes[202], bytes[203]]),
        );
        let meta = u32::from_le_bytes(std::array::from_fn(|n| bytes[204 + n])) as usize;
        let numbers = dimensions << usize::from(flags == 1);
        let whole = AT_SHAPE + 8 * numbers + meta;
        if flags > 1 || dimensions > MOST_DIMENSIONS || whole != bytes.len() {
            return Err(bad(
                "the layout's length",
                bytes.len().to_string(),
                "that of its fields",
            ));
        }
        let list = |from: usize| {
            (from..from + dimensions)
                .map(|n| number(AT_SHAPE + 8 * n))
                .collect::<Vec<i64>>()
        };
        let layout = Layout {
            dtype,
            shape: list(0),
            strides: (flags == 1).then(|| list(dimensions)),
            offset: number(208) as u64,
        };
        if !layout.fits(grant.len()) {
            let got = format!(
                "{:?} of {} at offset {}",
                layout.shape,
                dtype.name(),
                layout.offset
            );
            return Err(bad(
                "the array",
                got,
                &format!("inside the block's {} bytes", grant.len()),
            ));
        }
        Ok(Descriptor {
            bytes: bytes.into(),
            layout,
            meta,
        })
    }

    /// Reads a [`Descriptor`], or bytes.
    pub fn of<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Descriptor>> {
        match object.cast::<Descriptor>() {
            Ok(descriptor) => Ok(descriptor.clone()),
            Err(_) => Bound::new(object.py(), Descriptor::of_bytes(object)?),
        }
    }

    fn of_bytes(object: &Bound<'_, PyAny>) -> PyResult<Descriptor> {
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Descriptor::decode(bytes.as_bytes()).or_raise();
        }
        let Ok(view) = PyBuffer::<u8>::get(object) else {
            return Err(invalid(
                "a descriptor",
                object.get_type(),
                "a gpu_ipc.Descriptor, or its bytes",
            ));
        };
        Descriptor::decode(&view.to_vec(object.py())?).or_raise()
    }

    /// Returns all of it.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the library's own part.
    pub fn grant(&self) -> &[u8] {
        &self.bytes[..gpu_ipc::Descriptor::BYTES]
    }

    /// Returns what of the block the array is.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the user's own bytes.
    pub fn meta_bytes(&self) -> &[u8] {
        &self.bytes[self.bytes.len() - self.meta..]
    }

    fn decoded(&self) -> PyResult<gpu_ipc::Descriptor> {
        gpu_ipc::Descriptor::decode(self.grant()).map_err(raise)
    }
}

#[pymethods]
impl Descriptor {
    /// Read a descriptor from the bytes that ``bytes(descriptor)`` gave.
    ///
    /// Good bytes say nothing about the grant: it may be revoked, claimed, or of another session.
    ///
    /// Raises:
    ///     BadDescriptor: naming the first field that is wrong.
    #[new]
    #[pyo3(signature = (data, /))]
    fn py_new<'py>(data: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Descriptor>> {
        Descriptor::of(data)
    }

    /// The number of the session that granted it, as 32 hexadecimal digits.
    #[getter]
    fn session(&self) -> PyResult<String> {
        Ok(self.decoded()?.session().to_string())
    }

    /// The participant that it is addressed to, which alone can claim it; None for a ticket.
    #[getter]
    fn addressee(&self) -> PyResult<Option<ParticipantId>> {
        Ok(self.decoded()?.addressee().map(ParticipantId::of))
    }

    /// Whether it is a ticket, whose claim asks the producer.
    #[getter]
    fn is_ticket(&self) -> PyResult<bool> {
        Ok(self.decoded()?.is_ticket())
    }

    /// The bytes that ``share(..., meta=...)`` put in.
    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.meta_bytes())
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.bytes)
    }

    fn __len__(&self) -> usize {
        self.bytes.len()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (Bound<'py, PyBytes>,)) {
        (slf.get_type(), (slf.get().__bytes__(slf.py()),))
    }

    fn __repr__(&self) -> PyResult<String> {
        // A descriptor is a right to claim, so logs show what it is about and not what it is.
        let kind = if self.decoded()?.is_ticket() {
            "ticket"
        } else {
            "addressed"
        };
        let shape: Vec<String> = self.layout.shape.iter().map(i64::to_string).collect();
        Ok(format!(
            "<gpu_ipc.Descriptor {kind}, {}[{}]>",
            self.layout.dtype.name(),
            shape.join(", ")
        ))
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

layout_methods!(Descriptor);
