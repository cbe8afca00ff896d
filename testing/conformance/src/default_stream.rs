//! Default streams: those of the device that is named with them, whatever is current on the calling
//! thread.
//!
//! Each case makes the stream wait behind a host function, so that what is queued behind it can be
//! told from what would be queued on another device's default stream, which is idle.

use crate::can;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use gpu_ipc::backend::{CaptureStatus, DeviceId, EventKind, RawStream, StreamOp};
use gpu_ipc::{Error, Gpu};

use crate::current::make_current;
use crate::event::Mark;
use crate::queue::{Queue, alloc, free};
use crate::word::Words;
use crate::{Case, wait_until};

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "default_stream::is_its_devices_on_a_thread_without_a_device",
        run: without_a_device,
    },
    Case {
        name: "default_stream::is_its_devices_whatever_device_is_current",
        run: with_every_device,
    },
    Case {
        name: "default_stream::stays_its_devices_when_the_device_changes",
        run: after_a_change,
    },
    Case {
        name: "default_stream::has_one_identity_on_every_thread",
        run: identities,
    },
    Case {
        name: "default_stream::of_a_thread_is_that_of_the_calling_thread",
        run: per_thread,
    },
    Case {
        name: "default_stream::leaves_the_current_device_as_it_was",
        run: left_alone,
    },
];

/// Runs `body` on a thread that nobody used before.
fn on_a_thread(body: impl FnOnce() + Send) {
    thread::scope(|scope| {
        scope
            .spawn(body)
            .join()
            .expect("the case holds on a thread of its own")
    });
}

fn devices(gpu: &Gpu) -> impl Iterator<Item = DeviceId> {
    (0..gpu.backend().device_count().expect("it counts")).map(DeviceId)
}

/// Does all that the library does with a stream, on a default stream of the device; `change` comes
/// between the calls.
fn everything(gpu: &Gpu, handle: u64, mut change: impl FnMut()) {
    // The device's stream is one for all cases: one at a time sees what it queued itself.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (backend, stream) = (gpu.backend(), RawStream::new(gpu.device(), handle));
    let (words, memory) = (Words::new(gpu), alloc(gpu, 4096));
    let (before, after, own) = (
        Mark::new(gpu, EventKind::Local),
        Mark::new(gpu, EventKind::Local),
        Queue::new(gpu),
    );
    let (go, gate) = channel::<()>();
    change();
    // SAFETY: `stream_info` asks for a live stream: a default stream is.
    let info = unsafe { backend.stream_info(stream) }.expect("a default stream is one of ours");
    assert_eq!(info.device, gpu.device());
    change();
    // SAFETY: `host_function` asks for a live stream that nobody captures: no case captures.
    unsafe {
        backend.host_function(
            stream,
            Box::new(move || {
                // An error is the sign: the other end was dropped.
                let _ = gate.recv();
            }),
        )
    }
    .expect("it queues");
    change();
    assert!(
        // SAFETY: `query_stream` asks for a live stream.
        !unsafe { backend.query_stream(stream) }.expect("it tells"),
        "the function went to another stream"
    );
    change();
    assert_eq!(
        // SAFETY: `capture_status` asks for a live stream.
        unsafe { backend.capture_status(stream) }.expect("it tells"),
        CaptureStatus::None
    );
    let value = 0x5eed_u64.to_le_bytes();
    change();
    // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until it is done:
    // waited for below.
    unsafe { backend.copy_to_device(stream, memory.base, value.as_ptr(), 8) }.expect("it queues");
    change();
    // SAFETY: `record_event` asks for a live event and stream of one device.
    unsafe { backend.record_event(before.raw, stream) }
        .expect("an event of the stream's device is recorded on it");
    if can(gpu.caps().stream_writes, "stream writes") {
        change();
        let write = [StreamOp::Write {
            word: words.ptr(0),
            value: 1,
        }];
        // SAFETY: `batch_uncaptured` asks for a live stream and registered words: `words` outlives
        // it.
        unsafe { backend.batch_uncaptured(stream, &write) }.expect("a share queues");
        change();
        // SAFETY: `batch_behind` asks for live streams and events of one device, and registered
        // words.
        unsafe {
            backend.batch_behind(
                own.raw(),
                &[(after.raw, stream)],
                &[StreamOp::Write {
                    word: words.ptr(1),
                    value: 1,
                }],
            )
        }
        .expect("a drop queues");
    }
    assert!(!before.is_done(), "the event went to another stream");
    assert_eq!(
        values(&words),
        [0, 0],
        "a word was written before the work that it stands for"
    );
    drop(go);
    change();
    // SAFETY: `synchronize_stream` asks for a live stream.
    unsafe { backend.synchronize_stream(stream) }.expect("it runs");
    wait_until("the event", || before.is_done());
    if can(gpu.caps().stream_writes, "stream writes") {
        own.synchronize();
        assert_eq!(values(&words), [1, 1]);
    }
    if can(gpu.caps().stream_waits, "stream waits") {
        // A claim's wait holds up the device's stream, and no other.
        change();
        let wait = [StreamOp::WaitGeq {
            word: words.ptr(2),
            value: 1,
        }];
        // SAFETY: `stream_batch` asks for a live stream and registered words: `words` outlives it.
        unsafe { backend.stream_batch(stream, &wait) }.expect("a claim queues");
        change();
        // SAFETY: `query_stream` asks for a live stream.
        let idle = unsafe { backend.query_stream(stream) };
        words.get(2).store(1, Ordering::Release);
        assert!(!idle.expect("it tells"), "the wait went to another stream");
    }
    change();
    // SAFETY: `stream_wait_event` asks for a live stream and event.
    unsafe { backend.stream_wait_event(stream, before.raw) }.expect("it queues");
    let mut seen = [0; 8];
    change();
    // SAFETY: `copy_to_host` asks for a live stream and ranges that are valid until it is done:
    // waited for below.
    unsafe { backend.copy_to_host(stream, seen.as_mut_ptr(), memory.base, 8) }.expect("it queues");
    change();
    // SAFETY: `synchronize_stream` asks for a live stream.
    unsafe { backend.synchronize_stream(stream) }.expect("it runs");
    assert_eq!(seen, value);
    let extra = backend.create_stream(gpu.device()).expect("a stream");
    change();
    // SAFETY: `destroy_stream` asks for a stream that nobody uses afterwards: just made.
    unsafe { backend.destroy_stream(extra) }.expect("a stream goes whatever device is current");
    free(gpu, memory);
}

