//! How keeper and broker start, what they refuse and say of it; and how both are ended.

#[allow(dead_code, reason = "each test program uses some of it")]
mod kept;

use std::process::Command;

use harness::program::{Running, output};
use harness::wait_until;
use kept::{Keeper, PROGRAM, complaint, run, text};

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

/// The number of a dead broker in its lock file may be another process' by now.
#[test]
fn stop_ends_both_and_no_other_process() {
    let mut keeper = Keeper::start();
    let dir = keeper.dir.path().to_owned();
    let said = text(&run(&dir, &["stop"]));
    assert!(
        said.contains("ended: keeper") && said.contains(&format!("broker {}", keeper.broker())),
        "{said}"
    );
    keeper.process.wait();
    assert!(!run(&dir, &["objects"]).status.success(), "it is gone");
    let mut other = Running::start(Command::new("sleep").arg("1000"));
    for lock in ["lock", "keeper.lock"] {
        std::fs::write(dir.join(lock), format!("{:<10}\n", other.pid())).expect("a file");
    }
    assert!(
        text(&run(&dir, &["stop"])).contains("nothing serves"),
        "and nobody was asked to end"
    );
    assert!(other.is_running());
    // A number that is held by nobody, beside a lock that is held: it waits, and says so.
    let held = std::fs::File::open(dir.join("lock")).expect("a file");
    held.lock().expect("it is free");
    let late = run(&dir, &["stop", "--timeout", "0.2"]);
    assert!(
        complaint(&late).contains("no process that is seen from here"),
        "{late:?}"
    );
    assert!(other.is_running());
}

/// A broker and a keeper that are stopped take no SIGTERM.
#[test]
fn stop_ends_what_is_stopped() {
    let mut keeper = Keeper::start();
    keeper.process.signal(rustix::process::Signal::STOP);
    keeper.signal_broker(rustix::process::Signal::STOP);
    text(&run(keeper.dir.path(), &["stop", "--timeout", "2"]));
    keeper.process.wait();
}

/// A keeper that is not there yet may have everything, as one that takes over from another does.
#[test]
fn a_broker_that_its_keeper_did_not_start_waits_for_it() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    let path = dir.to_str().expect("a plain name");
    let _keeper = Running::start(Command::new(PROGRAM).args(["keep", "--dir", path]));
    let broker = || {
        let mut command = kept::program(dir, &["broker", "--keeper", "--device", "host:0"]);
        Running::start(command.env_remove("NOTIFY_SOCKET"))
    };
    let mut first = broker();
    text(&run(dir, &["ready", "--timeout", "60"]));
    std::fs::write(dir.join("file"), [7; 5_000]).expect("a file");
    let file = format!("{path}/file");
    text(&run(dir, &["put", "model", &file, "--backend", "host"]));
    first.kill();
    // The keeper lives, and is not found for a while.
    let (socket, away) = (dir.join("keeper"), dir.join("away"));
    std::fs::rename(&socket, &away).expect("a socket");
    let second = broker();
    wait_until("the second broker has the lock", || {
        let lock = std::fs::read_to_string(dir.join("lock")).expect("a broker's number");
        lock.trim() == second.pid().to_string()
    });
    let early = run(dir, &["ready", "--broker", "--timeout", "0.5"]);
    assert_eq!(early.status.code(), Some(1), "it serves nothing: {early:?}");
    std::fs::rename(&away, &socket).expect("a socket");
    text(&run(dir, &["ready", "--timeout", "60"]));
    let got = run(dir, &["get", "model", "--backend", "host"]);
    assert_eq!(got.stdout, [7; 5_000], "{got:?}");
}

#[test]
fn ready_says_what_is_missing() {
    let dir = tempfile::tempdir().expect("a directory");
    let ready = |args: &[&str]| run(dir.path(), &[&["ready"], args].concat());
    let missing = |args: &[&str], why: &str| {
        let refused = ready(&[args, &["--timeout", "1"]].concat());
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        assert!(
            complaint(&refused).contains(why),
            "no {why:?} in {refused:?}"
        );
    };
    missing(&["--keeper"], "the keeper is not there");
    missing(&["--broker"], "broker");
    let path = dir.path().to_str().expect("a plain name");
    let alone = Running::start(Command::new(PROGRAM).args(["keep", "--dir", path]));
    text(&ready(&["--keeper", "--timeout", "60"]));
    missing(&[], "broker");
    let broker = |more: &[&str]| {
        let mut command = kept::program(dir.path(), &["broker", "--device", "host:0"]);
        Running::start(command.args(more).env_remove("NOTIFY_SOCKET"))
    };
    let mut without = broker(&[]);
    text(&ready(&["--broker", "--timeout", "60"]));
    missing(&[], "no keeper: objects go with the broker");
    without.kill();
    let with = broker(&["--keeper"]);
    text(&ready(&["--timeout", "60"]));
    alone.signal(rustix::process::Signal::STOP);
    missing(&["--keeper"], "the keeper does not answer");
    alone.signal(rustix::process::Signal::CONT);
    with.signal(rustix::process::Signal::STOP);
    missing(&["--broker"], "does not answer");
    with.signal(rustix::process::Signal::CONT);
    text(&ready(&["--timeout", "60"]));
}
