//! This binary in other processes: keeper, broker, clients.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Stdio};
use std::sync::Arc;

use backend_host::{HostBackend, HostConfig};
use broker::keeper::process::{End, Keeper};
use broker::{
    Allowed, Broker, Client, CreateOptions, Epoch, Layout, Limits, Options, PartSpec, Reader,
    Selector, Writer,
};
use gpu_api::{DeviceId, Gpu};
use harness::program::this_program;
use harness::{Child, say};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use crate::{step, until};

/// What this binary is started as.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct Role {
    dir: PathBuf,
    does: Does,
    /// The step at which it dies.
    dies_at: Option<String>,
}

#[derive(Serialize, Deserialize, Clone, Debug)]
enum Does {
    Keep(Kept),
    Serve(Rules),
    /// What it is told, as a client.
    Obey,
    /// Writes into an object until it is killed.
    WriteForEver,
}

/// What a keeper keeps, and for which brokers.
#[derive(Serialize, Deserialize, Clone, Default, Debug)]
pub struct Kept {
    /// So many files, if not as many as it may.
    most: Option<usize>,
    /// Takes everything over from the keeper that is there.
    takes_over: bool,
    /// The step at which its first broker dies, and none after it.
    kill_broker_at: Option<String>,
    rules: Rules,
}

/// What a broker allows.
#[derive(Serialize, Deserialize, Clone, Default, Debug)]
pub struct Rules {
    bytes: Option<u64>,
    participants: Option<usize>,
    names: Option<usize>,
    /// Removes what no participant reads when the limit of bytes presses.
    evict: bool,
    /// Removes a pool that no process holds at the next look.
    forgets_pools: bool,
    /// Another user who may connect.
    allowed: Option<u32>,
    /// A group whose users may connect.
    allowed_group: Option<u32>,
    /// The most descriptors that it may have.
    files: Option<u64>,
    /// Lets no other user in once a file says so.
    forbids: bool,
    /// Publishes without reading the slots.
    blind: bool,
}

/// What a client is told.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub enum Command {
    Put {
        name: String,
        seed: u64,
    },
    Remove(String),
    List,
    /// Opens, checks and holds.
    Open(String),
    Advance,
    Sleep,
    /// Sleeps, and keeps its lease, while the kernel gives this process no more addresses.
    SleepAtTheLimit,
    Wake,
    /// Does something with a pool.
    Pool(crate::holder::Told),
    /// Counts a word in as many bytes of memory that it was given and has not written to.
    Look {
        bytes: u64,
        word: u64,
    },
}

/// What an agent says.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub enum Said {
    Ready,
    Epoch(u64),
    Names(Vec<String>),
    Count(u64),
    Failed(String),
}

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

/// The device of the tests; on shared memory sparse, so that a large object costs nothing. One in a
/// process: a driver's context is not for every connection.
pub fn gpu() -> Gpu {
    static GPU: std::sync::OnceLock<Gpu> = std::sync::OnceLock::new();
    if !is_host() {
        let cuda = || {
            Gpu::new(
                backend_cuda::CudaBackend::load().expect("an NVIDIA driver"),
                DeviceId(0),
            )
        };
        return GPU.get_or_init(|| cuda().expect("its device")).clone();
    }
    let config = HostConfig::default().bytes_per_device(64 << 30);
    Gpu::new(
        HostBackend::new(config).expect("the host backend"),
        DeviceId(0),
    )
    .expect("its device")
}

/// Starts a keeper whose broker listens in a directory of its own.
pub fn started() -> (Dir, Agent) {
    let dir = Dir::new();
    let keeper = Agent::keeper(&dir);
    until("the broker listens", || dir.join("broker").exists());
    (dir, keeper)
}

pub fn client(dir: &Path) -> Client {
    Client::builder(gpu())
        .dir(dir)
        .name("test")
        .connect()
        .expect("a broker that listens")
}

/// As [`started`], with a client.
pub fn serving() -> (Dir, Agent, Client) {
    let (dir, keeper) = started();
    let client = client(&dir);
    (dir, keeper, client)
}

/// An object's contents: each byte of a part follows from the seed and the part's number.
pub fn bytes_of(seed: u64, part: u64, len: usize) -> Vec<u8> {
    let word = (seed << 16 | part)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .to_le_bytes();
    word.iter().copied().cycle().take(len).collect()
}

pub const PARTS: u64 = 4;
pub const PART_BYTES: usize = 5_000;

pub fn layout(seed: u64) -> Layout {
    let parts =
        (0..PARTS).map(|i| PartSpec::bytes(format!("p{i}"), PART_BYTES as u64).expect("a part"));
    Layout::pack(parts, &seed.to_le_bytes()).expect("a layout")
}

