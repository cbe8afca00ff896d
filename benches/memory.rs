//! What 100,000 outstanding leases take, in all processes: `cargo bench --bench memory`.
//!
//! Producer and consumer are one process here, so that its proportional set size counts their shared pages once. The
//! blocks' own bytes are not counted: they are the user's.

use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, DeviceId, Gpu, Participant, ReceivedBlock, Session, To, Wait};

const LEASES: usize = 100_000;

const CASES: [(&str, usize); 3] =
    [("of one block", 1), ("of 1,000 blocks", 1_000), ("each of a block of its own", LEASES)];

/// Each case in a process of its own: an allocator does not give back what an earlier one took.
fn main() {
    if let Some(case) = std::env::var("CASE").ok().and_then(|n| n.parse::<usize>().ok()) {
        measure(CASES[case]);
        return;
    }
    for case in 0..CASES.len() {
        let program = std::env::current_exe().expect("it has a path");
        let status = std::process::Command::new(program).env("CASE", case.to_string()).status();
        assert!(status.expect("it starts").success());
    }
}

fn measure((what, blocks): (&str, usize)) {
    let dir = tempfile::tempdir().expect("a directory");
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
    let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
    let participant = Participant::builder(gpu).connect(session.socket_path()).expect("connected");
    let to = To::Participant(participant.id());
    let claim = |block: &gpu_ipc::SentBlock| -> ReceivedBlock {
        let descriptor = block.share(to, After::Done).expect("shared");
        participant.claim(descriptor.as_bytes(), Wait::None, None).expect("claimed")
    };
    let block = session.alloc(256).expect("there is room");
    drop(claim(&block));
    // The vectors are the benchmark's own: touched before the first look.
    let mut leases: Vec<Option<ReceivedBlock>> = (0..LEASES).map(|_| None).collect();
    let mut sent = Vec::with_capacity(LEASES);
    let before = resident();
    for lease in &mut leases {
        if sent.len() < blocks {
            sent.push(session.alloc(256).expect("there is room"));
        }
        *lease = Some(claim(&sent[sent.len() - 1]));
    }
    let grown = resident().saturating_sub(before);
    let each = grown / LEASES as u64;
    println!("{LEASES} leases {what}: {:.1} MiB, {each} bytes a lease", grown as f64 / f64::from(1 << 20));
}

/// The process' proportional set size, in bytes.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("the kernel tells");
    let line = text.lines().find(|line| line.starts_with("Pss:")).expect("the kernel tells");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a number");
    kib * 1024
}
