//! The one process state of a process.

use std::sync::OnceLock;

use ::allocators::ProcessState;
use gpu_api::Result;

use crate::detect;

/// What a process has one of.
///
/// # Examples
///
/// ```
/// use gpu_ipc::Global;
/// use gpu_ipc::allocators::{AllocatorAttributes, ProcessState, Request, VirtualDevice};
///
/// let state = ProcessState::global()?;
/// let host = state.allocator(VirtualDevice(0), AllocatorAttributes::default().on_host())?;
/// let placed = host.alloc(Request::new(1 << 20))?;
/// host.free(placed.address)?;
/// # Ok::<(), gpu_ipc::Error>(())
/// ```
pub trait Global: Sized {
    /// Returns the one of this process, made at the first call of every device that [`detect`] finds.
    ///
    /// It lives until the process ends, and what it holds goes back then. A library that wants its own makes one
    /// itself.
    ///
    /// # Errors
    ///
    /// As [`detect`]; the next call tries again.
    fn global() -> Result<&'static Self>;
}

static GLOBAL: OnceLock<ProcessState> = OnceLock::new();

impl Global for ProcessState {
    fn global() -> Result<&'static ProcessState> {
        if let Some(state) = GLOBAL.get() {
            return Ok(state);
        }
        let found = detect()?;
        // Of two threads that are here at once one finds the other's; nothing was allocated yet.
        Ok(GLOBAL.get_or_init(|| ProcessState::new(found.gpus().iter().cloned())))
    }
}
