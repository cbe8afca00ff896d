//! The benchmark: what our calls cost, each beside the raw calls that it cannot do without, in one
//! run.
//!
//! 1. `options`: what is asked for. `sample`, `row`: times taken in turns, and what is made of
//!    them; `report`: how they are shown.
//! 2. `floor`, `raw_calls`, `words`: the raw calls, and a program that makes no others.
//! 3. `fixture`, `consumer`: sessions, and consumers in processes of their own.
//! 4. `jobs`: what people do, beside what they do it with today.
//! 5. `lease`, `mapping`, `round_trip`, `crowd`, `protocol`, `limbo`, `memory`, `script`,
//!    `objects`, `many_objects`, `pools`: the rows; `baseline`: another way of counting.

// Tests: `crates/cli/tests/bench.rs`.

mod baseline;
mod consumer;
mod crowd;
mod fixture;
mod floor;
mod jobs;
mod lease;
mod limbo;
mod many_objects;
mod mapping;
mod memory;
mod objects;
pub mod options;
mod pools;
mod protocol;
mod raw_calls;
mod report;
mod round_trip;
mod row;
mod sample;
mod script;
mod told;
mod words;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::ValueEnum;
use gpu_ipc::backend::thread;

use crate::failure::Result;
use crate::{Outcome, device, output};
use fixture::Stage;
use options::{BenchOptions, BenchProcess, Group};
use report::{Machine, Report};
use row::Row;

/// How long one group may take: a call of a driver that hangs cannot be told to stop.
const LIMIT: Duration = Duration::from_secs(240);

impl Group {
    /// What measures it.
    fn measure(self) -> fn(&Stage) -> Result<Vec<Row>> {
        match self {
            Group::Memory => memory::rows,
            Group::Protocol => protocol::protocol,
            Group::Leases => protocol::scale,
            Group::Participants => protocol::participants,
            Group::Producers => protocol::producers,
            Group::Limbo => limbo::drops,
            Group::Collect => limbo::collect,
            Group::Cycle => lease::cycle,
            Group::ShareMany => lease::share_many,
            Group::DropMany => lease::drop_many,
            Group::DropStream => lease::stretch,
            Group::Ticket => round_trip::ticket,
            Group::RoundTrip => round_trip::round_trip,
            Group::FanOut => crowd::fan_out,
            Group::FirstMap => mapping::rows,
            Group::Death => crowd::death,
            Group::AllocScript => script::pairs,
            Group::Objects => objects::rows,
            Group::ManyObjects => many_objects::rows,
            Group::Pools => pools::rows,
            Group::Camera => jobs::camera,
            Group::Weights => jobs::weights,
            Group::Kv => jobs::kv,
        }
    }
}

/// Runs the benchmark.
pub fn run(options: &BenchOptions) -> Outcome {
    if let Some(file) = &options.replay {
        return match script::replay(file, options.json) {
            Ok(text) => output::conclude(&text, Outcome::Good),
            Err(why) => output::fail(&String::from(why), options.json, Outcome::Finding),
        };
    }
    if let Some(file) = &options.from {
        return match Report::read(file) {
            Ok(report) => conclude(options, &report),
            Err(why) => output::fail(&String::from(why), options.json, Outcome::Finding),
        };
    }
    let gpu = match device::choose(options.backend) {
        Ok(gpu) => gpu,
        Err(why) => return output::fail(&why, options.json, Outcome::Unavailable),
    };
    let groups: Vec<Group> = Group::value_variants()
        .iter()
        .copied()
        .filter(|group| options.has(*group))
        .collect();
    let mut place = Machine::of(&gpu, options.quick);
    place.jobs = groups
        .iter()
        .all(|group| group.is_job() || group.is_of_objects());
    let stage = match Stage::new(gpu, options.quick) {
        Ok(stage) => Stage {
            spoil: options.spoil,
            ..stage
        },
        Err(why) => return output::fail(&String::from(why), options.json, Outcome::Finding),
    };
    let rows: Arc<Mutex<Vec<Row>>> = Arc::default();
    let watch = Watch::start(options.clone(), place.clone(), rows.clone());
    for group in groups {
        watch.begin(group);
        let measured = measure(&stage, group);
        rows.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(measured);
    }
    watch.end();
    let rows = std::mem::take(&mut *rows.lock().unwrap_or_else(PoisonError::into_inner));
    conclude(options, &Report::new(place, rows))
}

/// Lives as a process of a run.
pub fn run_process(process: &BenchProcess) -> Outcome {
    match process {
        BenchProcess::Consumer(options) => consumer::run(options),
        BenchProcess::Worker(options) => jobs::worker::run(options),
        BenchProcess::Memory(options) => memory::run(options),
        BenchProcess::Object(options) => objects::run_reader(options),
        BenchProcess::Pool(options) => pools::run_holder(options),
    }
}

/// Measures a group; whatever goes wrong is that group's alone.
fn measure(stage: &Stage, group: Group) -> Vec<Row> {
    let measured = catch_unwind(AssertUnwindSafe(|| group.measure()(stage)));
    let failed = match measured {
        Ok(Ok(rows)) => return rows,
        Ok(Err(why)) => why.into(),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or(panic.downcast_ref::<&str>().copied());
            format!("it panicked: {}", text.unwrap_or("without a word"))
        }
    };
    output::complain(&format!("bench: {}: {failed}", group.name()));
    vec![Row::failed(&group.name(), failed)]
}

/// Shows what there is. A goal that is missed is not an error; a row without numbers is.
fn conclude(options: &BenchOptions, report: &Report) -> Outcome {
    let outcome = if report.ok {
        Outcome::Good
    } else {
        Outcome::Finding
    };
    let width = rustix::termios::tcgetwinsize(io::stdout())
        .ok()
        .map(|size| size.ws_col.max(80));
    output::conclude(
        &if options.json {
            report.json()
        } else {
            report.text(width)
        },
        outcome,
    )
}

/// A thread that tells of each group, and that ends the program with what there is when one hangs.
#[derive(Debug)]
struct Watch(Sender<Option<Group>>);

impl Watch {
    fn start(options: BenchOptions, place: Machine, rows: Arc<Mutex<Vec<Row>>>) -> Watch {
        let (sender, groups) = channel::<Option<Group>>();
        let watch = move || {
            let mut running = None;
            loop {
                match groups.recv_timeout(LIMIT) {
                    Ok(None) | Err(RecvTimeoutError::Disconnected) => return,
                    Ok(Some(group)) => {
                        output::complain(&format!("bench: {}", group.name()));
                        running = Some(group);
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        let mut rows = std::mem::take(
                            &mut *rows.lock().unwrap_or_else(PoisonError::into_inner),
                        );
                        let name = running.map_or_else(String::new, Group::name);
                        rows.push(Row::failed(
                            &name,
                            format!("it hangs: more than {} s", LIMIT.as_secs()),
                        ));
                        let outcome = conclude(&options, &Report::new(place, rows));
                        std::process::exit(outcome as i32);
                    }
                }
            }
        };
        if let Err(error) = thread::start("gpu-ipc-watch", watch) {
            output::complain(&format!("bench: nothing ends it if it hangs: {error}"));
        }
        Watch(sender)
    }

    fn begin(&self, group: Group) {
        let _ = self.0.send(Some(group));
    }

    fn end(&self) {
        let _ = self.0.send(None);
    }
}
