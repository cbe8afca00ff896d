//! To PyTorch: send a block as a storage, keep it while it is counted, have it back.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use gpu_api::lock::Acquire;
use gpu_api::{
    AddressRange, DevicePtr, DeviceUuid, Error, EventHandle, EventKind, Gpu, RawEvent, Result,
    Sharing,
};
use ipc_rc::{After, SentBlock, Stream};
use ipc_rc::{Export, Region};

use crate::fields::Fields;
use crate::ledger::{Collected, Kept, Ledger, Outstanding, SendId};
use crate::recipient::Recipient;
use crate::releases::same_gpu;
use crate::segment_handle::{Chunks, ExpandableSegment};

/// How many sends may have an event of their own; those beyond wait for their stream, as PyTorch's
/// do. Drivers give out a few thousand (3,896 on an H200, driver 580), PyTorch in the same process
/// among the takers.
const MAX_EVENTS: usize = 1000;

/// What was sent: what the receiver needs, by any transport.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Sending {
    /// Its number.
    pub id: SendId,
    /// The tuple for `UntypedStorage._new_shared_cuda`.
    pub fields: Fields,
    /// The device's identity: the number in `fields` is this process' own.
    pub uuid: DeviceUuid,
}

/// How PyTorch finds a block's memory.
struct Name {
    handle: Vec<u8>,
    /// The first byte of what the handle stands for.
    base: DevicePtr,
    kept: Kept,
}

/// Sends blocks to PyTorch processes.
///
/// A send keeps a clone of the block's [`Arc`] while its counter is above 0;
/// [`collect`](Sender::collect) finds those that came back. A block that was dropped meanwhile then
/// goes back to its session.
///
/// Here PyTorch's rules hold. A counter stands for one opening of one message: send once for each
/// receiver. It does not say who holds it, so a receiver that is killed leaves it as it is;
/// [`Recipient`] says what then. The memory lives no longer than this process. [`Sender`] has no
/// thread: something must collect.
///
/// Dropping a sender never takes memory from a receiver: what is still counted stays allocated
/// until the process ends, and no file stays behind.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use backend_host::{HostBackend, HostConfig};
/// use gpu_api::{DeviceId, Gpu, Sharing};
/// use gpu_ipc_torch::{CounterFile, Recipient, Sender};
/// use ipc_rc::{After, Session};
///
/// let dir = tempfile::tempdir()?;
/// let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// // What every version of PyTorch opens. By descriptor it would be an expandable segment.
/// let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).sharing(Sharing::Handle).open()?;
/// let sender = Sender::new(gpu);
/// let block = Arc::new(session.alloc(1 << 20)?);
/// let sending = sender.send(&block, Recipient::Unknown, After::Done)?;
/// drop(block);
/// assert_eq!(session.stats().live_blocks, 1);
///
/// // What PyTorch does when it drops the tensor.
/// let storage = sending.fields.decode()?;
/// let counter = storage.place.expect("it has bytes").counter;
/// let _ = CounterFile::attach(&counter.file)?.release(counter.slot);
/// assert_eq!(sender.collect().released, 1);
/// assert_eq!(session.stats().live_blocks, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sender {
    gpu: Gpu,
    ledger: Mutex<Ledger>,
    quarantine: Duration,
}

impl Sender {
    /// Makes a sender for blocks of a device.
    pub fn new(gpu: Gpu) -> Sender {
        Sender {
            gpu,
            ledger: Mutex::default(),
            quarantine: Duration::from_millis(100),
        }
    }

    /// Sets how long after a recipient's end its GPU work may still run; 100 ms unless set.
    #[must_use]
    pub fn quarantine(mut self, time: Duration) -> Sender {
        self.quarantine = time;
        self
    }

