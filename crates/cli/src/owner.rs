//! A keeper and its broker, started as users start them, in a directory of their own.

// Tests: `crates/cli/tests/bench.rs`, `testing/torture/tests/torture.rs`.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use gpu_ipc::Gpu;
use gpu_ipc::broker::Client;
use gpu_ipc::broker::server::lock;
use rustix::process::{Pid, Signal, kill_process};

use crate::child::Child;
use crate::device::explain;

/// A process that is silent for longer counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// Both processes. Killed, and the directory removed, when dropped.
#[derive(Debug)]
pub struct Owner {
    keeper: Option<Child>,
    dir: PathBuf,
    device: String,
    /// What else the broker's command is told.
    more: Vec<String>,
    /// The most descriptors that the next keeper keeps, if not as many as it may.
    most: Option<usize>,
    /// The file that both write their logs to.
    log: Option<PathBuf>,
}

impl Owner {
    /// Starts both for a device, in a new directory.
    ///
    /// # Errors
    ///
    /// When the directory cannot be made or a process cannot be started.
    pub fn start(gpu: &Gpu, dir: PathBuf, more: &[&str]) -> Result<Owner, String> {
        Owner::start_logging(gpu, dir, more, None)
    }

    /// As [`start`](Owner::start); the log of both is appended to a file.
    ///
    /// # Errors
    ///
    /// As [`start`](Owner::start).
    pub fn start_logging(
        gpu: &Gpu,
        dir: PathBuf,
        more: &[&str],
        log: Option<PathBuf>,
    ) -> Result<Owner, String> {
        use std::os::unix::fs::DirBuilderExt;
        let made = std::fs::DirBuilder::new().mode(0o700).create(&dir);
        made.map_err(|e| format!("{} cannot be made: {e}", dir.display()))?;
        let device = format!("{}:{}", gpu.kind().name(), gpu.device().0);
        let more = more.iter().map(|&word| word.to_owned()).collect();
        let mut owner = Owner {
            keeper: None,
            dir,
            device,
            more,
            most: None,
            log,
        };
        owner.start_keeper()?;
        Ok(owner)
    }

    /// Sets what the brokers of the next keepers are told besides, and how many descriptors these
    /// keep.
    pub fn tell(&mut self, more: Vec<String>, most: Option<usize>) {
        (self.more, self.most) = (more, most);
    }

    /// Starts a keeper, in place of one that was killed.
    ///
    /// # Errors
    ///
    /// When the process cannot be started.
    pub fn start_keeper(&mut self) -> Result<(), String> {
        self.keeper = Some(self.another_keeper()?);
        Ok(())
    }

    /// Lets a new keeper take everything over from the one that is there, and waits until that has
    /// ended by itself.
    ///
    /// # Errors
    ///
    /// When the process cannot be started, and when the first does not end well.
    pub fn replace_keeper(&mut self) -> Result<(), String> {
        let next = self.another_keeper()?;
        match self.keeper.replace(next) {
            Some(mut first) => first.wait(),
            None => Ok(()),
        }
    }

