//! The calling thread with a real driver: contexts, captures, default streams.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use backend_cuda::launch::{Application, CAPTURE_GLOBAL};
use cudarc::driver::result::ctx;
use cudarc::driver::sys;
use gpu_api::groups::*;
use gpu_api::{
    Access, CaptureStatus, Error, EventKind, HostMemory, RawStream, Result, Sharing, StreamOp,
};

use crate::queue::Page;
use crate::{Case, GPU, case, cuda, wait_until};

pub const CASES: &[Case] = &[
    case!(a_thread_without_a_context_can_do_everything_and_stays_without),
    case!(a_global_capture_survives_everything),
    case!(a_graph_runs_again_beside_the_library),
    case!(default_streams_work_on_every_thread),
    case!(a_stream_of_another_context_is_refused),
];

/// Makes every call that a session or a participant makes, on streams of its own.
fn everything() -> Result<()> {
    let cuda = cuda();
    let stream = cuda.create_stream(GPU)?;
    let event = cuda.create_event(GPU, EventKind::Local)?;
    let shared = cuda.create_event(GPU, EventKind::Interprocess)?;
    let page = Page::new(&cuda)?;
    let (own, plain) = (
        cuda.alloc(GPU, 1, Sharing::Fd)?,
        cuda.alloc(GPU, 1, Sharing::Handle)?,
    );
    let fd = cuda.export_fd(own.base)?;
    cuda.export_handle(plain.base)?;
    let mapped = cuda.import_fd(
        GPU,
        std::os::fd::AsFd::as_fd(&fd),
        own.len,
        Access::ReadWrite,
    )?;
    let host = cuda.host_alloc(
        GPU,
        4096,
        HostMemory {
            pinned: true,
            numa_node: None,
        },
    )?;
    cuda.memory_info(GPU)?;
    cuda.classify(plain.base)?;
    cuda.address_range(own.base)?;
    let write = [
        StreamOp::Write {
            word: page.words,
            value: 1,
        },
        StreamOp::WaitGeq {
            word: page.words,
            value: 1,
        },
    ];
    macro_rules! calls {
        ($($call:expr;)*) => {
            $(
                // SAFETY: the method: everything was made above, is idle when it is given back, and
                // that once.
                unsafe { $call }?;
            )*
        };
    }
    calls! {
        cuda.fill(stream, own.base, 3, own.len);
        cuda.copy(stream, plain.base, mapped, own.len);
        cuda.record_event(event, stream);
        cuda.record_event(shared, stream);
        cuda.event_handle(shared);
        cuda.stream_wait_event(stream, event);
        cuda.stream_batch(stream, &write);
        cuda.host_function(stream, Box::new(|| ()));
        cuda.query_event(event);
        cuda.query_stream(stream);
        cuda.capture_status(stream);
        cuda.stream_info(stream);
        cuda.synchronize_stream(stream);
        cuda.unregister_words(page.start());
        cuda.destroy_event(event);
        cuda.destroy_event(shared);
        cuda.destroy_stream(stream);
        cuda.host_free(host);
        cuda.close(mapped);
        cuda.free(own.base);
        cuda.free(plain.base);
    }
    Ok(())
}

fn current() -> Option<usize> {
    ctx::get_current()
        .expect("the driver was started")
        .map(|context| context.expose_provenance())
}

fn a_thread_without_a_context_can_do_everything_and_stays_without() -> Result<()> {
    everything()?;
    assert_eq!(current(), None);
    let keep = cuda();
    let _application = Application::begin(&keep, GPU)?;
    let own = current();
    everything()?;
    assert_eq!(current(), own);
    thread::spawn(|| everything().map(|()| assert_eq!(current(), None)))
        .join()
        .expect("it does not panic")
}

fn a_global_capture_survives_everything() -> Result<()> {
    let cuda = cuda();
    let application = Application::begin(&cuda, GPU)?;
    let stream = cuda.create_stream(GPU)?;
    let buffer = cuda.alloc(GPU, 4096, Sharing::Fd)?;
    // SAFETY: `begin_capture`: made above.
    unsafe { application.begin_capture(stream, CAPTURE_GLOBAL) }?;
    // SAFETY: `fill`: allocated above; captured, as an application's own work is.
    unsafe { cuda.fill(stream, buffer.base, 5, 4096) }?;
    assert_eq!(
        // SAFETY: `capture_status`: made above.
        unsafe { cuda.capture_status(stream) }?,
        CaptureStatus::Active
    );
    everything()?;
    thread::spawn(everything)
        .join()
        .expect("it does not panic")?;
    assert_eq!(
        // SAFETY: `capture_status`: made above.
        unsafe { cuda.capture_status(stream) }?,
        CaptureStatus::Active
    );
    // SAFETY: `end_capture`: made above.
    let graph = unsafe { application.end_capture(stream) }?;
    for _ in 0..2 {
        // SAFETY: `launch_graph`: the graph fills memory that is never freed.
        unsafe { application.launch_graph(&graph, stream) }?;
    }
    // SAFETY: `synchronize_stream`: made above.
    unsafe { cuda.synchronize_stream(stream) }
}

