//! Streams: a worker thread each, with a queue.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use gpu_api::lock::{Acquire, AwaitChange};
use gpu_api::{CaptureStatus, DeviceId, Result, thread};

type Op = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    ops: VecDeque<Op>,
    running: bool,
    destroyed: bool,
}

/// What a stream's users and its worker share.
pub struct Stream {
    pub device: DeviceId,
    queue: Mutex<Queue>,
    changed: Condvar,
    capture: AtomicU8,
}

impl Stream {
    /// Starts a worker. `broken` tells it that its device's context is: what is queued then never
    /// runs.
    pub fn start(device: DeviceId, broken: Arc<AtomicBool>) -> Result<Arc<Stream>> {
        let stream = Arc::new(Stream {
            device,
            queue: Mutex::default(),
            changed: Condvar::new(),
            capture: AtomicU8::new(0),
        });
        let worker = stream.clone();
        thread::start("gpu-ipc-host", move || worker.work(&broken))?;
        Ok(stream)
    }

    fn work(&self, broken: &AtomicBool) {
        loop {
            let op = {
                let mut queue = self.queue.acquire();
                queue.running = false;
                loop {
                    if let Some(op) = queue.ops.pop_front() {
                        queue.running = true;
                        break op;
                    }
                    self.changed.notify_all();
                    if queue.destroyed {
                        return;
                    }
                    queue = self.changed.await_change(queue, None);
                }
            };
            if !broken.load(Ordering::Acquire) {
                op();
            }
        }
    }

    /// Queues an operation.
    pub fn push(&self, op: impl FnOnce() + Send + 'static) {
        self.queue.acquire().ops.push_back(Box::new(op));
        self.changed.notify_all();
    }

    /// Says whether all that was queued has run.
    pub fn is_idle(&self) -> bool {
        let queue = self.queue.acquire();
        queue.ops.is_empty() && !queue.running
    }

    /// Waits until all that was queued has run.
    pub fn synchronize(&self) {
        let mut queue = self.queue.acquire();
        while queue.running || !queue.ops.is_empty() {
            queue = self.changed.await_change(queue, None);
        }
    }

    /// Lets the worker end when all that was queued has run.
    pub fn destroy(&self) {
        self.queue.acquire().destroyed = true;
        self.changed.notify_all();
    }

    /// Returns the capture status that was set.
    pub fn capture(&self) -> CaptureStatus {
        match self.capture.load(Ordering::Relaxed) {
            0 => CaptureStatus::None,
            1 => CaptureStatus::Active,
            _ => CaptureStatus::Invalidated,
        }
    }

    /// Sets the capture status.
    pub fn set_capture(&self, status: CaptureStatus) {
        let number = match status {
            CaptureStatus::None => 0,
            CaptureStatus::Active => 1,
            CaptureStatus::Invalidated => 2,
        };
        self.capture.store(number, Ordering::Relaxed);
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// How many streams wait for a word or an event at this moment.
#[derive(Debug, Default)]
pub struct Waits {
    count: AtomicUsize,
}

impl Waits {
    /// Waits on a stream's thread until `holds`.
    ///
    /// Another process' store wakes nobody, so there is nothing to wait for but time; the pauses
    /// grow to half a millisecond.
    pub fn wait(&self, mut holds: impl FnMut() -> bool) {
        if holds() {
            return;
        }
        self.count.fetch_add(1, Ordering::AcqRel);
        let mut pause = Duration::from_micros(2);
        let mut turns = 0u32;
        while !holds() {
            turns += 1;
            if turns < 200 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_micros(500));
            }
        }
        self.count.fetch_sub(1, Ordering::AcqRel);
    }

    /// Blocks while any stream waits.
    pub fn block(&self) {
        while self.count.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}
