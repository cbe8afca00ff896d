//! Every call of the backend fails once, on either side, with the other side in this process or in
//! another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gpu_ipc::allocators::{Arena, ArenaOptions, Growth};
use gpu_ipc::backend::{CaptureStatus, DeviceId};
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Error, Gpu, Participant, Result, Session, Stream, To, Wait};
use harness::{WATCHDOG, comes};

use crate::Case;
use crate::agent::{Fault, read_stamp, write_stamp};
use crate::faulty::Faulty;
use crate::limits::{consume, open_session, straddle};

pub const CASES: &[Case] = &[
    ("backend::each_call_of_a_producer_fails_once", || {
        until_it_passes(Side::Producer)
    }),
    ("backend::each_call_of_a_consumer_fails_once", || {
        until_it_passes(Side::Consumer)
    }),
    (
        "backend::each_call_of_a_consumer_elsewhere_fails_once",
        || elsewhere(false),
    ),
    (
        "backend::each_call_of_a_consumer_elsewhere_fails_once_across_pieces",
        || elsewhere(true),
    ),
    (
        "backend::each_call_of_a_drop_fails_once_and_the_block_comes_back",
        drops,
    ),
    (
        "backend::a_capture_that_begins_before_an_event_is_recorded_loses_no_lease",
        capture_begins,
    ),
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Producer,
    Consumer,
}

type Backend = Arc<Faulty<HostBackend>>;

fn open() -> (Backend, Gpu) {
    let backend = Faulty::new(HostBackend::new(HostConfig::default()).expect("it opens"));
    let gpu = Gpu::new(backend.clone(), DeviceId(0)).expect("there is a device");
    (backend, gpu)
}

/// What a life left behind.
#[derive(Debug, Default)]
struct Left {
    /// Blocks and leases that were counted as lost.
    counted: u64,
    /// Blocks that were still there at the end.
    blocks: u64,
    /// Which counts leases that it could not end.
    participant: Option<Participant>,
    /// Which counts regions whose free failed.
    source: Option<Arc<Arena>>,
}

/// One life: share, claim, read, release, collect, shut down; up to the first call that does not
/// work.
fn live(producer: &Gpu, consumer: &Gpu, left: &mut Left) -> Result<()> {
    let dir = tempfile::tempdir().expect("a directory");
    let source = Arena::new(
        producer.clone(),
        ArenaOptions::default().growth(Growth::Fixed(64 << 10)),
    )?;
    let session = Session::builder(producer.clone())
        .socket(dir.path().join("s"))
        .source(source.clone())
        .quarantine(Duration::ZERO)
        .open()?;
    let stream = Stream::create(producer)?;
    let lived = share_and_claim(&session, &stream, consumer, left);
    let participant = left.participant.take();
    // All comes back, or is counted, while both sides live.
    let settled = comes(|| {
        session.collect();
        let stats = session.stats();
        let kept = participant.as_ref().map_or(0, Participant::kept_leases);
        left.blocks = stats.live_blocks;
        left.counted = stats.leaked_blocks + stats.poisoned + kept;
        // What was not claimed comes back at the participant's goodbye.
        left.blocks == 0 || left.counted != 0 || stats.held == 0
    });
    assert!(
        settled,
        "{} blocks are lost uncounted: {:?}",
        left.blocks,
        session.stats()
    );
    drop(participant);
    let report = session.shutdown(if left.counted == 0 {
        WATCHDOG
    } else {
        Duration::ZERO
    });
    assert!(report.clean || left.counted != 0, "{report:?}");
    // Without blocks the regions go, too, once nobody has them mapped.
    let mut trimmed = Ok(0);
    let gone = report.clean
        && comes(|| {
            let trim = session.trim();
            if trim.is_err() {
                trimmed = trim;
            }
            session.stats().source.reserved == 0
        });
    assert_eq!(gone, report.clean, "regions are kept for nobody");
    left.source = Some(source);
    trimmed?;
    lived
}

