//! The doctor, as somebody at a terminal or a script meets it.

use std::path::Path;
use std::process::{Command, Output};

use harness::program::output;
use serde_json::Value;

fn doctor(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    command.arg("doctor").args(args);
    command
}

fn run(command: &mut Command) -> Output {
    output(command)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program writes UTF-8")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else")
}

fn backend<'a>(report: &'a Value, name: &str) -> &'a Value {
    let backends = report["backends"].as_array().expect("a list");
    backends
        .iter()
        .find(|backend| backend["backend"] == name)
        .expect("every backend is named")
}

fn check<'a>(checks: &'a Value, name: &str) -> &'a Value {
    let checks = checks.as_array().expect("a list");
    checks
        .iter()
        .find(|check| check["name"] == name)
        .unwrap_or_else(|| panic!("no check {name}"))
}

#[test]
fn shared_memory_is_really_shared_and_the_report_says_so() {
    let output = run(&mut doctor(&["--json", "--require", "host"]));
    let report = json(&output);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{report} {}",
        text(&output.stderr)
    );
    assert_eq!(
        (&report["ok"], &report["required"][0]),
        (&true.into(), &"host".into())
    );
    let device = &backend(&report, "host")["devices"][0];
    assert_eq!(
        (&device["works"], &device["caps"]["fd"]),
        (&true.into(), &true.into()),
        "{device}"
    );
    for name in ["share by fd", "share by fd, read-only", "share by handle"] {
        assert_eq!(check(&device["checks"], name)["state"], "ok", "{device}");
    }
    for name in [
        "pidfd_open",
        "memfd with seals",
        "MADV_WIPEONFORK",
        "/proc/self/fd",
        "unix packet sockets",
    ] {
        let check = check(&report["kernel"], name);
        assert_eq!(
            (&check["state"], &check["needed"]),
            (&"ok".into(), &true.into()),
            "{check}"
        );
    }
}

#[test]
fn the_report_to_read_fits_a_terminal_and_has_a_verdict() {
    let output = run(&mut doctor(&[]));
    let report = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert!(
        report.contains("Memory can be shared between processes here on: host"),
        "{report}"
    );
    assert!(
        report.lines().all(|line| line.chars().count() <= 80),
        "{report}"
    );
    assert!(
        !report.contains('\u{1b}'),
        "colours where there is no terminal"
    );
}

#[test]
fn every_device_is_tried() {
    let output = run(doctor(&["--json"]).env("GPU_IPC_HOST_DEVICES", "3"));
    let report = json(&output);
    let devices = backend(&report, "host")["devices"]
        .as_array()
        .expect("a list");
    assert_eq!(devices.len(), 3);
    assert!(
        devices.iter().all(|device| device["works"] == true),
        "{report}"
    );
}

#[test]
fn a_required_backend_without_a_device_is_a_failure_with_reason_and_remedy() {
    let output = run(doctor(&["--json", "--require", "host"]).env("GPU_IPC_HOST_DEVICES", "0"));
    assert_eq!(output.status.code(), Some(1));
    let report = json(&output);
    assert_eq!(report["ok"], false);
    let failed = report["failed"].as_array().expect("a list");
    assert!(
        failed.iter().any(|why| why
            .as_str()
            .is_some_and(|why| why.starts_with("host is required"))),
        "{report}"
    );
    let host = backend(&report, "host");
    assert_eq!(host["state"], "absent");
    assert!(host["why"].is_string(), "{host}");
    assert!(
        host["remedy"]
            .as_str()
            .is_some_and(|remedy| remedy.contains("GPU_IPC_HOST_DEVICES")),
        "{host}"
    );
}

#[test]
fn a_wrong_variable_is_named() {
    let output = run(doctor(&["--json"]).env("GPU_IPC_HOST_BYTES", "many"));
    let report = json(&output);
    let host = backend(&report, "host");
    assert_eq!(host["state"], "failed");
    assert!(
        host["why"]
            .as_str()
            .is_some_and(|why| why.contains("GPU_IPC_HOST_BYTES")),
        "{host}"
    );
}

/// A device on which nothing can be allocated is found, and does not work.
#[test]
fn a_device_without_memory_fails_its_trials_and_nothing_else() {
    let output = run(doctor(&["--json", "--require", "host"]).env("GPU_IPC_HOST_BYTES", "8"));
    assert_eq!(output.status.code(), Some(1));
    let report = json(&output);
    let device = &backend(&report, "host")["devices"][0];
    assert_eq!(device["works"], false);
    let trial = check(&device["checks"], "share by fd");
    assert_eq!(trial["state"], "failed");
    assert!(
        trial["found"]
            .as_str()
            .is_some_and(|found| found.contains("out of memory")),
        "{trial}"
    );
    assert!(trial["remedy"].is_string(), "{trial}");
}

