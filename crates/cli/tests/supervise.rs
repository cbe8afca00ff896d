//! `gpu-ipc keep -- gpu-ipc-gateway`, with a gateway that says what it was started with. The real one
//! ends with its keeper: `crates/gateway/tests/gateways/kept.rs`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use harness::program::{Running, output};
use harness::wait_until;
use rustix::process::{Pid, Signal, kill_process};

/// Notes its process, the keeper that it is told of and its broker's directory; then it ends with a
/// code, or lives.
const GATEWAY: &str = r#"#!/bin/sh
echo "$$ $GPU_IPC_GATEWAY_PARENT $NVIDIA_DRA_LOCAL_IPC_DIR" >>"$1"
[ "$2" = lives ] || exit "$2"
exec sleep 1000
"#;

/// One test, so that no other thread of this process starts one while the program is being written:
/// it would inherit the descriptor, and the program could not be started ("text file busy").
#[test]
fn a_gateway_is_started_again_until_it_ends_by_itself() {
    let place = tempfile::tempdir().expect("a folder");
    let file = |name: &str| place.path().join(name);
    let (program, noted) = (file("gpu-ipc-gateway"), file("noted"));
    fs::write(&program, GATEWAY).expect("a script");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).expect("its mode");
    let keep = |more: &[&str], how: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
        command.arg("keep").args(more).arg("--").arg(&program);
        command.arg(&noted).arg(how);
        command
    };
    let starts = || lines(&noted);

    // It is killed, and another is started, for this keeper and its directory.
    let dir = place.path().display().to_string();
    let keeper = Running::start(&mut keep(&["--dir", &dir], "lives"));
    for count in 1..=3 {
        wait_until("the gateway is started", || starts().len() == count);
        let started = &starts()[count - 1];
        let words: Vec<&str> = started.split(' ').collect();
        assert_eq!(
            words[1..],
            [keeper.pid().to_string(), dir.clone()],
            "{started}"
        );
        end(words[0]);
    }
    wait_until("the last one is started", || starts().len() == 4);
    drop(keeper);
    // This one does not ask to end with its keeper.
    end(starts()[3].split(' ').next().expect("a number"));
    assert!(!file("keeper").exists(), "nothing is kept");

    // It fails until it is killed with its keeper.
    let failing = Running::start(&mut keep(&[], "1"));
    wait_until("it is started three times more", || starts().len() >= 7);
    drop(failing);

    for (how, code) in [("0", 0), ("2", 1)] {
        let before = starts().len();
        let ended = output(&mut keep(&[], how));
        assert_eq!(
            (ended.status.code(), starts().len()),
            (Some(code), before + 1),
            "{ended:?}"
        );
    }
    for option in [&["--take-over"][..], &["--most", "9"]] {
        let ended = output(&mut keep(option, "0"));
        let why = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(
            !ended.status.success() && why.contains("a gateway has none"),
            "{why}"
        );
    }
    let mut missing = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    missing.args(["keep", "--", "/nowhere/gpu-ipc-gateway"]);
    let why = String::from_utf8(output(&mut missing).stderr).expect("text");
    assert!(
        why.contains("/nowhere/gpu-ipc-gateway cannot be started"),
        "{why}"
    );
}

fn lines(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn end(pid: &str) {
    let pid = pid.parse().ok().and_then(Pid::from_raw).expect("a number");
    kill_process(pid, Signal::KILL).expect("it runs");
}
