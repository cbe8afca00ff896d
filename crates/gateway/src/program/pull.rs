//! `gpu-ipc-gateway pull`: gets objects, by the gateway that runs here, or in a process of its own
//! where a network is given or none runs.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use gpu_ipc::broker::Readers;
use indicatif::{ProgressBar, ProgressStyle};
use zenoh::Wait;

use super::args::PullOptions;
use super::pulls::{self, Request, Said, die, note};
use super::state::network_of;
use crate::error::{Error, Result};
use crate::local::Local;
use crate::net::live::Live;
use crate::replica::driver::Fetch;
use crate::replica::report::{Failure, Kind, Report};
use crate::replica::sources::Order;
use crate::replica::{Patience, Rules};

/// How this process ends when a transfer may be writing yet; its death frees the memory.
const STUCK: u8 = 3;

/// Pulls.
///
/// # Errors
///
/// What keeps it from beginning; with `--json` it is printed instead.
pub fn run(options: &PullOptions) -> Result<ExitCode> {
    match pull(options) {
        Err(error) if options.json => {
            let kind = if matches!(error, Error::Invalid { .. }) {
                "invalid"
            } else {
                "unavailable"
            };
            println!(
                "{}",
                serde_json::json!({ "ok": false, "error": error.to_string(), "kind": kind })
            );
            Ok(ExitCode::from(2))
        }
        other => other,
    }
}

fn pull(options: &PullOptions) -> Result<ExitCode> {
    // A control of tests is no gateway's.
    if !options.net.is_given() && !options.without_confirm {
        let mut shown = Shown::new(options.json);
        let asked = pulls::ask(&options.place.dir()?, &request(options), |said| {
            shown.say(said)
        });
        if let Some(ended) = asked {
            return ended.map(|()| shown.end());
        }
    }
    pull_here(options)
}

fn request(options: &PullOptions) -> Request {
    let (everybody, uids) = match &options.readers {
        Some(Readers::Everybody) => (true, Vec::new()),
        Some(Readers::Uids(uids)) => (false, uids.clone()),
        _ => (false, Vec::new()),
    };
    Request {
        names: options.names.clone(),
        patterns: options.patterns.clone(),
        groups: options.groups.clone(),
        from: options.from.clone(),
        epoch: options.epoch,
        way: options.way,
        land: options.land,
        everybody,
        uids,
        attempts: options.attempts,
        wait_s: options.wait_s,
        stall_s: options.stall_s,
        answer_s: options.answer_s,
        follow: options.follow,
    }
}

/// What is printed of objects.
struct Shown {
    json: bool,
    bar: ProgressBar,
    failed: bool,
}

impl Shown {
    fn new(json: bool) -> Shown {
        let bar = ProgressBar::new(0);
        let style = ProgressStyle::with_template(
            "{msg} {bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
        );
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Shown {
            json,
            bar,
            failed: false,
        }
    }

    fn say(&mut self, said: Said) {
        match said {
            Said::Progress(name, bytes, all) if all > 0 => self.progress(&name, bytes, all),
            Said::Found(_) | Said::Progress(..) | Said::End => {}
            Said::Done(report) => {
                self.bar.suspend(|| say(&report, self.json));
            }
            Said::Failed(name, failure) => {
                self.failed = true;
                self.bar.suspend(|| complain(&name, &failure, self.json));
            }
        }
    }

    fn progress(&self, name: &str, bytes: u64, all: u64) {
        self.bar.set_message(name.to_owned());
        self.bar.set_length(all);
        self.bar.set_position(bytes);
    }

    fn end(self) -> ExitCode {
        self.bar.finish_and_clear();
        if self.failed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        }
    }
}

/// Pulls one object in this process.
fn pull_here(options: &PullOptions) -> Result<ExitCode> {
    let many = !options.patterns.is_empty() || !options.groups.is_empty() || options.follow;
    let [name] = &options.names[..] else {
        return Err(without_a_gateway(options.names.len()));
    };
    if many {
        return Err(without_a_gateway(2));
    }
    let (network, net) = network_of(&options.place, &options.net)?;
    let host = options.place.host();
    let local = Local::connect(
        &host,
        options.place.broker.as_deref(),
        options.place.device.as_deref(),
    )?;
    let transport = net.carrier(network.own_address(), true, local.place())?;
    let session = network.open()?;
    let live = Arc::new(Live::listen(&session)?);
    let patience = Patience {
        attempts: options.attempts,
        stall: Duration::from_secs(options.stall_s),
        answer: Duration::from_secs(options.answer_s),
        busy: Duration::from_secs(options.wait_s),
        ..Patience::default()
    };
    let rules = Rules {
        confirms: !options.without_confirm,
    };
    let order = Order {
        name: name.clone(),
        epoch: options.epoch,
        from: options.from.clone(),
    };
    let shown = Shown::new(options.json);
    let (pace, way, land) = (net.pace(), options.way, options.land);
    let fetch = Fetch {
        local: &local,
        session: &session,
        live,
        transport,
        patience,
        pace,
        way,
        land,
        readers: options.readers.clone().unwrap_or(Readers::Owner),
        rules,
    };
    let ended = fetch.run(&order, |bytes, all| shown.progress(name, bytes, all));
    shown.bar.finish_and_clear();
    match ended {
        Ok(report) => {
            note(&report, &options.place.dir()?);
            say(&report, options.json);
            let _ = session.close().wait();
            Ok(ExitCode::SUCCESS)
        }
        Err(failure) => {
            complain(name, &failure, options.json);
            if failure.kind == Kind::Stuck {
                die();
                return Ok(ExitCode::from(STUCK));
            }
            let _ = session.close().wait();
            Ok(ExitCode::FAILURE)
        }
    }
}

fn without_a_gateway(names: usize) -> Error {
    Error::Invalid {
        what: "the names to pull",
        got: format!("{names} or more, and no gateway that runs here is asked"),
        must: "one name; for more, for patterns and to follow start `gpu-ipc gateway`, and leave --peer, --tls and \
               --insecure out",
    }
}

fn complain(name: &str, failure: &Failure, json: bool) {
    let Failure { kind, why } = failure;
    if json {
        let said = serde_json::json!({ "ok": false, "name": name, "error": why, "kind": kind });
        println!("{said}");
    } else {
        let end = if *kind == Kind::Stuck {
            "; its process ends, and its memory with it"
        } else {
            ""
        };
        eprintln!("gpu-ipc-gateway: {name} was not pulled: {why}{end}");
    }
}

fn say(report: &Report, json: bool) {
    let Report {
        name,
        epoch,
        identity,
        from,
        bytes,
        gb_s,
        retries,
        way,
        ..
    } = report;
    let by = way.map_or(String::new(), |way| format!(", {way}"));
    if json {
        println!("{}", serde_json::to_string(report).unwrap_or_default());
    } else if report.was_here {
        println!("{name}  epoch {epoch}  {identity}  was here already");
    } else {
        println!(
            "{name}  epoch {epoch}  {identity}  from {from}  {bytes} bytes at {gb_s:.2} GB/s{by}, {retries} retries"
        );
    }
    let _ = std::io::stdout().flush();
}