pub fn fill(writer: &mut Writer, seed: u64) -> broker::Result<()> {
    (0..PARTS).try_for_each(|i| writer.write(&format!("p{i}"), &bytes_of(seed, i, PART_BYTES)))
}

pub fn put(
    client: &Client,
    name: &str,
    seed: u64,
    options: &CreateOptions,
) -> broker::Result<Epoch> {
    let mut writer = client.create_with(name, layout(seed), options)?;
    fill(&mut writer, seed)?;
    writer.commit(&[])?.wait()
}

/// Returns the seed of what a reader has mapped, all of which must be of one seed.
pub fn seed_of(reader: &Reader) -> u64 {
    let seed = u64::from_le_bytes(reader.layout().user().try_into().expect("a seed"));
    for i in 0..PARTS {
        let part = reader.read(&format!("p{i}")).expect("a mapped part");
        assert!(
            part == bytes_of(seed, i, PART_BYTES),
            "part {i} of seed {seed} has other contents"
        );
    }
    seed
}

/// A process of ours. Killed when dropped.
pub struct Agent(Child<Command, Said>);

impl Deref for Agent {
    type Target = Child<Command, Said>;
    fn deref(&self) -> &Child<Command, Said> {
        &self.0
    }
}

impl DerefMut for Agent {
    fn deref_mut(&mut self) -> &mut Child<Command, Said> {
        &mut self.0
    }
}

impl Agent {
    fn start(program: Program, dir: &Path, does: Does, dies_at: Option<&str>) -> Agent {
        Agent(Child::run(
            program,
            &Role {
                dir: dir.into(),
                does,
                dies_at: dies_at.map(str::to_owned),
            },
        ))
    }

    #[track_caller]
    fn ready(mut self) -> Agent {
        assert_eq!(self.answer(), Some(Said::Ready));
        self
    }

    #[track_caller]
    fn keep(dir: &Path, kept: Kept) -> Agent {
        Agent::start(this_program(), dir, Does::Keep(kept), None).ready()
    }

    #[track_caller]
    pub fn keeper(dir: &Path) -> Agent {
        Agent::keep(dir, Kept::default())
    }

    #[track_caller]
    pub fn keeper_dying_at(dir: &Path, step: &str) -> Agent {
        Agent::start(this_program(), dir, Does::Keep(Kept::default()), Some(step)).ready()
    }

    #[track_caller]
    pub fn keeper_killing_broker_at(dir: &Path, step: &str) -> Agent {
        Agent::keep(
            dir,
            Kept {
                kill_broker_at: Some(step.to_owned()),
                ..Kept::default()
            },
        )
    }

    #[track_caller]
    pub fn small_keeper(dir: &Path, most: usize) -> Agent {
        Agent::keep(
            dir,
            Kept {
                most: Some(most),
                ..Kept::default()
            },
        )
    }

    /// Starts a keeper that takes everything over from the one that is there. It says whether it
    /// did.
    #[track_caller]
    pub fn heir(dir: &Path, most: Option<usize>, dies_at: Option<&str>) -> Agent {
        let kept = Kept {
            most,
            takes_over: true,
            ..Kept::default()
        };
        Agent::start(this_program(), dir, Does::Keep(kept), dies_at)
    }

    #[track_caller]
    pub fn limited(dir: &Path, bytes: u64) -> Agent {
        Agent::ruled(
            dir,
            Rules {
                bytes: Some(bytes),
                ..Rules::default()
            },
        )
    }

    #[track_caller]
    pub fn crowded(dir: &Path, participants: usize) -> Agent {
        Agent::ruled(
            dir,
            Rules {
                participants: Some(participants),
                ..Rules::default()
            },
        )
    }

    #[track_caller]
    pub fn evicting(dir: &Path, bytes: u64) -> Agent {
        Agent::ruled(
            dir,
            Rules {
                bytes: Some(bytes),
                evict: true,
                ..Rules::default()
            },
        )
    }

    #[track_caller]
    pub fn forgetting_pools(dir: &Path) -> Agent {
        Agent::ruled(
            dir,
            Rules {
                forgets_pools: true,
                ..Rules::default()
            },
        )
    }

    #[track_caller]
    pub fn naming(dir: &Path, names: usize) -> Agent {
        Agent::ruled(
            dir,
            Rules {
                names: Some(names),
                ..Rules::default()
            },
        )
    }

    #[track_caller]
    pub fn open_to(dir: &Path, user: u32) -> Agent {
        Agent::ruled(
            dir,
            Rules {
                allowed: Some(user),
                ..Rules::default()
            },
        )
    }

