//! An object that is being filled.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use gpu_api::lock::Acquire;
use gpu_api::{Access, DevicePtr, Error, Gpu};
use ipc_rc::Stream;
use transport::shared::sealed_file;
use transport::shared::slot::Claim;
use transport::trace_point;

use super::commit::{Commit, CommitCell, Lane, Pending};
use super::connection::{Words, nonsense};
use super::link::Link;
use super::mapped::{address, address_of, note, queue_fill, read_part, regions};
use super::retire::Retiring;
use crate::error::{ObjectError, Result};
use crate::memory::range::{Imported, Range, SwapError};
use crate::object::identity::{Epoch, Identity, Lineage, check_new_name};
use crate::object::layout::Layout;
use crate::object::manifest::{Manifest, Readers, round_up};
use crate::object::part::Part;
use crate::wire::{LeaseSlot, ToBroker, ToClient, Wanted};

/// How an object is made.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CreateOptions {
    /// Users besides the owner that may open it. They could also write to it: no driver gives a
    /// descriptor that only reads.
    pub readers: Readers,
    /// The epoch that the name must have when this object becomes visible; 0 for a name that has
    /// none. One that was learned before keeper and broker both ended is no epoch of the name any
    /// more.
    pub expect: Option<Epoch>,
    /// Give up the name's epochs before memory is asked for, where there is no room for two. Until
    /// the commit the name has none.
    pub replace: bool,
    /// The identity, where it must be known elsewhere; drawn if nothing is said.
    pub identity: Option<Identity>,
    /// The object is a copy of one that another host's broker committed: its epoch there, and that
    /// host's name. It keeps both, and `identity` must be the one it has there. A name that has a
    /// replica is never written to here.
    pub replica_of: Option<(Epoch, String)>,
    /// Parts that are the same as in the name's newest epoch: this object takes them over, without
    /// memory or a copy of its own. They are taken over by whole regions, so each region's parts
    /// must all be named or none; see [`Layout::pack_groups`]. Both epochs must be open to the same
    /// users.
    pub unchanged: Vec<String>,
}

/// An object that is being filled.
///
/// Its addresses are valid until the commit or the drop. A drop without a commit aborts it: it
/// never becomes visible.
#[derive(Debug)]
pub struct Writer {
    link: Arc<Link>,
    manifest: Manifest,
    words: Arc<Words>,
    /// Which history its epoch will be of.
    lineage: Option<Lineage>,
    leases: Vec<LeaseSlot>,
    /// Gone with the commit.
    range: Option<Range>,
    base: DevicePtr,
    /// The regions that were taken over, one bit each.
    taken: u16,
    streams: Mutex<Vec<Stream>>,
}

