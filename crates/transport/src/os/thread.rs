//! Threads of the library's own: a session's, a participant's.

use gpu_api::{Error, Result};

/// Runs `run` on a thread of this name, which the kernel cuts after 15 bytes.
///
/// # Errors
///
/// [`Error::System`] when the process may start no more threads.
pub fn start(name: &'static str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(name.into()).spawn(run);
    thread
        .map(drop)
        .map_err(|e| Error::system("starting a thread", "raise RLIMIT_NPROC", e))
}
