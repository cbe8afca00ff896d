//! This binary in other processes: keeper, broker, writer. Lines in, lines out.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use backend_host::{HostBackend, HostConfig};
use broker::keeper::process::Keeper;
use broker::{Broker, Client, CreateOptions, Epoch, Layout, Limits, Options, PartSpec, Writer};
use gpu_api::{DeviceId, Gpu};

use crate::step;

/// The variable that makes this binary an agent.
pub const ROLE: &str = "GPU_IPC_BROKER_ROLE";
/// The process of the tests.
const TESTS: &str = "GPU_IPC_BROKER_TESTS";
const DIR: &str = "GPU_IPC_BROKER_DIR";
/// Kills the first broker that a keeper starts, and none after it.
const KILL_BROKER_AT: &str = "GPU_IPC_KILL_BROKER_AT";
const MOST_KEPT: &str = "GPU_IPC_MOST_KEPT";
const LIMIT: &str = "GPU_IPC_LIMIT";
/// Another user who may connect.
const ALLOW: &str = "GPU_IPC_ALLOW";
/// Participants at a time.
const PARTICIPANTS: &str = "GPU_IPC_PARTICIPANTS";
/// Makes a broker that publishes without reading the slots.
const BLIND: &str = "GPU_IPC_BLIND";

/// Draws numbers that follow from a seed (xorshift).
pub struct Draws(pub u64);

impl Draws {
    pub fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

/// Says whether the tests run on shared memory, and not on a GPU.
pub fn is_host() -> bool {
    std::env::var("GPU_IPC_TEST_BACKEND").map_or(true, |backend| backend != "cuda")
}

/// The device of the tests; on shared memory sparse, so that a large object costs nothing. One in a process: a driver's
/// context is not for every connection.
pub fn gpu() -> Gpu {
    static GPU: std::sync::OnceLock<Gpu> = std::sync::OnceLock::new();
    if !is_host() {
        let cuda = || Gpu::new(backend_cuda::CudaBackend::load().expect("an NVIDIA driver"), DeviceId(0));
        return GPU.get_or_init(|| cuda().expect("its device")).clone();
    }
    let config = HostConfig::default().bytes_per_device(64 << 30);
    Gpu::new(HostBackend::new(config).expect("the host backend"), DeviceId(0)).expect("its device")
}

pub fn client(dir: &Path) -> Client {
    Client::builder(gpu()).dir(dir).name("test").connect().expect("a broker that listens")
}

/// An object's contents: each byte of a part follows from the seed and the part's number.
pub fn bytes_of(seed: u64, part: u64, len: usize) -> Vec<u8> {
    let word = (seed << 16 | part).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    word.iter().copied().cycle().take(len).collect()
}

pub const PARTS: u64 = 4;
pub const PART_BYTES: usize = 5_000;

pub fn layout(seed: u64) -> Layout {
    let parts = (0..PARTS).map(|i| PartSpec::bytes(format!("p{i}"), PART_BYTES as u64).expect("a part"));
    Layout::pack(parts, &seed.to_le_bytes()).expect("a layout")
}

pub fn fill(writer: &mut Writer, seed: u64) -> broker::Result<()> {
    (0..PARTS).try_for_each(|i| writer.write(&format!("p{i}"), &bytes_of(seed, i, PART_BYTES)))
}

pub fn put(client: &Client, name: &str, seed: u64, options: &CreateOptions) -> broker::Result<Epoch> {
    let mut writer = client.create_with(name, layout(seed), options)?;
    fill(&mut writer, seed)?;
    writer.commit(&[])?.wait()
}

/// Returns the seed of what a reader has mapped, all of which must be of one seed.
pub fn seed_of(reader: &broker::Reader) -> u64 {
    let seed = u64::from_le_bytes(reader.layout().user().try_into().expect("a seed"));
    for i in 0..PARTS {
        let part = reader.read(&format!("p{i}")).expect("a mapped part");
        assert!(part == bytes_of(seed, i, PART_BYTES), "part {i} of seed {seed} has other contents");
    }
    seed
}

/// A process of ours. Killed when dropped.
pub struct Agent {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Agent {
    pub fn start(role: &str, dir: &Path, more: &[(&str, String)]) -> Agent {
        Agent::run(Command::new(std::env::current_exe().expect("this binary")), role, dir, more)
    }

