//! Benchmarks, torture and the steady state of the program `gpu-ipc`.
//!
//! 1. `torture`: kills processes at random and checks that nothing is lost or freed early; with
//!    wrong controls.
//! 2. `bench`: measures what sharing costs beside the raw driver calls.
//! 3. `steady`: does everything millions of times in one process, and finds what grows.
//! 4. What they and the program's other commands share: `args`, `device` (which one), `child` (this
//!    program in other processes), `owner` (a keeper and its broker), `copier`, `pattern` (contents
//!    of blocks), `rng` (chance from a seed), `vitals` (what a process takes), `output`, `size`.
//!
//! Not a part of the library: only the program uses it.

pub mod args;
pub mod bench;
pub mod child;
pub mod copier;
pub mod device;
pub mod output;
pub mod owner;
pub mod pattern;
pub mod rng;
pub mod size;
pub mod steady;
pub mod torture;
pub mod vitals;

/// How a command ended, as an exit status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All is well.
    Good = 0,
    /// Something was found that should not be.
    Finding = 1,
    /// What was asked for is not to be had on this machine.
    Unavailable = 3,
    /// A signal asked for the end: as a shell shows SIGINT.
    Interrupted = 130,
    /// Nobody read what it said: as a shell shows SIGPIPE.
    Unread = 141,
}
