//! A change of options while a broker serves: `--options`, SIGHUP and `gpu-ipc reload`.

#[allow(dead_code, reason = "each test program uses some of it")]
mod kept;

use std::fs;
use std::path::Path;

use harness::program::output;
use harness::wait_until;
use kept::{Keeper, PROGRAM, complaint, run, text};
use rustix::process::Signal;

fn path(path: &Path) -> &str {
    path.to_str().expect("a plain name")
}

/// Starts keeper and broker with a file of options in a directory of its own.
fn with_options(text: &str) -> (Keeper, tempfile::TempDir) {
    let of = tempfile::tempdir().expect("a directory");
    let file = of.path().join("broker.toml");
    fs::write(&file, text).expect("a file");
    (Keeper::start_with(&[], &["--options", path(&file)]), of)
}

fn log_has(keeper: &Keeper, words: &[&str]) {
    wait_until(&format!("a line with {words:?}"), || {
        let log = keeper.log();
        log.lines()
            .any(|line| words.iter().all(|word| line.contains(word)))
    });
}

fn listing(dir: &Path) -> serde_json::Value {
    serde_json::from_slice(&run(dir, &["objects", "--json"]).stdout).unwrap_or_default()
}

#[test]
fn options_are_read_again_and_a_bad_file_changes_nothing() {
    let (keeper, of) = with_options("limit = \"1MiB\"\n");
    let (dir, file) = (keeper.dir.path(), of.path().join("broker.toml"));
    let large = of.path().join("large");
    fs::write(&large, vec![7; 3 << 20]).expect("a file");
    let put = |name: &str| run(dir, &["put", name, path(&large), "--backend", "host"]);
    let refused = put("model");
    assert!(
        complaint(&refused).contains("limit of 1048576"),
        "{refused:?}"
    );
    fs::write(&file, "limit = \"4MiB\"\nlog = \"debug\"\n").expect("a file");
    let said = text(&run(dir, &["reload"]));
    assert!(
        said.contains("the options of") && said.contains("hold"),
        "{said}"
    );
    assert_eq!(text(&put("model")).trim(), "1");
    log_has(&keeper, &["INFO", "the options hold", "limit=4194304"]);
    // Each commit is a line for who looks for it, and no line for a disk that fills.
    log_has(&keeper, &["DEBUG", "a commit is kept"]);

    // One word is wrong: all stays as it was, also what is right in the file.
    fs::write(&file, "limit = \"1MiB\"\nevct = true\n").expect("a file");
    let bad = run(dir, &["reload"]);
    assert_eq!(bad.status.code(), Some(1), "{bad:?}");
    let why = format!("{}:2: evct is no option of a file", path(&file));
    assert!(complaint(&bad).contains(&why), "{bad:?}");
    log_has(&keeper, &["ERROR", "the options stay as they were", &why]);
    assert_eq!(listing(dir)["limit"], 4 << 20);
    let metrics = text(&run(dir, &["metrics"]));
    assert!(
        metrics.contains("gpu_ipc_broker_options_refused{"),
        "{metrics}"
    );
    let line = metrics
        .lines()
        .find(|line| line.starts_with("gpu_ipc_broker_options_refused{"));
    assert!(line.is_some_and(|line| line.ends_with(" 1")), "{line:?}");

    // A broker that starts again beside the bad file goes on with what was read well.
    let first = keeper.broker();
    keeper.kill_broker();
    wait_until("another broker", || {
        keeper.broker() != first && run(dir, &["objects"]).status.success()
    });
    let after = listing(dir);
    assert_eq!(
        (&after["limit"], &after["restored"]),
        (&(4 << 20).into(), &1.into())
    );
    let why_not = after["reread"]["why"].as_str().expect("a text");
    assert!(why_not.contains(&why), "{after}");

    // The keeper passes the signal on, which is what a service manager knows.
    fs::write(&file, "limit = \"8MiB\"\n").expect("a file");
    keeper.process.signal(Signal::HUP);
    wait_until("the file is read", || listing(dir)["limit"] == 8 << 20);
    assert_eq!(listing(dir)["reread"]["why"], "");
}

/// Its mistake would be as wrong the next time, and there are no objects to serve.
#[test]
fn a_bad_file_at_the_first_start_ends_both() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("broker.toml");
    fs::write(&file, "\nttl = 0\n").expect("a file");
    let mut command = std::process::Command::new(PROGRAM);
    command.args(["keep", "--dir", path(dir.path()), "--", PROGRAM, "broker"]);
    command.args(["--device", "host:0", "--options", path(&file)]);
    let refused = output(&mut command);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let why = format!("{}:2: invalid value '0' for '--ttl <SECONDS>'", path(&file));
    assert!(complaint(&refused).contains(&why), "{refused:?}");
}

#[test]
fn without_a_file_there_is_nothing_to_read_again() {
    let keeper = Keeper::start();
    let refused = run(keeper.dir.path(), &["reload"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(
        complaint(&refused).contains("was started without --options FILE"),
        "{refused:?}"
    );
    let pid = keeper.broker();
    assert!(run(keeper.dir.path(), &["objects"]).status.success());
    assert_eq!(keeper.broker(), pid, "and no signal ended it");
}
