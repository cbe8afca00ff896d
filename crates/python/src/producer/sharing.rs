//! From an array to a grant: the block that it lies in, the adoption of its memory, or a copy.

use std::sync::Arc;
use std::time::Duration;

use gpu_ipc::backend::DevicePtr;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Claims, Error, Gpu, SentBlock, To};
use pyo3::prelude::*;

use super::block::Block;
use super::shared::{Lent, Shared};
use crate::arrays::abi::{self, CPU, CUDA_HOST};
use crate::arrays::read;
use crate::arrays::view::{Owner, View};
use crate::data::descriptor::{Descriptor, Tail};
use crate::data::descriptors::Descriptors;
use crate::data::layout::Layout;
use crate::data::stream;
use crate::interpreter::errors::{OrRaise, invalid};
use crate::interpreter::later::Later;
use crate::interpreter::process::process;
use crate::interpreter::waiting::{aside, in_slices};

/// Something to share, and after what.
pub(crate) struct Prepared {
    memory: Memory,
    layout: Layout,
    /// The stream that its pending work is on, by handle.
    pending: Option<u64>,
    /// It is granted to be read only.
    read_only: bool,
}

/// Where an array lies.
enum Memory {
    /// In a block of the session's.
    Block(Lent),
    /// In memory of another allocator, or in a segment of the session's.
    Foreign {
        owner: Owner,
        first: u64,
        len: u64,
        segment: Option<Lent>,
        /// The session keeps the range already.
        is_kept: bool,
    },
}

/// A block that is granted.
enum Held {
    Block(Lent),
    /// For this grant alone.
    Adopted(SentBlock),
}

impl Held {
    fn block(&self) -> &SentBlock {
        match self {
            Held::Block(lent) => lent.block(),
            Held::Adopted(block) => block,
        }
    }
}

impl Prepared {
    /// Grants it to be read only or not, as asked; without a wish, as the array is.
    pub fn with_access(mut self, read_only: Option<bool>) -> Prepared {
        self.read_only = read_only.unwrap_or(self.read_only);
        self
    }

    /// Says whether it is granted to be read only.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Refuses a broadcast of what nothing keeps: it would end with the call that makes it.
    pub fn check(&self, to: To) -> PyResult<()> {
        let is_kept = matches!(&self.memory, Memory::Block(lent) if lent.is_shared());
        if to != To::Ticket(Claims::Unlimited) || is_kept {
            return Ok(());
        }
        Err(invalid(
            "a broadcast",
            "of an array that is in no block of the program's, so that it would end with this call",
            "of a loan: session.lend(array).share(session.ticket(None)), as long as the loan is kept",
        ))
    }
}

