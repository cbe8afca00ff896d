//! The arguments.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args as Arguments, Parser, Subcommand, ValueEnum};
use gpu_ipc::broker::Readers;

use super::certs::CertsOptions;
use super::log::LogOptions;
use crate::carrier::{client, worker};
use crate::error::{Error, Result};
use crate::message::Incarnation;
use crate::net::call::MOST_RING;
use crate::net::session::{Address, Network, Trust};
use crate::origin::TELL;
use crate::origin::rings::Slots;
use crate::transport::choice::{Land, Way};
use crate::transport::nixl::Nixl;
use crate::transport::nixl::find::Surroundings;
use crate::transport::staging::shape;
#[cfg(feature = "faults")]
use crate::transport::tcp::{Faults, Tcp};
use crate::transport::{self, Transport};
use gpu_ipc_gateway_plan::Pace;

/// Users besides its own that an object may be open to.
const MOST_READERS: usize = 16;

/// Replicas of gpu-ipc's objects on other hosts
#[derive(Parser, Debug)]
#[command(version)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Serve this host's objects to other hosts
    Run(Box<RunOptions>),
    /// Get objects from other hosts
    Pull(PullOptions),
    /// Pull for others of this host: the child of a gateway
    #[command(hide = true)]
    Pulls(Box<RunOptions>),
    /// Carry bytes for a gateway, and do nothing else: its child
    #[command(hide = true)]
    Carrier(CarrierOptions),
    /// List the objects of all hosts
    Objects(ObjectsOptions),
    /// Say what this host's gateways do
    Status(StatusOptions),
    /// Make an authority, and a certificate for each host
    Certs(CertsOptions),
}

/// Which broker.
#[derive(Arguments, Clone, Debug)]
pub struct Place {
    /// The broker's directory; else $NVIDIA_DRA_LOCAL_IPC_DIR, else `broker` in the runtime
    /// directory
    #[arg(long, value_name = "DIR")]
    pub broker: Option<PathBuf>,
    /// The broker's device, as cuda:0; else the first that there is
    #[arg(long)]
    pub device: Option<String>,
    /// The name of this host; else what the kernel says
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,
}

/// Which network.
#[derive(Arguments, Clone, Debug)]
pub struct Net {
    /// A gateway to connect to, which tells of the others: tcp/10.0.0.2:7447
    #[arg(long = "peer", value_name = "tcp/ADDR")]
    pub peers: Vec<Address>,
    /// Certificate, private key and authority, PEM files: both sides show a certificate of this
    /// authority
    #[arg(long, num_args = 3, value_names = ["CERT", "KEY", "CA"], conflicts_with = "insecure")]
    pub tls: Option<Vec<PathBuf>>,
    /// Let every host in that reaches the port
    #[arg(long)]
    pub insecure: bool,
    /// Gbit/s that a read reaches on this network: one that takes half as long again lets others
    /// beside it [default: 8]
    #[arg(long, value_name = "GBIT", value_parser = gbit)]
    pub link_gbit: Option<f64>,
    /// What carries the bytes
    #[arg(long, value_enum, default_value_t = Carrier::Nixl, hide = true)]
    pub transport: Carrier,
    /// Neither end nor fail after this number of bytes
    #[cfg(feature = "faults")]
    #[arg(long, hide = true)]
    pub stall_after: Option<u64>,
    /// Carry the bytes of host memory in this process, as those of a device are, and not in a caged one
    /// of their own: docs/HOSTS.md, The fabric
    #[arg(long)]
    pub uncaged: bool,
    /// Alter the byte at this place of each range that is read
    #[cfg(feature = "faults")]
    #[arg(long, hide = true)]
    pub alter_at: Option<u64>,
    /// Bytes of one request of NIXL's, so that a read of few bytes has a middle
    #[cfg(feature = "faults")]
    #[arg(long, hide = true)]
    pub piece_bytes: Option<u64>,
    /// Read by an agent with a progress thread, to compare
    #[arg(long, hide = true)]
    pub progress_thread: bool,
    /// The address of this host that bytes are carried by: its interface's, and the RDMA devices of
    /// that; else that of --listen. $UCX_NET_DEVICES names devices instead
    #[arg(long, value_name = "IP")]
    pub carrier_address: Option<IpAddr>,
    /// The user that the process is which speaks to the fabric, if the gateway may change users
    #[arg(long, value_name = "UID", default_value_t = NOBODY)]
    pub carrier_user: u32,
}

