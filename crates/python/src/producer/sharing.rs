//! From an array to a grant: the block that it lies in, the adoption of its memory, or a copy.

use std::sync::Arc;
use std::time::Duration;

use gpu_ipc::backend::DevicePtr;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Error, Gpu, To};
use pyo3::prelude::*;

use super::block::Block;
use super::shared::{Kind, Lent, Shared};
use crate::arrays::abi::{self, CPU, CUDA_HOST};
use crate::arrays::read;
use crate::arrays::view::{Owner, View};
use crate::data::layout::Layout;
use crate::data::stream;
use crate::interpreter::errors::{OrRaise, invalid, raise, unsupported};
use crate::interpreter::process::process;
use crate::interpreter::waiting::in_slices;

/// Something to share, and after what.
pub(crate) struct Prepared {
    pub lent: Lent,
    pub layout: Layout,
    /// The stream that its pending work is on, by handle.
    pub pending: Option<u64>,
}

impl Shared {
    pub fn allocate(self: &Arc<Self>, py: Python<'_>, nbytes: u64, timeout: Option<Duration>) -> PyResult<Lent> {
        let mut last = None;
        let found = in_slices(py, timeout, |slice| {
            let block =
                if slice.is_zero() { self.session.alloc(nbytes) } else { self.session.alloc_within(nbytes, slice) };
            match block {
                Err(error @ Error::OutOfMemory { .. }) => {
                    last = Some(error);
                    None
                }
                done => Some(done),
            }
        })?;
        let block = match (found, last) {
            (Some(done), _) => done,
            (None, Some(error)) => Err(error),
            (None, None) => Err(Error::Deadline { what: "room for a block" }),
        };
        Ok(Lent::new(block.or_raise()?, self, Kind::Whole))
    }

    /// Turns what is to be shared into a block and a layout. With a stream of the caller's, nobody else's is asked for.
    pub fn prepare(
        self: &Arc<Self>,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        given: Option<&gpu_ipc::Stream>,
        copy: bool,
    ) -> PyResult<Prepared> {
        self.guard.check("this session").or_raise()?;
        if let Ok(block) = x.cast::<Block>()
            && !copy
        {
            let lent = block.get().lent()?;
            if !Arc::ptr_eq(lent.session(), self) {
                return Err(invalid("a block", "of another session", "of the session that shares it"));
            }
            let layout = Layout::bytes(lent.block().len());
            return Ok(Prepared { lent, layout, pending: None });
        }
        let order = || match given {
            Some(_) => Ok(None),
            None => py.detach(|| self.own_stream().map(|stream| Some(stream.raw().handle))).or_raise(),
        };
        let view = read::read(&self.gpu, x, order)?;
        let pending = view.pending(order)?;
        let (first, len, layout) = view.span()?;
        if len == 0 {
            // A block is never empty, and an empty array reads none of its bytes.
            let lent = self.allocate(py, 1, Some(Duration::ZERO))?;
            return Ok(Prepared { lent, layout, pending: None });
        }
        if copy {
            let lent = self.copied(py, &view, (first, len), given, pending)?;
            return Ok(Prepared { lent, layout, pending: None });
        }
        if let Some(error) = read::refusal(abi::Device::of(&self.gpu), view.device, len) {
            return Err(error);
        }
        let lent = match self.block_at(first, len) {
            Some(lent) if lent.kind() == Kind::Whole => {
                let offset = view.start - lent.start();
                return Ok(Prepared { lent, layout: Layout { offset, ..layout }, pending });
            }
            // PyTorch would hand the bytes out again when the tensor is gone, so its storage is kept as if adopted.
            segment => self.adopt(py, view.owner, first, len, segment.as_ref())?,
        };
        Ok(Prepared { lent, layout, pending })
    }

