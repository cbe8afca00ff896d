//! The programs around objects: keeper, broker, put, get, objects, rm, metrics.

#[allow(dead_code, reason = "each test program uses some of it")]
mod kept;
mod open_metrics;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use gpu_ipc::{BackendKind, Session, detect};
use harness::program::output;
use harness::wait_until;
use kept::{Keeper, PROGRAM, complaint, run, text};
use open_metrics::{Sample, parse};
use rustix::process::Signal;

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
    let mut told = Command::new(PROGRAM);
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
    assert_eq!(parts, "a.weight\t24\tF32\t[2x3]\nb\t8\tBF16\t[4]\n");
    let part = run(dir, &["get", "model", "--part", "b", "--backend", "host"]);
    assert_eq!(part.stdout, (24..32u8).collect::<Vec<u8>>());
    let which = run(dir, &["get", "model", "--backend", "host"]);
    assert!(
        String::from_utf8_lossy(&which.stderr).contains("has 2 parts; name one with --part"),
        "{which:?}"
    );
}

/// Each mistake of a file of tensors, and what is said of it.
#[test]
fn a_file_of_tensors_that_is_not_whole_is_refused() {
    let keeper = Keeper::start();
    let dir = keeper.dir.path();
    let good = tensors(
        r#"{"b":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}"#,
        &[7; 8],
    );
    let cases = [
        (
            good[..good.len() - 1].to_vec(),
            "b lies at 0 to 8, but the file has 7 bytes of tensors; copy it again",
        ),
        (
            [&good[..], b"rest"].concat(),
            "it has 12 bytes of tensors, and its header knows of 8; write it anew",
        ),
        (good[..5].to_vec(), "begins with 8 bytes, this one has 5"),
        (good[..9].to_vec(), "of 9 in the file"),
    ];
    let file = dir.join("model.safetensors");
    let path = file.to_str().expect("a plain name");
    for (bytes, why) in cases {
        fs::write(&file, &bytes).expect("a file");
        let refused = run(dir, &["put", "model", path, "--backend", "host"]);
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        let said = complaint(&refused);
        assert!(
            said.starts_with(path) && said.contains(why),
            "no {why:?} in {said}"
        );
    }
    assert!(
        !run(dir, &["get", "model", "--parts", "--backend", "host"])
            .status
            .success(),
        "nothing was committed"
    );
    fs::write(&file, &good).expect("a file");
    assert_eq!(
        text(&run(dir, &["put", "model", path, "--backend", "host"])),
        "1\n"
    );
}

/// Makes a file of tensors.
fn tensors(header: &str, data: &[u8]) -> Vec<u8> {
    [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        data,
    ]
    .concat()
}

