//! Named steps at which a test kills or stops this process, or makes it panic: with the feature
//! `faults`, which no default build has.

/// Those of every pull: the origin's, then the replica's.
pub const STEPS: &[&str] = &[
    "ask.heard",
    "lease.registered",
    "lease.granted",
    "confirm.heard",
    "confirm.answered",
    "lease.ended",
    "lease.deregistered",
    "pull.granted",
    "pull.created",
    "pull.reading",
    "pull.half_read",
    "pull.read",
    "pull.confirming",
    "pull.confirmed",
    "pull.committed",
];

/// Those of a read through a ring: the origin's, then the replica's.
pub const RING_STEPS: &[&str] = &["fill.heard", "fill.copied", "pull.filling"];

/// Passes a step.
pub fn pass(step: &str) {
    debug_assert!(
        STEPS.contains(&step) || RING_STEPS.contains(&step),
        "{step} is no step"
    );
    #[cfg(feature = "faults")]
    fail(step);
}

/// `GPU_IPC_GATEWAY_STEP=kill:STEP` or `stop:STEP` ends or stops the process at a step, at its first
/// time; with `panic:STEP` the thread panics.
#[cfg(feature = "faults")]
fn fail(step: &str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::process::{Signal, getpid, kill_process};

    static TOLD: OnceLock<Option<(Option<Signal>, String)>> = OnceLock::new();
    let told = TOLD.get_or_init(|| {
        let told = std::env::var("GPU_IPC_GATEWAY_STEP").ok()?;
        let (what, step) = told.split_once(':')?;
        let signal = match what {
            "stop" => Some(Signal::STOP),
            "panic" => None,
            _ => Some(Signal::KILL),
        };
        Some((signal, step.to_owned()))
    });
    static FIRED: AtomicBool = AtomicBool::new(false);
    if let Some((signal, at)) = told
        && at == step
        && !FIRED.swap(true, Ordering::Relaxed)
    {
        eprintln!("gpu-ipc-gateway: step {step}");
        match signal {
            Some(signal) => drop(kill_process(getpid(), *signal)),
            None => panic!("a test wants it"),
        }
    }
}
