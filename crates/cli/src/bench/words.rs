//! Words in shared memory that streams write and wait for, and streams held up by one.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_ipc::Gpu;
use gpu_ipc::backend::{HostPtr, RawStream, StreamOp, WordPtr};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::failure::{Failure, Result};

const BYTES: usize = 4096;
/// Past every value that anybody waits for.
const LAST: u64 = 1 << 60;

/// A page of words, registered with the driver.
#[derive(Debug)]
pub struct Words {
    gpu: Gpu,
    start: *mut AtomicU64,
    base: WordPtr,
}

impl Words {
    /// Makes it.
    pub fn new(gpu: &Gpu) -> Result<Words> {
        // SAFETY: `mmap_anonymous` of a null address takes free addresses only.
        let start = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )
        };
        let start = start.map_err(|e| format!("a page of memory: {e}"))?;
        // SAFETY: `register_words` asks for bytes that stay mapped until they are unregistered:
        // `drop` does so first.
        let base = unsafe {
            gpu.backend()
                .register_words(HostPtr(start.expose_provenance()), BYTES)
        };
        match base {
            Ok(base) => Ok(Words {
                gpu: gpu.clone(),
                start: start.cast(),
                base,
            }),
            Err(error) => {
                // SAFETY: `munmap` asks for a mapping that nothing uses: it was not registered.
                let _ = unsafe { munmap(start, BYTES) };
                Err(error.into())
            }
        }
    }

    /// Returns a word's address for streams.
    pub fn word(&self, index: usize) -> WordPtr {
        self.base.word(index % (BYTES / 8))
    }

    fn first(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped, aligned and zeroed at first, and everybody reaches it by
        // atomics or from a stream.
        unsafe { &*self.start }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: `unregister_words` asks for words that no operation is unfinished on: those who
        // queue any settle their streams before they drop this.
        let unregistered = unsafe {
            self.gpu
                .backend()
                .unregister_words(HostPtr(self.start.expose_provenance()))
        };
        if unregistered.is_ok() {
            // SAFETY: `munmap` asks for a mapping that nothing uses: it is unregistered.
            let _ = unsafe { munmap(self.start.cast(), BYTES) };
        }
    }
}

/// Streams that wait until they are let go.
#[derive(Debug)]
pub struct Hold {
    words: Words,
    turn: u64,
}

impl Hold {
    /// Makes one that holds nothing.
    pub fn new(gpu: &Gpu) -> Result<Hold> {
        Ok(Hold {
            words: Words::new(gpu)?,
            turn: 0,
        })
    }

    /// Begins another turn: what waits from here on waits for the next [`let_go`](Hold::let_go).
    pub fn begin(&mut self) {
        self.turn += 1;
    }

    /// Returns what a stream waits for: a word, and the value of this turn.
    pub fn awaited(&self) -> (WordPtr, u64) {
        (self.words.word(0), self.turn)
    }

    /// Queues a wait.
    pub fn stop(&self, stream: RawStream) -> Result<()> {
        let (word, value) = self.awaited();
        // SAFETY: `stream_batch` asks for a live stream, which the caller keeps, and for words in a
        // registration that outlives the operation: `drop` lets everything go first.
        unsafe {
            self.words
                .gpu
                .backend()
                .stream_batch(stream, &[StreamOp::WaitGeq { word, value }])
        }
        .map_err(Failure::from)
    }

    /// Lets all go that wait for this turn.
    pub fn let_go(&self) {
        self.words.first().store(self.turn, Ordering::Release);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A stream that waited for ever would block the driver.
        self.words.first().store(LAST, Ordering::Release);
    }
}