/// The least patience for an answer: a gateway that registers an object says so twice in it.
const LEAST_ANSWER_S: u64 = 1;
const _: () = assert!(TELL.as_millis() * 2 <= LEAST_ANSWER_S as u128 * 1000);

/// The user that owns nothing.
const NOBODY: u32 = 65_534;

/// Options of `carrier`.
#[derive(Arguments, Clone, Debug)]
pub struct CarrierOptions {
    /// What carries the bytes.
    #[command(flatten)]
    pub net: Net,
    /// The address to listen on, for plain TCP.
    #[arg(long)]
    pub address: IpAddr,
    /// Whether it reads, and is not read from.
    #[arg(long)]
    pub reads: bool,
}

impl CarrierOptions {
    /// Carries, until the process at the other end of standard input ends.
    ///
    /// # Errors
    ///
    /// What keeps it from carrying.
    pub fn run(&self) -> Result<()> {
        let libraries = match self.net.transport {
            Carrier::Nixl => Surroundings::of_process().candidates().unwrap_or_default(),
            #[cfg(feature = "faults")]
            Carrier::Tcp => Vec::new(),
        };
        // Its plug-ins lie beside the library's folder. It is looked for again, where it is named.
        let named = ["GPU_IPC_NIXL", "VIRTUAL_ENV", "CONDA_PREFIX"].map(std::env::var_os);
        let folders: Vec<PathBuf> = libraries
            .iter()
            .filter_map(|library| Some(library.parent()?.parent()?.to_owned()))
            .chain(named.into_iter().flatten().map(PathBuf::from))
            .filter(|folder| folder.is_absolute() && folder.parent().is_some())
            .collect();
        worker::run(Some(self.net.carrier_user), &folders, || {
            self.net.engine(self.address, self.reads)
        })
    }
}

/// What carries the bytes.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Carrier {
    /// NIXL.
    Nixl,
    /// Plain TCP, for tests.
    #[cfg(feature = "faults")]
    Tcp,
}

/// Options of `run`.
#[derive(Arguments, Clone, Debug)]
pub struct RunOptions {
    /// Which broker.
    #[command(flatten)]
    pub place: Place,
    /// Which network.
    #[command(flatten)]
    pub net: Net,
    /// Where to listen: tcp/10.0.0.1:7447
    #[arg(long, value_name = "tcp/ADDR")]
    pub listen: Address,
    /// Leases of other gateways at a time
    #[arg(long, default_value_t = 64)]
    pub leases: usize,
    /// Leases of one host at a time
    #[arg(long, default_value_t = 8)]
    pub leases_per_host: usize,
    /// Leases of one object at a time, those of slow and dead readers among them
    #[arg(long, default_value_t = 8)]
    pub leases_per_object: usize,
    /// Milliseconds that a lease lives without a renewal, at least 200: readers renew it three
    /// times in that
    #[arg(long, default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(200..=3_600_000))]
    pub lease_ms: u64,
    /// MiB of a slot of a ring of the device, which takes at most an eighth of what is free there
    /// [default: 64]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=512))]
    pub slot_mib: Option<u64>,
    /// Its log.
    #[command(flatten)]
    pub log: LogOptions,
    /// Slots of a ring of the device, which has at most 1 GiB [default: 16]
    #[arg(long, value_parser = clap::value_parser!(u64).range(2..=64))]
    pub slots: Option<u64>,
    /// Start no process that pulls for others of this host
    #[arg(long)]
    pub no_pulls: bool,
    /// KiB of a slot of a ring, which every object then has
    #[arg(long, hide = true, conflicts_with = "slot_mib")]
    pub slot_kib: Option<u64>,
}

