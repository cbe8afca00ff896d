//! The calling thread: its current context and its capture mode are after every call what they were
//! before.

use std::os::fd::AsFd;
use std::ptr;
use std::sync::Arc;

use backend_cuda::CudaBackend;
use gpu_api::groups::*;
use gpu_api::{
    Access, CaptureStatus, DeviceId, DevicePtr, Error, EventKind, HostMemory, HostPtr, RawStream,
    Result, Sharing,
};
use gpu_api::{EventHandle, StreamOp};

use crate::fake::{self, GPU};
use crate::queue::Words;
use crate::{Case, Library};

macro_rules! case {
    ($name:ident, $devices:literal) => {
        Case {
            name: stringify!($name),
            library: Library::Whole,
            environment: &[("FAKE_DEVICES", $devices)],
            run: $name,
        }
    };
}

pub const CASES: &[Case] = &[
    case!(every_call_leaves_the_context_and_the_mode, "2"),
    case!(no_call_destroys_an_applications_capture, "1"),
    case!(a_failure_in_the_thread_s_own_calls_leaves_the_thread, "1"),
    case!(default_streams_are_those_of_their_own_device, "8"),
    case!(
        a_default_stream_beside_another_context_of_its_device_is_refused,
        "2"
    ),
    case!(a_stream_of_another_device_is_refused_at_once, "2"),
    case!(contexts_go_in_and_out, "2"),
    case!(what_is_queued_beside_any_context_names_its_own_device, "2"),
    case!(
        when_the_driver_is_gone_every_call_says_so_and_nothing_hangs,
        "2"
    ),
];

/// Makes every call of the trait once.
fn everything(cuda: &Arc<CudaBackend>) {
    let words = Words::new();
    let fd = fake::foreign_fd(0x20_0000);
    cuda.device_count().expect("a call");
    cuda.device_info(GPU).expect("a call");
    cuda.memory_info(GPU).expect("a call");
    cuda.caps(GPU).expect("a call");
    let plain = cuda.alloc(GPU, 1, Sharing::Handle).expect("a call").base;
    let made = cuda.alloc(GPU, 1, Sharing::Fd).expect("a call").base;
    cuda.address_range(made).expect("a call");
    cuda.classify(DevicePtr(8)).expect("a call");
    cuda.export_handle(plain).expect("a call");
    drop(cuda.export_fd(made).expect("a call"));
    let imported = cuda
        .import_fd(GPU, fd.as_fd(), 1, Access::ReadWrite)
        .expect("a call");
    let mut fds = [fd.try_clone(), fd.try_clone()]
        .into_iter()
        .map(|fd| Ok(fd.expect("a descriptor")));
    let several = cuda
        .import_fds(GPU, &mut fds, 0x20_0000, Access::ReadWrite)
        .expect("a call");
    let opened = cuda
        .open_handle(GPU, &fake::foreign_handle())
        .expect("a call");
    let host = cuda
        .host_alloc(
            GPU,
            64,
            HostMemory {
                pinned: true,
                numa_node: None,
            },
        )
        .expect("a call");
    let event = cuda
        .create_event(GPU, EventKind::Interprocess)
        .expect("a call");
    let stream = cuda.create_stream(GPU).expect("a call");
    let mut bytes = [0; 64];
    bytes[..5].copy_from_slice(b"EVENT");
    let other = cuda.open_event(GPU, &EventHandle(bytes)).expect("a call");
    let mut buffer = [0_u8; 8];
    macro_rules! calls {
        ($($call:expr;)*) => {
            $(
                // SAFETY: the method: everything was made above, is used only here, and given back
                // once, last.
                unsafe { $call }.expect("a call");
            )*
        };
    }
    calls! {
        cuda.record_event(event, stream);
        cuda.query_event(event);
        cuda.stream_wait_event(stream, event);
        cuda.event_handle(event);
        cuda.query_stream(stream);
        cuda.synchronize_stream(stream);
        cuda.stream_info(stream);
        cuda.capture_status(stream);
        cuda.host_function(stream, Box::new(|| ()));
        cuda.copy_to_device(stream, made, buffer.as_ptr(), 8);
        cuda.copy_to_host(stream, buffer.as_mut_ptr(), made, 8);
        cuda.copy(stream, made, plain, 8);
        cuda.fill(stream, made, 1, 8);
    }
    // SAFETY: `register_words`: `words` is mapped until it is dropped, after the registration
    // ended.
    let word = unsafe { cuda.register_words(words.start(), words.len()) }.expect("a call");
    calls! {
        cuda.stream_batch(stream, &[StreamOp::Write { word, value: 1 }]);
        cuda.batch_uncaptured(stream, &[StreamOp::Write { word, value: 2 }]);
        cuda.batch_behind(stream, &[(event, stream)], &[StreamOp::Write { word, value: 3 }]);
        cuda.unregister_words(words.start());
        cuda.destroy_event(event);
        cuda.destroy_event(other);
        cuda.destroy_stream(stream);
        cuda.host_free(host);
        cuda.close(imported);
        cuda.close(several);
        cuda.close(opened);
        cuda.free(plain);
        cuda.free(made);
    }
    cuda.forget_marks();
    assert_eq!(fake::all_live(), []);
    assert_eq!(fake::violations(), 0);
}

