//! A log of allocations, read back and done again on another allocator.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use gpu_api::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::{Allocator, Request};

/// One line of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Step {
    /// Something was allocated, and from here on is known under a number of the trace's own.
    Alloc {
        /// The number: how many were allocated before.
        slot: u32,
        /// Bytes.
        bytes: u64,
        /// Alignment.
        align: u64,
    },
    /// It was freed.
    Free {
        /// Its number.
        slot: u32,
    },
}

/// What a [`Log`](crate::Log) or RMM's logging adaptor wrote, in the order of its lines.
///
/// # Examples
///
/// ```
/// use allocators::{Bfc, BfcOptions, Simulated, Trace};
///
/// let csv = "Thread,Time,Action,Pointer,Size,Stream\n0,0.1,allocate,0x100,4096,0\n0,0.2,free,0x100,4096,0\n";
/// let trace: Trace = csv.parse()?;
/// let replayed = trace.replay(&Bfc::new(BfcOptions::new("what if"), Simulated::new()))?;
/// assert_eq!((replayed.allocs, replayed.frees, replayed.left), (1, 1, 0));
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Trace {
    steps: Vec<Step>,
    slots: u32,
    unknown_frees: u64,
}

/// What a replay did.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Replayed {
    /// Allocations.
    pub allocs: u64,
    /// Frees.
    pub frees: u64,
    /// Allocations for which there was no room.
    pub failures: u64,
    /// Allocations that the log never freed: leaks of what was logged. They were freed at the end.
    pub left: u64,
    /// The most bytes in use, as the allocator counts them.
    pub peak_in_use: u64,
    /// The most bytes taken from upstream.
    pub peak_reserved: u64,
    /// Nanoseconds that the steps took together.
    pub nanos: u64,
}

impl Replayed {
    /// Returns the part of the memory at its peak that nobody had in use.
    pub fn peak_fragmentation(&self) -> f64 {
        match self.peak_reserved {
            0 => 0.0,
            reserved => 1.0 - self.peak_in_use as f64 / reserved as f64,
        }
    }
}

impl Trace {
    /// Makes a trace of steps, in which every number is allocated before it is freed, and once.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for one that is not.
    pub fn new(steps: Vec<Step>) -> Result<Trace> {
        let mut live = Vec::new();
        for (at, step) in steps.iter().enumerate() {
            let good = match *step {
                Step::Alloc { slot, .. } if slot as usize == live.len() => {
                    live.push(true);
                    true
                }
                Step::Alloc { .. } => false,
                Step::Free { slot } => live.get_mut(slot as usize).is_some_and(std::mem::take),
            };
            if !good {
                let must = "an allocation with the next number, or a free of a live one";
                return Err(Error::invalid(
                    "a step of a trace",
                    format!("{step:?} as number {at}"),
                    must,
                ));
            }
        }
        Ok(Trace {
            slots: live.len() as u32,
            steps,
            unknown_frees: 0,
        })
    }

    /// Returns the steps.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Counts the frees of addresses that the log does not show being allocated; they are left out.
    pub fn unknown_frees(&self) -> u64 {
        self.unknown_frees
    }

    /// Does every step on an allocator, and frees at the end what the log never freed.
    ///
    /// # Errors
    ///
    /// What the allocator gives, but for [`Error::OutOfMemory`], which is counted.
    pub fn replay(&self, allocator: &dyn Allocator) -> Result<Replayed> {
        let mut addresses: Vec<Option<u64>> = vec![None; self.slots as usize];
        let mut replayed = Replayed::default();
        allocator.clear_stats();
        let start = Instant::now();
        for step in &self.steps {
            match *step {
                Step::Alloc { slot, bytes, align } => {
                    match allocator.alloc(Request::new(bytes).align(align)) {
                        Ok(placed) => addresses[slot as usize] = Some(placed.address),
                        Err(Error::OutOfMemory { .. }) => replayed.failures += 1,
                        Err(error) => return Err(error),
                    }
                    replayed.allocs += 1;
                }
                Step::Free { slot } => {
                    // What there was no room for cannot be freed.
                    if let Some(address) = addresses[slot as usize].take() {
                        allocator.free(address)?;
                        replayed.frees += 1;
                    }
                }
            }
        }
        replayed.nanos = u64::try_from(start.elapsed().max(Duration::from_nanos(1)).as_nanos())
            .unwrap_or(u64::MAX);
        let stats = allocator.stats();
        (replayed.peak_in_use, replayed.peak_reserved) =
            (stats.peak_bytes_in_use, stats.peak_bytes_reserved);
        for address in addresses.into_iter().flatten() {
            allocator.free(address)?;
            replayed.left += 1;
        }
        Ok(replayed)
    }
}

impl std::str::FromStr for Trace {
    type Err = Error;

    /// Reads a log with a header that names at least `Action`, `Pointer` and `Size`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with the number of the line.
    fn from_str(csv: &str) -> Result<Trace> {
        let mut lines = csv.lines().enumerate();
        let header: Vec<&str> = lines
            .next()
            .map_or_else(Vec::new, |(_, line)| line.trim_end().split(',').collect());
        let column = |name| header.iter().position(|&other| other == name);
        let (Some(action), Some(pointer), Some(size)) =
            (column("Action"), column("Pointer"), column("Size"))
        else {
            return Err(Error::invalid(
                "the header of a log",
                header.join(","),
                "a line with the columns Action, Pointer and Size",
            ));
        };
        let align = column("Align");
        let mut trace = Trace::default();
        let mut live: HashMap<u64, u32> = HashMap::new();
        for (at, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            let wrong =
                |must| Error::invalid("a line of a log", format!("line {}: {line}", at + 1), must);
            let fields: Vec<&str> = line.trim_end().split(',').collect();
            let field = |column: usize| fields.get(column).copied().unwrap_or("");
            let address = number(field(pointer)).ok_or_else(|| wrong("one with an address"))?;
            match field(action) {
                "allocate" => {
                    let bytes = number(field(size)).ok_or_else(|| wrong("one with a size"))?;
                    let align = align
                        .and_then(|column| number(field(column)))
                        .filter(|align| align.is_power_of_two());
                    // Some allocators hand out nothing for no bytes; nothing is what it costs.
                    if bytes == 0 {
                        continue;
                    }
                    let slot = trace.slots;
                    trace.slots = slot
                        .checked_add(1)
                        .ok_or_else(|| wrong("one of fewer than 2^32 allocations"))?;
                    trace.steps.push(Step::Alloc {
                        slot,
                        bytes,
                        align: align.unwrap_or(1),
                    });
                    live.insert(address, slot);
                }
                "free" => match live.remove(&address) {
                    Some(slot) => trace.steps.push(Step::Free { slot }),
                    None => trace.unknown_frees += 1,
                },
                "allocate failure" => {}
                _ => return Err(wrong("`allocate`, `allocate failure` or `free`")),
            }
        }
        Ok(trace)
    }
}

/// Reads a number, in hex with or without `0x` where it does not read as a decimal one.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().or_else(|_| u64::from_str_radix(text, 16)).ok(),
    }
}
