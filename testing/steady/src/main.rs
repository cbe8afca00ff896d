//! The steady state: millions of cycles in one process, and nothing that grows.
//!
//! 1. [`run`] works until enough cycles are done, and at each of 30 quiet moments reads what the
//!    process takes.
//! 2. `work`: the cycles, and what comes and goes between them; `lender`: a session in another
//!    process.
//! 3. `reading`: what a process takes, and whether it grew; `control`: leaks on purpose, which must
//!    be found.

mod control;
mod lender;
mod reading;
mod work;

use std::time::{Duration, Instant};

use std::process::ExitCode;

use clap::{Args as Group, Parser, Subcommand};
use serde::Serialize;

use control::{Leak, Leaks};
use gpu_ipc_cli::choice::BackendChoice;
use gpu_ipc_cli::objects::keep::{self, KeepOptions};
use gpu_ipc_cli::objects::serve::{self, BrokerOptions};
use gpu_ipc_cli::{Outcome, device, output};
use harness::rng::Dice;
use lender::SteadyLenderOptions;
use reading::{Growth, Reading};
use work::{Done, Work};

/// Quiet moments in a run.
const LOOKS: usize = 30;

/// How often everything is done between two looks at least, however slow the machine is.
const EACH: usize = 2;

/// Options of `steady`.
#[derive(Group, Debug)]
pub struct SteadyOptions {
    /// Cycles of share, claim, drop and collect to do
    #[arg(long, value_name = "N", default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1000..))]
    pub cycles: u64,
    /// Work for this many seconds instead
    #[arg(
        long,
        value_name = "N",
        conflicts_with = "cycles",
        value_parser = clap::value_parser!(u64).range(1..=604_800)
    )]
    pub seconds: Option<u64>,
    /// Random seed; printed, and chosen by the system by default
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Which backend to use
    #[arg(long, value_enum, default_value = "host")]
    pub backend: BackendChoice,
    /// Leak on purpose; the run must find it
    #[arg(long, value_enum)]
    pub control: Option<Leak>,
    /// Print one JSON object instead of a text
    #[arg(long)]
    pub json: bool,
}

/// What a run found.
#[derive(Debug, Serialize)]
struct Report {
    backend: &'static str,
    seed: u64,
    seconds: f64,
    debug: bool,
    control: Option<Leak>,
    #[serde(flatten)]
    done: Done,
    looks: usize,
    /// What grew: nothing, or the reason why the run failed.
    grew: Vec<String>,
    growth: Vec<Growth>,
}

/// Does everything millions of times in one process, and finds out whether anything grows
#[derive(Parser, Debug)]
#[command(
    name = "gpu-ipc-steady",
    version,
    args_conflicts_with_subcommands = true
)]
#[command(after_help = "\
Examples:
  gpu-ipc-steady                                   ten million cycles
  gpu-ipc-steady --seconds 3600 --seed 7           an hour, with these random numbers
  gpu-ipc-steady --seconds 10 --control descriptor a leak on purpose, which must be found

Memory, descriptors, threads, mappings, the device's memory and the time of a cycle are read at 30 quiet moments, while
streams, participants, sessions, objects and regions of another process come and go. docs/TESTING.md says how it judges.

Exit status:
  0  nothing grew, and everything was done
  1  something grew, was not done, or the run stopped early
  2  wrong usage
  3  the requested backend has no device here")]
struct Args {
    #[command(flatten)]
    run: SteadyOptions,
    #[command(subcommand)]
    process: Option<Process>,
}

/// A process that the run starts.
#[derive(Subcommand, Debug)]
enum Process {
    /// A session whose regions the process under watch maps
    #[command(hide = true)]
    Lender(SteadyLenderOptions),
    /// A broker's keeper
    #[command(hide = true)]
    Keep(KeepOptions),
    /// A broker
    #[command(hide = true)]
    Broker(BrokerOptions),
}

