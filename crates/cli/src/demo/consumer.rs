//! A consumer of the demo: does what it is [`Told`] with blocks, and answers.
//!
//! Once it was killed, the child that it forked reads its input: for each line it writes to all
//! that was held, where memory can be reached without the driver, and answers.

use std::collections::VecDeque;

use gpu_ipc::{ClaimError, Gpu, Participant, ParticipantId, ReceivedBlock, State, To, Wait};
use serde::{Deserialize, Serialize};

use super::watchdog::PATIENCE;
use crate::choice::ConsumerOptions;
use crate::copier::Copier;
use crate::{Outcome, child, device, pattern};

/// What a consumer writes all over what it holds before it is killed, and its child after.
const SCRIBBLE: u8 = 0xa5;
/// How often: on a GPU this takes longer than dying does, and fits a driver's queue.
const TIMES: u32 = 100;

/// What it is told, and what it answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum Told {
    /// To claim, wait on its stream, and compare the contents with the stamp's: whether they are
    /// others.
    Hold(Vec<u8>, u64),
    /// To claim what was claimed before: whether that was refused.
    Again(Vec<u8>),
    /// To compare the first that it holds once more, reply into it, and let it go: whether it
    /// changed.
    Finish,
    /// The same without a reply.
    LetGo,
    /// To ask for a descriptor of the first that it holds, for this participant: the descriptor.
    Forward(u64),
    /// To queue writes to all that it holds, without waiting for them.
    Overwrite,
    /// To fork a child that lives while its input is open, then as `Overwrite`: the child's number.
    /// It is told nothing more.
    Fork,
}

/// Runs until the input ends.
pub fn run(options: &ConsumerOptions) -> Outcome {
    child::live(|| serve(options))
}

struct Held {
    block: ReceivedBlock,
    stamp: u64,
}

struct Consumer {
    gpu: Gpu,
    copier: Copier,
    participant: Participant,
    held: VecDeque<Held>,
}

fn serve(options: &ConsumerOptions) -> Result<(), String> {
    let gpu = device::find(options.backend.kind(), &options.device)?;
    let copier = Copier::new(&gpu).map_err(|e| device::explain(&e))?;
    let participant = Participant::builder(gpu.clone())
        .connect(&options.socket)
        .map_err(|e| device::explain(&e))?;
    let mut consumer = Consumer {
        gpu,
        copier,
        participant,
        held: VecDeque::new(),
    };
    child::reply(&consumer.participant.id().0)?;
    while let Some(told) = child::next()? {
        consumer.obey(told)?;
    }
    Ok(())
}

impl Consumer {
    fn obey(&mut self, told: Told) -> Result<(), String> {
        match told {
            Told::Hold(descriptor, stamp) => {
                let block = self.claim(&descriptor).map_err(|error| error.to_string())?;
                let good = self.holds(&block, stamp)? && block.state() == State::Ready;
                self.held.push_back(Held { block, stamp });
                child::reply(&!good)
            }
            Told::Again(descriptor) => match self.claim(&descriptor) {
                Err(ClaimError::AlreadyClaimed) => child::reply(&true),
                Err(error) => Err(error.to_string()),
                Ok(_) => child::reply(&false),
            },
            Told::Finish => {
                let held = self.first()?;
                child::reply(&self.finish(held)?)
            }
            Told::LetGo => {
                let held = self.first()?;
                child::reply(&!self.holds(&held.block, held.stamp)?)
            }
            Told::Forward(to) => child::reply(&self.forward(ParticipantId(to))?),
            Told::Overwrite => child::reply(&self.overwrite()?),
            Told::Fork => {
                // In one command: whatever is written to the input from here on may be read by
                // either of the two.
                let child = self.fork_while_input_is_open()?;
                self.overwrite()?;
                child::reply(&child)
            }
        }
    }

    fn first(&mut self) -> Result<Held, String> {
        self.held
            .pop_front()
            .ok_or_else(|| "nothing is held".to_owned())
    }

    fn claim(&self, descriptor: &[u8]) -> Result<ReceivedBlock, ClaimError> {
        self.participant.claim(
            descriptor,
            Wait::Stream(self.copier.stream()),
            Some(PATIENCE),
        )
    }

    fn forward(&self, to: ParticipantId) -> Result<Vec<u8>, String> {
        let held = self.held.front().ok_or("nothing is held")?;
        let forwarded = held.block.forward(To::Participant(to), Some(PATIENCE));
        Ok(forwarded
            .map_err(|error| error.to_string())?
            .as_bytes()
            .to_vec())
    }

    fn holds(&mut self, block: &ReceivedBlock, stamp: u64) -> Result<bool, String> {
        self.copier
            .holds(block, stamp)
            .map_err(|e| device::explain(&e))
    }

    /// Looks whether the contents are still what they were, replies, and lets go.
    fn finish(&mut self, held: Held) -> Result<bool, String> {
        let changed = !self.holds(&held.block, held.stamp)?;
        self.copier
            .write(&held.block, pattern::reply(held.stamp))
            .map_err(|e| device::explain(&e))?;
        Ok(changed)
    }

    /// Queues writes to all that is held.
    fn overwrite(&mut self) -> Result<(), String> {
        for held in &self.held {
            self.copier
                .overwrite(&held.block, SCRIBBLE, TIMES)
                .map_err(|e| device::explain(&e))?;
        }
        Ok(())
    }

    /// Forks a child that keeps what this process holds, until the input that both have is closed.
    ///
    /// On the host backend it has the memory mapped, and writes to it when it is told to; a GPU's
    /// is out of its reach.
    fn fork_while_input_is_open(&self) -> Result<i32, String> {
        // All that the child needs is made before: it must not allocate.
        let reachable = self.gpu.kind().in_host_memory();
        let kept = self.held.iter().filter(|_| reachable);
        let memory: Vec<(*mut u8, usize)> = kept
            .map(|held| {
                (
                    held.block.device_ptr().0 as *mut u8,
                    usize::try_from(held.block.len()).unwrap_or(0),
                )
            })
            .collect();
        // SAFETY: `fork` asks that the child of a process with threads calls only async-signal-safe
        // functions: `overwrite_when_told` does.
        match unsafe { libc::fork() } {
            -1 => Err(format!("fork: {}", std::io::Error::last_os_error())),
            0 => overwrite_when_told(&memory),
            pid => Ok(pid),
        }
    }
}

/// Reads input byte by byte; at each line end, writes to the memory and answers. Ends with the
/// input.
fn overwrite_when_told(memory: &[(*mut u8, usize)]) -> ! {
    // As `child::reply(&())` does, which allocates.
    const ANSWER: &[u8] = b"{\"Ok\":null}\n";
    let mut byte = 0u8;
    // SAFETY: `read` asks for as many writable bytes as it is told.
    while unsafe { libc::read(0, (&raw mut byte).cast(), 1) } > 0 {
        if byte != b'\n' {
            continue;
        }
        for &(start, len) in memory {
            // SAFETY: `write_bytes` asks for writable bytes: the blocks that the parent held, whose
            // mappings a forked child has too and nobody takes away. Other processes may write
            // there at the same time; no value read depends on it.
            unsafe { start.write_bytes(SCRIBBLE, len) };
        }
        // SAFETY: `write` asks for as many readable bytes as it is told.
        unsafe { libc::write(1, ANSWER.as_ptr().cast(), ANSWER.len()) };
    }
    // SAFETY: `_exit` has no conditions.
    unsafe { libc::_exit(0) }
}
