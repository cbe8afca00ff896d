//! The pool, what was handed out of it, and how memory is asked for and goes back.

// Tests: `crates/allocators/tests/driver_pool.rs`.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use gpu_api::lock::Acquire;
use gpu_api::{DevicePtr, Error, Gpu, PoolUsage, RawPool, RawStream, Result, StreamIdentity};

use crate::bfc::Counters;
use crate::request::foreign;
use crate::{Budget, DeviceBytes, Placed, Relief, Request, Trim, Work};

/// What the driver aligns to, and lengths are rounded up to.
const GRANULE: u64 = 256;

/// How many pieces of pending memory an allocation asks about before it asks the driver.
const QUESTIONS: usize = 16;

/// How long a request that may wait naps between two looks, at first and at most.
const NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(16));

/// How long the thread of a dropped allocator naps between two looks at the work, at first and at
/// most.
const LATE_NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(128));

/// A [`DriverPool`](super::DriverPool) but for its drop, which may have to leave it to a thread
/// that waits for work.
pub(super) struct Core {
    pub(super) name: String,
    pub(super) gpu: Gpu,
    pub(super) pool: RawPool,
    /// The stream of its own.
    pub(super) order: RawStream,
    pub(super) budget: Option<Arc<Budget>>,
    pub(super) relief: Option<Arc<Relief>>,
    pub(super) state: Mutex<PoolTables>,
    pub(super) bytes: OnceLock<Arc<DeviceBytes>>,
}

#[derive(Default)]
pub(super) struct PoolTables {
    pub(super) live: BTreeMap<u64, Live>,
    /// Given back, with work that is not known to have finished.
    pub(super) pending: Vec<Pending>,
    pub(super) streams: HashMap<StreamIdentity, RawStream>,
    pub(super) counters: Counters,
    number: u64,
}

/// Memory that is handed out.
pub(super) struct Live {
    pub(super) placed: Placed,
    piece: Piece,
    /// Noted by [`Allocator::record_work`].
    pub(super) work: Vec<Work>,
}

/// Memory of the pool, as the driver gave it.
#[derive(Clone, Copy)]
struct Piece {
    base: DevicePtr,
    len: u64,
}

pub(super) struct Pending {
    piece: Piece,
    work: Vec<Work>,
}

