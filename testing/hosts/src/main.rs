//! Several hosts on one machine, and everything that goes wrong between them.
//!
//! A host is a keeper, a broker and a gateway in a network namespace of its own. Objects are
//! committed on one host and pulled by others while processes are killed and stopped, links go down
//! and peers misbehave. Whatever any host shows is compared with what was committed, byte for byte.
//!
//! 1. `cage`: a run leaves nothing behind, however it ends. `network`: hosts' networks. `relay`:
//!    between them.
//! 2. `rogue`: a peer that wants more than it was lent. `impostor`: one that takes another's name.
//!    `content`: bytes that say where they belong. `host`: processes of a host. `world`: hosts, and
//!    the ledger.
//! 3. `cases`: what is done to them. `random`: all of it at random.

mod cage;
mod cases;
mod content;
mod host;
mod impostor;
mod network;
mod random;
mod relay;
mod rogue;
mod watch;
mod world;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{Parser, Subcommand};
use gateway::net::call::{Question, ask};
use gateway::net::key::Gateway;
use gateway::net::session::{Address, Network, Trust};
use gateway::program::args::{CarrierOptions, PullOptions};

use host::Programs;
use world::Means;

/// This machine forbids what a run needs: not run, and not passed.
const NOT_RUN: u8 = 75;
/// Steps within which the control is caught: memory is used again under a pull in twenty of them.
const CONTROL_STEPS: u64 = 600;

#[derive(Parser)]
#[command(about = "Several hosts on one machine, and everything that goes wrong between them")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the cases
    Cases {
        /// Those alone whose name contains this
        only: Option<String>,
        #[command(flatten)]
        tested: Tested,
        /// Cases at a time
        #[arg(long, default_value_t = 4)]
        at_a_time: usize,
    },
    /// Do everything at random
    Random {
        #[command(flatten)]
        tested: Tested,
        /// For how long at most [default: 30; with --control, without end]
        #[arg(long)]
        seconds: Option<u64>,
        /// For how many steps at most [default: without end; with --control, 600]
        #[arg(long)]
        steps: Option<u64>,
        /// Where chance begins; else anywhere
        #[arg(long)]
        seed: Option<u64>,
        /// Commit what nobody confirmed: a mixture must be found
        #[arg(long)]
        control: bool,
    },
    /// Pull, and commit what nobody confirmed: the control
    #[command(hide = true)]
    PullWithoutConfirm(Box<PullOptions>),
    /// Lease an object, and read or write what was not lent
    #[command(hide = true)]
    Rogue(rogue::Rogue),
    /// Answer in another host's name
    #[command(hide = true)]
    Impostor(impostor::Impostor),
    /// Carry the bytes of the control
    #[command(hide = true)]
    Carrier(Box<CarrierOptions>),
    /// Ask a gateway, and print its answers: a replay
    #[command(hide = true)]
    Ask(Replay),
}

/// A question that was recorded.
#[derive(clap::Args)]
struct Replay {
    #[arg(long)]
    at: Address,
    #[arg(long)]
    host: String,
    #[arg(long)]
    incarnation: String,
    #[arg(long)]
    times: u32,
    question: String,
}

