//! A consumer of the benchmark: claims and drops what it is told, and times both beside their
//! floor.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use gpu_ipc::backend::{DevicePtr, MemHandle};
use gpu_ipc::{Gpu, Participant, ReceivedBlock, Stream, Wait};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::fixture::{PATIENCE, within};
use super::floor::{self, Floor, Foreign};
use super::raw_calls::Naked;
use super::sample::{Pairs, time};
use super::told::{Exported, Told};
use crate::bench::options::BenchConsumerOptions;
use crate::failure::Result;
use crate::{Outcome, child, device};

/// Calls in each sample of what goes through the driver.
pub const CALLS: usize = 8;
/// How long a region that nobody uses may stay mapped against the wish.
const UNMAPPING: Duration = Duration::from_secs(10);
/// Bytes of a bare question: what a ticket's is.
pub const QUESTION: usize = 40;
/// Bytes of its answer.
pub const ANSWER: usize = 72;
/// Bytes of a bare message in place of a descriptor's 256.
pub const BARE: usize = 255;

/// Runs until the input ends.
pub fn run(options: &BenchConsumerOptions) -> Outcome {
    child::live(|| serve(options))
}

fn serve(options: &BenchConsumerOptions) -> Result<()> {
    let gpu = device::find(options.consumer.backend.kind(), &options.consumer.device)?;
    let floor = floor::of(&gpu)?;
    let mut builder = Participant::builder(gpu.clone());
    if options.forgetful {
        builder = builder.mapping_cache(0, 0);
    }
    let participant = builder.connect(&options.consumer.socket)?;
    let stream = Stream::create(&gpu)?;
    let channel = options.channel.map(inherited);
    child::reply(&participant.id().0)?;
    let naked = Naked::new(&gpu, &*floor)?;
    let mut consumer = Consumer {
        gpu,
        floor: &*floor,
        naked,
        participant,
        stream,
        channel,
        held: VecDeque::new(),
        turns: 0,
    };
    while let Some(told) = child::next()? {
        child::reply(&consumer.obey(told)?)?;
    }
    Ok(())
}

/// Takes a descriptor that the parent left open for this process.
pub fn inherited(number: RawFd) -> OwnedFd {
    // SAFETY: `from_raw_fd` asks for an open descriptor that nobody else owns: the parent left it
    // open for this process and named it, and nothing else here knows its number.
    unsafe { OwnedFd::from_raw_fd(number) }
}

struct Consumer<'a> {
    gpu: Gpu,
    floor: &'a dyn Floor,
    naked: Naked<'a>,
    participant: Participant,
    stream: Stream,
    channel: Option<OwnedFd>,
    held: VecDeque<ReceivedBlock>,
    turns: usize,
}

