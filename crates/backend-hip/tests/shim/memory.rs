//! Plain, virtual and foreign memory.

use gpu_api::groups::*;
use gpu_api::{Access, DevicePtr, Error, MemoryKind, Sharing};

use crate::foreign::Exporter;
use crate::library::{free, malloc};
use crate::{Case, GPU, Library, WHOLE, hip, proved};

macro_rules! by_version {
    ($name:ident, $version:literal, $run:expr) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            environment: &[("GPU_IPC_SHIM_VERSION", $version)],
            run: $run,
        }
    };
}

pub const CASES: &[Case] = &[
    by_version!(a_handle_is_opened_by_the_rules_of_5_2, "50221153", opened),
    by_version!(a_handle_is_opened_by_the_rules_of_5_7, "50731921", opened),
    by_version!(a_handle_is_opened_by_the_rules_of_6_4, "60443484", opened),
    by_version!(a_handle_is_opened_by_the_rules_of_7_2, "70253211", opened),
    by_version!(
        addresses_are_classified_by_the_rules_of_5_7,
        "50731921",
        classified
    ),
    by_version!(
        addresses_are_classified_by_the_rules_of_6_4,
        "60443484",
        classified
    ),
    by_version!(
        addresses_are_classified_by_the_rules_of_6_2,
        "60242134",
        classified
    ),
    by_version!(
        addresses_are_classified_by_the_rules_of_7_2,
        "70253211",
        classified
    ),
    by_version!(
        addresses_are_classified_by_the_rules_of_7_14,
        "71400000",
        classified
    ),
    by_version!(
        descriptors_are_imported_by_the_rules_of_5_7,
        "50731921",
        imported
    ),
    by_version!(
        descriptors_are_imported_by_the_rules_of_7_0,
        "70051831",
        imported
    ),
    by_version!(
        descriptors_are_imported_by_the_rules_of_7_2,
        "70253211",
        imported
    ),
    by_version!(
        descriptors_are_imported_by_the_rules_of_7_14,
        "71400000",
        imported
    ),
    Case {
        name: "equal_process_numbers_are_explained",
        library: WHOLE,
        environment: &[("GPU_IPC_SHIM_INJECT", "equal-pid")],
        run: || refused_with(201, "which must not open it"),
    },
    Case {
        name: "a_failed_attach_is_explained",
        library: WHOLE,
        environment: &[("GPU_IPC_SHIM_INJECT", "attach-fails")],
        run: || refused_with(17, "namespaces"),
    },
    Case {
        name: "memory_is_exported_once",
        library: WHOLE,
        environment: &[],
        run: exported_once,
    },
    Case {
        name: "memory_of_others_is_exported_once_vouched_for",
        library: WHOLE,
        environment: &[],
        run: adopted,
    },
    Case {
        name: "an_address_within_is_not_exported",
        library: WHOLE,
        environment: &[],
        run: interior,
    },
    Case {
        name: "a_dma_buf_is_not_mapped_to_read",
        library: WHOLE,
        environment: &[],
        run: dma_buf,
    },
    Case {
        name: "what_the_probe_proved_and_the_runtime_lacks_is_not_used",
        library: Library::Without(&[
            "hipMemCreate",
            "hipMemGetHandleForAddressRange",
            "hipStreamWaitValue64",
        ]),
        environment: &[],
        run: lacking,
    },
];

fn opened() {
    let (hip, exporter) = (hip(), Exporter::start());
    let first = hip.open_handle(GPU, &exporter.handle).expect("it opens");
    let second = hip
        .open_handle(GPU, &exporter.handle)
        .expect("it opens again");
    assert_eq!(first, second);
    assert_eq!(
        hip.address_range(first.offset(5)).expect("it is known").len,
        2 << 20
    );
    for base in [first, second] {
        // SAFETY: `close`: opened above, once for each.
        unsafe { hip.close(base) }.expect("it closes");
    }
    assert!(
        // SAFETY: `close`: the table refuses what is not open.
        unsafe { hip.close(first) }.is_err(),
        "closed more often than it was opened"
    );
}

fn refused_with(code: u32, why: &str) {
    let (hip, exporter) = (hip(), Exporter::start());
    match hip.open_handle(GPU, &exporter.handle) {
        Err(Error::Driver { source, .. }) => {
            assert_eq!(source.code, code);
            assert!(source.name.contains(why), "{source}");
        }
        other => panic!("{other:?}"),
    }
}

fn classified() {
    let hip = hip();
    let mut foreign = 0;
    assert_eq!(malloc(&raw mut foreign, 1 << 20), 0);
    let info = hip.classify(DevicePtr(foreign)).expect("it tells");
    assert_eq!(
        (info.kind, info.sharing, info.device),
        (MemoryKind::Plain, None, Some(GPU))
    );
    assert_eq!(
        hip.classify(DevicePtr(0x10)).expect("it tells").kind,
        MemoryKind::Unknown
    );
    let host = hip
        .host_alloc(
            GPU,
            100,
            gpu_api::HostMemory {
                pinned: true,
                numa_node: None,
            },
        )
        .expect("room");
    assert_eq!(
        hip.classify(DevicePtr(host.0 as u64))
            .expect("it tells")
            .kind,
        MemoryKind::Host
    );
    // SAFETY: `host_free`: just made.
    unsafe { hip.host_free(host) }.expect("it frees");
    assert_eq!(free(foreign), 0);
}