    /// Sends a block: counts it, and returns what one receiver needs to open it once.
    ///
    /// With [`After::Stream`] the receiver's stream waits for what is queued on that stream at this
    /// moment, by an event, and the stream counts as one that the block was [used
    /// on](SentBlock::used_on). On HIP, and beyond 1,000 sends with events, this call waits for the
    /// stream instead.
    ///
    /// # Errors
    ///
    /// - [`Error::Unsupported`] for a block that cannot be shared, and on HIP for one that is
    ///   shared by file descriptor: open its session with [`Sharing::Handle`]. Likewise for a block
    ///   across pieces of unequal lengths, of an arena that grows in place: PyTorch's chunks are
    ///   equal.
    /// - [`Error::Mismatch`] for a block or a stream of another device.
    /// - [`Error::Capturing`], [`Error::Forked`], [`Error::System`], [`Error::Driver`].
    ///
    /// After an error nothing is counted.
    pub fn send(&self, block: &Arc<SentBlock>, to: Recipient, after: After<'_>) -> Result<Sending> {
        self.gpu.check_fork()?;
        self.look();
        let backend = self.gpu.backend();
        let info = backend.classify(block.device_ptr())?;
        if let Some(device) = info.device
            && device != self.gpu.device()
        {
            return Err(Error::mismatch(
                "the block's device",
                device,
                self.gpu.device(),
                "make a sender for that device",
            ));
        }
        let regions = block.regions();
        let Name { handle, base, kept } = if regions.iter().any(|region| region.spot().is_some()) {
            self.name_pieces(regions)?
        } else {
            let range = match info.range {
                Some(range) => range,
                None => backend.address_range(block.device_ptr())?,
            };
            self.name(range, info.sharing)?
        };
        let event = match after {
            After::Done => None,
            After::Stream(stream) => {
                let stream = stream.behind()?;
                let event = self.order(stream)?;
                block.used_on(stream)?;
                event
            }
            _ => {
                return Err(Error::unsupported(
                    "this order of work towards PyTorch",
                    "its protocol has an event or nothing",
                    "pass `After::Done` or `After::Stream`",
                ));
            }
        };
        let counted = self
            .ledger
            .acquire()
            .count(block, to, event.map(|(event, _)| event), kept);
        let (id, file, slot) = match counted {
            Ok(counted) => counted,
            Err(error) => {
                self.destroy(event.map(|(event, _)| event));
                return Err(error);
            }
        };
        let fields = Fields {
            device: i64::from(self.gpu.device().0),
            handle: Some(handle),
            size_bytes: block.len(),
            offset_bytes: block.device_ptr().0 - base.0,
            ref_counter_handle: Some(file.name().as_str().as_bytes().to_vec()),
            ref_counter_offset: u64::from(slot),
            event_handle: Some(event.map_or_else(|| vec![0; 64], |(_, handle)| handle.0.to_vec())),
            event_sync_required: event.is_some(),
        };
        Ok(Sending {
            id,
            fields,
            uuid: self.gpu.uuid(),
        })
    }

    /// Names a region as PyTorch does: by the driver's handle, or as an expandable segment of one
    /// chunk, by the number of a descriptor that stays open while a send of it is counted.
    fn name(&self, range: AddressRange, sharing: Option<Sharing>) -> Result<Name> {
        let base = range.base;
        match sharing {
            // The driver's handle alone: every version of PyTorch reads that.
            Some(Sharing::Handle) => {
                let handle = self.gpu.backend().export_handle(base)?.0.to_vec();
                Ok(Name {
                    handle,
                    base,
                    kept: Kept::Nothing,
                })
            }
            Some(Sharing::Fd) if self.gpu.kind().arrays().torch_opens => {
                let fd = self.descriptor(range)?;
                let numbers = vec![fd.as_raw_fd().cast_unsigned()];
                let chunks = Chunks::Descriptors(numbers);
                let handle = ExpandableSegment {
                    pid: std::process::id(),
                    chunk_bytes: range.len,
                    chunks,
                }
                .encode();
                Ok(Name {
                    handle,
                    base,
                    kept: Kept::Descriptor(fd),
                })
            }
            _ => Err(Error::unsupported(
                "sending this block to PyTorch",
                "it is not shared in a way in which PyTorch opens memory of this device",
                "open its session with `.sharing(Sharing::Handle)`",
            )),
        }
    }

    /// Names pieces of a range, as PyTorch names its own expandable segments: a chunk is a piece.
    fn name_pieces(&self, regions: Vec<Arc<Region>>) -> Result<Name> {
        let (base, chunk_bytes) = (regions[0].base(), regions[0].len());
        if let Some(other) = regions.iter().find(|region| region.len() != chunk_bytes) {
            return Err(Error::unsupported(
                "sending this block to PyTorch",
                format!(
                    "it lies across pieces of {chunk_bytes} and {} bytes, and PyTorch's are equal",
                    other.len()
                ),
                "open its session with regions of at least twice the largest block, or with separate regions",
            ));
        }
        let number = |region: &Arc<Region>| match region.export() {
            Export::Fd(fd) => Ok(fd.as_raw_fd().cast_unsigned()),
            Export::Handle(_) => Err(Error::unsupported(
                "sending this block to PyTorch",
                "a piece of its memory has no descriptor",
                "open its session with separate regions",
            )),
        };
        let chunks = Chunks::Descriptors(regions.iter().map(number).collect::<Result<_>>()?);
        let handle = ExpandableSegment {
            pid: std::process::id(),
            chunk_bytes,
            chunks,
        }
        .encode();
        Ok(Name {
            handle,
            base,
            kept: Kept::Pieces(regions),
        })
    }

    /// Returns the descriptor of a region; exports it if no send of it is counted.
    fn descriptor(&self, range: AddressRange) -> Result<Arc<OwnedFd>> {
        // A region with a counted send has a block that lives, so its base is no other's.
        if let Some(fd) = self
            .ledger
            .acquire()
            .exports
            .get(&range.base.0)
            .and_then(Weak::upgrade)
        {
            return Ok(fd);
        }
        let fd = Arc::new(self.gpu.backend().export_fd(range.base)?);
        let mut ledger = self.ledger.acquire();
        ledger.exports.retain(|_, export| export.strong_count() > 0);
        ledger.exports.insert(range.base.0, Arc::downgrade(&fd));
        Ok(fd)
    }

