//! What the host backend can be told to do that a GPU does of itself: capture, break, deny. The
//! rest is in the conformance list.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use backend_host::{HostBackend, HostConfig};
use gpu_api::groups::*;
use gpu_api::{
    Access, Caps, CaptureStatus, DeviceId, DevicePtr, Error, EventKind, RawStream, Result, Sharing,
    StreamOp, WordPtr,
};

const FIRST: DeviceId = DeviceId(0);
const SECOND: DeviceId = DeviceId(1);

fn open() -> Arc<HostBackend> {
    HostBackend::new(HostConfig::default().devices(2)).expect("a descriptor")
}

fn code<T: std::fmt::Debug>(result: Result<T>) -> Option<u32> {
    match result.expect_err("refused") {
        Error::Driver { source, .. } => Some(source.code),
        _ => None,
    }
}

/// Queues one of everything, and returns what each call gave.
fn queue_everything(backend: &HostBackend, stream: RawStream) -> Vec<Result<()>> {
    let event = backend
        .create_event(SECOND, EventKind::Local)
        .expect("an event");
    let base = backend.alloc(SECOND, 4096, Sharing::Fd).expect("room").base;
    let bytes = vec![0u8; 8].leak();
    vec![
        // SAFETY: `record_event`: made above.
        unsafe { backend.record_event(event, stream) },
        // SAFETY: `stream_wait_event`: made above.
        unsafe { backend.stream_wait_event(stream, event) },
        // SAFETY: `host_function`: the caller's stream.
        unsafe { backend.host_function(stream, Box::new(|| ())) },
        // SAFETY: `copy_to_device`: both ranges are never freed.
        unsafe { backend.copy_to_device(stream, base, bytes.as_ptr(), 8) },
        // SAFETY: `copy_to_host`: as above.
        unsafe { backend.copy_to_host(stream, bytes.as_mut_ptr(), base, 8) },
        // SAFETY: `copy`: as above.
        unsafe { backend.copy(stream, base.offset(8), base, 8) },
        // SAFETY: `fill`: as above.
        unsafe { backend.fill(stream, base, 1, 8) },
    ]
}

