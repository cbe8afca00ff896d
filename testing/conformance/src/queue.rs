//! Streams and copies: what is queued runs in order, later.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use gpu_ipc::Gpu;
use gpu_ipc::backend::{Allocation, CaptureStatus, DevicePtr, RawStream};

use crate::{Case, wait_until};

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "queue::copies_and_fills_run_in_order",
        run: copies,
    },
    Case {
        name: "queue::host_functions_run_in_order",
        run: host_functions,
    },
    Case {
        name: "queue::a_host_functions_panic_ends_in_it",
        run: panicking,
    },
    Case {
        name: "queue::queued_is_not_done",
        run: queued_is_not_done,
    },
    // Not held up meanwhile: AMD's call waits for what is queued, and only a backend's own test
    // says how long.
    Case {
        name: "queue::what_is_queued_runs_although_the_stream_is_destroyed",
        run: destroyed,
    },
    Case {
        name: "queue::an_identity_is_never_used_again",
        run: identities,
    },
    Case {
        name: "queue::a_plain_stream_is_not_capturing",
        run: not_capturing,
    },
];

/// A stream that is destroyed when it is dropped.
pub(crate) struct Queue<'a> {
    gpu: &'a Gpu,
    raw: RawStream,
}

impl<'a> Queue<'a> {
    pub fn new(gpu: &'a Gpu) -> Queue<'a> {
        Queue {
            gpu,
            raw: gpu.backend().create_stream(gpu.device()).expect("a stream"),
        }
    }

    pub fn raw(&self) -> RawStream {
        self.raw
    }

    pub fn synchronize(&self) {
        // SAFETY: `synchronize_stream` asks for a live stream: `self` keeps it.
        unsafe { self.gpu.backend().synchronize_stream(self.raw) }.expect("it runs");
    }

    pub fn is_idle(&self) -> bool {
        // SAFETY: `query_stream` asks for a live stream: `self` keeps it.
        unsafe { self.gpu.backend().query_stream(self.raw) }.expect("it tells")
    }

    pub fn call(&self, function: impl FnOnce() + Send + 'static) {
        // SAFETY: `host_function` asks for a live stream that nobody captures: `self` keeps it.
        unsafe {
            self.gpu
                .backend()
                .host_function(self.raw, Box::new(function))
        }
        .expect("it queues");
    }

    /// Holds up the stream until the result is dropped.
    pub fn hold(&self) -> Sender<()> {
        let (go, gate) = channel::<()>();
        self.call(move || {
            // An error is the sign: the other end was dropped.
            let _ = gate.recv();
        });
        go
    }

    /// Writes 8 bytes and waits for it.
    pub fn write(&self, to: DevicePtr, value: u64) {
        let bytes = value.to_le_bytes();
        // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until it is
        // done: it is waited for.
        unsafe {
            self.gpu
                .backend()
                .copy_to_device(self.raw, to, bytes.as_ptr(), 8)
        }
        .expect("it queues");
        self.synchronize();
    }

    /// Reads 8 bytes.
    pub fn read(&self, from: DevicePtr) -> u64 {
        let mut bytes = [0; 8];
        // SAFETY: `copy_to_host` asks for a live stream and ranges that are valid until it is done:
        // it is waited for.
        unsafe {
            self.gpu
                .backend()
                .copy_to_host(self.raw, bytes.as_mut_ptr(), from, 8)
        }
        .expect("it queues");
        self.synchronize();
        u64::from_le_bytes(bytes)
    }
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        // SAFETY: `destroy_stream` asks for a live stream that nobody uses afterwards: its owner
        // goes.
        let _ = unsafe { self.gpu.backend().destroy_stream(self.raw) };
    }
}

/// Allocates the way the device prefers.
pub(crate) fn alloc(gpu: &Gpu, len: u64) -> Allocation {
    let sharing = gpu.default_sharing().expect("the device shares");
    gpu.backend()
        .alloc(gpu.device(), len, sharing)
        .expect("there is room")
}

/// Frees what nobody uses any more.
pub(crate) fn free(gpu: &Gpu, allocation: Allocation) {
    // SAFETY: `free` asks for an allocation that was not freed and that nobody uses: a case frees
    // what it made, last.
    unsafe { gpu.backend().free(allocation.base) }.expect("it frees");
}

