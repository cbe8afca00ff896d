//! `gpu-ipc broker`: owns objects.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args as Arguments;
use gpu_ipc::backend::detect_only;
use gpu_ipc::broker::keeper::process::SOCKET;
use gpu_ipc::broker::{Broker, Limits, Options};
use gpu_ipc::{BackendKind, Error, Gpu};

use super::BrokerDir;
use super::options_file::{OptionsFile, Rules};
use super::reload::Hangup;
use super::rules::RuleOptions;
use crate::device::explain;
use crate::log::{Filter, LogOptions};
use crate::sessions::endpoint;
use crate::{Outcome, output};

/// Options of a broker.
#[derive(Arguments, Debug)]
pub struct BrokerOptions {
    /// Which broker.
    #[command(flatten)]
    pub place: BrokerDir,
    /// A device for objects, such as cuda:0 or host:0; repeatable [default: all devices of the
    /// first backend that has one]
    #[arg(long, value_name = "DEVICE", value_parser = device)]
    pub device: Vec<(BackendKind, u32)>,
    /// What it allows.
    #[command(flatten)]
    pub rules: RuleOptions,
    /// A file of these options in TOML, whose keys are their names, and `log`. It holds in place of
    /// the command line, and is read again on SIGHUP: `gpu-ipc reload`
    #[arg(long, value_name = "FILE")]
    pub options: Option<PathBuf>,
    /// Give everything to the keeper of the directory, which did not start this broker [default: to
    /// that of $NOTIFY_SOCKET]
    #[arg(long)]
    pub keeper: bool,
    /// Serve its metrics over HTTP at this address, as 127.0.0.1:9400: /metrics, for whoever reaches
    /// it
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<SocketAddr>,
    /// Its log.
    #[command(flatten)]
    pub log: LogOptions,
    /// Publish at the commit's message, without reading the slots: the torture's control
    #[arg(long, hide = true)]
    pub publish_blindly: bool,
}

/// Serves until the process ends.
pub fn run(options: &BrokerOptions) -> Outcome {
    let started = match Started::read(options) {
        Ok(started) => started,
        Err(why) => return output::fail(&why, false, Outcome::Usage),
    };
    let log = LogOptions {
        log: started.rules.log.clone().or(options.log.log.clone()),
        ..options.log
    };
    let log = match log.start() {
        Ok(log) => log,
        Err(why) => return output::fail(&why, false, Outcome::Usage),
    };
    let broker = match serve(options, started, log.filter()) {
        Ok(broker) => broker,
        Err(why) => return output::fail(&why, false, Outcome::Finding),
    };
    // A device that is not there is a mistake in the command, and would be at the next start: the
    // keeper ends with its broker. Where there are objects they are served first, whatever has
    // become of the device.
    if !options.device.is_empty()
        && broker.restored() == 0
        && let Err(error) = find(&options.device)
    {
        return output::fail(&explain(&error), false, Outcome::Usage);
    }
    broker.run()
}

/// What the command line and the file of options say at the start.
struct Started {
    rules: Rules,
    file: Option<(OptionsFile, Hangup)>,
    /// What is wrong with the file: those of its copy hold.
    why: Option<String>,
}

impl Started {
    fn read(options: &BrokerOptions) -> Result<Started, String> {
        let Some(path) = &options.options else {
            let rules = Rules {
                rules: options.rules.clone(),
                log: None,
            };
            return Ok(Started {
                rules,
                file: None,
                why: None,
            });
        };
        let hangup = Hangup::take()?;
        let file = OptionsFile::new(path, &options.place.path()?, &options.rules);
        let (rules, why) = match file.read() {
            Ok(rules) => (rules, None),
            Err(why) => match file.read_copy() {
                Some(rules) => (rules, Some(why)),
                None => return Err(why),
            },
        };
        Ok(Started {
            rules,
            file: Some((file, hangup)),
            why,
        })
    }
}

fn serve(options: &BrokerOptions, started: Started, filter: Filter) -> Result<Broker, String> {
    let (dir, devices) = (options.place.path()?, options.device.clone());
    let keeper = if options.keeper {
        Some(dir.join(SOCKET))
    } else {
        std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from)
    };
    let limits_of = {
        let reads_slots = !options.publish_blindly;
        move |rules: &RuleOptions| Limits {
            reads_slots,
            ..rules.limits()
        }
    };
    let Started { rules, file, why } = started;
    let mut limits = limits_of(&rules.rules);
    if file.is_some() {
        // Nothing goes before the file is read again, which may be long after this process began to
        // wait for another broker's end.
        (limits.epochs, limits.ttl, limits.pool_ttl) = (usize::MAX, None, None);
    }
    let broker = Broker::open(Options {
        dir: dir.clone(),
        gpus: Arc::new(move || find(&devices)),
        limits,
        allowed: rules.rules.allowed(),
        keeper,
    });
    let mut broker = broker.map_err(|error| explain(&error))?;
    if let Some((file, hangup)) = file {
        broker.reads_again(file.path());
        let control = broker.control();
        let hold = move |read: Rules| {
            filter.set(read.log);
            control.change(limits_of(&read.rules), read.rules.allowed());
        };
        let control = broker.control();
        let stay = move |why: String| {
            tracing::error!(why, "the options stay as they were");
            control.refuse(why);
        };
        match file.read() {
            Ok(read) => hold(read),
            Err(now) => {
                hold(rules);
                stay(why.unwrap_or(now));
            }
        }
        hangup.each(move || match file.read() {
            Ok(read) => hold(read),
            Err(why) => stay(why),
        })?;
    }
    // Not before: another broker may serve at the same address.
    if let Some(address) = options.metrics {
        endpoint::start(address, dir)?;
    }
    Ok(broker)
}

/// Finds the devices that were named, or all of the first backend that has one whose memory can be
/// an object.
fn find(named: &[(BackendKind, u32)]) -> gpu_ipc::Result<Vec<Gpu>> {
    if named.is_empty() {
        for kind in BackendKind::ALL {
            let found = detect_only(kind)?;
            let fit: Vec<Gpu> = found
                .gpus()
                .iter()
                .filter(|gpu| gpu.caps().ranges)
                .cloned()
                .collect();
            if !fit.is_empty() {
                return Ok(fit);
            }
        }
    }
    let mut gpus = Vec::new();
    for &(kind, number) in named {
        let found = detect_only(kind)?;
        let gpu = found.gpus().iter().find(|gpu| gpu.device().0 == number);
        match gpu {
            Some(gpu) => gpus.push(gpu.clone()),
            // The reason why there is no such backend says more than the number of the device.
            None => {
                found.backend(kind)?;
                let got = format!("{kind}:{number}, of {} devices", found.gpus().len());
                return Err(Error::invalid(
                    "a device",
                    got,
                    "one that this process sees",
                ));
            }
        }
    }
    Ok(gpus)
}

/// Reads a device, as `cuda:0`.
fn device(text: &str) -> Result<(BackendKind, u32), String> {
    let (name, number) = text.split_once(':').unwrap_or((text, "0"));
    let kind = BackendKind::ALL
        .into_iter()
        .find(|kind| kind.name() == name);
    match (kind, number.parse()) {
        (Some(kind), Ok(number)) => Ok((kind, number)),
        _ => Err(format!(
            "{text:?} is not a device such as cuda:0, hip:1 or host:0"
        )),
    }
}