impl Replay {
    fn run(&self) -> Result<ExitCode, String> {
        let text = |e: serde_json::Error| e.to_string();
        let incarnation = serde_json::from_value(self.incarnation.clone().into()).map_err(text)?;
        let gateway = Gateway {
            host: self.host.clone(),
            incarnation,
        };
        let question: Question = serde_json::from_str(&self.question).map_err(text)?;
        let network = Network {
            listen: None,
            peers: vec![self.at],
            trust: Trust::Everybody,
        };
        let session = network.open().map_err(|e| e.to_string())?;
        for _ in 0..self.times {
            // Nobody answers before the connection is there.
            let answer = watch::until("an answer", || {
                ask(&session, &gateway, &question, watch::WATCHDOG)
                    .ok()?
                    .wait()
            })?;
            println!("{}", serde_json::to_string(&answer.answer).map_err(text)?);
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// What is tested.
#[derive(clap::Args)]
struct Tested {
    /// The program gpu-ipc
    #[arg(long)]
    broker: PathBuf,
    /// The program gpu-ipc-gateway
    #[arg(long)]
    gateway: PathBuf,
    /// What carries the bytes: tcp or nixl
    #[arg(long, default_value = "tcp")]
    carrier: String,
}

impl Tested {
    fn programs(&self) -> Result<Programs, String> {
        let find = |path: &Path| {
            path.canonicalize()
                .map_err(|e| format!("{}: {e}", path.display()))
        };
        let control = std::env::current_exe().map_err(|e| e.to_string())?;
        let (broker, gateway) = (find(&self.broker)?, find(&self.gateway)?);
        Ok(Programs {
            broker,
            gateway,
            control,
            carrier: self.carrier.clone(),
        })
    }
}

fn main() -> ExitCode {
    let outcome = match Args::parse().command {
        Command::PullWithoutConfirm(mut options) => {
            options.without_confirm = true;
            gateway::program::pull::run(&options).map_err(|e| e.to_string())
        }
        Command::Carrier(options) => options
            .run()
            .map(|()| ExitCode::SUCCESS)
            .map_err(|e| e.to_string()),
        Command::Rogue(rogue) => rogue.run(),
        Command::Impostor(impostor) => impostor.run(),
        Command::Ask(replay) => replay.run(),
        Command::Cases {
            only,
            tested,
            at_a_time,
        } => tested.programs().and_then(|programs| {
            cage::run(|place| cases(only.as_deref(), programs, place, at_a_time))
        }),
        Command::Random {
            tested,
            seconds,
            steps,
            seed,
            control,
        } => tested.programs().and_then(|programs| {
            let anywhere = || {
                SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |time| time.as_secs() % 1_000_000)
            };
            let seed = seed.unwrap_or_else(anywhere);
            let (time, most) = if control {
                (u64::from(u32::MAX), CONTROL_STEPS)
            } else {
                (30, u64::MAX)
            };
            let time = Duration::from_secs(seconds.unwrap_or(time));
            let plan = random::Plan {
                seed,
                time,
                steps: steps.unwrap_or(most),
                confirms: !control,
            };
            cage::run(|place| random(&plan, programs, place))
        }),
    };
    outcome.unwrap_or_else(|why| {
        eprintln!("hosts: NOT RUN: {why}");
        ExitCode::from(NOT_RUN)
    })
}

/// Does everything at random; the control must be caught.
fn random(plan: &random::Plan, programs: Programs, place: &Path) -> ExitCode {
    if let Err(why) = network::prepare() {
        eprintln!("hosts: NOT RUN: {why}");
        return ExitCode::from(NOT_RUN);
    }
    println!(
        "hosts: at random from seed {}{}",
        plan.seed,
        if plan.confirms {
            ""
        } else {
            ", without confirmations"
        }
    );
    let outcome = random::run(
        &Means {
            programs,
            place: place.to_owned(),
        },
        plan,
    );
    let passed = match &outcome {
        Ok(_) => plan.confirms,
        Err(why) => !plan.confirms && why.contains("a mixture"),
    };
    let (Ok(said) | Err(said)) = outcome;
    println!(
        "hosts: {}: {said}",
        if passed { "passed" } else { "FAILED" }
    );
    if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs the cases, some at a time.
fn cases(only: Option<&str>, programs: Programs, place: &Path, at_a_time: usize) -> ExitCode {
    if let Err(why) = network::prepare() {
        eprintln!("hosts: NOT RUN: {why}");
        return ExitCode::from(NOT_RUN);
    }
    let nixl = programs.carrier == "nixl";
    let means = Means {
        programs,
        place: place.to_owned(),
    };
    let wanted = |name: &str| {
        only.map_or(!nixl || cases::BY_NIXL.contains(&name), |only| {
            name.contains(only)
        })
    };
    let chosen: Vec<_> = cases::ALL.iter().filter(|(name, _)| wanted(name)).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..at_a_time.clamp(1, chosen.len().max(1)) {
            scope.spawn(|| {
                while let Some((name, case)) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let started = Instant::now();
                    let seen = case(&means);
                    let seconds = started.elapsed().as_secs_f64();
                    match seen {
                        Ok(seen) => println!("ok      {name}: {seen} ({seconds:.0} s)"),
                        Err(why) => {
                            println!("FAILED  {name} ({seconds:.0} s): {why}");
                            failed.lock().unwrap_or_else(|e| e.into_inner()).push(*name);
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(|e| e.into_inner());
    let (passed, carrier) = (chosen.len() - failed.len(), &means.programs.carrier);
    println!(
        "hosts: {passed} of {} cases passed, carried by {carrier}",
        chosen.len()
    );
    if failed.is_empty() && !chosen.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
