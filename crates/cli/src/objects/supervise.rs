//! `gpu-ipc keep -- gpu-ipc-gateway run`: starts a gateway again when it dies.
//!
//! A gateway has nothing to keep: its leases end with it, and objects are the broker's. So this
//! keeper has no directory and no socket, and others may be beside it. Its gateway ends with it,
//! which the gateway asks the kernel for when it finds [`PARENT`]: two never want one address.
//!
//! ```text
//! started ──ends with 0 or 2──► (ended)
//!   ▲  └─── killed, or any other code ──► pause ──┐
//!   └──────────────────────────────────────────────┘
//! ```
//!
//! The pause is [`PAUSES`].0 behind a gateway that lived for [`WELL`], and else twice the last one,
//! at most [`PAUSES`].1.

// Tests: `crates/cli/tests/supervise.rs`, `crates/gateway/tests/gateways/kept.rs`.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::Outcome;

/// The variable of a gateway's environment that names the process which it ends with.
const PARENT: &str = "GPU_IPC_GATEWAY_PARENT";
/// Between two gateways, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// A gateway that has lived so long was well.
const WELL: Duration = Duration::from_secs(10);

/// Says whether a command runs a gateway.
pub fn is_gateway(command: &[String]) -> bool {
    let mut words = command.iter().map(String::as_str);
    let program = words.next().map(Path::new).and_then(Path::file_name);
    match program.and_then(|name| name.to_str()) {
        Some("gpu-ipc-gateway") => true,
        Some("gpu-ipc") => words.next() == Some("gateway"),
        _ => false,
    }
}

/// Runs a gateway until it ends by itself.
///
/// # Errors
///
/// It cannot be started at all, for people.
pub fn run(mut command: impl FnMut() -> Command) -> Result<Outcome, String> {
    let mut pause = PAUSES.0;
    loop {
        let begun = Instant::now();
        let mut command = command();
        command.env(PARENT, std::process::id().to_string());
        let mut child = command.spawn().map_err(|error| {
            let program = command.get_program().display();
            format!(
                "{program} cannot be started: {error}: give the program and its arguments behind `--`"
            )
        })?;
        tracing::info!(pid = child.id(), "the gateway is started");
        let status = child
            .wait()
            .map_err(|error| format!("waiting for the gateway: {error}"))?;
        // 0: it was told to stop. 2: it was told nonsense, and would be again.
        if let Some(code @ (0 | 2)) = status.code() {
            tracing::info!(%status, "the gateway ended by itself");
            return Ok(if code == 0 {
                Outcome::Good
            } else {
                Outcome::Finding
            });
        }
        tracing::warn!(pid = child.id(), %status, "the gateway died; it is started again");
        pause = if begun.elapsed() >= WELL {
            PAUSES.0
        } else {
            (pause * 2).min(PAUSES.1)
        };
        std::thread::sleep(pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_is_told_from_a_broker() {
        let is = |words: &str| is_gateway(&words.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(is("gpu-ipc-gateway run --listen tcp/127.0.0.1:1"));
        assert!(is("/usr/bin/gpu-ipc-gateway run"));
        assert!(is("/usr/bin/gpu-ipc gateway --insecure"));
        assert!(!is("gpu-ipc broker --dir gateway"));
        assert!(!is("sh -c gpu-ipc-gateway"));
        assert!(!is_gateway(&[]));
    }
}
