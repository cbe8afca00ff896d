//! A block that lives on and is shared over and over: its ended leases take up neither counts, nor
//! slots, nor memory.

use std::time::Duration;

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Gpu};
use ipc_rc::{
    After, Participant, ReceivedBlock, SentBlock, Session, SessionBuilder, To, Wait, inspect,
};

const WATCHDOG: Duration = Duration::from_secs(120);
/// Slots of a participant's first counter file.
const FIRST: usize = 8192;

struct Stage {
    _dir: tempfile::TempDir,
    session: Session,
    participant: Participant,
    block: SentBlock,
}

fn stage(choose: impl FnOnce(SessionBuilder) -> SessionBuilder) -> Stage {
    let dir = tempfile::tempdir().expect("a directory");
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("a device");
    let builder = Session::builder(gpu.clone()).socket(dir.path().join("s"));
    let session = choose(builder).open().expect("a session");
    let participant = Participant::builder(gpu)
        .connect(session.socket_path())
        .expect("connected");
    let block = session.alloc(4096).expect("there is room");
    Stage {
        _dir: dir,
        session,
        participant,
        block,
    }
}

impl Stage {
    fn lease(&self) -> Result<ReceivedBlock, gpu_api::Error> {
        let to = To::Participant(self.participant.id());
        let descriptor = self.block.share(to, After::Done)?;
        let claimed = self
            .participant
            .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG));
        Ok(claimed.expect("it was granted"))
    }
}

#[test]
fn leases_that_ended_on_a_living_block_are_counted_neither_by_it_nor_by_reports() {
    let stage = stage(|builder| builder);
    let held = stage.lease().expect("shared");
    for _ in 0..1000 {
        drop(stage.lease().expect("shared"));
    }
    let holder = |stats: &ipc_rc::Stats| (stats.holders[0].leases, stats.holders[0].bytes);
    let stats = stage.session.stats();
    assert_eq!((stats.in_flight, stats.held), (0, 1), "{stats:?}");
    assert_eq!(holder(&stats), (1, 4096), "{stats:?}");
    let report = inspect(stage.session.socket_path(), Some(WATCHDOG)).expect("it answers");
    assert_eq!((report.stats.held, holder(&report.stats)), (1, (1, 4096)));
    assert_eq!(stage.block.outstanding(), 1);
    drop(held);
    assert_eq!(stage.block.outstanding(), 0);
}

#[test]
fn slots_of_leases_that_ended_on_a_living_block_serve_before_a_share_is_refused() {
    let stage = stage(|builder| builder.max_slots(9000));
    let held = stage.lease().expect("shared");
    for number in 0..2 * FIRST {
        let lease = stage.lease();
        drop(lease.unwrap_or_else(|error| panic!("share {number} with one lease held: {error}")));
    }
    // With all of them held the refusal names the limit that holds.
    let mut all = vec![held];
    let error = loop {
        match stage.lease() {
            Ok(lease) => all.push(lease),
            Err(error) => break error,
        }
    };
    assert_eq!(all.len(), FIRST);
    assert!(error.to_string().contains("the limit is 8192"), "{error}");
    all.pop();
    stage.lease().expect("one has ended");
}

#[test]
fn a_limit_below_the_first_table_is_that_table() {
    let stage = stage(|builder| builder.max_slots(1));
    let leases: Vec<_> = (0..FIRST)
        .map(|_| stage.lease().expect("the first table is always there"))
        .collect();
    let error = stage.lease().expect_err("all are held");
    assert!(error.to_string().contains("the limit is 8192"), "{error}");
    drop(leases);
}

#[test]
fn a_block_that_is_shared_over_and_over_takes_no_second_counter_file() {
    let stage = stage(|builder| builder);
    let held = stage.lease().expect("shared");
    for number in 0..4 * FIRST {
        let to = To::Participant(stage.participant.id());
        let descriptor = stage.block.share(to, After::Done).expect("shared");
        assert_eq!(descriptor.fields().file, 0, "share {number}");
        let claimed = stage
            .participant
            .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG));
        drop(claimed.expect("it was granted"));
    }
    drop(held);
}
