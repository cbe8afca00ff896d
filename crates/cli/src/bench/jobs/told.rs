//! What the process at the other end of a job is told.

use std::os::fd::RawFd;

use serde::{Deserialize, Serialize};

/// Who waits for a frame and for the kernel that reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum By {
    /// The GPU: the CPU queues and goes on.
    Stream,
    /// The CPU: the GPU's streams never wait for another process.
    Host,
}

/// What it is told; the rest comes through its channel.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Told {
    /// To look at each frame whose descriptor comes. It answers with its processor time, and for
    /// each frame with the time from the producer's kernel to its own. `by` waits for the frame,
    /// and for its own kernel before the drop.
    Flow { bytes: u64, count: u64, by: By },
    /// The same with frames in slots of shared host memory, whose numbers come; it says when it has
    /// copied them.
    Copies {
        bytes: u64,
        count: u64,
        fd: RawFd,
        slots: u64,
    },
    /// To open the tensors whose descriptors come, and to say so once. It answers with bytes of the
    /// device it took.
    Tensors { count: u64 },
    /// The same with copies out of shared host memory, after one packet.
    CopiedTensors { count: u64, bytes: u64, fd: RawFd },
}
