//! An engine: weights that are mapped, and a question that needs every byte of them.

use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu_ipc::broker::{Client, Epoch, Reader};
use gpu_ipc::{BackendKind, Gpu, Stream};

use super::NAME;
use super::graph::Graph;
use super::weights::word;

/// Weights, and how they are looked at.
pub struct Engine {
    stream: Stream,
    weights: Reader,
    look: Look,
}

enum Look {
    /// By kernels and copies in a graph that was captured once, over the addresses of the parts.
    Graph(Box<Graph>),
    /// On the host, a part at a time.
    Copy(Vec<u64>),
}

/// What an engine answers: the least and the greatest word of all weights. They differ if the
/// weights are a mix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The least.
    pub lowest: u64,
    /// The greatest.
    pub highest: u64,
}

impl Engine {
    /// Maps the newest weights, and returns the time that took too.
    pub fn open(client: &Client) -> Result<(Engine, Duration), Box<dyn Error>> {
        let stream = Stream::create(client.gpu())?;
        let start = Instant::now();
        let weights = client.open(NAME)?;
        let took = start.elapsed();
        weights.used_on(&stream)?;
        let look = match client.gpu().kind() {
            BackendKind::Cuda => Look::Graph(Box::new(Graph::capture(client, &stream, &weights)?)),
            _ => Look::Copy(Vec::new()),
        };
        Ok((
            Engine {
                stream,
                weights,
                look,
            },
            took,
        ))
    }

    /// Answers, from the addresses that it has had from the start.
    pub fn answer(&mut self) -> Result<Answer, Box<dyn Error>> {
        match &mut self.look {
            Look::Graph(graph) => graph.answer(&self.stream),
            Look::Copy(buffer) => look_at(
                self.weights
                    .layout()
                    .parts()
                    .iter()
                    .map(|part| &*part.spec.name),
                |name| {
                    buffer.clear();
                    let bytes = self.weights.read(name)?;
                    buffer.extend(
                        bytes
                            .chunks_exact(8)
                            .map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))),
                    );
                    Ok((
                        buffer.iter().copied().min().unwrap_or(u64::MAX),
                        buffer.iter().copied().max().unwrap_or(0),
                    ))
                },
            ),
        }
    }

    /// Answers, and fails unless the answer is that of the epoch which is mapped, and of no other.
    pub fn answer_right(&mut self) -> Result<Answer, Box<dyn Error>> {
        let answer = self.answer()?;
        let must = word(self.stamp()?);
        if (answer.lowest, answer.highest) == (must, must) {
            return Ok(answer);
        }
        Err(format!(
            "epoch {} is {must:#x}, but the answer was {answer:x?}",
            self.weights.epoch()
        )
        .into())
    }

    /// Moves to the newest epoch, at the same addresses.
    pub fn advance(&mut self) -> Result<bool, Box<dyn Error>> {
        Ok(self.weights.advance()?)
    }

    /// Returns the epoch that is mapped.
    pub fn epoch(&self) -> u64 {
        self.weights.epoch().0
    }

    /// Returns the stamp of the epoch that is mapped.
    pub fn stamp(&self) -> Result<u8, Box<dyn Error>> {
        Ok(*self
            .weights
            .layout()
            .user()
            .first()
            .ok_or("weights without a stamp")?)
    }
}

/// Returns the newest epoch, which a thread waits for as long as the process lives.
pub fn follow(client: &Client, mapped: u64) -> &'static AtomicU64 {
    static NEWEST: AtomicU64 = AtomicU64::new(0);
    NEWEST.store(mapped, Ordering::Relaxed);
    let client = client.clone();
    std::thread::spawn(move || {
        loop {
            let seen = Epoch(NEWEST.load(Ordering::Relaxed));
            if let Ok(Some((epoch, _))) = client.watch(NAME, seen, Duration::from_secs(3_600)) {
                NEWEST.store(epoch.0, Ordering::Relaxed);
            }
        }
    });
    &NEWEST
}

/// Takes the ends of what some looks found.
fn look_at<'a>(
    parts: impl Iterator<Item = &'a str>,
    mut look: impl FnMut(&str) -> Result<(u64, u64), Box<dyn Error>>,
) -> Result<Answer, Box<dyn Error>> {
    let mut answer = Answer {
        lowest: u64::MAX,
        highest: 0,
    };
    for part in parts {
        let (lowest, highest) = look(part)?;
        answer = Answer {
            lowest: answer.lowest.min(lowest),
            highest: answer.highest.max(highest),
        };
    }
    Ok(answer)
}

/// Returns the bytes of memory that are taken: on a GPU by everybody, without one by this process.
pub fn memory_taken(gpu: &Gpu) -> Result<u64, Box<dyn Error>> {
    if gpu.kind().in_host_memory() {
        let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
        let line = text
            .lines()
            .find(|line| line.starts_with("Pss_Shmem:"))
            .ok_or("smaps_rollup without Pss_Shmem")?;
        return Ok(line
            .split_whitespace()
            .nth(1)
            .ok_or("a line without a number")?
            .parse::<u64>()?
            << 10);
    }
    let memory = gpu.backend().memory_info(gpu.device())?;
    Ok(memory.total_bytes - memory.free_bytes)
}
