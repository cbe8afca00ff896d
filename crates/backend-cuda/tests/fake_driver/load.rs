//! Starting the driver, and what is said where it does not start.

use harness::holds_in_a_fork;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use backend_cuda::CudaBackend;
use gpu_api::groups::*;
use gpu_api::{DeviceId, Error, EventKind, Gpu, RawStream, Sharing, StreamOp, WordPtr};

use crate::fake::{self, GPU};
use crate::{Case, Library};

macro_rules! refused {
    ($name:ident, $library:expr, $environment:expr, $expected:expr) => {
        Case {
            name: stringify!($name),
            library: $library,
            environment: $environment,
            run: || unavailable($expected),
        }
    };
}

pub const CASES: &[Case] = &[
    refused!(
        without_a_library_it_is_unavailable,
        Library::Absent,
        &[],
        "libcuda.so.1 cannot be loaded"
    ),
    refused!(
        a_library_that_is_not_nvidias_is_no_driver,
        Library::Foreign,
        &[],
        "has no cuInit"
    ),
    refused!(
        the_toolkits_stub_is_told_from_a_driver,
        Library::Whole,
        &[("FAKE_INIT", "34")],
        "stubs"
    ),
    refused!(
        an_old_driver_is_told,
        Library::Whole,
        &[("FAKE_INIT", "35")],
        "too old"
    ),
    refused!(
        a_machine_without_device_is_told,
        Library::Whole,
        &[("FAKE_INIT", "100")],
        "CUDA_VISIBLE_DEVICES"
    ),
    refused!(
        a_driver_that_counts_no_device_is_told,
        Library::Whole,
        &[("FAKE_DEVICES", "0")],
        "NO_DEVICE"
    ),
    refused!(
        a_missing_fabric_manager_is_told,
        Library::Whole,
        &[("FAKE_INIT", "802")],
        "fabric manager"
    ),
    refused!(
        a_module_of_another_version_is_told,
        Library::Whole,
        &[("FAKE_INIT", "803")],
        "SYSTEM_DRIVER_MISMATCH"
    ),
    refused!(
        a_compat_library_that_does_not_fit_is_told,
        Library::Whole,
        &[("FAKE_INIT", "804")],
        "cuda-compat"
    ),
    refused!(
        a_code_of_no_header_is_told_by_its_number,
        Library::Whole,
        &[("FAKE_INIT", "919")],
        "cuInit gave 919"
    ),
    Case {
        name: "devices_are_described",
        library: Library::Whole,
        environment: &[("FAKE_DEVICES", "2")],
        run: devices_are_described,
    },
    Case {
        name: "a_sick_device_hides_no_other",
        library: Library::Whole,
        environment: &[("FAKE_DEVICES", "8"), ("FAKE_SICK", "3")],
        run: a_sick_device_hides_no_other,
    },
    Case {
        name: "an_old_driver_does_what_it_can",
        library: Library::Old,
        environment: &[],
        run: old_driver,
    },
    Case {
        name: "mps_is_told_by_the_device",
        library: Library::Whole,
        environment: &[("FAKE_MPS", "1")],
        run: || {
            assert!(
                fake::cuda()
                    .caps(GPU)
                    .expect("it is a device")
                    .shared_context
            )
        },
    },
    Case {
        name: "contexts_are_given_back_when_nothing_is_left",
        library: Library::Whole,
        environment: &[],
        run: contexts_are_given_back,
    },
    Case {
        name: "a_forked_child_gives_nothing_back_and_waits_for_nobody",
        library: Library::Whole,
        environment: &[],
        run: a_forked_child_gives_nothing_back_and_waits_for_nobody,
    },
];

/// Another thread of the parent's may hold any lock of the backend when the child is made, and then
/// holds it for good.
fn a_forked_child_gives_nothing_back_and_waits_for_nobody() {
    let cuda = fake::cuda();
    let made = cuda.alloc(GPU, 1, Sharing::Fd).expect("there is room");
    let stop = Arc::new(AtomicBool::new(false));
    let asks = {
        let (cuda, stop) = (Arc::clone(&cuda), Arc::clone(&stop));
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                assert!(cuda.classify(made.base).is_ok());
            }
        })
    };
    for _ in 0..200 {
        fake::clear_trace();
        let calls_nothing = || {
            // SAFETY: `drop_in_place` asks for a value that is not used afterwards: the child has
            // no other thread.
            unsafe { std::ptr::drop_in_place(Arc::as_ptr(&cuda).cast_mut()) };
            fake::trace().is_empty()
        };
        // SAFETY: `fork` asks that the child of a process with threads does only what is safe
        // there: it drops the backend, which is to do nothing but free memory with the C library.
        unsafe { holds_in_a_fork(calls_nothing) };
    }
    stop.store(true, Ordering::Relaxed);
    asks.join().expect("it asks on");
    assert_eq!(fake::retained(0), 1);
}

fn unavailable(expected: &str) {
    let error = CudaBackend::load().expect_err("the driver does not start");
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(expected), "{text}");
}

