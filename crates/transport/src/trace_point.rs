//! Names the steps of a block's life as `tracing` events.
//!
//! Target `gpu_ipc::step`, level TRACE, one field `step`. Disabled, an event costs one load. Tests
//! that kill a process at a step listen for them.

/// Emits the event of a step.
#[macro_export]
macro_rules! trace_point {
    ($name:literal) => {
        ::tracing::trace!(target: "gpu_ipc::step", step = $name)
    };
}
