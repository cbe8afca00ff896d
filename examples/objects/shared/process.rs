//! This program in other processes: lines in, lines out. And two of them that own memory: a keeper
//! and its broker.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_ipc::Gpu;
use gpu_ipc::broker::keeper::process::Keeper;
use gpu_ipc::broker::{Broker, Client, Limits, Options as BrokerOptions};

use super::options::open;

/// A process that takes longer counts as hung.
const PATIENCE: Duration = Duration::from_secs(120);

/// Ends the program of this name, in any role, and says why if it failed.
pub fn end(name: &str, done: Result<(), Box<dyn Error>>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// This program in another role. Killed when dropped.
pub struct Process {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// When it was started.
    pub since: Instant,
}

impl Process {
    /// Starts this program in a role, for a broker's directory, with more to tell it.
    pub fn start(
        role: &str,
        dir: &Path,
        backend: &str,
        more: &[String],
    ) -> Result<Process, Box<dyn Error>> {
        let since = Instant::now();
        let mut child = Command::new(std::env::current_exe()?)
            .arg(role)
            .arg(dir)
            .arg(backend)
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let to = child.stdin.take().ok_or("a process has no input")?;
        let from = BufReader::new(child.stdout.take().ok_or("a process has no output")?);
        Ok(Process {
            child,
            to,
            from,
            since,
        })
    }

    /// Tells it something.
    pub fn tell(&mut self, line: &str) -> Result<(), Box<dyn Error>> {
        writeln!(self.to, "{line}")
            .map_err(|e| format!("process {} is gone: {e}", self.child.id()).into())
    }

    /// Waits for a line that begins with a word, and returns the numbers behind it.
    pub fn expect(&mut self, word: &str) -> Result<Vec<u64>, Box<dyn Error>> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        let mut words = line.split_whitespace();
        if words.next() != Some(word) {
            return Err(format!("process {} said {line:?}, not {word}", self.child.id()).into());
        }
        Ok(words.map(str::parse).collect::<Result<_, _>>()?)
    }

    /// Kills it.
    pub fn kill(&mut self) -> Result<(), Box<dyn Error>> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Closes its input, hears it out, and waits for its end.
    pub fn end(mut self) -> Result<Vec<String>, Box<dyn Error>> {
        self.tell("end")?;
        let lines = self.from.by_ref().lines().collect::<Result<_, _>>()?;
        let status = self.child.wait()?;
        if status.success() {
            Ok(lines)
        } else {
            Err(format!("a process ended with {status}").into())
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A keeper with its broker, as `gpu-ipc keep -- gpu-ipc broker` starts them, in a directory of
/// their own.
pub struct Owner {
    _keeper: Process,
    dir: tempfile::TempDir,
}

impl Owner {
    /// Starts both.
    pub fn start(backend: &str) -> Result<Owner, Box<dyn Error>> {
        let dir = tempfile::tempdir()?;
        let keeper = Process::start("keeper", dir.path(), backend, &[])?;
        Ok(Owner {
            _keeper: keeper,
            dir,
        })
    }

    /// Returns the directory: all that readers and writers need to know.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Connects to a broker that may still be starting.
pub fn connect(gpu: &Gpu, dir: &Path, name: &str) -> Result<Client, Box<dyn Error>> {
    let start = Instant::now();
    loop {
        match Client::builder(gpu.clone()).dir(dir).name(name).connect() {
            Ok(client) => return Ok(client),
            Err(error) if start.elapsed() > PATIENCE => return Err(error.into()),
            Err(_) => std::thread::yield_now(),
        }
    }
}

/// Lives as a keeper or a broker, if that is the role.
pub fn own(role: &str, dir: &str, backend: &str) -> Option<Result<(), Box<dyn Error>>> {
    match role {
        "keeper" => Some(keep(dir, backend)),
        "broker" => Some(serve(dir, backend)),
        _ => None,
    }
}

fn keep(dir: &str, backend: &str) -> Result<(), Box<dyn Error>> {
    die_with_parent()?;
    let program = std::env::current_exe()?;
    let mut keeper = Keeper::open(Path::new(dir), None)?;
    let status = keeper.run(|| {
        let mut command = Command::new(&program);
        command
            .args(["broker", dir, backend])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    })?;
    Err(format!("the broker ended by itself with {status}").into())
}

fn serve(dir: &str, backend: &str) -> Result<(), Box<dyn Error>> {
    die_with_parent()?;
    let backend = backend.to_owned();
    let find = move || {
        open(&backend)
            .map(|gpu| vec![gpu])
            .map_err(|error| gpu_ipc::Error::Refused {
                why: error.to_string(),
                remedy: "choose another backend",
            })
    };
    let keeper = std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from);
    let (dir, gpus) = (PathBuf::from(dir), Arc::new(find));
    Broker::open(BrokerOptions {
        dir,
        gpus,
        limits: Limits::default(),
        allowed: Vec::new(),
        keeper,
    })?
    .run()
}

/// Has the kernel end this process with its parent, so that nobody is left over.
pub fn die_with_parent() -> Result<(), Box<dyn Error>> {
    Ok(rustix::process::set_parent_process_death_signal(Some(
        rustix::process::Signal::KILL,
    ))?)
}

/// Says a line to the parent.
pub fn say(line: &str) -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
