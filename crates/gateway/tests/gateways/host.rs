//! A host: a broker and gateways on an address of its own.

use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gateway::local::Local;
use gateway::net::key::Gateway;
use gpu_ipc::Gpu;
use gpu_ipc::broker::{
    Broker, Client, GroupWriter, Layout, Limits, Options, PartSpec, Roll, Selector,
};
use harness::program::{Running, run_to_end, this_program};
use rustix::process::Pid;
use serde_json::Value;

/// Ends a case that waits for what does not come. Nothing is expected to be fast.
pub const WATCHDOG: Duration = Duration::from_secs(300);
const BROKER: &str = "GPU_IPC_GATEWAYS_TEST_BROKER";
const GATEWAY: &str = env!("CARGO_BIN_EXE_gpu-ipc-gateway");

/// Is a broker, and nothing else, if the test program was started as one.
pub fn serve_if_asked() {
    if let Some(dir) = std::env::var_os(BROKER) {
        let gpus = Arc::new(|| Ok::<_, gpu_ipc::Error>(vec![gpu()]));
        let options = Options {
            dir: PathBuf::from(dir),
            gpus,
            limits: Limits::default(),
            allowed: Default::default(),
            keeper: None,
        };
        Broker::open(options).expect("a broker").run()
    }
}

/// Memory that the CPU reaches.
fn gpu() -> Gpu {
    let found =
        gpu_ipc::backend::detect_only(gpu_ipc::BackendKind::Host).expect("the host has memory");
    found.gpus().first().expect("one device").clone()
}

/// A process that ends with the test.
pub struct Service(Running);

impl Service {
    fn start(command: &mut Command) -> Service {
        let die = || {
            Ok(rustix::process::set_parent_process_death_signal(Some(
                rustix::process::Signal::KILL,
            ))?)
        };
        // SAFETY: `pre_exec`: between fork and exec the closure does one system call, and allocates
        // nothing.
        let command = unsafe { command.pre_exec(die) };
        Service(Running::start(command.stdin(Stdio::null())))
    }
}

impl Service {
    /// Lists the TCP ports where it and its carrier listen.
    pub fn listens(&self) -> Vec<SocketAddr> {
        let carrier = self.child("carrier").as_raw_nonzero().get();
        [self.0.pid().cast_signed(), carrier]
            .into_iter()
            .flat_map(listens)
            .collect()
    }
}

/// Lists the TCP ports where a process listens.
fn listens(pid: i32) -> Vec<SocketAddr> {
    let process = format!("/proc/{pid}");
    let open = std::fs::read_dir(format!("{process}/fd")).expect("it runs");
    let links = open
        .flatten()
        .filter_map(|fd| std::fs::read_link(fd.path()).ok());
    let sockets: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let table = std::fs::read_to_string(format!("{process}/net/tcp")).expect("it runs");
    let listening = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (address, port) = fields.get(1)?.split_once(':')?;
        let is_ours = fields.get(3) == Some(&"0A")
            && sockets.contains(&format!("socket:[{}]", fields.get(9)?));
        // The kernel writes the address as the machine has it in memory.
        let address = u32::from_str_radix(address, 16).ok()?.to_ne_bytes();
        is_ours.then_some(SocketAddr::from((
            address,
            u16::from_str_radix(port, 16).ok()?,
        )))
    };
    table.lines().filter_map(listening).collect()
}

impl Service {
    /// Waits until it has a child that runs a command, and names it.
    pub fn child(&self, command: &str) -> Pid {
        let mut found = None;
        watch(&format!("a child that runs {command}"), || {
            found = child_of(self.0.pid(), command);
            found.is_some()
        });
        found.expect("it was watched for")
    }

    /// Names its process.
    pub fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Says how much memory it had at most.
    pub fn peak_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.pid()));
        let status = status.expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        kib.and_then(|kib| kib.parse().ok()).expect("a number")
    }

    /// Says whether it has died.
    pub fn has_ended(&mut self) -> bool {
        !self.0.is_running()
    }

    /// Says whether it is stopped.
    pub fn is_stopped(&self) -> bool {
        is_stopped(self.0.pid())
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.0.signal(rustix::process::Signal::CONT);
    }
}

/// A host.
pub struct Host {
    pub name: String,
    dir: tempfile::TempDir,
    pub address: String,
}