    /// Starts an agent by a command that runs this binary in the end.
    pub fn run(mut command: Command, role: &str, dir: &Path, more: &[(&str, String)]) -> Agent {
        command
            .env(ROLE, role)
            .env(DIR, dir)
            .env(TESTS, std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        command.envs(more.iter().map(|(name, value)| (*name, value.as_str())));
        let mut child = command.spawn().expect("a process");
        let to = child.stdin.take().expect("piped");
        let from = BufReader::new(child.stdout.take().expect("piped"));
        Agent { child, to, from }
    }

    pub fn keeper(dir: &Path) -> Agent {
        Agent::keeper_with(dir, &[])
    }

    pub fn keeper_with(dir: &Path, more: &[(&str, String)]) -> Agent {
        let mut agent = Agent::start("keeper", dir, more);
        assert_eq!(agent.line(), "ready");
        agent
    }

    pub fn keeper_killing_broker_at(dir: &Path, step: &str) -> Agent {
        Agent::keeper_with(dir, &[(KILL_BROKER_AT, step.into())])
    }

    pub fn small_keeper(dir: &Path, most: usize) -> Agent {
        Agent::keeper_with(dir, &[(MOST_KEPT, most.to_string())])
    }

    pub fn limited(dir: &Path, limit: u64) -> Agent {
        Agent::keeper_with(dir, &[(LIMIT, limit.to_string())])
    }

    pub fn crowded(dir: &Path, participants: usize) -> Agent {
        Agent::keeper_with(dir, &[(PARTICIPANTS, participants.to_string())])
    }

    pub fn blind(dir: &Path) -> Agent {
        Agent::keeper_with(dir, &[(BLIND, "1".into())])
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    pub fn tell(&mut self, line: &str) {
        // An agent that is dead hears nothing.
        let _ = writeln!(self.to, "{line}");
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("a process of ours");
        self.child.wait().expect("a process of ours");
    }

    /// Waits for its end.
    pub fn wait(&mut self) {
        self.child.wait().expect("a process of ours");
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory of a broker, whose last broker is killed with it.
pub struct Dir(tempfile::TempDir);

impl Dir {
    pub fn new() -> Dir {
        Dir(tempfile::tempdir().expect("a directory"))
    }

    /// Returns the number of the process that has the broker's lock.
    pub fn broker(&self) -> u32 {
        broker::server::lock::holder(&self.0.path().join("lock")).expect("a broker has been here")
    }

    pub fn signal_broker(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.broker() as i32).expect("a process");
        let _ = rustix::process::kill_process(pid, signal);
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // A broker outlives its keeper.
        if broker::server::lock::holder(&self.0.path().join("lock")).is_some() {
            self.signal_broker(rustix::process::Signal::KILL);
        }
    }
}

impl std::ops::Deref for Dir {
    type Target = Path;
    fn deref(&self) -> &Path {
        self.0.path()
    }
}

/// Dies with the tests, however they end.
fn die_with(tests: u64) {
    if rustix::process::getpid().is_init() {
        // In a namespace of its own, where nobody has that number: it dies with who made the namespace.
        return;
    }
    let pid = rustix::process::Pid::from_raw(tests as i32).expect("a process");
    let Ok(pidfd) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) else {
        std::process::exit(1);
    };
    std::thread::spawn(move || {
        use rustix::event::{PollFd, PollFlags, poll};
        while poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None) == Err(rustix::io::Errno::INTR) {}
        std::process::exit(1);
    });
}

pub fn run() {
    die_with(number(TESTS).expect("started by the tests"));
    step::listen();
    let dir = PathBuf::from(std::env::var_os(DIR).expect("a directory"));
    match std::env::var(ROLE).expect("a role").as_str() {
        "keeper" => keep(&dir),
        "broker" => serve(dir),
        "writer" => write(&dir),
        "reader" => read(&dir),
        "stranger" => be_a_stranger(&dir),
        "late_writer" => crate::gpu::write_for_ever(&dir),
        role => panic!("no role {role}"),
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

fn keep(dir: &Path) {
    let mut keeper = Keeper::open(dir, number(MOST_KEPT).map(|most| most as usize)).expect("a directory of its own");
    println!("ready");
    let mut kill_at = std::env::var(KILL_BROKER_AT).ok();
    let start = || {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command.env(ROLE, "broker").stdin(Stdio::null());
        command.env_remove(KILL_BROKER_AT);
        match kill_at.take() {
            Some(step) => command.env(step::KILL_AT, step),
            None => command.env_remove(step::KILL_AT),
        };
        command
    };
    let status = keeper.run(start);
    panic!("the broker ended by itself: {status:?}");
}

fn serve(dir: PathBuf) {
    let options = Options {
        dir,
        gpus: Arc::new(|| Ok(vec![gpu()])),
        limits: Limits {
            bytes: number(LIMIT).unwrap_or(u64::MAX),
            participants: number(PARTICIPANTS).map_or(Limits::default().participants, |most| most as usize),
            reads_slots: std::env::var_os(BLIND).is_none(),
            ..Limits::default()
        },
        allowed: number(ALLOW).into_iter().map(|uid| uid as u32).collect(),
        keeper: std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from),
    };
    match Broker::open(options) {
        Ok(broker) => broker.run(),
        Err(error) => panic!("{error}"),
    }
}

/// Puts one object for each line `name seed`, and answers with its epoch or an error.
fn write(dir: &Path) {
    let client = client(dir);
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let (name, seed) = line.split_once(' ').expect("name and seed");
        match put(&client, name, seed.parse().expect("a seed"), &CreateOptions::default()) {
            Ok(epoch) => println!("ok {epoch}"),
            Err(error) => println!("error {error}"),
        }
    }
}

/// Opens, advances, sleeps and wakes, a step for each line, and answers with the epoch that it reaches.
fn read(dir: &Path) {
    let client = client(dir);
    println!("ready");
    let mut reader: Option<broker::Reader> = None;
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        match (line.as_str(), &mut reader) {
            ("open", reader) => *reader = Some(client.open("model").expect("an object")),
            ("advance", Some(reader)) => assert!(reader.advance().expect("a newer epoch")),
            ("sleep", Some(reader)) => reader.sleep(true).expect("unmapped"),
            ("wake", Some(reader)) => {
                reader.wake_to(&broker::Selector::Latest("model".into())).expect("an object");
            }
            (line, _) => panic!("no such step, or nothing is open: {line}"),
        }
        let reader = reader.as_ref().expect("opened");
        if !reader.is_asleep() {
            seed_of(reader);
        }
        println!("ok {}", reader.epoch());
    }
}

/// Does what it is told, and answers with `ok` or an error: a user to whom nothing belongs.
fn be_a_stranger(dir: &Path) {
    let connected = Client::builder(gpu()).dir(dir).name("stranger").connect();
    let client = match connected {
        Ok(client) => client,
        Err(error) => return println!("error {error}"),
    };
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split(' ').collect();
        let done = match words[..] {
            ["open", name] => client.open(name).map(|reader| {
                seed_of(&reader);
                reader.epoch().to_string()
            }),
            ["put", name] => put(&client, name, 9, &CreateOptions::default()).map(|epoch| epoch.to_string()),
            ["remove", name] => client.remove(name).map(|epoch| epoch.to_string()),
            ["list"] => client.list().map(|list| {
                let names: Vec<String> = list.objects.into_iter().map(|row| row.name).collect();
                names.join(" ")
            }),
            ["look", bytes, word] => {
                let (bytes, word) = (bytes.parse().expect("a number"), word.parse().expect("a number"));
                look_for(&client, bytes, word).map(|found| found.to_string())
            }
            _ => panic!("no such thing: {line}"),
        };
        match done {
            Ok(answer) => println!("ok {answer}"),
            Err(error) => println!("error {error}"),
        }
    }
}

/// Counts a word in memory that this process was given and has not written to.
fn look_for(client: &Client, bytes: u64, word: u64) -> broker::Result<u64> {
    let spec = PartSpec::bytes("p0", bytes)?;
    let writer = client.create("fresh", Layout::pack([spec], b"")?)?;
    let at = writer.device_ptr("p0").expect("its part");
    let stream = ipc_rc::Stream::create(client.gpu())?;
    let mut buffer = vec![0u8; 16 << 20];
    let mut found = 0;
    for offset in (0..bytes).step_by(buffer.len()) {
        let piece = buffer.len().min((bytes - offset) as usize);
        let from = at.offset(offset);
        // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is done: the piece
        // lies in the part, the buffer is as long, and it is waited for.
        unsafe { client.gpu().backend().copy_to_host(stream.raw(), buffer.as_mut_ptr(), from, piece) }?;
        stream.synchronize()?;
        found += buffer[..piece].chunks_exact(8).filter(|chunk| **chunk == word.to_le_bytes()).count() as u64;
    }
    Ok(found)
}
