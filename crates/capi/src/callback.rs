//! Callbacks of borrowed streams, on a thread of their own.
//!
//! The last holder of a stream may be any thread of the library, inside any of its locks. So the
//! end of a hold only queues the callback; a thread that holds nothing calls it, and it may call
//! any function of the library.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use crate::engine::{ForkGuard, Result, thread};

/// A function that C calls back, with what it gave along.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Callback {
    pub function: unsafe extern "C" fn(*mut c_void),
    pub context: *mut c_void,
}

// SAFETY: the library never follows the context; that function and context are good on another
// thread is the caller's promise, as the header says at each function that takes them.
unsafe impl Send for Callback {}
// SAFETY: as above.
unsafe impl Sync for Callback {}

impl Callback {
    /// Calls back, on this thread.
    pub fn run(self) {
        // SAFETY: the function asks for its own context, once: callers run what they took out of a
        // list, by value.
        unsafe { (self.function)(self.context) };
    }
}

/// The queue of a process, and the thread behind it from the first hold on.
#[derive(Default)]
pub(crate) struct Callbacks(Mutex<Option<Arc<Queue>>>);

/// Where a hold's end is told.
#[derive(Debug)]
struct Queue {
    guard: ForkGuard,
    sender: Sender<Callback>,
}

impl Callbacks {
    /// Makes a hold whose end is told by this callback, once it is armed.
    pub fn hold(&self, callback: Callback) -> Result<Hold> {
        let mut started = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = match &*started {
            Some(queue) => queue.clone(),
            None => started.insert(Queue::start()?).clone(),
        };
        Ok(Hold {
            queue,
            callback,
            armed: AtomicBool::new(false),
        })
    }
}

impl Queue {
    fn start() -> Result<Arc<Queue>> {
        let guard = ForkGuard::new()?;
        let (sender, receiver) = channel::<Callback>();
        thread::start("gpu-ipc-callback", move || {
            receiver.into_iter().for_each(Callback::run)
        })?;
        Ok(Arc::new(Queue { guard, sender }))
    }
}

/// A hold whose end is told, once it is armed.
#[derive(Debug)]
pub(crate) struct Hold {
    queue: Arc<Queue>,
    callback: Callback,
    armed: AtomicBool,
}

impl Hold {
    pub fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A forked child ends no hold of its parent's.
        if *self.armed.get_mut() && !self.queue.guard.is_child() {
            // Fails only when the thread is gone, with a callback that unwound: then nobody can be
            // told.
            let _ = self.queue.sender.send(self.callback);
        }
    }
}
