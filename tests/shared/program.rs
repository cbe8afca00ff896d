//! Programs that tests run to their end.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

/// Finds an example that `cargo test` built beside this test.
pub fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let profile = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    let program = profile.join("examples").join(name);
    assert!(program.exists(), "{} was not built: run `cargo test` without a filter by target", program.display());
    program
}

/// Runs a program to its end, without input, and returns what it printed. One that takes longer than `watchdog` is
/// killed, and fails the test; its children end with it, or when their inputs do.
#[track_caller]
pub fn run_to_end(command: &mut Command, watchdog: Duration) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    let pid = rustix::process::Pid::from_child(&child);
    let (sender, ended) = channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = ended.recv_timeout(watchdog) else {
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is a child of ours");
        panic!("{command:?} hangs");
    };
    output.expect("a child can be waited for")
}
