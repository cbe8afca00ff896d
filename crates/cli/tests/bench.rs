//! The benchmark, quickly, on shared memory: not what it measures, but that it measures everything
//! beside its floor.

use std::collections::BTreeSet;
use std::process::{Command, Output};

use harness::WATCHDOG;
use harness::program::run_to_end;
use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    run_to_end(command.arg("bench").args(args), 5 * WATCHDOG)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program writes UTF-8")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", text(&output.stderr)))
}

fn names(report: &Value) -> BTreeSet<String> {
    let rows = report["rows"].as_array().expect("rows");
    rows.iter()
        .map(|row| row["row"].as_str().expect("a name").to_owned())
        .collect()
}

#[test]
fn every_row_has_its_figures_its_floor_and_their_ratio() {
    let output = bench(&["--backend", "host", "--quick", "--json"]);
    let report = json(&output);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{report} {}",
        text(&output.stderr)
    );
    assert_eq!(
        (&report["ok"], &report["backend"], &report["quick"]),
        (&true.into(), &"host".into(), &true.into())
    );
    let found = names(&report);
    for name in [
        "memory-lease",
        "memory-block",
        "protocol",
        "grant",
        "claim-done",
        "release",
        "retire",
        "leases/1k",
        "participants/4",
        "limbo/0",
        "limbo/1k",
        "collect-held/0",
        "collect-held/1k",
        "collect-released",
        "share",
        "claim",
        "drop",
        "cycle",
        "share-many",
        "drop-many",
        "drop-stream",
        "ticket",
        "round-trip",
        "fan-out/1",
        "fan-out/2",
        "fan-out/4",
        "first-map-fd/2MiB",
        "first-map-fd/64MiB",
        "first-map-handle/2MiB",
        "first-map-handle/64MiB",
        "death",
        "alloc-script/1k",
        "object-open/64MiB",
        "object-advance/64MiB",
        "object-advance-copy/64MiB",
        "object-switch-copy/64MiB",
        "object-successor/128MiB",
        "object-broker-memory/128MiB",
        "object-readers/8",
        "object-restart/5",
        "object-commit-many/200",
        "object-remove-many/200",
        "pool-seal/64",
        "pool-successor/128MiB",
    ] {
        assert!(found.contains(name), "{name} is missing: {found:?}");
    }
    assert!(
        found.iter().any(|name| name.starts_with("producers/")),
        "{found:?}"
    );
    for row in report["rows"].as_array().expect("rows") {
        let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("no number: {row}"));
        let (ours, floor) = (&row["ours"], &row["floor"]);
        for figures in [ours, floor] {
            assert!(
                number(&figures["median"]) > 0.0 && number(&figures["p99"]) > 0.0,
                "{row}"
            );
            assert!(
                number(&figures["samples"]) >= 1.0 && number(&figures["calls"]) >= 1.0,
                "{row}"
            );
        }
        let ratio = number(&ours["median"]) / number(&floor["median"]);
        assert!((number(&row["ratio"]) / ratio - 1.0).abs() < 1e-9, "{row}");
        assert!(
            !row["what"].as_str().expect("text").is_empty()
                && !row["floor_is"].as_str().expect("text").is_empty()
        );
        assert_eq!(row["error"], Value::Null, "{row}");
    }
}

#[test]
fn jobs_are_done_beside_what_people_use_today() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("jobs.json");
    let output = bench(&["--backend", "host", "--quick", "--jobs", "--json"]);
    let report = json(&output);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{report} {}",
        text(&output.stderr)
    );
    let found = names(&report);
    for name in [
        "camera-latency/1",
        "camera-latency/2",
        "camera-cpu-producer/2",
        "camera-cpu-consumer/2",
        "camera-host-latency/2",
        "camera-host-cpu-consumer/2",
        "kv-latency/1",
        "kv-cpu-producer/1",
        "kv-cpu-consumer/1",
        "weights-time/20x64KiB",
        "weights-memory/20x64KiB",
        "object-successor/128MiB",
        "object-restart/5",
    ] {
        assert!(found.contains(name), "{name} is missing: {found:?}");
    }
    assert!(
        !found.contains("protocol"),
        "single calls were measured, too"
    );
    for row in report["rows"].as_array().expect("rows") {
        let samples = |value: &Value| {
            value["samples"]
                .as_u64()
                .unwrap_or_else(|| panic!("no figures: {row}"))
        };
        let beside = if row["row"]
            .as_str()
            .is_some_and(|name| name.starts_with("object-") || name.starts_with("pool-"))
        {
            "floor"
        } else {
            "baseline"
        };
        assert!(
            samples(&row["ours"]) >= 1 && samples(&row[beside]) >= 1,
            "{row}"
        );
        assert_eq!(row["error"], Value::Null, "{row}");
        if row["row"] == "kv-latency/1" {
            // Of 300 blocks, without those that were mapped.
            assert_eq!(
                (samples(&row["ours"]), samples(&row[beside])),
                (150, 150),
                "{row}"
            );
        }
    }
    std::fs::write(&file, &output.stdout).expect("written");
    let shown = bench(&["--from", file.to_str().expect("UTF-8")]);
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stderr));
    let table = text(&shown.stdout);
    let second = table.lines().nth(1).expect("two lines");
    assert!(
        second.contains("what it is beside"),
        "what is slower is not said first: {table}"
    );
}