/// At the end of a process the driver's own end comes before that of threads and of what is dropped
/// last.
fn when_the_driver_is_gone_every_call_says_so_and_nothing_hangs() {
    let cuda = fake::cuda();
    let words = Words::new();
    let fd = fake::foreign_fd(0x20_0000);
    let [plain, made] = [Sharing::Handle, Sharing::Fd]
        .map(|sharing| cuda.alloc(GPU, 1, sharing).expect("room").base);
    let imported = cuda
        .import_fd(GPU, fd.as_fd(), 1, Access::ReadWrite)
        .expect("it fits");
    let host = cuda
        .host_alloc(
            GPU,
            64,
            HostMemory {
                pinned: true,
                numa_node: None,
            },
        )
        .expect("room");
    let event = cuda
        .create_event(GPU, EventKind::Interprocess)
        .expect("an event");
    let stream = cuda.create_stream(GPU).expect("a stream");
    // SAFETY: `register_words`: `words` is mapped until it is dropped, when nothing is queued.
    let word = unsafe { cuda.register_words(words.start(), words.len()) }.expect("whole pages");
    let write = [StreamOp::Write { word, value: 1 }];
    let mut buffer = [0_u8; 8];
    fake::set_pending(1);
    fake::deinitialize();
    macro_rules! refused {
        ($($call:expr;)*) => {
            $(
                #[allow(unused_unsafe, reason = "one macro for the methods that ask for something and the others")]
                // SAFETY: the method: everything was made above, is used only here, and given back
                // once.
                let error = unsafe { $call }.map(|_| ()).expect_err(stringify!($call));
                assert!(fake::code(&error) == Some(4), "{}: {error:?}", stringify!($call));
            )*
        };
    }
    refused! {
            cuda.device_info(GPU);
            cuda.memory_info(GPU);
            cuda.enable_peer_access(GPU, DeviceId(1));
            cuda.alloc(GPU, 1, Sharing::Handle);
            cuda.address_range(DevicePtr(8));
            cuda.classify(DevicePtr(8));
            cuda.export_handle(plain);
            cuda.open_handle(GPU, &fake::foreign_handle());
            cuda.export_fd(made);
            cuda.open_event(GPU, &EventHandle([0; 64]));
            cuda.create_event(GPU, EventKind::Local);
            cuda.create_stream(GPU);
            cuda.record_event(event, stream);
            cuda.query_event(event);
            cuda.stream_wait_event(stream, event);
            cuda.event_handle(event);
            cuda.query_stream(stream);
            cuda.synchronize_stream(stream);
            cuda.stream_info(stream);
            cuda.capture_status(stream);
            cuda.host_function(stream, Box::new(|| ()));
            cuda.copy_to_device(stream, made, buffer.as_ptr(), 8);
            cuda.copy_to_host(stream, buffer.as_mut_ptr(), made, 8);
            cuda.copy(stream, made, plain, 8);
            cuda.fill(stream, made, 1, 8);
            cuda.stream_batch(stream, &write);
            cuda.batch_uncaptured(stream, &write);
            cuda.batch_behind(stream, &[(event, stream)], &write);
            cuda.unregister_words(words.start());
            cuda.destroy_event(event);
            cuda.destroy_stream(stream);
            cuda.host_free(host);
            cuda.close(imported);
            cuda.free(plain);
            cuda.free(made);
    }
    fake::clear_trace();
    drop(cuda);
    assert!(
        fake::trace().is_empty(),
        "what is left keeps its context: {:?}",
        fake::trace()
    );
}

