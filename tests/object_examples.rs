//! The examples of objects do what they say, on the host backend.
//!
//! Each checks every answer itself and fails with a message; here its last line is compared with
//! what it should have done.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use harness::program::{example, run_to_end};

/// Long enough for the slowest machine; whatever takes longer hangs.
const WATCHDOG: Duration = Duration::from_secs(300);

/// Runs an example that must succeed, and returns what it printed.
fn report(name: &str, args: &[&str]) -> String {
    let (code, out, errors) = run(name, args);
    assert_eq!((code, errors.as_str()), (Some(0), ""), "{name}");
    out
}

fn run(name: &str, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(example(name));
    let output = run_to_end(
        command
            .args(args)
            .env("GPU_IPC_HOST_BYTES", (1u64 << 30).to_string()),
        WATCHDOG,
    );
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Returns the number before some words.
fn number_before(text: &str, words: &str) -> f64 {
    let before = text.split(words).next().expect("there is always a first");
    let number = before.rsplit(' ').next().and_then(|word| word.parse().ok());
    number.unwrap_or_else(|| panic!("no number before {words:?} in {text:?}"))
}

#[test]
fn the_successor_of_a_killed_engine_answers() {
    let text = report("crash_and_return", &["--bytes", "8MiB", "--parts", "200"]);
    assert!(
        text.starts_with(
            "crash_and_return: an engine with 8 MiB in 200 parts was killed; its successor answered right "
        )
    );
    let whole = number_before(&text, " ms after its start");
    let parts = [" ms until it had device", " ms to open", " ms to capture"]
        .map(|words| number_before(&text, words));
    assert!(
        whole >= parts.iter().sum::<f64>() * 0.99 && parts[1] > 0.0,
        "{text}"
    );
}

#[test]
fn weights_are_swapped_under_a_loop_while_trainers_die() {
    let text = report(
        "hot_swap",
        &[
            "--bytes", "2MiB", "--parts", "20", "--rounds", "12", "--every", "10",
        ],
    );
    assert!(
        text.starts_with("hot_swap: 2 MiB in 20 parts, 9 epochs, 4 trainers killed half-way; "),
        "{text}"
    );
    assert_eq!(
        number_before(&text, " advances at the same addresses"),
        8.0,
        "{text}"
    );
    // One for each epoch at least, each checked byte by byte.
    assert!(number_before(&text, " answers, each") >= 9.0, "{text}");
}

#[test]
fn a_shadow_takes_no_memory_for_the_weights() {
    let text = report("shadow", &["--bytes", "32MiB", "--parts", "50"]);
    assert!(
        text.starts_with("shadow: 32 MiB in 50 parts, mapped by two engines; the second took "),
        "{text}"
    );
    assert!(number_before(&text, " MiB more for them") < 4.0, "{text}");
    assert!(number_before(&text, " ms\n") > 0.0, "{text}");
}

#[test]
fn sealed_blocks_outlive_engines_that_are_killed() {
    let rounds = 6.0;
    let args = [
        "--bytes", "4MiB", "--parts", "64", "--rounds", "6", "--every", "300",
    ];
    let text = report("kv_survives", &args);
    assert!(
        text.starts_with("kv_survives: 6 engines with 4 MiB in 64 blocks were killed; "),
        "{text}"
    );
    let (kept, again) = (
        number_before(&text, " sealed blocks"),
        number_before(&text, " again\n"),
    );
    assert!(kept > 0.0 && kept + again == rounds * 64.0, "{text}");
    // A pool rests for 100 ms after a death.
    assert!(
        number_before(&text, " ms after the death") >= 100.0,
        "{text}"
    );
}

#[test]
fn what_is_not_understood_is_refused() {
    for name in ["crash_and_return", "hot_swap", "kv_survives", "shadow"] {
        let usage = format!("{name}: usage: {name} [--backend host|cuda|hip] [--bytes 40GiB]");
        let cases = [
            (["--byte", "1"], usage),
            (
                ["--bytes", "many"],
                format!("{name}: many is not a number of bytes"),
            ),
            (
                ["--bytes", "4KiB"],
                format!("{name}: at least one part, and at least 4096 bytes a part"),
            ),
            (
                ["--backend", "abacus"],
                format!("{name}: no backend is named abacus"),
            ),
        ];
        for (args, expected) in cases {
            let (code, out, errors) = run(name, &args);
            assert!(
                code == Some(1) && errors.starts_with(&expected) && out.is_empty(),
                "{name} {args:?}: {errors}"
            );
        }
    }
}

#[test]
fn the_examples_that_are_run_here_are_all_there_are() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/objects");
    let files = std::fs::read_dir(folder)
        .expect("the examples")
        .map(|entry| entry.expect("an entry").path());
    let files = files.filter(|file| file.extension().is_some_and(|extension| extension == "rs"));
    let mut there: Vec<String> = files
        .map(|file| file.file_stem().expect("a name").to_string_lossy().into())
        .collect();
    there.sort();
    assert_eq!(
        there,
        ["crash_and_return", "hot_swap", "kv_survives", "shadow"]
    );
}
