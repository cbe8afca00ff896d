//! Threads of one participant that want the same region while one of them maps it.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Gpu, Participant, ParticipantId, Session, To, Wait};
use harness::{WATCHDOG, comes, say};

use crate::Case;
use crate::agent::{self, Fault, Said, Told, hear, hear_descriptor};
use crate::faulty::Faulty;

/// The cases of this file.
pub const CASES: &[Case] = &[(
    "mapping::a_claim_that_waits_for_another_threads_mapping_goes_on_with_it",
    two_threads_want_one_region,
)];

/// The mapping is slow, and no message of the producer's comes meanwhile or afterwards.
fn two_threads_want_one_region() {
    let dir = tempfile::tempdir().expect("a folder");
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
    let session = Session::builder(gpu)
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let mut agent = agent::start(Fault::TwoThreads);
    let said = agent.ask(&Told::Path(dir.path().join("s")));
    let Said::Joined(id) = said else {
        panic!("it does not connect: {said:?}")
    };
    let to = To::Participant(ParticipantId(id));
    let blocks = [(); 2].map(|()| session.alloc(4096).expect("there is room"));
    for block in &blocks {
        let descriptor = block.share(to, After::Done).expect("it is there");
        agent.tell(&Told::Claim(descriptor.as_bytes().to_vec()));
    }
    assert_eq!(agent.answer(), Some(Said::Passed), "a claim waits for ever");
    let status = agent.end();
    assert!(status.success(), "{}", agent.complaint());
}

/// Claims a block while another thread maps the region of both.
pub fn claim_beside(faulty: &Arc<Faulty<HostBackend>>, gpu: &Gpu, socket: &Path) {
    let participant = Participant::builder(gpu.clone())
        .timeout(Some(WATCHDOG))
        .connect(socket)
        .expect("it listens");
    say(&Said::Joined(participant.id().0));
    let (first, second) = (hear_descriptor(), hear_descriptor());
    faulty.hold_mappings(true);
    let (done, ended) = channel();
    let claim = |bytes: Vec<u8>| {
        let (participant, done) = (participant.clone(), done.clone());
        std::thread::spawn(move || {
            let thread = rustix::thread::gettid().as_raw_nonzero();
            let _ = done.send(Err(thread));
            let claimed = participant.claim(&bytes, Wait::None, None).map(drop);
            let _ = done.send(Ok(claimed));
        })
    };
    claim(first);
    let _thread = ended.recv();
    assert!(comes(|| faulty.held_mappings() == 1), "nobody maps");
    claim(second);
    let Ok(Err(thread)) = ended.recv() else {
        panic!("a claim that is done before it began")
    };
    // Asleep, it waits for the mapping: it has nothing else to wait for.
    let is_asleep = || {
        let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('S'))
    };
    assert!(comes(is_asleep), "it does not wait");
    faulty.hold_mappings(false);
    let both = (0..2).all(|_| matches!(ended.recv_timeout(WATCHDOG), Ok(Ok(Ok(())))));
    say(&if both {
        Said::Passed
    } else {
        Said::Failed("one waits for ever".into())
    });
    hear();
}
