//! Streams that work is ordered on.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use gpu_api::{CaptureStatus, Error, Gpu, RawStream, Result, StreamIdentity, StreamInfo};

use crate::gpu_event::GpuEvent;

/// A stream that sharing, claiming and releasing are ordered on.
///
/// Cheap to clone. Each clone keeps the stream alive, and so does a block that was
/// [used on](crate::ReceivedBlock::used_on) it.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    gpu: Gpu,
    raw: RawStream,
    info: StreamInfo,
    keeper: Keeper,
    /// How many of the clones are [`NamedStream`]s.
    named: AtomicUsize,
    /// What later moments are asked of where `raw` is another stream on every thread; made when
    /// first needed.
    stand_in: OnceLock<Stream>,
}

/// Which side destroys the stream.
enum Keeper {
    /// The last clone, in the process that made it: the driver is not for a forked child.
    Us,
    /// The application, told by the end of this.
    Application {
        keep: Arc<dyn Any + Send + Sync>,
        /// The application had a copy of its own when it lent the stream.
        is_shared: bool,
    },
}

impl Stream {
    /// Makes a stream that waits for no other.
    ///
    /// # Errors
    ///
    /// The driver's error, and [`Error::Forked`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::Stream;
    ///
    /// let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// let stream = Stream::create(&gpu)?;
    /// stream.synchronize()?;
    /// # Ok::<(), gpu_api::Error>(())
    /// ```
    pub fn create(gpu: &Gpu) -> Result<Stream> {
        let raw = gpu.backend().create_stream(gpu.device())?;
        // SAFETY: `stream_info` asks for a live stream: just made.
        let info = match unsafe { gpu.backend().stream_info(raw) } {
            Ok(info) => info,
            Err(error) => {
                // SAFETY: `destroy_stream` asks for a live stream that nobody uses afterwards: its
                // number is dropped.
                let _ = unsafe { gpu.backend().destroy_stream(raw) };
                return Err(error);
            }
        };
        Ok(Stream::of(gpu, raw, info, Keeper::Us))
    }

    /// Takes the device's legacy default stream (handle 0): PyTorch's default.
    ///
    /// It is the stream of the device's primary context, whatever device is current on the threads
    /// that call with it.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] while another context of the device than its primary one is current on
    /// this thread: the application's stream 0 is that context's own then.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::Stream;
    ///
    /// let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// assert_eq!(Stream::default_of(&gpu)?.identity(), Stream::default_of(&gpu)?.identity());
    /// # Ok::<(), gpu_api::Error>(())
    /// ```
    pub fn default_of(gpu: &Gpu) -> Result<Stream> {
        // SAFETY: `borrow` asks for
        // - a stream that is alive for as long as `keep` is: a device has its default stream for as
        //   long as the backend keeps its primary context, and the `Stream` has the backend;
        // - that no thread begins to capture it meanwhile: the legacy stream cannot be captured.
        unsafe { Stream::borrow(gpu, RawStream::LEGACY, Arc::new(())) }
    }

