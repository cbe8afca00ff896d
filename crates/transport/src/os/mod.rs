//! What the kernel provides: sockets, processes and the proof of their death, waiting and waking, a
//! clock.

// Tests: `tests/joining`, `tests/security`.

pub mod blocking;
pub mod clock;
pub mod closer;
pub mod poller;
pub mod process;
pub mod socket;
pub mod waker;