fn every_call_leaves_the_context_and_the_mode() {
    let cuda = fake::cuda();
    everything(&cuda);
    assert_eq!((fake::depth(), fake::mode()), (0, 0));
    let own = cuda.context(DeviceId(1)).expect("there are two devices");
    for context in [
        fake::foreign_context(),
        ptr::with_exposed_provenance_mut(own as usize),
    ] {
        for mode in [0, 1, 2] {
            assert_eq!(fake::push(context), 0);
            fake::set_mode(mode);
            everything(&cuda);
            assert_eq!(
                (fake::depth(), fake::mode(), fake::current()),
                (1, mode, context)
            );
            let mut popped = ptr::null_mut();
            assert_eq!(fake::pop(&raw mut popped), 0);
        }
    }
}

fn no_call_destroys_an_applications_capture() {
    let cuda = fake::cuda();
    fake::set_capture(1);
    everything(&cuda);
    assert_eq!(fake::capture(), 1);
    drop(cuda);
    assert_eq!((fake::capture(), fake::retained(0)), (1, 0));
}

fn a_failure_in_the_thread_s_own_calls_leaves_the_thread() {
    let cuda = fake::cuda();
    let stream = cuda.create_stream(GPU).expect("a stream can be made");
    for call in [
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
    ] {
        fake::fail(call, 719);
        // SAFETY: `query_stream`: made above.
        let error = unsafe { cuda.query_stream(stream) }.expect_err("the call failed");
        assert_eq!(fake::code(&error), Some(719), "{call}");
        assert_eq!(
            (fake::depth(), fake::mode(), fake::violations()),
            (0, 0, 0),
            "{call}"
        );
    }
    // A driver that knows no mode on a thread without a context is asked again with one.
    fake::fail("cuThreadExchangeStreamCaptureMode", 201);
    // SAFETY: `query_stream`: made above.
    assert!(unsafe { cuda.query_stream(stream) }.is_ok_and(|done| done));
    assert_eq!((fake::depth(), fake::mode(), fake::violations()), (0, 0, 0));
}

