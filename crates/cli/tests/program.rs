//! The program, as somebody at a terminal or a script meets it.

use std::process::{Command, Output};

use harness::program::{ends_well, output, output_into};
use harness::wait_until;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

fn run(args: &[&str]) -> Output {
    output(Command::new(env!("CARGO_BIN_EXE_gpu-ipc")).args(args))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program writes UTF-8")
}

#[test]
fn the_demo_ends_well_and_says_so_in_json() {
    let output = run(&[
        "demo",
        "--backend",
        "host",
        "--blocks",
        "40",
        "--consumers",
        "3",
        "--size",
        "4KiB",
        "--json",
    ]);
    let value: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else");
    assert_eq!(
        output.status.code(),
        Some(0),
        "{value} {}",
        text(&output.stderr)
    );
    let number = |key: &str| {
        value[key]
            .as_f64()
            .unwrap_or_else(|| panic!("no number: {key}"))
    };
    assert_eq!(value["backend"], "host");
    for (key, count) in [
        ("consumers", 5.0),
        ("shared", 67.0),
        ("claimed", 72.0),
        ("released", 64.0),
        ("revoked", 1.0),
        ("refused_duplicates", 1.0),
        ("forwarded", 1.0),
        ("broadcast", 5.0),
        ("reclaimed_after_death", 8.0),
        ("in_limbo_at_end", 0.0),
        ("bytes_leaked", 0.0),
        ("regions_at_end", 0.0),
        ("early_reuse", 0.0),
        ("content_errors", 0.0),
    ] {
        assert_eq!(number(key), count, "{key}");
    }
    assert!(
        number("death_to_reclaim_ms") >= 100.0,
        "reclaimed before the quarantine was over"
    );
}

