//! Asking every session, each under its own deadline.

use std::path::{Path, PathBuf};
use std::time::Duration;

use gpu_ipc::Error;
use gpu_ipc::admin::SessionReport;

use crate::args::Where;
use lab::device::explain;

/// A session's socket and what came of asking there.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The socket.
    pub socket: PathBuf,
    /// The answer.
    pub state: State,
}

/// What came of asking a session.
#[derive(Clone, Debug)]
pub enum State {
    /// It answered.
    Alive(Box<SessionReport>),
    /// Somebody listens and does not answer: its process hangs or is stopped.
    Hung,
    /// It cannot be asked: why, and what to do.
    Unknown(String),
}

/// Asks the sessions that are named, or those in the runtime directory.
///
/// # Errors
///
/// Why the runtime directory cannot be read, and what to do.
pub fn gather(place: &Where) -> Result<Vec<Seen>, String> {
    let sockets = if place.socket.is_empty() {
        gpu_ipc::admin::sessions(None).map_err(|error| explain(&error))?
    } else {
        place.socket.clone()
    };
    let timeout = Duration::from_secs_f64(place.timeout);
    // At once, so that one that hangs does not hold up the others.
    Ok(std::thread::scope(|scope| {
        let asking: Vec<_> = sockets.iter().map(|socket| (socket, scope.spawn(|| ask(socket, timeout)))).collect();
        let died = || State::Unknown("asking it failed; report this".into());
        let seen = |(socket, asking): (&PathBuf, std::thread::ScopedJoinHandle<'_, State>)| Seen {
            socket: socket.clone(),
            state: asking.join().unwrap_or_else(|_| died()),
        };
        asking.into_iter().map(seen).collect()
    }))
}

fn ask(socket: &Path, timeout: Duration) -> State {
    match gpu_ipc::admin::inspect(socket, Some(timeout)) {
        Ok(report) => State::Alive(Box::new(report)),
        Err(Error::Deadline { .. }) => State::Hung,
        Err(error) => State::Unknown(explain(&error)),
    }
}