impl Core {
    pub(super) fn state(&self) -> MutexGuard<'_, PoolTables> {
        self.state.acquire()
    }

    pub(super) fn check(&self) -> Result<()> {
        self.gpu.check_fork()
    }

    pub(super) fn usage(&self) -> Result<PoolUsage> {
        // SAFETY: `pool_usage` asks for a live pool: it is destroyed by the drop alone.
        unsafe { self.gpu.backend().pool_usage(self.pool) }
    }

    pub(super) fn alloc(&self, request: Request) -> Result<Placed> {
        request.check()?;
        self.check()?;
        self.settle(QUESTIONS);
        let Some(len) = len_for(&request) else {
            return Err(self.out_of_memory(
                request.bytes,
                "no allocation is that large or so aligned, ask for less",
            ));
        };
        self.afford(len, &request)?;
        let on = request
            .stream
            .and_then(|stream| self.state().streams.get(&stream).copied());
        match self.take(len, on, &request) {
            Ok(base) => Ok(self.hand_out(Piece { base, len }, &request)),
            Err(error) => {
                self.forgo(len);
                Err(self.explain(error))
            }
        }
    }

    /// Takes bytes of the budget; where they are too few, after what is pending and everybody else
    /// has given theirs.
    fn afford(&self, len: u64, request: &Request) -> Result<()> {
        let Some(budget) = &self.budget else {
            return Ok(());
        };
        if budget.take(len).is_ok() {
            return Ok(());
        }
        self.settle(usize::MAX);
        if let Some(relief) = &self.relief {
            relief.collect();
            relief.trim();
        }
        let mut nap = NAPS.0;
        loop {
            let now = Instant::now();
            let look = request
                .until
                .filter(|&until| now < until)
                .map(|until| until.min(now + nap));
            match budget.take_until(len, look) {
                Ok(()) => return Ok(()),
                Err(free) if look.is_none() || len > budget.limit() => {
                    let hint = format!("of a budget of {} bytes", budget.limit());
                    return Err(Error::OutOfMemory {
                        device: self.gpu.device(),
                        asked: request.bytes,
                        free,
                        hint,
                    });
                }
                // Work that finishes wakes nobody.
                Err(_) => self.settle(usize::MAX),
            };
            nap = (2 * nap).min(NAPS.1);
        }
    }

    fn forgo(&self, len: u64) {
        if let Some(budget) = &self.budget {
            budget.give_back(len);
        }
    }

    /// Asks the driver, and where it has no room everybody who may have some.
    fn take(&self, len: u64, on: Option<RawStream>, request: &Request) -> Result<DevicePtr> {
        let mut error = match self.ask(len, on) {
            Err(error @ Error::OutOfMemory { .. }) => error,
            other => return other,
        };
        let mut nap = NAPS.0;
        loop {
            self.trim()?;
            if let Some(relief) = &self.relief {
                relief.collect();
                relief.trim();
            }
            let asked = match self.ask(len, on) {
                Err(Error::OutOfMemory { .. }) => self
                    .relief
                    .as_ref()
                    .map_or(0, |relief| relief.ask_to_unmap()),
                other => return other,
            };
            let now = Instant::now();
            let Some(until) = request
                .until
                .filter(|&until| now < until && len <= self.gpu.info().total_bytes)
            else {
                if asked > 0
                    && let Some(relief) = &self.relief
                {
                    relief.trim();
                    error = match self.ask(len, on) {
                        Err(error @ Error::OutOfMemory { .. }) => error,
                        other => return other,
                    };
                }
                return Err(error);
            };
            thread::sleep(nap.min(until - now));
            nap = (2 * nap).min(NAPS.1);
        }
    }

    /// Asks the driver once.
    fn ask(&self, len: u64, on: Option<RawStream>) -> Result<DevicePtr> {
        let backend = self.gpu.backend();
        let stream = on.unwrap_or(self.order);
        // SAFETY: `pool_alloc` asks for a live pool, which it is until the drop, and a live stream
        // of its device: our own, or one that `know_stream` has its caller's word for.
        let allocation = unsafe { backend.pool_alloc(self.pool, stream, len) }?;
        if on.is_some() {
            return Ok(allocation.base);
        }
        // SAFETY: `synchronize_stream` asks for a live stream: our own, until the drop.
        let passed = unsafe { backend.synchronize_stream(self.order) };
        if let Err(error) = passed {
            // SAFETY: `pool_free` asks for memory of `pool_alloc`, once, that nothing uses: nobody
            // has seen it yet.
            if let Err(error) = unsafe { backend.pool_free(self.order, allocation.base) } {
                tracing::warn!(%error, "memory of a pool is leaked");
            }
            return Err(error);
        }
        Ok(allocation.base)
    }

    fn hand_out(&self, piece: Piece, request: &Request) -> Placed {
        let address = piece.base.0.next_multiple_of(request.align.max(1));
        let mut state = self.state();
        state.number += 1;
        let bytes = request.bytes.next_multiple_of(GRANULE);
        let placed = Placed {
            address,
            bytes,
            asked: request.bytes,
            number: state.number,
            token: (),
        };
        state.live.insert(
            address,
            Live {
                placed,
                piece,
                work: Vec::new(),
            },
        );
        state.counters.allocated(bytes, request.bytes);
        placed
    }

    pub(super) fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.check()?;
        let (piece, work, in_order) = {
            let mut state = self.state();
            let live = state
                .live
                .remove(&address)
                .ok_or_else(|| foreign(address))?;
            state.counters.freed(live.placed.bytes, live.placed.asked);
            let mut all = live.work;
            all.extend(work);
            let first = all.first().and_then(Work::stream);
            let only = first.filter(|_| all.iter().all(|work| work.stream() == first));
            (
                live.piece,
                all,
                only.and_then(|stream| state.streams.get(&stream).copied()),
            )
        };
        if let Some(stream) = in_order {
            match self.give_back(piece, stream) {
                // It is captured: its work so far is waited for instead.
                Err(Error::Capturing { .. }) => {}
                other => return other,
            }
        }
        if in_order.is_none() && work.iter().all(Work::is_done) {
            return self.give_back(piece, self.order);
        }
        self.state().pending.push(Pending { piece, work });
        Ok(())
    }

    /// Hands a piece to the driver, for reuse behind the work of a stream.
    fn give_back(&self, piece: Piece, stream: RawStream) -> Result<()> {
        // SAFETY: `pool_free` asks for memory of `pool_alloc`, once: the table had it and it was
        // taken out; for a live stream: our own, or one that `know_stream` has its caller's word
        // for; and that other work on the memory has finished: all of it was asked, or is that
        // stream's.
        let freed = unsafe { self.gpu.backend().pool_free(stream, piece.base) };
        match &freed {
            Ok(()) => self.forgo(piece.len),
            Err(Error::Capturing { .. }) => {}
            // What failed is leaked and stays counted.
            Err(_) => self.state().counters.leaked += piece.len,
        }
        freed
    }

    /// Hands what is no longer worked on to the driver; asks about `most` pieces.
    pub(super) fn settle(&self, most: usize) {
        let mut asked = {
            let mut state = self.state();
            if state.pending.is_empty() {
                return;
            }
            let most = most.min(state.pending.len());
            let rest = state.pending.split_off(most);
            mem::replace(&mut state.pending, rest)
        };
        // With no lock held: what stands for work is the caller's.
        asked.retain(|pending| {
            let is_done = pending.work.iter().all(Work::is_done);
            if is_done && let Err(error) = self.give_back(pending.piece, self.order) {
                tracing::warn!(allocator = self.name, %error, "memory of a pool is leaked");
            }
            !is_done
        });
        self.state().pending.append(&mut asked);
    }

    fn out_of_memory(&self, asked: u64, hint: &str) -> Error {
        Error::OutOfMemory {
            device: self.gpu.device(),
            asked,
            free: 0,
            hint: hint.into(),
        }
    }

    /// Adds what the pool holds to an error.
    #[cold]
    fn explain(&self, error: Error) -> Error {
        let Error::OutOfMemory {
            device,
            asked,
            free,
            hint,
        } = error
        else {
            return error;
        };
        let usage = self.usage().unwrap_or_default();
        let in_use = self.state().counters.in_use;
        let PoolUsage { reserved, used, .. } = usage;
        let hint = format!(
            "{hint}; {}: in use {in_use}, reserved {reserved}, of which {used} are out",
            self.name
        );
        Error::OutOfMemory {
            device,
            asked,
            free,
            hint,
        }
    }

    /// Stays until the work on what was given back has finished.
    pub(super) fn finish(&self) {
        let mut nap = LATE_NAPS.0;
        while self.check().is_ok() && !self.state().pending.is_empty() {
            thread::sleep(nap);
            nap = (2 * nap).min(LATE_NAPS.1);
            self.settle(usize::MAX);
        }
    }
}

