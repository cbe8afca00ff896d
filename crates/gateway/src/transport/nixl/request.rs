//! One request of NIXL's: a read of one range.
//!
//! ```text
//! prepare ──► Prepared ──post──► Posted::Running ──poll──► Running ... ──► Ended(Ok | Err)
//!                 │                    │                                       │
//!                 └ drop: released     └ drop: kept for the process' life      └ released
//! ```
//!
//! A running request is never released, because that takes nothing back: `releaseReqH` of NIXL's
//! UCX backend cancels with `ucp_request_cancel`, frees the request and forgets it, and says of
//! itself that "it may not be enough to cancel UCX request" (`src/plugins/ucx/ucx_backend.cpp`).
//! Bytes could arrive in memory that has another use by then. So [`Running`] gives up its request
//! only when NIXL says that it has ended; dropped before, it keeps the request, the destination's
//! registration, the peer and the agent until the process ends. That is what [`Kept`] is for.
//!
//! Each request reads one range. NIXL posts the ranges of a longer list one after the other and,
//! when one cannot be posted, cancels those before it in the same way.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::agent::{Agent, Registered, kind_and_device, range};
use super::library::{IN_PROGRESS, Library, RangeList, RequestHandle, SUCCESS, meaning};
use super::peer::Known;
use crate::error::{Error, Result};
use crate::transport::{Pair, Place};

/// What a request needs until it has ended.
#[derive(Debug)]
pub struct Kept {
    /// The peer, and with it the agent.
    pub peer: Arc<Known>,
    /// The registrations of the destination.
    #[expect(
        dead_code,
        reason = "held so that they are not taken back, and never read"
    )]
    pub destination: Vec<Arc<Registered>>,
}

impl Kept {
    fn agent(&self) -> &Agent {
        self.peer.agent()
    }
}

/// A request that has not been posted.
pub struct Prepared {
    kept: Arc<Kept>,
    handle: NonNull<RequestHandle>,
}

/// A request that NIXL works on.
pub struct Running {
    kept: ManuallyDrop<Arc<Kept>>,
    handle: NonNull<RequestHandle>,
}

// SAFETY: a request is not bound to a thread; every call with it is made under its agent's lock.
unsafe impl Send for Running {}

/// How far a request is.
pub enum State {
    /// Under way.
    Running(Running),
    /// It has ended: nothing is written any more.
    Ended(Result<()>),
}

impl Prepared {
    /// Prepares to read one range, or what else the operation does.
    ///
    /// # Errors
    ///
    /// [`Error::Transfer`] when NIXL does not know one of the ranges.
    pub fn new(kept: Arc<Kept>, pair: &Pair, operation: c_int) -> Result<Self> {
        let library = kept.agent().library();
        let local = Ranges::of(library, pair.to.place, pair.to.address, pair.to.bytes)?;
        let remote = Ranges::of(library, pair.from.place, pair.from.address, pair.from.bytes)?;
        let mut handle = ptr::null_mut();
        let handles = kept.agent().lock();
        // SAFETY: `nixl_capi_create_xfer_req` takes valid handles and a string that ends in zero,
        // copies the lists, and writes a handle.
        let status = unsafe {
            (library.create_xfer_req)(
                handles.agent.as_ptr(),
                operation,
                local.list.as_ptr(),
                remote.list.as_ptr(),
                kept.peer.name().as_ptr(),
                &mut handle,
                handles.options.as_ptr(),
            )
        };
        drop(handles);
        match NonNull::new(handle) {
            Some(handle) if status == SUCCESS => Ok(Self { kept, handle }),
            _ => Err(failed("it could not be prepared", status)),
        }
    }