/// A pipe has no length; its bytes are the object all the same, and never none of them.
#[test]
fn a_pipe_is_put_whole() {
    let keeper = Keeper::start();
    let dir = keeper.dir.path();
    let contents: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
    let file = dir.join("weights.bin");
    fs::write(&file, &contents).expect("a file");
    let put = |script: &str| {
        let mut command = Command::new("sh");
        command
            .args(["-c", script, PROGRAM])
            .arg(dir)
            .arg(&file)
            .env("GPU_IPC_HOST_BYTES", "1073741824");
        output(&mut command)
    };
    let piped = put(r#"cat "$2" | "$0" put m /dev/stdin --backend host --dir "$1""#);
    assert_eq!(text(&piped), "1\n");
    let get = |name: &str| run(dir, &["get", name, "--backend", "host"]).stdout;
    assert!(get("m") == contents);
    // A named one, and tensors in it.
    let whole = tensors(
        r#"{"b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#,
        &[7; 8],
    );
    fs::write(&file, &whole).expect("a file");
    let fifo = put(
        r#"mkfifo "$1/fifo" && { cat "$2" >"$1/fifo" & "$0" put t "$1/fifo" --safetensors --backend host --dir "$1"; }"#,
    );
    assert_eq!(text(&fifo), "1\n");
    assert_eq!(
        text(&run(dir, &["get", "t", "--parts", "--backend", "host"])),
        "b\t8\tU8\t[8]\n"
    );
    // A file of the kernel's that says that it is empty.
    text(&run(
        dir,
        &["put", "proc", "/proc/version", "--backend", "host"],
    ));
    assert_eq!(get("proc"), fs::read("/proc/version").expect("Linux"));
    // What has no end, or is no file.
    for (path, why) in [
        ("/dev/zero", "/dev/zero: it is a device, which has no end"),
        ("/proc", "/proc: it is a directory; name the files in it"),
    ] {
        let refused = run(dir, &["put", "m", path, "--backend", "host"]);
        assert!(complaint(&refused).contains(why), "{refused:?}");
    }
    // No room for the pipe's bytes.
    let full = put(r#"cat "$2" | TMPDIR=/proc "$0" put m /dev/stdin --backend host --dir "$1""#);
    assert_eq!(full.status.code(), Some(1), "{full:?}");
    assert!(get("m") == contents, "the epoch before is still the newest");
}

/// Files come back as they were: names, bytes, types, shapes, metadata.
#[test]
fn all_files_of_an_object_come_back() {
    let keeper = Keeper::start();
    let dir = keeper.dir.path();
    let header = concat!(
        r#"{"__metadata__":{"format":"pt","step":"7"},"#,
        r#""z":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"#,
        r#""none":{"dtype":"F16","shape":[0,5],"data_offsets":[24,24]},"#,
        r#""a":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}"#,
    );
    let first = tensors(header, &(0..26).collect::<Vec<u8>>());
    let second = tensors(
        r#"{"m":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#,
        &[9; 8],
    );
    let files = [
        ("1.safetensors", first),
        ("2.safetensors", second),
        ("tokenizer.json", b"{}".to_vec()),
    ];
    let paths: Vec<String> = files
        .iter()
        .map(|(name, _)| dir.join(name).display().to_string())
        .collect();
    for (path, (_, bytes)) in paths.iter().zip(&files) {
        fs::write(path, bytes).expect("a file");
    }
    let put = |name: &str, paths: &[String]| {
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        run(
            dir,
            &[&["put", name, "--backend", "host"], &paths[..]].concat(),
        )
    };
    text(&put("model", &paths));
    let into = |name: &str| dir.join(name).display().to_string();
    let get = |what: &[&str]| {
        run(
            dir,
            &[&["get", "model", "--backend", "host"], what].concat(),
        )
    };
    text(&get(&["--all", &into("back")]));
    let mut names: Vec<String> = fs::read_dir(into("back"))
        .expect("a directory")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("text")
        })
        .collect();
    names.sort();
    assert_eq!(names, files.each_ref().map(|(name, _)| *name));
    let read = |path: String| fs::read(&path).unwrap_or_else(|why| panic!("{path}: {why}"));
    for (name, bytes) in &files {
        let back = read(into(&format!("back/{name}")));
        if name.ends_with(".json") {
            assert_eq!(&back, bytes);
            continue;
        }
        assert_eq!(parsed(&back), parsed(bytes), "{name}");
    }
    // Nothing is written over.
    let twice = get(&["--all", &into("back")]);
    assert!(
        complaint(&twice).contains("is there already; remove it, or write elsewhere"),
        "{twice:?}"
    );
    assert_eq!(
        fs::read_dir(into("back")).expect("a directory").count(),
        3,
        "no half of a file is left"
    );
    // All in one, which is put and got again with nothing lost.
    text(&get(&["--safetensors", &into("one.safetensors")]));
    let one = parsed(&read(into("one.safetensors")));
    assert_eq!(one.0, serde_json::json!({"format": "pt", "step": "7"}));
    assert_eq!(one.1.len(), 5, "four tensors, and the file of bytes");
    text(&put("model", &[into("one.safetensors")]));
    text(&get(&["--safetensors", &into("again.safetensors")]));
    assert_eq!(
        read(into("again.safetensors")),
        read(into("one.safetensors"))
    );
    // A name that leads elsewhere is no file's.
    let gpu = detect()
        .expect("the host is there")
        .first(BackendKind::Host)
        .expect("the host is there");
    let client = gpu_ipc::broker::Client::builder(gpu)
        .dir(dir)
        .connect()
        .expect("a broker");
    let part = gpu_ipc::broker::PartSpec::bytes("../out", 3).expect("a part");
    let layout = gpu_ipc::broker::Layout::pack([part], b"another's").expect("a layout");
    let mut writer = client.create("model", layout).expect("room");
    writer.write("../out", b"abc").expect("written");
    writer
        .commit(&[])
        .and_then(|commit| commit.wait())
        .expect("an epoch");
    let out = get(&["--all", &into("out")]);
    assert!(
        complaint(&out).contains(r#""../out" is no name of a file; write all parts into one"#),
        "{out:?}"
    );
    text(&get(&["--safetensors", &into("out.safetensors")]));
    let strided = gpu_ipc::broker::PartSpec {
        name: "s".into(),
        dtype: gpu_ipc::broker::DType::BYTES,
        dimensions: vec![gpu_ipc::broker::Dimension {
            extent: 2,
            stride: 4,
        }],
        len: 8,
    };
    let layout = gpu_ipc::broker::Layout::pack([strided], b"").expect("a layout");
    let writer = client.create("model", layout).expect("room");
    writer
        .commit(&[])
        .and_then(|commit| commit.wait())
        .expect("an epoch");
    let not = get(&["--safetensors", &into("not.safetensors")]);
    assert!(
        complaint(&not).contains("cannot have s, of type U8 and 8 bytes; write it with --part"),
        "{not:?}"
    );
    assert!(!Path::new(&into("not.safetensors")).exists());
}

/// A tensor: its name, its type and shape, and its bytes. Where it lies among the others is free.
type Tensor = (String, [serde_json::Value; 2], Vec<u8>);

/// Reads a file of tensors: its metadata, and its tensors by name.
fn parsed(bytes: &[u8]) -> (serde_json::Value, Vec<Tensor>) {
    let (len, rest) = bytes.split_at(8);
    let (header, data) =
        rest.split_at(u64::from_le_bytes(len.try_into().expect("8 bytes")) as usize);
    let mut header: serde_json::Value = serde_json::from_slice(header).expect("JSON");
    let header = header.as_object_mut().expect("an object");
    let metadata = header.remove("__metadata__").unwrap_or_default();
    let tensor = |(name, about): (&String, &serde_json::Value)| {
        let at = |n: usize| about["data_offsets"][n].as_u64().expect("an offset") as usize;
        let of = ["dtype", "shape"].map(|key| about[key].clone());
        (name.clone(), of, data[at(0)..at(1)].to_vec())
    };
    let mut tensors: Vec<Tensor> = header.iter().map(tensor).collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    (metadata, tensors)
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
    let mut command = Command::new(PROGRAM);
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
    assert_eq!(value("gpu_ipc_broker_up"), Some(1.0));
    let keepers = samples
        .iter()
        .filter(|sample| sample.name == "gpu_ipc_broker_keeper");
    let is = keepers
        .filter(|sample| sample.value == 1.0)
        .map(|sample| sample.label("state"));
    assert_eq!(is.collect::<Vec<_>>(), ["fed"]);
    assert_eq!(value("gpu_ipc_broker_commits_total"), Some(2.0));
    assert_eq!(value("gpu_ipc_broker_limit_bytes"), None, "it has no limit");
    let of = |name: &str| {
        let found = samples.iter().filter(|sample| sample.name == name);
        found.collect::<Vec<&Sample>>()
    };
    // One series of the name, whatever its epochs.
    let objects = of("gpu_ipc_object_bytes");
    assert_eq!(objects.len(), 1, "{objects:?}");
    let labels: Vec<&str> = objects[0].labels.keys().map(String::as_str).collect();
    assert_eq!(labels, ["dir", "name"]);
    assert_eq!(
        (objects[0].label("name"), objects[0].label("dir")),
        (name, dir.to_str().expect("a plain name"))
    );
    assert!(objects[0].value >= 10_000.0, "{objects:?}");
    assert_eq!(value("gpu_ipc_object_epoch"), Some(2.0));
    assert_eq!(value("gpu_ipc_object_epochs"), Some(2.0));
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
    // A directory that is named is told of, whether a broker is there or not.
    let path = dir.to_str().expect("a plain name");
    let of = |dir: &str| {
        let samples = metrics(
            nobody.path(),
            nobody.path(),
            &["--dir", dir, "--timeout", "60"],
        );
        value_of(&samples, "gpu_ipc_broker_up")
    };
    assert_eq!(of(path), Some(1.0));
    assert_eq!(of(nobody.path().to_str().expect("a plain name")), Some(0.0));
}

/// Lists what is in a runtime directory, and the broker.
fn ls(runtime: &Path, broker: &Path, args: &[&str]) -> String {
    let mut command = Command::new(PROGRAM);
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

/// Nothing is waited for without an end, and what was asked for and not seen is said.
#[test]
fn a_command_gives_up_after_its_timeout() {
    let keeper = Keeper::start();
    let dir = keeper.dir.path();
    let file = dir.join("weights.bin");
    fs::write(&file, [7; 5_000]).expect("a file");
    let path = file.to_str().expect("a plain name");
    let put = ["put", "model", path, "--backend", "host"];
    text(&run(dir, &put));
    keeper.process.signal(Signal::STOP);
    let late = run(dir, &[&put[..], &["--timeout", "5"]].concat());
    assert_eq!(late.status.code(), Some(1), "{late:?}");
    let said = complaint(&late);
    for words in [
        "the commit of model was not confirmed within 5 s",
        "THE KEEPER HAS NOT ANSWERED for",
        "it goes on, so ask `gpu-ipc objects model`",
    ] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    keeper.process.signal(Signal::CONT);
    wait_until("the commit goes on", || {
        text(&run(dir, &["objects", "model", "--json"])).contains(r#""epoch":2"#)
    });
    keeper.signal_broker(Signal::STOP);
    let short = ["--timeout", "0.2"];
    for command in [
        &put[..],
        &["get", "model", "--backend", "host"],
        &["objects"],
        &["rm", "model"],
        &["ready"],
    ] {
        let ended = run(dir, &[command, &short].concat());
        assert_eq!(ended.status.code(), Some(1), "{command:?}: {ended:?}");
        assert!(!complaint(&ended).is_empty(), "{command:?} says nothing");
    }
    keeper.signal_broker(Signal::CONT);
    text(&run(dir, &["rm", "model"]));
}

#[test]
fn objects_are_found_by_name_and_sorted() {
    let keeper = Keeper::start();
    let dir = keeper.dir.path();
    for (name, bytes) in [("small", 1_000), ("large", 1 << 20), ("other", 10_000)] {
        let file = dir.join("weights.bin");
        fs::write(&file, vec![7; bytes]).expect("a file");
        let path = file.to_str().expect("a plain name");
        text(&run(dir, &["put", name, path, "--backend", "host"]));
    }
    let first_word = |line: &str| {
        line.split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let listed = |args: &[&str]| {
        let table = text(&run(dir, &[&["objects"], args].concat()));
        table.lines().map(first_word).collect::<Vec<_>>()
    };
    assert_eq!(
        listed(&["--sort", "bytes"])[1..],
        ["NAME", "large", "other", "small"]
    );
    assert_eq!(listed(&["--sort", "name"])[2], "large");
    assert_eq!(listed(&["small"])[1..], ["NAME", "small"]);
    let table = text(&run(dir, &["objects"]));
    let header = table.lines().nth(1).expect("a header");
    let words: Vec<&str> = header.split_whitespace().collect();
    assert_eq!(
        words,
        [
            "NAME", "EPOCH", "BYTES", "PARTS", "AGE", "STATE", "UID", "IDENTITY"
        ]
    );
    let none = run(dir, &["objects", "nothing"]);
    assert_eq!(none.status.code(), Some(1), "{none:?}");
    assert!(
        complaint(&none).contains("has the name nothing"),
        "{none:?}"
    );
    text(&run(dir, &["rm", "small"]));
    let removed = run(dir, &["objects", "small"]);
    assert!(
        complaint(&removed).contains("small was removed; its last epoch was 1"),
        "{removed:?}"
    );
}

/// What a process fills and does not finish holds memory; it can be given up without an end of that
/// process.
#[test]
fn an_unfinished_object_is_given_up_by_force() {
    let keeper = Keeper::start();
    let dir = keeper.dir.path();
    let gpu = detect()
        .expect("the host is there")
        .first(BackendKind::Host)
        .expect("the host is there");
    let client = gpu_ipc::broker::Client::builder(gpu)
        .dir(dir)
        .connect()
        .expect("a broker");
    let layout = || {
        let part = gpu_ipc::broker::PartSpec::bytes("w", 1 << 20).expect("a part");
        gpu_ipc::broker::Layout::pack([part], b"").expect("a layout")
    };
    let bytes = || client.list().expect("the broker answers").bytes;
    let writer = client.create("model", layout()).expect("room");
    assert!(bytes() >= 1 << 20);
    let refused = run(dir, &["rm", "model"]);
    let pid = std::process::id();
    let why = format!("model was never committed; process {pid} (");
    assert!(
        complaint(&refused).contains(&why) && complaint(&refused).contains("--force"),
        "{refused:?}"
    );
    text(&run(dir, &["rm", "model", "--force"]));
    assert_eq!(bytes(), 0, "its memory counts no more");
    writer
        .commit(&[])
        .and_then(|commit| commit.wait())
        .expect_err("it was given up");
    // One that is committed and one that is filled go together.
    let writer = client.create("model", layout()).expect("room");
    writer
        .commit(&[])
        .and_then(|commit| commit.wait())
        .expect("an epoch");
    let _writer = client.create("model", layout()).expect("room");
    text(&run(dir, &["rm", "model", "--force"]));
    assert_eq!(bytes(), 0);
    let nothing = run(dir, &["rm", "model", "--force", "--epoch", "7"]);
    text(&nothing);
    let never = run(dir, &["rm", "never", "--force"]);
    assert!(!never.status.success(), "{never:?}");
}
