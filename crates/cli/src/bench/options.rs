//! What the benchmark is asked for, and its processes.

use std::path::PathBuf;

use clap::{Args as Arguments, Subcommand, ValueEnum};

use crate::choice::{BackendChoice, ConsumerOptions, Vendor};

/// Rows that are measured together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Group {
    /// Bytes of a lease and of a block
    Memory,
    /// A lease's life without GPU work
    Protocol,
    /// The same with up to a million leases outstanding
    Leases,
    /// The same with up to 256 participants connected
    Participants,
    /// The same with eight threads
    Producers,
    /// Drops at the producer with up to 100,000 blocks in limbo
    Limbo,
    /// Collects with up to 100,000 leases held, and of released ones
    Collect,
    /// Share, claim, drop, and their sum
    Cycle,
    /// 64 blocks shared at once
    ShareMany,
    /// 64 blocks dropped in a row
    DropMany,
    /// What a drop adds to its stream
    DropStream,
    /// A ticket's claim
    Ticket,
    /// Share to answer between two processes
    RoundTrip,
    /// One block for up to 32 consumers
    FanOut,
    /// First mappings, 2 MiB to 32 GiB
    FirstMap,
    /// A consumer's death to reuse
    Death,
    /// Random frees and allocs
    AllocScript,
    /// Opens, swaps and restarts of a broker's objects
    Objects,
    /// A commit and a removal beside as many objects as there are descriptors for, 100,000 at most
    ManyObjects,
    /// Seals of a pool's blocks, and a dead holder's successor
    Pools,
    /// Frames at 1 kHz to several processes
    Camera,
    /// A trainer's tensors to four processes
    Weights,
    /// 10,000 blocks a second to another process
    Kv,
}

impl Group {
    /// Says whether it is a whole job, compared with copies through host memory.
    pub fn is_job(self) -> bool {
        matches!(self, Group::Camera | Group::Weights | Group::Kv)
    }

    /// Says whether it is of a broker's objects.
    pub fn is_of_objects(self) -> bool {
        matches!(self, Group::Objects | Group::ManyObjects | Group::Pools)
    }

    /// Returns its name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Options of `bench`.
#[derive(Arguments, Clone, Debug)]
pub struct BenchOptions {
    /// Which backend to use
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendChoice,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Measure only these rows
    #[arg(long, value_enum, value_name = "ROWS", num_args = 1.., value_delimiter = ',')]
    pub only: Vec<Group>,
    /// Measure whole jobs beside copies through host memory, instead of single calls
    #[arg(long, conflicts_with = "only")]
    pub jobs: bool,
    /// Make one frame and one tensor wrong, which must be found
    #[arg(long, hide = true)]
    pub spoil: bool,
    /// Replay an allocator's log instead (CSV with the columns Action, Pointer and Size)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "quick"])]
    pub replay: Option<PathBuf>,
    /// Show the table of an earlier run's --json instead of measuring
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "quick", "replay"])]
    pub from: Option<PathBuf>,
    /// Only check that everything can be measured: too few samples for figures
    #[arg(long)]
    pub quick: bool,
}

impl BenchOptions {
    /// Says whether these rows are to be measured.
    pub fn has(&self, group: Group) -> bool {
        match (self.only.is_empty(), self.jobs) {
            (false, _) => self.only.contains(&group),
            (true, true) => group.is_job() || group.is_of_objects(),
            (true, false) => !group.is_job(),
        }
    }
}

/// Options of a consumer of the benchmark.
#[derive(Arguments, Debug)]
pub struct BenchConsumerOptions {
    /// Options of every consumer.
    #[command(flatten)]
    pub consumer: ConsumerOptions,
    /// One end of a socket pair that it inherits
    #[arg(long, value_name = "FD")]
    pub channel: Option<i32>,
    /// Unmap what is not in use
    #[arg(long)]
    pub forgetful: bool,
}

/// Options of the process that measures the memory of leases.
#[derive(Arguments, Debug)]
pub struct BenchMemoryOptions {
    /// Which backend
    #[arg(long, value_enum)]
    pub backend: Vendor,
    /// Which device
    #[arg(long)]
    pub device: String,
    /// How many leases
    #[arg(long)]
    pub leases: usize,
    /// Of how many blocks
    #[arg(long)]
    pub blocks: usize,
}

/// What a reader of an object is told.
#[derive(Arguments, Debug)]
pub struct BenchObjectOptions {
    /// Which backend
    #[arg(long, value_enum)]
    pub backend: Vendor,
    /// Which device
    #[arg(long)]
    pub device: String,
    /// The broker's directory
    #[arg(long)]
    pub dir: PathBuf,
    /// The object
    #[arg(long)]
    pub name: String,
}

/// What a holder of a pool is told.
#[derive(Arguments, Debug)]
pub struct BenchPoolOptions {
    /// Where the pool is.
    #[command(flatten)]
    pub place: BenchObjectOptions,
    /// The pool's bytes
    #[arg(long)]
    pub bytes: u64,
}

/// A process of the benchmark.
#[derive(Subcommand, Debug)]
pub enum BenchProcess {
    /// A consumer
    Consumer(BenchConsumerOptions),
    /// The other end of a job
    Worker(BenchConsumerOptions),
    /// A process that measures the memory of leases
    Memory(BenchMemoryOptions),
    /// A reader of an object
    Object(BenchObjectOptions),
    /// A holder of a pool
    Pool(BenchPoolOptions),
}
