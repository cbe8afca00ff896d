//! `gpu-ipc broker`: owns objects.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args as Arguments;
use gpu_ipc::backend::detect_only;
use gpu_ipc::broker::keeper::process::SOCKET;
use gpu_ipc::broker::{Broker, Limits, Options};
use gpu_ipc::{BackendKind, Error, Gpu};

use super::BrokerDir;
use crate::device::explain;
use crate::log::LogOptions;
use crate::sessions::endpoint;
use crate::{Outcome, output, size};

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
    /// Most bytes of all objects together
    #[arg(long, value_name = "BYTES", value_parser = size::parse)]
    pub limit: Option<u64>,
    /// Most bytes of one user's objects
    #[arg(long, value_name = "BYTES", value_parser = size::parse)]
    pub limit_per_uid: Option<u64>,
    /// Most of each device's memory for objects, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 90, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub device_limit: u8,
    /// Most names that have an object; one that was removed counts no more
    #[arg(long, value_name = "N", default_value_t = 262_144, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit_names: u32,
    /// When a limit of bytes presses, remove objects that no process reads, the oldest first
    #[arg(long)]
    pub evict: bool,
    /// Remove an object that no process has read for so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub ttl: Option<u64>,
    /// A name that is neither evicted nor removed for its age, or the beginning of names with a `*`;
    /// repeatable
    #[arg(long, value_name = "NAME")]
    pub pin: Vec<String>,
    /// Number of epochs to keep of each name
    #[arg(long, value_name = "K", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub keep_epochs: u32,
    /// Another user that may connect; repeatable
    #[arg(long, value_name = "UID")]
    pub allow_uid: Vec<u32>,
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
    let _log = match options.log.start() {
        Ok(log) => log,
        Err(why) => return output::fail(&why, false, Outcome::Usage),
    };
    let broker = match serve(options) {
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

fn serve(options: &BrokerOptions) -> Result<Broker, String> {
    let (dir, devices) = (options.place.path()?, options.device.clone());
    let keeper = if options.keeper {
        Some(dir.join(SOCKET))
    } else {
        std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from)
    };
    let broker = Broker::open(Options {
        dir: dir.clone(),
        gpus: Arc::new(move || find(&devices)),
        limits: Limits {
            bytes: options.limit.unwrap_or(u64::MAX),
            bytes_per_uid: options.limit_per_uid.unwrap_or(u64::MAX),
            device_percent: options.device_limit,
            names: options.limit_names as usize,
            evict: options.evict,
            ttl: options.ttl.map(Duration::from_secs),
            pins: options.pin.clone(),
            epochs: options.keep_epochs as usize,
            reads_slots: !options.publish_blindly,
            ..Limits::default()
        },
        allowed: options.allow_uid.clone(),
        keeper,
    });
    let broker = broker.map_err(|error| explain(&error))?;
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
