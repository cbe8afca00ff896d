//! The programs around objects: keeper, broker, put, get, objects, rm, metrics.

mod open_metrics;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use gpu_ipc::{BackendKind, Session, detect};
use harness::program::{Running, output};
use harness::wait_until;
use open_metrics::{Sample, parse};
use rustix::process::Signal;

fn program(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    command
        .args(args)
        .arg("--dir")
        .arg(dir)
        .env("GPU_IPC_HOST_BYTES", "1073741824");
    command
}

fn run(dir: &Path, args: &[&str]) -> Output {
    output(&mut program(dir, args))
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// A keeper with its broker; the broker is killed with it, since it would live on.
struct Keeper {
    process: Running,
    dir: tempfile::TempDir,
}

impl Keeper {
    fn start() -> Keeper {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().to_str().expect("a plain name");
        let exe = env!("CARGO_BIN_EXE_gpu-ipc");
        let mut keep = Command::new(exe);
        keep.args([
            "keep", "--dir", path, "--", exe, "broker", "--device", "host:0", "--dir", path,
        ]);
        let process = Running::start(&mut keep);
        let keeper = Keeper { process, dir };
        wait_until("the broker answers", || {
            run(keeper.dir.path(), &["objects"]).status.success()
        });
        keeper
    }

    fn broker(&self) -> i32 {
        let text = fs::read_to_string(self.dir.path().join("lock")).unwrap_or_default();
        text.trim().parse().expect("a broker has been here")
    }

    fn kill_broker(&self) {
        self.signal_broker(Signal::KILL);
    }

    fn signal_broker(&self, signal: Signal) {
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

#[test]
fn files_go_in_and_bytes_come_out_also_after_the_broker_was_killed() {
    let keeper = Keeper::start();
    let dir = keeper.dir.path();
    let file = dir.join("weights.bin");
    let contents: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(&file, &contents).expect("a file");
    let path = file.to_str().expect("a plain name");
    let put = ["put", "model", path, "--backend", "host"];
    assert_eq!(text(&run(dir, &put)).trim(), "1");
    let get = ["get", "model", "--backend", "host"];
    assert!(run(dir, &get).stdout == contents);
    let listing: serde_json::Value =
        serde_json::from_str(&text(&run(dir, &["objects", "--json"]))).expect("JSON");
    assert_eq!(
        (&listing["ok"], &listing["keeper"]),
        (&true.into(), &"fed".into())
    );
    assert_eq!(listing["objects"][0]["name"], "model");
    // As NVIDIA's resource driver of Kubernetes tells a container where its directory is.
    let mut told = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    told.args(get)
        .env("NVIDIA_DRA_LOCAL_IPC_DIR", dir)
        .env("GPU_IPC_HOST_BYTES", "1073741824");
    assert!(output(&mut told).stdout == contents);
    let first = keeper.broker();
    keeper.kill_broker();
    wait_until("another broker", || {
        keeper.broker() != first && run(dir, &["objects"]).status.success()
    });
    assert!(
        run(dir, &get).stdout == contents,
        "the object is still there"
    );
    assert_eq!(text(&run(dir, &put)).trim(), "2");
    let late = run(
        dir,
        &["put", "model", path, "--backend", "host", "--expect", "1"],
    );
    assert!(!late.status.success());
    assert!(
        String::from_utf8_lossy(&late.stderr).contains("model is at epoch 2, not at 1"),
        "{late:?}"
    );
    text(&run(dir, &["rm", "model"]));
    let gone = run(dir, &get);
    assert!(
        String::from_utf8_lossy(&gone.stderr).contains("its last epoch was 2"),
        "{gone:?}"
    );
}

#[test]
fn tensors_become_parts_with_their_types() {
    let keeper = Keeper::start();
    let dir = keeper.dir.path();
    let file = dir.join("model.safetensors");
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"#,
        r#""a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"#,
        r#""b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#,
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend(0..32u8);
    fs::write(&file, &bytes).expect("a file");
    let path = file.to_str().expect("a plain name");
    text(&run(dir, &["put", "model", path, "--backend", "host"]));
    let parts = text(&run(dir, &["get", "model", "--parts", "--backend", "host"]));
    assert_eq!(
        parts,
        "a.weight\t24\ttype 2/32/1\t[2x3]\nb\t8\ttype 4/16/1\t[4]\n"
    );
    let part = run(dir, &["get", "model", "--part", "b", "--backend", "host"]);
    assert_eq!(part.stdout, (24..32u8).collect::<Vec<u8>>());
    let which = run(dir, &["get", "model", "--backend", "host"]);
    assert!(
        String::from_utf8_lossy(&which.stderr).contains("has 2 parts; name one with --part"),
        "{which:?}"
    );
    fs::write(&file, &bytes[..bytes.len() - 1]).expect("a file");
    let cut = run(dir, &["put", "cut", path, "--backend", "host"]);
    assert!(
        String::from_utf8_lossy(&cut.stderr).contains("b lies at 24 to 32"),
        "{cut:?}"
    );
}

#[test]
fn without_a_broker_the_error_says_how_to_start_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let none = run(dir.path(), &["objects"]);
    assert_eq!(none.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&none.stderr)
            .contains("start one with: gpu-ipc keep -- gpu-ipc broker"),
        "{none:?}"
    );
    let json: serde_json::Value =
        serde_json::from_slice(&run(dir.path(), &["objects", "--json"]).stdout).expect("JSON");
    assert_eq!(json["ok"], false);
}

/// Prints the metrics of a runtime directory and a broker, which must be OpenMetrics.
fn metrics(runtime: &Path, broker: &Path, args: &[&str]) -> Vec<Sample> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    command
        .arg("metrics")
        .args(args)
        .env("GPU_IPC_RUNTIME_DIR", runtime)
        .env("NVIDIA_DRA_LOCAL_IPC_DIR", broker);
    let text = text(&output(&mut command));
    parse(&text).unwrap_or_else(|why| panic!("{why}\n{text}"))
}

