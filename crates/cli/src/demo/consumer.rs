//! A consumer of the demo: claims what it is told to, looks at the contents, replies, and lets go.
//!
//! | it is told | it does | it answers |
//! |---|---|---|
//! | `hold DESCRIPTOR STAMP` | claims, waits on its stream, compares the contents | `ok WRONG` |
//! | `again DESCRIPTOR` | claims what was claimed before | `ok REFUSED` |
//! | `finish N` | compares the first N it holds once more, replies into them, lets them go | `ok CHANGED` |
//! | `let-go` | compares the first that it holds once more, and lets it go | `ok CHANGED` |
//! | `forward ID` | asks for a descriptor of the first that it holds, for another participant | `ok DESCRIPTOR` |
//! | `overwrite` | queues writes to all that it holds, and does not wait for them | `ok` |
//! | `fork` | forks a child that lives while its input is open, then as `overwrite`; it is told nothing more | `ok PID` |
//!
//! Once it was killed, the child reads its input: for each line it writes to all that was held, where memory can be
//! reached without the driver, and answers `ok`.

use std::collections::VecDeque;
use std::io::BufRead;

use gpu_ipc::{BackendKind, ClaimError, Gpu, Participant, ParticipantId, ReceivedBlock, State, To, Wait};

use super::PATIENCE;
use lab::args::ConsumerOptions;
use lab::copier::Copier;
use lab::{Outcome, child, device, hex, pattern};

/// What a consumer writes all over what it holds before it is killed, and its child after.
const SCRIBBLE: u8 = 0xa5;
/// How often: on a GPU this takes longer than dying does, and fits a driver's queue.
const TIMES: u32 = 100;

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
    let participant = Participant::builder(gpu.clone()).connect(&options.socket).map_err(|e| device::explain(&e))?;
    let mut consumer = Consumer { gpu, copier, participant, held: VecDeque::new() };
    child::reply(&[consumer.participant.id().0])?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| e.to_string())?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["forward", id] => child::line(&format!("ok {}", consumer.forward(id)?))?,
            _ => child::reply(&consumer.obey(&words)?)?,
        }
    }
    Ok(())
}

impl Consumer {
    fn obey(&mut self, words: &[&str]) -> Result<Vec<u64>, String> {
        let number = |text: &str| text.parse::<u64>().map_err(|e| format!("{text}: {e}"));
        match *words {
            ["hold", descriptor, stamp] => {
                let stamp = number(stamp)?;
                let block = self.claim(descriptor).map_err(|error| error.to_string())?;
                let good = self.holds(&block, stamp)? && block.state() == State::Ready;
                self.held.push_back(Held { block, stamp });
                Ok(vec![u64::from(!good)])
            }
            ["again", descriptor] => match self.claim(descriptor) {
                Err(ClaimError::AlreadyClaimed) => Ok(vec![1]),
                Err(error) => Err(error.to_string()),
                Ok(_) => Ok(vec![0]),
            },
            ["finish", count] => {
                let mut changed = 0;
                for _ in 0..number(count)? {
                    let Some(held) = self.held.pop_front() else { return Err("nothing is held".into()) };
                    changed += u64::from(self.finish(held)?);
                }
                Ok(vec![changed])
            }
            ["let-go"] => {
                let Some(held) = self.held.pop_front() else { return Err("nothing is held".into()) };
                Ok(vec![u64::from(!self.holds(&held.block, held.stamp)?)])
            }
            ["overwrite"] => {
                self.overwrite()?;
                Ok(Vec::new())
            }
            ["fork"] => {
                // In one command: whatever is written to the input from here on may be read by either of the two.
                let child = self.fork_while_input_is_open()?;
                self.overwrite()?;
                Ok(vec![child])
            }
            _ => Err(format!("not understood: {}", words.join(" "))),
        }
    }

    fn claim(&self, descriptor: &str) -> Result<ReceivedBlock, ClaimError> {
        let bytes = hex::decode(descriptor).unwrap_or_default();
        self.participant.claim(&bytes, Wait::Stream(self.copier.stream()), Some(PATIENCE))
    }

    fn forward(&self, id: &str) -> Result<String, String> {
        let id = id.parse().map_err(|e| format!("{id}: {e}"))?;
        let held = self.held.front().ok_or("nothing is held")?;
        let forwarded = held.block.forward(To::Participant(ParticipantId(id)), Some(PATIENCE));
        Ok(hex::encode(forwarded.map_err(|error| error.to_string())?.as_bytes()))
    }

    fn holds(&mut self, block: &ReceivedBlock, stamp: u64) -> Result<bool, String> {
        self.copier.holds(block, stamp).map_err(|e| device::explain(&e))
    }

    /// Looks whether the contents are still what they were, replies, and lets go.
    fn finish(&mut self, held: Held) -> Result<bool, String> {
        let changed = !self.holds(&held.block, held.stamp)?;
        self.copier.write(&held.block, pattern::reply(held.stamp)).map_err(|e| device::explain(&e))?;
        Ok(changed)
    }

    /// Queues writes to all that is held.
    fn overwrite(&mut self) -> Result<(), String> {
        for held in &self.held {
            self.copier.overwrite(&held.block, SCRIBBLE, TIMES).map_err(|e| device::explain(&e))?;
        }
        Ok(())
    }

    /// Forks a child that keeps what this process holds, until the input that both have is closed.
    ///
    /// On the host backend it has the memory mapped, and writes to it when it is told to; a GPU's is out of its reach.
    fn fork_while_input_is_open(&self) -> Result<u64, String> {
        // All that the child needs is made before: it must not allocate.
        let reachable = self.gpu.kind() == BackendKind::Host;
        let kept = self.held.iter().filter(|_| reachable);
        let memory: Vec<(*mut u8, usize)> = kept
            .map(|held| (held.block.device_ptr().0 as *mut u8, usize::try_from(held.block.len()).unwrap_or(0)))
            .collect();
        // SAFETY: `fork` asks that the child of a process with threads calls only async-signal-safe functions:
        // `overwrite_when_told` does.
        match unsafe { libc::fork() } {
            -1 => Err(format!("fork: {}", std::io::Error::last_os_error())),
            0 => overwrite_when_told(&memory),
            pid => u64::try_from(pid).map_err(|e| e.to_string()),
        }
    }
}

/// Reads input byte by byte; at each line end, writes to the memory and answers. Ends with the input.
fn overwrite_when_told(memory: &[(*mut u8, usize)]) -> ! {
    const ANSWER: &[u8] = b"ok\n";
    let mut byte = 0u8;
    // SAFETY: `read` asks for as many writable bytes as it is told.
    while unsafe { libc::read(0, (&raw mut byte).cast(), 1) } > 0 {
        if byte != b'\n' {
            continue;
        }
        for &(start, len) in memory {
            // SAFETY: `write_bytes` asks for writable bytes: the blocks that the parent held, whose mappings a forked
            // child has too and nobody takes away. Other processes may write there at the same time; no value read
            // depends on it.
            unsafe { start.write_bytes(SCRIBBLE, len) };
        }
        // SAFETY: `write` asks for as many readable bytes as it is told.
        unsafe { libc::write(1, ANSWER.as_ptr().cast(), ANSWER.len()) };
    }
    // SAFETY: `_exit` has no conditions.
    unsafe { libc::_exit(0) }
}