impl Writer {
    pub(super) fn create(
        link: &Arc<Link>,
        name: &str,
        layout: Layout,
        options: &CreateOptions,
        scratch: bool,
    ) -> Result<Writer> {
        link.check_fork()?;
        check_new_name("the name of an object", name)?;
        let gpu = link.gpu().clone();
        let identity = options.identity.map_or_else(Identity::random, Ok)?;
        let mut manifest = Manifest {
            identity,
            name: name.into(),
            epoch: options
                .replica_of
                .as_ref()
                .map_or(Epoch(0), |(epoch, _)| *epoch),
            home: options.replica_of.as_ref().map(|(_, home)| home.clone()),
            backend: gpu.kind(),
            device: gpu.uuid(),
            owner: 0,
            readers: options.readers.clone(),
            granularity: 0,
            layout,
        };
        let taken = regions_of(&manifest.layout, &options.unchanged)?;
        let draft = sealed_file::create("gpu-ipc-draft", &manifest.encode()?)?;
        let lost = || ObjectError::WriterLost { identity };
        let connection = link.connection().ok_or_else(lost)?;
        let expected = options.expect.filter(|expect| *expect != Epoch(0));
        if let Some(expect) = expected.filter(|_| !link.epochs_are_of(name, &connection)) {
            let why = format!(
                "epoch {expect} of {name} was expected, and is of an earlier history: keeper and broker have both ended since"
            );
            return Err(ObjectError::Conflict { why });
        }
        let wanted = Wanted {
            scratch,
            replace: options.replace,
            expect: options.expect,
            taken,
        };
        let question = |request| ToBroker::Create {
            request,
            identity,
            wanted,
        };
        let asked = link.ask_here(question, vec![draft]);
        // Given up on every way out until the writer is there, which gives it up itself. Who was
        // declined has nothing: what has this identity is another's.
        let may_be_there = matches!(asked, Ok(_) | Err(ObjectError::Gpu(Error::Deadline { .. })));
        let mut abort = Abort::new(link, identity, may_be_there);
        let (answer, regions) = asked?;
        let ToClient::Created {
            granularity,
            leases,
            ..
        } = answer
        else {
            return Err(nonsense());
        };
        trace_point!("created");
        if !link
            .connection()
            .is_some_and(|now| Arc::ptr_eq(&now, &connection))
        {
            return Err(lost());
        }
        let words = connection.words.clone();
        let slots = words.file.slot_count();
        let bytes: Vec<u64> = manifest
            .layout
            .regions()
            .iter()
            .map(|&bytes| round_up(bytes, granularity))
            .collect();
        let sound = granularity.is_power_of_two() && regions.len() == bytes.len();
        if !sound || leases.iter().any(|lease| lease.slot >= slots) {
            return Err(nonsense());
        }
        manifest.granularity = granularity;
        let imported = Imported::of(&gpu, &regions, bytes.iter().copied())?.protect(taken);
        let mut range = Range::reserve(&gpu, bytes.iter().sum(), Access::ReadWrite)?;
        let mapped = range.map(imported);
        if let Err(SwapError::Unchanged(error) | SwapError::Poisoned(error)) = mapped {
            link.retire(Retiring::new(&gpu, range, &[]));
            return Err(error.into());
        }
        let base = range.base();
        abort.disarm();
        let streams = Mutex::default();
        let writer = Writer {
            link: link.clone(),
            manifest,
            words,
            lineage: connection.lineage,
            leases: leases.to_vec(),
            range: Some(range),
            base,
            taken,
            streams,
        };
        for lease in &writer.leases {
            if writer.words.file.slot(lease.slot).claim(lease.generation) != Claim::Held {
                return Err(ObjectError::Aborted { identity });
            }
        }
        trace_point!("claimed");
        Ok(writer)
    }

    /// Returns the object's identity, by which [`Client::outcome`](crate::Client::outcome) tells of
    /// its commit.
    pub fn identity(&self) -> Identity {
        self.manifest.identity
    }

    /// Returns the parts' names, types, shapes and offsets.
    pub fn layout(&self) -> &Layout {
        &self.manifest.layout
    }

    /// Returns the address of a part, which the GPU and, on the host backend, the CPU may write to.
    /// A part that is taken over ([`CreateOptions::unchanged`]) may be read alone.
    ///
    /// Work on it is named with [`used_on`](Writer::used_on) or at the [`commit`](Writer::commit):
    /// work on a stream that was not named is undefined behaviour.
    pub fn device_ptr(&self, part: &str) -> Option<DevicePtr> {
        address_of(&self.manifest, self.base, part)
    }

    /// Says whether a part is taken over from the former epoch, so that it may be read alone.
    pub fn is_unchanged(&self, part: &str) -> bool {
        self.manifest
            .layout
            .part(part)
            .is_some_and(|part| self.is_taken(part))
    }

