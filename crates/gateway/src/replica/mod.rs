//! A pull, at the replica: from the question for a lease to the commit, or to nothing.
//!
//! ```text
//!            ┌────────────────────── again, with everything new ◄──────────────────────┐
//!            ▼                                                                         │
//! Asking ─grant─► Creating ─► Reading ─► Flushing ─► Confirming ─yes─► Committing ─► Done
//!    │               │           │           │           │ no              │
//!    │               │           │           │           └─► destination dropped ──────┤
//!    │               │           └── failed, or its lease was lost: dropped ───────────┤
//!    └── nobody has it ──► Failed                                          └── refused ──► Failed
//!                                └── neither ends nor fails ─► Stuck: the process is replaced
//! ```
//!
//! | stage | what happened | leaves by |
//! |---|---|---|
//! | `Asking` | a lease was asked for, with a number that no other question has | the grant with this number. A gateway that is busy has failed nothing: it is asked again, and no attempt is counted |
//! | `Creating` | the object is made at this host's broker, with the origin's identity and epoch | the write leases |
//! | `Reading` | bytes arrive. The lease is renewed; when a renewal says no the copy is lost, but the destination is kept until the transfer has ended | end, failure, or no byte for [`Patience::stall`] |
//! | `Flushing` | the last byte has arrived; the device is made to see them, and what the CPU reaches is digested | the digest |
//! | `Confirming` | the origin was asked if the lease was alive and the digest is its object's, with a number drawn after the flush | the answer with this number; one of *not yet*, while the origin digests, is asked again |
//! | `Committing` | the origin said yes | this host's broker |
//!
//! Every attempt has a lease, numbers and **memory** of its own. So a byte that arrives late lands
//! in what was never visible, and an answer that arrives late has a number that nobody waits for.
//!
//! `Stuck`: a transfer that neither ends nor fails may write for ever, so its destination must stay
//! mapped until this process ends. The process ends, which is the proof by which the broker frees
//! the memory; the process that started it may start another. So each pull has a process of its
//! own, and a gateway that serves others is none of them.
//!
//! What it does not cover is said at [`origin`](crate::origin), and so is the test.
//!
//! 1. `machine`: the stages above. [`driver`]: does what it says. `create`: checks what was granted,
//!    and makes the object.
//! 2. [`search`]: who has a name. [`sources`]: the host to read from. [`ways`]: what a read goes by. [`fills`]: questions for
//!    pieces in the origin's ring. [`report`]: what became of a pull.
//! 3. [`follow`]: removals at the home.

mod create;
pub mod driver;
pub mod fills;
pub mod follow;
mod machine;
pub mod report;
pub mod search;
pub mod sources;
pub mod ways;

pub use crate::message::Again;
pub use machine::{Action, Event, Outcome, Patience, Pull, Rules};
