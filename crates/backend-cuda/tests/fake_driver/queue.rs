//! What is queued on streams: events, words, host functions.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gpu_api::groups::*;
use gpu_api::{CaptureStatus, Error, EventKind, HostPtr, RawStream, StreamOp, WordPtr};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::fake::{self, GPU, Kind};
use crate::{Case, Library};

macro_rules! case {
    ($name:ident) => {
        Case {
            name: stringify!($name),
            library: Library::Whole,
            environment: &[],
            run: $name,
        }
    };
}

pub const CASES: &[Case] = &[
    case!(events_are_made_with_the_flags_of_their_kind),
    case!(not_ready_is_an_answer),
    case!(every_failure_of_a_registration_leaves_nothing),
    case!(words_are_whole_pages_registered_once),
    case!(a_registration_that_could_not_be_ended_keeps_its_context),
    case!(a_batch_writes_in_order_and_has_bounds),
    case!(a_batch_behind_another_stream_is_one_visit),
    case!(a_host_function_runs_once_and_its_panic_stays_inside),
    case!(a_host_function_that_could_not_be_queued_is_dropped),
    case!(the_legacy_stream_beside_a_capture_counts_as_captured),
];

/// Mapped pages for words.
pub struct Words(*mut std::ffi::c_void);

impl Words {
    pub fn new() -> Words {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: `mmap_anonymous`: no fixed address is asked for.
        let start =
            unsafe { mmap_anonymous(ptr::null_mut(), Self::LEN, protection, MapFlags::SHARED) };
        Words(start.expect("two pages can be mapped"))
    }

    const LEN: usize = 8192;

    pub fn start(&self) -> HostPtr {
        HostPtr(self.0.expose_provenance())
    }

    pub fn len(&self) -> usize {
        Self::LEN
    }

    fn read(&self, index: usize) -> u64 {
        // SAFETY: `ptr::add`: the cases read the first words of two pages.
        let word = unsafe { self.0.cast::<u64>().add(index) };
        // SAFETY: `ptr::read_volatile`: the word is mapped.
        unsafe { word.read_volatile() }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: `munmap`: the whole mapping, which only this value names.
        unsafe { munmap(self.0, Self::LEN) }.expect("it is mapped");
    }
}

fn events_are_made_with_the_flags_of_their_kind() {
    let cuda = fake::cuda();
    let local = cuda
        .create_event(GPU, EventKind::Local)
        .expect("an event can be made");
    let shared = cuda
        .create_event(GPU, EventKind::Interprocess)
        .expect("an event can be made");
    assert_eq!(
        (
            fake::flags(Kind::Event, local.0),
            fake::flags(Kind::Event, shared.0)
        ),
        (2, 6)
    );
    // SAFETY: `event_handle`: made above.
    assert!(unsafe { cuda.event_handle(shared) }.is_ok());
    // SAFETY: `event_handle`: made above.
    assert!(unsafe { cuda.event_handle(local) }.is_err());
    let stream = cuda.create_stream(GPU).expect("a stream can be made");
    assert_eq!(fake::flags(Kind::Stream, stream.handle), 1);
    fake::each_failure(
        || cuda.create_event(GPU, EventKind::Local),
        |made| {
            // SAFETY: `destroy_event`: made by the attempt.
            unsafe { cuda.destroy_event(made) }.expect("no failure is left");
        },
    );
    fake::each_failure(
        || cuda.create_stream(GPU),
        |made| {
            // SAFETY: `destroy_stream`: made by the attempt.
            unsafe { cuda.destroy_stream(made) }.expect("no failure is left");
        },
    );
}

fn not_ready_is_an_answer() {
    let cuda = fake::cuda();
    let event = cuda
        .create_event(GPU, EventKind::Local)
        .expect("an event can be made");
    let stream = cuda.create_stream(GPU).expect("a stream can be made");
    for (pending, done) in [(1, false), (0, true)] {
        fake::set_pending(pending);
        // SAFETY: `query_event`: made above.
        assert_eq!(unsafe { cuda.query_event(event) }.ok(), Some(done));
        // SAFETY: `query_stream`: made above.
        assert_eq!(unsafe { cuda.query_stream(stream) }.ok(), Some(done));
    }
    fake::fail("cuEventQuery", 700);
    // SAFETY: `query_event`: made above.
    let error = unsafe { cuda.query_event(event) }.expect_err("a broken context is no answer");
    assert_eq!(fake::code(&error), Some(700));
}