    /// Lists the address and the bytes of each region: all parts lie in them. For copying a whole
    /// object.
    pub fn regions(&self) -> Vec<(DevicePtr, u64)> {
        regions(&self.manifest, self.base)
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

    /// Copies bytes from the host into a part, and waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a part that is not there, has another length or is taken over; the
    /// driver's error.
    pub fn write(&mut self, part: &str, bytes: &[u8]) -> Result<()> {
        self.write_at(part, 0, bytes, true)
    }

    /// Copies bytes into a part from `offset` on, and waits for it.
    ///
    /// # Errors
    ///
    /// As [`write`](Writer::write).
    pub fn write_part(&mut self, part: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        self.write_at(part, offset, bytes, false)
    }

    fn write_at(&mut self, name: &str, offset: u64, bytes: &[u8], whole: bool) -> Result<()> {
        self.link.check_fork()?;
        let found = self.manifest.layout.part(name);
        let fits = |part: &&Part| {
            let end = offset.checked_add(bytes.len() as u64);
            end.is_some_and(|end| end <= part.spec.len && (!whole || end == part.spec.len))
        };
        let Some(part) = found.filter(fits) else {
            let has = found.map_or("no such part".into(), |part| {
                format!("{} bytes", part.spec.len)
            });
            let got = format!(
                "{} bytes at {offset} for {name}, which has {has}",
                bytes.len()
            );
            return Err(Error::invalid("the data for a part", got, "as long as the part").into());
        };
        self.check_own(part)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let at = address(&self.manifest, self.base, part).offset(offset);
        let gpu = self.link.gpu();
        let stream = Stream::create(gpu)?;
        // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until the copy
        // has finished: the part lies in the mapped range, `bytes` is as long, and both outlive the
        // wait below.
        unsafe {
            gpu.backend()
                .copy_to_device(stream.raw(), at, bytes.as_ptr(), bytes.len())
        }?;
        Ok(stream.synchronize()?)
    }

    /// Queues a fill: sets every byte of a part to `byte`, after the work that is queued on the
    /// stream, and returns at once. The stream counts as [used](Writer::used_on), so the commit
    /// waits for the fill.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a part that is not there or is taken over, and for the per-thread
    /// default stream (handle 2); [`Error::Mismatch`] for a stream of another device;
    /// [`Error::Capturing`]; the driver's error.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # fn example(client: &broker::Client, layout: broker::Layout) -> Result<(), broker::ObjectError> {
    /// let stream = ipc_rc::Stream::create(client.gpu())?;
    /// let mut writer = client.create("model", layout)?;
    /// writer.fill("bias", 0, &stream)?;
    /// writer.commit(&[])?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn fill(&mut self, part: &str, byte: u8, stream: &Stream) -> Result<()> {
        self.link.check_fork()?;
        let Some(found) = self.manifest.layout.part(part) else {
            let got = format!("{part}, which the layout does not have");
            return Err(Error::invalid("a part to fill", got, "a part of the object").into());
        };
        self.check_own(found)?;
        let (at, len) = (address(&self.manifest, self.base, found), found.spec.len);
        // SAFETY: `queue_fill` asks for
        // - a stream that lives: the caller keeps it;
        // - a range that stays mapped until the streams are done: the part lies in the mapped
        //   range, which is unmapped behind the streams that were noted.
        unsafe { queue_fill(self.link.gpu(), &self.streams, stream, (at, len), byte) }
    }

    /// Copies a piece of a part to the host.
    pub(super) fn read_at(&self, part: &str, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.link.check_fork()?;
        read_part(
            self.link.gpu(),
            &self.manifest,
            self.base,
            part,
            offset,
            bytes,
        )
    }

    /// Finds where a part of this length is written to.
    pub(super) fn place_for(&self, name: &str, len: u64) -> Result<DevicePtr> {
        let found = self.manifest.layout.part(name);
        let Some(part) = found.filter(|part| part.spec.len == len) else {
            let has = found.map_or("no such part".into(), |part| {
                format!("{} bytes", part.spec.len)
            });
            let got = format!("{len} bytes for {name}, which has {has}");
            return Err(
                Error::invalid("what is copied to a part", got, "as long as the part").into(),
            );
        };
        self.check_own(part)?;
        Ok(address(&self.manifest, self.base, part))
    }

    /// Returns the device.
    pub(super) fn gpu(&self) -> &Gpu {
        self.link.gpu()
    }

    /// Returns the address of the first region.
    pub(super) fn base(&self) -> DevicePtr {
        self.base
    }

    fn is_taken(&self, part: &Part) -> bool {
        self.taken
            .checked_shr(u32::from(part.region))
            .is_some_and(|bits| bits & 1 != 0)
    }