fn a_graph_runs_again_beside_the_library() -> Result<()> {
    let cuda = cuda();
    let application = Application::begin(&cuda, GPU)?;
    let stream = cuda.create_stream(GPU)?;
    let buffer = cuda.alloc(GPU, 1 << 20, Sharing::Handle)?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let library = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(Ordering::Acquire) || rounds == 0 {
                everything()?;
                rounds += 1;
            }
            Ok(())
        });
        let captures = || {
            for _ in 0..20 {
                // SAFETY: `begin_capture`: made above.
                unsafe { application.begin_capture(stream, CAPTURE_GLOBAL) }?;
                // SAFETY: `fill`: allocated above.
                unsafe { cuda.fill(stream, buffer.base, 5, 1 << 20) }?;
                // SAFETY: `end_capture`: made above.
                let graph = unsafe { application.end_capture(stream) }?;
                // SAFETY: `launch_graph`: the graph fills memory that is never freed.
                unsafe { application.launch_graph(&graph, stream) }?;
            }
            // SAFETY: `synchronize_stream`: made above.
            unsafe { cuda.synchronize_stream(stream) }
        };
        let captured = captures();
        done.store(true, Ordering::Release);
        captured.and(library.join().expect("it does not panic"))
    })
}

fn default_streams_work_on_every_thread() -> Result<()> {
    let cuda = cuda();
    let event = cuda.create_event(GPU, EventKind::Local)?;
    let page = Page::new(&cuda)?;
    let buffer = cuda.alloc(GPU, 4096, Sharing::Fd)?;
    let round = |value: u64| -> Result<()> {
        for handle in [0, 1, 2] {
            let (stream, index) = (RawStream::new(GPU, handle), handle as usize);
            let write = [StreamOp::Write {
                word: page.words.word(index),
                value,
            }];
            // SAFETY: `fill`: a default stream is always alive, and the memory was allocated above.
            unsafe { cuda.fill(stream, buffer.base, 1, 4096) }?;
            // SAFETY: `record_event`: made above.
            unsafe { cuda.record_event(event, stream) }?;
            // SAFETY: `stream_wait_event`: made above.
            unsafe { cuda.stream_wait_event(stream, event) }?;
            // SAFETY: `stream_batch`: registered above.
            unsafe { cuda.stream_batch(stream, &write) }?;
            wait_until(|| Ok(page.word(index).load(Ordering::Acquire) == value))?;
            // SAFETY: `stream_info`: a default stream is always alive.
            assert_eq!(unsafe { cuda.stream_info(stream) }?.device, GPU);
        }
        Ok(())
    };
    round(1)?;
    assert_eq!(current(), None);
    let _application = Application::begin(&cuda, GPU)?;
    round(2)
}

fn a_stream_of_another_context_is_refused() -> Result<()> {
    let cuda = cuda();
    let own = cuda.create_stream(GPU)?;
    let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: `cuCtxCreate_v4` writes one pointer; without parameters it makes a context like any
    // other.
    let code = unsafe { sys::cuCtxCreate_v4(&raw mut context, ptr::null_mut(), 0, 0) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: `cuStreamCreate` writes one pointer, in the context that was just made current.
    let code = unsafe { sys::cuStreamCreate(&raw mut stream, 1) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: `stream_info`: made above.
    let refused =
        unsafe { cuda.stream_info(RawStream::new(GPU, stream.expose_provenance() as u64)) };
    assert!(
        matches!(
            refused,
            Err(Error::Mismatch {
                what: "the stream's context",
                ..
            })
        ),
        "{refused:?}"
    );
    assert_eq!(
        current(),
        Some(context.expose_provenance()),
        "the application's context stays current"
    );
    // SAFETY: `stream_info`: made above.
    unsafe { cuda.stream_info(own) }.map(|info| assert_eq!(info.device, GPU))
}