impl Host {
    /// Makes one, where nothing runs yet.
    pub fn new(number: usize) -> Host {
        Host {
            name: format!("host-{number}"),
            dir: tempfile::tempdir().expect("a folder"),
            address: address(),
        }
    }

    /// Starts brokers, and waits until they listen.
    pub fn brokers(hosts: &[Host]) -> Vec<Service> {
        let brokers = hosts.iter().map(Host::broker).collect();
        let is_up = |host: &Host| {
            Client::builder(gpu())
                .dir(host.dir.path())
                .connect()
                .is_ok()
        };
        watch("a broker listens", || hosts.iter().all(is_up));
        brokers
    }

    fn broker(&self) -> Service {
        Service::start(this_program().env(BROKER, self.dir.path()))
    }

    /// Starts a gateway that is told of another address, and waits until it runs.
    pub fn gateway(&self, listen: &str, peer: &str, trust: &[String]) -> Service {
        self.gateway_at(listen, peer, trust, None)
    }

    /// Starts a gateway that pulls for others of its host.
    pub fn gateway_that_pulls(&self, peer: &str) -> Service {
        let mut command = self.command("run");
        command.args(["--listen", &self.address, "--peer", peer, "--insecure"]);
        let gateway = Service::start(command.args(["--transport", "tcp"]));
        watch("a gateway pulls", || self.dir.path().join("pulls").exists());
        gateway
    }

    /// Starts a gateway as a keeper does, which is a shell.
    pub fn kept(&self) -> Service {
        let run = self.command("run");
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"GPU_IPC_GATEWAY_PARENT=$$ "$@" & wait"#, "sh"])
            .arg(run.get_program())
            .args(run.get_args())
            .args(["--listen", &self.address, "--insecure"])
            .args(["--transport", "tcp"]);
        Service::start(&mut command)
    }

    /// Starts a gateway that is killed or stopped at a step.
    pub fn gateway_at(
        &self,
        listen: &str,
        peer: &str,
        trust: &[String],
        step: Option<&str>,
    ) -> Service {
        let before = self.gateways();
        let mut command = self.command("run");
        command
            .args(["--listen", listen, "--peer", peer])
            .args(trust);
        command.envs(step.map(|step| ("GPU_IPC_GATEWAY_STEP", step)));
        // So slow a link that no read counts as slow, and nobody loses patience, however loaded
        // this machine is.
        let slow = ["--transport", "tcp", "--link-gbit", "0.001", "--no-pulls"];
        let mut gateway = Service::start(command.args(slow));
        watch("a gateway runs", || {
            assert!(!gateway.has_ended(), "the gateway at {listen} ended");
            self.gateways() > before
        });
        gateway
    }

    /// Starts a gateway with arguments of its log, and the file that it logs to.
    pub fn logging(&self, args: &[&str]) -> (Service, PathBuf) {
        let file = self.dir.path().join("log");
        let run = self.command("run");
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"exec "$@" 2>"$0""#])
            .arg(&file)
            .arg(run.get_program())
            .args(run.get_args())
            .args([
                "--listen",
                &self.address,
                "--insecure",
                "--transport",
                "tcp",
            ])
            .args(args)
            .env_remove("RUST_LOG");
        (Service::start(&mut command), file)
    }

    /// Names the gateway that runs for the broker.
    pub fn serving(&self) -> Gateway {
        let status = self.json("status", &[]);
        let incarnation = serde_json::from_value(status[0]["incarnation"].clone());
        Gateway {
            host: self.name.clone(),
            incarnation: incarnation.expect("a gateway runs"),
        }
    }

    /// Counts the gateways that run for the broker.
    pub fn gateways(&self) -> usize {
        self.json("status", &[]).as_array().map_or(0, Vec::len)
    }

    /// Waits until the gateways tell each other of an object.
    pub fn hears_of(&self, name: &str) {
        self.hears_by(name, &[]);
    }

    /// As [`hears_of`](Host::hears_of), asking with these arguments.
    pub fn hears_by(&self, name: &str, args: &[&str]) {
        watch(&format!("{} hears of {name}", self.name), || {
            self.objects(args)
                .is_some_and(|all| all.iter().any(|row| row["name"] == name))
        });
    }

