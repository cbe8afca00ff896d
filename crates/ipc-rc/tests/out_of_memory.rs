//! A session without an allocator of the application's, on a device that is full.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use allocators::{Arena, ArenaOptions, Growth};
use allocators::{Piece, RegionSource, SourceUsage};
use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu, Result};
use ipc_rc::{After, Participant, Session, SessionBuilder, To, Wait};

/// Long enough for the slowest machine; a test that waits longer hangs.
const WATCHDOG: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;
const DEVICE: u64 = 8 * MIB;

fn device() -> Gpu {
    let backend =
        HostBackend::new(HostConfig::default().bytes_per_device(DEVICE)).expect("it opens");
    Gpu::new(backend, DeviceId(0)).expect("there is a device")
}

/// A source that asks nobody for memory, and counts how often it had none.
#[derive(Debug)]
struct Plain {
    arena: Arc<Arena>,
    refusals: AtomicU64,
}

impl RegionSource for Plain {
    fn take(&self, len: u64, align: u64) -> Result<Piece> {
        self.arena.take(len, align).inspect_err(|_| {
            self.refusals.fetch_add(1, Ordering::Relaxed);
        })
    }
    fn give_back(&self, piece: Piece) {
        self.arena.give_back(piece);
    }
    fn trim(&self) -> Result<u64> {
        self.arena.trim()
    }
    fn usage(&self) -> SourceUsage {
        self.arena.usage()
    }
}

/// Waits for the whole device while a descriptor of a small block is on its way, which `begun` lets
/// arrive.
#[track_caller]
fn waits_for_a_descriptor_on_its_way(builder: SessionBuilder, begun: impl Fn()) {
    let dir = tempfile::tempdir().expect("a directory");
    let session = builder
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(session.gpu().clone())
        .connect(session.socket_path())
        .expect("connected");
    let block = session.alloc(MIB).expect("there is room");
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    drop(block);
    let whole = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| session.alloc_within(DEVICE, WATCHDOG));
        begun();
        // Its region is mapped from here on, and stays so in the participant's cache until somebody
        // asks.
        drop(
            participant
                .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
                .expect("claimed"),
        );
        waiter.join().expect("no panic")
    });
    assert_eq!(whole.expect("nothing is used").len(), DEVICE);
}

#[test]
fn an_allocation_waits_for_a_descriptor_that_was_on_its_way_when_it_began() {
    // The wait has begun at some time before the claim, or after it: each of these rounds is
    // another time.
    for round in 0..20 {
        let start = Instant::now();
        waits_for_a_descriptor_on_its_way(Session::builder(device()).region_bytes(4 * MIB), || {
            while start.elapsed() < Duration::from_micros(100 * round) {
                std::thread::yield_now();
            }
        });
    }
}

#[test]
fn participants_are_asked_again_for_a_source_that_asks_nobody() {
    let gpu = device();
    let options = ArenaOptions::default()
        .growth(Growth::Fixed(4 * MIB))
        .patience(Duration::ZERO);
    let arena = Arena::new(gpu.clone(), options).expect("an arena");
    let source = Arc::new(Plain {
        arena,
        refusals: AtomicU64::new(0),
    });
    waits_for_a_descriptor_on_its_way(Session::builder(gpu).source(source.clone()), || {
        let start = Instant::now();
        // Two refusals are one attempt: the third says that everybody was asked before the claim.
        while source.refusals.load(Ordering::Relaxed) < 3 {
            assert!(
                start.elapsed() < WATCHDOG,
                "the allocation does not try again"
            );
            std::thread::yield_now();
        }
    });
}

#[test]
fn out_of_memory_names_the_process_that_holds_the_memory() {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = device();
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu)
        .connect(session.socket_path())
        .expect("connected");
    let block = session.alloc(6 * MIB).expect("there is room");
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    drop(block);
    let received = participant
        .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    let error = session.alloc(4 * MIB).expect_err("6 of 8 MiB are held");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    let text = error.to_string();
    for part in [
        &format!("process {} (", std::process::id()),
        "holds 6 MiB in 1 leases",
        "in limbo 6 MiB",
    ] {
        assert!(text.contains(part), "{part}\nnot in\n{text}");
    }
    drop(received);
    session.alloc_within(4 * MIB, WATCHDOG).expect("it let go");
}

#[test]
fn no_length_makes_a_text_that_says_more_is_free_than_the_device_has() {
    let dir = tempfile::tempdir().expect("a directory");
    let session = Session::builder(device())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let kept = session.alloc(MIB).expect("there is room");
    for len in [DEVICE + 1, 1 << 62, u64::MAX - 4095, u64::MAX] {
        let error = session.alloc(len).expect_err("more than the device has");
        match &error {
            Error::OutOfMemory { asked, free, .. } => {
                assert!(*asked >= len, "{len}: {error}");
                assert!(*free < DEVICE, "{len}: {error}");
            }
            Error::Invalid { .. } => {}
            _ => panic!("{len}: {error}"),
        }
    }
    drop(kept);
    session.alloc(MIB).expect("a refusal takes nothing");
}

#[test]
fn regions_of_no_bytes_are_refused() {
    let error = Session::builder(device())
        .region_bytes(0)
        .open()
        .expect_err("regions of no bytes");
    assert_eq!(
        error.to_string(),
        "region size is 0 bytes, but must be at least 1 byte"
    );
}