    /// Starts a broker alone, for the keeper that listens in the directory.
    #[track_caller]
    pub fn broker_of(dir: &Path) -> Agent {
        let mut program = this_program();
        program.env("NOTIFY_SOCKET", dir.join("keeper"));
        Agent::start(program, dir, Does::Serve(Rules::default()), None)
    }

    /// A broker that lets a user in until there is a file `forbid` in its directory.
    #[track_caller]
    pub fn open_until_forbidden(dir: &Path, user: u32) -> Agent {
        let rules = Rules {
            allowed: Some(user),
            forbids: true,
            ..Rules::default()
        };
        Agent::ruled(dir, rules)
    }

    #[track_caller]
    pub fn of_few_files(dir: &Path, files: u64) -> Agent {
        Agent::ruled(
            dir,
            Rules {
                files: Some(files),
                ..Rules::default()
            },
        )
    }

    /// A keeper of few descriptors whose broker evicts.
    #[track_caller]
    pub fn small_and_evicting(dir: &Path, most: usize) -> Agent {
        let rules = Rules {
            evict: true,
            ..Rules::default()
        };
        Agent::keep(
            dir,
            Kept {
                most: Some(most),
                rules,
                ..Kept::default()
            },
        )
    }

    #[track_caller]
    pub fn open_to_group(dir: &Path, group: u32) -> Agent {
        Agent::ruled(
            dir,
            Rules {
                allowed_group: Some(group),
                ..Rules::default()
            },
        )
    }

    #[track_caller]
    pub fn blind(dir: &Path) -> Agent {
        Agent::ruled(
            dir,
            Rules {
                blind: true,
                ..Rules::default()
            },
        )
    }

    #[track_caller]
    fn ruled(dir: &Path, rules: Rules) -> Agent {
        Agent::keep(
            dir,
            Kept {
                rules,
                ..Kept::default()
            },
        )
    }

    #[track_caller]
    pub fn client(dir: &Path) -> Agent {
        Agent::client_by(this_program(), dir).ready()
    }

    #[track_caller]
    pub fn client_dying_at(dir: &Path, step: &str) -> Agent {
        Agent::start(this_program(), dir, Does::Obey, Some(step)).ready()
    }

    /// Starts a client by a command that runs this binary in the end. It says whether it was let
    /// in.
    #[track_caller]
    pub fn client_by(program: Program, dir: &Path) -> Agent {
        Agent::start(program, dir, Does::Obey, None)
    }

    #[track_caller]
    pub fn late_writer(dir: &Path) -> Agent {
        Agent::start(this_program(), dir, Does::WriteForEver, None).ready()
    }

    /// Tells it something that must fail, and returns why.
    #[track_caller]
    pub fn cannot(&mut self, command: &Command) -> String {
        match self.ask(command) {
            Said::Failed(why) => why,
            other => panic!("{command:?}: {other:?}"),
        }
    }
}

