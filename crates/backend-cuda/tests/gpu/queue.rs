//! Kernels, words and events on real streams, and what the backend's own work around a call costs.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use backend_cuda::launch::Application;
use gpu_api::groups::*;
use gpu_api::{Error, EventKind, HostPtr, RawStream, Result, Sharing, StreamOp, WordPtr};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::{Case, GPU, case, cuda, median, wait_until, write_on};

pub const CASES: &[Case] = &[
    case!(a_kernel_writes_until_the_host_stops_it),
    case!(a_broken_context_is_told_by_every_call_and_hangs_none),
    case!(streams_are_numbered_once),
    case!(a_host_function_that_panics_leaves_the_stream),
    case!(what_the_thread_costs_is_shown),
];

/// A page of words, shared, registered, never unmapped.
#[derive(Debug)]
pub struct Page {
    start: *mut c_void,
    pub words: WordPtr,
}

impl Page {
    pub fn new(cuda: &backend_cuda::CudaBackend) -> Result<Page> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: `mmap_anonymous`: no fixed address is asked for.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), 4096, protection, MapFlags::SHARED) };
        let start = start.expect("a page can be mapped");
        let address = HostPtr(start.expose_provenance());
        // SAFETY: `register_words`: the page is never unmapped.
        let words = unsafe { cuda.register_words(address, 4096) }?;
        Ok(Page { start, words })
    }

    pub fn start(&self) -> HostPtr {
        HostPtr(self.start.expose_provenance())
    }

    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < 512);
        // SAFETY: `ptr::add`: the index is inside the page.
        let word = unsafe { self.start.cast::<u64>().add(index) };
        // SAFETY: `AtomicU64::from_ptr`: aligned, never unmapped, and the host uses it atomically
        // only.
        unsafe { AtomicU64::from_ptr(word) }
    }
}

fn a_kernel_writes_until_the_host_stops_it() -> Result<()> {
    let cuda = cuda();
    let application = Application::begin(&cuda, GPU)?;
    let kernel = write_on(&application)?;
    let (stream, other) = (cuda.create_stream(GPU)?, cuda.create_stream(GPU)?);
    let buffer = cuda.alloc(GPU, 4096, Sharing::Fd)?;
    let page = Page::new(&cuda)?;
    let arguments = [buffer.base.0, 512, 30_000_000_000, page.words.0];
    // SAFETY: `launch`: the kernel's four parameters; the buffer has 512 words.
    unsafe { application.launch(&kernel, stream, (1, 32), &arguments) }?;
    let mut last = 0_u64;
    for _ in 0..3 {
        let before = last;
        wait_until(|| {
            // SAFETY: `copy_to_host`: `last` has 8 bytes and lives until the stream is
            // synchronised.
            unsafe { cuda.copy_to_host(other, ptr::from_mut(&mut last).cast(), buffer.base, 8) }?;
            // SAFETY: `synchronize_stream`: made above.
            unsafe { cuda.synchronize_stream(other) }?;
            Ok(last > before)
        })?;
    }
    // SAFETY: `query_stream`: made above.
    assert!(!unsafe { cuda.query_stream(stream) }?);
    page.word(0).store(1, Ordering::Release);
    // SAFETY: `query_stream`: made above.
    wait_until(|| unsafe { cuda.query_stream(stream) })
}

fn a_broken_context_is_told_by_every_call_and_hangs_none() -> Result<()> {
    let cuda = cuda();
    let application = Application::begin(&cuda, GPU)?;
    let kernel = write_on(&application)?;
    let stream = cuda.create_stream(GPU)?;
    let event = cuda.create_event(GPU, EventKind::Local)?;
    let page = Page::new(&cuda)?;
    let (own, plain) = (
        cuda.alloc(GPU, 1, Sharing::Fd)?,
        cuda.alloc(GPU, 1, Sharing::Handle)?,
    );
    // SAFETY: `launch`: the kernel's four parameters; that it breaks the context is what is tested.
    unsafe { application.launch(&kernel, stream, (1, 1), &[0x10, 1, 1000, 0]) }?;
    // SAFETY: `record_event`: made above. The error may be there already, or not yet.
    let _ = unsafe { cuda.record_event(event, stream) };
    // SAFETY: `query_stream`: made above.
    wait_until(|| Ok(unsafe { cuda.query_stream(stream) }.is_err()))?;
    let driver = |result: Result<()>| match result {
        Err(Error::Driver { source, .. }) => eprintln!("{source}"),
        other => panic!("{other:?}"),
    };
    // SAFETY: `query_event`: made above.
    driver(unsafe { cuda.query_event(event) }.map(drop));
    // SAFETY: `stream_batch`: made and registered above.
    driver(unsafe {
        cuda.stream_batch(
            stream,
            &[StreamOp::Write {
                word: page.words,
                value: 1,
            }],
        )
    });
    driver(cuda.create_stream(GPU).map(drop));
    // SAFETY: `free`: allocated above; no kernel that touches it runs.
    driver(unsafe { cuda.free(plain.base) });
    assert!(matches!(
        // SAFETY: `free`: refused, because it leaked.
        unsafe { cuda.free(plain.base) },
        Err(Error::Invalid { .. })
    ));
    // The virtual memory calls work on in a broken context, or do not: either is an answer.
    // SAFETY: `free`: allocated above; no kernel that touches it runs.
    eprintln!("free of virtual memory: {:?}", unsafe {
        cuda.free(own.base)
    });
    assert_eq!(page.word(0).load(Ordering::Acquire), 0);
    Ok(())
}

