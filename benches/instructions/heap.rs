//! A heap with many live chunks, and random pairs of one free and one allocation.

use std::cell::Cell;
use std::hint::black_box;
use std::num::NonZeroUsize;

use gpu_ipc::allocators::{
    Allocator as _, Bfc, BfcOptions, Growth, Request, Simulated, ThreadHeaps,
};

/// Bytes that everything fits in.
const ROOM: u64 = 512 << 30;

/// Best fit over addresses without memory behind them.
pub type OneHeap = Bfc<Simulated>;

/// The same with a heap for each of two threads.
pub type HeapForEach = ThreadHeaps<Simulated>;

/// What is counted: an allocator's own calls, as a program that names its type makes them.
pub trait Subject {
    fn take(&self, bytes: u64) -> u64;
    fn give(&self, address: u64);
}

impl Subject for OneHeap {
    fn take(&self, bytes: u64) -> u64 {
        self.alloc(Request::new(bytes)).expect("room").address
    }

    fn give(&self, address: u64) {
        self.free(address).expect("in use");
    }
}

impl Subject for HeapForEach {
    fn take(&self, bytes: u64) -> u64 {
        self.place(Request::new(bytes)).expect("room").address
    }

    fn give(&self, address: u64) {
        self.free(address).expect("in use");
    }
}

/// An allocator and what is live in it.
pub struct Heap<A> {
    allocator: A,
    held: Vec<Cell<u64>>,
    /// A fixed sequence: xorshift.
    random: u64,
}

fn options() -> BfcOptions {
    BfcOptions::new("heap").limit(ROOM).growth(Growth::Whole)
}

impl Heap<OneHeap> {
    /// Makes a heap with this many live chunks.
    pub fn new(live: usize) -> Heap<OneHeap> {
        Heap::filled(Bfc::new(options(), Simulated::new()), live)
    }
}

impl Heap<HeapForEach> {
    /// Makes the same with a heap for each of two threads; all chunks are the calling one's.
    pub fn for_threads(live: usize) -> Heap<HeapForEach> {
        let heaps = NonZeroUsize::new(2).expect("two");
        Heap::filled(ThreadHeaps::new(options(), heaps, Simulated::new()), live)
    }
}

impl<A: Subject> Heap<A> {
    fn filled(allocator: A, live: usize) -> Heap<A> {
        let mut heap = Heap {
            allocator,
            held: Vec::with_capacity(live),
            random: 0x9e37_79b9_7f4a_7c15,
        };
        for _ in 0..live {
            let bytes = heap.bytes();
            heap.held.push(Cell::new(heap.allocator.take(bytes)));
        }
        // A heap that was just filled has hardly a hole.
        for pair in heap.plan(2 * live) {
            heap.pair(pair);
        }
        heap
    }

    /// Chooses what is freed in each of some pairs, and what is asked for then.
    pub fn plan(&mut self, pairs: usize) -> Vec<(usize, u64)> {
        (0..pairs)
            .map(|_| {
                (
                    (self.number() % self.held.len() as u64) as usize,
                    self.bytes(),
                )
            })
            .collect()
    }

    /// Frees a chunk and allocates another.
    pub fn pair(&self, (at, bytes): (usize, u64)) {
        let held = &self.held[at];
        self.allocator.give(held.get());
        held.set(black_box(self.allocator.take(bytes)));
    }

    /// Returns a size from 256 B to 1 MiB, as many of each power of two.
    fn bytes(&mut self) -> u64 {
        let least = 256 << (self.number() % 12);
        least + self.number() % least
    }

    fn number(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}
