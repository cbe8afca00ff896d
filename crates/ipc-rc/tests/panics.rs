//! A panic on the session's thread, of a source of regions that is asked there, leaves nobody
//! waiting: who shares, claims or connects is told, and the application has a notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use allocators::{Piece, Region, RegionSource, SourceUsage};
use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu, Result};
use ipc_rc::{After, ClaimError, Claims, Participant, Session, SessionNotice, To, Wait};

/// Long enough for the slowest machine; a test that waits longer hangs.
const WATCHDOG: Duration = Duration::from_secs(120);

fn wait_until<T>(what: &str, mut comes: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = comes() {
            return value;
        }
        assert!(start.elapsed() < WATCHDOG, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

/// A source that panics, once it is told to, when it hears that nobody maps a region any more.
#[derive(Debug)]
struct Panicking {
    inner: Arc<dyn RegionSource>,
    panics: AtomicBool,
}

impl RegionSource for Panicking {
    fn take(&self, len: u64, align: u64) -> Result<Piece> {
        self.inner.take(len, align)
    }

    fn give_back(&self, piece: Piece) {
        self.inner.give_back(piece);
    }

    fn trim(&self) -> Result<u64> {
        self.inner.trim()
    }

    fn usage(&self) -> SourceUsage {
        self.inner.usage()
    }

    fn unpinned(&self, _: &Region) {
        assert!(!self.panics.load(Ordering::Relaxed), "on purpose");
    }
}

#[test]
fn a_panic_on_the_sessions_thread_is_told_to_everybody() {
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
    let path = session.socket_path().to_owned();
    // It unmaps at once what it does not use.
    let first = Participant::builder(gpu.clone())
        .mapping_cache(0, 0)
        .connect(&path)
        .expect("connected");
    let second = Participant::builder(gpu.clone())
        .connect(&path)
        .expect("connected");
    let block = session.alloc(4096).expect("there is room");
    let ticket = block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("shared");
    let descriptor = block
        .share(To::Participant(first.id()), After::Done)
        .expect("shared");
    let received = first
        .claim(descriptor.as_bytes(), Wait::Host, None)
        .expect("claimed");
    let (waiter, (done, waited)) = (session.clone(), std::sync::mpsc::channel());
    std::thread::spawn(move || done.send(waiter.wait_for_participants(3, None)));
    source.panics.store(true, Ordering::Relaxed);
    drop(received);
    wait_until("a notice of the failure", || {
        session
            .next_notice()
            .filter(|notice| matches!(notice, SessionNotice::Failed))
    });
    // A claim that asks the session, and needs its answer, ends though no time was set.
    let asked = second.claim(ticket.as_bytes(), Wait::Host, None);
    assert!(matches!(asked, Err(ClaimError::ProducerGone)), "{asked:?}");
    wait_until("the other participant to be told", || {
        first.is_producer_gone().then_some(())
    });
    let shared = block.share(To::Participant(second.id()), After::Done);
    let error = shared.expect_err("nobody would answer for it");
    assert!(
        error.to_string().contains("the session's thread"),
        "{error}"
    );
    let waited = waited
        .recv_timeout(WATCHDOG)
        .expect("it waits for ever for participants that cannot come");
    let error = waited.expect_err("a third cannot come");
    assert!(
        error.to_string().contains("the session's thread"),
        "{error}"
    );
    let late = Participant::builder(gpu)
        .connect(&path)
        .expect_err("nobody listens");
    assert!(matches!(late, Error::Connect { .. }), "{late}");
    // Its bytes stay: this end proves nothing about who holds them.
    assert_eq!(session.stats().live_blocks, 1);
}