    fn check_own(&self, part: &Part) -> Result<()> {
        if !self.is_taken(part) {
            return Ok(());
        }
        let got = format!(
            "{}, which is taken over from the former epoch",
            part.spec.name
        );
        Err(Error::invalid("a part to write to", got, "not among the unchanged ones").into())
    }

    /// Asks for the commit while writes may be under way, as a participant could that lies: a
    /// broker must not hear it before the write leases have ended. For tests of brokers.
    #[doc(hidden)]
    pub fn ask_before_the_writes_have_ended(&self) {
        let identity = self.manifest.identity;
        self.link
            .tell(|request| ToBroker::Commit { request, identity });
    }

    /// Commits the object: queues the end of the write leases behind `streams` and those that were
    /// named before, and returns. It becomes visible, whole, once all that was queued there has
    /// finished.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] for a stream that is being captured and [`Error::Mismatch`] for one of
    /// another device: then nothing is committed, and the object is aborted.
    pub fn commit(mut self, streams: &[&Stream]) -> Result<Commit> {
        self.link.check_fork()?;
        for stream in streams {
            self.used_on(stream)?;
        }
        let gpu = self.link.gpu().clone();
        let used = self.streams.acquire().clone();
        trace_point!("commit.begun");
        let lane = Lane::release_behind(&gpu, &self.words, &self.leases, &used)?;
        trace_point!("commit.queued");
        self.link.learn(&self.manifest.name, self.lineage);
        let identity = self.manifest.identity;
        let cell = Arc::new(CommitCell::default());
        self.link.finish(Pending {
            cell: cell.clone(),
            identity,
            words: self.words.clone(),
            leases: std::mem::take(&mut self.leases),
            range: self.range.take(),
            _lane: lane,
            lost: false,
        });
        let fork = self.link.fork();
        Ok(Commit {
            cell,
            identity,
            fork,
        })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let Some(range) = self.range.take() else {
            return;
        };
        let streams = std::mem::take(&mut *self.streams.acquire());
        self.link
            .retire(Retiring::new(self.link.gpu(), range, &streams));
        let identity = self.manifest.identity;
        self.link
            .tell(|request| ToBroker::Abort { request, identity });
    }
}

/// Gives an object up that was asked for, unless it is disarmed.
pub(super) struct Abort<'a> {
    link: &'a Arc<Link>,
    identity: Identity,
    armed: bool,
}

impl<'a> Abort<'a> {
    pub(super) fn new(link: &'a Arc<Link>, identity: Identity, armed: bool) -> Abort<'a> {
        Abort {
            link,
            identity,
            armed,
        }
    }

    pub(super) fn disarm(&mut self) {
        self.armed = false;
    }
}

impl Drop for Abort<'_> {
    fn drop(&mut self) {
        if self.armed {
            let identity = self.identity;
            self.link
                .tell(|request| ToBroker::Abort { request, identity });
        }
    }
}

/// Finds the regions whose parts are all named, one bit each.
fn regions_of(layout: &Layout, unchanged: &[String]) -> Result<u16> {
    let invalid = |got, must| Err(Error::invalid("the parts that are unchanged", got, must).into());
    let named: HashSet<&str> = unchanged.iter().map(String::as_str).collect();
    if let Some(name) = unchanged.iter().find(|name| layout.part(name).is_none()) {
        return invalid(
            format!("{name}, which the layout does not have"),
            "parts of the layout",
        );
    }
    let is_named = |part: &&Part| named.contains(part.spec.name.as_str());
    let taken = layout
        .parts()
        .iter()
        .filter(is_named)
        .fold(0u16, |taken, part| taken | 1 << part.region);
    let beside = |part: &&Part| taken >> part.region & 1 != 0 && !is_named(part);
    if let Some(part) = layout.parts().iter().find(beside) {
        let got = format!(
            "others of region {}, and not {}",
            part.region, part.spec.name
        );
        return invalid(
            got,
            "all parts of a region; lay out what changes apart, with `Layout::pack_groups`",
        );
    }
    Ok(taken)
}