    /// Starts it.
    ///
    /// # Safety
    ///
    /// Unless the request has ended, the destination stays mapped and writable, and nobody reads or
    /// writes there.
    pub unsafe fn post(self) -> State {
        let agent = self.kept.agent();
        let handles = agent.lock();
        // SAFETY: `nixl_capi_post_xfer_req` takes valid handles. UCX writes to the destination from
        // here on, which the caller of `post` allows.
        let status = unsafe {
            (agent.library().post_xfer_req)(
                handles.agent.as_ptr(),
                self.handle.as_ptr(),
                handles.options.as_ptr(),
            )
        };
        drop(handles);
        if status == IN_PROGRESS {
            let this = ManuallyDrop::new(self);
            // SAFETY: `ptr::read` of a field that is valid and, its owner being in `ManuallyDrop`,
            // not dropped again.
            let kept = unsafe { ptr::read(&this.kept) };
            return State::Running(Running {
                kept: ManuallyDrop::new(kept),
                handle: this.handle,
            });
        }
        // A failed post has written nothing: the one read was not accepted, or its endpoint is in
        // error, and UCX then ends what is queued there.
        State::Ended(if status == SUCCESS {
            Ok(())
        } else {
            Err(failed("it could not be started", status))
        })
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        release(self.kept.agent(), self.handle);
    }
}

impl Running {
    /// Looks how far it is.
    pub fn poll(self) -> State {
        let agent = self.kept.agent();
        let handles = agent.lock();
        // SAFETY: `nixl_capi_get_xfer_status` takes valid handles.
        let status = unsafe {
            (agent.library().get_xfer_status)(handles.agent.as_ptr(), self.handle.as_ptr())
        };
        drop(handles);
        if status == IN_PROGRESS {
            return State::Running(self);
        }
        release(agent, self.handle);
        let Self { kept, .. } = self;
        // It has ended, so what was kept may go.
        drop(ManuallyDrop::into_inner(kept));
        State::Ended(if status == SUCCESS {
            Ok(())
        } else {
            Err(failed("it broke off", status))
        })
    }
}

/// Gives a request back that is not under way.
fn release(agent: &Agent, handle: NonNull<RequestHandle>) {
    let library = agent.library();
    let handles = agent.lock();
    // SAFETY: `nixl_capi_release_xfer_req` takes valid handles; the request was not posted, or it
    // has ended.
    let status = unsafe { (library.release_xfer_req)(handles.agent.as_ptr(), handle.as_ptr()) };
    drop(handles);
    if status != SUCCESS {
        tracing::warn!(
            status,
            what = meaning(status),
            "NIXL did not release a request; it is kept"
        );
        return;
    }
    // SAFETY: `nixl_capi_destroy_xfer_req` takes a request that was released.
    unsafe { (library.destroy_xfer_req)(handle.as_ptr()) };
}

fn failed(what: &str, status: c_int) -> Error {
    Error::Transfer {
        why: format!("{what}; NIXL says: {} (status {status})", meaning(status)),
    }
}

/// A list of one range, for NIXL to copy.
struct Ranges {
    library: &'static Library,
    list: NonNull<RangeList>,
}

impl Ranges {
    fn of(library: &'static Library, place: Place, address: u64, bytes: u64) -> Result<Self> {
        let (address, bytes) = range(address, bytes)?;
        let (kind, device) = kind_and_device(place);
        let mut list = ptr::null_mut();
        // SAFETY: `nixl_capi_create_xfer_dlist` writes a handle.
        let status = unsafe { (library.create_xfer_dlist)(kind, &mut list) };
        let list = NonNull::new(list).ok_or_else(|| failed("no list of ranges", status))?;
        let ranges = Self { library, list };
        // SAFETY: `nixl_capi_xfer_dlist_add_desc` copies numbers into a list it made.
        match unsafe { (library.xfer_dlist_add_desc)(list.as_ptr(), address, bytes, device) } {
            SUCCESS => Ok(ranges),
            status => Err(failed("no range in a list", status)),
        }
    }
}

impl Drop for Ranges {
    fn drop(&mut self) {
        // SAFETY: `nixl_capi_destroy_xfer_dlist` takes a list that it made and that nothing uses.
        unsafe { (self.library.destroy_xfer_dlist)(self.list.as_ptr()) };
    }
}
