//! From PyTorch: open what it shared, use it, let it go.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use gpu_api::lock::Acquire;
use gpu_api::{DevicePtr, Error, EventHandle, Gpu, RawEvent, Result};
use ipc_rc::{Stream, Wait};

use crate::counter_file::{CounterFile, CounterName};
use crate::fields::{Counter, Place, SharedStorage};
use crate::releases::{Held, ReceiverStats, Releases, same_gpu};

/// Opens the storages that PyTorch processes share, on one device.
///
/// Cheap to clone. It has one thread, which gives back what was dropped once the GPU is done with
/// it, and which ends when the receiver and all its storages are gone and everything was given
/// back.
///
/// In a forked child every call gives [`Error::Forked`] and every drop does nothing.
///
/// # Examples
///
/// ```
/// use gpu_api::{DeviceId, Gpu};
/// use backend_host::{HostBackend, HostConfig};
/// use gpu_ipc_torch::{Fields, Receiver};
/// use ipc_rc::Wait;
///
/// let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// let receiver = Receiver::new(gpu)?;
/// // What `torch.empty(0, device="cuda").untyped_storage()._share_cuda_()` gives.
/// let storage = Fields::default().decode()?;
/// assert_eq!(receiver.open(&storage, Wait::None, None)?.len(), 0);
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Receiver(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    releases: Releases,
    files: Mutex<HashMap<CounterName, Weak<CounterFile>>>,
}

