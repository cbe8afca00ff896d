//! Copies between a program's own bytes and a block, and fills of a block, without `unsafe`.

use std::ops::RangeBounds;
use std::sync::atomic::AtomicU8;

use gpu_api::{Access, DevicePtr, Error, Gpu, Result};

use crate::consumer::received_block::ReceivedBlock;
use crate::producer::sent_block::SentBlock;
use crate::range::part_of;
use crate::stream::Stream;
use sealed::Extent;

/// Bytes of a block that a [`Stream`] copies to and from, and fills: of a [`SentBlock`], a
/// [`ReceivedBlock`] or a slice of either.
///
/// Implemented by this crate alone.
pub trait Contents: sealed::Contents {}

impl<T: sealed::Contents> Contents for T {}

mod sealed {
    use super::*;

    pub trait Contents {
        fn extent(&self) -> Extent<'_>;
        /// Refuses a forked child.
        fn check_process(&self) -> Result<()>;
        /// Names a stream whose queued work touches the block.
        fn used_on(&self, stream: &Stream) -> Result<()>;
        /// Keeps the block until the process ends, because a copy of unknown state may touch it.
        fn keep_for_ever(&self);
    }

    /// Where the bytes are, and what may be done with them.
    #[derive(Clone, Copy, Debug)]
    pub struct Extent<'a> {
        pub gpu: &'a Gpu,
        pub start: DevicePtr,
        pub len: u64,
        pub access: Access,
    }
}

/// A part of a block that this process produces: made by [`SentBlock::slice`].
#[derive(Clone, Copy, Debug)]
pub struct SentSlice<'a> {
    block: &'a SentBlock,
    offset: u64,
    len: u64,
}

impl SentSlice<'_> {
    /// Returns the address of the first byte, in this process.
    pub fn device_ptr(&self) -> DevicePtr {
        self.block.device_ptr().offset(self.offset)
    }

    /// Returns the bytes.
    #[allow(clippy::len_without_is_empty, reason = "an empty slice is refused")]
    pub fn len(&self) -> u64 {
        self.len
    }
}

impl SentBlock {
    /// Returns a part of the block, to write to or read from.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range that is empty or does not lie in the block,
    /// [`Error::Forked`].
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Result<SentSlice<'_>> {
        self.core().check_fork()?;
        let (offset, len) = part_of(self.len(), &range)?;
        Ok(SentSlice {
            block: self,
            offset,
            len,
        })
    }

    /// Views the block's bytes in place, on the host backend; `None` on a GPU, whose memory the CPU
    /// does not reach, and in a forked child, whose parent may have given the bytes to another.
    ///
    /// Other processes and streams may write at the same time, so each byte is atomic.
    pub fn host_bytes(&self) -> Option<&[AtomicU8]> {
        view(self)
    }
}

impl ReceivedBlock {
    /// Views the block's bytes in place, on the host backend; `None` on a GPU, whose memory the CPU
    /// does not reach, for a block that is [only read](ReceivedBlock::is_read_only), since an atomic
    /// byte could be written, and in a forked child, whose parent may have ended the lease.
    ///
    /// Other processes and streams may write at the same time, so each byte is atomic. The view
    /// shows what the producer wrote once the block's [state](ReceivedBlock::state) is
    /// [`Ready`](crate::State::Ready).
    pub fn host_bytes(&self) -> Option<&[AtomicU8]> {
        if self.is_read_only() {
            None
        } else {
            view(self)
        }
    }
}

