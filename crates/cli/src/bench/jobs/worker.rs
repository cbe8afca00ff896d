//! The process at the other end of a job.
//!
//! Every answer stands for contents that were right: frames and tensors have their number in every
//! byte that is read.

use std::os::fd::{OwnedFd, RawFd};

use gpu_ipc::backend::DevicePtr;
use gpu_ipc::{Gpu, Participant, ReceivedBlock, Stream, Wait};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::time::{ClockId, clock_gettime};

use super::memory::{DeviceMemory, HostShared};
use super::told::{By, Told};
use super::{DESCRIPTOR, PACKET, contents};
use crate::bench::consumer::inherited;
use crate::bench::fixture::PATIENCE;
use crate::bench::floor::{self, Floor};
use crate::bench::options::BenchConsumerOptions;
use crate::failure::{Failure, Result};
use crate::{Outcome, child, device};

/// Words that are kept of each frame: when this process' kernel began, when the producer's ended,
/// and two of the frame.
const WORDS: u64 = 4;

/// Runs until the input ends.
pub fn run(options: &BenchConsumerOptions) -> Outcome {
    child::live(|| serve(options))
}

fn serve(options: &BenchConsumerOptions) -> Result<()> {
    let gpu = device::find(options.consumer.backend.kind(), &options.consumer.device)?;
    let floor = floor::of(&gpu)?;
    let participant = Participant::builder(gpu.clone()).connect(&options.consumer.socket)?;
    let stream = Stream::create(&gpu)?;
    let channel = inherited(options.channel.ok_or("a worker needs a channel")?);
    child::reply(&participant.id().0)?;
    let worker = Worker {
        gpu,
        floor: &*floor,
        participant,
        stream,
        channel,
    };
    while let Some(told) = child::next()? {
        let answer = match told {
            Told::Flow { bytes, count, by } => worker.flow(bytes, count, by)?,
            Told::Copies {
                bytes,
                count,
                fd,
                slots,
            } => worker.copies(bytes, count, fd, slots)?,
            Told::Tensors { count } => worker.tensors(count)?,
            Told::CopiedTensors { count, bytes, fd } => worker.copied_tensors(count, bytes, fd)?,
        };
        child::reply(&answer)?;
    }
    Ok(())
}

struct Worker<'a> {
    gpu: Gpu,
    floor: &'a dyn Floor,
    participant: Participant,
    stream: Stream,
    channel: OwnedFd,
}

