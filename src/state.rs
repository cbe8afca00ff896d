//! The one process state of a process.

use std::sync::OnceLock;

use ::allocators::ProcessState;
use gpu_api::Result;

use crate::detect;

static STATE: OnceLock<ProcessState> = OnceLock::new();

/// Returns the process state of this process, made at the first call, with every device that
/// [`detect`] finds.
///
/// Without a device it has host memory, and every call looks for devices again until there is one.
/// It lives until the process ends; [`ProcessState::tear_down_all`] gives back what it holds before
/// that. A library that wants its own makes one itself.
///
/// # Errors
///
/// As [`detect`], and where this machine shows a GPU of which none can be used, the reason: the
/// host backend does not take its place unless `GPU_IPC_HOST_DEVICES` asks for it. The next call
/// tries again. [`Error::Forked`](gpu_api::Error::Forked) in a forked child of the process that
/// called this first: it makes one with [`ProcessState::new`].
///
/// # Examples
///
/// ```
/// use gpu_ipc::allocators::{AllocatorAttributes, Request, VirtualDevice};
///
/// let state = gpu_ipc::allocators::process_state()?;
/// let host = state.host_allocator(None, None)?;
/// let placed = host.alloc(Request::new(1 << 20))?;
/// host.free(placed.address)?;
/// drop(host);
/// state.tear_down_all()?;
/// # Ok::<(), gpu_ipc::Error>(())
/// ```
pub fn process_state() -> Result<&'static ProcessState> {
    let state = STATE.get_or_init(|| ProcessState::new([]));
    state.check_fork()?;
    if state.gpus().is_empty() {
        // Of two threads that are here at once the second adds what is there already.
        state.add_devices(detect()?.into_gpus()?);
    }
    Ok(state)
}
