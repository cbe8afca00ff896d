//! Waiting for a condition.

use std::time::{Duration, Instant};

/// After this time something that must come counts as never coming. Nothing is asserted to be fast.
pub const WATCHDOG: Duration = Duration::from_secs(300);
/// Between two looks at something that is waited for.
const LOOK: Duration = Duration::from_millis(10);

/// Waits for something.
///
/// # Errors
///
/// What did not come.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T, String> {
    let over = Instant::now() + WATCHDOG;
    loop {
        if let Some(seen) = look() {
            return Ok(seen);
        }
        if Instant::now() >= over {
            return Err(format!("{what}: not within {} s", WATCHDOG.as_secs()));
        }
        std::thread::sleep(LOOK);
    }
}
