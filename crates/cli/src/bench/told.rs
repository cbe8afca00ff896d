//! What the other processes of the benchmark are told.

use std::os::fd::RawFd;

use serde::{Deserialize, Serialize};

/// What a consumer is told. It answers with nanoseconds, ours and the floor's in turns, where
/// something is timed.
#[derive(Debug, Serialize, Deserialize)]
pub enum Told {
    /// To claim these descriptors, and hold.
    Hold(Vec<Vec<u8>>),
    /// To claim, and drop at once.
    Take(Vec<Vec<u8>>),
    /// To claim on its stream behind work that is not done, in turns with raw waits.
    Lease(Vec<Vec<u8>>),
    /// To drop all that it holds, in turns with the raw calls of a release.
    End,
    /// To drop all that it holds at once, and to release as many in one raw batch.
    EndMany,
    /// To time its stream with a drop after each step, and without.
    Stretch {
        /// Bytes that a step fills.
        bytes: u64,
        /// How many steps.
        steps: u64,
    },
    /// To claim tickets, in turns with bare questions to the other end of its channel.
    Redeem(Vec<Vec<u8>>),
    /// To map for the first time, in turns with the raw calls.
    Map(Vec<u8>, Exported),
    /// To claim and drop what comes through its channel and say so, until an empty packet.
    Serve,
}

/// Memory of the bare program, for a raw mapping.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Exported {
    /// A file descriptor that the consumer inherited, and the bytes.
    Fd(RawFd, u64),
    /// A vendor's handle.
    Handle(Vec<u8>),
}