impl Receiver {
    /// Makes a receiver on a device; [`Gpu::with_uuid`] finds the one that the sender means.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when no thread can be made.
    pub fn new(gpu: Gpu) -> Result<Receiver> {
        let releases = Releases::start(gpu.clone())?;
        Ok(Receiver(Arc::new(Inner {
            gpu,
            releases,
            files: Mutex::default(),
        })))
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// Opens a storage: waits for the sender's work in the way that `wait` says, and maps the
    /// storage's segment unless another storage has it mapped. The stream of [`Wait::Stream`]
    /// counts as used.
    ///
    /// With [`Wait::None`] nobody waits: right for a storage whose `event` is `None`, and otherwise
    /// the caller's own concern.
    ///
    /// # Portability
    ///
    /// The event is the sender's. If the sender dies before its work is done, a stream that waits
    /// for it waits for ever (measured on CUDA). [`Wait::Host`] with a timeout does not.
    ///
    /// # Errors
    ///
    /// - [`Error::Mismatch`] for a storage of another device, where its uuid is known, and for a
    ///   stream of another.
    /// - [`Error::Invalid`] for a storage beyond its segment's end, a counter that stands for
    ///   nothing more, or a file that is no counter file.
    /// - [`Error::Unsupported`] for an expandable segment that cannot be opened, with what to
    ///   change in the sender.
    /// - [`Error::Deadline`] when the sender's work was not done in time, with [`Wait::Host`].
    /// - [`Error::System`], [`Error::Driver`], [`Error::Capturing`], [`Error::Forked`].
    ///
    /// After an error the storage is still counted: open it again, or
    /// [`decline`](Receiver::decline) it.
    pub fn open(
        &self,
        storage: &SharedStorage,
        wait: Wait<'_>,
        timeout: Option<Duration>,
    ) -> Result<ReceivedStorage> {
        self.gpu().check_fork()?;
        let gpu = &self.0.gpu;
        if let Some(uuid) = storage.uuid
            && uuid != gpu.uuid()
        {
            return Err(Error::mismatch(
                "the storage's device",
                uuid,
                gpu.uuid(),
                "make a receiver on that device with `Gpu::with_uuid`",
            ));
        }
        if let Wait::Stream(stream) = wait {
            same_gpu(stream, gpu)?;
        }
        let Some(place) = &storage.place else {
            return Ok(ReceivedStorage(Arc::new(Opened::empty(self.clone()))));
        };
        let file = self.file(&place.counter)?;
        let desk = self.0.releases.desk();
        desk.hold(&file, place.counter.slot)?;
        match self.map(place, wait, timeout) {
            Ok((ptr, mapped)) => {
                desk.opened.fetch_add(1, Ordering::Relaxed);
                let held = Held {
                    file,
                    slot: place.counter.slot,
                    mapped,
                };
                let opened = Opened {
                    receiver: self.clone(),
                    ptr,
                    len: place.len,
                    held: Some(held),
                    used_on: Mutex::default(),
                };
                let received = ReceivedStorage(Arc::new(opened));
                if let Wait::Stream(stream) = wait
                    && !stream.raw().is_per_thread()
                {
                    received.used_on(stream)?;
                }
                Ok(received)
            }
            Err(error) => {
                desk.unhold(&file, place.counter.slot);
                Err(error)
            }
        }
    }

    /// Lets a storage go that was not opened, so that its sender need not keep it.
    ///
    /// # Errors
    ///
    /// As [`open`](Receiver::open) gives for the counter.
    pub fn decline(&self, storage: &SharedStorage) -> Result<()> {
        self.gpu().check_fork()?;
        let Some(place) = &storage.place else {
            return Ok(());
        };
        let file = self.file(&place.counter)?;
        self.0.releases.desk().hold(&file, place.counter.slot)?;
        self.0.releases.after(
            Held {
                file,
                slot: place.counter.slot,
                mapped: None,
            },
            &[],
        );
        Ok(())
    }

    /// Waits until everything dropped so far was given back, and says whether it was: before the
    /// process ends, so that no sender keeps what nobody holds. Never in a forked child.
    pub fn wait_released(&self, timeout: Duration) -> bool {
        self.gpu().check_fork().is_ok() && self.0.releases.settle(timeout)
    }

    /// Says what was opened and given back; nothing in a forked child.
    pub fn stats(&self) -> ReceiverStats {
        match self.gpu().check_fork() {
            Ok(()) => self.0.releases.desk().stats(),
            Err(_) => ReceiverStats::default(),
        }
    }

    /// Maps a counter file, or shares its mapping.
    fn file(&self, counter: &Counter) -> Result<Arc<CounterFile>> {
        let mut files = self.0.files.acquire();
        if let Some(file) = files.get(&counter.file).and_then(Weak::upgrade) {
            return Ok(file);
        }
        let file = Arc::new(CounterFile::attach(&counter.file)?.leave());
        files.retain(|_, file| file.strong_count() > 0);
        files.insert(counter.file.clone(), Arc::downgrade(&file));
        Ok(file)
    }

    fn map(
        &self,
        place: &Place,
        wait: Wait<'_>,
        timeout: Option<Duration>,
    ) -> Result<(DevicePtr, Option<crate::segments::Mapped>)> {
        if let Some(event) = &place.event {
            self.wait(event, wait, timeout)?;
        }
        if place.len == 0 {
            return Ok((DevicePtr(0), None));
        }
        let desk = self.0.releases.desk();
        let mapped = desk.segments.acquire(place)?;
        if place
            .offset
            .checked_add(place.len)
            .is_none_or(|end| end > mapped.len)
        {
            let got = format!(
                "{} bytes at offset {} of {}",
                place.len, place.offset, mapped.len
            );
            // An error leaves it mapped, which the table of segments knows.
            let _ = desk.segments.release(mapped);
            return Err(Error::invalid(
                "PyTorch's storage",
                got,
                "inside its segment",
            ));
        }
        Ok((mapped.base.offset(place.offset), Some(mapped)))
    }

    fn wait(&self, handle: &EventHandle, wait: Wait<'_>, timeout: Option<Duration>) -> Result<()> {
        let backend = self.0.gpu.backend();
        if let Wait::Stream(stream) = wait {
            stream.refuse_capture("open the storage before the capture")?;
        }
        if matches!(wait, Wait::None) {
            return Ok(());
        }
        let event = backend.open_event(self.0.gpu.device(), handle)?;
        let waited = match wait {
            // SAFETY: `stream_wait_event` asks for a live event and stream: just opened, and kept
            // by `stream`.
            Wait::Stream(stream) => unsafe { backend.stream_wait_event(stream.raw(), event) },
            _ => self.wait_here(event, timeout),
        };
        // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards; a queued wait
        // stays good.
        let destroyed = unsafe { backend.destroy_event(event) };
        waited.and(destroyed)
    }

    fn wait_here(&self, event: RawEvent, timeout: Option<Duration>) -> Result<()> {
        let start = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            // SAFETY: `query_event` asks for a live event: the caller destroys it afterwards.
            if unsafe { self.0.gpu.backend().query_event(event) }? {
                return Ok(());
            }
            if timeout.is_some_and(|timeout| start.elapsed() >= timeout) {
                return Err(Error::deadline(
                    "the work of the process that shared the storage",
                ));
            }
            thread::sleep(pause);
            pause = Duration::from_millis(1).min(pause * 2);
        }
    }
}

/// A storage of PyTorch's, mapped in this process.
///
/// Cheap to clone. When the last clone is dropped, the counter goes down once everything is done
/// that was queued, up to that moment, on the streams named with
/// [`used_on`](ReceivedStorage::used_on). The drop itself never blocks.
#[derive(Clone, Debug)]
pub struct ReceivedStorage(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    receiver: Receiver,
    ptr: DevicePtr,
    len: u64,
    held: Option<Held>,
    used_on: Mutex<Vec<Stream>>,
}