/// What a share, a claim, a drop and a synchronisation ask of a stream: each is queued in the
/// primary context of the stream's own device, whatever is current.
fn default_streams_are_those_of_their_own_device() {
    const DEVICES: u32 = 8;
    let cuda = fake::cuda();
    let words = Words::new();
    // SAFETY: `register_words`: `words` is mapped until the end of the case, where nothing is
    // queued.
    let word = unsafe { cuda.register_words(words.start(), words.len()) }.expect("whole pages");
    for device in (0..DEVICES).map(DeviceId) {
        let event = cuda
            .create_event(device, EventKind::Local)
            .expect("an event can be made");
        let memory = cuda
            .alloc(device, 1, Sharing::Handle)
            .expect("there is room")
            .base;
        for handle in [0, 1, 2] {
            let stream = RawStream::new(device, handle);
            // Without a current context, in the stream's own, and in each other's.
            for current in [None].into_iter().chain((0..DEVICES).map(Some)) {
                let context =
                    current.map(|device| cuda.context(DeviceId(device)).expect("there are eight"));
                let context =
                    context.map(|context| ptr::with_exposed_provenance_mut(context as usize));
                context
                    .into_iter()
                    .for_each(|context| assert_eq!(fake::push(context), 0));
                fake::clear_trace();
                let mut buffer = [0_u8; 8];
                let mut queue = |what: &str, call: &mut dyn FnMut(&mut [u8; 8]) -> Result<()>| {
                    call(&mut buffer).unwrap_or_else(|error| {
                        panic!("{what} on {stream:?}, {current:?}: {error}")
                    });
                };
                // SAFETY: the methods, here and below: a default stream is always alive; the event,
                // the memory and the registration were made above, and the fake driver copies
                // nothing.
                queue("a share", &mut |_| unsafe {
                    cuda.batch_uncaptured(stream, &[StreamOp::Write { word, value: 1 }])
                });
                // SAFETY: as above.
                queue("a claim", &mut |_| unsafe {
                    cuda.stream_batch(stream, &[StreamOp::WaitGeq { word, value: 1 }])
                });
                // SAFETY: as above.
                queue("a drop", &mut |_| unsafe {
                    cuda.record_event(event, stream)
                });
                // SAFETY: as above.
                queue("a wait", &mut |_| unsafe {
                    cuda.stream_wait_event(stream, event)
                });
                // SAFETY: as above.
                queue("a drop of several", &mut |_| unsafe {
                    cuda.batch_behind(
                        stream,
                        &[(event, stream)],
                        &[StreamOp::Write { word, value: 2 }],
                    )
                });
                // SAFETY: as above.
                queue("a function", &mut |_| unsafe {
                    cuda.host_function(stream, Box::new(|| ()))
                });
                // SAFETY: as above.
                queue("a fill", &mut |_| unsafe {
                    cuda.fill(stream, memory, 0, 8)
                });
                // SAFETY: as above.
                queue("a copy", &mut |_| unsafe {
                    cuda.copy(stream, memory, memory, 8)
                });
                // SAFETY: as above.
                queue("a copy in", &mut |to| unsafe {
                    cuda.copy_to_device(stream, memory, to.as_ptr(), 8)
                });
                // SAFETY: as above.
                queue("a copy out", &mut |to| unsafe {
                    cuda.copy_to_host(stream, to.as_mut_ptr(), memory, 8)
                });
                queue("a question", &mut |_| {
                    // SAFETY: as above.
                    unsafe { cuda.query_stream(stream) }.map(|_| ())
                });
                // SAFETY: as above.
                queue("a synchronisation", &mut |_| unsafe {
                    cuda.synchronize_stream(stream)
                });
                queue("an identity", &mut |_| {
                    // SAFETY: as above.
                    let info = unsafe { cuda.stream_info(stream) }?;
                    assert_eq!((info.device, info.context), (device, cuda.context(device)?));
                    Ok(())
                });
                for (call, on, at) in fake::placed() {
                    println!(
                        "current {current:?}: {call} of stream {on} of {device} on device {at}"
                    );
                    assert_eq!(
                        (on, at),
                        (handle, i64::from(device.0)),
                        "{call}, with {current:?} current"
                    );
                }
                let mut popped = ptr::null_mut();
                context
                    .into_iter()
                    .for_each(|_| assert_eq!(fake::pop(&raw mut popped), 0));
            }
        }
    }
    assert_eq!((fake::depth(), fake::mode(), fake::violations()), (0, 0, 0));
}

