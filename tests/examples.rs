//! The examples do what they say, on the host backend.
//!
//! Each checks itself and fails with a message; here its last line is compared with what it should
//! have done, so that one that does nothing does not pass.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use harness::program::{Running, example, run_to_end};
use harness::wait_until;

/// Programs that start their other processes themselves.
const WHOLE: [&str; 5] = ["camera", "kv_handoff", "poll", "tokio", "weights"];
/// Long enough for the slowest machine; whatever takes longer hangs.
const WATCHDOG: Duration = Duration::from_secs(300);

/// Runs an example to its end, its sockets in a directory of its own.
fn run(name: &str, args: &[&str], sockets: &Path) -> Output {
    run_to_end(
        Command::new(example(name))
            .args(args)
            .env("GPU_IPC_RUNTIME_DIR", sockets),
        WATCHDOG,
    )
}

/// Runs an example that must succeed, and returns what it printed and how many sockets it left.
fn report(name: &str, rounds: &str) -> (String, usize) {
    let dir = tempfile::tempdir().expect("a directory");
    // The library makes it, so that no other user may enter it.
    let sockets = dir.path().join("sockets");
    let output = run(name, &["--rounds", rounds], &sockets);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{name} ended with {}: {errors}",
        output.status
    );
    assert_eq!(errors, "", "{name}");
    let left = std::fs::read_dir(&sockets).expect("the directory").count();
    (String::from_utf8(output.stdout).expect("text"), left)
}

/// Returns the number before some words.
fn number_before(text: &str, words: &str) -> u64 {
    let before = text.split(words).next().expect("there is always a first");
    let number = before.rsplit(' ').next().and_then(|word| word.parse().ok());
    number.unwrap_or_else(|| panic!("no number before {words:?} in {text:?}"))
}

#[test]
fn weights_are_swapped_100_times_in_flat_memory() {
    let expected = "weights: 100 generations of 256 KiB to 4 readers, 10 killed and replaced; \
                    512 KiB reserved from first to last\n";
    assert_eq!(report("weights", "100"), (expected.to_owned(), 0));
}

#[test]
fn kv_is_handed_off_by_100_engines_that_are_killed() {
    let (text, left) = report("kv_handoff", "100");
    let expected = "kv_handoff: 100 engines killed; 600 sequences of 64 KiB decoded, 100 poisoned and asked \
                    for again; nothing is mapped\n";
    assert_eq!(text, expected);
    // The last engine's: each of the others was removed by its successor.
    assert_eq!(left, 1, "sockets were left behind");
}

#[test]
fn a_camera_tears_no_frame_and_waits_for_nobody() {
    let (text, left) = report("camera", "100");
    let (frames, dropped) = (
        number_before(&text, " frames of 64 KiB"),
        number_before(&text, " dropped rather"),
    );
    assert_eq!(frames + dropped, 100 * 24, "{text}");
    assert!(dropped > 0, "{text}");
    assert!(text.contains(" from a pool of 6, none torn; "), "{text}");
    assert!(
        text.ends_with("; 10 subscribers killed and replaced\n"),
        "{text}"
    );
    assert_eq!(left, 0, "sockets were left behind");
}

#[test]
fn a_session_and_a_participant_fit_into_poll() {
    let (text, left) = report("poll", "200");
    assert!(
        text.starts_with("poll: 200 blocks of 64 KiB from a pool of 8, "),
        "{text}"
    );
    assert!(number_before(&text, " waits for a free one") > 0, "{text}");
    assert_eq!(left, 0, "sockets were left behind");
}

#[test]
fn a_session_and_a_participant_fit_into_tokio() {
    assert_eq!(
        report("tokio", "200"),
        (
            "tokio: 200 blocks of 64 KiB from a pool of 8\n".to_owned(),
            0
        )
    );
}

#[test]
fn what_is_not_understood_is_refused() {
    let sockets = tempfile::tempdir().expect("a directory");
    for name in WHOLE {
        let cases: [(&[&str], String); 3] = [
            (
                &["--rounds"],
                format!("{name}: usage: {name} [--backend host|cuda|hip] [--rounds N]"),
            ),
            (
                &["--round", "1"],
                format!("{name}: usage: {name} [--backend host|cuda|hip] [--rounds N]"),
            ),
            (
                &["--backend", "abacus"],
                format!("{name}: no backend is named abacus\n"),
            ),
        ];
        for (args, expected) in cases {
            let output = run(name, args, sockets.path());
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(
                !output.status.success() && errors.starts_with(&expected),
                "{name} {args:?}: {errors}"
            );
            assert!(output.stdout.is_empty(), "{name} {args:?}");
        }
    }
}

