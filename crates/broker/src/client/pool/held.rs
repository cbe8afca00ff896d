//! A pool that this process holds.

use std::io::pipe;
use std::sync::{Arc, Mutex};

use gpu_api::lock::Acquire;
use gpu_api::{Access, DevicePtr, Error};
use ipc_rc::Stream;
use transport::shared::sealed_file;
use transport::trace_point;

use super::opened::{Opened, check, check_version};
use crate::client::connection::nonsense;
use crate::client::farewell::Farewell;
use crate::client::journal::Journal;
use crate::client::link::Link;
use crate::client::mapped::{address_of, check_stream, note, queue_fill, read_part, regions, span};
use crate::client::retire::Retiring;
use crate::client::writer::Abort;
use crate::error::{ObjectError, Result};
use crate::memory::range::{Range, SwapError};
use crate::object::identity::{Epoch, Identity, check_new_name};
use crate::object::layout::Layout;
use crate::object::manifest::{Manifest, Readers};
use crate::pool::{Key, Previous, Sealed, blocks_of};
use crate::wire::{ToBroker, ToClient, Wanted};

/// A pool that this process holds: memory that it alone writes to, and that the next holder finds as
/// this one left it.
///
/// Contents come in **blocks**, whatever the application calls so: each has a number and a place in
/// the parts. A block is given up by [`invalidate`](Pool::invalidate), then filled by work on
/// streams, then sealed behind that work by [`seal`](Pool::seal). What is sealed is whole, and what
/// is not is of no use to anybody: [`sealed`](Pool::sealed) lists it, after this process died too.
///
/// The hold ends with [`close`](Pool::close) or the drop, behind every stream that was named, and with
/// the death of this process once its GPU work has ended.
///
/// # Examples
///
/// ```no_run
/// use broker::{Client, Layout, PartSpec, pool};
/// use ipc_rc::Stream;
///
/// # fn example(client: &Client) -> Result<(), broker::ObjectError> {
/// let layout = Layout::pack([PartSpec::bytes("kv", 64 * 4_096)?], b"")?;
/// let pool = client.create_pool("kv", layout, pool::bytes_for(64))?;
/// let stream = Stream::create(client.gpu())?;
/// pool.invalidate(3)?;
/// pool.fill("kv", 3 * 4_096, 4_096, 7, &stream)?;
/// pool.seal(3, pool::Key([9; 16]), &stream)?;
/// drop(pool);
///
/// let pool = client.adopt("kv", false)?;
/// assert_eq!((pool.generation(), pool.previous().name()), (2, "closed"));
/// assert_eq!(pool.sealed()?[0].block, 3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pool {
    link: Arc<Link>,
    manifest: Manifest,
    generation: u64,
    previous: Previous,
    base: DevicePtr,
    /// Gone with the close.
    range: Option<Range>,
    farewell: Option<Farewell>,
    streams: Mutex<Vec<Stream>>,
}

impl Pool {
    /// Makes a pool at the broker; it has no holder yet.
    pub(in crate::client) fn create(
        link: &Arc<Link>,
        name: &str,
        layout: Layout,
        journal_bytes: u64,
        readers: Readers,
    ) -> Result<()> {
        link.check_fork()?;
        check_version(link)?;
        check_new_name("the name of a pool", name)?;
        let gpu = link.gpu();
        let identity = Identity::random()?;
        let manifest = Manifest {
            identity,
            name: name.into(),
            epoch: Epoch(0),
            home: None,
            backend: gpu.kind(),
            device: gpu.uuid(),
            owner: 0,
            readers,
            granularity: 0,
            layout: layout.with_journal(journal_bytes)?,
        };
        let draft = sealed_file::create("gpu-ipc-draft", &manifest.encode()?)?;
        let create = |request| ToBroker::Create {
            request,
            identity,
            wanted: Wanted::default(),
        };
        let asked = link.ask_here(create, vec![draft]);
        let may_be_there = matches!(asked, Ok(_) | Err(ObjectError::Gpu(Error::Deadline { .. })));
        let mut abort = Abort::new(link, identity, may_be_there);
        let (ToClient::Created { .. }, _) = asked? else {
            return Err(nonsense());
        };
        match link.ask_here(|request| ToBroker::Commit { request, identity }, Vec::new())? {
            (ToClient::Committed { .. }, _) => {
                abort.disarm();
                Ok(())
            }
            _ => Err(nonsense()),
        }
    }