    /// Takes in memory of another allocator, which `owner` keeps until nobody holds or maps it.
    fn adopt(
        self: &Arc<Self>,
        py: Python<'_>,
        owner: Owner,
        first: u64,
        len: u64,
        segment: Option<&Lent>,
    ) -> PyResult<Lent> {
        let token = self.adopted.draw_token();
        self.adopted.keep(token, owner);
        let adopted = py.detach(|| {
            // SAFETY: `adopt` asks that the range stays allocated until its token is back: the owner holds the memory
            // of its allocator, and is dropped with the token; and that no other block overlaps it: two adoptions of
            // one array are two leases on memory that neither of them gives away.
            let adopt = || unsafe { self.session.adopt(DevicePtr(first), len, token) };
            match segment {
                Some(segment) => segment.block().part(first - segment.start(), len, token),
                None => adopt(),
            }
        });
        match adopted {
            Ok(block) => {
                process().queue.look_after(self.clone());
                Ok(Lent::new(block, self, Kind::Adopted))
            }
            Err(error) => {
                drop(self.adopted.take_back(&[token]));
                Err(match error {
                    Error::Unsupported { why, .. } => unsupported(
                        "sharing this memory without a copy",
                        format!("{why} ({len} bytes)"),
                        "pass copy=True, which copies it into the session's memory; or let it be allocated there, by \
                         session.alloc or, for PyTorch, under session.torch_pool()",
                    ),
                    error => raise(error),
                })
            }
        }
    }

    /// Copies an array into a block of its own, and waits for it.
    fn copied(
        self: &Arc<Self>,
        py: Python<'_>,
        view: &View,
        (first, len): (u64, u64),
        given: Option<&gpu_ipc::Stream>,
        pending: Option<u64>,
    ) -> PyResult<Lent> {
        let lent = self.allocate(py, len, Some(Duration::ZERO))?;
        let stream = match (given, pending) {
            (Some(given), _) => given.clone(),
            (None, Some(raw)) => stream::borrow(py, &self.gpu, raw, None)?,
            (None, None) => py.detach(|| self.own_stream().cloned()).or_raise()?,
        };
        let device = view.device;
        py.detach(|| {
            copy(&self.gpu, &stream, lent.block().device_ptr(), device, (first, len))?;
            stream.synchronize().or_raise()
        })?;
        Ok(lent)
    }

    /// Grants everything to everybody, stream by stream.
    pub fn grant_many(
        self: &Arc<Self>,
        py: Python<'_>,
        prepared: &[Prepared],
        addressees: &[To],
        given: Option<gpu_ipc::Stream>,
        options: &ShareOptions,
    ) -> PyResult<Vec<Vec<gpu_ipc::Descriptor>>> {
        let mut granted = vec![vec![None; prepared.len()]; addressees.len()];
        let mut left: Vec<usize> = (0..prepared.len()).collect();
        while let Some(&first) = left.first() {
            let same = |one: &Prepared| given.is_some() || one.pending == prepared[first].pending;
            let (group, rest): (Vec<_>, Vec<_>) = left.into_iter().partition(|&n| same(&prepared[n]));
            left = rest;
            let stream = match (&given, prepared[first].pending) {
                (Some(given), _) => Some(given.clone()),
                (None, Some(raw)) => Some(stream::borrow(py, &self.gpu, raw, None)?),
                (None, None) => None,
            };
            let grants: Vec<_> =
                addressees.iter().flat_map(|&to| group.iter().map(move |&n| (prepared[n].lent.block(), to))).collect();
            let after = stream.as_ref().map_or(After::Done, After::Stream);
            let descriptors = py.detach(|| self.session.share_many(&grants, after, options)).or_raise()?;
            for (place, descriptor) in descriptors.into_iter().enumerate() {
                granted[place / group.len()][group[place % group.len()]] = Some(descriptor);
            }
        }
        Ok(granted.into_iter().map(|list| list.into_iter().flatten().collect()).collect())
    }
}

/// Queues a copy of an array's bytes to memory of a device. The caller keeps both until the stream has come that far.
///
/// # Errors
///
/// `Unsupported` for an array that is neither in host memory nor on the device.
pub(crate) fn copy(
    gpu: &Gpu,
    stream: &gpu_ipc::Stream,
    to: DevicePtr,
    device: abi::Device,
    (first, len): (u64, u64),
) -> PyResult<()> {
    let ours = abi::Device::of(gpu);
    let backend = gpu.backend();
    if device == ours && ours.kind != CPU {
        // SAFETY: `copy` asks for a live stream and ranges that are valid until it is done: the caller keeps both.
        return unsafe { backend.copy(stream.raw(), to, DevicePtr(first), len) }.or_raise();
    }
    if !matches!(device.kind, CPU | CUDA_HOST) {
        return Err(read::refusal(ours, device, len).unwrap_or_else(|| invalid("a device", "another", "ours")));
    }
    let from = std::ptr::with_exposed_provenance::<u8>(first as usize);
    // SAFETY: as above.
    unsafe { backend.copy_to_device(stream.raw(), to, from, len as usize) }.or_raise()
}