    fn another_keeper(&self) -> Result<Child, String> {
        let program =
            std::env::current_exe().map_err(|e| format!("the program cannot find itself: {e}"))?;
        let (program, dir) = (
            program.to_string_lossy().into_owned(),
            self.dir.to_string_lossy().into_owned(),
        );
        let most = self
            .most
            .map(|most| ["--most".to_owned(), most.to_string()]);
        // They are killed on purpose: on standard error what they say of it would hide what is found.
        let (level, stderr) = match &self.log {
            None => ("error", Stdio::inherit()),
            Some(path) => {
                let file = OpenOptions::new().append(true).create(true).open(path);
                let file =
                    file.map_err(|e| format!("{} cannot be written: {e}", path.display()))?;
                ("info", file.into())
            }
        };
        let keep = ["keep", "--log", level, "--take-over", "--dir", &dir];
        let most = most.iter().flatten().map(String::as_str);
        let broker = [
            "--",
            &program,
            "broker",
            "--log",
            level,
            "--dir",
            &dir,
            "--device",
            &self.device,
        ];
        let more = self.more.iter().map(String::as_str);
        Child::start_into(
            keep.into_iter().chain(most).chain(broker).chain(more),
            PATIENCE,
            stderr,
        )
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the keeper's process.
    pub fn keeper(&self) -> Option<Pid> {
        self.keeper
            .as_ref()
            .and_then(|keeper| Pid::from_raw(keeper.id().cast_signed()))
    }

    /// Kills the keeper. Its broker lives on.
    ///
    /// # Errors
    ///
    /// When it does not die.
    pub fn kill_keeper(&mut self) -> Result<(), String> {
        self.keeper
            .take()
            .map_or(Ok(()), |mut keeper| keeper.kill())
    }

    /// Returns the broker's process, if one holds the directory's lock.
    pub fn broker(&self) -> Option<Pid> {
        let pid = lock::holder(&self.dir.join("lock"))?.cast_signed();
        // A number may belong to somebody else by now.
        Pid::from_raw(pid).filter(|_| self.is_broker(pid))
    }

    /// Lists the processes that are brokers of the directory.
    pub fn brokers(&self) -> Vec<Pid> {
        self.processes(|pid| self.is_broker(pid))
    }

    fn processes(&self, is_one: impl Fn(i32) -> bool) -> Vec<Pid> {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        numbers
            .filter(|&pid| is_one(pid))
            .filter_map(Pid::from_raw)
            .collect()
    }

    fn is_broker(&self, pid: i32) -> bool {
        is_broker(&command(pid), &self.dir)
    }
    /// Connects, as soon as a broker listens.
    ///
    /// # Errors
    ///
    /// What the last attempt gave.
    pub fn connect(&self, gpu: &Gpu, name: &str) -> Result<Client, String> {
        connect(gpu, &self.dir, name)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.kill_keeper();
        // A broker outlives its keeper, and so does one that is only starting and has its keeper's
        // command.
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            let brokers = self.processes(|pid| names(&command(pid), &self.dir));
            if brokers.is_empty() {
                break;
            }
            for broker in brokers {
                let _ = kill_process(broker, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Connects to the broker of a directory, as soon as one listens.
///
/// # Errors
///
/// What the last attempt gave.
pub fn connect(gpu: &Gpu, dir: &Path, name: &str) -> Result<Client, String> {
    let start = Instant::now();
    loop {
        match Client::builder(gpu.clone()).dir(dir).name(name).connect() {
            Ok(client) => return Ok(client),
            Err(error) if start.elapsed() > PATIENCE => return Err(explain(&error)),
            Err(_) => std::thread::sleep(Duration::from_micros(200)),
        }
    }
}

/// Returns a process' command: each word ends with a zero byte.
fn command(pid: i32) -> Vec<u8> {
    std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

/// Says whether a command names a broker of a directory: its own, or a keeper's.
fn names(command: &[u8], dir: &Path) -> bool {
    let has = |what: &[u8]| command.split(|byte| *byte == 0).any(|word| word == what);
    has(b"broker") && has(dir.as_os_str().as_encoded_bytes())
}

/// Says whether it is a broker's own.
fn is_broker(command: &[u8], dir: &Path) -> bool {
    command.split(|byte| *byte == 0).nth(1) == Some(b"broker") && names(command, dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keeper_that_names_its_broker_is_none() {
        let dir = Path::new("/d");
        let (keeper, broker) = (
            b"p\0keep\0--dir\0/d\0--\0p\0broker\0--dir\0/d\0",
            b"p\0broker\0--dir\0/d\0",
        );
        assert!(names(keeper, dir) && !is_broker(keeper, dir));
        assert!(names(broker, dir) && is_broker(broker, dir));
        assert!(!is_broker(broker, Path::new("/e")) && !names(b"", dir));
    }
}