/// Options of `pull`.
#[derive(Arguments, Clone, Debug)]
pub struct PullOptions {
    /// The objects' names; more than one are pulled by the gateway that runs here
    #[arg(required_unless_present_any = ["patterns", "groups"])]
    pub names: Vec<String>,
    /// Names with * for any text: all that any host has
    #[arg(long = "pattern", value_name = "PATTERN")]
    pub patterns: Vec<String>,
    /// A group: its members NAME/RANK, then its roll
    #[arg(long = "group", value_name = "NAME")]
    pub groups: Vec<String>,
    /// Keep the names current until this command ends
    #[arg(long, conflicts_with = "epoch")]
    pub follow: bool,
    /// The host to read it from; else any that has it
    #[arg(long, value_name = "HOST")]
    pub from: Option<String>,
    /// The epoch; else the newest
    #[arg(long)]
    pub epoch: Option<u64>,
    /// Which broker.
    #[command(flatten)]
    pub place: Place,
    /// Which network; else that of the gateway that runs here.
    #[command(flatten)]
    pub net: Net,
    /// The way that bytes take: from the object's memory, or through rings; else what is found
    /// fastest
    #[arg(long, value_enum)]
    pub way: Option<Way>,
    /// Where the bytes of a ring land; else in the object, if it is memory of the ring's kind
    #[arg(long, value_enum)]
    pub land: Option<Land>,
    /// Who else of this host may open the replica: everybody, or numbers of users, as 1000,1001;
    /// else the user that pulls alone
    #[arg(long, value_name = "WHO", value_parser = readers)]
    pub readers: Option<Readers>,
    /// Print the figures as JSON
    #[arg(long)]
    pub json: bool,
    /// Attempts in all
    #[arg(long, default_value_t = 5)]
    pub attempts: u32,
    /// Seconds to wait while all that have the object are busy
    #[arg(long, default_value_t = 600)]
    pub wait_s: u64,
    /// Seconds without a byte, until the transfer counts as one that never ends
    #[arg(long, default_value_t = 60)]
    pub stall_s: u64,
    /// Seconds until a question is asked again
    #[arg(long, default_value_t = 10, hide = true, value_parser = clap::value_parser!(u64).range(LEAST_ANSWER_S..))]
    pub answer_s: u64,
    /// Commit what was not confirmed: a control of tests, which publishes mixtures. No argument
    /// says so.
    #[arg(skip)]
    pub without_confirm: bool,
}

/// Options of `objects`.
#[derive(Arguments, Clone, Debug)]
pub struct ObjectsOptions {
    /// Of all hosts; there is no other list here
    #[arg(long)]
    pub all_hosts: bool,
    /// Which broker.
    #[command(flatten)]
    pub place: Place,
    /// Which network; else that of the gateway that runs here.
    #[command(flatten)]
    pub net: Net,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `status`.
#[derive(Arguments, Clone, Debug)]
pub struct StatusOptions {
    /// Which broker.
    #[command(flatten)]
    pub place: Place,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl RunOptions {
    /// Says how rings are cut.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a ring that no reader takes.
    pub fn rings(&self) -> Result<Slots> {
        let bytes = self
            .slot_kib
            .map(|kib| kib << 10)
            .or(self.slot_mib.map(|mib| mib << 20));
        let count = self.slots.and_then(|count| usize::try_from(count).ok());
        let (slots, slot_bytes) = shape(Way::DeviceRing);
        let most = bytes
            .unwrap_or(slot_bytes)
            .saturating_mul(count.unwrap_or(slots) as u64);
        if most > MOST_RING {
            return Err(Error::Invalid {
                what: "the slots of a ring",
                got: format!("{} MiB in all", most >> 20),
                must: "at most 1,024 MiB, which is --slot-mib times --slots",
            });
        }
        Ok(Slots {
            bytes,
            count,
            always: self.slot_kib.is_some(),
        })
    }
}

impl Place {
    /// Finds the broker's directory.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a runtime directory that is open to others.
    pub fn dir(&self) -> Result<PathBuf> {
        gpu_ipc::broker::client::broker_dir(self.broker.as_deref()).map_err(|e| Error::Invalid {
            what: "the broker's directory",
            got: e.to_string(),
            must: "a directory of this user alone",
        })
    }

    /// Finds this host's name.
    pub fn host(&self) -> String {
        let kernel = || {
            rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned()
        };
        self.host.clone().unwrap_or_else(kernel)
    }
}

impl Net {
    /// Says whether anything was given.
    pub fn is_given(&self) -> bool {
        self.insecure || self.tls.is_some() || !self.peers.is_empty()
    }

