//! A keeper and its broker, as users start them, in a directory of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use harness::program::{Running, output};
use harness::wait_until;
use rustix::process::Signal;

/// The program.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_gpu-ipc");

/// A command of the program about the broker in a directory.
pub fn program(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .args(args)
        .arg("--dir")
        .arg(dir)
        .env("GPU_IPC_HOST_BYTES", "1073741824");
    command
}

/// Runs it.
pub fn run(dir: &Path, args: &[&str]) -> Output {
    output(&mut program(dir, args))
}

/// Returns what a command that ended well printed.
#[track_caller]
pub fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// Returns what a command complained of.
pub fn complaint(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A keeper with its broker; the broker is killed with it, since it would live on.
pub struct Keeper {
    pub process: Running,
    pub dir: tempfile::TempDir,
}

impl Keeper {
    /// Starts both for a device of shared memory.
    pub fn start() -> Keeper {
        Self::start_with(&[], &[])
    }

    /// Starts both, with more arguments of each.
    pub fn start_with(keep: &[&str], broker: &[&str]) -> Keeper {
        let dir = tempfile::tempdir().expect("a directory");
        let process = spawn(dir.path(), keep, broker);
        let keeper = Keeper { process, dir };
        wait_until("the broker answers", || {
            run(keeper.dir.path(), &["objects"]).status.success()
        });
        keeper
    }

    /// Starts a keeper in place of one that was killed.
    pub fn start_again(&mut self, keep: &[&str], broker: &[&str]) {
        self.process = spawn(self.dir.path(), keep, broker);
    }

    /// Returns the file that both log to.
    pub fn log_file(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    /// Returns what both have logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// Returns the process of the broker that serves, or served last.
    pub fn broker(&self) -> i32 {
        let text = fs::read_to_string(self.dir.path().join("lock")).unwrap_or_default();
        text.trim().parse().expect("a broker has been here")
    }

    pub fn kill_broker(&self) {
        self.signal_broker(Signal::KILL);
    }

    pub fn signal_broker(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_raw(self.broker()).expect("a process");
        let _ = rustix::process::kill_process(pid, signal);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.process.kill();
        self.kill_broker();
    }
}

/// Starts keeper and broker with a log in their directory: the shell becomes the keeper.
fn spawn(dir: &Path, keep: &[&str], broker: &[&str]) -> Running {
    let mut command = Command::new("sh");
    command
        .args(["-c", r#"exec "$@" 2>>"$0""#])
        .arg(dir.join("log"))
        .args([PROGRAM, "keep", "--dir"])
        .arg(dir)
        .args(keep)
        .args(["--", PROGRAM, "broker", "--device", "host:0"])
        .args(broker)
        .env("GPU_IPC_HOST_BYTES", "1073741824")
        .env_remove("RUST_LOG");
    Running::start(&mut command)
}
