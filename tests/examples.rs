//! The examples do what they say: two programs, a socket, and a pipe between them.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Finds an example that `cargo test` built beside this test.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let profile = test.parent().and_then(|deps| deps.parent()).expect("target/PROFILE/deps/TEST");
    let program = profile.join("examples").join(name);
    assert!(program.exists(), "{} was not built: run `cargo test` without a filter by target", program.display());
    program
}

#[test]
fn the_consumer_prints_what_the_producer_shares() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("numbers");
    let mut producer = Command::new(example("producer"))
        .arg(&socket)
        .arg("50")
        .stdout(Stdio::piped())
        .spawn()
        .expect("the producer starts");
    let start = Instant::now();
    while !socket.exists() {
        assert!(start.elapsed().as_secs() < 60, "the producer never listens");
        std::thread::yield_now();
    }
    let descriptors = producer.stdout.take().expect("piped");
    let consumer = Command::new(example("consumer"))
        .arg(&socket)
        .stdin(Stdio::from(descriptors))
        .output()
        .expect("the consumer runs");
    assert!(consumer.status.success(), "{}", String::from_utf8_lossy(&consumer.stderr));
    assert!(producer.wait().expect("a child").success(), "the producer was left with held blocks");
    let expected: String = (0..50).map(|number| format!("{number}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&consumer.stdout), expected);
    assert!(!socket.exists(), "the socket was left behind");
}
