//! Programs that tests run.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::Signal;

use crate::WATCHDOG;
use crate::process::Process;

/// A command that runs this program.
#[track_caller]
pub fn this_program() -> Command {
    Command::new(std::env::current_exe().expect("a test has a path"))
}

/// Finds an example that `cargo test` built beside this test.
///
/// # Panics
///
/// When it was not built.
#[track_caller]
pub fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let profile = test
        .parent()
        .and_then(Path::parent)
        .expect("target/PROFILE/deps/TEST");
    let program = profile.join("examples").join(name);
    assert!(
        program.exists(),
        "{} was not built: run `cargo test` without a filter by target",
        program.display()
    );
    program
}

/// Runs a program to its end, without input, and returns what it printed. Its children end with it,
/// or when their inputs do.
///
/// # Panics
///
/// When it takes longer than `watchdog`; then it is killed.
#[track_caller]
pub fn run_to_end(command: &mut Command, watchdog: Duration) -> Output {
    Running::start(command.stdin(Stdio::null())).end(watchdog)
}

/// As [`run_to_end`], under the [`WATCHDOG`].
#[track_caller]
pub fn output(command: &mut Command) -> Output {
    run_to_end(command, WATCHDOG)
}

/// As [`output`], with a standard output of the caller's: what is written there is not in what this
/// returns.
#[track_caller]
pub fn output_into(command: &mut Command, stdout: impl Into<Stdio>) -> Output {
    Running::start_into(command.stdin(Stdio::null()), stdout).end(WATCHDOG)
}

/// As [`output`], for a program that a machine may not have: a compiler.
///
/// # Errors
///
/// That it cannot be started.
#[track_caller]
pub fn try_output(command: &mut Command) -> std::io::Result<Output> {
    let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let running = Running::of(Process(piped.stdin(Stdio::null()).spawn()?));
    Ok(running.end(WATCHDOG))
}

/// Starts a process of a trial that keeps its own table of processes, signals them by number and
/// waits for them itself.
///
/// # Errors
///
/// That it cannot be started, and what to raise.
pub fn start_unwatched(command: &mut Command) -> Result<std::process::Child, String> {
    command
        .spawn()
        .map_err(|e| format!("a process cannot be started: {e}; raise RLIMIT_NPROC"))
}

/// Runs one case of a test program in a process of its own, and fails with all that it printed
/// unless it ends well.
///
/// # Errors
///
/// How it ended, and what it printed.
///
/// # Panics
///
/// When it does not end within the [`WATCHDOG`].
#[track_caller]
pub fn passes(command: &mut Command) -> Result<(), String> {
    let output = output(command);
    if output.status.success() {
        return Ok(());
    }
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    Err(format!("{}\n{out}{err}", output.status))
}

/// A program that runs, and whose standard output and error are kept. Killed when dropped.
#[derive(Debug)]
pub struct Running {
    process: Process,
    stdout: Option<Text>,
    stderr: Option<Text>,
}

impl Running {
    /// Starts a command.
    ///
    /// # Panics
    ///
    /// When it does not start.
    #[track_caller]
    pub fn start(command: &mut Command) -> Running {
        Self::start_into(command, Stdio::piped())
    }

    /// Starts a command with a standard output of the caller's.
    ///
    /// # Panics
    ///
    /// When it does not start.
    #[track_caller]
    pub fn start_into(command: &mut Command, stdout: impl Into<Stdio>) -> Running {
        Self::of(Process::start(
            command.stdout(stdout).stderr(Stdio::piped()),
        ))
    }

    fn of(mut process: Process) -> Running {
        let stdout = process.0.stdout.take().map(Text::of);
        let stderr = process.0.stderr.take().map(Text::of);
        Running {
            process,
            stdout,
            stderr,
        }
    }

    /// Returns its number.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Kills it at once, and waits until it is gone.
    #[track_caller]
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Says whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        self.process.0.try_wait().is_ok_and(|ended| ended.is_none())
    }

    /// Waits until it ends, and returns how, while what left it may keep its pipes open.
    ///
    /// # Panics
    ///
    /// When it does not end within the [`WATCHDOG`].
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        self.process.wait(WATCHDOG)
    }

    /// Waits until it ends, and returns what it printed.
    ///
    /// # Panics
    ///
    /// When it does not end in time; then it is killed.
    #[track_caller]
    pub fn end(mut self, watchdog: Duration) -> Output {
        let status = self.process.wait(watchdog);
        let [stdout, stderr] = [self.stdout, self.stderr]
            .map(|text| text.map(|text| text.end(watchdog)).unwrap_or_default());
        Output {
            status,
            stdout,
            stderr,
        }
    }
}

/// What comes out of a pipe until its end.
#[derive(Debug)]
pub(crate) struct Text(Receiver<Vec<u8>>);

impl Text {
    /// Reads a pipe.
    pub fn of(mut pipe: impl Read + Send + 'static) -> Text {
        let (sender, text) = channel();
        std::thread::spawn(move || {
            let mut text = Vec::new();
            // What came before an error is what can be told.
            let _ = pipe.read_to_end(&mut text);
            sender.send(text)
        });
        Text(text)
    }

    /// Waits for the end.
    #[track_caller]
    pub fn end(self, watchdog: Duration) -> Vec<u8> {
        self.0
            .recv_timeout(watchdog)
            .expect("a process that it left keeps its pipe open")
    }
}

/// Says whether a command that prints for nobody ends well.
pub fn ends_well(command: &mut Command) -> bool {
    let quiet = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}