    /// Lists the objects of all hosts; none where no gateway is reached.
    pub fn objects(&self, args: &[&str]) -> Option<Vec<Value>> {
        let mut command = self.command("objects");
        command.args(["--all-hosts", "--json"]).args(args);
        let output = run_to_end(&mut command, WATCHDOG);
        if output.status.success() {
            return Some(json(&output).as_array().expect("a list").clone());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("no gateway was reached"), "{said}");
        None
    }

    /// Commits an object of one part.
    pub fn put(&self, name: &str, contents: &[u8]) {
        let part = PartSpec::bytes("weights", contents.len() as u64).expect("a part");
        let layout = Layout::pack(vec![part], &[]).expect("a layout");
        let mut writer = self.client().create(name, layout).expect("room");
        writer.write("weights", contents).expect("its memory");
        writer
            .commit(&[])
            .and_then(|commit| commit.wait())
            .expect("committed");
    }

    /// Reads it.
    pub fn get(&self, name: &str) -> Vec<u8> {
        let reader = self
            .client()
            .open_one(&Selector::Latest(name.into()))
            .expect("an object");
        reader.read("weights").expect("its bytes")
    }

    /// Commits a group of one member, as an owner does.
    pub fn put_group(&self, name: &str, contents: &[u8]) {
        let part = PartSpec::bytes("weights", contents.len() as u64).expect("a part");
        let layout = Layout::pack(vec![part], &[]).expect("a layout");
        let mut group = GroupWriter::create(name, vec![(self.client(), layout)]).expect("room");
        group.writers[0]
            .write("weights", contents)
            .expect("its memory");
        group.commit(None).expect("committed");
    }

    /// Reads a member of a group, which it finds by the group's roll.
    pub fn get_member(&self, name: &str, rank: usize) -> Vec<u8> {
        let roll = Roll::newest(&self.client(), name).expect("a roll");
        roll.open(rank, &self.client())
            .and_then(|member| member.read("weights"))
            .expect("its bytes")
    }

    /// A command of the program, for this host.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(GATEWAY);
        command.arg(name).arg("--broker").arg(self.dir.path());
        if name == "run" || name == "pull" {
            command.args(["--device", "host:0", "--host", &self.name]);
        }
        command
    }

    /// Runs a command that prints JSON.
    pub fn json(&self, name: &str, args: &[&str]) -> Value {
        let mut command = self.command(name);
        json(&run_to_end(command.args(args).arg("--json"), WATCHDOG))
    }

    /// Connects to the broker as a gateway does.
    pub fn local(&self) -> Local {
        Local::connect(&self.name, Some(self.dir.path()), Some("host:0")).expect("a broker")
    }

    fn client(&self) -> Client {
        Client::builder(gpu())
            .dir(self.dir.path())
            .connect()
            .expect("a broker")
    }
}

/// Finds the child of a process that runs a command of the program.
pub fn child_of(parent: u32, command: &str) -> Option<Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task"))
        .ok()?
        .flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<i32> = lists
        .flat_map(|list| {
            let pids = list.split_whitespace().filter_map(|pid| pid.parse().ok());
            pids.collect::<Vec<i32>>()
        })
        .collect();
    let runs = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|&byte| byte == 0).nth(1) == Some(command.as_bytes())
    };
    children.into_iter().find(runs).and_then(Pid::from_raw)
}

/// Says whether a child is stopped.
pub fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is a child");
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| rest.starts_with('T'))
}

/// Makes an address that nobody else listens on: each process of this machine has another number,
/// and all of 127 is this machine.
pub fn address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(7500);
    let (pid, port) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    format!(
        "tcp/127.{}.{}.{}:{port}",
        64 + (pid >> 16 & 63),
        pid >> 8 & 255,
        pid & 255
    )
}

/// Makes contents that tell where each byte belongs.
pub fn contents(bytes: usize, seed: u32) -> Vec<u8> {
    let word = |at: u32| (at + seed).wrapping_mul(0x9E37_79B9).to_le_bytes();
    (0..bytes as u32 / 4).flat_map(word).collect()
}

/// Reads what a command printed.
pub fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Waits for a condition.
pub fn watch(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(
            begun.elapsed() < WATCHDOG,
            "waited {WATCHDOG:?} in vain: {what}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
