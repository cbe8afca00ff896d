//! `gpu-ipc snapshot` as a user of it sees it: a session of this process, asked by the program.

use std::process::{Command, Output};
use std::sync::Arc;

use gpu_ipc::allocators::{Arena, ArenaOptions, Growth};
use gpu_ipc::backend::{Piece, RegionSource, SourceUsage};
use gpu_ipc::{After, BackendKind, Participant, Session, To, Wait, detect};
use harness::program::output;

fn run(args: &[&str]) -> Output {
    output(Command::new(env!("CARGO_BIN_EXE_gpu-ipc")).args(args))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program writes UTF-8")
}

const REGION: u64 = 1 << 20;

fn open(dir: &tempfile::TempDir) -> (Arc<Arena>, Session, Participant) {
    let gpu = detect()
        .expect("the host is there")
        .first(BackendKind::Host)
        .expect("the host is there");
    let options = ArenaOptions::default()
        .name("arena")
        .limit(4 * REGION)
        .growth(Growth::Fixed(REGION));
    let arena = Arena::new(gpu.clone(), options).expect("an arena");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .arena(&arena)
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu)
        .connect(session.socket_path())
        .expect("connected");
    (arena, session, participant)
}

#[test]
fn limbo_and_who_holds_it_are_shown_in_words_as_data_and_as_a_picture() {
    let dir = tempfile::tempdir().expect("a directory");
    let (_arena, session, participant) = open(&dir);
    let socket = session.socket_path().to_str().expect("a plain path");
    let block = session.alloc(REGION / 2).expect("room");
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    let held = participant
        .claim(descriptor.as_bytes(), Wait::Host, None)
        .expect("claimed");
    drop(block);
    let _own = session.alloc(REGION / 4).expect("room");

    let picture = dir.path().join("memory.svg");
    let output = run(&[
        "snapshot",
        socket,
        "--timeout",
        "120",
        "--svg",
        picture.to_str().expect("a plain path"),
    ]);
    let page = text(&output.stdout);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{} {page}",
        text(&output.stderr)
    );
    let own = std::process::id().to_string();
    let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "in limbo 512 KiB",
        "limit 4.00 MiB",
        "HELD BY",
        "alive",
        "# in limbo",
        &own,
    ] {
        assert!(words.contains(part), "no {part:?} in\n{page}");
    }
    let map = page
        .lines()
        .find(|line| line.contains("! |"))
        .expect("a region is drawn");
    assert!(
        map.ends_with(&format!(
            "|{}{}{}|",
            "#".repeat(32),
            "*".repeat(16),
            "_".repeat(16)
        )),
        "{page}"
    );
    let svg = std::fs::read_to_string(&picture).expect("a picture");
    assert!(
        svg.starts_with("<svg") && svg.contains(&format!("in limbo, held by {own} (")),
        "{svg}"
    );

    let output = run(&["snapshot", socket, "--timeout", "120", "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(value["ok"], true);
    let snapshot = &value["snapshot"];
    assert_eq!(
        (&snapshot["name"], &snapshot["limbo_bytes"]),
        (&"arena".into(), &(REGION / 2).into())
    );
    assert_eq!(
        (
            &snapshot["lent"][0]["limbo"],
            &snapshot["lent"][0]["holder"]
        ),
        (&true.into(), &0.into())
    );
    assert_eq!(snapshot["holders"][0]["pid"], std::process::id());
    drop(held);
}

#[test]
fn a_session_without_an_arena_has_one_too() {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = detect()
        .expect("the host is there")
        .first(BackendKind::Host)
        .expect("the host is there");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu)
        .connect(session.socket_path())
        .expect("connected");
    let socket = session.socket_path().to_str().expect("a plain path");
    let block = session.alloc(16 * REGION).expect("room");
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    let held = participant
        .claim(descriptor.as_bytes(), Wait::Host, None)
        .expect("claimed");
    drop(block);
    let _own = session.alloc(8 * REGION).expect("room");

    let output = run(&["snapshot", socket, "--timeout", "120"]);
    let page = text(&output.stdout);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{} {page}",
        text(&output.stderr)
    );
    let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "arena of device 0",
        "limit none",
        "reserved 32.0 MiB",
        "in limbo 16.0 MiB",
        "HELD BY",
        "alive",
    ] {
        assert!(words.contains(part), "no {part:?} in\n{page}");
    }
    let map = page
        .lines()
        .find(|line| line.contains("! |"))
        .expect("a region is drawn");
    assert!(
        map.ends_with(&format!(
            "|{}{}{}|",
            "#".repeat(32),
            "*".repeat(16),
            "_".repeat(16)
        )),
        "{page}"
    );
    drop(held);
}

/// A source of somebody's own that has nothing to tell.
#[derive(Debug)]
struct Mute(Arc<Arena>);

impl RegionSource for Mute {
    fn take(&self, len: u64, align: u64) -> gpu_ipc::Result<Piece> {
        self.0.take(len, align)
    }
    fn give_back(&self, piece: Piece) {
        self.0.give_back(piece);
    }
    fn trim(&self) -> gpu_ipc::Result<u64> {
        self.0.trim()
    }
    fn usage(&self) -> SourceUsage {
        self.0.usage()
    }
}

#[test]
fn what_is_not_there_is_a_finding_with_the_reason() {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = detect()
        .expect("the host is there")
        .first(BackendKind::Host)
        .expect("the host is there");
    let mute = Arc::new(Mute(
        Arena::new(gpu.clone(), ArenaOptions::default()).expect("an arena"),
    ));
    let mute = Session::builder(gpu)
        .source(mute)
        .socket(dir.path().join("mute"))
        .open()
        .expect("a session");
    let mute = mute.socket_path().to_str().expect("a plain path");
    let absent = dir.path().join("absent");
    let absent = absent.to_str().expect("a plain path");
    for (socket, reason) in [
        (mute, "has no snapshot"),
        (absent, "there is no such socket"),
        ("zzzz", "zzzz"),
    ] {
        let output = run(&["snapshot", socket, "--timeout", "120"]);
        assert_eq!(output.status.code(), Some(1), "{socket}");
        assert!(
            text(&output.stderr).contains(reason),
            "{}",
            text(&output.stderr)
        );
        let output = run(&["snapshot", socket, "--json"]);
        let value: serde_json::Value =
            serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert_eq!(value["ok"], false);
    }
}

#[test]
fn a_picture_that_cannot_be_written_is_a_finding() {
    let dir = tempfile::tempdir().expect("a directory");
    let (_arena, session, _participant) = open(&dir);
    let socket = session.socket_path().to_str().expect("a plain path");
    let output = run(&["snapshot", socket, "--svg", "/nowhere/memory.svg"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("/nowhere/memory.svg cannot be written"),
        "{}",
        text(&output.stderr)
    );
}