#[test]
fn an_open_runtime_directory_is_fatal_and_explained() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))
        .expect("ours");
    let output = run(doctor(&[]).env("GPU_IPC_RUNTIME_DIR", directory.path()));
    assert_eq!(output.status.code(), Some(1));
    let report = text(&output.stdout);
    assert!(
        report.contains("$GPU_IPC_RUNTIME_DIR: mode 0755: others may enter"),
        "{report}"
    );
    assert!(
        report.contains("→ name a directory of this user with mode 0700"),
        "{report}"
    );
}

#[test]
fn wrong_usage_ends_with_2() {
    for args in [
        &["--require", "metal"][..],
        &["--timeout", "0"],
        &["x"],
        &["--require"],
    ] {
        assert_eq!(run(&mut doctor(args)).status.code(), Some(2), "{args:?}");
    }
}

/// The document explains every line of the report and every field of the data.
#[test]
fn the_document_explains_every_line() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/TOOLS.md");
    let document =
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let report = json(&run(&mut doctor(&["--json"])));
    let mut names: Vec<String> = Vec::new();
    let mut add = |checks: &Value| {
        for check in checks.as_array().expect("a list") {
            names.push(check["name"].as_str().expect("a name").to_owned());
        }
    };
    add(&report["kernel"]);
    add(&report["limits"]);
    for backend in report["backends"].as_array().expect("a list") {
        add(&backend["checks"]);
        backend["devices"]
            .as_array()
            .expect("a list")
            .iter()
            .for_each(|device| add(&device["checks"]));
    }
    assert!(names.len() > 20, "the report has only {names:?}");
    let host = backend(&report, "host");
    for object in [
        &report,
        host,
        &host["devices"][0],
        &host["devices"][0]["caps"],
        &report["kernel"][0],
    ] {
        names.extend(object.as_object().expect("an object").keys().cloned());
    }
    for state in [
        "ok",
        "warning",
        "failed",
        "absent",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "sharing",
    ] {
        names.push(state.to_owned());
    }
    for name in names {
        assert!(
            document.contains(&format!("`{name}`")),
            "docs/TOOLS.md lacks `{name}`"
        );
    }
}

/// Compiles a driver of which nothing is there but what starts it.
#[cfg(feature = "cuda")]
fn fake_driver(directory: &Path, start: &str) {
    let source = directory.join("driver.c");
    let program = format!("#include <unistd.h>\nint cuInit(unsigned flags) {{ {start} }}\n");
    std::fs::write(&source, program).expect("a file");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"])
        .args([&directory.join("libcuda.so.1"), &source]);
    assert!(
        harness::program::ends_well(&mut cc),
        "a C compiler: rustc links with it"
    );
}

#[cfg(feature = "cuda")]
#[test]
fn a_driver_that_crashes_or_hangs_or_refuses_is_reported_and_the_rest_goes_on() {
    let cases = [
        (
            "*(volatile int *)0 = 1; return 0;",
            "failed",
            "the process that was starting the driver was killed by signal 11",
        ),
        (
            "for (;;) pause();",
            "failed",
            "the process that was starting the driver was silent for 5 s and was killed",
        ),
        (
            "_exit(7);",
            "failed",
            "the process that was starting the driver ended with status 7",
        ),
        ("return 100;", "absent", "cuInit gave 100"),
    ];
    for (start, state, why) in cases {
        let directory = tempfile::tempdir().expect("a directory");
        fake_driver(directory.path(), start);
        let hangs = why.contains("silent");
        let mut command = doctor(&["--json", "--require", "cuda"]);
        if hangs {
            command.args(["--timeout", "5"]);
        }
        let output = run(command.env("LD_LIBRARY_PATH", directory.path()));
        assert_eq!(output.status.code(), Some(1), "{start}");
        let report = json(&output);
        let cuda = backend(&report, "cuda");
        // Where a driver's files are, a refusal is a failure too.
        let expected = if Path::new("/dev/nvidiactl").exists() {
            "failed"
        } else {
            state
        };
        assert_eq!(cuda["state"], expected, "{cuda}");
        assert!(
            cuda["why"]
                .as_str()
                .is_some_and(|said| said.starts_with(why)),
            "{why} is not what is said: {cuda}"
        );
        assert!(cuda["remedy"].is_string(), "{cuda}");
        // On a busy machine five seconds may be too few for a driver that does not hang.
        let host = backend(&report, "host");
        assert!(hangs || host["devices"][0]["works"] == true, "{report}");
        assert!(
            !hangs || host["state"] != "absent",
            "nothing is said of the others: {report}"
        );
    }
}