impl Opened {
    fn empty(receiver: Receiver) -> Opened {
        Opened {
            receiver,
            ptr: DevicePtr(0),
            len: 0,
            held: None,
            used_on: Mutex::default(),
        }
    }
}

impl ReceivedStorage {
    /// Returns the address of its first byte in this process; 0 for a storage of no bytes.
    ///
    /// Work that touches it on a stream not named with [`used_on`](ReceivedStorage::used_on) races
    /// with the sender's next use of the memory. So does work through an address kept beyond the
    /// last clone.
    pub fn device_ptr(&self) -> DevicePtr {
        self.0.ptr
    }

    /// Returns its bytes.
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Says whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Copies its first bytes until `bytes` is full, after the work that is queued on the stream,
    /// and returns when the copy has finished.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for more bytes than the storage has, [`Error::Mismatch`] for a stream of
    /// another device, [`Error::Capturing`], [`Error::Forked`], and the driver's error: then the
    /// storage is kept until the process ends, since nobody knows whether the copy still runs.
    /// After an error `bytes` are as they were.
    pub fn read(&self, stream: &Stream, bytes: &mut [u8]) -> Result<()> {
        self.0.receiver.gpu().check_fork()?;
        same_gpu(stream, self.0.receiver.gpu())?;
        stream.refuse_capture("copy before the capture begins or after it ended")?;
        if bytes.len() as u64 > self.len() {
            let got = format!("{} bytes of {}", bytes.len(), self.len());
            return Err(Error::invalid(
                "the bytes to read",
                got,
                "no more than the storage has",
            ));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let mut staged = vec![0; bytes.len()].into_boxed_slice();
        // SAFETY: `copy_to_host` asks for
        // - a live stream: the caller keeps it;
        // - ranges that are valid until the copy has finished: `staged` and the storage are freed
        //   after the stream said that it has, or never, and the lengths were compared.
        let queued = unsafe {
            stream.gpu().backend().copy_to_host(
                stream.raw(),
                staged.as_mut_ptr(),
                self.device_ptr(),
                staged.len(),
            )
        };
        match queued.and_then(|()| stream.synchronize()) {
            Ok(()) => {
                bytes.copy_from_slice(&staged);
                Ok(())
            }
            Err(error) => {
                Box::leak(staged);
                std::mem::forget(self.clone());
                Err(error)
            }
        }
    }

    /// Queues a fill: sets every byte of the storage to `byte`, after the work that is queued on
    /// the stream, and returns at once. The stream counts as [used](ReceivedStorage::used_on), so
    /// the counter goes down after the fill.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a stream of another device, [`Error::Invalid`] for the per-thread
    /// default stream (handle 2), [`Error::Capturing`], [`Error::Forked`], and the driver's error.
    pub fn fill(&self, stream: &Stream, byte: u8) -> Result<()> {
        self.0.receiver.gpu().check_fork()?;
        same_gpu(stream, self.0.receiver.gpu())?;
        stream.refuse_capture("fill before the capture begins or after it ended")?;
        if self.is_empty() {
            return Ok(());
        }
        // Before the fill: a call that fails may have queued it all the same.
        self.used_on(stream)?;
        // SAFETY: `fill` asks for
        // - a live stream: the caller keeps it;
        // - a range that is valid until the fill has finished: the storage is borrowed, and its
        //   last drop waits for the streams that were named before it unmaps.
        unsafe {
            stream
                .gpu()
                .backend()
                .fill(stream.raw(), self.device_ptr(), byte, self.len())
        }
    }

    /// Names a stream whose queued work touches the storage.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a stream of another device, [`Error::Invalid`] for the per-thread
    /// default stream (handle 2): the thread that drops the storage may be another.
    pub fn used_on(&self, stream: &Stream) -> Result<()> {
        self.0.receiver.gpu().check_fork()?;
        stream.refuse_per_thread()?;
        same_gpu(stream, self.0.receiver.gpu())?;
        let mut used = self.0.used_on.acquire();
        if !used
            .iter()
            .any(|known| known.identity() == stream.identity())
        {
            used.push(stream.clone());
        }
        Ok(())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Some(held) = self.held.take() else { return };
        if self.receiver.gpu().check_fork().is_err() {
            // The parent's: its count, its mapping, its driver.
            std::mem::forget(held);
            return;
        }
        let used = std::mem::take(
            self.used_on
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        );
        self.receiver.0.releases.after(held, &used);
    }
}
