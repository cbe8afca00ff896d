//! The files of `deploy` do what they say: systemd's unit, line by line, and the pods of Kubernetes
//! in namespaces.
//!
//! What a machine has not (systemd, namespaces that this user may make) shows as ignored.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use harness::program::{Running, ends_well, output};
use harness::surroundings::{contain, has_namespaces};
use harness::wait_until;
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};

const UNIT: &str = include_str!("../deploy/gpu-ipc-broker.service");
const PODS: &str = include_str!("../deploy/kubernetes.yaml");
const PROGRAM: &str = env!("CARGO_BIN_EXE_gpu-ipc");

fn main() {
    let arguments = Arguments::from_args();
    let (lacks_systemd, lacks_namespaces) = if arguments.list {
        (false, false)
    } else {
        (!has_systemd(), !has_namespaces())
    };
    let trial = |name: &str, case: fn()| {
        Trial::test(name, move || {
            std::panic::catch_unwind(case).map_err(|_| Failed::without_message())
        })
    };
    let trials = vec![
        trial("systemd_takes_the_unit", systemd_takes_the_unit).with_ignored_flag(lacks_systemd),
        trial(
            "the_units_lines_start_restart_and_stop",
            the_units_lines_start_restart_and_stop,
        ),
        trial(
            "two_engines_pods_share_the_brokers_directory_alone",
            pods_share_a_directory_alone,
        )
        .with_ignored_flag(lacks_namespaces),
    ];
    libtest_mimic::run(&arguments, trials).exit();
}

fn has_systemd() -> bool {
    ends_well(Command::new("systemd-analyze").arg("--version"))
}

fn systemd_takes_the_unit() {
    let dir = tempfile::tempdir().expect("a directory");
    // What it says of this unit; others of the machine are none of ours.
    let verify = |unit: &str| -> String {
        let path = dir.path().join("gpu-ipc-broker.service");
        fs::write(&path, unit).expect("written");
        let mut command = Command::new("systemd-analyze");
        let verified = output(command.args(["verify", "--man=no"]).arg(&path));
        let said = String::from_utf8(verified.stderr).expect("text");
        said.lines()
            .filter(|line| line.contains("gpu-ipc-broker.service"))
            .collect()
    };
    // It looks whether the program is there.
    let unit = UNIT.replace("/usr/bin/gpu-ipc", PROGRAM);
    assert_eq!(verify(&unit), "");
    let wrong = verify(&unit.replace("KillMode=process", "KillMode=keeper"));
    assert!(
        wrong.contains("kill mode"),
        "a wrong unit is taken: {wrong:?}"
    );
}

/// Returns the value of a setting, as systemd would run it on this machine, with `dir` for the
/// runtime directory.
fn setting(name: &str, dir: &Path) -> String {
    let mut values = UNIT
        .lines()
        .filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let value = values.next().unwrap_or_else(|| panic!("no {name}"));
    assert_eq!(values.next(), None, "{name} twice");
    let dir = dir.to_str().expect("a plain name");
    value
        .replace("%t", dir)
        .replace("/usr/bin/gpu-ipc", PROGRAM)
        .replace("cuda:0", "host:0")
        .replace("$$", "$")
}

/// Lists the processes that are brokers in a directory, or wait to be.
fn brokers(dir: &Path) -> Vec<i32> {
    let processes = fs::read_dir("/proc").expect("processes").flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_broker = |pid: &i32| {
        let Ok(command) = fs::read(format!("/proc/{pid}/cmdline")) else {
            return false;
        };
        let words: Vec<&[u8]> = command.split(|byte| *byte == 0).collect();
        words.get(1) == Some(&&b"broker"[..]) && words.contains(&dir.as_os_str().as_encoded_bytes())
    };
    numbers.filter(is_broker).collect()
}

/// What systemd does with the unit: starts its main process, sees its end, stops it.
struct Service {
    runtime: tempfile::TempDir,
    main: Option<Running>,
}

impl Service {
    fn dir(&self) -> PathBuf {
        self.runtime.path().join("gpu-ipc-broker")
    }

    fn start(&mut self) {
        let line = setting("ExecStart", self.runtime.path());
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).env("GPU_IPC_HOST_BYTES", "1073741824");
        self.main = Some(Running::start(&mut command));
    }

    /// Runs the program in the unit's directory.
    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(PROGRAM);
        command
            .args(args)
            .arg("--dir")
            .arg(self.dir())
            .env("GPU_IPC_HOST_BYTES", "1073741824");
        output(&mut command)
    }

    /// Waits for a broker whose keeper has everything, and returns its process.
    fn serving(&self) -> i32 {
        let mut pid = 0;
        wait_until("a broker with a keeper", || {
            let listing: serde_json::Value =
                serde_json::from_slice(&self.run(&["objects", "--json"]).stdout)
                    .unwrap_or_default();
            pid = listing["pid"].as_i64().unwrap_or_default() as i32;
            listing["ok"] == true && listing["keeper"] == "fed"
        });
        pid
    }

    fn kill_main(&mut self) {
        self.main = None;
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.kill_main();
        let dir = self.dir();
        wait_until("no broker is left", || {
            let left = brokers(&dir);
            for pid in left.iter().filter_map(|&pid| Pid::from_raw(pid)) {
                let _ = kill_process(pid, Signal::KILL);
            }
            left.is_empty()
        });
    }
}