/// Returns the bytes to ask the driver for, with room to align.
fn len_for(request: &Request) -> Option<u64> {
    let slack = if request.align > GRANULE {
        request.align
    } else {
        0
    };
    let len = request
        .bytes
        .checked_next_multiple_of(GRANULE)?
        .checked_add(slack)?;
    // The kernel half of the address space is nobody's.
    (len <= i64::MAX.cast_unsigned()).then_some(len)
}

impl Trim for Core {
    fn trim(&self) -> Result<u64> {
        self.check()?;
        self.settle(usize::MAX);
        let backend = self.gpu.backend();
        let before = self.usage()?.reserved;
        // SAFETY: `synchronize_stream` asks for a live stream: our own, until the drop.
        unsafe { backend.synchronize_stream(self.order) }?;
        // SAFETY: `trim_pool` asks for a live pool: it is destroyed by the drop alone.
        unsafe { backend.trim_pool(self.pool, 0) }?;
        Ok(before.saturating_sub(self.usage()?.reserved))
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.check().is_err() {
            return;
        }
        let backend = self.gpu.backend();
        // SAFETY: `destroy_pool` asks for a live pool: this is its owner's drop. Memory of it that
        // is in use stays.
        if let Err(error) = unsafe { backend.destroy_pool(self.pool) } {
            tracing::warn!(allocator = self.name, %error, "a pool is leaked");
        }
        // SAFETY: `destroy_stream` asks for a live stream that nobody uses afterwards: likewise.
        if let Err(error) = unsafe { backend.destroy_stream(self.order) } {
            tracing::warn!(allocator = self.name, %error, "a stream is leaked");
        }
    }
}
