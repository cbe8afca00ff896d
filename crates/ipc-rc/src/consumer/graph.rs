//! Blocks that a captured graph uses.

// Tests: `tests/processes/gpu.rs`.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use gpu_api::lock::Acquire;
use gpu_api::{Error, ForkGuard, Result};

use crate::consumer::leases::lease::Lease;
use crate::stream::Stream;

/// What a captured graph uses, kept for as long as the graph may be launched.
///
/// A graph runs again whenever it is launched, long after the last drop of what it was captured
/// with; so its blocks are [kept for it](crate::ReceivedBlock::keep_for), and given back when the
/// last clone of this is dropped: after the graph itself is destroyed. Every stream that it is
/// launched on is named with [`launched_on`](GraphBlocks::launched_on).
///
/// # Examples
///
/// ```
/// # use backend_host::{HostBackend, HostConfig};
/// # use gpu_api::{DeviceId, Gpu};
/// # use ipc_rc::{After, GraphBlocks, Participant, Session, Stream, To, Wait};
/// # let dir = tempfile::tempdir()?;
/// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
/// # let participant = Participant::builder(gpu.clone()).connect(session.socket_path())?;
/// # let block = session.alloc(4096)?;
/// # let descriptor = block.share(To::Participant(participant.id()), After::Done)?;
/// let weights = participant.claim(descriptor.as_bytes(), Wait::Host, None)?;
/// let graph = GraphBlocks::new();
/// weights.keep_for(&graph);
/// // ... capture kernels that read `weights`, end the capture ...
/// drop(weights); // the graph keeps it
/// let stream = Stream::create(&gpu)?;
/// graph.launched_on(&stream)?; // at every launch
/// // ... destroy the graph ...
/// drop(graph); // the lease ends when the stream is done
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct GraphBlocks(Arc<Graph>);

/// In a forked child the blocks are the parent's, and the lock may be too: nothing is done there.
struct Graph {
    /// `None` where forked children cannot be told apart: no device is found there either.
    fork: Option<ForkGuard>,
    kept: Mutex<Kept>,
}

impl Default for Graph {
    fn default() -> Graph {
        Graph {
            fork: ForkGuard::new().ok(),
            kept: Mutex::default(),
        }
    }
}

#[derive(Default)]
struct Kept {
    leases: Vec<Lease>,
    /// For blocks that are kept after a launch.
    launched_on: Vec<Stream>,
}

impl GraphBlocks {
    /// Makes an empty list.
    pub fn new() -> GraphBlocks {
        GraphBlocks::default()
    }

    /// Names a stream that the graph is launched on: the blocks are given back after its work.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the per-thread default stream (handle 2): the thread that drops the
    /// list may be another.
    pub fn launched_on(&self, stream: &Stream) -> Result<()> {
        stream.refuse_per_thread()?;
        let mut kept = self.kept().ok_or(Error::forked("this graph's blocks"))?;
        kept.leases.iter().for_each(|lease| lease.used_on(stream));
        if !kept
            .launched_on
            .iter()
            .any(|known| known.key() == stream.key())
        {
            kept.launched_on.push(stream.clone());
        }
        Ok(())
    }

    pub(crate) fn keep(&self, lease: Lease) {
        let Some(mut kept) = self.kept() else { return };
        kept.launched_on
            .iter()
            .for_each(|stream| lease.used_on(stream));
        kept.leases.push(lease);
    }

    fn kept(&self) -> Option<MutexGuard<'_, Kept>> {
        let own = !self.0.fork.is_some_and(|fork| fork.is_child());
        own.then(|| self.0.kept.acquire())
    }
}

impl fmt::Debug for GraphBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphBlocks")
            .field("blocks", &self.kept().map_or(0, |kept| kept.leases.len()))
            .finish()
    }
}