#[test]
fn the_demo_ends_well_and_says_so_in_a_table() {
    let output = run(&[
        "demo",
        "--backend",
        "host",
        "--blocks",
        "5",
        "--consumers",
        "1",
        "--size",
        "8",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(
        table.contains("reclaimed after death") && table.contains("All blocks came back."),
        "{table}"
    );
    assert!(
        !table.contains('\u{1b}'),
        "colours where there is no terminal"
    );
}

#[test]
fn a_block_larger_than_the_device_is_a_finding_with_the_reason() {
    let output = run(&[
        "demo",
        "--backend",
        "host",
        "--blocks",
        "1",
        "--size",
        "64GiB",
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("out of memory"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn wrong_usage_ends_with_2_and_names_what_is_wrong() {
    for args in [
        &["demo", "--size", "7"][..],
        &["demo", "--consumers", "0"],
        &["demo", "--backend", "x"],
        &["x"],
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains("error"), "{args:?}");
    }
    assert_eq!(run(&[]).status.code(), Some(2));
}

/// Every command that a user sees has examples, which name the command itself, and says how it
/// ends.
#[test]
fn help_has_examples_and_exit_statuses() {
    let help = |args: &[&str]| {
        let output = run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        text(&output.stdout)
    };
    let all = help(&["--help"]);
    let listed = all
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty());
    // A description that does not fit goes on further in.
    let listed = listed.filter(|line| !line.starts_with("   "));
    let commands: Vec<&str> = listed
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    assert!(
        commands.contains(&"demo") && commands.contains(&"doctor"),
        "{all}"
    );
    assert!(
        commands.len() <= 18 && !all.contains("-process"),
        "what no user types is hidden: {all}"
    );
    for command in commands {
        let text = help(&[command, "--help"]);
        assert!(
            text.contains(&format!("\n  gpu-ipc {command}")),
            "no example: {text}"
        );
        assert!(text.contains("Exit status"), "{text}");
        assert!(
            all.contains(&format!("gpu-ipc {command}")),
            "no example for {command} in the overview"
        );
    }
}

#[test]
fn a_demo_that_fails_says_so_in_json_too() {
    let absent = if cfg!(feature = "hip") {
        None
    } else {
        Some(&["demo", "--backend", "hip", "--json"][..])
    };
    let large = ["demo", "--backend", "host", "--size", "64GiB", "--json"];
    for (args, status) in absent
        .map(|args| (args, 3))
        .into_iter()
        .chain([(&large[..], 1)])
    {
        let output = run(args);
        assert_eq!(output.status.code(), Some(status), "{args:?}");
        let value: serde_json::Value =
            serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert_eq!(value["ok"], false);
        assert!(
            value["error"].as_str().is_some_and(|why| !why.is_empty()),
            "{value}"
        );
        assert!(output.stderr.is_empty(), "said twice");
    }
}

/// A reader like `head` goes away early. Nothing is said about it, and the status is that of a
/// program which SIGPIPE ends: a good end that nobody read is none.
#[test]
fn a_verdict_that_nobody_read_is_not_good() {
    let demo = &["demo", "--backend", "host", "--blocks", "4", "--size", "8"][..];
    for (args, status) in [
        (demo, 141),
        (&["doctor"], 141),
        (&["ls"], 141),
        (&["--help"], 0),
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        // A program that another test is about to start has a copy of it for a moment.
        wait_until("nobody to read", || {
            let mut writers = [PollFd::new(&writer, PollFlags::empty())];
            poll(
                &mut writers,
                Some(&Timespec {
                    tv_sec: 0,
                    tv_nsec: 0,
                }),
            )
            .expect("poll")
                == 1
        });
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
        let output = output_into(command.args(args), writer);
        assert_eq!(output.status.code(), Some(status), "{args:?}");
        assert_eq!(text(&output.stderr), "", "{args:?}");
    }
}

/// What is written must not be lost without a word.
#[test]
fn a_full_disk_is_an_error() {
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("it is always full");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    let demo = command.args([
        "demo",
        "--backend",
        "host",
        "--blocks",
        "4",
        "--size",
        "8",
        "--json",
    ]);
    let output = output_into(demo, full);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).starts_with("standard output: "),
        "{}",
        text(&output.stderr)
    );
}

/// With shared memory asked for, a driver that would crash is never loaded.
#[cfg(feature = "cuda")]
#[test]
fn no_driver_is_opened_that_was_not_asked_for() {
    let directory = tempfile::tempdir().expect("a directory");
    let source = directory.path().join("driver.c");
    std::fs::write(
        &source,
        "#include <stdlib.h>\n__attribute__((constructor)) static void f(void) { abort(); }\n",
    )
    .expect("a file");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"])
        .args([&directory.path().join("libcuda.so.1"), &source]);
    assert!(ends_well(&mut cc), "a C compiler: rustc links with it");
    let demo = |backend: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
        command.args(["demo", "--blocks", "4", "--size", "8", "--backend", backend]);
        let demo = output(command.env("LD_LIBRARY_PATH", directory.path()));
        demo.status.code()
    };
    assert_eq!(demo("host"), Some(0));
    assert_eq!(
        demo("cuda"),
        None,
        "the driver aborts a process that loads it: else this case proves nothing"
    );
}

/// On a machine without a HIP runtime, or in a version without the backend, the reason and the
/// remedy are given.
#[test]
fn what_is_not_here_ends_with_3_and_says_why() {
    let usable = |kind| gpu_ipc::detect().is_ok_and(|found| found.first(kind).is_ok());
    let mut asked = 0;
    for (name, kind) in [
        ("cuda", gpu_ipc::BackendKind::Cuda),
        ("hip", gpu_ipc::BackendKind::Hip),
    ] {
        if usable(kind) {
            continue;
        }
        asked += 1;
        let output = run(&["demo", "--backend", name]);
        assert_eq!(output.status.code(), Some(3), "{name}");
        let why = text(&output.stderr);
        assert!(
            why.contains(name) && why.contains("; "),
            "no reason with a remedy: {why}"
        );
    }
    assert!(
        asked > 0,
        "this machine has every backend: the case proves nothing here"
    );
}

/// A number out of its range is told from an option that does not exist.
#[test]
fn a_number_out_of_range_is_wrong_usage_and_is_named() {
    let cases: [(&[&str], &str); 7] = [
        (&["demo", "--blocks", "-1"], "-1 is not in 1..=1000000"),
        (&["demo", "--consumers", "0"], "0 is not in 1..=256"),
        (&["demo", "--size", "-8"], "\"-8\" is not a number of bytes"),
        (
            &["ls", "--timeout", "-1"],
            "\"-1\" is not a number of seconds from 0.01 to 3600",
        ),
        (
            &["top", "--interval", "0"],
            "\"0\" is not a number of seconds from 0.01 to 3600",
        ),
        (
            &["snapshot", "--timeout", "nan"],
            "\"nan\" is not a number of seconds from 0.01 to 3600",
        ),
        (&["doctor", "--timeout", "-1"], "-1 is not in 1..=86400"),
    ];
    for (args, why) in cases {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(
            text(&output.stderr).contains(why),
            "{args:?}: {}",
            text(&output.stderr)
        );
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

/// What is no session says what it is, for people and for programs.
#[test]
fn what_is_no_session_is_named_with_reason_and_remedy() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(at("file"), "").expect("a file");
    let cases = [
        (
            at("absent"),
            "there is no such socket; start the producer, or correct the path",
        ),
        (
            at("file"),
            "it is not a socket; give the path of a session's socket",
        ),
        (
            at(""),
            "it is not a socket; give the path of a session's socket",
        ),
    ];
    for (path, why) in cases {
        let why = format!("cannot connect to {path}: {why}");
        for args in [&["ls", &path][..], &["snapshot", &path]] {
            let output = run(args);
            assert_eq!(output.status.code(), Some(1), "{args:?}");
            let said = text(&output.stdout) + &text(&output.stderr);
            assert!(said.contains(&why), "{args:?}: {said}");
            let output = run(&[args, &["--json"]].concat());
            let value: serde_json::Value =
                serde_json::from_slice(&output.stdout).expect("one JSON object");
            assert_eq!(
                (&value["ok"], output.status.code()),
                (&false.into(), Some(1)),
                "{value}"
            );
            assert!(value.to_string().contains(&why), "{value}");
        }
    }
}

/// Where sessions put their sockets: named, with what is wrong with it.
#[test]
fn a_wrong_runtime_directory_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("file"), "").expect("a file");
    for (name, command, is) in [
        ("file", "ls", "not a directory"),
        ("no/run", "ls", "there is no directory"),
        ("no/run", "demo", "there is no"),
    ] {
        let path = dir.path().join(name);
        let mut program = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
        program
            .args([command, "--json"])
            .env("GPU_IPC_RUNTIME_DIR", &path);
        let output = output(&mut program);
        assert_eq!(
            output.status.code(),
            Some(if command == "ls" { 3 } else { 1 }),
            "{name} {command}"
        );
        let value: serde_json::Value =
            serde_json::from_slice(&output.stdout).expect("one JSON object");
        let why = value["error"].as_str().expect("a reason");
        let parts = [&*path.display().to_string(), is, "GPU_IPC_RUNTIME_DIR"];
        assert!(parts.iter().all(|part| why.contains(part)), "{why}");
    }
}

/// A terminal that cannot move its cursor is not filled with signs that it does not know.
#[test]
fn top_refuses_a_terminal_that_cannot_be_drawn_on() {
    let flags = rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY;
    let terminal = rustix::pty::openpt(flags).expect("a terminal");
    rustix::pty::unlockpt(&terminal).expect("its other end");
    let other = rustix::pty::ptsname(&terminal, Vec::new()).expect("its name");
    let other = std::fs::File::options()
        .read(true)
        .write(true)
        .open(other.to_str().expect("a plain name"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-ipc"));
    let output = output_into(
        command.arg("top").env("TERM", "dumb"),
        other.expect("it opens"),
    );
    assert_eq!(output.status.code(), Some(3));
    let why = text(&output.stderr);
    assert!(why.contains("dumb") && why.contains("gpu-ipc ls"), "{why}");
}