impl Stream {
    /// Copies `bytes` to the beginning of a block or slice, after the work that is queued on the
    /// stream, and returns when the copy has finished.
    ///
    /// The bytes are staged once in host memory of the library's own, so that a copy that the
    /// driver fails to finish reads no memory of the caller's.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for more bytes than `to` has and for a block that is mapped read-only,
    /// [`Error::Mismatch`] for a block of another device, [`Error::Capturing`], [`Error::Forked`],
    /// and the driver's error: then the block is kept until the process ends, since the copy may
    /// still run.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::{Session, Stream};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// let stream = Stream::create(&gpu)?;
    /// let block = session.alloc(4096)?;
    /// stream.write(&block, &[7; 4096])?;
    /// stream.write(&block.slice(8..16)?, b"eighteen")?;
    /// let mut read = [0; 8];
    /// stream.read(&block.slice(8..16)?, &mut read)?;
    /// assert_eq!(&read, b"eighteen");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn write(&self, to: &impl Contents, bytes: &[u8]) -> Result<()> {
        self.check(to, bytes.len(), "the bytes to write")?;
        check_writable(to)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let staged: Box<[u8]> = bytes.into();
        // SAFETY: `copy_to_device` asks for
        // - a live stream: `self` keeps it;
        // - ranges that are valid until the copy has finished: `finish` frees neither `staged` nor
        //   the block before the stream says that it has, and `check` compared the lengths.
        let queued = unsafe {
            self.gpu().backend().copy_to_device(
                self.raw(),
                to.extent().start,
                staged.as_ptr(),
                staged.len(),
            )
        };
        self.finish(to, queued, staged).map(drop)
    }

    /// Copies from the beginning of a block or slice until `bytes` is full, after the work that is
    /// queued on the stream, and returns when the copy has finished.
    ///
    /// A block that was claimed with [`Wait::Stream`](crate::Wait::Stream) on this stream shows
    /// what the producer wrote.
    ///
    /// # Errors
    ///
    /// As [`write`](Stream::write), but for a block that is mapped read-only. After an error
    /// `bytes` are as they were.
    pub fn read(&self, from: &impl Contents, bytes: &mut [u8]) -> Result<()> {
        self.check(from, bytes.len(), "the bytes to read")?;
        if bytes.is_empty() {
            return Ok(());
        }
        let mut staged = vec![0; bytes.len()].into_boxed_slice();
        // SAFETY: `copy_to_host` asks for
        // - a live stream: `self` keeps it;
        // - ranges that are valid until the copy has finished: `finish` frees neither `staged` nor
        //   the block before the stream says that it has, and `check` compared the lengths.
        let queued = unsafe {
            self.gpu().backend().copy_to_host(
                self.raw(),
                staged.as_mut_ptr(),
                from.extent().start,
                bytes.len(),
            )
        };
        bytes.copy_from_slice(&self.finish(from, queued, staged)?);
        Ok(())
    }

    /// Queues a fill: sets every byte of a block or slice to `byte`, after the work that is queued
    /// on the stream, and returns at once. The stream counts as one that the block was used on
    /// ([`SentBlock::used_on`], [`ReceivedBlock::used_on`]), so a dropped block's bytes are not
    /// used again before the fill has finished.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a block that is mapped read-only and for the per-thread default
    /// stream (handle 2), [`Error::Mismatch`] for a block of another device, [`Error::Capturing`],
    /// [`Error::Forked`], and the driver's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::{After, Claims, Session, Stream, To};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// let stream = Stream::create(&gpu)?;
    /// let block = session.alloc(4096)?;
    /// stream.fill(&block, 0)?;
    /// stream.fill(&block.slice(..8)?, 7)?;
    /// // Whoever claims it waits for both fills.
    /// let ticket = block.share(To::Ticket(Claims::Once), After::Stream(&stream))?;
    /// # assert!(block.cancel(&ticket)?);
    /// let mut read = [0; 9];
    /// stream.read(&block, &mut read)?;
    /// assert_eq!(read, [7, 7, 7, 7, 7, 7, 7, 7, 0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fill(&self, block: &impl Contents, byte: u8) -> Result<()> {
        self.check(block, 0, "the bytes to fill")?;
        check_writable(block)?;
        // Before the fill: a call that fails may have queued it all the same.
        block.used_on(self)?;
        let Extent { start, len, .. } = block.extent();
        // SAFETY: `fill` asks for
        // - a live stream: `self` keeps it;
        // - a range that is valid until the fill has finished: the block is borrowed, and from its
        //   drop on it waits for this stream, which was named.
        unsafe { self.gpu().backend().fill(self.raw(), start, byte, len) }
    }

    fn check(&self, block: &impl Contents, len: usize, what: &'static str) -> Result<()> {
        block.check_process()?;
        let extent = block.extent();
        self.require(extent.gpu)?;
        if len as u64 > extent.len {
            return Err(Error::invalid(
                what,
                format!("{len} bytes for {} of the block", extent.len),
                "no more than the block or slice has",
            ));
        }
        self.refuse_capture("do it before the capture begins or after it ended")
    }

    /// Waits for a copy and gives its bytes back. A copy whose end is not known keeps them and the
    /// block for ever.
    fn finish(
        &self,
        block: &impl Contents,
        queued: Result<()>,
        staged: Box<[u8]>,
    ) -> Result<Box<[u8]>> {
        match queued.and_then(|()| self.synchronize()) {
            Ok(()) => Ok(staged),
            Err(error) => {
                Box::leak(staged);
                block.keep_for_ever();
                Err(error)
            }
        }
    }
}