/// Puts an object of a seed.
pub fn to_put(name: &str, seed: u64) -> Command {
    Command::Put {
        name: name.to_owned(),
        seed,
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

    /// Lists the processes that are brokers in this directory, or wait to be.
    pub fn brokers(&self) -> Vec<u32> {
        let processes = std::fs::read_dir("/proc").expect("processes").flatten();
        let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let serves = |pid: &u32| {
            let path = format!("/proc/{pid}/environ");
            let environment = std::fs::read(path).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| {
                let variable = String::from_utf8_lossy(variable);
                variable.contains("Serve") && variable.contains(&*self.0.path().to_string_lossy())
            })
        };
        numbers.filter(serves).collect()
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

impl Deref for Dir {
    type Target = Path;
    fn deref(&self) -> &Path {
        self.0.path()
    }
}

pub fn run(role: Role) {
    harness::die_with_the_tests();
    step::listen(&role.dir, role.dies_at);
    match role.does {
        Does::Keep(kept) => keep(&role.dir, kept),
        Does::Serve(rules) => serve(role.dir, rules),
        Does::Obey => obey(&role.dir),
        Does::WriteForEver => crate::gpu::write_for_ever(&role.dir),
    }
}

fn keep(dir: &Path, kept: Kept) {
    let open = if kept.takes_over {
        Keeper::take_over
    } else {
        Keeper::open
    };
    let mut keeper = match open(dir, kept.most) {
        Ok(keeper) => keeper,
        Err(error) => return say(&Said::Failed(error.to_string())),
    };
    say(&Said::Ready);
    let mut kill_at = kept.kill_broker_at;
    let start = || {
        let mut program = this_program();
        let role = Role {
            dir: dir.into(),
            does: Does::Serve(kept.rules.clone()),
            dies_at: kill_at.take(),
        };
        harness::play(program.stdin(Stdio::null()), &role);
        program
    };
    match keeper.run(start) {
        Ok(End::Replaced) => {}
        end => panic!("the broker ended by itself: {end:?}"),
    }
}

fn serve(dir: PathBuf, rules: Rules) {
    if let Some(files) = rules.files {
        let limit = Rlimit {
            current: Some(files),
            maximum: Some(files),
        };
        setrlimit(Resource::Nofile, limit).expect("a lower limit");
    }
    let usual = Limits::default();
    let options = Options {
        dir,
        gpus: Arc::new(|| Ok(vec![gpu()])),
        limits: Limits {
            bytes: rules.bytes.unwrap_or(u64::MAX),
            participants: rules.participants.unwrap_or(usual.participants),
            names: rules.names.unwrap_or(usual.names),
            evict: rules.evict,
            pool_ttl: rules.forgets_pools.then_some(std::time::Duration::ZERO),
            reads_slots: !rules.blind,
            ..usual
        },
        allowed: Allowed {
            uids: rules.allowed.into_iter().collect(),
            gids: rules.allowed_group.into_iter().collect(),
        },
        keeper: std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from),
    };
    let (forbid, limits) = (options.dir.join("forbid"), options.limits.clone());
    let broker = Broker::open(options).unwrap_or_else(|error| panic!("{error}"));
    if rules.forbids {
        let control = broker.control();
        std::thread::spawn(move || {
            until("it is forbidden", || forbid.exists());
            control.change(limits, Allowed::default());
        });
    }
    broker.run()
}

/// Does as a client what it is told.
fn obey(dir: &Path) {
    let client = match Client::builder(gpu()).dir(dir).name("agent").connect() {
        Ok(client) => client,
        Err(error) => return say(&Said::Failed(error.to_string())),
    };
    say(&Said::Ready);
    let mut held: Option<Reader> = None;
    harness::obey(|command| {
        carry_out(&client, &mut held, command)
            .unwrap_or_else(|error| Said::Failed(error.to_string()))
    });
}

fn carry_out(client: &Client, held: &mut Option<Reader>, command: Command) -> broker::Result<Said> {
    match command {
        Command::Put { name, seed } => {
            return Ok(Said::Epoch(
                put(client, &name, seed, &CreateOptions::default())?.0,
            ));
        }
        Command::Remove(name) => return Ok(Said::Epoch(client.remove(&name)?.0)),
        Command::List => {
            return Ok(Said::Names(
                client
                    .list()?
                    .objects
                    .into_iter()
                    .map(|row| row.name)
                    .collect(),
            ));
        }
        Command::Pool(told) => {
            let generation = crate::holder::carry_out(client, told)?;
            return Ok(generation.map_or(Said::Ready, Said::Epoch));
        }
        Command::Look { bytes, word } => return Ok(Said::Count(look_for(client, bytes, word)?)),
        Command::Open(name) => *held = Some(client.open(&name)?),
        Command::Advance => assert!(reader(held).advance()?, "there is no newer epoch"),
        Command::Sleep => reader(held).sleep(true)?,
        Command::SleepAtTheLimit => at_the_limit_of_addresses(|| reader(held).sleep(false))?,
        Command::Wake => {
            reader(held).wake_to(&Selector::Latest("model".into()))?;
        }
    }
    let reader = reader(held);
    if !reader.is_asleep() {
        seed_of(reader);
    }
    Ok(Said::Epoch(reader.epoch().0))
}

/// Does something while every `mmap` of this process fails.
fn at_the_limit_of_addresses<T>(does: impl FnOnce() -> T) -> T {
    let usual = getrlimit(Resource::As);
    setrlimit(
        Resource::As,
        Rlimit {
            current: Some(1),
            ..usual
        },
    )
    .expect("a lower limit");
    let done = does();
    setrlimit(Resource::As, usual).expect("the limit that was");
    done
}

fn reader(held: &mut Option<Reader>) -> &mut Reader {
    held.as_mut().expect("opened first")
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
        // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the
        // copy is done: the piece lies in the part, the buffer is as long, and it is waited for.
        unsafe {
            client
                .gpu()
                .backend()
                .copy_to_host(stream.raw(), buffer.as_mut_ptr(), from, piece)
        }?;
        stream.synchronize()?;
        found += buffer[..piece]
            .chunks_exact(8)
            .filter(|chunk| **chunk == word.to_le_bytes())
            .count() as u64;
    }
    Ok(found)
}
