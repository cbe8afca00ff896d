//! Somebody who ends the demo when a driver never returns from a call.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{Outcome, output};

/// How long a step may take. More than anything that has a limit of its own and can say more.
const LIMIT: Duration = Duration::from_secs(300);

#[derive(Debug)]
struct State {
    /// The step under way; `None` at rest.
    step: Option<&'static str>,
    /// Counts steps.
    steps: u64,
}

/// A thread that ends the process when a step takes too long: a call that hangs cannot be told to stop.
#[derive(Clone, Debug)]
pub struct Watchdog(Arc<(Mutex<State>, Condvar)>);

impl Watchdog {
    /// Starts it.
    pub fn start(json: bool) -> Watchdog {
        let watchdog =
            Watchdog(Arc::new((Mutex::new(State { step: Some("opening a device"), steps: 0 }), Condvar::new())));
        let watched = watchdog.clone();
        std::thread::spawn(move || watched.watch(json));
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, json: bool) {
        let mut state = self.state();
        while let Some(step) = state.step {
            let before = state.steps;
            let same = |state: &mut State| state.step.is_some() && state.steps == before;
            let waited = self.0.1.wait_timeout_while(state, LIMIT, same);
            let (guard, time) = waited.unwrap_or_else(PoisonError::into_inner);
            if time.timed_out() {
                let why = format!("the demo hangs: {step} takes longer than {} s", LIMIT.as_secs());
                let outcome = output::fail(&why, json, Outcome::Finding);
                std::process::exit(outcome as i32);
            }
            state = guard;
        }
    }
}
