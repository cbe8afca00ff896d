//! System calls that fail: a consumer that finds no descriptor, or no memory, is told, or dies of
//! it, and its producer loses nothing; a session that finds no room for its socket says so and
//! leaves nothing there; a call that a signal interrupts is made again.

use std::path::Path;
use std::time::Duration;

use gpu_ipc::allocators::{Arena, ArenaOptions, Growth};
use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Gpu, ParticipantId, SentBlock, Session, Stream, To};
use harness::surroundings::with_files;
use harness::{comes, say};

use crate::Case;
use crate::agent::{self, Agent, Fault, Said, Told, write_stamp};

pub const CASES: &[Case] = &[
    ("limits::a_consumer_without_descriptors", || {
        until_it_passes(Fault::Files, false)
    }),
    ("limits::a_consumer_without_memory", || {
        until_it_passes(Fault::Memory, false)
    }),
    ("limits::a_consumer_of_pieces_without_descriptors", || {
        until_it_passes(Fault::Files, true)
    }),
    ("limits::a_consumer_of_pieces_without_memory", || {
        until_it_passes(Fault::Memory, true)
    }),
    ("limits::interrupted_calls", interrupted),
];

/// Needs a kernel and a machine that let this user mount a file system of its own.
pub const MOUNTS: &[Case] = &[("limits::a_directory_without_room", without_room)];

fn until_it_passes(what: fn(u64) -> Fault, across: bool) {
    let gpu = Gpu::new(
        HostBackend::new(HostConfig::default()).expect("it opens"),
        DeviceId(0),
    )
    .expect("a device");
    let stream = Stream::create(&gpu).expect("a stream");
    let dir = tempfile::tempdir().expect("a directory");
    let session = open_session(&gpu, dir.path(), across);
    let straddles = across.then(|| straddle(&session));
    for number in 0.. {
        let fault = what(number);
        assert!(
            number < 400,
            "a consumer does not get on with {fault:?} either"
        );
        let passed = consume(&gpu, &stream, &session, fault);
        assert!(
            comes(|| {
                session.collect();
                let stats = session.stats();
                let kept = straddles.iter().count() as u64;
                (stats.live_blocks, stats.participants, stats.leaked_blocks) == (kept, 0, 0)
            }),
            "{fault:?}: {:?}",
            session.stats()
        );
        if passed {
            println!("lives with {fault:?}");
            return;
        }
    }
}

/// The bytes of a piece of memory that grows in place.
const PIECE: u64 = 64 << 10;

/// Opens a session, whose memory grows in place by pieces of [`PIECE`] if so asked.
pub fn open_session(gpu: &Gpu, dir: &Path, in_place: bool) -> Session {
    let options = ArenaOptions::default();
    let options = if in_place {
        options
            .growth(Growth::Fixed(PIECE))
            .limit(16 * PIECE)
            .grows_in_place(true)
    } else {
        options
    };
    let arena = Arena::new(gpu.clone(), options).expect("an arena");
    let builder = Session::builder(gpu.clone())
        .socket(dir.join("s"))
        .arena(&arena);
    builder
        .quarantine(Duration::ZERO)
        .open()
        .expect("a session")
}

/// Takes the first of two pieces but for its end, so that the next block of a page lies across
/// both.
pub fn straddle(session: &Session) -> SentBlock {
    let pieces = [(); 2].map(|()| session.alloc(PIECE).expect("there is room"));
    drop(pieces);
    let straddles = session.alloc(PIECE - 2048).expect("there is room");
    let across = session.alloc(4096).expect("there is room");
    assert_eq!(across.place(), (straddles.place().0, PIECE - 2048));
    straddles
}