fn share_and_claim(
    session: &Session,
    stream: &Stream,
    consumer: &Gpu,
    left: &mut Left,
) -> Result<()> {
    let participant = Participant::builder(consumer.clone()).connect(session.socket_path())?;
    let participant = left.participant.insert(participant);
    let theirs = Stream::create(consumer)?;
    for stamp in 1..=2 {
        let block = session.alloc(4096)?;
        write_stamp(session.gpu(), stream, &block, stamp)?;
        let descriptor = block.share(To::Participant(participant.id()), After::Stream(stream))?;
        let claimed =
            participant.claim(descriptor.as_bytes(), Wait::Stream(&theirs), Some(WATCHDOG));
        let held = claimed.map_err(|error| Error::Refused {
            why: error.to_string(),
            remedy: "-",
        })?;
        drop(block);
        // Another block gets other bytes while this one is held.
        session.collect();
        let other = session.alloc(4096);
        if let Ok(other) = &other {
            write_stamp(session.gpu(), stream, other, 99)?;
        }
        let read = read_stamp(consumer, &theirs, held.device_ptr());
        held.used_on(&theirs).expect("a stream of its own");
        drop(held);
        assert_eq!(read?, stamp, "somebody else's bytes");
        other?;
    }
    session.collect();
    session.trim()?;
    Ok(())
}

fn until_it_passes(side: Side) {
    let mut calls = Vec::new();
    for nth in 1.. {
        assert!(nth < 2000, "it fails for ever");
        let ((producing, producer), (consuming, consumer)) = (open(), open());
        let faulty = if side == Side::Producer {
            &producing
        } else {
            &consuming
        };
        faulty.fail_at(nth);
        let mut left = Left::default();
        let lived = live(&producer, &consumer, &mut left);
        drop((producer, consumer));
        // What the threads still have in hand comes back, or fails to, unless it is counted as
        // lost.
        let nothing_left =
            || producing.outstanding().is_empty() && consuming.outstanding().is_empty();
        let all_back = left.counted != 0 || comes(nothing_left);
        let failed = faulty.heal();
        let name = failed.unwrap_or("none");
        assert!(
            all_back,
            "call {nth}, {name}: {:?} and {:?} are left, and nothing is counted",
            producing.outstanding(),
            consuming.outstanding()
        );
        assert!(
            failed.is_some() || lived.is_ok(),
            "call {nth}: {lived:?}, but nothing was made to fail"
        );
        for backend in [&producing, &consuming] {
            assert_eq!(backend.wrongs(), [""; 0], "call {nth}, {name}");
        }
        if failed == Some("free") {
            let leaked = left
                .source
                .as_ref()
                .map_or(0, |source| source.stats().leaked);
            assert_ne!(leaked, 0, "a region whose free failed is not counted");
        }
        match failed {
            Some(call) => calls.push(call),
            None => break,
        }
    }
    calls.sort_unstable();
    let total = calls.len();
    calls.dedup();
    println!(
        "{side:?}: {total} calls failed once each: {}",
        calls.join(" ")
    );
    assert!(total > 10, "that is no life");
}

/// A drop asks its streams for events. Where it gets none, the streams are synchronised, and
/// nothing is lost.
fn drops() {
    let (faulty, gpu) = open();
    let dir = tempfile::tempdir().expect("a directory");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let streams = [
        Stream::create(&gpu).expect("a stream"),
        Stream::create(&gpu).expect("a stream"),
    ];
    let (mut calls, mut counted) = (Vec::new(), 0);
    for nth in 1.. {
        let block = session.alloc(4096).expect("there is room");
        streams
            .iter()
            .for_each(|stream| block.used_on(stream).expect("a stream of its own"));
        // What both streams still have to do when the block is dropped.
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let hold = Box::new(move || {
            let _ = gate.recv();
        });
        // SAFETY: `host_function` asks for a live stream that nobody captures: it lives to the end
        // of the case.
        unsafe { gpu.backend().host_function(streams[1].raw(), hold) }.expect("queued");
        faulty.fail_at(nth);
        drop(block);
        let failed = faulty.heal();
        let mut unmarked = 0;
        for _ in 0..20 {
            session.collect();
            let stats = session.stats();
            assert_eq!(
                stats.limbo_blocks, 1,
                "call {nth}, {failed:?}: freed under its work"
            );
            unmarked = stats.unmarked_blocks;
        }
        drop(go);
        let back = comes(|| {
            session.collect();
            session.stats().live_blocks == 0
        });
        let stats = session.stats();
        assert!(
            back && stats.leaked_blocks == 0,
            "call {nth}, {failed:?}: {stats:?}"
        );
        assert_eq!(
            stats.unmarked_blocks, 0,
            "call {nth}, {failed:?}: {stats:?}"
        );
        counted += unmarked;
        match failed {
            Some(call) => calls.push(call),
            None => {
                assert_eq!(unmarked, 0, "every stream had its event");
                break;
            }
        }
    }
    assert!(
        calls.contains(&"record_event"),
        "no event failed: {calls:?}"
    );
    // The stream that is held up without an event is: the other one is synchronised at once.
    assert_ne!(
        counted, 0,
        "a block without an event on a stream that is held up is not counted"
    );
}