fn devices_are_described() {
    let cuda = fake::cuda();
    assert_eq!(cuda.device_count().ok(), Some(2));
    assert_eq!(cuda.driver_version(), 13000);
    let info = cuda.device_info(DeviceId(1)).expect("there are two");
    assert_eq!((info.name.as_str(), info.total_bytes), ("Fake 1", 1 << 34));
    assert_eq!(info.uuid.0, [0x21; 16]);
    let caps = cuda.caps(GPU).expect("it is a device");
    assert!(
        caps.handle
            && caps.fd
            && caps.read_only
            && caps.event_ipc
            && caps.stream_writes
            && caps.stream_waits
            && !caps.shared_context
    );
    assert_eq!(caps.granularity, 0x20_0000);
    assert!(matches!(
        cuda.device_info(DeviceId(2)),
        Err(Error::Invalid { .. })
    ));
    // Asking takes no context: `doctor` must not cost hundreds of megabytes on every device.
    assert_eq!((fake::retained(0), fake::retained(1)), (0, 0));
    assert!(cuda.memory_info(GPU).is_ok());
    assert_eq!((fake::retained(0), fake::retained(1)), (1, 0));
}

fn a_sick_device_hides_no_other() {
    let cuda = fake::cuda();
    let count = cuda.device_count().expect("it counts");
    assert_eq!(count, 8);
    for device in (0..count).map(DeviceId) {
        match Gpu::new(cuda.clone(), device) {
            Ok(gpu) => {
                assert_ne!(device, DeviceId(3));
                assert_eq!(gpu.info().name, format!("Fake {}", device.0));
                let made = cuda.alloc(device, 1, Sharing::Fd).expect("there is room");
                // SAFETY: `free`: just allocated, and nothing uses it.
                unsafe { cuda.free(made.base) }.expect("it frees");
            }
            Err(error) => {
                assert_eq!(device, DeviceId(3), "{error}");
                assert!(
                    matches!(
                        &error,
                        Error::Driver {
                            call: "cuDeviceGet",
                            device: DeviceId(3),
                            ..
                        }
                    ),
                    "{error:?}"
                );
            }
        }
    }
    // Nor is it asked behind the back of its error.
    assert!(cuda.create_stream(DeviceId(3)).is_err() && cuda.memory_info(DeviceId(3)).is_err());
    assert_eq!(
        (fake::retained(3), fake::violations(), fake::depth()),
        (0, 0, 0)
    );
}

fn old_driver() {
    let cuda = fake::cuda();
    assert_eq!(
        cuda.device_info(GPU).expect("it is a device").uuid.0,
        [0x10; 16]
    );
    let caps = cuda.caps(GPU).expect("it is a device");
    assert!(
        caps.handle
            && !caps.fd
            && !caps.read_only
            && caps.event_ipc
            && !caps.stream_writes
            && !caps.stream_waits
    );
    assert!(matches!(
        cuda.alloc(GPU, 1, Sharing::Fd),
        Err(Error::Unsupported { .. })
    ));
    assert!(matches!(
        cuda.import_fd(
            GPU,
            std::os::fd::AsFd::as_fd(&std::io::stdin()),
            1,
            Default::default()
        ),
        Err(Error::Unsupported { .. })
    ));
    let allocation = cuda
        .alloc(GPU, 1, Sharing::Handle)
        .expect("plain memory needs nothing else");
    assert!(cuda.export_handle(allocation.base).is_ok());
    assert!(matches!(
        cuda.export_fd(allocation.base),
        Err(Error::Unsupported { .. })
    ));
    assert!(cuda.classify(allocation.base).is_ok());
    let foreign = gpu_api::DevicePtr(fake::add(fake::Kind::Plain, true));
    assert_eq!(
        cuda.classify(foreign).expect("the driver knows it").kind,
        gpu_api::MemoryKind::Plain
    );
    // SAFETY: `free`: allocated above, and nothing uses it.
    unsafe { cuda.free(allocation.base) }.expect("plain memory needs nothing else");

    let stream = cuda.create_stream(GPU).expect("streams need nothing else");
    let other = cuda.create_stream(GPU).expect("streams need nothing else");
    // SAFETY: `stream_info`: made above.
    let info = unsafe { cuda.stream_info(stream) }.expect("a stream of our own is numbered by us");
    // SAFETY: `stream_info`: made above.
    let other_info =
        unsafe { cuda.stream_info(other) }.expect("a stream of our own is numbered by us");
    assert_ne!(info.identity, other_info.identity);
    let foreign = RawStream::new(GPU, fake::foreign_stream().expose_provenance() as u64);
    assert!(matches!(
        // SAFETY: `stream_info`: the fake driver's stream lives as long as it does.
        unsafe { cuda.stream_info(foreign) },
        Err(Error::Unsupported { .. })
    ));
    let write = StreamOp::Write {
        word: WordPtr(8),
        value: 1,
    };
    assert!(matches!(
        // SAFETY: `stream_batch`: the driver refuses before it looks at the word.
        unsafe { cuda.stream_batch(stream, &[write]) },
        Err(Error::Unsupported { .. })
    ));
    assert!(cuda.create_event(GPU, EventKind::Interprocess).is_ok());
    assert_eq!((fake::depth(), fake::violations()), (0, 0));
}

fn contexts_are_given_back() {
    let cuda = fake::cuda();
    let event = cuda
        .create_event(GPU, EventKind::Local)
        .expect("an event can be made");
    assert_eq!(fake::retained(0), 1);
    drop(cuda);
    assert_eq!(fake::retained(0), 1, "an event is left");

    let cuda = fake::cuda();
    let second = cuda
        .create_event(GPU, EventKind::Local)
        .expect("an event can be made");
    assert_ne!(event, second);
    // SAFETY: `destroy_event`: made above.
    unsafe { cuda.destroy_event(second) }.expect("an event can be destroyed");
    assert_eq!(fake::retained(0), 2);
    drop(cuda);
    assert_eq!(
        (
            fake::retained(0),
            fake::violations(),
            fake::depth(),
            fake::mode()
        ),
        (1, 0, 0, 0)
    );
}
