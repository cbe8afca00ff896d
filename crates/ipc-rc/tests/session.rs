//! What a session does when something around it goes wrong: a source that panics, a fork, streams
//! that are gone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use allocators::{Piece, RegionSource, SourceUsage};
use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu, Result};
use ipc_rc::{After, Claims, Session, SessionBuilder, Stream, To};

fn open(
    choose: impl FnOnce(SessionBuilder) -> SessionBuilder,
) -> (tempfile::TempDir, Gpu, Session) {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = Gpu::new(
        HostBackend::new(HostConfig::default()).expect("it opens"),
        DeviceId(0),
    )
    .expect("a device");
    let session = choose(Session::builder(gpu.clone()).socket(dir.path().join("s")))
        .open()
        .expect("a session");
    (dir, gpu, session)
}

#[test]
fn what_is_printed_for_debugging_is_one_short_line_however_much_is_granted() {
    let (_dir, _gpu, session) = open(|builder| builder);
    let blocks: Vec<_> = (0..200)
        .map(|_| session.alloc(4096).expect("there is room"))
        .collect();
    let grants: Vec<_> = blocks
        .iter()
        .map(|block| block.share(To::Ticket(Claims::Once), After::Done))
        .collect();
    assert!(grants.iter().all(Result::is_ok));
    for text in [
        format!("{session:?}"),
        format!("{:?}", blocks[0]),
        format!("{:?}", session.reclaim().upgrade()),
    ] {
        assert!(
            text.len() < 300 && !text.contains('\n'),
            "{} bytes: {:.300}",
            text.len(),
            text
        );
    }
}

#[test]
fn a_block_that_lives_long_keeps_no_stream_that_is_gone() {
    let (_dir, gpu, session) = open(|builder| builder);
    let block = session.alloc(4096).expect("there is room");
    let mut streams: Vec<Weak<()>> = Vec::new();
    for _ in 0..100 {
        let own = Stream::create(&gpu).expect("a stream");
        let keep = Arc::new(());
        streams.push(Arc::downgrade(&keep));
        let raw = own.raw();
        // SAFETY: `borrow` asks for a stream that is alive for as long as `keep` is, and that
        // nobody captures: it is never destroyed before this process ends, since its owner is
        // forgotten.
        let lent =
            unsafe { Stream::borrow(&gpu, raw.handle, keep.clone()) }.expect("of this device");
        std::mem::forget(own);
        block.used_on(&lent).expect("it can be named");
        drop((lent, keep));
    }
    let alive = streams
        .iter()
        .filter(|stream| stream.strong_count() > 0)
        .count();
    assert!(alive <= 32, "{alive} of 100 streams are kept");
    drop(block);
    assert!(session.shutdown(Duration::from_secs(120)).clean);
}

#[test]
fn a_participants_name_is_its_first_32_bytes_wherever_it_is_shown() {
    let (_dir, gpu, session) = open(|builder| builder);
    let name = "\u{e9}".repeat(150) + "end";
    let participant = ipc_rc::Participant::builder(gpu.clone())
        .name(name)
        .connect(session.socket_path())
        .expect("connected");
    let shown = "\u{e9}".repeat(16);
    assert_eq!(
        session.participant_name(participant.id()),
        Some(shown.clone())
    );
    assert_eq!(session.stats().holders[0].command, shown);
    let seen = ipc_rc::inspect(session.socket_path(), Some(Duration::from_secs(120)));
    assert_eq!(seen.expect("it answers").stats.holders[0].command, shown);
}

/// A source that panics when it is told to.
#[derive(Debug)]
struct Panicking {
    inner: Arc<dyn RegionSource>,
    panics: AtomicBool,
}

impl Panicking {
    fn may_panic(&self) {
        assert!(!self.panics.load(Ordering::Relaxed), "on purpose");
    }
}

impl RegionSource for Panicking {
    fn take(&self, len: u64, align: u64) -> Result<Piece> {
        self.inner.take(len, align)
    }

    fn give_back(&self, piece: Piece) {
        self.may_panic();
        self.inner.give_back(piece);
    }

    fn trim(&self) -> Result<u64> {
        self.inner.trim()
    }

    fn usage(&self) -> SourceUsage {
        self.may_panic();
        self.inner.usage()
    }

    fn snapshot(&self, _: &dyn allocators::Reclaim, _: usize) -> Option<String> {
        self.may_panic();
        None
    }
}

#[test]
fn a_source_that_panics_loses_a_block_and_nothing_else() {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = Gpu::new(
        HostBackend::new(HostConfig::default()).expect("it opens"),
        DeviceId(0),
    )
    .expect("a device");
    let arena =
        allocators::Arena::new(gpu.clone(), allocators::ArenaOptions::default()).expect("an arena");
    let source = Arc::new(Panicking {
        inner: arena,
        panics: AtomicBool::new(false),
    });
    let builder = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .source(source.clone());
    let session = builder.open().expect("a session");
    let participant = ipc_rc::Participant::builder(gpu)
        .connect(session.socket_path())
        .expect("connected");
    let lost = session.alloc(4096).expect("there is room");
    let descriptor = lost
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    let received = participant
        .claim(descriptor.as_bytes(), ipc_rc::Wait::Host, None)
        .expect("claimed");
    drop(lost);
    source.panics.store(true, Ordering::Relaxed);
    // The session's thread, or this one, gives the block back.
    drop(received);
    while session.stats().leaked_blocks == 0 {
        session.collect();
        std::thread::yield_now();
    }
    assert!(
        ipc_rc::inspect(session.socket_path(), Some(Duration::from_secs(120))).is_ok(),
        "the thread is deaf"
    );
    source.panics.store(false, Ordering::Relaxed);
    let next = session.alloc(4096).expect("there is room");
    let descriptor = next
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    participant
        .claim(descriptor.as_bytes(), ipc_rc::Wait::Host, None)
        .expect("the session goes on");
    drop(next);
    participant
        .close(Some(Duration::from_secs(120)))
        .expect("it goes");
    // What is leaked never ends: without a limit of time the wait for what is held ends all the same.
    let report = session.shutdown(Duration::MAX);
    assert_eq!(
        (report.clean, report.blocks, report.bytes),
        (false, 1, 4096),
        "{report:?}"
    );
    assert_eq!(
        (report.leaked_blocks, report.leaked_bytes),
        (1, 4096),
        "{report:?}"
    );
    assert!(
        report
            .to_string()
            .contains("1 blocks of 4096 bytes are leaked"),
        "{report}"
    );
}

#[test]
fn a_forked_child_hangs_in_no_call_whatever_locks_its_parent_held() {
    let (_dir, gpu, session) = open(|builder| builder);
    let block = session.alloc(4096).expect("there is room");
    let stream = Stream::create(&gpu).expect("a stream");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _ = (session.stats(), block.used_on(&stream), session.collect());
                    if let Ok(descriptor) = block.share(To::Ticket(Claims::Once), After::Done) {
                        let _ = block.cancel(&descriptor);
                    }
                }
            });
        }
        for _ in 0..200 {
            // SAFETY: `fork` asks that the child of a process with threads does only what is safe
            // there: what is called here promises to touch no lock there.
            unsafe {
                harness::holds_in_a_fork(|| {
                    matches!(block.used_on(&stream), Err(Error::Forked { .. }))
                        && !session.shutdown(Duration::from_secs(3600)).clean
                        && session.stats().live_blocks == 0
                        && session
                            .reclaim()
                            .upgrade()
                            .is_some_and(|it| it.holders().is_empty() && it.lent(1).is_empty())
                });
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}
