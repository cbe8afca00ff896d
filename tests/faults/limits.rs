//! A consumer that finds no descriptor, or no memory: it is told, or dies of it, and its producer loses nothing.

use std::time::Duration;

use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, DeviceId, Gpu, ParticipantId, Session, Stream, To};

use crate::agent::{Agent, write_stamp};
use crate::{Case, comes};

pub const CASES: &[Case] = &[
    ("limits::a_consumer_without_descriptors", || until_it_passes("files")),
    ("limits::a_consumer_without_memory", || until_it_passes("memory")),
];

fn until_it_passes(what: &str) {
    let gpu = Gpu::new(HostBackend::new(HostConfig::default()).expect("it opens"), DeviceId(0)).expect("a device");
    let stream = Stream::create(&gpu).expect("a stream");
    let dir = tempfile::tempdir().expect("a directory");
    let builder = Session::builder(gpu.clone()).socket(dir.path().join("s"));
    let session = builder.quarantine(Duration::ZERO).open().expect("a session");
    for number in 0.. {
        assert!(number < 400, "a consumer does not get on with that much {what} either");
        let passed = consume(&gpu, &stream, &session, &format!("{what} {number}"));
        assert!(
            comes(|| {
                session.collect();
                let stats = session.stats();
                (stats.live_blocks, stats.participants, stats.leaked_blocks) == (0, 0, 0)
            }),
            "{what} {number}: {:?}",
            session.stats()
        );
        if passed {
            println!("{what}: {number} lives with too few");
            return;
        }
    }
}

/// Shares two blocks with a consumer that may fail at any time, and says whether it did not.
pub fn consume(gpu: &Gpu, stream: &Stream, session: &Session, fault: &str) -> bool {
    let mut agent = Agent::start(fault);
    agent.tell(session.socket_path().to_str().expect("a plain name"));
    let first = agent.hear();
    let Some(id) = first.as_deref().and_then(|word| word.parse().ok()) else {
        return ended(agent, fault, first.as_deref());
    };
    for stamp in 1..=2u64 {
        let block = session.alloc(4096).expect("there is room");
        write_stamp(gpu, stream, &block, stamp).expect("it writes");
        let shared = block.share(To::Participant(ParticipantId(id)), After::Stream(stream));
        let Ok(descriptor) = shared else {
            // It is gone already.
            let line = agent.hear();
            return ended(agent, fault, line.as_deref());
        };
        let hex: String = descriptor.as_bytes().iter().map(|b| format!("{b:02x}")).collect();
        agent.tell(&hex);
        let line = agent.hear();
        if line.as_deref() != Some("claimed") {
            return ended(agent, fault, line.as_deref());
        }
        // While it holds the block, the producer lets go, and gives its other bytes to others.
        drop(block);
        session.collect();
        let other = session.alloc(4096).expect("there is room");
        write_stamp(gpu, stream, &other, 99).expect("it writes");
        agent.tell("read");
        let line = agent.hear();
        if line.as_deref() != Some(format!("read {stamp}").as_str()) {
            return ended(agent, fault, line.as_deref());
        }
    }
    let line = agent.hear();
    ended(agent, fault, line.as_deref())
}

/// Lets an agent end, whose last line says how it went.
fn ended(agent: Agent, fault: &str, line: Option<&str>) -> bool {
    let (status, complaint) = agent.end();
    assert!(!complaint.contains("wrong:") && !complaint.contains("panicked"), "{fault}: {complaint}");
    match line {
        Some("passed") => true,
        Some(line) if line.starts_with("failed ") => {
            assert!(status.success(), "{fault}: {status} after {line}: {complaint}");
            false
        }
        // Whoever finds no memory may abort, which the Rust runtime does.
        None if fault.starts_with("memory") => false,
        other => panic!("{fault}: {other:?}, {status}: {complaint}"),
    }
}
