//! The torture, for a few seconds, and what it must find: the controls.

use std::process::Command;

use serde_json::Value;

/// Runs it, and returns its exit status and what it said.
fn torture(args: &[&str]) -> (Option<i32>, Value, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    let output = command.args(["torture", "--backend", "host", "--json"]).args(args).output().expect("it was built");
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    let value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {complaints}"));
    (output.status.code(), value, complaints)
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {value}"))
}

#[test]
fn nothing_is_lost_and_nothing_freed_early() {
    let (status, value, complaints) = torture(&["--seconds", "5", "--seed", "11"]);
    assert_eq!(status, Some(0), "{value} {complaints}");
    for key in ["early_reuse", "double_retire", "leaked_blocks", "leaked_regions", "grown", "out_of_memory", "hung"] {
        assert_eq!(number(&value, key), 0.0, "{key}: {complaints}");
    }
    // It proves nothing where nothing happens.
    for key in ["kills", "stops", "forks", "claims", "reclaims", "max_death_to_reclaim_ms"] {
        assert!(number(&value, key) > 0.0, "{key}: {value}");
    }
    assert_eq!((&value["seconds"], &value["seed"], &value["control"]), (&5.into(), &11.into(), &Value::Null));
    assert_eq!((&value["ok"], &value["crashes"]), (&true.into(), &0.into()));
    let mut keys: Vec<&str> = value.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    let mut expected = [
        "ok",
        "seconds",
        "seed",
        "kills",
        "producer_kills",
        "stops",
        "forks",
        "claims",
        "early_reuse",
        "double_retire",
        "leaked_blocks",
        "leaked_regions",
        "grown",
        "out_of_memory",
        "reclaims",
        "shortfalls",
        "hung",
        "max_death_to_reclaim_ms",
        "crashes",
        "control",
    ];
    expected.sort_unstable();
    assert_eq!(keys, expected);
}

#[test]
fn a_plain_counter_is_found_to_leak() {
    let (status, value, complaints) = torture(&["--seconds", "5", "--seed", "3", "--control", "counter"]);
    assert_eq!(status, Some(1), "{value} {complaints}");
    assert!(number(&value, "leaked_blocks") > 0.0, "{value}");
    assert_eq!((number(&value, "early_reuse"), number(&value, "hung")), (0.0, 0.0), "found something else: {value}");
    assert_eq!((&value["control"], &value["ok"]), (&"counter".into(), &false.into()));
}

#[test]
fn a_blind_time_out_is_found_to_free_early() {
    let (status, value, complaints) = torture(&["--seconds", "15", "--seed", "3", "--control", "blind-timeout"]);
    assert_eq!(status, Some(1), "{value} {complaints}");
    assert!(number(&value, "early_reuse") > 0.0, "{value}");
    assert_eq!((number(&value, "leaked_blocks"), number(&value, "hung")), (0.0, 0.0), "found something else: {value}");
    assert_eq!((&value["control"], &value["ok"]), (&"blind-timeout".into(), &false.into()));
}