impl Worker<'_> {
    fn flow(&self, bytes: u64, count: u64, by: By) -> Result<Vec<u64>> {
        let results = DeviceMemory::new(&self.stream, count * WORDS * 8)?;
        let (mut seen, before) = (0, process_nanos());
        let mut packet = vec![0; PACKET];
        while seen < count {
            let mut blocks = Vec::new();
            for block in self.claims(&mut packet, by)? {
                let block = block?;
                if block.len() != bytes {
                    return Err(format!("a frame has {} bytes, not {bytes}", block.len()).into());
                }
                self.look(&results, seen, block.device_ptr(), bytes)?;
                if by == By::Stream {
                    block.used_on(&self.stream)?;
                }
                blocks.push(block);
                seen += 1;
            }
            if by == By::Host {
                self.stream.synchronize()?;
            }
            ReceivedBlock::drop_many(blocks);
        }
        self.judge(&results, count, process_nanos() - before)
    }

    fn copies(&self, bytes: u64, count: u64, fd: RawFd, slots: u64) -> Result<Vec<u64>> {
        let shared = HostShared::map(&self.gpu, inherited(fd))?;
        let own = DeviceMemory::new(&self.stream, bytes)?;
        let results = DeviceMemory::new(&self.stream, count * WORDS * 8)?;
        let (mut seen, before) = (0, process_nanos());
        let mut packet = vec![0; PACKET];
        while seen < count {
            for word in self.packet(&mut packet)?.as_chunks::<8>().0 {
                let slot = u64::from_le_bytes(*word) % slots;
                self.bring(own.at(0), shared.at(slot * bytes), bytes)?;
                self.look(&results, seen, own.at(0), bytes)?;
                seen += 1;
            }
            self.stream.synchronize()?;
            self.say_done()?;
        }
        self.judge(&results, count, process_nanos() - before)
    }

    fn tensors(&self, count: u64) -> Result<Vec<u64>> {
        let before = self.taken()?;
        let mut packet = vec![0; PACKET];
        let mut tensors = Vec::with_capacity(count as usize);
        while (tensors.len() as u64) < count {
            for tensor in self.claims(&mut packet, By::Stream)? {
                tensors.push(tensor?);
            }
        }
        self.say_done()?;
        let took = self.taken()?.saturating_sub(before);
        let at: Vec<_> = tensors
            .iter()
            .map(|tensor| (tensor.device_ptr(), tensor.len()))
            .collect();
        self.compare(&at)?;
        ReceivedBlock::drop_many(tensors);
        Ok(vec![took])
    }

    fn copied_tensors(&self, count: u64, bytes: u64, fd: RawFd) -> Result<Vec<u64>> {
        let shared = HostShared::map(&self.gpu, inherited(fd))?;
        self.packet(&mut [0; 8])?;
        let before = self.taken()?;
        let own = DeviceMemory::new(&self.stream, count * bytes)?;
        for tensor in 0..count {
            self.bring(own.at(tensor * bytes), shared.at(tensor * bytes), bytes)?;
        }
        self.stream.synchronize()?;
        self.say_done()?;
        let took = self.taken()?.saturating_sub(before);
        let at: Vec<_> = (0..count)
            .map(|tensor| (own.at(tensor * bytes), bytes))
            .collect();
        self.compare(&at)?;
        Ok(vec![took])
    }

    /// Claims what comes in the next packet.
    fn claims(&self, packet: &mut [u8], by: By) -> Result<Vec<Result<ReceivedBlock, String>>> {
        let (descriptors, []) = self.packet(packet)?.as_chunks::<DESCRIPTOR>() else {
            return Err("a packet is not made of descriptors".into());
        };
        let wait = match by {
            By::Stream => Wait::Stream(&self.stream),
            By::Host => Wait::Host,
        };
        let claimed = self
            .participant
            .claim_many(descriptors, wait, Some(PATIENCE));
        Ok(claimed
            .into_iter()
            .map(|claimed| claimed.map_err(|e| e.to_string()))
            .collect())
    }

    fn packet<'p>(&self, packet: &'p mut [u8]) -> Result<&'p [u8]> {
        match recv(&self.channel, &mut *packet, RecvFlags::empty()) {
            Ok((0, _)) => Err("the channel ended before the job".into()),
            Ok((len, _)) => Ok(&packet[..len]),
            Err(error) => Err(format!("recv: {error}").into()),
        }
    }

    fn say_done(&self) -> Result<()> {
        send(&self.channel, &[1], SendFlags::NOSIGNAL)
            .map(drop)
            .map_err(|e| format!("send: {e}").into())
    }

    /// Queues what a consumer's kernel does with a frame: it says when it begins, and reads.
    fn look(&self, results: &DeviceMemory, frame: u64, at: DevicePtr, bytes: u64) -> Result<()> {
        let to = |word| results.at((frame * WORDS + word) * 8);
        self.floor.stamp(self.stream.raw(), to(0))?;
        for (word, offset) in [(1, bytes - 8), (2, 0), (3, (bytes / 2) & !7)] {
            // SAFETY: `copy` asks for a live stream and two ranges that are valid until the copy is
            // done: the frame is kept for the stream, and the results until it is waited for.
            unsafe {
                self.gpu
                    .backend()
                    .copy(self.stream.raw(), to(word), at.offset(offset), 8)
            }?;
        }
        Ok(())
    }

    fn bring(&self, to: DevicePtr, from: *const u8, bytes: u64) -> Result<()> {
        // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the
        // copy is done: both live until the stream is waited for.
        unsafe {
            self.gpu
                .backend()
                .copy_to_device(self.stream.raw(), to, from, bytes as usize)
        }
        .map_err(Failure::from)
    }

    fn words(&self, results: &DeviceMemory, count: u64) -> Result<Vec<u64>> {
        let mut words = vec![0u64; count as usize];
        let (to, len) = (words.as_mut_ptr().cast(), words.len() * 8);
        // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the
        // copy is done: it is waited for here.
        unsafe {
            self.gpu
                .backend()
                .copy_to_host(self.stream.raw(), to, results.at(0), len)
        }?;
        self.stream.synchronize()?;
        Ok(words)
    }

    /// Compares what every frame had with what it must have, and answers with the processor's time
    /// and the latencies.
    fn judge(&self, results: &DeviceMemory, count: u64, cpu: u64) -> Result<Vec<u64>> {
        let words = self.words(results, count * WORDS)?;
        let mut answer = vec![cpu];
        for (frame, seen) in (0..).zip(words.as_chunks::<4>().0) {
            let [began, ended, first, middle] = *seen;
            let expected = u64::from_ne_bytes([contents(frame); 8]);
            if (first, middle) != (expected, expected) || ended == 0 {
                return Err(format!(
                    "frame {frame} has {first:#x} and {middle:#x}, not {expected:#x}"
                )
                .into());
            }
            answer.push(began.saturating_sub(ended));
        }
        Ok(answer)
    }

    /// Compares the last word of each tensor with what it must be.
    fn compare(&self, tensors: &[(DevicePtr, u64)]) -> Result<()> {
        let results = DeviceMemory::new(&self.stream, tensors.len() as u64 * 8)?;
        for (index, (at, len)) in (0..).zip(tensors) {
            // SAFETY: `copy` asks for a live stream and two ranges that are valid until the copy is
            // done: the caller keeps the tensor, and the results wait for the stream.
            unsafe {
                self.gpu.backend().copy(
                    self.stream.raw(),
                    results.at(index * 8),
                    at.offset(len - 8),
                    8,
                )
            }?;
        }
        let words = self.words(&results, tensors.len() as u64)?;
        let wrong = (0..)
            .zip(words)
            .find(|&(tensor, word)| word != u64::from_ne_bytes([contents(tensor); 8]));
        wrong.map_or(Ok(()), |(tensor, word)| {
            Err(format!("tensor {tensor} has {word:#x}").into())
        })
    }

    /// Returns the bytes of the device that are taken; on the host backend, by this process.
    fn taken(&self) -> Result<u64> {
        // A GPU's memory is everybody's: the parent asks once.
        if !self.gpu.kind().in_host_memory() {
            return Ok(0);
        }
        let memory = self.gpu.backend().memory_info(self.gpu.device())?;
        Ok(memory.total_bytes - memory.free_bytes)
    }
}

/// The time that this process has run, on all processors.
pub fn process_nanos() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
