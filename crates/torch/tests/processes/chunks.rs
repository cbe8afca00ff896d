//! Expandable segments of another process, opened chunk by chunk as PyTorch writes them.

use std::time::Duration;

use gpu_api::Error;
use gpu_ipc_torch::{Fields, Receiver};
use harness::WATCHDOG;
use ipc_rc::{Stream, Wait};

use crate::Case;
use crate::agent::{self, Agent, Answer, Command, bytes, fill, open_gpu, stop};
use crate::side::Side;

pub const CASES: &[Case] = &[
    (
        "an_expandable_segment_is_opened_by_pidfd",
        an_expandable_segment_is_opened_by_pidfd,
    ),
    (
        "chunks_that_cannot_be_opened_are_refused_and_stay_counted",
        chunks_that_cannot_be_opened_are_refused_and_stay_counted,
    ),
    (
        "a_read_is_checked_and_in_stream_order",
        a_read_is_checked_and_in_stream_order,
    ),
    (
        "a_fill_is_checked_and_the_counter_waits_for_it",
        a_fill_is_checked_and_the_counter_waits_for_it,
    ),
];

/// What `_share_cuda_` writes of a storage in chunks of another process, each named by `word`.
fn chunked(
    pid: u32,
    chunks: u64,
    words: &[u8],
    counter: &str,
    (offset, len): (u64, u64),
) -> Fields {
    let mut handle = vec![2, b'e'];
    handle.extend(u64::from(pid).to_ne_bytes());
    handle.extend(agent::CHUNK.to_ne_bytes());
    handle.extend(chunks.to_ne_bytes());
    handle.extend(words);
    Fields {
        handle: Some(handle),
        size_bytes: len,
        offset_bytes: offset,
        ref_counter_handle: Some(counter.as_bytes().to_vec()),
        event_handle: Some(vec![0; 64]),
        ..Fields::default()
    }
}

/// Lets the other process export this many chunks, and returns the counter's file and the
/// descriptors' numbers.
fn exported(agent: &mut Agent, chunks: u8) -> (String, Vec<i32>) {
    match agent.ask(&Command::Export { chunks }) {
        Answer::Exported { file, fds } => (file, fds),
        other => panic!("{other:?}"),
    }
}

fn numbers(fds: &[i32]) -> Vec<u8> {
    fds.iter().flat_map(|fd| fd.to_ne_bytes()).collect()
}

fn an_expandable_segment_is_opened_by_pidfd() {
    let mut agent = Agent::start();
    let gpu = open_gpu();
    let (receiver, stream) = (
        Receiver::new(gpu.clone()).expect("a thread"),
        Stream::create(&gpu).expect("a stream"),
    );
    for chunks in [1, 3] {
        let (file, fds) = exported(&mut agent, chunks);
        let chunks = u64::from(chunks);
        // All but 512 bytes at either end.
        let len = chunks * agent::CHUNK - 1024;
        let fields = chunked(agent.pid(), chunks, &numbers(&fds), &file, (512, len));
        let storage = receiver
            .open(&fields.decode().expect("good"), Wait::None, None)
            .expect("a parent may");
        let seen = bytes(&stream, storage.device_ptr(), len);
        assert!(
            (512..)
                .zip(&seen)
                .all(|(at, byte)| u64::from(*byte) == 0x50 + at / agent::CHUNK),
            "{chunks} chunks"
        );
        assert_eq!(
            (agent.ask(&Command::Exported), receiver.stats().segments),
            (Answer::Count(1), 1)
        );
        drop(storage);
        assert!(receiver.wait_released(WATCHDOG));
        assert_eq!(
            (agent.ask(&Command::Exported), receiver.stats().segments),
            (Answer::Count(0), 0)
        );
    }
}

fn chunks_that_cannot_be_opened_are_refused_and_stay_counted() {
    let mut agent = Agent::start();
    let receiver = Receiver::new(open_gpu()).expect("a thread");
    let (file, fds) = exported(&mut agent, 2);
    let pid = agent.pid();
    // One that is not open, one that is no device memory, and what only an NVLink network can open.
    for (words, expected) in [
        (numbers(&[fds[0], 1 << 20]), "pidfd_getfd"),
        (numbers(&[fds[0], 0]), "a file descriptor to import"),
        (vec![0; 128], "fabric handles"),
    ] {
        let fields = chunked(pid, 2, &words, &file, (0, 2 * agent::CHUNK));
        let error = receiver
            .open(&fields.decode().expect("good"), Wait::None, None)
            .expect_err("not memory");
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(
            (agent.ask(&Command::Exported), receiver.stats().segments),
            (Answer::Count(1), 0)
        );
    }
    let fields = chunked(pid, 2, &numbers(&fds), &file, (0, 2 * agent::CHUNK));
    assert!(
        receiver
            .open(&fields.decode().expect("good"), Wait::None, None)
            .is_ok()
    );
}

fn a_read_is_checked_and_in_stream_order() {
    let side = Side::new();
    let (receiver, foreign) = (
        Receiver::new(side.gpu.clone()).expect("a thread"),
        Stream::create(&open_gpu()).expect("a stream"),
    );
    let stream = Stream::create(&side.gpu).expect("a stream");
    let mut agent = Agent::start();
    let (file, fds) = exported(&mut agent, 1);
    let fields = chunked(agent.pid(), 1, &numbers(&fds), &file, (512, 4096));
    let storage = receiver
        .open(&fields.decode().expect("good"), Wait::None, None)
        .expect("a parent may");
    let mut read = vec![0; 4097];
    let refused = storage.read(&stream, &mut read);
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    let refused = storage.read(&foreign, &mut read[..4096]);
    assert!(
        matches!(refused, Err(Error::Mismatch { .. })),
        "{refused:?}"
    );
    assert_eq!(read, [0; 4097], "a read that failed left something");
    let gate = stop(&stream);
    fill(&stream, storage.device_ptr(), 9, 4096);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| storage.read(&stream, &mut read[..4096]));
        assert!(!reading.is_finished(), "it did not wait for the stream");
        drop(gate);
        reading.join().expect("it waits").expect("it reads");
    });
    assert!(read[..4096] == [9; 4096] && read[4096] == 0);
    storage
        .read(&stream, &mut [])
        .expect("nothing is always there");
}

fn a_fill_is_checked_and_the_counter_waits_for_it() {
    let (gpu, foreign) = (open_gpu(), Stream::create(&open_gpu()).expect("a stream"));
    let (receiver, stream) = (
        Receiver::new(gpu.clone()).expect("a thread"),
        Stream::create(&gpu).expect("a stream"),
    );
    let mut agent = Agent::start();
    let (file, fds) = exported(&mut agent, 1);
    let fields = chunked(agent.pid(), 1, &numbers(&fds), &file, (512, 4096));
    let storage = receiver
        .open(&fields.decode().expect("good"), Wait::None, None)
        .expect("a parent may");
    storage.fill(&stream, 9).expect("queued");
    let refused = storage.fill(&foreign, 8);
    assert!(
        matches!(refused, Err(Error::Mismatch { .. })),
        "{refused:?}"
    );
    let mut read = vec![0; 4096];
    storage.read(&stream, &mut read).expect("it reads");
    assert_eq!(read, [9; 4096]);
    let gate = stop(&stream);
    storage.fill(&stream, 7).expect("queued");
    drop(storage);
    assert!(
        !receiver.wait_released(Duration::ZERO),
        "the fill has not begun"
    );
    drop(gate);
    assert!(receiver.wait_released(WATCHDOG));
}