fn check_writable(block: &impl Contents) -> Result<()> {
    if block.extent().access != Access::ReadOnly {
        return Ok(());
    }
    Err(Error::invalid(
        "the block to write to",
        "mapped read-only",
        "shared without `read_only`, with a participant that was connected without it",
    ))
}

impl sealed::Contents for SentBlock {
    fn extent(&self) -> Extent<'_> {
        let (gpu, start) = (&self.core().facts.gpu, self.device_ptr());
        Extent {
            gpu,
            start,
            len: self.len(),
            access: Access::ReadWrite,
        }
    }

    fn check_process(&self) -> Result<()> {
        self.core().check_fork()
    }

    fn used_on(&self, stream: &Stream) -> Result<()> {
        SentBlock::used_on(self, stream)
    }

    fn keep_for_ever(&self) {
        self.shared().clone().leak();
    }
}

impl sealed::Contents for SentSlice<'_> {
    fn extent(&self) -> Extent<'_> {
        Extent {
            start: self.device_ptr(),
            len: self.len,
            ..self.block.extent()
        }
    }

    fn check_process(&self) -> Result<()> {
        self.block.check_process()
    }

    fn used_on(&self, stream: &Stream) -> Result<()> {
        self.block.used_on(stream)
    }

    fn keep_for_ever(&self) {
        self.block.keep_for_ever();
    }
}

impl sealed::Contents for ReceivedBlock {
    fn extent(&self) -> Extent<'_> {
        Extent {
            gpu: &self.link().facts.gpu,
            start: self.device_ptr(),
            len: self.len(),
            access: self.access(),
        }
    }

    fn check_process(&self) -> Result<()> {
        self.link().guard.check("this block")
    }

    fn used_on(&self, stream: &Stream) -> Result<()> {
        ReceivedBlock::used_on(self, stream)
    }

    fn keep_for_ever(&self) {
        std::mem::forget(self.clone());
    }
}

