//! The one process state of a process, and sessions on its arenas.

use std::sync::{Arc, OnceLock};

use ::allocators::{Arena, ProcessState};
use gpu_api::Result;
use ipc_rc::{Session, SessionBuilder};

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

/// Opens a session whose blocks come from an arena, and to which the arena turns when it is out of memory.
///
/// # Errors
///
/// As [`SessionBuilder::open`].
///
/// # Examples
///
/// ```
/// use gpu_ipc::allocators::{Arena, ArenaOptions};
/// use gpu_ipc::{BackendKind, Session, detect, open_session};
///
/// let dir = tempfile::tempdir()?;
/// let gpu = detect()?.first(BackendKind::Host)?;
/// let arena = Arena::new(gpu.clone(), ArenaOptions::default())?;
/// let session = open_session(Session::builder(gpu).socket(dir.path().join("s")), &arena)?;
/// let block = session.alloc(1 << 20)?;
/// assert_eq!(arena.stats().in_use, 1 << 20);
/// # drop(block);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn open_session(builder: SessionBuilder, arena: &Arc<Arena>) -> Result<Session> {
    let session = builder.source(Arc::<Arena>::clone(arena)).open()?;
    arena.register(session.reclaim());
    Ok(session)
}
