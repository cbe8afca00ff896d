//! An object that is mapped.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use gpu_api::lock::Acquire;
use gpu_api::{Access, DevicePtr, Error, Gpu};
use ipc_rc::Stream;
use transport::trace_point;

use super::connection::nonsense;
use super::link::Link;
use super::mapped::{address, address_of, copy_and_wait, note, read_part, regions};
use super::opened::{Lease, Opened, Prepared};
use super::retire::Retiring;
use super::scratch::Scratch;
use super::writer::Writer;
use crate::error::{ObjectError, Result};
use crate::memory::range::{Imported, Range, SwapError};
use crate::object::identity::{Epoch, Identity};
use crate::object::layout::Layout;
use crate::object::manifest::Manifest;
use crate::wire::Selector;

/// An object that is mapped read-only.
///
/// Its addresses stay the same for its life, whatever epoch they reach: graphs that were captured
/// over them stay good. They are good through a restart of the broker, and after the object was
/// removed.
#[derive(Debug)]
pub struct Reader {
    link: Arc<Link>,
    manifest: Manifest,
    /// Gone with the drop.
    range: Option<Range>,
    base: DevicePtr,
    /// Handles of what is mapped, while the reader sleeps with its lease.
    asleep: Option<Imported>,
    /// The lease at the broker; none while the reader sleeps without.
    lease: Option<Lease>,
    streams: Mutex<Vec<Stream>>,
    /// Stands for the addresses, which no other reader has: what was prepared is for these alone.
    addresses: Arc<()>,
}

