//! What keeper and broker log.

#[allow(dead_code, reason = "each test program uses some of it")]
mod kept;

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;

use gpu_ipc::broker::Client;
use gpu_ipc::{BackendKind, detect};
use harness::program::{Running, output};
use harness::wait_until;
use kept::{Keeper, PROGRAM, complaint, program, run, text};

/// Waits for a line with all of these words, and returns it.
#[track_caller]
fn wait_for(keeper: &Keeper, words: &[&str]) -> String {
    let find = || {
        let log = keeper.log();
        let line = log
            .lines()
            .find(|line| words.iter().all(|word| line.contains(word)));
        line.map(str::to_owned)
    };
    wait_until(&format!("a line with {words:?}"), || find().is_some());
    find().expect("a log only grows")
}

#[test]
fn starts_deaths_restarts_and_refusals_are_lines() {
    let mut keeper = Keeper::start_with(&[], &["--limit", "768MiB", "--log", "info,broker=debug"]);
    let dir = keeper.dir.path().to_owned();
    let shown = dir.to_str().expect("a plain name");
    wait_for(&keeper, &["INFO", "the keeper listens", shown]);
    wait_for(&keeper, &["INFO", "the broker is started", "kept=0"]);
    wait_for(
        &keeper,
        &[
            "INFO",
            "the broker serves",
            shown,
            "limit=805306368",
            "restored=0",
        ],
    );
    wait_for(
        &keeper,
        &["INFO", "objects may lie on this device", "device=host:0"],
    );
    let file = dir.join("weights.bin");
    fs::write(&file, [7; 5_000]).expect("a file");
    let path = file.to_str().expect("a plain name");
    text(&run(&dir, &["put", "model", path, "--backend", "host"]));
    wait_for(&keeper, &["DEBUG", "a commit is kept"]);
    let missing = run(&dir, &["get", "nothing", "--backend", "host"]);
    assert!(!missing.status.success());
    wait_for(&keeper, &["INFO", "refused", "NotFound", "gpu-ipc get"]);

    let first = keeper.broker();
    keeper.kill_broker();
    wait_for(
        &keeper,
        &[
            "WARN",
            "the broker died; it is started again",
            &format!("pid={first}"),
            "SIGKILL",
        ],
    );
    wait_for(&keeper, &["INFO", "the broker serves", "restored=1"]);

    // A writer dies half-way.
    let large = dir.join("large.bin");
    fs::File::create(&large)
        .and_then(|file| file.set_len(512 << 20))
        .expect("a sparse file");
    wait_until("a writer that died is in the log", || {
        let put = [
            "put",
            "large",
            large.to_str().expect("a plain name"),
            "--backend",
            "host",
        ];
        let mut writer = Running::start(&mut program(&dir, &put));
        wait_until("it fills or has ended", || {
            !writer.is_running() || text(&run(&dir, &["objects"])).contains("filling")
        });
        writer.kill();
        run(&dir, &["rm", "large"]);
        keeper
            .log()
            .contains("a writer died; what it did not commit is closed")
    });

    keeper.process.kill();
    wait_for(&keeper, &["WARN", "the keeper is gone"]);
    keeper.start_again(&["--most", "1000"], &[]);
    wait_for(&keeper, &["INFO", "the keeper listens", "most=1000"]);
    wait_for(
        &keeper,
        &["INFO", "a keeper is there; it is given everything"],
    );
    wait_for(&keeper, &["INFO", "the keeper has everything"]);
}

#[test]
fn a_line_is_a_json_object_if_asked() {
    let keeper = Keeper::start_with(&["--log-json"], &["--log-json"]);
    wait_for(
        &keeper,
        &[r#""message":"the broker serves""#, r#""restored":0"#],
    );
    let log = keeper.log();
    assert!(log.lines().count() >= 4, "{log}");
    for line in log.lines() {
        let line: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|why| panic!("{why}: {line}"));
        assert!(
            line["level"].is_string()
                && line["timestamp"].is_string()
                && line["target"].is_string(),
            "{line}"
        );
    }
}

#[test]
fn the_level_is_that_of_the_option_else_of_the_environment() {
    let quiet = Keeper::start_with(&["--log", "off"], &["--log", "off"]);
    assert_eq!(quiet.log(), "");
    let some = Keeper::start_with(&["--log", "warn"], &["--log", "off,broker::server=info"]);
    wait_for(&some, &["the broker serves"]);
    assert!(!some.log().contains("the keeper listens"), "{}", some.log());
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = program(dir.path(), &["broker", "--device", "host:0"]);
    let wrong = output(command.env("RUST_LOG", "broker=loud"));
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    assert!(
        complaint(&wrong).contains(r#"RUST_LOG is "broker=loud""#),
        "{wrong:?}"
    );
}

/// A pager that was left open, a full pipe: the broker goes on, and says what was lost.
#[test]
fn a_log_that_is_not_read_stops_no_broker() {
    let dir = tempfile::tempdir().expect("a directory");
    let pipe = dir.path().join("pipe");
    text(&output(Command::new("mkfifo").arg(&pipe)));
    let mut reader = OpenOptions::new();
    // Both ends, so that it opens at once.
    let reader = reader.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let mut reader = reader.open(&pipe).expect("a pipe");
    rustix::pipe::fcntl_setpipe_size(&reader, 4_096).expect("a smaller one");
    let mut command = Command::new("sh");
    command
        .args(["-c", r#"exec "$@" 2>"$0""#])
        .arg(&pipe)
        .args([
            PROGRAM, "broker", "--device", "host:0", "--log", "trace", "--dir",
        ])
        .arg(dir.path());
    let broker = Running::start(&mut command);
    let gpu = detect()
        .expect("the host is there")
        .first(BackendKind::Host)
        .expect("the host is there");
    let connect = || Client::builder(gpu.clone()).dir(dir.path()).connect();
    wait_until("the broker answers", || connect().is_ok());
    let client = connect().expect("it answers");
    let refuse = || drop(client.open("nothing").expect_err("there is none"));
    // Each refusal is a line: more than the pipe and the queue have room for.
    (0..2_000).for_each(|_| refuse());
    let mut log = String::new();
    let mut piece = [0; 1 << 16];
    wait_until("the lost lines are counted", || {
        while let Ok(len @ 1..) = reader.read(&mut piece) {
            log.push_str(&String::from_utf8_lossy(&piece[..len]));
        }
        refuse();
        log.contains("lines of the log are lost")
    });
    assert!(
        log.matches(" refused ").count() < 2_000,
        "all of them were written"
    );
    drop(broker);
}