fn every_failure_of_a_registration_leaves_nothing() {
    let cuda = fake::cuda();
    let words = Words::new();
    fake::each_failure(
        // SAFETY: `register_words`: `words` is mapped until the registration has ended.
        || unsafe { cuda.register_words(words.start(), words.len()) },
        |_| {
            // SAFETY: `unregister_words`: registered by the attempt, and no operation is queued.
            unsafe { cuda.unregister_words(words.start()) }.expect("no failure is left");
        },
    );
}

fn words_are_whole_pages_registered_once() {
    let cuda = fake::cuda();
    let words = Words::new();
    let start = words.start();
    for (start, len) in [
        (HostPtr(start.0 + 8), 4096),
        (start, 0),
        (start, 100),
        (HostPtr(0), 4096),
    ] {
        // SAFETY: `register_words`: refused before the driver is asked.
        let error = unsafe { cuda.register_words(start, len) }.expect_err("no whole pages");
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    }
    // SAFETY: `register_words`: `words` is mapped until the registration has ended.
    let word = unsafe { cuda.register_words(start, words.len()) }.expect("whole pages");
    assert_eq!(word, WordPtr(start.0 as u64));
    assert_eq!(fake::flags(Kind::Registered, start.0 as u64), 3);
    // SAFETY: `register_words`: `words` is mapped until the registration has ended.
    let error = unsafe { cuda.register_words(start, words.len()) }.expect_err("it is registered");
    assert_eq!(fake::code(&error), Some(712));
    assert_eq!(
        fake::live(Kind::Registered),
        1,
        "the first registration stands"
    );
    // SAFETY: `unregister_words`: registered above, and no operation is queued.
    unsafe { cuda.unregister_words(start) }.expect("it is registered");
    assert!(matches!(
        // SAFETY: `unregister_words`: refused: it is not registered.
        unsafe { cuda.unregister_words(start) },
        Err(Error::Invalid { .. })
    ));
    assert_eq!(fake::violations(), 0);
}

fn a_registration_that_could_not_be_ended_keeps_its_context() {
    let cuda = fake::cuda();
    let words = Words::new();
    // SAFETY: `register_words`: `words` is mapped until the end of the case, where nothing is
    // queued.
    unsafe { cuda.register_words(words.start(), words.len()) }.expect("whole pages");
    fake::fail("cuMemHostUnregister", 999);
    assert_eq!(
        // SAFETY: `unregister_words`: registered above, and no operation is queued.
        unsafe { cuda.unregister_words(words.start()) }
            .err()
            .as_ref()
            .and_then(fake::code),
        Some(999)
    );
    fake::clear_trace();
    // SAFETY: `unregister_words`: refused before the driver is asked: that is what is tested.
    let error = unsafe { cuda.unregister_words(words.start()) }.expect_err("it leaked");
    assert!(
        matches!(&error, Error::Invalid { got, .. } if got.contains("leaked")),
        "{error:?}"
    );
    assert!(fake::trace().is_empty());
    drop(cuda);
    assert_eq!(fake::retained(0), 1, "what leaked keeps its context");
}

fn a_batch_writes_in_order_and_has_bounds() {
    let cuda = fake::cuda();
    let words = Words::new();
    let stream = cuda.create_stream(GPU).expect("a stream can be made");
    // SAFETY: `register_words`: `words` is mapped until the end of the case, where nothing is
    // queued.
    let first = unsafe { cuda.register_words(words.start(), words.len()) }.expect("whole pages");
    for count in [1_usize, 8, 9, 255] {
        let ops: Vec<_> = (0..count)
            .map(|i| StreamOp::Write {
                word: first.word(i),
                value: (count * 1000 + i) as u64,
            })
            .collect();
        fake::clear_trace();
        // SAFETY: `stream_batch`: the stream was made and the words registered above.
        unsafe { cuda.stream_batch(stream, &ops) }.expect("within bounds");
        assert_eq!(fake::trace(), ["cuStreamBatchMemOp_v2"]);
        for i in 0..count {
            assert_eq!(words.read(i), (count * 1000 + i) as u64);
        }
    }
    let twice = [
        StreamOp::Write {
            word: first,
            value: 1,
        },
        StreamOp::Write {
            word: first,
            value: 2,
        },
    ];
    // SAFETY: `stream_batch`: the stream was made and the words registered above.
    unsafe { cuda.stream_batch(stream, &twice) }.expect("within bounds");
    assert_eq!(words.read(0), 2);
    for ops in [
        vec![],
        vec![
            StreamOp::WaitGeq {
                word: first,
                value: 0
            };
            256
        ],
    ] {
        assert!(matches!(
            // SAFETY: `stream_batch`: refused before the driver is asked.
            unsafe { cuda.stream_batch(stream, &ops) },
            Err(Error::Invalid { .. })
        ));
    }
    fake::fail("cuStreamBatchMemOp_v2", 801);
    assert!(matches!(
        // SAFETY: `stream_batch`: the stream was made and the words registered above.
        unsafe { cuda.stream_batch(stream, &twice) },
        Err(Error::Unsupported { .. })
    ));
}

