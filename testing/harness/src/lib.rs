//! The other processes of a test.
//!
//! A test binary starts itself again: [`role`] says at the beginning of `main` what a process was
//! started to be, and [`Child`] is that process as the test sees it. What the two say to each other
//! are values of types that both share, one a line: an `enum` that both sides match exhaustively,
//! and no text that only one of them understands.
//!
//! | file | what |
//! |---|---|
//! | [`child`](Child) | starts, tells, hears, stops and kills a process; what is left of it goes with the test |
//! | [`lines`](Lines) | any other program that reads and writes lines |
//! | [`fork`](fork()) | a child that runs a function of this process |
//! | [`role`] | that process' own side |
//! | [`surroundings`] | namespaces, small file systems, other users, inherited descriptors |
//! | [`step`] | deaths at a named step of a block's life |
//! | [`program`] | programs that run beside a test, or to their end |
//! | [`vitals`] | what a process takes from its machine, and whether that grew |
//! | [`rng`] | chance from a seed |
//! | [`watchdog`](WATCHDOG) | waits for a condition, and for no time |

mod child;
mod fork;
mod lines;
mod process;
mod role;
mod watchdog;

pub mod program;
pub mod rng;
pub mod step;
pub mod surroundings;
pub mod vitals;

pub use child::Child;
pub use fork::{Forked, fork, holds_in_a_fork};
pub use lines::Lines;
pub use role::{die_with_the_tests, next, obey, play, role, say};
pub use watchdog::{WATCHDOG, comes, wait_until};
