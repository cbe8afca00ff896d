//! Waits for a condition, and for no time.

use std::time::{Duration, Instant};

/// Long enough for the slowest machine: a wait that takes longer fails the test.
pub const WATCHDOG: Duration = Duration::from_secs(120);

/// Says whether a condition comes to hold.
pub fn comes(mut holds: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !holds() {
        if start.elapsed() > WATCHDOG {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// Waits until a condition holds.
///
/// # Panics
///
/// When it does not come to hold.
#[track_caller]
pub fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    assert!(comes(holds), "waited too long for: {what}");
}