fn view(block: &impl sealed::Contents) -> Option<&[AtomicU8]> {
    let extent = block.extent();
    if block.check_process().is_err() || !extent.gpu.kind().in_host_memory() {
        return None;
    }
    let (start, len) = (extent.start.0 as *const AtomicU8, extent.len as usize);
    // SAFETY: `from_raw_parts` asks for
    // - a range that is readable, aligned for its element (one byte) and within one allocation for
    //   as long as the result lives: the block, which is borrowed as long, lies in one mapping of
    //   this process;
    // - initialised elements: memory of a memfd starts as zeros;
    // - no write that is not atomic: what streams and other processes write is outside this
    //   program's memory model, as with any device; through this view bytes are touched atomically
    //   alone;
    // - less than `isize::MAX` bytes: it is mapped.
    Some(unsafe { std::slice::from_raw_parts(start, len) })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    use backend_host::{HostBackend, HostConfig};
    use gpu_api::{CaptureStatus, DeviceId};

    use super::*;
    use crate::{After, Participant, Session, To, Wait};

    /// Long enough for the slowest machine; a test that waits longer hangs.
    const WATCHDOG: Duration = Duration::from_secs(120);

    struct Pair {
        _dir: tempfile::TempDir,
        host: Arc<HostBackend>,
        gpu: Gpu,
        session: Session,
        participant: Participant,
    }

    fn open() -> (Arc<HostBackend>, Gpu) {
        let host = HostBackend::new(HostConfig::default()).expect("memory");
        let gpu = Gpu::new(host.clone(), DeviceId(0)).expect("a device");
        (host, gpu)
    }

    fn pair(read_only: bool) -> Pair {
        let dir = tempfile::tempdir().expect("a directory");
        let (host, gpu) = open();
        let session = Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .open()
            .expect("a session");
        let builder = Participant::builder(gpu.clone());
        let builder = if read_only {
            builder.read_only()
        } else {
            builder
        };
        let participant = builder
            .connect(session.socket_path())
            .expect("a participant");
        Pair {
            _dir: dir,
            host,
            gpu,
            session,
            participant,
        }
    }

    fn received(pair: &Pair, block: &SentBlock) -> ReceivedBlock {
        let descriptor = block
            .share(To::Participant(pair.participant.id()), After::Done)
            .expect("shared");
        pair.participant
            .claim(descriptor.as_bytes(), Wait::Host, None)
            .expect("claimed")
    }

    #[test]
    fn what_is_written_is_read_on_the_other_side() {
        let pair = pair(false);
        let stream = Stream::create(&pair.gpu).expect("a stream");
        let block = pair.session.alloc(4096).expect("room");
        stream.write(&block, &[1; 4096]).expect("written");
        stream
            .write(&block.slice(100..104).expect("inside"), &[9; 4])
            .expect("written");
        let received = received(&pair, &block);
        let mut bytes = [0; 8];
        stream
            .read(&received.slice(98..).expect("inside"), &mut bytes)
            .expect("read");
        assert_eq!(bytes, [1, 1, 9, 9, 9, 9, 1, 1]);
        let view = received.host_bytes().expect("the host backend");
        assert_eq!((view.len(), view[100].load(Ordering::Relaxed)), (4096, 9));
    }

    #[test]
    fn too_many_bytes_and_a_read_only_block_are_refused_and_change_nothing() {
        let pair = pair(true);
        let stream = Stream::create(&pair.gpu).expect("a stream");
        let block = pair.session.alloc(16).expect("room");
        let len = block.len() as usize;
        stream.write(&block, &vec![3; len]).expect("written");
        let error = stream
            .write(&block, &vec![4; len + 1])
            .expect_err("longer than the block");
        assert!(
            error
                .to_string()
                .contains(&format!("{} bytes for {len}", len + 1)),
            "{error}"
        );
        assert!(stream.read(&block, &mut vec![0; len + 1]).is_err());
        let received = received(&pair, &block);
        let error = stream.write(&received, &[5]).expect_err("mapped read-only");
        assert!(error.to_string().contains("read_only"), "{error}");
        assert!(received.host_bytes().is_none());
        let mut bytes = vec![0; len];
        stream.read(&received, &mut bytes).expect("read");
        assert_eq!(bytes, vec![3; len]);
    }

    #[test]
    fn a_fill_is_of_its_slice_alone_and_behind_what_is_queued() {
        let pair = pair(false);
        let stream = Stream::create(&pair.gpu).expect("a stream");
        let block = pair.session.alloc(16).expect("room");
        stream.fill(&block, 1).expect("filled");
        stream
            .fill(&block.slice(4..6).expect("inside"), 2)
            .expect("filled");
        stream
            .fill(&block.slice(5..).expect("inside"), 3)
            .expect("filled");
        let mut bytes = [0; 16];
        stream.read(&block, &mut bytes).expect("read");
        assert_eq!(bytes, [1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]);
        let received = received(&pair, &block);
        stream
            .fill(&received.slice(..1).expect("inside"), 4)
            .expect("filled");
        stream.read(&block, &mut bytes).expect("read");
        assert_eq!(bytes[..2], [4, 1]);
    }

    #[test]
    fn what_a_fill_cannot_be_ordered_with_is_refused_and_changes_nothing() {
        let pair = pair(true);
        let (stream, foreign) = (Stream::create(&pair.gpu), Stream::create(&open().1));
        let (stream, foreign) = (stream.expect("a stream"), foreign.expect("a stream"));
        let block = pair.session.alloc(16).expect("room");
        stream.fill(&block, 1).expect("filled");
        let received = received(&pair, &block);
        let read_only = stream
            .fill(&received, 2)
            .expect_err("mapped read-only")
            .to_string();
        assert!(read_only.contains("read_only"), "{read_only}");
        let elsewhere = foreign.fill(&block, 2);
        assert!(
            matches!(elsewhere, Err(Error::Mismatch { .. })),
            "{elsewhere:?}"
        );
        // SAFETY: `borrow` asks for a stream that is alive as long as `keep`, and that nobody
        // captures it meanwhile: the backend keeps its default streams.
        let threads =
            unsafe { Stream::borrow(&pair.gpu, 2, Arc::new(())) }.expect("the thread's own");
        let another = threads.fill(&block, 2);
        assert!(
            matches!(
                another,
                Err(Error::Invalid {
                    what: "the stream",
                    ..
                })
            ),
            "{another:?}"
        );
        pair.host.set_capture(stream.raw(), CaptureStatus::Active);
        for refused in [
            stream.fill(&block, 2),
            stream.write(&block, &[2]),
            stream.read(&block, &mut [0]),
        ] {
            assert!(
                matches!(refused, Err(Error::Capturing { .. })),
                "{refused:?}"
            );
        }
        pair.host.set_capture(stream.raw(), CaptureStatus::None);
        let mut bytes = [0; 16];
        stream.read(&block, &mut bytes).expect("read");
        assert_eq!(bytes, [1; 16]);
    }

    #[test]
    fn a_dropped_block_is_not_used_again_before_its_fill_has_finished() {
        let pair = pair(false);
        let stream = Stream::create(&pair.gpu).expect("a stream");
        let (block, other) = (
            pair.session.alloc(4096).expect("room"),
            pair.session.alloc(4096).expect("room"),
        );
        let received = received(&pair, &other);
        let (go, gate) = std::sync::mpsc::channel::<()>();
        stream
            .host_function(move || gate.recv().unwrap_or(()))
            .expect("queued");
        stream.fill(&block, 1).expect("queued");
        stream.fill(&received, 1).expect("queued");
        drop((block, received));
        pair.session.collect();
        assert_eq!(
            (pair.session.stats().live_blocks, other.outstanding()),
            (2, 1),
            "the fills have not begun"
        );
        drop(go);
        other
            .wait_released(Some(WATCHDOG))
            .expect("the fill has finished");
        let start = Instant::now();
        while pair.session.stats().live_blocks > 1 {
            assert!(
                start.elapsed() < WATCHDOG,
                "the filled block does not come back"
            );
            pair.session.collect();
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_forked_child_moves_no_bytes() {
        let pair = pair(false);
        let stream = Stream::create(&pair.gpu).expect("a stream");
        let block = pair.session.alloc(16).expect("room");
        let received = received(&pair, &block);
        // SAFETY: `fork` asks that the child of a process with threads does only what is safe
        // there: it frees memory with the C library and compares numbers.
        unsafe {
            harness::holds_in_a_fork(|| {
                let refused = |done: Result<()>| matches!(done, Err(Error::Forked { .. }));
                refused(stream.fill(&block, 1))
                    && refused(stream.write(&block, &[1]))
                    && refused(stream.fill(&received, 1))
                    && refused(stream.read(&received, &mut [0]))
            });
        }
    }

    #[test]
    fn a_range_that_is_empty_or_outside_is_refused() {
        assert_eq!(part_of(10, &(2..5)).ok(), Some((2, 3)));
        assert_eq!(part_of(10, &(..)).ok(), Some((0, 10)));
        assert_eq!(part_of(10, &(3..=9)).ok(), Some((3, 7)));
        for range in [(5, 5), (6, 5), (0, 11), (11, 12)] {
            assert!(part_of(10, &(range.0..range.1)).is_err(), "{range:?}");
        }
        assert!(part_of(10, &(0..=u64::MAX)).is_err());
    }
}
