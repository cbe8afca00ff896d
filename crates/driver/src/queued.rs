//! A function on its way through a driver's queue.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use gpu_api::contain;
use gpu_api::lock::Acquire;

type Function = Box<dyn FnOnce() + Send>;

/// A function that a stream calls once. The queue holds one count of it, its caller another until
/// it is known whether it was queued.
#[derive(Clone)]
pub struct QueuedFunction(Arc<Mutex<Option<Function>>>);

impl QueuedFunction {
    /// Makes one, and what the driver is told beside [`run`].
    pub fn new(function: Function) -> (QueuedFunction, *mut c_void) {
        let ours = QueuedFunction(Arc::new(Mutex::new(Some(function))));
        let theirs = Arc::into_raw(Arc::clone(&ours.0)).cast_mut().cast();
        (ours, theirs)
    }

    /// Takes the function back after an error of the call that queued it.
    ///
    /// An error may be that of earlier work, and then the function may be queued all the same. Its
    /// count stays with the queue for good; the function itself is dropped, so that it is never
    /// called after an error.
    pub fn take_back(self) {
        drop(self.0.acquire().take());
    }
}

/// Runs what a stream reached. A panic stays here: it must not unwind into the driver.
///
/// # Safety
///
/// `queued` is what [`QueuedFunction::new`] gave, for one call of this or of [`discard`].
pub unsafe extern "C" fn run(queued: *mut c_void) {
    // SAFETY: `taken` has our condition.
    let queued = unsafe { taken(queued) };
    let function = queued.acquire().take();
    if let Some(function) = function {
        contain(function);
    }
}

/// Drops what a stream reached and must not run.
///
/// # Safety
///
/// As [`run`].
pub unsafe fn discard(queued: *mut c_void) {
    // SAFETY: `taken` has our condition.
    let queued = unsafe { taken(queued) };
    contain(|| drop(queued));
}

/// # Safety
///
/// As [`run`].
unsafe fn taken(queued: *mut c_void) -> Arc<Mutex<Option<Function>>> {
    // SAFETY: `Arc::from_raw` asks for what `Arc::into_raw` gave, once: our caller vouches for
    // both.
    unsafe { Arc::from_raw(queued.cast_const().cast()) }
}