    /// Borrows an application's stream by the driver's handle (`CUstream`, `hipStream_t`, as a
    /// number).
    ///
    /// The handles 0 and 1 are the legacy default stream of `gpu`, as
    /// [`default_of`](Stream::default_of) gives it. The handle 2 is the calling thread's default
    /// stream of `gpu`, and so another stream on every thread: it is taken where the call itself
    /// queues ([`After::Stream`](crate::After::Stream), [`Wait::Stream`](crate::Wait::Stream)), and
    /// refused where a later moment counts
    /// ([`ReceivedBlock::used_on`](crate::ReceivedBlock::used_on)).
    ///
    /// `keep` is dropped when nothing of this library needs the stream any more, which may be after
    /// the application has dropped its own handle of it: a received block's release waits for work
    /// on the stream.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a stream of another device, or of another context than the device's
    /// primary one; [`Error::Forked`].
    ///
    /// # Safety
    ///
    /// - The stream is alive for as long as `keep` is.
    /// - No thread begins to capture it while another one is in a call of this library that was
    ///   given it.
    pub unsafe fn borrow(
        gpu: &Gpu,
        handle: u64,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Stream> {
        let raw = RawStream::new(gpu.device(), handle);
        // SAFETY: `stream_info` asks for a live stream: so does this function, and `keep` is in
        // scope.
        let info = unsafe { gpu.backend().stream_info(raw) }?;
        let is_shared = Arc::strong_count(&keep) > 1;
        let keeper = Keeper::Application { keep, is_shared };
        Ok(Stream::of(gpu, raw, info, keeper))
    }

    fn of(gpu: &Gpu, raw: RawStream, info: StreamInfo, keeper: Keeper) -> Stream {
        let (gpu, named, stand_in) = (gpu.clone(), AtomicUsize::new(0), OnceLock::new());
        Stream(Arc::new(Inner {
            gpu,
            raw,
            info,
            keeper,
            named,
            stand_in,
        }))
    }

    /// Returns the stream as the backend takes it: its device, and the driver's handle.
    pub fn raw(&self) -> RawStream {
        self.0.raw
    }

    /// Returns the driver's own number of the stream, never used again in this process.
    pub fn identity(&self) -> StreamIdentity {
        self.0.info.identity
    }

    /// Returns the device that it queues on.
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// Blocks until all that is queued on it has finished.
    ///
    /// # Errors
    ///
    /// The driver's error, perhaps of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: `synchronize_stream` asks for a live stream: `self` keeps it.
        unsafe { self.0.gpu.backend().synchronize_stream(self.0.raw) }
    }

    /// Queues a call of `function` on a thread of the driver's, after the work that is queued on
    /// the stream, and returns at once. What is queued later waits until the function has returned.
    ///
    /// The function calls neither this library nor the driver, drops nothing of theirs, and waits
    /// for no work of the GPU: such a call may fail or never return, and other streams may wait
    /// with this one ([`cuLaunchHostFunc`], and `hipLaunchHostFunc` on AMD). It sends to a channel,
    /// sets a flag or wakes a thread. A panic ends in it, and the stream goes on. If the device
    /// fails before, the function may never be called.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`], since a graph may run more than once and the function cannot, and the
    /// driver's error: then the function is never called.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::Stream;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// let stream = Stream::create(&gpu)?;
    /// let (done, when_done) = std::sync::mpsc::channel();
    /// // ... queue kernels on the stream ...
    /// stream.host_function(move || done.send("all kernels have finished").unwrap_or(()))?;
    /// assert_eq!(when_done.recv()?, "all kernels have finished");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [`cuLaunchHostFunc`]: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__EXEC.html
    #[doc(alias = "cuLaunchHostFunc")]
    #[doc(alias = "hipLaunchHostFunc")]
    pub fn host_function(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        self.refuse_capture("queue host functions outside the capture")?;
        // SAFETY: `host_function` asks for
        // - a live stream: `self` keeps it;
        // - that no thread begins to capture it during the call: capturing takes its handle, and
        //   the code that uses it vouched for that where it gave the stream to this library
        //   (`borrow`) or to the driver's call that captures.
        unsafe {
            self.0
                .gpu
                .backend()
                .host_function(self.0.raw, Box::new(function))
        }
    }

    /// Returns a clone for a list of streams that work may be queued on.
    pub(crate) fn name(&self) -> NamedStream {
        let stream = self.clone();
        // After the clone, and taken back before its end: the number is never above that of the
        // clones.
        stream.0.named.fetch_add(1, Ordering::Relaxed);
        NamedStream(stream)
    }

    /// Tells it from every other stream of this process.
    pub(crate) fn key(&self) -> StreamKey {
        StreamKey {
            backend: self.0.gpu.key(),
            device: self.0.gpu.device().0,
            identity: self.0.info.identity,
        }
    }