fn copies(gpu: &Gpu) {
    let (queue, memory) = (Queue::new(gpu), alloc(gpu, 1 << 16));
    let backend = gpu.backend();
    let at = |page: u64| memory.base.offset(page * 4096);
    let ones = [1u8; 4096];
    let mut seen = [0u8; 5 * 4096];
    // SAFETY: `fill` asks for a live stream and a range that stays valid: both live until the end
    // of the case.
    unsafe { backend.fill(queue.raw(), at(0), 9, 5 * 4096) }.expect("it queues");
    // SAFETY: `fill`: as above.
    unsafe { backend.fill(queue.raw(), at(2), 7, 8192) }.expect("it queues");
    // SAFETY: `copy_to_device` asks for the same of both ranges.
    unsafe { backend.copy_to_device(queue.raw(), at(1), ones.as_ptr(), 4096) }.expect("it queues");
    // SAFETY: `copy` asks for the same of both ranges.
    unsafe { backend.copy(queue.raw(), at(2), at(1), 2048) }.expect("it queues");
    // SAFETY: `copy_to_host` asks for the same of both ranges.
    unsafe { backend.copy_to_host(queue.raw(), seen.as_mut_ptr(), at(0), seen.len()) }
        .expect("it queues");
    queue.synchronize();
    let expected = [(9, 4096), (1, 4096), (1, 2048), (7, 4096 + 2048), (9, 4096)];
    let expected: Vec<u8> = expected
        .into_iter()
        .flat_map(|(byte, len)| std::iter::repeat_n(byte, len))
        .collect();
    // By the first that differs: 20,480 numbers explain nothing.
    assert_eq!(
        seen.iter()
            .zip(&expected)
            .position(|(seen, expected)| seen != expected),
        None
    );
    free(gpu, memory);
}

fn host_functions(gpu: &Gpu) {
    let queue = Queue::new(gpu);
    let order = Arc::new(Mutex::new(Vec::new()));
    for n in 0..50 {
        let order = order.clone();
        queue.call(move || order.lock().expect("nobody panicked").push(n));
    }
    queue.synchronize();
    assert_eq!(
        *order.lock().expect("nobody panicked"),
        (0..50).collect::<Vec<i32>>()
    );
}

fn panicking(gpu: &Gpu) {
    let (queue, (called, calls)) = (Queue::new(gpu), channel());
    queue.call(|| panic!("on purpose"));
    queue.call(move || called.send(()).expect("it is waited for"));
    queue.synchronize();
    calls
        .try_recv()
        .expect("the stream went on behind the panic");
}

fn queued_is_not_done(gpu: &Gpu) {
    let queue = Queue::new(gpu);
    assert!(queue.is_idle());
    let go = queue.hold();
    assert!(!queue.is_idle());
    drop(go);
    wait_until("the stream to be idle", || queue.is_idle());
}

fn destroyed(gpu: &Gpu) {
    let (queue, memory) = (Queue::new(gpu), alloc(gpu, 16 << 20));
    for byte in 0..20 {
        // SAFETY: `fill` asks for a live stream and a range that stays valid: until the case has
        // seen that it is done.
        unsafe { gpu.backend().fill(queue.raw(), memory.base, byte, 16 << 20) }.expect("it queues");
    }
    let done = Arc::new(Mutex::new(false));
    let seen = done.clone();
    queue.call(move || *seen.lock().expect("nobody panicked") = true);
    drop(queue);
    wait_until("what was queued", || *done.lock().expect("nobody panicked"));
    free(gpu, memory);
}

fn identities(gpu: &Gpu) {
    let mut seen = std::collections::HashSet::new();
    for _ in 0..20 {
        let queue = Queue::new(gpu);
        // SAFETY: `stream_info` asks for a live stream: `queue` keeps it.
        let info = unsafe { gpu.backend().stream_info(queue.raw()) }.expect("it tells");
        assert_eq!(info.device, gpu.device());
        assert!(seen.insert(info.identity), "{info:?} was seen before");
    }
}

fn not_capturing(gpu: &Gpu) {
    let queue = Queue::new(gpu);
    // SAFETY: `capture_status` asks for a live stream: `queue` keeps it.
    let status = unsafe { gpu.backend().capture_status(queue.raw()) }.expect("it tells");
    assert_eq!(status, CaptureStatus::None);
}
