//! The jobs that people do, each beside what they use without this library, in one run.
//!
//! `flow`: frames of a camera and blocks of a KV cache, from one process to others at a fixed rate;
//! `weights`: tensors of a trainer that several processes open; `worker`: the process at the other
//! end; `memory`: what it has for itself.

// Tests: `crates/cli/tests/bench.rs`.

mod flow;
mod memory;
pub(crate) mod told;
mod weights;
pub mod worker;

use std::os::fd::OwnedFd;

use gpu_ipc::{Descriptor, Session};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::fixture::{Consumer, Stage};
use super::row::Row;
use super::sample::Figures;
use crate::failure::{Failure, Result};
pub use flow::{camera, kv};
pub use weights::rows as weights;

/// Bytes of a descriptor.
const DESCRIPTOR: usize = 192;
/// Bytes of the largest packet.
const PACKET: usize = 64 * DESCRIPTOR;

/// Makes the byte that a frame or a tensor is filled with: its neighbours have others.
fn contents(number: u64) -> u8 {
    (number % 251) as u8 + 1
}

/// The frame and the tensor that a control makes wrong.
const SPOILT: u64 = 7;

impl Stage {
    /// Returns the byte that a producer fills a frame or a tensor with.
    fn contents(&self, number: u64) -> u8 {
        if self.spoil && number == SPOILT {
            0
        } else {
            contents(number)
        }
    }
}

/// A worker, and the parent's end of its channel.
struct Worker {
    process: Consumer<told::Told>,
    channel: OwnedFd,
}

impl Worker {
    fn start(stage: &Stage, session: &Session) -> Result<Worker> {
        let (process, channel) = stage.worker(session)?;
        Ok(Worker { process, channel })
    }

    fn send(&self, packet: &[u8]) -> Result<()> {
        match send(&self.channel, packet, SendFlags::NOSIGNAL) {
            Ok(sent) if sent == packet.len() => Ok(()),
            Ok(sent) => Err(format!("{sent} bytes of {} were sent", packet.len()).into()),
            Err(error) => Err(format!("send: {error}").into()),
        }
    }

    fn send_all(&self, descriptors: &[Descriptor]) -> Result<()> {
        descriptors
            .chunks(PACKET / DESCRIPTOR)
            .try_for_each(|some| {
                let packet: Vec<u8> = some
                    .iter()
                    .flat_map(|descriptor| descriptor.as_bytes().to_vec())
                    .collect();
                self.send(&packet)
            })
    }

    /// Takes it down.
    fn end(mut self) -> Result<()> {
        Ok(self.process.child.wait()?)
    }

    /// Waits until it says that it is done with something. A worker that failed has said why,
    /// instead.
    fn wait_done(&mut self) -> Result<()> {
        match recv(&self.channel, &mut [0; 8], RecvFlags::empty()) {
            Ok((1, _)) => Ok(()),
            Ok(_) => Err(self
                .process
                .child
                .answer::<Vec<u64>>()
                .err()
                .unwrap_or_else(|| "a worker went away".to_owned())
                .into()),
            Err(error) => Err(format!("recv: {error}").into()),
        }
    }
}

/// Says why a job failed: what a worker said before it went away, or else what the parent met.
fn reason(workers: &mut [Worker], met: Failure) -> Failure {
    let said = workers.iter_mut().filter_map(|worker| {
        let left = recv(&worker.channel, &mut [0; 8], RecvFlags::DONTWAIT);
        let is_gone = matches!(left, Ok((0, _)) | Err(rustix::io::Errno::CONNRESET));
        is_gone
            .then(|| worker.process.child.answer::<Vec<u64>>().err())
            .flatten()
    });
    said.into_iter().next().map_or(met, Failure::from)
}

/// Puts a figure of a job beside the same of what people use today.
fn beside(row: Row, ours: Option<Figures>, today: Option<Figures>) -> Row {
    let row = row.figures(ours, None).baseline(today);
    let ratio = ours
        .zip(today)
        .filter(|(_, today)| today.median > 0.0)
        .map(|(ours, today)| ours.median / today.median);
    Row { ratio, ..row }.judged("no more than today", ratio.map(|ratio| ratio <= 1.0))
}
