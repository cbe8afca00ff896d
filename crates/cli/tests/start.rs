//! What keeper and broker refuse at their start, and say of it.

#[allow(dead_code, reason = "each test program uses some of it")]
mod kept;

use std::process::Command;

use harness::program::{Running, output};
use harness::wait_until;
use kept::{PROGRAM, complaint, run};

/// A keeper's command, with its own arguments and its broker's.
fn keep(own: &[&str], broker: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .arg("keep")
        .args(own)
        .args(["--", PROGRAM, "broker"])
        .args(broker);
    command
        .env("GPU_IPC_HOST_BYTES", "1073741824")
        .env("NVIDIA_DRA_LOCAL_IPC_DIR", "/nonexistent");
    command
}

#[test]
fn one_directory_holds_for_keeper_and_broker() {
    for is_keepers in [true, false] {
        let above = tempfile::tempdir().expect("a directory");
        // It is made.
        let dir = above.path().join("new");
        let told = ["--dir", dir.to_str().expect("a plain name")];
        let (own, broker): (&[&str], &[&str]) = if is_keepers {
            (&told, &[])
        } else {
            (&[], &told)
        };
        let mut keeper = Running::start(&mut keep(own, broker));
        wait_until("the broker serves in it, and its keeper keeps", || {
            let listed = run(&dir, &["objects", "--json"]).stdout;
            let listing: serde_json::Value = serde_json::from_slice(&listed).unwrap_or_default();
            listing["keeper"] == "fed"
        });
        let broker = std::fs::read_to_string(dir.join("lock")).expect("a broker's number");
        keeper.kill();
        let broker = rustix::process::Pid::from_raw(broker.trim().parse().expect("a number"));
        let _ = rustix::process::kill_process(
            broker.expect("a process"),
            rustix::process::Signal::KILL,
        );
    }
    let (one, other) = (
        tempfile::tempdir().expect("a directory"),
        tempfile::tempdir().expect("a directory"),
    );
    let paths = [&one, &other].map(|dir| dir.path().to_str().expect("a plain name").to_owned());
    let two = output(&mut keep(&["--dir", &paths[0]], &["--dir", &paths[1]]));
    assert_eq!(two.status.code(), Some(2), "{two:?}");
    let said = complaint(&two);
    assert!(
        paths.iter().all(|path| said.contains(path)) && said.contains("name one directory"),
        "{said}"
    );
}

/// It would be as wrong the next time: the keeper ends with its broker instead of starting it again
/// and again.
#[test]
fn a_device_that_is_not_there_ends_both() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_str().expect("a plain name");
    let refused = output(&mut keep(&["--dir", path], &["--device", "host:7"]));
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let said = complaint(&refused);
    assert!(said.contains("a device is host:7, of 1 devices"), "{said}");
    assert_eq!(
        said.matches("the broker is started").count(),
        1,
        "it was started once: {said}"
    );
}
