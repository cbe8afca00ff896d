//! Programs that tests run.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::Signal;

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

/// A program that runs, and whose standard output and error are kept. Killed when dropped.
#[derive(Debug)]
pub struct Running {
    process: Process,
    stdout: Text,
    stderr: Text,
}

impl Running {
    /// Starts a command.
    ///
    /// # Panics
    ///
    /// When it does not start.
    #[track_caller]
    pub fn start(command: &mut Command) -> Running {
        let mut process = Process::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
        let stdout = Text::of(process.0.stdout.take().expect("piped"));
        let stderr = Text::of(process.0.stderr.take().expect("piped"));
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

    /// Waits until it ends, and returns what it printed.
    ///
    /// # Panics
    ///
    /// When it does not end in time; then it is killed.
    #[track_caller]
    pub fn end(mut self, watchdog: Duration) -> Output {
        let status = self.process.wait(watchdog);
        Output {
            status,
            stdout: self.stdout.end(watchdog),
            stderr: self.stderr.end(watchdog),
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