#[test]
fn a_job_with_a_wrong_frame_or_tensor_fails() {
    let output = bench(&[
        "--backend",
        "host",
        "--quick",
        "--only",
        "camera,weights,kv",
        "--spoil",
        "--json",
    ]);
    let report = json(&output);
    assert_eq!(
        (output.status.code(), &report["ok"]),
        (Some(1), &false.into()),
        "{report}"
    );
    for (row, why) in [
        ("camera", "frame 7 has"),
        ("kv", "frame 7 has"),
        ("weights", "tensor 7 has"),
    ] {
        let rows = report["rows"].as_array().expect("rows");
        let error = rows
            .iter()
            .find(|found| found["row"] == row)
            .map(|found| found["error"].to_string());
        assert!(
            error.as_ref().is_some_and(|error| error.contains(why)),
            "{row}: {error:?} in {report}"
        );
    }
}

#[test]
fn what_was_measured_can_be_shown_later() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("bench.json");
    let args = [
        "--backend",
        "host",
        "--quick",
        "--json",
        "--only",
        "protocol,collect",
    ];
    let output = bench(&args);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let expected = ["protocol", "grant", "claim-done", "release", "retire"];
    let mut expected: BTreeSet<String> = expected.map(str::to_owned).into();
    expected.extend(["collect-held/0", "collect-held/1k", "collect-released"].map(str::to_owned));
    assert_eq!(
        names(&json(&output)),
        expected,
        "what was not asked for was measured too, or not what was"
    );
    std::fs::write(&file, &output.stdout).expect("written");
    let shown = bench(&["--from", file.to_str().expect("UTF-8")]);
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stderr));
    let table = text(&shown.stdout);
    assert!(
        table.contains("protocol") && table.contains("its floor:") && table.contains("a quick run"),
        "{table}"
    );
    for name in &expected {
        assert!(table.contains(name.as_str()), "{name} is not in {table}");
    }
}

#[test]
fn a_trace_is_replayed() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("trace.csv");
    let log = "Thread,Time,Action,Pointer,Size,Stream\n\
               0,0.1,allocate,0x100,4096,0\n0,0.2,allocate,0x2000,1000,0\n0,0.3,free,0x100,4096,0\n";
    std::fs::write(&file, log).expect("written");
    let output = bench(&["--replay", file.to_str().expect("UTF-8"), "--json"]);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    for (key, value) in [
        ("steps", 3),
        ("allocs", 2),
        ("frees", 1),
        ("left", 1),
        ("failures", 0),
        ("peak_in_use", 5120),
    ] {
        assert_eq!(report[key], value, "{key}: {report}");
    }
    let number = |key: &str| {
        report[key]
            .as_f64()
            .unwrap_or_else(|| panic!("no number {key}: {report}"))
    };
    assert!(number("ns_a_step") > 0.0 && number("peak_reserved") >= 5120.0);
    let fragmentation = 1.0 - number("peak_in_use") / number("peak_reserved");
    assert!(
        (number("peak_fragmentation") - fragmentation).abs() < 1e-9,
        "{report}"
    );
    let table = text(&bench(&["--replay", file.to_str().expect("UTF-8")]).stdout);
    assert!(
        table.contains("3 steps") && table.contains("fragmentation"),
        "{table}"
    );
}

#[test]
fn what_cannot_be_read_is_a_finding_with_the_reason() {
    for (args, why) in [
        (
            &["--replay", "/nowhere/trace.csv"][..],
            "/nowhere/trace.csv",
        ),
        (&["--replay", "/dev/null"], "header of a log"),
        (&["--from", "/nowhere/bench.json"], "/nowhere/bench.json"),
        (&["--from", "/dev/null"], "/dev/null"),
    ] {
        let output = bench(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(
            text(&output.stderr).contains(why),
            "{args:?}: {}",
            text(&output.stderr)
        );
    }
    let output = bench(&["--replay", "/nowhere/trace.csv", "--json"]);
    let report = json(&output);
    assert!(
        report["ok"] == false && report["error"].as_str().expect("why").contains("/nowhere"),
        "{report}"
    );
}

#[test]
fn wrong_usage_ends_with_2() {
    for args in [
        &["--only", "nothing"][..],
        &["--only"],
        &["--backend", "x"],
        &["--replay", "a", "--quick"],
        &["--from", "a", "--only", "protocol"],
        &["--from", "a", "--replay", "b"],
    ] {
        assert_eq!(bench(args).status.code(), Some(2), "{args:?}");
    }
}
