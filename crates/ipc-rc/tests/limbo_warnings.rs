//! What a session says of blocks that others hold: once when they are very many, and when it ends.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Gpu};
use ipc_rc::{After, Participant, Session, To, Wait};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps every warning as a line.
struct Listener;

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        SAID.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(line.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0 += &format!("{}={value:?} ", field.name());
    }
}

fn said(part: &str) -> Vec<String> {
    let said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    said.iter()
        .filter(|line| line.contains(part))
        .cloned()
        .collect()
}

fn until_said(part: &str) -> String {
    let watchdog = Instant::now() + Duration::from_secs(120);
    loop {
        if let Some(line) = said(part).pop() {
            return line;
        }
        assert!(Instant::now() < watchdog, "nothing was said of it");
        std::thread::yield_now();
    }
}

#[test]
fn very_many_blocks_in_limbo_are_warned_of_once_and_so_is_an_end_with_blocks_held() {
    tracing::subscriber::set_global_default(Listener).expect("the only one");
    let gpu = Gpu::new(
        HostBackend::new(HostConfig::default()).expect("it opens"),
        DeviceId(0),
    )
    .expect("a device");
    let dir = tempfile::tempdir().expect("a directory");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu)
        .connect(dir.path().join("s"))
        .expect("connected");
    let to = To::Participant(session.participants()[0]);
    let mut held = Vec::new();
    for number in 0..1200 {
        let block = session.alloc(4096).expect("room");
        let descriptor = block.share(to, After::Done).expect("shared");
        held.push(
            participant
                .claim(descriptor.as_bytes(), Wait::Host, None)
                .expect("claimed"),
        );
        if number == 998 {
            drop(block);
            assert_eq!(said("very many"), [""; 0]);
        }
    }
    let line = until_said("very many");
    let pid = std::process::id();
    assert!(
        line.contains(&format!("process {pid} (")) && line.contains(" leases, "),
        "{line}"
    );
    assert_eq!(said("very many").len(), 1, "once is enough");
    assert_eq!(said("a session ends"), [""; 0]);
    drop(session);
    let line = until_said("a session ends");
    assert!(
        line.contains("blocks=1200") && line.contains("1200 leases"),
        "{line}"
    );
    drop(held);
}
