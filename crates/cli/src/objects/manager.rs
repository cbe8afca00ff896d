//! What a keeper tells the service manager that started it: that it is ready, how it stands, and
//! that it lives. sd_notify(3).

use std::path::Path;
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use gpu_ipc::broker::keeper::depositor::Depositor;
use sd_notify::NotifyState;

use super::ready::{State, state};
use crate::device::explain;

/// How often the broker is looked at until it is ready.
const SOON: Duration = Duration::from_millis(100);
/// How often from then on, without a watchdog.
const LATER: Duration = Duration::from_secs(10);
/// How long the broker has for its answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Starts the thread that tells the manager, if there is one. A keeper that hangs says nothing: the
/// manager's watchdog ends it, and its broker lives on.
///
/// # Errors
///
/// When the thread cannot be started.
pub fn start(keeper: &Path, dir: &Path) -> Result<(), String> {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return Ok(());
    }
    let mut microseconds = 0;
    let has_watchdog = sd_notify::watchdog_enabled(false, &mut microseconds);
    let watchdog = has_watchdog.then(|| Duration::from_micros(microseconds) / 3);
    let keeper = Depositor::new(keeper).map_err(|error| explain(&error))?;
    let dir = dir.to_owned();
    let started = thread::start("gpu-ipc-manager", move || tell(&keeper, &dir, watchdog));
    started.map(drop).map_err(|error| explain(&error))
}

fn tell(keeper: &Depositor, dir: &Path, watchdog: Option<Duration>) {
    let (mut is_told, mut last) = (false, String::new());
    let mut pinged: Option<Instant> = None;
    loop {
        if watchdog.is_some_and(|every| pinged.is_none_or(|at| at.elapsed() >= every))
            && keeper.inventory(false).is_ok()
        {
            say(&[NotifyState::Watchdog]);
            pinged = Some(Instant::now());
        }
        let (status, is_ready) = match state(dir, PATIENCE) {
            State::Ready(status) => (status, true),
            State::Serves(status) | State::Not(status) => (status, false),
        };
        if is_ready && !is_told {
            is_told = true;
            say(&[NotifyState::Ready]);
        }
        if status != last {
            say(&[NotifyState::Status(&status)]);
            last = status;
        }
        let later = watchdog.map_or(LATER, |every| every.min(LATER));
        std::thread::sleep(if is_told { later } else { SOON });
    }
}

fn say(what: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(false, what) {
        tracing::warn!(%error, "the service manager is not told");
    }
}