/// A consumer's life among signals, and a producer's: nobody takes an interruption for a failure.
fn interrupted() {
    let gpu = Gpu::new(
        HostBackend::new(HostConfig::default()).expect("it opens"),
        DeviceId(0),
    )
    .expect("a device");
    let stream = Stream::create(&gpu).expect("a stream");
    let dir = tempfile::tempdir().expect("a directory");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    // The faster they come the less gets done between them.
    for microseconds in [5000, 1000, 300, 100] {
        for _ in 0..5 {
            let passed = consume(&gpu, &stream, &session, Fault::Signals(microseconds));
            assert!(
                passed,
                "a signal every {microseconds} us is taken for a failure"
            );
        }
    }
    let gone = comes(|| {
        session.collect();
        session.stats().participants == 0
    });
    assert!(gone, "{:?}", session.stats());
}

/// The directory itself is one file, and a socket that is being bound takes two.
fn without_room() {
    for (failures, files) in (1..10).enumerate() {
        let mut agent = agent::run_as(with_files(files), Fault::Room);
        let said = agent.ask(&Told::Path("/mnt".into()));
        let (status, complaint) = (agent.end(), agent.complaint());
        assert!(
            status.success() && !complaint.contains("panicked"),
            "{files} files: {complaint}"
        );
        match said {
            Said::Passed => return assert!(failures >= 2, "only {failures} calls failed"),
            Said::NoRoom { why, left: 0 } if why.contains("os error 28") => {}
            other => panic!("{files} files: {other:?}"),
        }
    }
    panic!("a session does not get on with more room either");
}

/// Opens a session in a directory that may have no room, and says how it went and what is left
/// there.
pub fn open_without_room(gpu: &Gpu, dir: &Path) {
    let opened = Session::builder(gpu.clone()).socket(dir.join("s")).open();
    say(&match opened {
        Ok(_) => Said::Passed,
        Err(error) => {
            let cause =
                std::error::Error::source(&error).map_or(String::new(), ToString::to_string);
            let left = std::fs::read_dir(dir).map_or(usize::MAX, Iterator::count);
            Said::NoRoom {
                why: format!("{error}: {cause}"),
                left,
            }
        }
    });
}

/// Shares two blocks with a consumer that may fail at any time, and says whether it did not.
pub fn consume(gpu: &Gpu, stream: &Stream, session: &Session, fault: Fault) -> bool {
    let mut agent = agent::start(fault);
    agent.tell(&Told::Path(session.socket_path().into()));
    let id = match agent.answer() {
        Some(Said::Joined(id)) => id,
        other => return ended(agent, fault, other),
    };
    for stamp in 1..=2u64 {
        let block = session.alloc(4096).expect("there is room");
        write_stamp(gpu, stream, &block, stamp).expect("it writes");
        let shared = block.share(To::Participant(ParticipantId(id)), After::Stream(stream));
        let Ok(descriptor) = shared else {
            // It is gone already.
            let said = agent.answer();
            return ended(agent, fault, said);
        };
        agent.tell(&Told::Claim(descriptor.as_bytes().to_vec()));
        match agent.answer() {
            Some(Said::Claimed) => {}
            other => return ended(agent, fault, other),
        }
        // While it holds the block, the producer lets go, and gives its other bytes to others.
        drop(block);
        session.collect();
        let other = session.alloc(4096).expect("there is room");
        write_stamp(gpu, stream, &other, 99).expect("it writes");
        agent.tell(&Told::Read);
        match agent.answer() {
            Some(Said::Stamp(read)) if read == stamp => {}
            other => return ended(agent, fault, other),
        }
    }
    let said = agent.answer();
    ended(agent, fault, said)
}

/// Lets an agent end, which said last how it went.
fn ended(mut agent: Agent, fault: Fault, said: Option<Said>) -> bool {
    let (status, complaint) = (agent.end(), agent.complaint());
    assert!(
        !complaint.contains("wrong:") && !complaint.contains("panicked"),
        "{fault:?}: {complaint}"
    );
    match said {
        Some(Said::Passed) => true,
        Some(Said::Failed(why)) => {
            assert!(
                status.success(),
                "{fault:?}: {status} after {why}: {complaint}"
            );
            false
        }
        // A process without memory may abort, which the Rust runtime does.
        None if matches!(fault, Fault::Memory(_)) => false,
        other => panic!("{fault:?}: {other:?}, {status}: {complaint}"),
    }
}
