//! Leases on GPU memory for other processes, limbo for dropped blocks that they still hold, and
//! collect for released ones.
//!
//! Read in this order:
//!
//! 1. [`transport`]: descriptors, messages, words in shared memory, the socket, proof of death.
//! 2. `producer`: [`Session`] and [`SentBlock`]: share, drop, limbo, collect, proof of death.
//! 3. `consumer`: [`Participant`] and [`ReceivedBlock`]: connect, claim, map, use, release.
//!
//! [`Gone`] is in the errors of both sides, and [`RegionSource`] is where the bytes of blocks come from.
//!
//! This crate knows no vendor: it sees [`gpu_api::GpuBackend`] alone. It keeps nothing process-wide
//! but a count of threads, and on a user's thread it makes no call that can block unless the call's
//! documentation says so.
//!
//! # Example
//!
//! ```
//! use backend_host::{HostBackend, HostConfig};
//! use gpu_api::{DeviceId, Gpu};
//! use ipc_rc::{After, Participant, Session, To, Wait};
//!
//! let dir = tempfile::tempdir()?;
//! let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
//! let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
//! let participant = Participant::builder(gpu).connect(session.socket_path())?; // usually in another process
//!
//! let block = session.alloc(4096)?;
//! let descriptor = block.share(To::Participant(participant.id()), After::Done)?;
//! drop(block); // limbo: the lease outlives the handle
//! let received = participant.claim(descriptor.as_bytes(), Wait::Host, None)?;
//! assert_eq!(received.len(), 4096);
//! drop(received);
//! assert!(session.shutdown(std::time::Duration::from_secs(60)).blocks == 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// Tests: `crates/ipc-rc/tests/session.rs`, `tests/processes`.

mod consumer;
mod contents;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod gone;
mod gpu_event;
mod notices;
mod producer;
mod range;
mod shard;
mod stream;

pub use allocators::{
    Export, Holder, Lent, Piece, Reclaim, Reclaimed, Region, RegionSource, SourceUsage,
};
pub use consumer::builder::ParticipantBuilder;
pub use consumer::claim_error::ClaimError;
pub use consumer::connecting::Connecting;
pub use consumer::graph::GraphBlocks;
pub use consumer::inspect::{SessionReport, inspect, sessions, snapshot};
pub use consumer::notice::Notice;
pub use consumer::participant::Participant;
pub use consumer::received_block::{ReceivedBlock, State};
pub use consumer::wait::Wait;
pub use contents::{Contents, SentSlice};
pub use gone::Gone;
pub use producer::blocks::tokens::AdoptToken;
pub use producer::builder::SessionBuilder;
pub use producer::grants::ticket::Claims;
pub use producer::loan::{Loan, Released};
pub use producer::notice::{Departure, SessionNotice};
pub use producer::report::{ShutdownReport, Stats};
pub use producer::sent_block::SentBlock;
pub use producer::session::{Collected, Session};
pub use producer::share::{After, ShareOptions, To};
pub use stream::Stream;
pub use transport::wire::descriptor;
pub use transport::wire::descriptor::{Descriptor, LeaseId, SessionId};
pub use transport::wire::message::DepositId;

/// The protocols, for model checkers: not part of the API.
#[cfg(gpu_ipc_loom)]
pub mod model {
    pub use crate::consumer::leases::handle_count::HandleCount;
    pub use crate::consumer::mappings::use_count::{Leave, UseCount};
    pub use crate::producer::blocks::count::{Amount, Cell as Count};
    pub use crate::producer::blocks::reclaimed::ReclaimedBlocks;
    pub use crate::producer::grants::slot_group::{Effort, SlotGroups, Terms};
}
