//! The allocators that are compared.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Mutex;

use allocators::{Allocator, Bfc, BfcOptions, Growth, Placed, Request, Simulated, ThreadHeaps};

const UNIT: u64 = 256;
/// Bytes that everything fits in. No power of two, which every first cut would take the rest below.
const ROOM: u64 = 500 << 30;

/// What a script needs of an allocator.
pub trait Subject {
    type Chunk;
    fn alloc(&mut self, bytes: u64) -> Self::Chunk;
    fn free(&mut self, chunk: Self::Chunk);
    fn end(chunk: &Self::Chunk) -> u64;
}

/// This crate's.
pub struct Ours(pub Bfc<Simulated>);

impl Ours {
    fn with(options: BfcOptions) -> Ours {
        Ours(Bfc::new(
            options.limit(ROOM).growth(Growth::Whole),
            Simulated::new(),
        ))
    }

    /// As it comes: with slack below an eighth of the request.
    pub fn new() -> Ours {
        Ours::with(BfcOptions::new("bfc"))
    }

    /// With TensorFlow's rule, which leaves slack below the size of the request.
    pub fn slack() -> Ours {
        Ours::with(BfcOptions::new("bfc").max_slack_share(1.0))
    }

    /// With all slack cut off, as the others do and as the arena nearly does.
    pub fn cutting() -> Ours {
        Ours::with(BfcOptions::new("bfc").max_slack_share(0.0))
    }
}

impl Subject for Ours {
    type Chunk = Placed;

    fn alloc(&mut self, bytes: u64) -> Placed {
        self.0.alloc(Request::new(bytes)).expect("room")
    }

    fn free(&mut self, chunk: Placed) {
        self.0.free(chunk.address).expect("in use");
    }

    fn end(chunk: &Placed) -> u64 {
        chunk.address + chunk.bytes - Simulated::BASE
    }
}

/// This crate's with a heap for each processor.
pub struct ByThread(ThreadHeaps<Simulated>);

impl ByThread {
    pub fn new() -> ByThread {
        let heaps = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let options = BfcOptions::new("heaps").limit(ROOM).growth(Growth::Whole);
        ByThread(ThreadHeaps::new(options, heaps, Simulated::new()))
    }
}

impl Subject for ByThread {
    type Chunk = Placed;

    fn alloc(&mut self, bytes: u64) -> Placed {
        self.0.place(Request::new(bytes)).expect("room")
    }

    fn free(&mut self, chunk: Placed) {
        self.0.free(chunk.address).expect("in use");
    }

    fn end(chunk: &Placed) -> u64 {
        chunk.address + chunk.bytes - Simulated::BASE
    }
}

/// Sebastian Aaltonen's, ported.
pub struct Offset(offset_allocator::Allocator<u32>);

impl Offset {
    pub fn new(live: usize) -> Offset {
        // Free chunks lie between live ones, and need numbers too.
        let numbers = (live as u32 + 16) * 3;
        Offset(offset_allocator::Allocator::with_max_allocs(
            (ROOM / UNIT) as u32,
            numbers,
        ))
    }
}

impl Subject for Offset {
    type Chunk = (offset_allocator::Allocation<u32>, u32);

    fn alloc(&mut self, bytes: u64) -> Self::Chunk {
        let units = bytes.div_ceil(UNIT) as u32;
        (self.0.allocate(units).expect("room"), units)
    }

    fn free(&mut self, (chunk, _): Self::Chunk) {
        self.0.free(chunk);
    }

    fn end(&(chunk, units): &Self::Chunk) -> u64 {
        (u64::from(chunk.offset) + u64::from(units)) * UNIT
    }
}

/// The one of the gfx project.
pub struct Range(range_alloc::RangeAllocator<u64>);

impl Range {
    pub fn new() -> Range {
        Range(range_alloc::RangeAllocator::new(0..ROOM / UNIT))
    }
}

impl Subject for Range {
    type Chunk = std::ops::Range<u64>;

    fn alloc(&mut self, bytes: u64) -> Self::Chunk {
        self.0.allocate_range(bytes.div_ceil(UNIT)).expect("room")
    }

    fn free(&mut self, chunk: Self::Chunk) {
        self.0.free_range(chunk);
    }

    fn end(chunk: &Self::Chunk) -> u64 {
        chunk.end * UNIT
    }
}

/// Hands out one address after the other and takes nothing back: what is left is what is around it.
pub struct Nothing(u64);

impl Nothing {
    pub fn new() -> Nothing {
        Nothing(0)
    }
}

impl Subject for Nothing {
    type Chunk = u64;

    fn alloc(&mut self, bytes: u64) -> u64 {
        self.0 += bytes.next_multiple_of(UNIT);
        self.0
    }

    fn free(&mut self, _: u64) {}

    fn end(&end: &u64) -> u64 {
        end
    }
}

/// What an allocator of a process does around another: a lock, chunks found by their address, and
/// counts.
pub struct SameJob<S: Subject> {
    shared: Mutex<Shared<S>>,
}

struct Shared<S: Subject> {
    subject: S,
    chunks: HashMap<u64, (S::Chunk, u64)>,
    allocs: u64,
    in_use: u64,
    peak: u64,
    largest: u64,
}

impl<S: Subject> SameJob<S> {
    pub fn new(subject: S) -> SameJob<S> {
        let shared = Shared {
            subject,
            chunks: HashMap::new(),
            allocs: 0,
            in_use: 0,
            peak: 0,
            largest: 0,
        };
        SameJob {
            shared: Mutex::new(shared),
        }
    }
}

impl<S: Subject<Chunk: Send> + Send> Subject for SameJob<S> {
    /// The address and the bytes.
    type Chunk = (u64, u64);

    fn alloc(&mut self, bytes: u64) -> (u64, u64) {
        (self.take(bytes), bytes.next_multiple_of(UNIT))
    }

    fn free(&mut self, (address, _): (u64, u64)) {
        self.give(address);
    }

    fn end(&(address, bytes): &(u64, u64)) -> u64 {
        address + bytes
    }
}

/// An allocator that several threads may use at once.
pub trait Common: Sync {
    /// Returns an address.
    fn take(&self, bytes: u64) -> u64;
    fn give(&self, address: u64);
}

impl Common for Ours {
    fn take(&self, bytes: u64) -> u64 {
        self.0.alloc(Request::new(bytes)).expect("room").address
    }

    fn give(&self, address: u64) {
        self.0.free(address).expect("in use");
    }
}

impl Common for ByThread {
    fn take(&self, bytes: u64) -> u64 {
        self.0.place(Request::new(bytes)).expect("room").address
    }

    fn give(&self, address: u64) {
        self.0.free(address).expect("in use");
    }
}

impl<S: Subject<Chunk: Send> + Send> Common for SameJob<S> {
    fn take(&self, bytes: u64) -> u64 {
        let mut guard = self.shared.lock().expect("no panic");
        let shared = &mut *guard;
        let chunk = shared.subject.alloc(bytes);
        let rounded = bytes.next_multiple_of(UNIT);
        let address = S::end(&chunk) - rounded;
        shared.chunks.insert(address, (chunk, rounded));
        shared.allocs += 1;
        shared.in_use += rounded;
        shared.peak = shared.peak.max(shared.in_use);
        shared.largest = shared.largest.max(rounded);
        address
    }

    fn give(&self, address: u64) {
        let mut guard = self.shared.lock().expect("no panic");
        let shared = &mut *guard;
        let (chunk, bytes) = shared.chunks.remove(&address).expect("in use");
        shared.subject.free(chunk);
        shared.in_use -= bytes;
    }
}