#[test]
fn it_can_do_everything_unless_told_otherwise() {
    let caps = Caps::of(&*open(), FIRST).expect("a device");
    assert!(
        caps.handle
            && caps.fd
            && caps.read_only
            && caps.event_ipc
            && caps.stream_writes
            && caps.stream_waits
            && !caps.shared_context
    );
    let denied = HostBackend::new(
        HostConfig::default()
            .stream_words(false)
            .shared_context(true),
    )
    .expect("a descriptor");
    let caps = Caps::of(&*denied, FIRST).expect("a device");
    assert!(!caps.stream_writes && !caps.stream_waits && caps.shared_context);
    let stream = denied.create_stream(FIRST).expect("a stream");
    // SAFETY: `stream_batch`: made above; the word is not looked at.
    let refused = unsafe {
        denied.stream_batch(
            stream,
            &[StreamOp::Write {
                word: WordPtr(8),
                value: 1,
            }],
        )
    };
    assert!(
        matches!(refused, Err(Error::Unsupported { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_capturing_stream_says_so_and_takes_nothing() {
    let backend = open();
    let stream = backend.create_stream(SECOND).expect("a stream");
    // SAFETY: `capture_status`: made above.
    let status = || unsafe { backend.capture_status(stream) }.expect("it tells");
    for capturing in [CaptureStatus::Active, CaptureStatus::Invalidated] {
        backend.set_capture(stream, capturing);
        assert_eq!(status(), capturing);
        for refused in queue_everything(&backend, stream) {
            assert_eq!(code(refused), Some(900));
        }
        // SAFETY: `batch_uncaptured`: made above; the word is not looked at.
        let refused = unsafe {
            backend.batch_uncaptured(
                stream,
                &[StreamOp::Write {
                    word: WordPtr(8),
                    value: 1,
                }],
            )
        };
        assert!(
            matches!(refused, Err(Error::Capturing { .. })),
            "{refused:?}"
        );
        backend.set_capture(stream, CaptureStatus::None);
        assert_eq!(status(), CaptureStatus::None);
    }
    assert!(queue_everything(&backend, stream).iter().all(Result::is_ok));
    // SAFETY: `synchronize_stream`: made above.
    unsafe { backend.synchronize_stream(stream) }.expect("it runs");
}

#[test]
fn a_broken_device_says_so_runs_nothing_and_leaves_the_other_alone() {
    let backend = open();
    let [broken, whole] =
        [FIRST, SECOND].map(|device| backend.create_stream(device).expect("a stream"));
    let event = backend
        .create_event(FIRST, EventKind::Local)
        .expect("an event");
    backend.break_device(FIRST);
    // SAFETY: `query_stream`: made above.
    assert_eq!(code(unsafe { backend.query_stream(broken) }), Some(700));
    assert_eq!(
        // SAFETY: `synchronize_stream`: made above.
        code(unsafe { backend.synchronize_stream(broken) }),
        Some(700)
    );
    // SAFETY: `query_event`: made above.
    assert_eq!(code(unsafe { backend.query_event(event) }), Some(700));
    assert_eq!(code(backend.alloc(FIRST, 1, Sharing::Fd)), Some(700));
    assert_eq!(code(backend.create_stream(FIRST)), Some(700));
    let ran = Arc::new(AtomicBool::new(false));
    let (on_broken, on_whole) = (ran.clone(), ran.clone());
    // SAFETY: `host_function`: made above.
    let refused = unsafe {
        backend.host_function(
            broken,
            Box::new(move || on_broken.store(true, Ordering::Relaxed)),
        )
    };
    assert_eq!(
        (code(refused), ran.load(Ordering::Relaxed)),
        (Some(700), false)
    );
    // SAFETY: `host_function`: made above.
    unsafe {
        backend.host_function(
            whole,
            Box::new(move || on_whole.store(true, Ordering::Relaxed)),
        )
    }
    .expect("whole");
    // SAFETY: `synchronize_stream`: made above.
    unsafe { backend.synchronize_stream(whole) }.expect("whole");
    assert!(ran.load(Ordering::Relaxed));
}

#[test]
fn late_writes_are_counted() {
    let backend = open();
    let base = backend.alloc(FIRST, 4096, Sharing::Fd).expect("room").base;
    let arm = || backend.arm_late_write(base, &[1], Duration::from_secs(0));
    assert!((0..32).all(|_| arm().is_ok()));
    assert!(matches!(arm(), Err(Error::Exhausted { limit: 32, .. })));
}

/// Returns the rights of the mapping that begins at an address, as the kernel writes them, and of
/// the one that ends there.
fn rights(at: DevicePtr) -> (String, String) {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("there is a proc");
    let find = |which: &dyn Fn(u64, u64) -> bool| {
        let found = maps.lines().find(|line| {
            let (start, rest) = line.split_once('-').expect("a range");
            let end = rest.split(' ').next().expect("an end");
            let number = |text| u64::from_str_radix(text, 16).expect("hexadecimal");
            which(number(start), number(end))
        });
        found
            .and_then(|line| line.split(' ').nth(1))
            .unwrap_or("none")
            .to_owned()
    };
    (find(&|start, _| start == at.0), find(&|_, end| end == at.0))
}

#[test]
fn a_read_only_mapping_is_one_for_the_kernel_too() {
    let backend = open();
    let all = [(); 2].map(|()| backend.alloc(FIRST, 1 << 16, Sharing::Fd).expect("room"));
    let export = |at: usize| -> Result<OwnedFd> { backend.export_fd(all[at].base) };
    let len = all[0].len;
    let fd = export(0).expect("it is exportable");
    for (access, expected) in [(Access::ReadOnly, "r--s"), (Access::ReadWrite, "rw-s")] {
        let one = backend
            .import_fd(FIRST, fd.as_fd(), len, access)
            .expect("it fits");
        assert_eq!(rights(one).0, expected);
        let two = backend
            .import_fds(FIRST, &mut (0..2).map(export), len, access)
            .expect("they fit");
        assert_eq!(
            (rights(two).0, rights(two.offset(2 * len)).1),
            (expected.to_owned(), expected.to_owned())
        );
        for mapped in [one, two] {
            // SAFETY: `close`: imported above, and nothing uses it.
            unsafe { backend.close(mapped) }.expect("it is mapped");
        }
    }
}