impl Reader {
    pub(super) fn open(link: &Arc<Link>, selector: &Selector) -> Result<Reader> {
        let Opened {
            lease,
            manifest,
            imported,
        } = Opened::ask(link, selector)?;
        trace_point!("opened");
        let range = Range::reserve(link.gpu(), manifest.mapped_bytes(), Access::ReadOnly)?;
        let base = range.base();
        let mut reader = Reader {
            link: link.clone(),
            manifest,
            range: Some(range),
            base,
            asleep: None,
            lease: Some(lease),
            streams: Mutex::default(),
            addresses: Arc::default(),
        };
        match reader.range_mut()?.map(imported) {
            Ok(()) => {
                trace_point!("mapped");
                Ok(reader)
            }
            Err(SwapError::Unchanged(error) | SwapError::Poisoned(error)) => Err(error.into()),
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// Returns the epoch that the addresses reach.
    pub fn epoch(&self) -> Epoch {
        self.manifest.epoch
    }

    /// Returns the identity of the object that the addresses reach.
    pub fn identity(&self) -> Identity {
        self.manifest.identity
    }

    /// Returns parts and user bytes.
    pub fn layout(&self) -> &Layout {
        &self.manifest.layout
    }

    /// Returns the address of a part: the same for the reader's life.
    ///
    /// Read-only: a kernel that writes there kills its context. Work on it is named with
    /// [`used_on`](Reader::used_on): work on a stream that was not named, and that is not finished
    /// when the reader advances, sleeps or is dropped, is undefined behaviour.
    pub fn device_ptr(&self, part: &str) -> Option<DevicePtr> {
        address_of(&self.manifest, self.base, part)
    }

    /// Lists the address and the bytes of each region: all parts lie in them. For copying a whole
    /// object.
    pub fn regions(&self) -> Vec<(DevicePtr, u64)> {
        regions(&self.manifest, self.base)
    }

    /// Exports the memory of each region, in the order of [`regions`](Reader::regions), as a
    /// descriptor for another process.
    ///
    /// It maps the region from its first byte, read-only where the device's descriptors have such a
    /// form, and keeps the memory until it is closed and what it mapped is unmapped.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] while the reader sleeps, and the driver's error.
    pub fn export(&self) -> Result<Vec<OwnedFd>> {
        match &self.range {
            Some(range) if !self.is_asleep() => Ok(range.export()?),
            _ => Err(Error::Invalid {
                what: "the reader",
                got: "asleep".into(),
                must: "awake, since its memory is not mapped: call `wake` first",
            }
            .into()),
        }
    }

    /// Returns what the broker keeps of the object beside its memory.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Notes that work on this stream touches the object.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a stream of another device.
    pub fn used_on(&self, stream: &Stream) -> Result<()> {
        self.link.check_fork()?;
        note(self.link.gpu(), &self.streams, stream)
    }

    /// Copies a part to the host.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a part that is not there, [`ObjectError::Asleep`], and the driver's
    /// error.
    pub fn read(&self, part: &str) -> Result<Vec<u8>> {
        let len = self.layout().part(part).map_or(0, |part| part.spec.len);
        let len = usize::try_from(len).map_err(|_| too_long(part))?;
        let mut bytes = vec![0; len];
        self.read_at(part, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies a piece of a part to the host.
    ///
    /// # Errors
    ///
    /// As [`read`](Reader::read), and [`Error::Invalid`] beyond the part's end.
    pub fn read_at(&self, name: &str, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.check_mapped()?;
        read_part(
            self.link.gpu(),
            &self.manifest,
            self.base,
            name,
            offset,
            bytes,
        )
    }

    /// Copies a part into the part of the same name of an object that is being filled, on the
    /// device, and waits for it. A part that is unchanged and lies apart can be taken over without
    /// a copy: [`CreateOptions::unchanged`](crate::CreateOptions::unchanged).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a part that either has not, of another length, or taken over;
    /// [`Error::Mismatch`] for a writer on another device; [`ObjectError::Asleep`]; the driver's
    /// error.
    pub fn copy_part(&self, name: &str, to: &mut Writer) -> Result<()> {
        self.check_mapped()?;
        let Some(part) = self.layout().part(name) else {
            let got = format!("{name}, which {} does not have", self.name());
            return Err(Error::invalid("a part to copy", got, "a part of the object").into());
        };
        let ours = address(&self.manifest, self.base, part);
        let theirs = to.place_for(name, part.spec.len)?;
        check_same(self.link.gpu(), to.gpu())?;
        copy_and_wait(self.link.gpu(), &[(theirs, ours, part.spec.len)])
    }

    /// Copies the whole object into memory of this process alone, which may be written to: a
    /// broker's scratch memory, which counts against its limits. The reader stays as it is.
    ///
    /// # Errors
    ///
    /// As [`Client::scratch`](crate::Client::scratch); [`ObjectError::Asleep`]; the driver's error.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # fn example(client: &broker::Client) -> Result<(), broker::ObjectError> {
    /// let reader = client.open("model")?;
    /// let mut own = reader.writable_copy()?;
    /// own.write_part("w", 0, b"other")?;
    /// assert_ne!(own.device_ptr("w"), reader.device_ptr("w"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn writable_copy(&self) -> Result<Scratch> {
        self.check_mapped()?;
        let copy = Scratch::create(&self.link, self.name(), self.layout().clone())?;
        // The same device and layout, so the same regions at the same distances.
        let mut at = 0;
        let copies = self.manifest.mapped_regions().map(|bytes| {
            let here = at;
            at += bytes;
            (copy.base().offset(here), self.base.offset(here), bytes)
        });
        copy_and_wait(self.link.gpu(), &copies.collect::<Vec<_>>())?;
        Ok(copy)
    }

    /// Moves to the newest epoch of the name, at the same addresses; says whether there was one.
    ///
    /// # Errors
    ///
    /// As [`advance_to`](Reader::advance_to).
    pub fn advance(&mut self) -> Result<bool> {
        self.advance_to(&Selector::Latest(self.manifest.name.clone()))
    }

    /// Moves to another object at the same addresses; says whether it was another.
    ///
    /// Imports and checks everything first, waits for the streams that were named, then maps. The
    /// caller launches nothing meanwhile that touches the addresses; what was registered with them
    /// elsewhere (NCCL, RDMA) is registered anew. [`prepare`](Reader::prepare) does the first half
    /// while work goes on.
    ///
    /// # Errors
    ///
    /// As [`prepare`](Reader::prepare) and [`switch`](Reader::switch).
    pub fn advance_to(&mut self, to: &Selector) -> Result<bool> {
        match self.prepare(to)? {
            Some(prepared) => self.switch(prepared).map(|()| true),
            None => Ok(false),
        }
    }

    /// Leases another object, imports its memory and checks it, all but the mapping; `None` if it
    /// is the one that the addresses reach. Work on the addresses may go on meanwhile: what is left
    /// to do is [`switch`](Reader::switch).
    ///
    /// # Errors
    ///
    /// [`ObjectError::LayoutDiffers`] and [`ObjectError::NotFound`]; [`ObjectError::Asleep`]; the
    /// driver's error.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use broker::Selector;
    /// # fn example(client: &broker::Client) -> Result<(), broker::ObjectError> {
    /// # let is_between_steps = || true;
    /// let mut model = client.open("model")?;
    /// let mut next = None;
    /// loop {
    ///     // On a thread of its own, or here: nothing waits for the GPU.
    ///     if client.watch(model.name(), model.epoch(), Duration::ZERO)?.is_some() {
    ///         next = model.prepare(&Selector::Latest("model".into()))?;
    ///     }
    ///     if is_between_steps() && let Some(next) = next.take() {
    ///         model.switch(next)?;
    ///     }
    /// }
    /// # }
    /// ```
    pub fn prepare(&self, to: &Selector) -> Result<Option<Prepared>> {
        self.check_mapped()?;
        let Some(opened) = Opened::ask_for_another(&self.link, to, self.manifest.identity)? else {
            return Ok(None);
        };
        trace_point!("advance.imported");
        self.check_layout(&opened.manifest)?;
        Ok(Some(Prepared {
            opened,
            addresses: self.addresses.clone(),
        }))
    }

    /// Moves to an object that was prepared, at the same addresses: waits for the streams that were
    /// named, unmaps and maps, and asks the broker nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what another reader prepared and [`ObjectError::Asleep`]: nothing
    /// changed. [`ObjectError::Poisoned`] when neither the new memory nor the old could be mapped.
    pub fn switch(&mut self, to: Prepared) -> Result<()> {
        self.check_mapped()?;
        if !Arc::ptr_eq(&self.addresses, &to.addresses) {
            let got = format!("{to:?}, which another reader prepared");
            return Err(
                Error::invalid("an object to switch to", got, "prepared by this reader").into(),
            );
        }
        self.wait_for_streams()?;
        let Opened {
            lease,
            manifest,
            imported,
        } = to.opened;
        // SAFETY: `swap` asks that no work touches the range: every stream that was named is idle,
        // and the caller, who has the only reference, launches nothing meanwhile.
        let swapped = unsafe { self.range_mut()?.swap(imported) };
        // The engine goes on; the handles of what it had can wait.
        self.link
            .let_fall(swapped.map_err(|error| self.swap_error(error))?);
        self.manifest = manifest;
        self.lease = Some(lease);
        trace_point!("advance.done");
        Ok(())
    }

    fn check_layout(&self, other: &Manifest) -> Result<()> {
        let same_regions = || other.mapped_regions().eq(self.manifest.mapped_regions());
        let difference = self.manifest.layout.difference(&other.layout);
        match difference.or_else(|| (!same_regions()).then(|| "another granularity".to_owned())) {
            None => Ok(()),
            Some(difference) => Err(ObjectError::LayoutDiffers {
                name: other.name.clone(),
                to: other.epoch,
                difference,
            }),
        }
    }

    /// Gives up the mapping, and keeps the addresses. With `release` the lease too, so that a sole
    /// reader's memory may go.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn sleep(&mut self, release: bool) -> Result<()> {
        self.link.check_fork()?;
        self.wait_for_streams()?;
        // SAFETY: `unmap` asks that no work touches the range: as in `switch`.
        let unmapped =
            unsafe { self.range_mut()?.unmap() }.map_err(|error| self.swap_error(error))?;
        trace_point!("sleep.unmapped");
        self.asleep = unmapped.or(self.asleep.take());
        if release {
            self.asleep = None;
            self.lease = None;
        }
        Ok(())
    }

    /// Maps the same object again, at the same addresses.
    ///
    /// # Errors
    ///
    /// [`ObjectError::NotFound`] when the lease was released and the object has gone meanwhile:
    /// then [`wake_to`](Reader::wake_to) another epoch.
    pub fn wake(&mut self) -> Result<()> {
        self.wake_to(&Selector::Identity(self.manifest.identity))
    }

    /// Maps another object of the same layout at the same addresses.
    ///
    /// # Errors
    ///
    /// As [`advance_to`](Reader::advance_to); the reader sleeps on.
    pub fn wake_to(&mut self, to: &Selector) -> Result<()> {
        self.link.check_fork()?;
        if self.range.as_ref().is_some_and(Range::is_poisoned) {
            return Err(self.not_mapped());
        }
        if self.range.as_ref().is_some_and(Range::is_mapped) {
            return self.advance_to(to).map(drop);
        }
        if *to == Selector::Identity(self.manifest.identity)
            && let Some(imported) = self.asleep.take()
        {
            let mapped = self.range_mut()?.map(imported);
            return mapped.map_err(|error| self.swap_error(error));
        }
        let Opened {
            lease,
            manifest,
            imported,
        } = Opened::ask(&self.link, to)?;
        self.check_layout(&manifest)?;
        trace_point!("wake.imported");
        self.range_mut()?
            .map(imported)
            .map_err(|error| self.swap_error(error))?;
        trace_point!("wake.mapped");
        self.lease = Some(lease);
        self.asleep = None;
        self.manifest = manifest;
        Ok(())
    }

    /// Says whether the addresses reach nothing.
    pub fn is_asleep(&self) -> bool {
        !self.range.as_ref().is_some_and(Range::is_mapped)
    }

    fn check_mapped(&self) -> Result<()> {
        self.link.check_fork()?;
        if self.range.as_ref().is_some_and(Range::is_mapped) {
            Ok(())
        } else {
            Err(self.not_mapped())
        }
    }

    fn wait_for_streams(&self) -> Result<()> {
        let streams = self.streams.acquire();
        streams
            .iter()
            .try_for_each(|stream| Ok(stream.synchronize()?))
    }

    fn range_mut(&mut self) -> Result<&mut Range> {
        self.range.as_mut().ok_or_else(nonsense)
    }

    fn not_mapped(&self) -> ObjectError {
        let name = self.manifest.name.clone();
        if self.range.as_ref().is_some_and(Range::is_poisoned) {
            ObjectError::Poisoned {
                name,
                why: "an earlier call failed".into(),
            }
        } else {
            ObjectError::Asleep { name }
        }
    }

    fn swap_error(&self, error: SwapError) -> ObjectError {
        match error {
            SwapError::Unchanged(error) => error.into(),
            SwapError::Poisoned(error) => ObjectError::Poisoned {
                name: self.manifest.name.clone(),
                why: error.to_string(),
            },
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let Some(range) = self.range.take() else {
            return;
        };
        let streams = std::mem::take(&mut *self.streams.acquire());
        self.link
            .retire(Retiring::new(self.link.gpu(), range, &streams));
    }
}

fn check_same(ours: &Gpu, theirs: &Gpu) -> Result<()> {
    if ours == theirs {
        return Ok(());
    }
    Err(Error::mismatch(
        "the writer's device",
        theirs.device(),
        ours.device(),
        "create and open with clients of one device and one backend",
    )
    .into())
}

fn too_long(part: &str) -> ObjectError {
    let got = format!("{part}, which does not fit into memory");
    Error::invalid("a part to read", got, "shorter; read it in pieces").into()
}