    /// Makes the receiver wait for a stream: by an event, or by waiting here.
    fn order(&self, stream: &Stream) -> Result<Option<(RawEvent, EventHandle)>> {
        same_gpu(stream, &self.gpu)?;
        stream.refuse_capture("send before or after the capture")?;
        let backend = self.gpu.backend();
        let by_event = self.gpu.caps().event_ipc && self.gpu.kind().arrays().torch_opens;
        if !by_event || self.ledger.acquire().events >= MAX_EVENTS {
            stream.synchronize()?;
            return Ok(None);
        }
        let event = backend.create_event(self.gpu.device(), EventKind::Interprocess)?;
        self.ledger.acquire().events += 1;
        // SAFETY: `record_event` asks for a live event and stream of one device: just made, kept by
        // `stream`, compared.
        let recorded = unsafe { backend.record_event(event, stream.raw()) };
        let handle = recorded.and_then(|()| {
            // SAFETY: `event_handle` asks for a live event: made above.
            unsafe { backend.event_handle(event) }
        });
        match handle {
            Ok(handle) => Ok(Some((event, handle))),
            Err(error) => {
                self.destroy(Some(event));
                Err(error)
            }
        }
    }

    fn destroy(&self, event: Option<RawEvent>) {
        let Some(event) = event else { return };
        // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: `order` made
        // it, and the caller has taken it out of the ledger. A receiver has opened it already, or
        // never will. An error leaks it.
        let _ = unsafe { self.gpu.backend().destroy_event(event) };
        self.ledger.acquire().events -= 1;
    }

    /// Looks at a few sends, in turn.
    fn look(&self) {
        let ids = self.ledger.acquire().few();
        self.take_back(&ids);
    }

    /// Looks at every send and gives back those that nobody holds any more.
    ///
    /// Costs what is outstanding: PyTorch's counters tell nobody that they changed.
    pub fn collect(&self) -> Collected {
        if self.gpu.check_fork().is_err() {
            return Collected::default();
        }
        let ids = self.ledger.acquire().all();
        self.take_back(&ids)
    }

    fn take_back(&self, ids: &[u64]) -> Collected {
        let (collected, ended) = self.ledger.acquire().take_ended(ids, self.quarantine);
        // Without the lock: a block's end calls its session and perhaps an allocator, a file's end
        // unlinks.
        for sent in ended {
            self.destroy(sent.event);
        }
        collected
    }

    /// Says which process has a send of [`Recipient::Unknown`], so that its death brings the memory
    /// back; whether the send is outstanding. With [`Recipient::Unknown`] the send is held until
    /// [`Sender::reclaim`] again.
    pub fn sent_to(&self, id: SendId, to: Recipient) -> bool {
        self.gpu.check_fork().is_ok() && self.ledger.acquire().sent_to(id, to)
    }

    /// Takes back a send that nobody has or will open, and says whether it was outstanding.
    ///
    /// # Safety
    ///
    /// No process has the storage open or opens it later: the message was lost, or who had it is
    /// dead with all its children.
    pub unsafe fn reclaim(&self, id: SendId) -> bool {
        if self.gpu.check_fork().is_err() {
            return false;
        }
        let sent = self.ledger.acquire().take(id);
        match sent {
            Some(sent) => {
                self.destroy(sent.event);
                true
            }
            None => false,
        }
    }

    /// Lists what is still counted, oldest first; nothing in a forked child.
    pub fn outstanding(&self) -> Vec<Outstanding> {
        match self.gpu.check_fork() {
            Ok(()) => self.ledger.acquire().outstanding(),
            Err(_) => Vec::new(),
        }
    }

    /// Collects until nothing is outstanding, and says whether it came to that; never in a forked
    /// child.
    pub fn wait_released(&self, timeout: Duration) -> bool {
        if self.gpu.check_fork().is_err() {
            return false;
        }
        let start = Instant::now();
        let mut pause = Duration::from_micros(50);
        loop {
            if self.collect() != Collected::default() {
                pause = Duration::from_micros(50);
            }
            if self.ledger.acquire().is_empty() {
                return true;
            }
            if start.elapsed() >= timeout {
                return false;
            }
            thread::sleep(pause);
            pause = Duration::from_millis(10).min(pause * 2);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let is_own = self.gpu.check_fork().is_ok();
        if is_own {
            let ids = self.ledger.acquire().all();
            self.take_back(&ids);
        }
        // Without the lock: in a forked child it may be held for good.
        let sent = self
            .ledger
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take_all();
        if !sent.is_empty() && is_own {
            tracing::warn!(
                sends = sent.len(),
                "a sender ends before its receivers: the memory stays until this process ends"
            );
        }
        for sent in sent {
            // Somebody may be using it; only the file's count is ours to give back.
            std::mem::forget((sent.block, sent.kept));
        }
    }
}