#[test]
fn what_the_two_sides_do_not_understand_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (socket, nowhere) = (path("s"), path("no/s"));
    let cases: [(&str, &[&str], String); 8] = [
        (
            "producer",
            &[],
            "usage: producer SOCKET COUNT [host|cuda|hip]".into(),
        ),
        (
            "producer",
            &["--help", "1"],
            "usage: producer SOCKET COUNT [host|cuda|hip]".into(),
        ),
        (
            "producer",
            &[&socket, "many"],
            "many is not a number of blocks".into(),
        ),
        (
            "producer",
            &[&socket, "1", "abacus"],
            "no backend is named abacus".into(),
        ),
        (
            "producer",
            &[&nowhere, "1"],
            format!(
                "the socket's directory is {}, which is missing or not a directory",
                path("no")
            ),
        ),
        (
            "consumer",
            &["--help"],
            "usage: consumer SOCKET [host|cuda|hip]".into(),
        ),
        (
            "consumer",
            &[&socket, "abacus"],
            "no backend is named abacus".into(),
        ),
        (
            "consumer",
            &[&socket],
            format!("cannot connect to {socket}: there is no such socket; start the producer"),
        ),
    ];
    for (name, args, expected) in cases {
        let output = run(name, args, dir.path());
        let errors = String::from_utf8_lossy(&output.stderr);
        let refused =
            output.status.code() == Some(1) && errors.starts_with(&format!("{name}: {expected}"));
        assert!(
            refused && output.stdout.is_empty(),
            "{name} {args:?}: {errors}"
        );
    }
}

#[test]
fn a_reader_reads_the_tensor_of_its_trainer() {
    let dir = tempfile::tempdir().expect("a directory");
    let sockets = dir.path().join("sockets");
    let output = run("tensor", &[], &sockets);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && errors.is_empty(),
        "ended with {}: {errors}",
        output.status
    );
    let expected = "tensor: the reader read 1048576 elements, the first is 1.5; nothing is held\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    assert_eq!(
        std::fs::read_dir(&sockets).expect("the directory").count(),
        0,
        "a socket was left behind"
    );
}

#[test]
fn every_example_is_run_here() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let files = std::fs::read_dir(folder)
        .expect("the examples")
        .map(|entry| entry.expect("an entry").path());
    // Those with PyTorch on the other side are in a folder of their own, and run by `tests/torch`.
    let files = files.filter(|file| file.extension().is_some_and(|extension| extension == "rs"));
    let there: BTreeSet<String> = files
        .map(|file| {
            file.file_stem()
                .expect("a name")
                .to_str()
                .expect("text")
                .to_owned()
        })
        .collect();
    let run_here: BTreeSet<String> = WHOLE
        .into_iter()
        .chain(["consumer", "producer", "tensor"])
        .map(str::to_owned)
        .collect();
    assert_eq!(there, run_here);
}

#[test]
fn the_consumer_prints_what_the_producer_shares() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("numbers");
    let (descriptors, out) = std::io::pipe().expect("a pipe");
    let mut command = Command::new(example("producer"));
    let mut producer = Running::start_into(command.arg(&socket).arg("50"), out);
    // It has the pipe's end that is written.
    drop(command);
    wait_until("the producer to listen", || socket.exists());
    let mut command = Command::new(example("consumer"));
    let consumer = Running::start(command.arg(&socket).stdin(descriptors)).end(WATCHDOG);
    assert!(
        consumer.status.success(),
        "{}",
        String::from_utf8_lossy(&consumer.stderr)
    );
    assert!(
        producer.wait().success(),
        "the producer was left with held blocks"
    );
    let expected: String = (0..50).map(|number| format!("{number}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&consumer.stdout), expected);
    assert!(!socket.exists(), "the socket was left behind");
}

/// Examples with `unsafe`, and why: only what launches kernels of its own.
const UNSAFE: [(&str, &str); 1] = [(
    "examples/objects/shared/graph.rs",
    "captures a graph of kernels, and launches it over the weights",
)];

#[test]
fn no_example_without_a_kernel_has_unsafe() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![top.join("examples")];
    for entry in std::fs::read_dir(top.join("crates")).expect("the crates") {
        folders.push(entry.expect("a folder").path().join("examples"));
    }
    let (mut seen, mut used) = (0, BTreeSet::new());
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else {
            continue;
        };
        for path in entries.map(|entry| entry.expect("an entry").path()) {
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            seen += 1;
            let text = std::fs::read_to_string(&path).expect("text");
            let lines = text
                .lines()
                .map(|line| line.split("//").next().unwrap_or(line));
            if lines.into_iter().any(|line| {
                line.split(|c: char| !c.is_alphanumeric())
                    .any(|word| word == "unsafe")
            }) {
                let name = path.strip_prefix(top).expect("below it");
                let known = UNSAFE.iter().find(|(known, _)| name.starts_with(known));
                let (known, _) = known.unwrap_or_else(|| panic!("{} has `unsafe`", name.display()));
                used.insert(*known);
            }
        }
    }
    assert!(seen > 10, "only {seen} examples were read");
    assert_eq!(
        used.len(),
        UNSAFE.len(),
        "one of these needs no `unsafe`: {UNSAFE:?}"
    );
}
