//! No thread that the library starts takes a signal of the program.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_ipc::backend::thread::FAULTS;
use gpu_ipc::broker::{Broker, Client, Limits, Options};
use gpu_ipc::{BackendKind, Participant, Session, Stream, detect};

/// Each thread of this process by its number: its name, and the signals that it blocks.
fn threads() -> BTreeMap<u32, (String, u64)> {
    let mut threads = BTreeMap::new();
    for entry in std::fs::read_dir("/proc/self/task").expect("a folder") {
        let path = entry.expect("an entry").path();
        // One that ends meanwhile has no files any more.
        let (Ok(name), Ok(status)) = (
            std::fs::read_to_string(path.join("comm")),
            std::fs::read_to_string(path.join("status")),
        ) else {
            continue;
        };
        let number = path
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok());
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        if let (Some(number), Some(mask)) = (number, mask) {
            threads.insert(number, (name.trim().to_owned(), mask));
        }
    }
    threads
}

/// The only test of this process: no other starts threads meanwhile.
#[test]
fn every_thread_that_the_library_starts_blocks_the_programs_signals() {
    let before = threads();
    let dir = tempfile::tempdir().expect("a folder");
    let gpu = detect()
        .and_then(|found| found.first(BackendKind::Host))
        .expect("a device");
    let options = Options {
        dir: dir.path().join("objects"),
        gpus: Arc::new(|| Ok(detect()?.gpus().to_vec())),
        limits: Limits::default(),
        allowed: Default::default(),
        keeper: None,
    };
    std::fs::create_dir(&options.dir).expect("a folder");
    let objects = options.dir.clone();
    let broker = Broker::open(options).expect("a broker");
    // The program's own thread, with its mask.
    let (sender, number) = std::sync::mpsc::channel();
    let _running = std::thread::spawn(move || {
        let own = std::fs::read_link("/proc/thread-self").expect("its number");
        let own: u32 = own
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok())
            .expect("a number");
        sender.send(own).expect("the test waits");
        broker.run();
    });
    let program = number.recv().expect("a thread");
    let client = Client::builder(gpu.clone())
        .dir(objects)
        .connect()
        .expect("a client");
    let stream = Stream::create(&gpu).expect("a stream");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu.clone())
        .connect(session.socket_path())
        .expect("connected");
    // Closes and unmaps what a participant leaves: the threads for calls that may block.
    for _ in 0..4 {
        let other = Participant::builder(gpu.clone())
            .connect(session.socket_path())
            .expect("connected");
        other.close(Some(Duration::from_secs(60))).expect("left");
    }
    // Stray descriptors are closed aside.
    let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let _ = session.accept(OwnedFd::from(ours));

    let needed = [
        "gpu-ipc-host",
        "gpu-ipc-session",
        "gpu-ipc-partici",
        "gpu-ipc-blockin",
        "gpu-ipc-closer",
        "gpu-ipc-objects",
        "gpu-ipc-worksho",
        "gpu-ipc-deposit",
    ];
    let free = FAULTS.into_iter().chain([9, 19, 32, 33]);
    let all = free.fold(u64::MAX, |mask, signal| mask & !(1 << (signal - 1)));
    let mut missing: Vec<&str> = needed.to_vec();
    let begun = Instant::now();
    while !missing.is_empty() {
        for (number, (name, mask)) in threads() {
            if before.contains_key(&number) || number == program {
                continue;
            }
            // A thread that begins or ends blocks more for a moment: the C library sees to that.
            let free = all & !mask;
            assert_eq!(free, 0, "{name} does not block {free:#x}");
            missing.retain(|needed| *needed != name);
        }
        assert!(
            begun.elapsed() < Duration::from_secs(120),
            "not seen: {missing:?}"
        );
        std::thread::yield_now();
    }
    drop((client, stream, participant, session));
}
