//! Callbacks of borrowed streams, on a thread of their own.
//!
//! The last holder of a stream may be any thread of the library, inside any of its locks. So the end of a hold only
//! queues the callback; a thread that holds nothing calls it, and it may call any function of the library.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use crate::engine::{Error, Result};
use crate::process::Process;

/// A function that C calls back, with what it gave along.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Callback {
    pub function: unsafe extern "C" fn(*mut c_void),
    pub context: *mut c_void,
}

// SAFETY: the library never follows the context; that function and context are good on another thread is the caller's
// promise, as the header says at each function that takes them.
unsafe impl Send for Callback {}
// SAFETY: as above.
unsafe impl Sync for Callback {}

impl Callback {
    /// Calls back, on this thread.
    pub fn run(self) {
        // SAFETY: the function asks for its own context, once: callers run what they took out of a list, by value.
        unsafe { (self.function)(self.context) };
    }
}

/// The queue of a process.
#[derive(Default)]
pub(crate) struct Callbacks(Mutex<Option<Sender<Callback>>>);

impl Callbacks {
    /// Starts the thread, if it does not run: before something is held whose end must be told.
    pub fn start(&self) -> Result<()> {
        let mut queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.is_none() {
            let (sender, receiver) = channel::<Callback>();
            std::thread::Builder::new()
                .name("gpu-ipc-callback".into())
                .spawn(move || receiver.into_iter().for_each(Callback::run))
                .map_err(|error| Error::system("clone", "raise the limit of threads (ulimit -u)", error))?;
            *queue = Some(sender);
        }
        Ok(())
    }

    fn queue(&self, callback: Callback) {
        let queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = &*queue {
            // Fails only when the thread is gone, with a callback that unwound: then nobody can be told.
            let _ = sender.send(callback);
        }
    }
}

/// A hold whose end is told, once it is armed.
pub(crate) struct Hold {
    process: &'static Process,
    callback: Callback,
    armed: AtomicBool,
}

impl Hold {
    pub fn new(process: &'static Process, callback: Callback) -> Hold {
        Hold { process, callback, armed: AtomicBool::new(false) }
    }

    pub fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A forked child ends no hold of its parent's.
        if *self.armed.get_mut() && !self.process.is_child() {
            self.process.callbacks.queue(self.callback);
        }
    }
}