impl Shared {
    pub fn allocate(
        self: &Arc<Self>,
        py: Python<'_>,
        nbytes: u64,
        timeout: Option<Duration>,
    ) -> PyResult<Lent> {
        let mut last = None;
        let found = in_slices(py, timeout, |slice| {
            let block = if slice.is_zero() {
                self.session.alloc(nbytes)
            } else {
                self.session.alloc_within(nbytes, slice)
            };
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
            (None, None) => Err(Error::Deadline {
                what: "room for a block",
            }),
        };
        Ok(Lent::new(block.or_raise()?, self, false))
    }

    /// Turns what is to be shared into a block and a layout. With a stream of the caller's, nobody
    /// else's is asked for.
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
                return Err(invalid(
                    "a block",
                    "of another session",
                    "of the session that shares it",
                ));
            }
            let layout = Layout::bytes(lent.block().len());
            return Ok(Prepared {
                memory: Memory::Block(lent),
                layout,
                pending: None,
                read_only: false,
            });
        }
        let order = || match given {
            Some(_) => Ok(None),
            None => py
                .detach(|| self.own_stream().map(|stream| Some(stream.raw().handle)))
                .or_raise(),
        };
        let view = read::read(&self.gpu, x, order)?;
        let pending = view.pending(order)?;
        let (first, len, before) = view.span()?;
        if len == 0 || copy {
            // A block is never empty, and an empty array reads none of its bytes.
            let lent = self.allocate(py, len.max(1), Some(Duration::ZERO))?;
            let layout = Layout {
                offset: before,
                ..view.layout.clone()
            };
            if len > 0 {
                self.copy_to(py, lent.clone(), view, (first, len), given, pending)?;
            }
            return Ok(Prepared {
                memory: Memory::Block(lent),
                layout,
                pending: None,
                read_only: false,
            });
        }
        if let Some(error) = read::refusal(abi::Device::of(&self.gpu), view.device, len) {
            return Err(error);
        }
        let View {
            start,
            layout,
            owner,
            read_only,
            ..
        } = view;
        Ok(match self.block_at(first, len) {
            Some(lent) if !lent.is_segment() => {
                let layout = Layout {
                    offset: start - lent.start(),
                    ..layout
                };
                Prepared {
                    memory: Memory::Block(lent),
                    layout,
                    pending,
                    read_only,
                }
            }
            // PyTorch would hand the bytes out again when the tensor is gone, so its storage is
            // kept as if adopted.
            segment => {
                let layout = Layout {
                    offset: before,
                    ..layout
                };
                let is_kept = self.adopted.keeps(py, (first, len), &owner);
                Prepared {
                    memory: Memory::Foreign {
                        owner,
                        first,
                        len,
                        segment,
                        is_kept,
                    },
                    layout,
                    pending,
                    read_only,
                }
            }
        })
    }

    /// Finds the block that an array was made in. Nothing of its pending work is waited for.
    pub fn block_of(self: &Arc<Self>, x: &Bound<'_, PyAny>) -> PyResult<Option<Lent>> {
        self.guard.check("this session").or_raise()?;
        let view = read::read(&self.gpu, x, || Ok(None))?;
        let (first, len, _) = view.span()?;
        let lent = self.block_at(first, len);
        let found =
            lent.filter(|lent| !lent.is_segment() && view.device == abi::Device::of(&self.gpu));
        Ok(found)
    }

    /// Makes memory a block that can be granted. Memory of others is adopted; its owner keeps it
    /// until nobody holds or maps it. What is not needed goes to `left`, which the caller drops with
    /// the interpreter's lock.
    fn take_in(self: &Arc<Self>, memory: Memory, left: &mut Vec<Owner>) -> Result<Held, Error> {
        let (owner, first, len, segment, is_kept) = match memory {
            Memory::Block(lent) => return Ok(Held::Block(lent)),
            Memory::Foreign {
                owner,
                first,
                len,
                segment,
                is_kept,
            } => (owner, first, len, segment, is_kept),
        };
        let token = self.adopted.join((first, len), owner, is_kept, left);
        let adopted = match &segment {
            Some(segment) => segment.block().part(first - segment.start(), len, token),
            // SAFETY: `adopt` asks that the range stays allocated until its token is back: the
            // owner holds the memory of its allocator, and is dropped with the last token; and that
            // no other block overlaps it: two adoptions of one array are two leases on memory that
            // neither of them gives away.
            None => unsafe { self.session.adopt(DevicePtr(first), len, token) },
        };
        match adopted {
            Ok(block) => {
                process().queue.look_after(self.clone());
                Ok(Held::Adopted(block))
            }
            Err(error) => {
                left.extend(self.adopted.take_back(&[token]));
                Err(match error {
                    Error::Unsupported { why, .. } => Error::Unsupported {
                        what: "sharing this memory without a copy",
                        why: format!("{why} ({len} bytes)"),
                        remedy: "pass copy=True, which copies it into the session's memory; or let it be allocated \
                                 there, by session.alloc or, for PyTorch, under session.torch_pool()",
                    },
                    error => error,
                })
            }
        }
    }

    /// Lends an array, with the interpreter's lock given up once.
    pub fn lend(
        self: &Arc<Self>,
        py: Python<'_>,
        prepared: Prepared,
        given: Option<gpu_ipc::Stream>,
    ) -> PyResult<(gpu_ipc::session::Loan, Option<Lent>, Layout)> {
        let Prepared {
            memory,
            layout,
            pending,
            ..
        } = prepared;
        let mut left = Vec::new();
        let lent: Result<_, Error> = py.detach(|| {
            let stream = self.stream_of(&given, pending)?;
            let after = stream.as_ref().map_or(After::Done, After::Stream);
            let (loan, kept) = match self.take_in(memory, &mut left)? {
                Held::Block(lent) => (lent.block().lend(after)?, Some(lent)),
                Held::Adopted(block) => (self.session.lend(block, after)?, None),
            };
            drop((stream, given));
            Ok((loan, kept))
        });
        let (loan, kept) = lent.or_raise()?;
        Ok((loan, kept, layout))
    }

    /// Finds the stream to share after: the caller's, or the one that the array's work is pending
    /// on.
    fn stream_of(
        &self,
        given: &Option<gpu_ipc::Stream>,
        pending: Option<u64>,
    ) -> Result<Option<gpu_ipc::Stream>, Error> {
        match (given, pending) {
            (Some(given), _) => Ok(Some(given.clone())),
            (None, Some(raw)) => stream::of_handle(&self.gpu, raw).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// Copies an array into a block, and waits for it. Both are kept until the copy ends, also when
    /// Ctrl-C ends the wait.
    fn copy_to(
        &self,
        py: Python<'_>,
        lent: Lent,
        view: View,
        range: (u64, u64),
        given: Option<&gpu_ipc::Stream>,
        pending: Option<u64>,
    ) -> PyResult<()> {
        let device = view.device;
        let stream = py.detach(|| {
            let stream = match (given, pending) {
                (Some(given), _) => given.clone(),
                (None, Some(raw)) => stream::of_handle(&self.gpu, raw).or_raise()?,
                (None, None) => self.own_stream().or_raise()?.clone(),
            };
            copy(&self.gpu, &stream, lent.block().device_ptr(), device, range).map(|()| stream)
        })?;
        let kept = (lent, Later::new(view.owner));
        let copied = aside(py, move || {
            let copied = stream.synchronize();
            drop(kept);
            copied
        });
        copied?.or_raise()
    }

    /// Grants an array, with the interpreter's lock given up once.
    pub fn grant(
        self: &Arc<Self>,
        py: Python<'_>,
        prepared: Prepared,
        to: To,
        given: Option<gpu_ipc::Stream>,
        options: &ShareOptions,
        meta: &[u8],
    ) -> PyResult<Descriptor> {
        let options = with_access(options, prepared.read_only);
        let Prepared {
            memory,
            layout,
            pending,
            ..
        } = prepared;
        let tail = Tail::of(&layout, meta);
        let options = options.user(*tail.user());
        let mut left = Vec::new();
        let granted = py.detach(|| {
            let stream = self.stream_of(&given, pending)?;
            let held = self.take_in(memory, &mut left)?;
            let granted = held.block().share_with(
                to,
                stream.as_ref().map_or(After::Done, After::Stream),
                &options,
            );
            // Their drops may reach the driver.
            drop((held, stream, given));
            granted
        });
        Ok(Descriptor::new(&granted.or_raise()?, layout, &tail))
    }

    /// Grants everything to everybody, stream by stream, with the interpreter's lock given up once.
    /// Returns a list for each addressee.
    pub fn grant_many(
        self: &Arc<Self>,
        py: Python<'_>,
        prepared: Vec<Prepared>,
        addressees: &[To],
        given: Option<gpu_ipc::Stream>,
        options: &ShareOptions,
    ) -> PyResult<Vec<Descriptors>> {
        let mut tails = Vec::with_capacity(prepared.len());
        let mut places = Vec::with_capacity(prepared.len());
        for Prepared {
            memory,
            layout,
            pending,
            read_only,
        } in prepared
        {
            tails.push(Tail::of(&layout, &[]));
            places.push((memory, (pending, read_only)));
        }
        let mut left = Vec::new();
        let granted =
            py.detach(|| self.grant_places(places, &tails, addressees, given, options, &mut left));
        Ok(granted
            .or_raise()?
            .iter()
            .map(|grants| Descriptors::new(grants, &tails))
            .collect())
    }

    fn grant_places(
        self: &Arc<Self>,
        places: Vec<(Memory, Kind)>,
        tails: &[Tail],
        addressees: &[To],
        given: Option<gpu_ipc::Stream>,
        options: &ShareOptions,
        left: &mut Vec<Owner>,
    ) -> Result<Vec<Vec<gpu_ipc::Descriptor>>, Error> {
        let mut held = Vec::with_capacity(places.len());
        let mut places = places.into_iter();
        for (memory, kind) in places.by_ref() {
            match self.take_in(memory, left) {
                Ok(block) => held.push((block, kind)),
                Err(error) => {
                    left.extend(places.filter_map(|(memory, _)| memory.into_owner()));
                    return Err(error);
                }
            }
        }
        let mut granted = vec![vec![None; held.len()]; addressees.len()];
        let mut left: Vec<usize> = (0..held.len()).collect();
        while let Some(&first) = left.first() {
            let (pending, read_only) = held[first].1;
            let (group, rest): (Vec<_>, Vec<_>) = left.into_iter().partition(|&n| {
                let (theirs, access) = held[n].1;
                access == read_only && (given.is_some() || theirs == pending)
            });
            left = rest;
            let options = with_access(options, read_only);
            let stream = self.stream_of(&given, pending)?;
            let grants: Vec<_> = addressees
                .iter()
                .flat_map(|&to| {
                    group.iter().map({
                        let held = &held;
                        move |&n: &usize| (held[n].0.block(), to, tails[n].user())
                    })
                })
                .collect();
            let after = stream.as_ref().map_or(After::Done, After::Stream);
            for (place, descriptor) in self
                .session
                .share_many_with(&grants, after, &options)?
                .into_iter()
                .enumerate()
            {
                granted[place / group.len()][group[place % group.len()]] = Some(descriptor);
            }
        }
        Ok(granted
            .into_iter()
            .map(|list| list.into_iter().flatten().collect())
            .collect())
    }
}

/// The stream that an array's work is pending on, and whether it is granted to be read only: what
/// one call grants has both in common.
type Kind = (Option<u64>, bool);

/// Returns options that grant to be read only if so asked.
pub(super) fn with_access(options: &ShareOptions, read_only: bool) -> ShareOptions {
    match read_only {
        true => options.read_only(),
        false => *options,
    }
}

impl Memory {
    fn into_owner(self) -> Option<Owner> {
        match self {
            Memory::Block(_) => None,
            Memory::Foreign { owner, .. } => Some(owner),
        }
    }
}

/// Queues a copy of an array's bytes to memory of a device. The caller keeps both until the stream
/// has come that far.
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
        // SAFETY: `copy` asks for a live stream and ranges that are valid until it is done: the
        // caller keeps both.
        return unsafe { backend.copy(stream.raw(), to, DevicePtr(first), len) }.or_raise();
    }
    if !matches!(device.kind, CPU | CUDA_HOST) {
        return Err(read::refusal(ours, device, len)
            .unwrap_or_else(|| invalid("a device", "another", "ours")));
    }
    let from = std::ptr::with_exposed_provenance::<u8>(first as usize);
    // SAFETY: as above.
    unsafe { backend.copy_to_device(stream.raw(), to, from, len as usize) }.or_raise()
}
