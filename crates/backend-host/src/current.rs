//! The device that is current on the calling thread.
//!
//! A driver's default streams are those of the current device. So are they here, and every call
//! makes its stream's device current while it lasts: what a call that forgets it gets wrong on a
//! GPU it gets wrong here too.

use std::cell::Cell;
use std::marker::PhantomData;

use gpu_api::DeviceId;

thread_local! {
    static CURRENT: Cell<Option<DeviceId>> = const { Cell::new(None) };
}

/// Returns the device that is current on this thread; `None` where nobody made one so.
pub fn current() -> Option<DeviceId> {
    CURRENT.get()
}

/// Makes a device current on this thread, for good.
pub fn set(device: Option<DeviceId>) {
    CURRENT.set(device);
}

/// A device that is current for the time of a call; dropped, the one before is.
#[derive(Debug)]
pub struct Entered {
    former: Option<DeviceId>,
    /// What it puts back is the calling thread's.
    thread: PhantomData<*const ()>,
}

impl Entered {
    /// Makes a device current.
    pub fn new(device: DeviceId) -> Entered {
        Entered {
            former: CURRENT.replace(Some(device)),
            thread: PhantomData,
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.former);
    }
}
