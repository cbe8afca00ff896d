//! Programs that tests run.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

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
    let profile = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    let program = profile.join("examples").join(name);
    assert!(program.exists(), "{} was not built: run `cargo test` without a filter by target", program.display());
    program
}

/// Runs a program to its end, without input, and returns what it printed. Its children end with it, or when their
/// inputs do.
///
/// # Panics
///
/// When it takes longer than `watchdog`; then it is killed.
#[track_caller]
pub fn run_to_end(command: &mut Command, watchdog: Duration) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    let pid = Pid::from_child(&child);
    let (sender, ended) = channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = ended.recv_timeout(watchdog) else {
        kill_process(pid, Signal::KILL).expect("it is a child of ours");
        panic!("{command:?} hangs");
    };
    output.expect("a child can be waited for")
}

/// Says whether a command that prints for nobody ends well.
pub fn ends_well(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}
