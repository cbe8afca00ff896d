//! A connect that fails after its welcome leaves nothing behind: the next one of the same process is as good as the
//! first.
//!
//! Alone in its process: it takes the process' memory away.

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu};
use ipc_rc::{After, Participant, Session, To, Wait};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Enough for a counter file on both sides, and less than a thread's stack.
const LEFT: u64 = 1 << 20;

/// Returns the bytes of addresses that this process uses.
fn in_use() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("proc is mounted");
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

fn limit_memory_to(current: Option<u64>) {
    let maximum = getrlimit(Resource::As).maximum;
    setrlimit(Resource::As, Rlimit { current, maximum }).expect("a limit below the maximum");
}

#[test]
fn one_that_finds_no_thread_leaves_nothing_registered() {
    let dir = tempfile::tempdir().expect("a directory");
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
    let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
    let connect = || Participant::builder(gpu.clone()).connect(session.socket_path());
    // So that whatever is made once is there, and a thread's stack that is kept is in use.
    let first = connect().expect("connected");
    for _ in 0..20 {
        limit_memory_to(Some(in_use() + LEFT));
        let failed = connect();
        limit_memory_to(None);
        let error = failed.expect_err("there is no room for a thread's stack");
        assert!(matches!(error, Error::System { call: "starting a thread", .. }), "{error:?}");
    }
    let participant = connect().expect("connected: nothing is registered twice");
    let block = session.alloc(4096).expect("there is room");
    let descriptor = block.share(To::Participant(participant.id()), After::Done).expect("shared");
    participant.claim(descriptor.as_bytes(), Wait::Host, None).expect("claimed");
    drop(first);
}
