//! The program, as somebody at a terminal or a script meets it.

use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gpu-ipc")).args(args).output().expect("the program was built")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program writes UTF-8")
}

#[test]
fn the_demo_ends_well_and_says_so_in_json() {
    let output = run(&["demo", "--backend", "host", "--blocks", "40", "--consumers", "3", "--size", "4KiB", "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else");
    assert_eq!(output.status.code(), Some(0), "{value} {}", text(&output.stderr));
    let number = |key: &str| value[key].as_f64().unwrap_or_else(|| panic!("no number: {key}"));
    assert_eq!(value["backend"], "host");
    for (key, count) in [
        ("consumers", 5.0),
        ("shared", 51.0),
        ("claimed", 56.0),
        ("released", 48.0),
        ("revoked", 1.0),
        ("refused_duplicates", 1.0),
        ("forwarded", 1.0),
        ("broadcast", 5.0),
        ("reclaimed_after_death", 8.0),
        ("in_limbo_at_end", 0.0),
        ("bytes_leaked", 0.0),
        ("early_reuse", 0.0),
        ("content_errors", 0.0),
    ] {
        assert_eq!(number(key), count, "{key}");
    }
    assert!(number("death_to_reclaim_ms") >= 100.0, "reclaimed before the quarantine was over");
}

#[test]
fn the_demo_ends_well_and_says_so_in_a_table() {
    let output = run(&["demo", "--backend", "host", "--blocks", "5", "--consumers", "1", "--size", "8"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("reclaimed after death") && table.contains("All blocks came back."), "{table}");
    assert!(!table.contains('\u{1b}'), "colours where there is no terminal");
}

#[test]
fn a_block_larger_than_the_device_is_a_finding_with_the_reason() {
    let output = run(&["demo", "--backend", "host", "--blocks", "1", "--size", "64GiB"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("out of memory"), "{}", text(&output.stderr));
}

#[test]
fn wrong_usage_ends_with_2_and_names_what_is_wrong() {
    for args in [&["demo", "--size", "7"][..], &["demo", "--consumers", "0"], &["demo", "--backend", "x"], &["x"]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains("error"), "{args:?}");
    }
    assert_eq!(run(&[]).status.code(), Some(2));
}

#[test]
fn help_has_examples() {
    let output = run(&["demo", "--help"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("gpu-ipc demo --blocks 2000"), "{}", text(&output.stdout));
}

/// On a machine without a HIP runtime, or in a version without the backend, the reason and the remedy are given.
#[test]
fn what_is_not_here_ends_with_3_and_says_why() {
    let usable = |kind| gpu_ipc::detect().is_ok_and(|found| found.first(kind).is_ok());
    let mut asked = 0;
    for (name, kind) in [("cuda", gpu_ipc::BackendKind::Cuda), ("hip", gpu_ipc::BackendKind::Hip)] {
        if usable(kind) {
            continue;
        }
        asked += 1;
        let output = run(&["demo", "--backend", name]);
        assert_eq!(output.status.code(), Some(3), "{name}");
        let why = text(&output.stderr);
        assert!(why.contains(name) && why.contains("; "), "no reason with a remedy: {why}");
    }
    assert!(asked > 0, "this machine has every backend: the case proves nothing here");
}
