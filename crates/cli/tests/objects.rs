//! The programs around objects: keeper, broker, put, get, objects, rm.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use harness::wait_until;

fn program(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    command.args(args).arg("--dir").arg(dir).env("GPU_IPC_HOST_BYTES", "1073741824");
    command
}

fn run(dir: &Path, args: &[&str]) -> Output {
    program(dir, args).output().expect("the program")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// A keeper with its broker; the broker is killed with it, since it would live on.
struct Keeper {
    child: Child,
    dir: tempfile::TempDir,
}

impl Keeper {
    fn start() -> Keeper {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().to_str().expect("a plain name");
        let exe = env!("CARGO_BIN_EXE_gpu-ipc");
        let child = Command::new(exe)
            .args(["keep", "--dir", path, "--", exe, "broker", "--device", "host:0", "--dir", path])
            .stdout(Stdio::null())
            .spawn()
            .expect("the program");
        let keeper = Keeper { child, dir };
        wait_until("the broker answers", || run(keeper.dir.path(), &["objects"]).status.success());
        keeper
    }

    fn broker(&self) -> i32 {
        let text = fs::read_to_string(self.dir.path().join("lock")).unwrap_or_default();
        text.trim().parse().expect("a broker has been here")
    }

    fn kill_broker(&self) {
        let pid = rustix::process::Pid::from_raw(self.broker()).expect("a process");
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
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
    let listing: serde_json::Value = serde_json::from_str(&text(&run(dir, &["objects", "--json"]))).expect("JSON");
    assert_eq!((&listing["ok"], &listing["keeper"]), (&true.into(), &"fed".into()));
    assert_eq!(listing["objects"][0]["name"], "model");
    // As NVIDIA's resource driver of Kubernetes tells a container where its directory is.
    let mut told = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    told.args(get).env("NVIDIA_DRA_LOCAL_IPC_DIR", dir).env("GPU_IPC_HOST_BYTES", "1073741824");
    assert!(told.output().expect("the program").stdout == contents);
    let first = keeper.broker();
    keeper.kill_broker();
    wait_until("another broker", || keeper.broker() != first && run(dir, &["objects"]).status.success());
    assert!(run(dir, &get).stdout == contents, "the object is still there");
    assert_eq!(text(&run(dir, &put)).trim(), "2");
    let late = run(dir, &["put", "model", path, "--backend", "host", "--expect", "1"]);
    assert!(!late.status.success());
    assert!(String::from_utf8_lossy(&late.stderr).contains("model is at epoch 2, not at 1"), "{late:?}");
    text(&run(dir, &["rm", "model"]));
    let gone = run(dir, &get);
    assert!(String::from_utf8_lossy(&gone.stderr).contains("its last epoch was 2"), "{gone:?}");
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
    assert_eq!(parts, "a.weight\t24\ttype 2/32/1\t[2x3]\nb\t8\ttype 4/16/1\t[4]\n");
    let part = run(dir, &["get", "model", "--part", "b", "--backend", "host"]);
    assert_eq!(part.stdout, (24..32u8).collect::<Vec<u8>>());
    let which = run(dir, &["get", "model", "--backend", "host"]);
    assert!(String::from_utf8_lossy(&which.stderr).contains("has 2 parts; name one with --part"), "{which:?}");
    fs::write(&file, &bytes[..bytes.len() - 1]).expect("a file");
    let cut = run(dir, &["put", "cut", path, "--backend", "host"]);
    assert!(String::from_utf8_lossy(&cut.stderr).contains("b lies at 24 to 32"), "{cut:?}");
}

#[test]
fn without_a_broker_the_error_says_how_to_start_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let none = run(dir.path(), &["objects"]);
    assert_eq!(none.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&none.stderr).contains("start one with: gpu-ipc keep -- gpu-ipc broker"),
        "{none:?}"
    );
    let json: serde_json::Value =
        serde_json::from_slice(&run(dir.path(), &["objects", "--json"]).stdout).expect("JSON");
    assert_eq!(json["ok"], false);
}