/// An application's own stream 0 is that of its context; ours would be another.
fn a_default_stream_beside_another_context_of_its_device_is_refused() {
    let cuda = fake::cuda();
    for handle in [0, 1, 2] {
        assert_eq!(fake::push(fake::foreign_context()), 0);
        // SAFETY: `stream_info`: a default stream is always alive.
        let refused = unsafe { cuda.stream_info(RawStream::new(GPU, handle)) }
            .expect_err("the context is not ours");
        assert!(
            matches!(
                refused,
                Error::Mismatch {
                    what: "the stream's context",
                    ..
                }
            ),
            "{refused:?}"
        );
        // SAFETY: `stream_info`: a default stream is always alive.
        let other = unsafe { cuda.stream_info(RawStream::new(DeviceId(1), handle)) };
        assert_eq!(
            other.expect("the context is of another device").device,
            DeviceId(1)
        );
        let mut popped = ptr::null_mut();
        assert_eq!(fake::pop(&raw mut popped), 0);
    }
    assert_eq!((fake::depth(), fake::mode(), fake::violations()), (0, 0, 0));
}

fn a_stream_of_another_device_is_refused_at_once() {
    let cuda = fake::cuda();
    let made = cuda
        .create_stream(DeviceId(1))
        .expect("a stream can be made");
    // SAFETY: `stream_info`: made above.
    let refused = unsafe { cuda.stream_info(RawStream::new(GPU, made.handle)) }
        .expect_err("it is of the other");
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
    assert_eq!((fake::depth(), fake::mode(), fake::violations()), (0, 0, 0));
}

fn contexts_go_in_and_out() {
    let cuda = fake::cuda();
    for device in [DeviceId(0), DeviceId(1)] {
        let context = cuda.context(device).expect("it is a device");
        assert_eq!(
            // SAFETY: `device_of_context`: a primary context that the backend retained.
            unsafe { cuda.device_of_context(context) }.ok(),
            Some(device)
        );
    }
    let foreign = fake::foreign_context().expose_provenance() as u64;
    // SAFETY: `device_of_context`: the fake driver's context lives as long as it does.
    assert_eq!(unsafe { cuda.device_of_context(foreign) }.ok(), Some(GPU));
    // Words are registered in a context of our own even where the application's is current.
    let words = Words::new();
    assert_eq!(fake::push(fake::foreign_context()), 0);
    // SAFETY: `register_words`: `words` is mapped until the end of the process.
    unsafe { cuda.register_words(words.start(), words.len()) }.expect("whole pages");
    assert_eq!(fake::depth(), 1);
    assert_ne!(words.start(), HostPtr(0));
    std::mem::forget(words);
}

fn what_is_queued_beside_any_context_names_its_own_device() {
    let cuda = fake::cuda();
    let device = DeviceId(1);
    let stream = cuda.create_stream(device).expect("a stream can be made");
    let words = Words::new();
    // SAFETY: `register_words`: `words` is mapped until the end of the case, where nothing is
    // queued.
    let word = unsafe { cuda.register_words(words.start(), words.len()) }.expect("whole pages");
    let ops = [StreamOp::Write { word, value: 1 }];
    assert_eq!(fake::push(fake::foreign_context()), 0);
    fake::clear_trace();
    // SAFETY: `capture_status`: made above.
    let status = unsafe { cuda.capture_status(stream) };
    assert_eq!(status.ok(), Some(CaptureStatus::None));
    // SAFETY: `batch_uncaptured`: the stream was made and the words registered above.
    unsafe { cuda.batch_uncaptured(stream, &ops) }.expect("the stream brings its context");
    assert!(
        !fake::trace()
            .iter()
            .any(|call| call.starts_with("cuCtx") || call == "cuStreamGetCtx")
    );
    for call in ["cuStreamIsCapturing", "cuStreamBatchMemOp_v2"] {
        fake::fail(call, 719);
        // SAFETY: `batch_uncaptured`: as above.
        let error = unsafe { cuda.batch_uncaptured(stream, &ops) }.expect_err("the call failed");
        assert!(
            matches!(error, Error::Driver { device: named, .. } if named == device),
            "{call}: {error:?}"
        );
        assert_eq!(
            (fake::depth(), fake::mode(), fake::violations()),
            (1, 0, 0),
            "{call}"
        );
    }
}