impl Consumer<'_> {
    fn obey(&mut self, told: Told) -> Result<Vec<u64>> {
        match told {
            Told::Hold(descriptors) => {
                for bytes in descriptors {
                    self.held
                        .push_back(claim(&self.participant, &bytes, Wait::None)?);
                }
                Ok(Vec::new())
            }
            Told::Take(descriptors) => {
                for bytes in descriptors {
                    drop(claim(&self.participant, &bytes, Wait::None)?);
                }
                Ok(Vec::new())
            }
            Told::Lease(descriptors) => self.lease(&descriptors),
            Told::End => self.end(),
            Told::EndMany => self.end_many(),
            Told::Stretch { bytes, steps } => self.stretch(bytes, steps),
            Told::Redeem(descriptors) => self.redeem(&descriptors),
            // Not closed: the next command names it again.
            Told::Map(descriptor, Exported::Fd(fd, len)) => self.map(
                &descriptor,
                &ManuallyDrop::new(Foreign::Fd(inherited(fd), len)),
            ),
            Told::Map(descriptor, Exported::Handle(handle)) => {
                let bytes = handle.try_into().map_err(|_| "no handle")?;
                self.map(&descriptor, &Foreign::Handle(MemHandle(bytes)))
            }
            Told::Serve => self.serve(),
        }
    }

    fn lease(&mut self, descriptors: &[Vec<u8>]) -> Result<Vec<u64>> {
        let mut pairs = Pairs::new(CALLS);
        let mut left = descriptors.iter();
        self.naked.begin_waits();
        for _ in 0..descriptors.len() / CALLS {
            let ours = || {
                let bytes = left.next().ok_or("no descriptor is left")?;
                self.held
                    .push_back(claim(&self.participant, bytes, Wait::Stream(&self.stream))?);
                Ok(())
            };
            pairs.sample(ours, || self.naked.wait())?;
        }
        self.naked.end_waits()?;
        Ok(pairs.numbers())
    }

    fn end(&mut self) -> Result<Vec<u64>> {
        self.stream.synchronize()?;
        let mut pairs = Pairs::new(CALLS);
        for _ in 0..self.held.len() / CALLS {
            let ours = || {
                drop(self.held.pop_front());
                Ok(())
            };
            pairs.sample(ours, || self.naked.end(2))?;
        }
        self.held.clear();
        self.settle()?;
        Ok(pairs.numbers())
    }

    fn end_many(&mut self) -> Result<Vec<u64>> {
        self.stream.synchronize()?;
        let count = self.held.len();
        let mut pairs = Pairs::new(1);
        let ours_first = self.turn();
        for ours in [ours_first, !ours_first] {
            let start = Instant::now();
            if ours {
                ReceivedBlock::drop_many(self.held.drain(..));
                pairs.ours.push(start.elapsed().as_nanos() as f64);
            } else {
                self.naked.end(2 * count)?;
                pairs.floor.push(start.elapsed().as_nanos() as f64);
            }
            self.settle()?;
        }
        Ok(pairs.numbers())
    }

    /// What drops add to the stream that the blocks were used on.
    fn stretch(&mut self, bytes: u64, steps: u64) -> Result<Vec<u64>> {
        let backend = self.gpu.backend().clone();
        let sharing = self.gpu.default_sharing()?;
        let memory = backend.alloc(self.gpu.device(), bytes, sharing)?.base;
        let numbers = self.stretch_over(memory, bytes, steps);
        self.settle()?;
        // SAFETY: `free` asks for memory that came from `alloc`, is not freed, and that nobody
        // uses: the stream is settled.
        unsafe { backend.free(memory) }?;
        numbers
    }

    fn stretch_over(&mut self, memory: DevicePtr, bytes: u64, steps: u64) -> Result<Vec<u64>> {
        let stream = self.stream.raw();
        let floor = self.floor;
        let mut pairs = Pairs::new(1);
        let ours_first = self.turn();
        for ours in [ours_first, !ours_first] {
            // A start, so that the stream is never waiting for this thread.
            for _ in 0..4 {
                floor.fill(stream, memory, bytes)?;
            }
            let nanos = floor.stretch(stream, &mut || {
                for _ in 0..steps {
                    floor.fill(stream, memory, bytes)?;
                    if ours {
                        drop(self.held.pop_front());
                    }
                }
                Ok(())
            })?;
            if ours {
                pairs.ours.push(nanos)
            } else {
                pairs.floor.push(nanos)
            }
        }
        self.held.clear();
        Ok(pairs.numbers())
    }

    fn redeem(&mut self, descriptors: &[Vec<u8>]) -> Result<Vec<u64>> {
        let channel = self.channel.as_ref().ok_or("there is no channel")?;
        let mut pairs = Pairs::new(1);
        let mut left = descriptors.iter();
        let mut held = None;
        for _ in descriptors {
            let ours = || {
                let bytes = left.next().ok_or("no descriptor is left")?;
                held = Some(claim(&self.participant, bytes, Wait::None)?);
                Ok(())
            };
            let floor = || {
                send(channel, &[0; QUESTION], SendFlags::empty())
                    .map_err(|e| format!("send: {e}"))?;
                recv(channel, &mut [0; ANSWER], RecvFlags::empty())
                    .map_err(|e| format!("recv: {e}"))?;
                Ok(())
            };
            pairs.sample(ours, floor)?;
            drop(held.take());
        }
        Ok(pairs.numbers())
    }

    fn map(&mut self, descriptor: &[u8], foreign: &Foreign) -> Result<Vec<u64>> {
        let mut pairs = Pairs::new(1);
        let ours_first = self.turn();
        for ours in [ours_first, !ours_first] {
            if ours {
                let mut block = None;
                let mut map = || {
                    block = Some(claim(&self.participant, descriptor, Wait::None)?);
                    Ok(())
                };
                pairs.ours.push(time(1, &mut map)?);
                drop(block);
                // The next claim is to map again.
                within(UNMAPPING, "the region to be unmapped", || {
                    self.participant.mappings() == 0
                })?;
            } else {
                let mut opened = None;
                let mut open = || {
                    opened = Some(self.floor.open(foreign)?);
                    Ok(())
                };
                pairs.floor.push(time(1, &mut open)?);
                opened.map_or(Ok(()), |opened| self.floor.close(opened))?;
            }
        }
        Ok(pairs.numbers())
    }

    fn serve(&mut self) -> Result<Vec<u64>> {
        let channel = self.channel.as_ref().ok_or("there is no channel")?;
        let mut packet = [0; 256];
        loop {
            let (len, _) =
                recv(channel, &mut packet, RecvFlags::empty()).map_err(|e| format!("recv: {e}"))?;
            match len {
                0 | 1 => return Ok(Vec::new()),
                BARE => {}
                len => drop(claim(&self.participant, &packet[..len], Wait::None)?),
            }
            send(channel, &[1], SendFlags::empty()).map_err(|e| format!("send: {e}"))?;
        }
    }

    fn settle(&self) -> Result<()> {
        self.stream.synchronize()?;
        self.naked.settle()
    }

    /// Says whether ours comes first this time.
    fn turn(&mut self) -> bool {
        self.turns += 1;
        self.turns.is_multiple_of(2)
    }
}

/// Claims; a claim that waits longer than anybody would is an error.
fn claim(participant: &Participant, bytes: &[u8], wait: Wait<'_>) -> Result<ReceivedBlock> {
    Ok(participant.claim(bytes, wait, Some(PATIENCE))?)
}