fn values(words: &Words<'_>) -> [u64; 2] {
    [0, 1].map(|index| words.get(index).load(Ordering::Acquire))
}

fn without_a_device(gpu: &Gpu) {
    for handle in [0, 1] {
        on_a_thread(|| everything(gpu, handle, || ()));
    }
}

fn with_every_device(gpu: &Gpu) {
    for handle in [0, 1, RawStream::PER_THREAD] {
        for current in devices(gpu) {
            on_a_thread(|| {
                make_current(gpu, current);
                everything(gpu, handle, || ());
            });
        }
    }
}

fn after_a_change(gpu: &Gpu) {
    let mut others = devices(gpu).collect::<Vec<_>>().into_iter().cycle();
    on_a_thread(|| {
        everything(gpu, 0, || {
            make_current(gpu, others.next().expect("there is one"))
        })
    });
}

fn identities(gpu: &Gpu) {
    let identity = || {
        // SAFETY: `stream_info` asks for a live stream: a default stream is.
        unsafe { gpu.backend().stream_info(RawStream::new(gpu.device(), 0)) }
            .expect("it tells")
            .identity
    };
    let first = identity();
    for current in devices(gpu) {
        on_a_thread(|| {
            assert_eq!(identity(), first, "on a thread without a device");
            make_current(gpu, current);
            assert_eq!(identity(), first, "with {current} current");
        });
    }
}

fn per_thread(gpu: &Gpu) {
    let (backend, stream) = (
        gpu.backend(),
        RawStream::new(gpu.device(), RawStream::PER_THREAD),
    );
    let (go, gate) = channel::<()>();
    let done = Arc::new(AtomicBool::new(false));
    let seen = done.clone();
    let hold = Box::new(move || {
        let _ = gate.recv();
        seen.store(true, Ordering::Release);
    });
    // SAFETY: `host_function` asks for a live stream that nobody captures.
    unsafe { backend.host_function(stream, hold) }.expect("it queues");
    on_a_thread(|| {
        // SAFETY: `synchronize_stream` asks for a live stream: the other thread's own, which has
        // nothing to do.
        unsafe { backend.synchronize_stream(stream) }.expect("it runs");
        assert!(
            !done.load(Ordering::Acquire),
            "it waited for another thread's stream"
        );
    });
    drop(go);
    // SAFETY: `synchronize_stream` asks for a live stream.
    unsafe { backend.synchronize_stream(stream) }.expect("it runs");
    assert!(done.load(Ordering::Acquire));
}

fn left_alone(gpu: &Gpu) {
    // What is current afterwards shows in what an application's own calls mean: on the host backend
    // it can be asked.
    if !gpu.kind().in_host_memory() {
        return;
    }
    on_a_thread(|| {
        everything(gpu, 0, || ());
        assert_eq!(gpu_ipc::host::HostBackend::current_device(), None);
        for current in devices(gpu) {
            make_current(gpu, current);
            everything(gpu, 0, || ());
            assert_eq!(gpu_ipc::host::HostBackend::current_device(), Some(current));
        }
    });
    let stranger = RawStream::new(DeviceId(u32::MAX), 0);
    // SAFETY: `stream_info` is asked of a device that is not there, and refuses.
    let refused =
        unsafe { gpu.backend().stream_info(stranger) }.expect_err("there is no such device");
    assert!(matches!(refused, Error::Driver { .. }), "{refused}");
}