    /// Refuses a stream of another device, or of another backend, whose handle would mean something
    /// else to this one.
    pub(crate) fn require(&self, gpu: &Gpu) -> Result<()> {
        if self.0.gpu == *gpu {
            return Ok(());
        }
        let name = |gpu: &Gpu| format!("{}:{}", gpu.kind(), gpu.device().0);
        let (theirs, ours) = (name(&self.0.gpu), name(gpu));
        let theirs = if theirs == ours {
            format!("{theirs}, of a backend that was loaded separately")
        } else {
            theirs
        };
        Err(Error::mismatch(
            "the stream's device",
            theirs,
            ours,
            "make the stream with the `Gpu` that the session or participant was opened with, and let it wait \
                     for the other one",
        ))
    }

    /// Returns a stream that any later moment can be asked of: this one, or, where it is another on
    /// every thread (handle 2), one of the library's own that waits for what is queued on the
    /// calling thread's at this moment.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`], [`Error::Forked`], and the driver's error.
    pub fn behind(&self) -> Result<&Stream> {
        self.0.gpu.check_fork()?;
        let Some(stand_in) = self.stand_in()? else {
            return Ok(self);
        };
        self.refuse_capture("do it before the capture begins or after it ended")?;
        let mark = GpuEvent::new(&self.0.gpu)?;
        mark.record(self)?;
        mark.hold(stand_in)?;
        Ok(stand_in)
    }

    /// Returns the stream to wait on: this one, or, where it is another on every thread, one of our
    /// own that the calling thread's has to [follow](Stream::follow) afterwards.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub(crate) fn ahead(&self) -> Result<&Stream> {
        Ok(self.stand_in()?.unwrap_or(self))
    }

    /// Lets the calling thread's stream wait for what is queued on `ahead`, which
    /// [`ahead`](Stream::ahead) gave.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub(crate) fn follow(&self, ahead: &Stream) -> Result<()> {
        if !self.0.raw.is_per_thread() {
            return Ok(());
        }
        let mark = GpuEvent::new(&self.0.gpu)?;
        mark.record(ahead)?;
        mark.hold(self)
    }

    /// Refuses the per-thread default stream (handle 2), for a call whose later moment may come on
    /// another thread.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`].
    pub fn refuse_per_thread(&self) -> Result<()> {
        if !self.0.raw.is_per_thread() {
            return Ok(());
        }
        Err(Error::invalid(
            "the stream",
            "2, which is another stream on every thread",
            "one that every thread knows: 0, or a stream of its own (`torch.cuda.Stream`, cuStreamCreate)",
        ))
    }

    fn stand_in(&self) -> Result<Option<&Stream>> {
        if !self.0.raw.is_per_thread() {
            return Ok(None);
        }
        if let Some(made) = self.0.stand_in.get() {
            return Ok(Some(made));
        }
        let made = Stream::create(&self.0.gpu)?;
        Ok(Some(self.0.stand_in.get_or_init(|| made)))
    }

    /// Says whether work queued on it goes into a graph.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        // SAFETY: `capture_status` asks for a live stream: `self` keeps it.
        let status = unsafe { self.0.gpu.backend().capture_status(self.0.raw) }?;
        Ok(status != CaptureStatus::None)
    }

    /// Refuses a stream that is being captured into a graph; `remedy` goes into the error.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`], and the driver's error.
    pub fn refuse_capture(&self, remedy: &'static str) -> Result<()> {
        if self.is_capturing()? {
            Err(Error::Capturing {
                stream: self.0.raw.handle,
                remedy,
            })
        } else {
            Ok(())
        }
    }
}

/// Says what to do instead, of a call on a stream that is being captured.
pub(crate) fn advise(error: Error, remedy: &'static str) -> Error {
    match error {
        Error::Capturing { stream, .. } => Error::Capturing { stream, remedy },
        error => error,
    }
}

/// What tells a stream from those of other devices and backends, whose own numbers may be the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct StreamKey {
    /// The address of the backend, which the streams that have this key keep alive.
    backend: usize,
    device: u32,
    identity: StreamIdentity,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if matches!(self.keeper, Keeper::Us) && self.gpu.check_fork().is_ok() {
            // SAFETY: `destroy_stream` asks for a live stream that nobody uses afterwards: this was
            // its last owner. An error leaks it, which is all that can be done.
            let _ = unsafe { self.gpu.backend().destroy_stream(self.raw) };
        }
    }
}