fn main() -> ExitCode {
    #[cfg(feature = "hip")]
    gpu_ipc::hip::probe::run_if_asked();
    let args = Args::parse();
    let outcome = match args.process {
        None => run(&args.run),
        Some(Process::Lender(options)) => lender::run(&options),
        Some(Process::Keep(options)) => keep::run(&options),
        Some(Process::Broker(options)) => serve::run(&options),
    };
    ExitCode::from(outcome as u8)
}

/// Works, looks and judges.
fn run(options: &SteadyOptions) -> Outcome {
    let gpu = match device::choose(options.backend) {
        Ok(gpu) => gpu,
        Err(why) => return output::fail(&why, options.json, Outcome::Unavailable),
    };
    let seed = options
        .seed
        .unwrap_or_else(|| std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0));
    // A run that hangs has its seed on the terminal.
    output::complain(&format!("steady: seed {seed}"));
    let is_host = gpu.kind().in_host_memory();
    let backend = gpu.kind().name();
    let start = Instant::now();
    let worked = Work::new(gpu, Dice::new(seed, 0)).and_then(|work| endure(work, options));
    let (done, readings) = match worked {
        Ok(worked) => worked,
        Err(why) => {
            return output::fail(
                &format!("seed {seed}: {why}"),
                options.json,
                Outcome::Finding,
            );
        }
    };
    let growth = reading::growth(&readings, is_host);
    let grew: Vec<String> = growth.iter().filter_map(Growth::finding).collect();
    let shortfalls = done.shortfalls((LOOKS * EACH) as u64);
    let good = grew.is_empty() && shortfalls.is_empty();
    let seconds = start.elapsed().as_secs_f64();
    let debug = cfg!(debug_assertions);
    let report = Report {
        backend,
        seed,
        seconds,
        debug,
        control: options.control,
        done,
        looks: readings.len(),
        grew,
        growth,
    };
    let outcome = if good {
        Outcome::Good
    } else {
        Outcome::Finding
    };
    let text = if options.json {
        output::judged_run(good, &report, shortfalls)
    } else {
        report.text(&shortfalls)
    };
    output::conclude(&text, outcome)
}

/// Works until it is over, with a look at each quiet moment.
fn endure(mut work: Work, options: &SteadyOptions) -> Result<(Done, Vec<Reading>), String> {
    work.warm()?;
    let start = Instant::now();
    let mut leaks = options.control.map(Leaks::new);
    let mut readings = Vec::with_capacity(LOOKS);
    for look in 1..=LOOKS as u64 {
        let is_over = |done: u64| match options.seconds {
            Some(seconds) => {
                start.elapsed() >= Duration::from_secs(seconds).mul_f64(look as f64 / LOOKS as f64)
            }
            None => done * LOOKS as u64 >= options.cycles * look,
        };
        (0..EACH).try_for_each(|_| work.everything(leaks.as_mut()))?;
        while !is_over(work.done.cycles) {
            work.round(leaks.as_mut())?;
        }
        if let Some(leaks) = &mut leaks {
            leaks.look()?;
        }
        readings.push(work.rest(leaks.as_mut())?);
    }
    let done = work.done;
    work.end()?;
    Ok((done, readings))
}

impl Report {
    fn text(&self, shortfalls: &[String]) -> String {
        let done = &self.done;
        let mut text = format!(
            "{} cycles in {:.0} s on {}, seed {}; meanwhile came and went: {} streams, {} participants, {} sessions, \
             {} objects, {} tickets, {} regions of another process, {} blocks through limbo, {} fenced leases",
            done.cycles,
            self.seconds,
            self.backend,
            self.seed,
            done.streams,
            done.participants,
            done.sessions,
            done.objects,
            done.tickets,
            done.foreign,
            done.blocks,
            done.fenced
        );
        for growth in &self.growth {
            text += &format!("\n{}", growth.text());
        }
        for why in self.grew.iter().chain(shortfalls) {
            text += &format!("\nFAILED: {why}");
        }
        if self.grew.is_empty() && shortfalls.is_empty() {
            text += "\nnothing grew";
        }
        text
    }
}