    /// Makes a network of it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] without certificates and without the word to do without.
    pub fn network(&self, listen: Option<Address>) -> Result<Network> {
        let trust = match (&self.tls, self.insecure) {
            (Some(files), _) => {
                let [certificate, key, authority] = &files[..] else {
                    return Err(Error::Invalid {
                        what: "--tls",
                        got: format!("{} files", files.len()),
                        must: "certificate, private key and authority",
                    });
                };
                let (certificate, key, authority) =
                    (certificate.clone(), key.clone(), authority.clone());
                Trust::Certificates {
                    certificate,
                    key,
                    authority,
                }
            }
            (None, true) => Trust::Everybody,
            (None, false) => {
                return Err(Error::Invalid {
                    what: "the trust between gateways",
                    got: "not given".into(),
                    must: "--tls CERT KEY CA, or --insecure to let every host in that reaches the port",
                });
            }
        };
        Ok(Network {
            listen,
            peers: self.peers.clone(),
            trust,
        })
    }

    /// Says how long a read takes.
    pub fn pace(&self) -> Pace {
        self.link_gbit.map_or_else(Pace::default, |gbit| Pace {
            bits_per_second: (gbit * 1e9) as u64,
        })
    }

    /// Starts what carries the bytes of memory in a place, for a process that others read from, or
    /// for one that reads: in a process of its own, but for memory of a device.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without its library.
    pub fn carrier(
        &self,
        address: IpAddr,
        reads: bool,
        place: transport::Place,
    ) -> Result<Arc<dyn Transport>> {
        if self.uncaged || place != transport::Place::Host {
            return self.engine(address, reads);
        }
        let address = self.carrier_address.unwrap_or(address);
        let devices = match std::env::var_os("UCX_NET_DEVICES") {
            Some(_) => None,
            None => devices(address),
        };
        let environment = devices.map(|devices| ("UCX_NET_DEVICES", devices));
        let options = client::Options {
            program: "/proc/self/exe".into(),
            arguments: self.carrier_arguments(address, reads),
            environment: environment.into_iter().collect(),
            kind: match self.transport {
                Carrier::Nixl => "nixl",
                #[cfg(feature = "faults")]
                Carrier::Tcp => "tcp",
            },
        };
        Ok(Arc::new(client::Carrier::start(options)?))
    }

    fn carrier_arguments(&self, address: IpAddr, reads: bool) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["carrier".into()];
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                arguments.extend([name.into(), value.into()]);
            }
        };
        let kind = self.transport.to_possible_value();
        add("--transport", kind.map(|kind| kind.get_name().to_owned()));
        add("--address", Some(address.to_string()));
        add("--carrier-user", Some(self.carrier_user.to_string()));
        #[cfg(feature = "faults")]
        {
            add("--stall-after", self.stall_after.map(|n| n.to_string()));
            add("--alter-at", self.alter_at.map(|n| n.to_string()));
            add("--piece-bytes", self.piece_bytes.map(|n| n.to_string()));
        }
        let flags = [
            ("--reads", reads),
            ("--progress-thread", self.progress_thread),
        ];
        arguments.extend(
            flags
                .iter()
                .filter(|(_, is)| *is)
                .map(|(name, _)| name.into()),
        );
        arguments
    }

    /// Starts what carries the bytes in this process.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without its library.
    #[cfg_attr(
        not(feature = "faults"),
        expect(unused_variables, reason = "plain TCP alone listens there")
    )]
    pub fn engine(&self, address: IpAddr, reads: bool) -> Result<Arc<dyn Transport>> {
        match self.transport {
            #[cfg(feature = "faults")]
            Carrier::Tcp => {
                let faults = Faults {
                    stall_after: self.stall_after,
                    fail_after: None,
                    alter_at: self.alter_at,
                };
                Ok(Arc::new(Tcp::listen(address, faults)?))
            }
            Carrier::Nixl => {
                let start = if reads && !self.progress_thread {
                    Nixl::start_reader
                } else {
                    Nixl::start
                };
                let nixl = start(&format!("gateway-{}", Incarnation::random()?), None)?;
                #[cfg(feature = "faults")]
                let nixl = {
                    let mut nixl = nixl;
                    if let Some(bytes) = self.piece_bytes {
                        nixl.set_pieces(bytes, 4);
                    }
                    nixl
                };
                Ok(Arc::new(nixl))
            }
        }
    }
}