fn streams_are_numbered_once() -> Result<()> {
    let cuda = cuda();
    let mut seen = std::collections::HashSet::new();
    for _ in 0..100 {
        let stream = cuda.create_stream(GPU)?;
        // SAFETY: `stream_info`: made above.
        assert!(seen.insert(unsafe { cuda.stream_info(stream) }?.identity));
        // SAFETY: `destroy_stream`: made above.
        unsafe { cuda.destroy_stream(stream) }?;
    }
    for stream in [0, 2].map(|handle| RawStream::new(GPU, handle)) {
        // SAFETY: `stream_info`: a default stream is always alive.
        let info = unsafe { cuda.stream_info(stream) }?;
        assert!(seen.insert(info.identity), "{info:?}");
    }
    Ok(())
}

fn a_host_function_that_panics_leaves_the_stream() -> Result<()> {
    let cuda = cuda();
    let stream = cuda.create_stream(GPU)?;
    let page = Page::new(&cuda)?;
    // SAFETY: `host_function`: made above.
    unsafe { cuda.host_function(stream, Box::new(|| panic!("on the driver's thread"))) }?;
    // SAFETY: `stream_batch`: made and registered above.
    unsafe {
        cuda.stream_batch(
            stream,
            &[StreamOp::Write {
                word: page.words,
                value: 1,
            }],
        )
    }?;
    wait_until(|| Ok(page.word(0).load(Ordering::Acquire) == 1))
}

// SAFETY: `Sync`: the page is never unmapped, and its words are reached as atomics only.
unsafe impl Sync for Page {}

/// Shows what a call costs on a thread whose current context is the device's, and on one that has
/// none. There is nothing to fail but the calls themselves.
fn what_the_thread_costs_is_shown() -> Result<()> {
    let cuda = cuda();
    let (stream, other) = (cuda.create_stream(GPU)?, cuda.create_stream(GPU)?);
    let event = cuda.create_event(GPU, EventKind::Local)?;
    let page = Page::new(&cuda)?;
    let write = [StreamOp::Write {
        word: page.words,
        value: 1,
    }];
    let show = |thread: &str| -> Result<()> {
        for (name, call) in [
            (
                "record_event",
                // SAFETY: the methods of this list: everything was made and registered above.
                &(|| unsafe { cuda.record_event(event, stream) }) as &dyn Fn() -> Result<()>,
            ),
            // SAFETY: see above.
            ("stream_wait_event", &|| unsafe {
                cuda.stream_wait_event(other, event)
            }),
            // SAFETY: see above.
            ("stream_batch of 1", &|| unsafe {
                cuda.stream_batch(stream, &write)
            }),
            ("query_event", &|| {
                // SAFETY: see above.
                unsafe { cuda.query_event(event) }.map(drop)
            }),
            ("capture_status", &|| {
                // SAFETY: see above.
                unsafe { cuda.capture_status(stream) }.map(drop)
            }),
            ("stream_info", &|| {
                // SAFETY: see above.
                unsafe { cuda.stream_info(stream) }.map(drop)
            }),
        ] {
            let mut calls = 0;
            let nanoseconds = median(|| {
                calls += 1;
                if calls % 100 == 0 {
                    // SAFETY: `synchronize_stream`: made above. A full queue would be measured
                    // otherwise.
                    unsafe { cuda.synchronize_stream(stream) }?;
                    // SAFETY: `synchronize_stream`: made above.
                    unsafe { cuda.synchronize_stream(other) }?;
                }
                call()
            })?;
            println!("{thread}: {name}: {nanoseconds} ns");
        }
        Ok(())
    };
    show("no context")?;
    let _application = Application::begin(&cuda, GPU)?;
    show("own context")
}
