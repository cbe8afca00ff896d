//! `gpu-ipc-gateway pull`: gets one object, in a process of its own.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use gpu_ipc::broker::Readers;
use indicatif::{ProgressBar, ProgressStyle};
use zenoh::Wait;

#[cfg(feature = "faults")]
use super::args::Carrier;
use super::args::{Net, Place, PullOptions};
use super::state;
use crate::error::{Error, Result};
use crate::local::Local;
use crate::net::live::Live;
use crate::net::session::Network;
use crate::replica::driver::Fetch;
use crate::replica::report::{Failure, Kind, Report};
use crate::replica::sources::Order;
use crate::replica::{Patience, Rules};

/// How this process ends when a transfer may be writing yet; its death frees the memory.
const STUCK: u8 = 3;

/// Finds the network: what was given, else that of a gateway that runs here.
///
/// # Errors
///
/// [`Error::Invalid`] when there is neither.
pub fn network_of(place: &Place, net: &Net) -> Result<(Network, Net)> {
    if net.is_given() {
        return Ok((net.network(None)?, net.clone()));
    }
    let dir = place.dir()?;
    let Some(state) = state::all(&dir).into_iter().next() else {
        return Err(Error::Invalid {
            what: "the network",
            got: format!(
                "not given, and no gateway runs for the broker in {}",
                dir.display()
            ),
            must: "--peer tcp/ADDR with --tls or --insecure, or that of a gateway that runs here",
        });
    };
    let address = |text: &String| text.parse().ok();
    let peers = std::iter::once(&state.listen)
        .chain(&state.peers)
        .filter_map(address)
        .collect();
    let transport = match state.transport.as_str() {
        #[cfg(feature = "faults")]
        "tcp" => Carrier::Tcp,
        _ => net.transport,
    };
    let net = Net {
        peers,
        insecure: state.tls.is_none(),
        tls: state.tls,
        transport,
        link_gbit: net.link_gbit.or(state.link_gbit),
        ..net.clone()
    };
    Ok((net.network(None)?, net))
}

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
    let (network, net) = network_of(&options.place, &options.net)?;
    let host = options.place.host();
    let local = Local::connect(
        &host,
        options.place.broker.as_deref(),
        options.place.device.as_deref(),
    )?;
    let transport = net.carrier(network.own_address(), true)?;
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
        name: options.name.clone(),
        epoch: options.epoch,
        from: options.from.clone(),
    };
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template(
        "{msg} {bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    );
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(options.name.clone());
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
    let ended = fetch.run(&order, |bytes, all| {
        bar.set_length(all);
        bar.set_position(bytes);
    });
    bar.finish_and_clear();
    let Failure { kind, why } = match ended {
        Ok(report) => {
            if let (Some(way), Ok(dir)) = (report.way, options.place.dir()) {
                let Report {
                    from,
                    transport,
                    gb_s,
                    bytes,
                    ways,
                    ..
                } = report.clone();
                state::Path {
                    from,
                    transport,
                    way,
                    gb_s,
                    bytes,
                    ways,
                }
                .write(&dir);
            }
            say(&report, options.json);
            let _ = session.close().wait();
            return Ok(ExitCode::SUCCESS);
        }
        Err(failure) => failure,
    };
    if options.json {
        println!(
            "{}",
            serde_json::json!({ "ok": false, "error": why, "kind": kind })
        );
    } else {
        let end = if kind == Kind::Stuck {
            "; this process ends, and its memory with it"
        } else {
            ""
        };
        eprintln!(
            "gpu-ipc-gateway: {} was not pulled: {why}{end}",
            options.name
        );
    }
    if kind == Kind::Stuck {
        // Without a word to anybody: threads may be writing, and no destructor may unmap what they
        // write to.
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
            .ok();
        return Ok(ExitCode::from(STUCK));
    }
    let _ = session.close().wait();
    Ok(ExitCode::FAILURE)
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
}