    pub(in crate::client) fn adopt(
        link: &Arc<Link>,
        name: &str,
        at_same_addresses: bool,
    ) -> Result<Pool> {
        link.check_fork()?;
        check_version(link)?;
        let token = Identity::random()?;
        let (end, line) = pipe().map_err(|e| Error::without_descriptors("pipe", e))?;
        // Told to the broker on every way out but the last: a hold that came late is no one's.
        let mut farewell = Leaving {
            link,
            farewell: Some(Farewell {
                journal: None,
                token,
                name: name.into(),
                _line: line,
            }),
        };
        let question = |request| ToBroker::Adopt {
            request,
            token,
            name: name.into(),
        };
        let (answer, files) = link.ask(question, vec![end.into()])?;
        trace_point!("adopted");
        let gpu = link.gpu();
        let Opened {
            manifest,
            generation,
            previous,
            imported,
            journal,
        } = check(gpu, name, &answer, files, true)?;
        let journal = Journal::of(gpu, journal)?;
        let wanted = DevicePtr(journal.file().address());
        let at = (at_same_addresses && wanted != DevicePtr(0)).then_some(wanted);
        let bytes = manifest.mapped_bytes();
        let mut range =
            Range::reserve_at(gpu, bytes, Access::ReadWrite, at).map_err(|error| match at {
                Some(at) => ObjectError::from(Error::Invalid {
                    what: "the addresses of a pool",
                    got: format!(
                        "{:#x} for {bytes} bytes, where its last holder had it: {error}",
                        at.0
                    ),
                    must: "free in this process; adopt earlier in its life, or at other addresses",
                }),
                None => error.into(),
            })?;
        if let Err(SwapError::Unchanged(error) | SwapError::Poisoned(error)) = range.map(imported) {
            link.retire(Retiring::new(gpu, range, &[]));
            return Err(error.into());
        }
        let base = range.base();
        journal.file().set_address(base.0);
        trace_point!("pool.mapped");
        let mut farewell = farewell.farewell.take();
        if let Some(farewell) = &mut farewell {
            farewell.journal = Some(journal);
        }
        Ok(Pool {
            link: link.clone(),
            manifest,
            generation,
            previous,
            base,
            range: Some(range),
            farewell,
            streams: Mutex::default(),
        })
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// Returns the identity: the same for every holder.
    pub fn identity(&self) -> Identity {
        self.manifest.identity
    }

    /// Returns the parts' names, types, shapes and offsets.
    pub fn layout(&self) -> &Layout {
        &self.manifest.layout
    }

    /// Returns how often the pool was adopted, this time included.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns how the hold before this one ended.
    pub fn previous(&self) -> Previous {
        self.previous
    }

    /// Counts the blocks that the journal has entries for.
    pub fn blocks(&self) -> u32 {
        blocks_of(self.manifest.layout.journal())
    }

    /// Returns the address of a part, which the GPU and, on the host backend, the CPU may write to.
    ///
    /// Work on it is named with [`used_on`](Pool::used_on), by a seal or at the
    /// [`close`](Pool::close): work on a stream that was not named is undefined behaviour.
    pub fn device_ptr(&self, part: &str) -> Option<DevicePtr> {
        address_of(&self.manifest, self.base, part)
    }

    /// Lists the address and the bytes of each region: all parts lie in them.
    pub fn regions(&self) -> Vec<(DevicePtr, u64)> {
        regions(&self.manifest, self.base)
    }

    /// Notes that work on this stream touches the pool.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a stream of another device.
    pub fn used_on(&self, stream: &Stream) -> Result<()> {
        self.link.check_fork()?;
        note(self.link.gpu(), &self.streams, stream)
    }

    /// Gives a block's contents up: from here on it may be filled. Call it before the filling is
    /// queued.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a block that the journal has no entry for, [`Error::Exhausted`] for
    /// one that was given up 2^32 - 1 times, [`Error::Forked`].
    pub fn invalidate(&self, block: u32) -> Result<()> {
        self.link.check_fork()?;
        Ok(self.journal()?.invalidate(block)?)
    }

    /// Queues the seal of a block behind the work on a stream: once that has finished, the block is
    /// whole, and listed under its key.
    ///
    /// # Errors
    ///
    /// As [`seal_all`](Pool::seal_all).
    pub fn seal(&self, block: u32, key: Key, stream: &Stream) -> Result<()> {
        self.seal_all(&[(block, key)], stream)
    }

    /// As [`seal`](Pool::seal), for many blocks in one batch.
    ///
    /// On a device whose streams write no words this waits for the stream.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a block that was not invalidated since its last seal, is named twice
    /// or has no entry, and for the per-thread default stream (handle 2); [`Error::Mismatch`] for a
    /// stream of another device; [`Error::Capturing`]: then none is sealed. The driver's error: then
    /// some may be, and the others must be invalidated again.
    pub fn seal_all(&self, blocks: &[(u32, Key)], stream: &Stream) -> Result<()> {
        self.link.check_fork()?;
        check_stream(self.link.gpu(), stream)?;
        stream.refuse_per_thread()?;
        stream.refuse_capture("seal before the capture begins or after it ended")?;
        if blocks.is_empty() {
            return Ok(());
        }
        // Before the seals: a call that fails may have queued some all the same.
        note(self.link.gpu(), &self.streams, stream)?;
        Ok(self.journal()?.seal(blocks, stream)?)
    }

    /// Seals a block by the CPU, while the work that fills it may be under way, as a holder could that
    /// lies: what is listed is not whole then. For tests.
    ///
    /// # Errors
    ///
    /// As [`seal_all`](Pool::seal_all).
    #[doc(hidden)]
    pub fn seal_before_the_work_has_ended(&self, block: u32, key: Key) -> Result<()> {
        Ok(self.journal()?.seal_here(&[(block, key)])?)
    }

    /// Lists the blocks that are whole at this moment, in the order of their numbers.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`].
    pub fn sealed(&self) -> Result<Vec<Sealed>> {
        self.link.check_fork()?;
        Ok(self.journal()?.sealed())
    }

    fn journal(&self) -> Result<&Journal> {
        let farewell = self.farewell.as_ref();
        farewell
            .and_then(|farewell| farewell.journal.as_ref())
            .ok_or_else(nonsense)
    }

    /// Queues a fill: sets bytes of a part, from `offset` on, to `byte`, after the work that is
    /// queued on the stream, and returns at once. The stream counts as [used](Pool::used_on).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range that does not lie in a part, and for the per-thread default
    /// stream; [`Error::Mismatch`] for a stream of another device; [`Error::Capturing`]; the
    /// driver's error.
    pub fn fill(&self, part: &str, offset: u64, len: u64, byte: u8, stream: &Stream) -> Result<()> {
        self.link.check_fork()?;
        let at = span(&self.manifest, self.base, part, (offset, len), "fill")?;
        // SAFETY: `queue_fill` asks for
        // - a stream that lives: the caller keeps it;
        // - a range that stays mapped until the streams are done: it lies in a part of the
        //   mapped range, which is unmapped behind the streams that were noted.
        unsafe { queue_fill(self.link.gpu(), &self.streams, stream, (at, len), byte) }
    }

    /// Copies bytes from the host into a part from `offset` on, and waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range that does not lie in a part; the driver's error.
    pub fn write_part(&self, part: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        self.link.check_fork()?;
        let len = bytes.len() as u64;
        let at = span(&self.manifest, self.base, part, (offset, len), "write to")?;
        if bytes.is_empty() {
            return Ok(());
        }
        let gpu = self.link.gpu();
        let stream = Stream::create(gpu)?;
        // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until the copy
        // has finished: the range lies in a part of what is mapped, `bytes` is as long, and both
        // outlive the wait below.
        unsafe {
            gpu.backend()
                .copy_to_device(stream.raw(), at, bytes.as_ptr(), bytes.len())
        }?;
        Ok(stream.synchronize()?)
    }

    /// Copies a piece of a part to the host, and waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range that does not lie in a part; the driver's error.
    pub fn read_part(&self, part: &str, offset: u64, bytes: &mut [u8]) -> Result<()> {
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

    /// Ends the hold: waits for `streams` and those that were named before, unmaps, and returns when
    /// the broker has noted it. Then another process may adopt the pool.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] and [`Error::Mismatch`] for a stream, and the driver's error for work
    /// that cannot be waited for: then the hold ends with this process. [`Error::Deadline`] while
    /// the broker is away: it is told when it is back.
    pub fn close(mut self, streams: &[&Stream]) -> Result<()> {
        self.link.check_fork()?;
        for stream in streams {
            self.used_on(stream)?;
        }
        for stream in self.streams.acquire().iter() {
            stream.refuse_capture("end the capture before the pool is closed")?;
            stream.synchronize()?;
        }
        self.streams.acquire().clear();
        if let Some(range) = self.range.take() {
            // SAFETY: `release` asks that no work touches the range: every stream that was named
            // was waited for, and the pool, by which more could be queued, goes with this call.
            unsafe { range.release() };
        }
        trace_point!("pool.unmapped");
        let Some(farewell) = self.farewell.take() else {
            return Ok(());
        };
        self.link.ask(farewell.take(), Vec::new()).map(drop)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let Some(range) = self.range.take() else {
            return;
        };
        let streams = std::mem::take(&mut *self.streams.acquire());
        let mut retiring = Retiring::new(self.link.gpu(), range, &streams);
        retiring.farewell = self.farewell.take();
        self.link.retire(retiring);
    }
}

/// Tells the broker that a hold is not wanted, unless it is taken.
struct Leaving<'a> {
    link: &'a Arc<Link>,
    farewell: Option<Farewell>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if let Some(farewell) = self.farewell.take() {
            self.link.leave(farewell);
        }
    }
}
