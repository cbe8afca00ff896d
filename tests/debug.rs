//! `{:?}` of every type of the front door is one short line, however much its value reaches: one
//! `dbg!` must not kill a service.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gpu_ipc::allocators::{Arena, ArenaOptions};
use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::participant::GraphBlocks;
use gpu_ipc::session::{AdoptToken, Departure, DepositId, LeaseId, SessionNotice, ShareOptions};
use gpu_ipc::{
    After, ClaimError, Claims, Descriptor, Error, Gone, Gpu, Participant, Session, Stream, To,
    Wait, admin, detect,
};

/// What a handle, or a value of one thing, may say.
const SHORT: usize = 400;
/// What a report of twenty numbers and one holder may say, and an allocator that names its layers.
const REPORT: usize = 1200;
const REPORTS: [&str; 4] = ["Arena", "ProcessState", "SessionReport", "Stats"];
/// What numbers with more digits may add.
const DIGITS: usize = 80;

/// Names that are no types: an alias and a trait.
const NO_VALUES: [&str; 2] = ["Contents", "Result"];

/// Shows a value of each type, of a session that has this many blocks and grants.
fn shown(grants: usize) -> BTreeMap<&'static str, String> {
    let dir = tempfile::tempdir().expect("a directory");
    let host = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(host.clone(), DeviceId(0)).expect("there is a device");
    let builder = Session::builder(gpu.clone()).socket(dir.path().join("s"));
    let mut shown = BTreeMap::from([("SessionBuilder", format!("{builder:?}"))]);
    let session = builder.open().expect("a session");
    let builder = Participant::builder(gpu.clone()).name("reader");
    shown.insert("ParticipantBuilder", format!("{builder:?}"));
    let connecting = builder
        .start_connect(session.socket_path())
        .expect("a thread");
    shown.insert("Connecting", format!("{connecting:?}"));
    let participant = loop {
        match connecting.try_finish() {
            Some(done) => break done.expect("connected"),
            None => std::thread::yield_now(),
        }
    };
    let stream = Stream::create(&gpu).expect("a stream");
    let blocks: Vec<_> = (0..grants)
        .map(|_| session.alloc(4096).expect("there is room"))
        .collect();
    let to = To::Participant(participant.id());
    let after = After::Stream(&stream);
    let wait = Wait::Stream(&stream);
    let mut received = Vec::new();
    for block in &blocks {
        let descriptor = block.share(to, after).expect("shared");
        let ticket = block
            .share(To::Ticket(Claims::Once), after)
            .expect("shared");
        shown.insert("Descriptor", format!("{ticket:?}"));
        shown.insert("SessionId", format!("{:?}", ticket.session()));
        received.push(
            participant
                .claim(descriptor.as_bytes(), wait, None)
                .expect("claimed"),
        );
    }
    let arena = Arena::new(gpu.clone(), ArenaOptions::default()).expect("an arena");
    let graph = GraphBlocks::default();
    let options = ShareOptions::default().time_to_live(Some(Duration::from_secs(1)));
    let error: Error = Descriptor::decode(&[0; 3]).expect_err("no descriptor");
    let refused: ClaimError = participant
        .claim(&[0; 3], Wait::Host, None)
        .expect_err("no descriptor");
    let report = admin::inspect(session.socket_path(), None).expect("it answers");
    let stats = session.stats();
    shown.extend([
        ("After", format!("{after:?}")),
        ("AdoptToken", format!("{:?}", AdoptToken(7))),
        ("Arena", format!("{arena:?}")),
        ("BackendKind", format!("{:?}", gpu.kind())),
        ("ClaimError", format!("{refused:?}")),
        ("Claims", format!("{:?}", Claims::Once)),
        ("Collected", format!("{:?}", session.collect())),
        ("Departure", format!("{:?}", Departure::ConnectionLost)),
        ("DepositId", format!("{:?}", DepositId([7; 16]))),
        ("Detected", format!("{:?}", detect())),
        ("Error", format!("{error:?}")),
        ("Gone", format!("{:?}", Gone::Producer { pid: 7 })),
        ("Gpu", format!("{gpu:?}")),
        ("GraphBlocks", format!("{graph:?}")),
        ("Holder", format!("{:?}", stats.holders[0])),
        ("HostBackend", format!("{host:?}")),
        ("HostConfig", format!("{:?}", HostConfig::default())),
        ("LeaseId", format!("{:?}", LeaseId::new(1, 2, 3))),
        (
            "Notice",
            format!("{:?}", gpu_ipc::participant::Notice::TryAgain),
        ),
        ("Participant", format!("{participant:?}")),
        (
            "ProcessState",
            format!("{:?}", gpu_ipc::allocators::process_state()),
        ),
        ("ParticipantId", format!("{:?}", participant.id())),
        ("ReceivedBlock", format!("{:?}", received[0])),
        ("SentBlock", format!("{:?}", blocks[0])),
        (
            "SentSlice",
            format!("{:?}", blocks[0].slice(..64).expect("inside")),
        ),
        ("Session", format!("{session:?}")),
        (
            "SessionNotice",
            format!(
                "{:?}",
                SessionNotice::Joined {
                    participant: participant.id()
                }
            ),
        ),
        ("SessionReport", format!("{report:?}")),
        ("ShareOptions", format!("{options:?}")),
        ("State", format!("{:?}", received[0].state())),
        ("Stats", format!("{stats:?}")),
        ("Stream", format!("{stream:?}")),
        ("To", format!("{to:?}")),
        ("Wait", format!("{wait:?}")),
    ]);
    let loan = session
        .lend(session.alloc(4096).expect("there is room"), After::Done)
        .expect("lent");
    shown.insert("Loan", format!("{loan:?}"));
    shown.insert("Released", format!("{:?}", loan.release()));
    let handle = session
        .reclaim()
        .upgrade()
        .map(|handle| format!("{handle:?}"));
    shown.insert("Reclaim", handle.expect("the session lives"));
    // The participant holds all its blocks meanwhile, so that the report always names it.
    shown.insert(
        "ShutdownReport",
        format!("{:?}", session.shutdown(Duration::ZERO)),
    );
    drop((received, blocks, participant));
    shown
}

