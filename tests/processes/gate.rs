//! A stream that stands still until it is let go, as behind a kernel that runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};

use gpu_ipc::backend::{HostPtr, StreamOp};
use gpu_ipc::{Gpu, Stream};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

const PAGE: usize = 4096;

/// Holds a stream up. The stream goes on when this is dropped.
///
/// On a device with stream words it waits for a word. A host function that does not return would do
/// as well on the host, but not on a GPU: there one thread of the driver runs them all.
pub struct Gate {
    word: Option<&'static AtomicU64>,
    _function: Option<Sender<()>>,
}

impl Gate {
    /// Holds up what is queued on `stream` from this moment on.
    pub fn close(gpu: &Gpu, stream: &Stream) -> Gate {
        if !gpu.caps().stream_waits {
            let (open, gate) = channel::<()>();
            let wait = Box::new(move || {
                let _ = gate.recv();
            });
            // SAFETY: `host_function` asks for a live stream that nobody captures: the caller keeps
            // it until the gate opens.
            unsafe { gpu.backend().host_function(stream.raw(), wait) }.expect("queued");
            return Gate {
                word: None,
                _function: Some(open),
            };
        }
        // Mapped and registered until the process ends: nobody knows when the stream has read the
        // word. SAFETY: `mmap_anonymous` at no address of ours asks for nothing.
        let page = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )
        }
        .expect("a page");
        // SAFETY: `AtomicU64::from_ptr` asks for aligned words that stay valid: a page is, and it
        // is never unmapped.
        let word = unsafe { AtomicU64::from_ptr(page.cast()) };
        // SAFETY: `register_words` asks for bytes that stay mapped: as above.
        let words = unsafe { gpu.backend().register_words(HostPtr(page as usize), PAGE) }
            .expect("registered");
        let wait = StreamOp::WaitGeq {
            word: words.word(0),
            value: 1,
        };
        // SAFETY: `stream_batch` asks for a live stream, which the caller keeps, and a registered
        // word.
        unsafe { gpu.backend().stream_batch(stream.raw(), &[wait]) }.expect("queued");
        Gate {
            word: Some(word),
            _function: None,
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(word) = self.word {
            word.store(1, Ordering::Release);
        }
    }
}
