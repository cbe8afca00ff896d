//! A consumer of the demo: claims what it is told to, looks at the contents, replies, and lets go.
//!
//! | it is told | it does | it answers |
//! |---|---|---|
//! | `hold DESCRIPTOR STAMP` | claims, waits on its stream, compares the contents | `ok WRONG` |
//! | `again DESCRIPTOR` | claims what was claimed before | `ok REFUSED` |
//! | `finish N` | compares the first N it holds once more, replies into them, lets them go | `ok CHANGED` |
//! | `let-go` | compares the first that it holds once more, and lets it go | `ok CHANGED` |
//! | `forward ID` | asks for a descriptor of the first that it holds, for another participant | `ok DESCRIPTOR` |
//! | `fork` | forks a child that lives while its input is open | `ok` |

use std::collections::VecDeque;
use std::io::{BufRead, Write};

use gpu_ipc::{
    BackendKind, ClaimError, DevicePtr, Gpu, Participant, ParticipantId, ReceivedBlock, State, Stream, To, Wait,
};

use super::{pattern, pipe};
use crate::Outcome;
use crate::args::ConsumerOptions;

/// Runs until the input ends.
pub fn run(options: &ConsumerOptions) -> Outcome {
    // The demo may be killed too: nobody must be left over.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    match serve(options) {
        Ok(()) => Outcome::Good,
        Err(error) => {
            eprintln!("consumer {}: {error}", std::process::id());
            Outcome::Finding
        }
    }
}

struct Held {
    block: ReceivedBlock,
    stamp: u64,
}

struct Consumer {
    gpu: Gpu,
    stream: Stream,
    participant: Participant,
    held: VecDeque<Held>,
    buffer: Vec<u8>,
}

fn serve(options: &ConsumerOptions) -> Result<(), String> {
    let text = |error: gpu_ipc::Error| error.to_string();
    let kind: BackendKind = *options.backend.kinds().first().ok_or("no backend")?;
    let found = gpu_ipc::detect().map_err(text)?;
    let gpu = found
        .gpus()
        .iter()
        .find(|gpu| gpu.kind() == kind && gpu.uuid().to_string() == options.device)
        .ok_or("the producer's device is not visible here")?
        .clone();
    let stream = Stream::create(&gpu).map_err(text)?;
    let participant = Participant::builder(gpu.clone()).connect(&options.socket).map_err(text)?;
    let mut consumer = Consumer { gpu, stream, participant, held: VecDeque::new(), buffer: Vec::new() };
    answer(&[consumer.participant.id().0])?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| e.to_string())?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["forward", id] => say(&consumer.forward(id)?)?,
            _ => answer(&consumer.obey(&words)?)?,
        }
    }
    Ok(())
}

fn answer(numbers: &[u64]) -> Result<(), String> {
    let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
    say(&words.join(" "))
}

fn say(words: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "ok {words}").and_then(|()| out.flush()).map_err(|e| e.to_string())
}

impl Consumer {
    fn obey(&mut self, words: &[&str]) -> Result<Vec<u64>, String> {
        let number = |text: &str| text.parse::<u64>().map_err(|e| format!("{text}: {e}"));
        match *words {
            ["hold", descriptor, stamp] => {
                let stamp = number(stamp)?;
                let block = self.claim(descriptor).map_err(|error| error.to_string())?;
                let good = self.contents(&block)? && block.state() == State::Ready;
                let wrong = !good || !pattern::matches(&self.buffer, stamp);
                self.held.push_back(Held { block, stamp });
                Ok(vec![u64::from(wrong)])
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
                self.contents(&held.block)?;
                Ok(vec![u64::from(!pattern::matches(&self.buffer, held.stamp))])
            }
            ["fork"] => {
                fork_while_input_is_open()?;
                Ok(Vec::new())
            }
            _ => Err(format!("not understood: {}", words.join(" "))),
        }
    }

    fn claim(&self, descriptor: &str) -> Result<ReceivedBlock, ClaimError> {
        let bytes = pipe::unhex(descriptor).unwrap_or_default();
        self.participant.claim(&bytes, Wait::On(&self.stream), Some(pipe::WATCHDOG))
    }

    fn forward(&self, id: &str) -> Result<String, String> {
        let id = id.parse().map_err(|e| format!("{id}: {e}"))?;
        let held = self.held.front().ok_or("nothing is held")?;
        let to = To::Participant(ParticipantId(id));
        let descriptor = held.block.forward(to, Some(pipe::WATCHDOG)).map_err(|error| error.to_string())?;
        Ok(pipe::hex(descriptor.as_bytes()))
    }

    /// Copies a block's contents to the buffer.
    fn contents(&mut self, block: &ReceivedBlock) -> Result<bool, String> {
        let len = usize::try_from(block.len()).map_err(|e| e.to_string())?;
        self.buffer.resize(len, 0);
        let (to, from) = (self.buffer.as_mut_ptr(), block.device_ptr());
        // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is done: the
        // stream is synchronised before either goes, the buffer is as long as the block, and the block is held.
        unsafe { self.gpu.backend().copy_to_host(self.stream.raw(), to, from, len) }.map_err(|e| e.to_string())?;
        self.stream.synchronize().map_err(|e| e.to_string())?;
        Ok(true)
    }

    /// Looks whether the contents are still what they were, replies, and lets go.
    fn finish(&mut self, held: Held) -> Result<bool, String> {
        self.contents(&held.block)?;
        let changed = !pattern::matches(&self.buffer, held.stamp);
        pattern::fill(&mut self.buffer, pattern::reply(held.stamp));
        self.write(held.block.device_ptr())?;
        held.block.used_on(&self.stream);
        drop(held);
        // The buffer is read by the copy, so it is used again only when that is done.
        self.stream.synchronize().map_err(|e| e.to_string())?;
        Ok(changed)
    }

    fn write(&self, to: DevicePtr) -> Result<(), String> {
        let (from, len) = (self.buffer.as_ptr(), self.buffer.len());
        // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the copy is done: the
        // caller synchronises before it touches the buffer, and the block's lease ends after the stream's work.
        unsafe { self.gpu.backend().copy_to_device(self.stream.raw(), to, from, len) }.map_err(|e| e.to_string())
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        // After an error a copy may still be queued that uses the buffer. If the stream cannot be waited for, the buffer is
        // leaked.
        if self.stream.synchronize().is_err() {
            std::mem::forget(std::mem::take(&mut self.buffer));
        }
    }
}

/// Forks a child that holds what this process holds and does nothing, until the input that both have is closed.
fn fork_while_input_is_open() -> Result<(), String> {
    // SAFETY: `fork` asks that the child of a process with threads calls only async-signal-safe functions: it calls
    // `close`, `read` and `_exit`.
    match unsafe { libc::fork() } {
        -1 => Err(format!("fork: {}", std::io::Error::last_os_error())),
        0 => {
            // SAFETY: `close` asks for a descriptor that nobody uses afterwards: the child writes nothing.
            unsafe { libc::close(1) };
            let mut byte = 0u8;
            // SAFETY: `read` asks for as many writable bytes as it is told.
            while unsafe { libc::read(0, (&raw mut byte).cast(), 1) } > 0 {}
            // SAFETY: `_exit` has no conditions.
            unsafe { libc::_exit(0) }
        }
        _ => Ok(()),
    }
}