fn a_host_function_runs_once_and_its_panic_stays_inside() {
    let cuda = fake::cuda();
    let stream = cuda.create_stream(GPU).expect("a stream can be made");
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    let function = Box::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    // SAFETY: `host_function`: the stream was made above.
    unsafe { cuda.host_function(stream, function) }.expect("it can be queued");
    assert_eq!(
        (runs.load(Ordering::Relaxed), Arc::strong_count(&runs)),
        (1, 1)
    );

    struct Loud;
    impl Drop for Loud {
        fn drop(&mut self) {
            panic!("a payload that panics when it is dropped");
        }
    }
    // SAFETY: `host_function`: the stream was made above.
    unsafe { cuda.host_function(stream, Box::new(|| std::panic::panic_any(Loud))) }
        .expect("it can be queued");
}

fn a_host_function_that_could_not_be_queued_is_dropped() {
    let cuda = fake::cuda();
    let stream = cuda.create_stream(GPU).expect("a stream can be made");
    let held = Arc::new(());
    let moved = Arc::clone(&held);
    fake::fail("cuLaunchHostFunc", 719);
    // SAFETY: `host_function`: the stream was made above.
    let error = unsafe { cuda.host_function(stream, Box::new(move || drop(moved))) }
        .expect_err("it failed");
    assert_eq!(fake::code(&error), Some(719));
    assert_eq!(Arc::strong_count(&held), 1, "the closure is gone");
}

fn a_batch_behind_another_stream_is_one_visit() {
    let cuda = fake::cuda();
    let words = Words::new();
    let [lane, stream] = [(); 2].map(|()| cuda.create_stream(GPU).expect("a stream can be made"));
    let event = cuda
        .create_event(GPU, EventKind::Local)
        .expect("an event can be made");
    // SAFETY: `register_words`: `words` is mapped until the end of the case, where nothing is
    // queued.
    let first = unsafe { cuda.register_words(words.start(), words.len()) }.expect("whole pages");
    let ops = [
        StreamOp::Write {
            word: first,
            value: 1,
        },
        StreamOp::Write {
            word: first.word(1),
            value: 2,
        },
    ];
    fake::clear_trace();
    // SAFETY: `batch_behind`: all were made, and the words registered, above.
    unsafe { cuda.batch_behind(lane, &[(event, stream)], &ops) }.expect("nobody captures");
    let calls = [
        "cuStreamIsCapturing",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuStreamBatchMemOp_v2",
    ];
    assert_eq!(fake::trace(), calls);
    assert_eq!((words.read(0), words.read(1)), (1, 2));
    fake::set_capture(1);
    fake::clear_trace();
    // SAFETY: `batch_behind`: as above.
    let refused = unsafe { cuda.batch_behind(lane, &[(event, RawStream::new(GPU, 0))], &ops) };
    assert!(
        matches!(refused, Err(Error::Capturing { stream: 0, .. })),
        "{refused:?}"
    );
    // SAFETY: `batch_uncaptured`: as above.
    let refused = unsafe { cuda.batch_uncaptured(RawStream::new(GPU, 0), &ops) };
    assert!(
        matches!(refused, Err(Error::Capturing { stream: 0, .. })),
        "{refused:?}"
    );
    assert!(
        fake::trace()
            .iter()
            .all(|call| call == "cuStreamIsCapturing"),
        "nothing was recorded or queued"
    );
    assert_eq!((fake::depth(), fake::mode(), fake::violations()), (0, 0, 0));
}

fn the_legacy_stream_beside_a_capture_counts_as_captured() {
    let cuda = fake::cuda();
    let stream = cuda.create_stream(GPU).expect("a stream can be made");
    assert_eq!(
        // SAFETY: `capture_status`: made above.
        unsafe { cuda.capture_status(stream) }.ok(),
        Some(CaptureStatus::None)
    );
    fake::set_capture(1);
    assert_eq!(
        // SAFETY: `capture_status`: a default stream is always alive.
        unsafe { cuda.capture_status(RawStream::new(GPU, 0)) }.ok(),
        Some(CaptureStatus::Active)
    );
    // SAFETY: `host_function`: a default stream is always alive.
    let error = unsafe { cuda.host_function(RawStream::new(GPU, 0), Box::new(|| ())) }
        .expect_err("it would be captured");
    assert!(
        matches!(error, Error::Capturing { stream: 0, .. }),
        "{error:?}"
    );
}