fn elsewhere(across: bool) {
    let gpu = open().1;
    let stream = Stream::create(&gpu).expect("a stream");
    let dir = tempfile::tempdir().expect("a directory");
    let session = open_session(&gpu, dir.path(), across);
    let straddles = across.then(|| straddle(&session));
    for nth in 1.. {
        assert!(nth < 2000, "it fails for ever");
        let passed = consume(&gpu, &stream, &session, Fault::Backend(nth));
        // Whatever it kept comes back with its process.
        let back = comes(|| {
            session.collect();
            let stats = session.stats();
            let kept = straddles.iter().count() as u64;
            (stats.live_blocks, stats.participants, stats.leaked_blocks) == (kept, 0, 0)
        });
        assert!(back, "call {nth}: {:?}", session.stats());
        if passed {
            println!("elsewhere: {} calls failed once each", nth - 1);
            break;
        }
    }
    drop(straddles);
    session.trim().expect("nothing fails here");
    assert_eq!(
        session.stats().source.reserved,
        0,
        "a region is kept for the dead"
    );
}

/// Leases whose events the participant's thread records: the application begins to capture their
/// stream after that thread has asked and before it records.
fn capture_begins() {
    let ((_, producer), (faulty, consumer)) = (open(), open());
    let dir = tempfile::tempdir().expect("a directory");
    let builder = Session::builder(producer).socket(dir.path().join("s"));
    let session = builder
        .quarantine(Duration::ZERO)
        .open()
        .expect("a session");
    let participant = Participant::builder(consumer.clone())
        .connect(session.socket_path())
        .expect("connected");
    let (block, stream) = (
        session.alloc(4096).expect("there is room"),
        Stream::create(&consumer).expect("a stream"),
    );
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let hold = Box::new(move || {
        let _ = gate.recv();
    });
    // SAFETY: `host_function` asks for a live stream that nobody captures: it lives to the end of
    // the case.
    unsafe { consumer.backend().host_function(stream.raw(), hold) }.expect("queued");
    // More than a queue takes. The first on top has an event behind the work; the others gather
    // until that has passed.
    for _ in 0..200 {
        let descriptor = block
            .share(To::Participant(participant.id()), After::Done)
            .expect("shared");
        let held = participant
            .claim(descriptor.as_bytes(), Wait::None, Some(WATCHDOG))
            .expect("claimed");
        held.used_on(&stream).expect("a stream of its own");
    }
    let (raw, begun) = (stream.raw(), Arc::new(AtomicBool::new(false)));
    let begins = begun.clone();
    faulty.after_question_of_capture(move |host| {
        host.set_capture(raw, CaptureStatus::Active);
        begins.store(true, Ordering::Release);
    });
    drop(go);
    assert!(
        comes(|| begun.load(Ordering::Acquire)),
        "its thread does not ask"
    );
    let held = || {
        session.collect();
        session.stats().held
    };
    assert!(
        comes(|| held() < 100),
        "what was behind the first event is not released"
    );
    assert_ne!(held(), 0, "released while their stream captures");
    // SAFETY: `capture_status` asks for a live stream: it lives to the end of the case.
    let status = unsafe { consumer.backend().capture_status(raw) }.expect("it tells");
    assert_eq!(status, CaptureStatus::Active, "the capture was ended");
    assert_eq!(participant.kept_leases(), 0);
    faulty.backend().set_capture(raw, CaptureStatus::None);
    assert!(
        comes(|| held() == 0),
        "{} leases are kept for ever",
        participant.kept_leases()
    );
    assert_eq!(faulty.wrongs(), Vec::<String>::new());
}
