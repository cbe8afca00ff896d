//! A process that ends the demo when a driver never returns from a call.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{Outcome, output};
use gpu_ipc::backend::thread;

/// How long a step may take. More than anything that has a limit of its own and can say more.
const LIMIT: Duration = Duration::from_secs(300);

/// A consumer that is silent for longer counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug)]
struct Step {
    /// The step under way; `None` at rest.
    step: Option<&'static str>,
    /// Counts steps.
    steps: u64,
}

/// A thread that ends the process when a step takes too long: a call that hangs cannot be told to
/// stop.
#[derive(Clone, Debug)]
pub struct Watchdog(Arc<(Mutex<Step>, Condvar)>);

impl Watchdog {
    /// Starts it: the process ends with the reason, as JSON where that is wanted.
    pub fn start(json: bool) -> Watchdog {
        Watchdog::with(LIMIT, move |why| {
            let outcome = output::fail(&why, json, Outcome::Finding);
            std::process::exit(outcome as i32);
        })
    }

    fn with(limit: Duration, bite: impl FnOnce(String) + Send + 'static) -> Watchdog {
        let state = Step {
            step: Some("opening a device"),
            steps: 0,
        };
        let watchdog = Watchdog(Arc::new((Mutex::new(state), Condvar::new())));
        let watched = watchdog.clone();
        let watch = move || {
            if let Some(step) = watched.watch(limit) {
                bite(format!(
                    "the demo hangs: {step} takes longer than {} s",
                    limit.as_secs()
                ));
            }
        };
        if let Err(error) = thread::start("gpu-ipc-watch", watch) {
            output::complain(&format!("nothing ends the demo if it hangs: {error}"));
        }
        watchdog
    }

    /// Says that a step begins.
    pub fn step(&self, what: &'static str) {
        let mut state = self.state();
        state.step = Some(what);
        state.steps += 1;
        self.0.1.notify_all();
    }

    /// Says that nothing is left that could hang.
    pub fn rest(&self) {
        self.state().step = None;
        self.0.1.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, Step> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a step takes too long, and returns it; nothing once there is no step.
    fn watch(&self, limit: Duration) -> Option<&'static str> {
        let mut state = self.state();
        while let Some(step) = state.step {
            let before = state.steps;
            let same = |state: &mut Step| state.step.is_some() && state.steps == before;
            let waited = self.0.1.wait_timeout_while(state, limit, same);
            let (guard, time) = waited.unwrap_or_else(PoisonError::into_inner);
            if time.timed_out() {
                return Some(step);
            }
            state = guard;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{RecvTimeoutError, channel};

    /// A thread that does not answer within this time is stuck.
    const GENEROUS: Duration = Duration::from_secs(60);

    #[test]
    fn a_step_that_never_ends_is_named() {
        let (sender, bitten) = channel();
        // Held: without a handle nobody could say that a step ended.
        let watchdog = Watchdog::with(Duration::from_millis(1), move |why| {
            sender.send(why).expect("the test listens")
        });
        let why = bitten.recv_timeout(GENEROUS).expect("it bites");
        assert!(why.contains("opening a device"), "{why}");
        watchdog.rest();
    }

    #[test]
    fn at_rest_it_goes_away() {
        let (sender, bitten) = channel::<String>();
        let watchdog = Watchdog::with(GENEROUS * 60, move |why| {
            sender.send(why).expect("the test listens")
        });
        watchdog.step("something");
        watchdog.rest();
        assert_eq!(
            bitten.recv_timeout(GENEROUS),
            Err(RecvTimeoutError::Disconnected),
            "its thread has ended"
        );
    }
}