/// A stream in a list of those that work may be queued on: the list alone does not make that more.
#[derive(Debug)]
pub(crate) struct NamedStream(Stream);

impl NamedStream {
    /// Says whether the application has let go of the stream, so that it queues nothing more: every
    /// clone is in a list, and of what keeps a borrowed stream alive it has no copy any more,
    /// though it had one.
    pub fn is_let_go(&self) -> bool {
        let inner = &self.0.0;
        let is_kept = match &inner.keeper {
            Keeper::Us => false,
            Keeper::Application { keep, is_shared } => !is_shared || Arc::strong_count(keep) > 1,
        };
        !is_kept && Arc::strong_count(inner) == inner.named.load(Ordering::Relaxed)
    }
}

impl Deref for NamedStream {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.0
    }
}

impl Drop for NamedStream {
    fn drop(&mut self) {
        self.0.0.named.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.0.raw.device.0)
            .field("handle", &self.0.raw.handle)
            .field("identity", &self.0.info.identity)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use backend_host::{HostBackend, HostConfig};
    use gpu_api::{DeviceId, GpuCaptures};

    use super::*;

    #[test]
    fn a_forked_childs_drop_leaves_the_stream_alone() {
        let backend = HostBackend::new(HostConfig::default()).expect("memory");
        let gpu = Gpu::new(backend.clone(), DeviceId(0)).expect("a device");
        let stream = Stream::create(&gpu).expect("a stream");
        let raw = stream.raw();
        // Asked of the host backend itself: the device's own would refuse the child.
        // SAFETY: `capture_status`: alive, or refused by the host backend's table.
        let lives = || unsafe { backend.capture_status(raw) }.is_ok();
        let leaves_it = || {
            // SAFETY: `read` asks for a valid value: `stream` is one, and is dropped once in each
            // process, whose memory is its own.
            drop(unsafe { std::ptr::read(&raw const stream) });
            lives()
        };
        // SAFETY: `fork` asks that the child of a process with threads does only what is safe
        // there: it frees memory with the C library, and asks a backend that no other thread has.
        unsafe { harness::holds_in_a_fork(leaves_it) };
        assert!(lives());
        drop(stream);
        assert!(!lives(), "the last clone of its own process destroys it");
    }

    #[test]
    fn a_host_function_runs_behind_what_is_queued_and_a_panic_ends_in_it() {
        let gpu = Gpu::new(
            HostBackend::new(HostConfig::default()).expect("memory"),
            DeviceId(0),
        )
        .expect("a device");
        let stream = Stream::create(&gpu).expect("a stream");
        let (ran, runs) = std::sync::mpsc::channel();
        for number in 0..50 {
            let ran = ran.clone();
            stream
                .host_function(move || ran.send(number).expect("it is waited for"))
                .expect("queued");
        }
        stream
            .host_function(|| panic!("on purpose"))
            .expect("queued");
        stream
            .host_function(move || ran.send(50).expect("it is waited for"))
            .expect("queued");
        stream.synchronize().expect("all ran");
        assert_eq!(
            runs.try_iter().collect::<Vec<i32>>(),
            (0..=50).collect::<Vec<i32>>()
        );
    }

    #[test]
    fn a_captured_stream_takes_no_host_function() {
        let host = HostBackend::new(HostConfig::default()).expect("memory");
        let gpu = Gpu::new(host.clone(), DeviceId(0)).expect("a device");
        let stream = Stream::create(&gpu).expect("a stream");
        for status in [CaptureStatus::Active, CaptureStatus::Invalidated] {
            host.set_capture(stream.raw(), status);
            let refused = stream.host_function(|| unreachable!("it was refused"));
            assert!(
                matches!(refused, Err(Error::Capturing { .. })),
                "{refused:?}"
            );
        }
        host.set_capture(stream.raw(), CaptureStatus::None);
        let (ran, runs) = std::sync::mpsc::channel();
        stream
            .host_function(move || ran.send(()).expect("it is waited for"))
            .expect("queued");
        stream.synchronize().expect("it ran");
        assert_eq!(runs.try_iter().count(), 1);
    }
}