fn imported() {
    use std::os::fd::AsFd;

    let hip = hip();
    let memory = hip.alloc(GPU, 1, Sharing::Fd).expect("there is room");
    let fd = hip.export_fd(memory.base).expect("it is exported");
    let base = hip
        .import_fd(GPU, fd.as_fd(), memory.len, Access::ReadWrite)
        .expect("it is imported");
    assert_ne!(base, memory.base);
    for len in [memory.len + 1, memory.len * 2] {
        let error = hip
            .import_fd(GPU, fd.as_fd(), len, Access::ReadWrite)
            .expect_err("more than there is");
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    }
    // SAFETY: `close`: imported above.
    unsafe { hip.close(base) }.expect("it closes");
    // SAFETY: `free`: made above.
    unsafe { hip.free(memory.base) }.expect("it frees");
}

fn exported_once() {
    let hip = hip();
    let memory = hip.alloc(GPU, 1, Sharing::Handle).expect("there is room");
    let handle = hip.export_handle(memory.base).expect("it is exported");
    // The library gives a handle of its own each time it is asked.
    assert!(hip.export_handle(memory.base).expect("it is exported") == handle);
    // SAFETY: `free`: made above.
    unsafe { hip.free(memory.base) }.expect("it frees");
    assert!(
        hip.export_handle(memory.base).is_err(),
        "the handle outlived its memory"
    );
}

fn adopted() {
    let hip = hip();
    let mut foreign = 0;
    assert_eq!(malloc(&raw mut foreign, 1 << 20), 0);
    let base = DevicePtr(foreign);
    let error = hip.export_handle(base).expect_err("nobody vouched for it");
    assert!(error.to_string().contains("adopt_memory"), "{error}");
    // SAFETY: `adopt_memory`: it came from hipMalloc, and is freed after it is forgotten.
    let range = unsafe { hip.adopt_memory(base.offset(100)) }.expect("it is device memory");
    assert_eq!(range.base, base);
    // SAFETY: `adopt_memory`: as above.
    assert!(unsafe { hip.adopt_memory(base) }.is_err(), "adopted twice");
    assert_eq!(
        hip.classify(base).expect("it tells").sharing,
        Some(Sharing::Handle)
    );
    assert!(hip.export_handle(base).is_ok());
    assert!(
        // SAFETY: `free`: the table refuses what it did not allocate.
        unsafe { hip.free(base) }.is_err(),
        "freed what somebody else allocated"
    );
    assert!(hip.forget_memory(base) && !hip.forget_memory(base));
    assert!(hip.export_handle(base).is_err());
    assert_eq!(free(foreign), 0);
    // SAFETY: `adopt_memory`: the runtime does not know the address.
    assert!(unsafe { hip.adopt_memory(DevicePtr(0x10)) }.is_err());
}

fn interior() {
    let hip = hip();
    for sharing in [Sharing::Handle, Sharing::Fd] {
        let memory = hip.alloc(GPU, 1, sharing).expect("there is room");
        let inside = memory.base.offset(64);
        let (handle, fd) = (hip.export_handle(inside), hip.export_fd(inside));
        for error in
            [handle.map(|_| ()), fd.map(|_| ())].map(|refused| refused.expect_err("it is no base"))
        {
            assert!(error.to_string().contains("offset"), "{error}");
        }
        // SAFETY: `free`: made above.
        unsafe { hip.free(memory.base) }.expect("it frees");
    }
}

fn dma_buf() {
    use std::os::fd::AsFd;

    let hip = proved(&[backend_hip::Step::DmaBuf]);
    assert!(!hip.caps(GPU).expect("it is a device").read_only);
    let memory = hip.alloc(GPU, 1, Sharing::Fd).expect("there is room");
    let fd = hip.export_fd(memory.base).expect("it is exported");
    let error = hip
        .import_fd(GPU, fd.as_fd(), memory.len, Access::ReadOnly)
        .expect_err("it would be writable");
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert!(matches!(
        hip.import_fd(GPU, fd.as_fd(), memory.len * 2, Access::ReadWrite),
        Err(Error::Invalid { .. })
    ));
    let base = hip
        .import_fd(GPU, fd.as_fd(), memory.len, Access::ReadWrite)
        .expect("it is imported");
    // SAFETY: `close`: imported above.
    unsafe { hip.close(base) }.expect("it closes");
    // SAFETY: `free`: made above.
    unsafe { hip.free(memory.base) }.expect("it frees");
    let error = hip.export_handle(memory.base).expect_err("it is freed");
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
}

fn lacking() {
    let hip = hip();
    let caps = hip.caps(GPU).expect("it is a device");
    assert!(
        caps.handle
            && caps.event_ipc
            && !caps.fd
            && !caps.read_only
            && caps.stream_writes
            && !caps.stream_waits
    );
    assert!(matches!(
        hip.alloc(GPU, 1, Sharing::Fd),
        Err(Error::Unsupported { .. })
    ));
}