/// Names the network devices of an address, as UCX does: its interface, and the RDMA devices that
/// the interface is of. None for an address that no interface has, as that of all interfaces.
fn devices(address: IpAddr) -> Option<String> {
    let all = if_addrs::get_if_addrs()
        .inspect_err(|error| tracing::warn!(%error, "bytes are carried by every interface"))
        .ok()?;
    let name = all.into_iter().find(|one| one.ip() == address)?.name;
    let sys = PathBuf::from("/sys/class/net").join(&name);
    let port = std::fs::read_to_string(sys.join("dev_port"));
    let port = port.ok().and_then(|port| port.trim().parse::<u32>().ok());
    let rdma = std::fs::read_dir(sys.join("device/infiniband"));
    let rdma = rdma.into_iter().flatten().flatten().map(|device| {
        let port = port.unwrap_or(0) + 1;
        format!("{}:{port}", device.file_name().to_string_lossy())
    });
    Some(
        std::iter::once(name)
            .chain(rdma)
            .collect::<Vec<_>>()
            .join(","),
    )
}

/// Reads who may open a replica.
fn readers(text: &str) -> std::result::Result<Readers, String> {
    if text == "everybody" {
        return Ok(Readers::Everybody);
    }
    let uids: std::result::Result<Vec<u32>, _> = text.split(',').map(str::parse).collect();
    match uids {
        Ok(uids) if uids.len() <= MOST_READERS => Ok(Readers::Uids(uids)),
        _ => Err(format!(
            "{text:?} is neither everybody nor 1 to {MOST_READERS} numbers of users, as 1000,1001"
        )),
    }
}

/// Reads a rate.
fn gbit(text: &str) -> std::result::Result<f64, String> {
    let rate = text.parse().ok().filter(|rate| (1e-6..=1e6).contains(rate));
    rate.ok_or_else(|| format!("{text:?} is no rate in Gbit/s, from 0.000001 to 1000000"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_are_everybody_or_users() {
        assert_eq!(readers("everybody"), Ok(Readers::Everybody));
        assert_eq!(readers("1000,7"), Ok(Readers::Uids(vec![1000, 7])));
        for text in ["", "root", "1,", "-1", &vec!["1"; 17].join(",")] {
            let why = readers(text).expect_err("nobody");
            assert!(why.contains("1000,1001"), "{why}");
        }
    }

    #[test]
    fn the_unit_and_the_pod_give_what_a_gateway_takes() {
        let unit = include_str!("../../../cli/deploy/gpu-ipc-gateway.service");
        let unit = unit
            .lines()
            .find_map(|line| line.strip_prefix("ExecStart="));
        let pod = include_str!("../../../cli/deploy/kubernetes-gateway.yaml");
        let pod = pod
            .lines()
            .find_map(|line| line.trim().strip_prefix("args: [")?.strip_suffix(']'));
        let pod = pod.map(|words| words.replace(", ", " ").replace('"', ""));
        for line in [unit.map(str::to_owned), pod] {
            let line = line.expect("a command").replace("$(ADDRESS)", "10.0.0.2");
            let run = line.rsplit(" -- ").next().expect("a command").split(' ');
            let Command::Run(options) = Args::try_parse_from(run).expect("taken").command else {
                panic!("{line}")
            };
            let [certificate, key, authority] = &options.net.tls.expect("certificates")[..] else {
                panic!("{line}")
            };
            let host = options.place.host.expect("a name");
            let dir = certificate.parent().expect("a folder");
            assert_eq!(
                (certificate, key, authority),
                (
                    &dir.join(format!("{host}.pem")),
                    &dir.join(format!("{host}.key")),
                    &dir.join("authority.pem")
                ),
                "as `certs` names them"
            );
            assert!(options.place.device.is_some() && options.net.peers.len() == 1);
        }
    }

    #[test]
    fn a_ring_that_no_reader_takes_is_refused() {
        let rings = |given: &[&str]| {
            let all = ["gpu-ipc-gateway", "run", "--listen", "tcp/127.0.0.1:1"]
                .iter()
                .chain(given);
            let Command::Run(options) = Args::try_parse_from(all).expect("arguments").command
            else {
                panic!("run")
            };
            options
                .rings()
                .map(|slots| (slots.bytes, slots.count, slots.always))
                .map_err(|e| e.to_string())
        };
        assert_eq!(rings(&[]), Ok((None, None, false)));
        assert_eq!(
            rings(&["--slots", "4", "--slot-mib", "256"]),
            Ok((Some(256 << 20), Some(4), false))
        );
        assert_eq!(
            rings(&["--slot-kib", "16"]),
            Ok((Some(16 << 10), None, true))
        );
        let why = rings(&["--slot-mib", "128"]).expect_err("16 of them are 2 GiB");
        assert!(why.contains("2048 MiB") && why.contains("--slots"), "{why}");
    }
}
