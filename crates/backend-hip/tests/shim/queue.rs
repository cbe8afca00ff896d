//! Streams, the functions they call, and streams of others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gpu_api::groups::*;
use gpu_api::{DeviceId, Error, RawStream};

use crate::library::{stream_create, stream_destroy};
use crate::{Case, GPU, Library, WHOLE, hip};

pub const CASES: &[Case] = &[
    Case {
        name: "streams_call_functions",
        library: WHOLE,
        environment: &[],
        run: called,
    },
    Case {
        name: "streams_call_functions_by_the_older_call",
        library: Library::Without(&["hipLaunchHostFunc"]),
        environment: &[],
        run: called,
    },
    Case {
        name: "streams_of_others_are_told_apart",
        library: WHOLE,
        environment: TWO,
        run: foreign,
    },
    Case {
        name: "streams_of_others_are_adopted_where_they_cannot_be_told_apart",
        library: Library::Without(&["hipStreamGetId"]),
        environment: TWO,
        run: adopted,
    },
    Case {
        name: "a_stream_whose_device_cannot_be_told_is_where_its_owner_says",
        library: Library::Without(&["hipStreamGetId", "hipStreamGetDevice"]),
        environment: TWO,
        run: told,
    },
    Case {
        name: "words_that_the_runtime_refuses_are_an_error",
        library: WHOLE,
        environment: &[("GPU_IPC_SHIM_INJECT", "no-words")],
        run: no_words,
    },
];

const TWO: &[(&str, &str)] = &[("GPU_IPC_HOST_DEVICES", "2")];

fn called() {
    let hip = hip();
    let stream = hip.create_stream(GPU).expect("a stream");
    let count = Arc::new(AtomicU32::new(0));
    for n in 0..20 {
        let count = count.clone();
        let function = Box::new(move || {
            assert_eq!(count.fetch_add(1, Ordering::Relaxed), n, "out of order");
        });
        // SAFETY: `host_function`: the stream is alive.
        unsafe { hip.host_function(stream, function) }.expect("it queues");
    }
    // SAFETY: `host_function`: the stream is alive.
    unsafe { hip.host_function(stream, Box::new(|| panic!("this one is meant to"))) }
        .expect("it queues");
    // SAFETY: `synchronize_stream`: the stream is alive.
    unsafe { hip.synchronize_stream(stream) }.expect("it runs");
    assert_eq!(count.load(Ordering::Relaxed), 20);
    // The runtime keeps nothing of what was called.
    assert_eq!(Arc::strong_count(&count), 1);
}

/// Makes a stream as an application does.
fn made() -> RawStream {
    let mut stream = 0;
    assert_eq!(stream_create(&raw mut stream, 1), 0);
    RawStream::new(GPU, stream)
}

fn foreign() {
    let hip = hip();
    let (first, second) = (made(), made());
    // SAFETY: `stream_info`: both are alive.
    let info = |stream| unsafe { hip.stream_info(stream) }.expect("it tells");
    assert_ne!(info(first).identity, info(second).identity);
    assert_eq!(info(first).device, GPU);
    assert_eq!(info(RawStream::new(GPU, 0)).device, GPU);
    for stream in [first, second] {
        assert_eq!(stream_destroy(stream.handle), 0);
    }
}

fn adopted() {
    let hip = hip();
    let stream = made();
    // SAFETY: `stream_info`: the stream is alive.
    let info = || unsafe { hip.stream_info(stream) };
    let error = info().expect_err("nothing tells it from a later one");
    assert!(error.to_string().contains("adopt_stream"), "{error}");
    // SAFETY: `adopt_stream`: the stream lives until it is forgotten.
    unsafe { hip.adopt_stream(stream) }.expect("its device is told");
    let identity = info().expect("it is known").identity;
    assert_eq!(info().expect("it is known").identity, identity);
    assert!(hip.forget_stream(stream) && !hip.forget_stream(stream));
    assert_eq!(stream_destroy(stream.handle), 0);
    // SAFETY: `adopt_stream`: a default stream is refused.
    let error = unsafe { hip.adopt_stream(RawStream::new(GPU, 2)) }.expect_err("it has no end");
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
}

fn told() {
    let hip = hip();
    let stream = made();
    assert!(matches!(
        // SAFETY: `stream_info`: the stream is alive.
        unsafe { hip.stream_info(stream) },
        Err(Error::Unsupported { .. })
    ));
    // SAFETY: `adopt_stream`: the stream lives until it is forgotten, and is of this device.
    unsafe { hip.adopt_stream(stream) }.expect("who made it knows its device");
    assert_eq!(
        // SAFETY: `stream_info`: the stream is alive.
        unsafe { hip.stream_info(stream) }
            .expect("it is known")
            .device,
        GPU
    );
    let elsewhere = RawStream::new(DeviceId(1), stream.handle);
    // SAFETY: `stream_info`: the stream is alive.
    let refused = unsafe { hip.stream_info(elsewhere) }.expect_err("it is of another device");
    assert!(
        matches!(
            refused,
            Error::Mismatch {
                what: "the stream's device",
                ..
            }
        ),
        "{refused:?}"
    );
    assert!(hip.forget_stream(stream));
    let own = hip.create_stream(DeviceId(1)).expect("a stream");
    assert_eq!(
        // SAFETY: `stream_info`: the stream is alive.
        unsafe { hip.stream_info(own) }.expect("it is ours").device,
        DeviceId(1)
    );
}

fn no_words() {
    let hip = hip();
    let stream = hip.create_stream(GPU).expect("a stream");
    let op = gpu_api::StreamOp::Write {
        word: gpu_api::WordPtr(64),
        value: 1,
    };
    // SAFETY: `stream_batch`: the runtime refuses before it looks at the word.
    let error = unsafe { hip.stream_batch(stream, &[op]) }.expect_err("the runtime refuses");
    assert!(
        matches!(&error, Error::Driver { source, .. } if source.code == 801),
        "{error:?}"
    );
}