fn the_units_lines_start_restart_and_stop() {
    let mut service = Service {
        runtime: tempfile::tempdir().expect("a directory"),
        main: None,
    };
    // As RuntimeDirectory= makes it.
    assert_eq!(
        setting("RuntimeDirectory", service.runtime.path()),
        "gpu-ipc-broker"
    );
    fs::create_dir(service.dir()).expect("a directory");
    fs::set_permissions(service.dir(), fs::Permissions::from_mode(0o755)).expect("ours");
    service.start();
    let broker = service.serving();
    let file = service.runtime.path().join("weights.bin");
    fs::write(&file, vec![7; 10_000]).expect("a file");
    let put = service.run(&[
        "put",
        "model",
        file.to_str().expect("a plain name"),
        "--backend",
        "host",
    ]);
    assert!(put.status.success(), "{put:?}");
    // The keeper dies. KillMode=process leaves its broker, and Restart=always starts the line
    // again.
    assert_eq!(setting("KillMode", service.runtime.path()), "process");
    assert_eq!(setting("Restart", service.runtime.path()), "always");
    service.kill_main();
    service.start();
    assert_eq!(
        service.serving(),
        broker,
        "the broker that was there feeds the new keeper"
    );
    wait_until("the new keeper's own broker waits", || {
        brokers(&service.dir()).len() == 2
    });
    kill_process(Pid::from_raw(broker).expect("a process"), Signal::KILL).expect("it is ours");
    wait_until("another broker", || service.serving() != broker);
    let get = || service.run(&["get", "model", "--backend", "host"]).stdout;
    assert_eq!(get(), vec![7; 10_000], "kept by the second keeper");
    // Once more, so that a broker waits when the unit is stopped.
    service.kill_main();
    service.start();
    service.serving();
    wait_until("the third keeper's own broker waits", || {
        brokers(&service.dir()).len() == 2
    });
    let line = setting("ExecStop", service.runtime.path());
    let script = line
        .strip_prefix("/bin/sh -c '")
        .and_then(|line| line.strip_suffix('\''))
        .expect("a shell's");
    let main = service.main.as_mut().expect("it runs");
    let mut stop = Command::new("/bin/sh");
    stop.args(["-c", script])
        .env("MAINPID", main.pid().to_string());
    let stopped = output(&mut stop);
    assert!(stopped.status.success(), "{stopped:?}");
    main.wait();
    wait_until("nobody is left", || brokers(&service.dir()).is_empty());
}

/// Returns the words of the only `command` of the pods.
fn command_of_the_pod() -> Vec<String> {
    let mut commands = PODS
        .lines()
        .filter_map(|line| line.trim().strip_prefix("command: [")?.strip_suffix(']'));
    let command = commands
        .next()
        .expect("a command")
        .split(", ")
        .map(str::to_owned)
        .collect();
    assert_eq!(commands.next(), None, "one container has a command");
    command
}

/// Returns the only child of a process.
fn child_of(pid: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
        .ok()?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

fn pods_share_a_directory_alone() {
    // What the node shares lies at /mnt in these containers, as nothing else that can be written
    // does.
    let mount = "mountPath: /run/objects}";
    assert_eq!(
        PODS.matches(mount).count(),
        2,
        "the broker's pod and the engines'"
    );
    assert_eq!(
        PODS.matches("volumeMounts").count(),
        2,
        "and nothing else is shared"
    );
    assert!(PODS.contains("replicas: 2") && !PODS.contains("hostIPC") && !PODS.contains("hostPID"));
    let node = tempfile::tempdir().expect("a directory");
    let program = Path::new(PROGRAM);
    let words = command_of_the_pod();
    assert_eq!(words.first().map(String::as_str), Some("gpu-ipc"));
    let words = words.iter().skip(1).map(|word| match word.as_str() {
        "gpu-ipc" => PROGRAM,
        "/run/objects" => "/mnt",
        word => word,
    });
    // A container that is killed with everything in it.
    let mut pod = contain(node.path(), program);
    let pod = Running::start(pod.args(words).env("GPU_IPC_HOST_BYTES", "1073741824"));
    let env = "env: [{name: NVIDIA_DRA_LOCAL_IPC_DIR, value: /run/objects}]";
    assert!(
        PODS.contains(env),
        "what tells an engine where the broker is"
    );
    let engine = |args: &[&str]| {
        let mut engine = contain(node.path(), program);
        engine
            .args(args)
            .env("NVIDIA_DRA_LOCAL_IPC_DIR", "/mnt")
            .env("GPU_IPC_HOST_BYTES", "1073741824");
        output(&mut engine)
    };
    wait_until("the broker answers", || {
        engine(&["objects"]).status.success()
    });
    // The one file that is known to be in every container, and large: the program.
    let weights = fs::read(program).expect("the program");
    let put = engine(&["put", "model", PROGRAM]);
    assert!(put.status.success(), "{put:?}");
    let get = || engine(&["get", "model"]).stdout == weights;
    assert!(
        get(),
        "another engine, in namespaces of its own, has every byte"
    );
    // unshare, the keeper, the broker.
    let broker = || child_of(child_of(pod.pid())?);
    let first = broker().expect("a broker");
    kill_process(
        Pid::from_raw(first as i32).expect("a process"),
        Signal::KILL,
    )
    .expect("it is ours");
    wait_until("another broker", || {
        broker().is_some_and(|pid| pid != first) && engine(&["objects"]).status.success()
    });
    assert!(get(), "the keeper had it");
    let listing: serde_json::Value =
        serde_json::from_slice(&engine(&["objects", "--json"]).stdout).expect("JSON");
    assert_eq!(
        (&listing["restored"], &listing["objects"][0]["readers"]),
        (&1.into(), &serde_json::json!([]))
    );
}
