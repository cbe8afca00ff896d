//! Several vendors in one process: a host device and a HIP one, the latter from a library that
//! stands in for AMD's.
//!
//! The library is chosen before anything else, so this is a program of its own; it starts itself
//! again as the process that consumes from both.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use gpu_ipc::hip::{self, Proof, Step, Version};
use gpu_ipc::{
    After, BackendKind, Error, Gpu, Participant, ParticipantId, Session, Stream, To, Wait, detect,
};
use harness::{Child, say};
use libtest_mimic::{Arguments, Failed, Trial};
use serde::{Deserialize, Serialize};

/// The process that consumes.
#[derive(Serialize, Deserialize)]
struct Consumer {
    /// Where the sockets are, each named after its vendor.
    sockets: PathBuf,
}

/// What it says.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
enum Said {
    Joined(u64),
    Stamp(u64),
}

const VENDORS: [BackendKind; 2] = [BackendKind::Host, BackendKind::Hip];

fn main() {
    if let Some(Consumer { sockets }) = harness::role() {
        return consume(&sockets);
    }
    let proof = Proof::new(Version(71_400_000), [Step::Vmm, Step::Words]);
    for (name, value) in [
        (hip::LIBRARY, library().into_os_string()),
        (hip::PROOF, OsString::from(proof.to_string())),
        ("GPU_IPC_SHIM", "host".into()),
        ("GPU_IPC_SHIM_VERSION", "71400000".into()),
        // Both vendors' devices are shared memory here, and must not have one identity.
        ("GPU_IPC_SHIM_INJECT", "no-uuid".into()),
        ("GPU_IPC_HOST_DEVICES", "1".into()),
    ] {
        // SAFETY: `set_var` asks that no other thread reads the environment: this is the only
        // thread.
        unsafe { env::set_var(name, value) };
    }
    let trial = |name: &str, run: fn()| {
        Trial::test(name, move || {
            run();
            Ok::<(), Failed>(())
        })
    };
    let trials = vec![
        trial("one_process_shares_of_two_vendors_with_another", both),
        trial("a_device_of_one_vendor_is_none_of_the_other", apart),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Finds the library beside this program, where Cargo puts it.
fn library() -> PathBuf {
    let program = env::current_exe().expect("a program has a path");
    program.with_file_name("libhip_on_cuda.so")
}

fn gpu(kind: BackendKind) -> Gpu {
    detect()
        .and_then(|found| found.first(kind))
        .unwrap_or_else(|error| panic!("no {kind}: {error}"))
}

fn both() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut sessions = Vec::new();
    for kind in VENDORS {
        let gpu = gpu(kind);
        let session = Session::builder(gpu.clone())
            .socket(directory.path().join(kind.name()))
            .open()
            .expect("a session");
        let stream = Stream::create(&gpu).expect("a stream");
        sessions.push((kind, gpu, session, stream));
    }
    let mut consumer = Child::<Vec<u8>, Said>::start(&Consumer {
        sockets: directory.path().into(),
    });
    let mut blocks = Vec::new();
    for (kind, gpu, session, stream) in &sessions {
        let said = consumer.answer();
        let Some(Said::Joined(id)) = said else {
            panic!("it does not connect: {said:?}")
        };
        let participant = ParticipantId(id);
        let block = session.alloc(4096).expect("there is room");
        let stamp = (*kind as u64).to_le_bytes();
        // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until it is
        // done: it is waited for.
        unsafe {
            gpu.backend()
                .copy_to_device(stream.raw(), block.device_ptr(), stamp.as_ptr(), 8)
        }
        .expect("it queues");
        let descriptor = block
            .share(To::Participant(participant), After::Stream(stream))
            .expect("shared");
        consumer.tell(&descriptor.as_bytes().to_vec());
        stream.synchronize().expect("it runs");
        blocks.push(block);
    }
    for kind in VENDORS {
        assert_eq!(consumer.answer(), Some(Said::Stamp(kind as u64)));
    }
    assert!(consumer.wait().success());
}

/// Connects to both sessions, and says what it finds in the block of each.
fn consume(directory: &Path) {
    let sides = VENDORS.map(|kind| {
        let gpu = gpu(kind);
        let participant = Participant::builder(gpu.clone())
            .connect(directory.join(kind.name()))
            .expect("connected");
        say(&Said::Joined(participant.id().0));
        (Stream::create(&gpu).expect("a stream"), gpu, participant)
    });
    for (stream, gpu, participant) in &sides {
        let bytes: Vec<u8> = harness::next().expect("a descriptor");
        let block = participant
            .claim(&bytes, Wait::Stream(stream), None)
            .expect("claimed");
        let mut stamp = [0; 8];
        // SAFETY: `copy_to_host` asks for a live stream and ranges that are valid until it is done:
        // it is waited for.
        unsafe {
            gpu.backend()
                .copy_to_host(stream.raw(), stamp.as_mut_ptr(), block.device_ptr(), 8)
        }
        .expect("queued");
        stream.synchronize().expect("it runs");
        say(&Said::Stamp(u64::from_le_bytes(stamp)));
    }
}

fn apart() {
    let [host, hip] = VENDORS.map(gpu);
    assert_eq!(
        (host.kind(), hip.kind()),
        (BackendKind::Host, BackendKind::Hip)
    );
    assert!(
        hip.caps().fd
            && hip.caps().stream_writes
            && !hip.caps().stream_waits
            && !hip.caps().event_ipc
    );
    let found = detect().expect("the environment is right");
    for (kind, other) in [(BackendKind::Host, &hip), (BackendKind::Hip, &host)] {
        let error = found
            .device(kind, other.uuid())
            .expect_err("it is the other's");
        assert!(
            matches!(error, Error::NoDevice { backend, .. } if backend == kind),
            "{error}"
        );
    }
    // A session of one, and a device of the other to map its memory with.
    let directory = tempfile::tempdir().expect("a directory");
    let session = Session::builder(host)
        .socket(directory.path().join("s"))
        .open()
        .expect("a session");
    let error = Participant::builder(hip)
        .connect(session.socket_path())
        .expect_err("another vendor's device");
    let text = error.to_string();
    assert!(
        matches!(error, Error::Refused { .. })
            && text.contains("hip device")
            && text.contains("host device"),
        "{text}"
    );
}
