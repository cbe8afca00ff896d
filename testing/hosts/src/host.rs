//! A host: a keeper with its broker, and a gateway, in a network of its own.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::SystemTime;

use harness::program::{start_unwatched, try_output};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::network::Network;
use crate::watch::until;

/// Bytes of one request of NIXL's, of which four are under way at a time: so a read has a middle.
const PIECE: &str = "262144";
/// KiB of a slot of a ring: eight of them hold a quarter of an object of 8 MiB, so that each is
/// filled several times.
const SLOT_KIB: u32 = 256;
/// The gateways' port: each host has an address of its own.
pub const PORT: u16 = 7447;

/// The programs under test, and this one.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `gpu-ipc`.
    pub broker: PathBuf,
    /// `gpu-ipc-gateway`.
    pub gateway: PathBuf,
    /// This program, which can pull without a confirmation.
    pub control: PathBuf,
    /// What carries the bytes: `tcp` or `nixl`.
    pub carrier: String,
}

/// A process that ends with its value.
#[derive(Debug)]
pub struct Process(RefCell<Child>);

impl Process {
    /// Sends a signal; to one that has ended nothing.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            send(self.0.get_mut().id(), signal);
        }
    }

    /// Says how it ended, once it has.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.0.borrow_mut().try_wait().ok().flatten()
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.0.borrow().id()
    }

    /// Names the process that carries its bytes, if it has one.
    pub fn carrier(&self) -> Option<u32> {
        let own = self.0.borrow().id();
        let tasks = std::fs::read_dir(format!("/proc/{own}/task"))
            .ok()?
            .flatten();
        let lists =
            tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
        let children: Vec<u32> = lists
            .flat_map(|list| {
                list.split_whitespace()
                    .filter_map(|pid| pid.parse().ok())
                    .collect::<Vec<_>>()
            })
            .collect();
        let carries = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|&byte| byte == 0).nth(1) == Some(b"carrier")
        };
        children.into_iter().find(carries)
    }

    /// Says whether it is stopped.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.borrow().id()))
            .unwrap_or_default();
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('T'))
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// It does not end.
    pub fn end(&self, what: &str) -> Result<ExitStatus, String> {
        until(&format!("the end of {what}"), || self.ended())
    }

    /// Kills it and waits.
    pub fn kill(&mut self) {
        let _ = self.0.get_mut().kill();
        let _ = self.0.get_mut().wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends a signal to a process that may have ended.
pub fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// How a gateway is started.
#[derive(Clone, Debug, Default)]
pub struct Serving {
    /// A step and what happens to it there, as `GPU_IPC_GATEWAY_STEP` has it.
    pub step: Option<String>,
    /// How long its leases live.
    pub lease_ms: Option<u64>,
    /// KiB of a slot of its rings, which every object then has; else objects of these trials are
    /// too small for rings.
    pub slot_kib: Option<u32>,
    /// Its bytes are carried by itself, as those of a device are: memory under a lease that has ended
    /// then has other bytes for whoever reads it late. By a carrier it has zeroes.
    pub uncaged: bool,
    /// It has a certificate, of an authority that all hosts of a world have; else every host is let in.
    pub has_certificate: bool,
}

impl Serving {
    /// Lends rings.
    pub fn rings() -> Serving {
        Serving {
            slot_kib: Some(SLOT_KIB),
            ..Serving::default()
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its network.
    pub network: Network,
    programs: Programs,
    dir: PathBuf,
    /// Addresses of other gateways.
    peers: Vec<String>,
    /// Where the certificates of this world lie, if there are any.
    certificates: Option<PathBuf>,
    keeper: Option<Process>,
    /// Its gateway.
    pub gateway: Option<Process>,
}

impl Host {
    /// Starts keeper, broker and gateway in a folder of their own.
    ///
    /// # Errors
    ///
    /// What does not start.
    pub fn start(
        programs: &Programs,
        network: Network,
        name: &str,
        dir: &Path,
        peers: Vec<String>,
        serving: &Serving,
    ) -> Result<Host, String> {
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700)
            .create(dir)
            .map_err(|e| format!("{}: {e}", dir.display()))?;
        let (name, dir, programs) = (name.to_owned(), dir.to_owned(), programs.clone());
        let mut host = Host {
            name,
            network,
            programs,
            dir,
            peers,
            certificates: None,
            keeper: None,
            gateway: None,
        };
        if serving.has_certificate {
            host.certify()?;
        }
        host.keep()?;
        host.serve(serving)?;
        Ok(host)
    }

    /// Has a certificate made, beside those of the other hosts.
    fn certify(&mut self) -> Result<(), String> {
        let certificates = self.dir.with_file_name("certificates");
        let named = format!("{}={}", self.name, self.network.address());
        let mut command = self.command(&self.programs.gateway)?;
        command
            .args(["certs", "--dir"])
            .arg(&certificates)
            .arg(named);
        let out = try_output(&mut command).map_err(|e| e.to_string())?;
        self.certificates = Some(certificates);
        let log = self.log();
        out.status.success().then_some(()).ok_or(log)
    }

    /// The arguments that say which hosts are let in.
    fn trust(&self) -> Vec<String> {
        let Some(dir) = &self.certificates else {
            return vec!["--insecure".into()];
        };
        let file = |name: String| dir.join(name).display().to_string();
        let own = [format!("{}.pem", self.name), format!("{}.key", self.name)];
        let files = own.into_iter().chain(["authority.pem".into()]).map(file);
        std::iter::once("--tls".into()).chain(files).collect()
    }

    /// Where its gateway listens.
    pub fn at(&self) -> String {
        self.at_port(PORT)
    }

    /// Where another gateway of its broker listens.
    pub fn at_port(&self, port: u16) -> String {
        format!("tcp/{}:{port}", self.network.address())
    }

    /// Starts the keeper, which starts the broker.
    ///
    /// # Errors
    ///
    /// They do not serve.
    pub fn keep(&mut self) -> Result<(), String> {
        let mut command = self.command(&self.programs.broker)?;
        command.arg("keep").arg("--dir").arg(&self.dir).arg("--");
        command
            .arg(&self.programs.broker)
            .arg("broker")
            .arg("--dir")
            .arg(&self.dir)
            .args(["--device", "host:0"]);
        self.keeper = Some(spawn(&mut command)?);
        let served = until(&format!("the broker of {}", self.name), || self.kept());
        served
            .map(drop)
            .map_err(|why| format!("{why}\n{}", self.log()))
    }

    /// Kills the broker; the keeper starts another.
    ///
    /// # Errors
    ///
    /// There is none to be killed.
    pub fn kill_broker(&self) -> Result<u64, String> {
        let pid = until(&format!("the broker of {}", self.name), || self.kept())?;
        send(pid as u32, Signal::KILL);
        Ok(pid)
    }

    /// Kills the keeper and starts another, which the broker gives everything. Both are never dead
    /// at a time.
    ///
    /// # Errors
    ///
    /// There is none to be killed, or no other one comes.
    pub fn kill_keeper(&mut self) -> Result<(), String> {
        until(&format!("the keeper of {}", self.name), || self.kept())?;
        self.keeper = None;
        self.keep()
    }

    /// Waits until another broker than this serves.
    ///
    /// # Errors
    ///
    /// None comes.
    pub fn other_broker(&self, than: u64) -> Result<(), String> {
        until(&format!("another broker of {}", self.name), || {
            self.kept().filter(|pid| *pid != than)
        })
        .map(drop)
    }

    /// The broker's process, if it serves and its keeper has everything.
    fn kept(&self) -> Option<u64> {
        let list = self.list()?;
        (list["keeper"] == "fed").then(|| list["pid"].as_u64())?
    }

    /// Starts its gateway, in the place of one that there was, and waits until it serves.
    ///
    /// # Errors
    ///
    /// It does not.
    pub fn serve(&mut self, serving: &Serving) -> Result<(), String> {
        self.gateway = None;
        self.gateway = Some(self.another_gateway(serving, PORT)?);
        Ok(())
    }

    /// Starts its gateway as soon as its broker serves, which may be killed meanwhile.
    ///
    /// # Errors
    ///
    /// It never serves.
    pub fn serve_again(&mut self, serving: &Serving) -> Result<(), String> {
        let mut why = String::new();
        for _ in 0..10 {
            until(&format!("the broker of {}", self.name), || self.kept())?;
            match self.serve(serving) {
                Ok(()) => return Ok(()),
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    /// Starts a gateway of this broker at a port and waits until it serves.
    ///
    /// # Errors
    ///
    /// It does not.
    pub fn another_gateway(&self, serving: &Serving, port: u16) -> Result<Process, String> {
        let said = self.dir.join(format!("said-{port}"));
        let mut command = self.command(&self.programs.gateway)?;
        let out = File::create(&said).map_err(|e| e.to_string())?;
        command
            .args(["run", "--no-pulls", "--listen"])
            .arg(self.at_port(port));
        command.args(self.trust()).args(self.place()).stdout(out);
        for peer in &self.peers {
            command.args(["--peer", peer]);
        }
        if let Some(ms) = serving.lease_ms {
            command.arg("--lease-ms").arg(ms.to_string());
        }
        if let Some(kib) = serving.slot_kib {
            command.arg("--slot-kib").arg(kib.to_string());
        }
        if serving.uncaged {
            command.arg("--uncaged");
        }
        if let Some(step) = &serving.step {
            command.env("GPU_IPC_GATEWAY_STEP", step);
        }
        let gateway = spawn(&mut command)?;
        let mut died = false;
        let serves = until(&format!("the gateway of {}", self.name), || {
            died = gateway.ended().is_some();
            (died || std::fs::read_to_string(&said).is_ok_and(|said| said.contains("gateway of")))
                .then_some(())
        });
        match serves {
            Ok(()) if !died => Ok(gateway),
            _ => Err(format!(
                "the gateway of {} does not serve\n{}",
                self.name,
                self.log()
            )),
        }
    }

    /// Begins to pull.
    ///
    /// # Errors
    ///
    /// No process can be started.
    pub fn pull(&self, name: &str, pulling: &Pulling) -> Result<Process, String> {
        let mut command = if pulling.confirms {
            let mut command = self.command(&self.programs.gateway)?;
            command.arg("pull");
            command
        } else {
            let mut command = self.command(&self.programs.control)?;
            command.args(["pull-without-confirm", "--uncaged"]);
            command
        };
        command.arg(name).args(self.trust()).args(self.place());
        command.args([
            "--attempts",
            &pulling.attempts.to_string(),
            "--stall-s",
            &pulling.stall_s.to_string(),
        ]);
        command.args(["--answer-s", "2"]);
        for peer in self.peers.iter().chain([&self.at()]) {
            command.args(["--peer", peer]);
        }
        command.args(&pulling.more);
        if let Some(step) = &pulling.step {
            command.env("GPU_IPC_GATEWAY_STEP", step);
        }
        spawn(&mut command)
    }

    fn place(&self) -> Vec<String> {
        self.place_as(&self.name)
    }

    fn place_as(&self, name: &str) -> Vec<String> {
        let dir = self.dir.display().to_string();
        let carrier = &self.programs.carrier;
        let given = [
            "--broker",
            &dir,
            "--device",
            "host:0",
            "--host",
            name,
            "--transport",
            carrier,
        ];
        let pieces = ["--piece-bytes", PIECE]
            .into_iter()
            .filter(|_| carrier == "nixl");
        given.into_iter().chain(pieces).map(str::to_owned).collect()
    }

    /// Commits bytes, and returns the epoch.
    ///
    /// # Errors
    ///
    /// What `gpu-ipc put` says.
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<u64, String> {
        let file = self.dir.join("weights");
        std::fs::write(&file, bytes).map_err(|e| e.to_string())?;
        let mut command = self.command(&self.programs.broker)?;
        command
            .args(["put", "--backend", "host", "--dir"])
            .arg(&self.dir)
            .arg(name)
            .arg(&file);
        let out = try_output(&mut command).map_err(|e| e.to_string())?;
        let _ = std::fs::remove_file(&file);
        let said = String::from_utf8_lossy(&out.stdout);
        let why = || {
            format!(
                "put {name} on {}: {}",
                self.name,
                String::from_utf8_lossy(&out.stderr).trim()
            )
        };
        said.trim().parse().map_err(|_| why())
    }

    /// Reads an object; nothing for one that is not visible, or not any more.
    ///
    /// # Errors
    ///
    /// No process can be started.
    pub fn get(&self, name: &str, epoch: u64) -> Result<Option<Vec<u8>>, String> {
        let mut command = self.command(&self.programs.broker)?;
        command
            .args(["get", "--backend", "host", "--dir"])
            .arg(&self.dir);
        command.args([name, "--part", "weights", "--epoch", &epoch.to_string()]);
        let out = try_output(&mut command).map_err(|e| e.to_string())?;
        Ok(out.status.success().then_some(out.stdout))
    }

    /// Removes a name.
    ///
    /// # Errors
    ///
    /// What `gpu-ipc rm` says.
    pub fn remove(&self, name: &str) -> Result<(), String> {
        let mut command = self.command(&self.programs.broker)?;
        command.arg("rm").arg("--dir").arg(&self.dir).arg(name);
        let out = try_output(&mut command).map_err(|e| e.to_string())?;
        let why = || {
            format!(
                "rm {name} on {}: {}",
                self.name,
                String::from_utf8_lossy(&out.stderr).trim()
            )
        };
        out.status.success().then_some(()).ok_or_else(why)
    }

    /// Lists what the broker has; nothing if none answers.
    pub fn list(&self) -> Option<Value> {
        let mut command = self.command(&self.programs.broker).ok()?;
        command.args(["objects", "--json", "--dir"]).arg(&self.dir);
        let out = try_output(&mut command).ok()?;
        serde_json::from_slice(&out.stdout)
            .ok()
            .filter(|list: &Value| list["objects"].is_array())
    }

    /// What its gateways say of themselves.
    pub fn status(&self) -> Option<Value> {
        let mut command = self.command(&self.programs.gateway).ok()?;
        command
            .args(["status", "--json", "--broker"])
            .arg(&self.dir);
        let out = try_output(&mut command).ok()?;
        serde_json::from_slice(&out.stdout).ok()
    }

    /// Asks its gateway something over the network, any number of times, as anybody can who has
    /// recorded the question; returns the answers.
    ///
    /// # Errors
    ///
    /// No answer comes.
    pub fn ask(&self, question: &Value, times: u32) -> Result<Vec<Value>, String> {
        let gateway = until(&format!("the gateway of {}", self.name), || {
            Some(self.status()?[0].clone())
        })?;
        let incarnation = gateway["incarnation"].as_str().unwrap_or_default();
        let mut command = self.command(&self.programs.control)?;
        command.args([
            "ask",
            "--at",
            &self.at(),
            "--host",
            &self.name,
            "--incarnation",
            incarnation,
        ]);
        command.args(["--times", &times.to_string(), &question.to_string()]);
        let out = try_output(&mut command).map_err(|e| e.to_string())?;
        let said = String::from_utf8_lossy(&out.stdout);
        let answers: Vec<Value> = said
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect();
        let all = answers.len() == times as usize;
        all.then_some(answers)
            .ok_or_else(|| format!("{} answered {said:?}\n{}", self.name, self.log()))
    }

    /// Has a rogue on another host lease an object here, and read or write somewhere else. Returns
    /// what it said.
    ///
    /// # Errors
    ///
    /// It never came so far.
    pub fn attacked(
        &self,
        from: &Host,
        name: &str,
        address: Option<u64>,
        write: bool,
    ) -> Result<String, String> {
        let gateway = until(&format!("the gateway of {}", self.name), || {
            Some(self.status()?[0].clone())
        })?;
        let mut command = from.command(&self.programs.control)?;
        command.args(["rogue", "--at", &self.at(), "--host", &self.name]);
        command.args([
            "--incarnation",
            gateway["incarnation"].as_str().unwrap_or_default(),
        ]);
        command.args(["--own", &from.network.address().to_string()]);
        command.args(["--carrier", &self.programs.carrier, "--bytes", "8192", name]);
        if let Some(address) = address {
            command.arg("--address").arg(address.to_string());
        }
        if write {
            command.arg("--write");
        }
        let out = try_output(&mut command).map_err(|e| e.to_string())?;
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        let did = said.starts_with("got ") || said.starts_with("nothing: ");
        did.then_some(said)
            .ok_or_else(|| format!("the rogue did nothing: {out:?}\n{}", from.log()))
    }

    /// Starts a gateway of this host by another name, which it does not survive. Returns what it said.
    ///
    /// # Errors
    ///
    /// It serves.
    pub fn serves_as(&self, name: &str) -> Result<String, String> {
        let mut command = self.command(&self.programs.gateway)?;
        command
            .args(["run", "--no-pulls", "--listen"])
            .arg(self.at_port(PORT + 1))
            .args(self.trust())
            .args(self.place_as(name));
        let gateway = spawn(&mut command)?;
        let ended = gateway.end("the gateway of another name")?;
        let said = self.log();
        (!ended.success())
            .then_some(said)
            .ok_or_else(|| format!("it ended with {ended}"))
    }

    /// Answers in another host's name, with this host's certificate or with that of the other.
    ///
    /// # Errors
    ///
    /// No process can be started.
    pub fn impersonates(&self, other: &Host, is_thief: bool) -> Result<Process, String> {
        let trust = if is_thief {
            other.trust()
        } else {
            self.trust()
        };
        let mut command = self.command(&self.programs.control)?;
        command
            .args(["impostor", "--listen"])
            .arg(self.at_port(PORT + 1))
            .args(["--peer", &other.at()])
            .args(trust)
            .args(["--", &other.name]);
        spawn(&mut command)
    }

    /// Sums a figure of its gateways that run; of a pair of figures one.
    pub fn figure(&self, name: &str, of_pair: usize) -> u64 {
        let status = self.status().unwrap_or_default();
        let figure = |gateway: &Value| {
            let figure = &gateway["figures"][name];
            figure.as_u64().or_else(|| figure[of_pair].as_u64())
        };
        status
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(figure)
            .sum()
    }

    /// Lists the leases that its gateways have given, as they wrote after a moment: what was
    /// granted before is among them, or has ended.
    pub fn leases(&self, after: SystemTime) -> Option<Vec<Value>> {
        let written = |gateway: &Value| {
            let state = self
                .dir
                .join(format!("gateway-{}", gateway["incarnation"].as_str()?));
            std::fs::metadata(state).ok()?.modified().ok()
        };
        let all = self.status()?;
        all.as_array()?
            .iter()
            .all(|gateway| written(gateway).is_some_and(|at| at > after))
            .then_some(())?;
        let status = self.status()?;
        Some(
            status
                .as_array()?
                .iter()
                .filter_map(|gateway| gateway["leases"].as_array())
                .flatten()
                .cloned()
                .collect(),
        )
    }

    /// Counts the leases of objects of a name, as [`leases`](Host::leases) lists them.
    pub fn leases_of(&self, name: &str, after: SystemTime) -> Option<usize> {
        let (leases, list) = (self.leases(after)?, self.list()?);
        let named = list["objects"]
            .as_array()?
            .iter()
            .filter(|row| row["name"] == name);
        let objects: Vec<&Value> = named.map(|row| &row["identity"]).collect();
        Some(
            leases
                .iter()
                .filter(|lease| objects.contains(&&lease["identity"]))
                .count(),
        )
    }

    /// The last lines that its processes said, and how its gateway ended, if it has.
    pub fn log(&self) -> String {
        let text = std::fs::read(self.dir.join("log")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(30)..];
        let ended = self.gateway.as_ref().and_then(Process::ended);
        let ended = ended.map(|status| format!("the gateway ended with {status}"));
        let lines = last.iter().copied().chain(ended.as_deref());
        lines
            .map(|line| format!("    {}: {line}\n", self.name))
            .collect()
    }

    /// Says how often a step was passed at which a process was told to die or stop.
    pub fn steps(&self, step: &str) -> usize {
        self.logged(&format!("step {step}"))
    }

    /// Counts the lines of its processes that end with a text.
    pub fn logged(&self, end: &str) -> usize {
        let text = std::fs::read_to_string(self.dir.join("log")).unwrap_or_default();
        text.lines().filter(|line| line.ends_with(end)).count()
    }

    fn command(&self, program: &Path) -> Result<Command, String> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.join("log"))
            .map_err(|e| e.to_string())?;
        let mut command = Command::new(program);
        self.network.enter(&mut command);
        // Shared memory would do between processes of one machine, and so would its loopback.
        command.env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", "eth0");
        command
            .env("GPU_IPC_RUNTIME_DIR", self.dir.join("runtime"))
            .env("TMPDIR", &self.dir);
        let both = log.try_clone().map_err(|e| e.to_string())?;
        command.stdin(Stdio::null()).stdout(both).stderr(log);
        Ok(command)
    }
}

impl Drop for Host {
    /// A broker lives on without its keeper; this ends it, and one that waits to take its place.
    fn drop(&mut self) {
        self.keeper = None;
        let dir = self.dir.as_os_str().as_encoded_bytes();
        for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = process
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            if pid > 1
                && line
                    .split(|&byte| byte == 0)
                    .any(|argument| argument == dir)
            {
                send(pid, Signal::KILL);
            }
        }
    }
}

/// How an object is pulled.
#[derive(Clone, Debug)]
pub struct Pulling {
    /// A step and what happens to it there.
    pub step: Option<String>,
    /// Attempts in all.
    pub attempts: u32,
    /// Seconds without a byte until it gives up.
    pub stall_s: u32,
    /// Commits only what was confirmed; the control does not.
    pub confirms: bool,
    /// More arguments.
    pub more: Vec<String>,
}

impl Default for Pulling {
    fn default() -> Pulling {
        Pulling {
            step: None,
            attempts: 40,
            stall_s: 60,
            confirms: true,
            more: Vec::new(),
        }
    }
}

impl Pulling {
    /// Takes this way, as `--way` has it, and no other.
    pub fn by(way: &str) -> Pulling {
        Pulling::default().and(&["--way", way])
    }

    /// Adds arguments.
    pub fn and(mut self, arguments: &[&str]) -> Pulling {
        self.more
            .extend(arguments.iter().map(|&argument| argument.to_owned()));
        self
    }
}

fn spawn(command: &mut Command) -> Result<Process, String> {
    if command.get_program().is_empty() {
        return Err("no program".into());
    }
    Ok(Process(RefCell::new(start_unwatched(command)?)))
}