/// The types that the root and the modules of both sides export, as `src/lib.rs` says.
fn exported() -> BTreeSet<String> {
    let source = include_str!("../src/lib.rs");
    let front = source
        .split("/// For backends and for code")
        .next()
        .expect("there is a front");
    let host = source
        .split("pub mod host {")
        .nth(1)
        .expect("there is a host")
        .split('}')
        .next();
    let text = format!("{front}{}}}", host.expect("its exports"));
    let mut names = BTreeSet::new();
    for exports in text.split("pub use ").skip(1) {
        let list = exports.split(';').next().expect("an end");
        let words = list.split(|c: char| !c.is_alphanumeric() && c != '_');
        names.extend(
            words
                .filter(|word| word.starts_with(char::is_uppercase))
                .map(str::to_owned),
        );
    }
    names
}

#[test]
fn what_is_printed_of_any_public_type_is_one_short_line() {
    let (few, many) = (shown(1), shown(100));
    for (name, text) in &many {
        let most = if REPORTS.contains(name) {
            REPORT
        } else {
            SHORT
        };
        assert!(!text.contains('\n'), "{name}: {text}");
        assert!(
            text.len() <= most,
            "{name}: {} bytes: {text:.1500}",
            text.len()
        );
        assert!(
            text.len() <= few[name].len() + DIGITS,
            "{name} grows with what is granted: {text:.1500}"
        );
    }
    let missing: Vec<String> = exported()
        .into_iter()
        .filter(|name| !many.contains_key(&**name) && !NO_VALUES.contains(&&**name))
        .collect();
    assert!(missing.is_empty(), "show one of each: {missing:?}");
}