/// A runtime directory, which nobody else may enter.
fn runtime_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).expect("ours");
    dir
}

fn value_of(samples: &[Sample], name: &str) -> Option<f64> {
    let mut found = samples.iter().filter(|sample| sample.name == name);
    let value = found.next().map(|sample| sample.value);
    assert!(found.next().is_none(), "{name} more than once: {samples:?}");
    value
}

#[test]
fn metrics_are_open_metrics_of_sessions_and_the_broker() {
    let keeper = Keeper::start();
    let dir = keeper.dir.path();
    let runtime = runtime_dir();
    let gpu = detect()
        .expect("the host is there")
        .first(BackendKind::Host)
        .expect("the host is there");
    let session = Session::builder(gpu)
        .runtime_dir(runtime.path())
        .open()
        .expect("a session");
    let _block = session.alloc(1 << 20).expect("room");
    let file = dir.join("weights.bin");
    fs::write(&file, [7; 5_000]).expect("a file");
    // A name that has what the text must escape.
    let name = r#"mo"del\n"#;
    let path = file.to_str().expect("a plain name");
    for _ in 0..2 {
        text(&run(dir, &["put", name, path, "--backend", "host"]));
    }
    let samples = metrics(runtime.path(), dir, &["--timeout", "60"]);
    let value = |name: &str| value_of(&samples, name);
    let session_up = samples
        .iter()
        .find(|sample| sample.name == "gpu_ipc_session_up")
        .expect("a session");
    assert_eq!(
        session_up.label("socket"),
        session.socket_path().to_str().expect("a plain path")
    );
    assert_eq!(value("gpu_ipc_session_up"), Some(1.0));
    assert_eq!(
        value("gpu_ipc_session_block_bytes"),
        Some(f64::from(1 << 20))
    );
    assert_eq!(value("gpu_ipc_session_deaths_total"), Some(0.0));
    assert_eq!(
        (
            value("gpu_ipc_broker_up"),
            value("gpu_ipc_broker_keeper_fed")
        ),
        (Some(1.0), Some(1.0))
    );
    assert_eq!(value("gpu_ipc_broker_commits_total"), Some(2.0));
    assert_eq!(value("gpu_ipc_broker_limit_bytes"), None, "it has no limit");
    let objects: Vec<&Sample> = samples
        .iter()
        .filter(|sample| sample.name == "gpu_ipc_object_bytes")
        .collect();
    let label = |label: &str| {
        objects
            .iter()
            .map(|sample| sample.label(label))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (label("name"), label("epoch")),
        (vec![name, name], vec!["1", "2"])
    );
    assert_eq!(
        (label("state"), label("dir")[0]),
        (vec!["visible"; 2], dir.to_str().expect("a plain name"))
    );
    assert!(
        objects.iter().all(|sample| sample.value >= 5_000.0),
        "{objects:?}"
    );
    // Named sessions are asked alone.
    let socket = session.socket_path().to_str().expect("a plain path");
    let named = metrics(runtime.path(), dir, &[socket, "--timeout", "60"]);
    assert_eq!(
        (
            value_of(&named, "gpu_ipc_session_up"),
            value_of(&named, "gpu_ipc_broker_up")
        ),
        (Some(1.0), None)
    );
    // What does not answer is down, and says nothing else.
    keeper.signal_broker(Signal::STOP);
    let stopped = metrics(runtime.path(), dir, &["--timeout", "0.2"]);
    assert_eq!(value_of(&stopped, "gpu_ipc_broker_up"), Some(0.0));
    assert!(
        !stopped
            .iter()
            .any(|sample| sample.name.starts_with("gpu_ipc_object_")),
        "{stopped:?}"
    );
    keeper.signal_broker(Signal::CONT);
    let nobody = runtime_dir();
    assert_eq!(metrics(nobody.path(), nobody.path(), &[]), []);
}

/// Lists what is in a runtime directory, and the broker.
fn ls(runtime: &Path, broker: &Path, args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    command
        .arg("ls")
        .args(args)
        .env("GPU_IPC_RUNTIME_DIR", runtime)
        .env("NVIDIA_DRA_LOCAL_IPC_DIR", broker);
    String::from_utf8(output(&mut command).stdout).expect("text")
}

#[test]
fn ls_shows_the_broker_and_one_that_is_stopped() {
    let keeper = Keeper::start();
    let (dir, runtime) = (keeper.dir.path(), runtime_dir());
    let listed = |args: &[&str]| -> serde_json::Value {
        let text = ls(runtime.path(), dir, &[args, &["--json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|why| panic!("{why}: {text}"))
    };
    let alive = &listed(&["--timeout", "60"])["brokers"][0];
    assert_eq!(
        (&alive["state"], &alive["broker"]["pid"]),
        (&"alive".into(), &keeper.broker().into()),
        "{alive}"
    );
    assert_eq!(alive["dir"], dir.to_str().expect("a plain name"));
    assert!(
        ls(runtime.path(), dir, &["--timeout", "60"]).contains("BROKER"),
        "and for people"
    );
    keeper.signal_broker(Signal::STOP);
    let hung = &listed(&["--timeout", "0.2"])["brokers"][0];
    assert_eq!(
        (&hung["state"], &hung["pid"]),
        (&"hung".into(), &keeper.broker().into()),
        "{hung}"
    );
    keeper.signal_broker(Signal::CONT);
}
