//! Finding and starting the runtime, and what is said where it does not start.

use std::ffi::c_int;

use backend_hip::{Hip, HipBackend, Proof, Step};
use gpu_api::groups::*;
use gpu_api::{DeviceId, Error, EventKind, Sharing};

use crate::library::{exchange_mode, get_device, get_last_error, set_device};
use crate::{Case, GPU, Library, WHOLE, hip, proved, version};

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

macro_rules! numa_node {
    ($name:ident, $environment:expr, $expected:expr) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            environment: $environment,
            run: || {
                assert_eq!(
                    hip().host_numa_node(GPU).expect("it can be asked"),
                    $expected
                )
            },
        }
    };
}

macro_rules! starts {
    ($name:ident, $version:literal, $text:literal) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            environment: &[("GPU_IPC_SHIM_VERSION", $version)],
            run: || assert_eq!(hip().version().to_string(), $text),
        }
    };
}

const TWO: &[(&str, &str)] = &[("GPU_IPC_HOST_DEVICES", "2")];
const NO_UUID: &[(&str, &str)] = &[
    ("GPU_IPC_SHIM_INJECT", "no-uuid"),
    ("GPU_IPC_HOST_DEVICES", "2"),
];

const PARTITIONS: &[(&str, &str)] = &[
    ("GPU_IPC_SHIM_INJECT", "same-partition-uuid"),
    ("GPU_IPC_HOST_DEVICES", "2"),
];

pub const CASES: &[Case] = &[
    refused!(
        a_named_library_that_is_not_there_is_told,
        Library::Absent,
        &[],
        "GPU_IPC_HIP_LIBRARY names"
    ),
    refused!(
        a_library_that_is_not_amds_is_no_runtime,
        Library::Foreign,
        &[],
        "has no hipRuntimeGetVersion"
    ),
    refused!(
        a_library_that_is_none_is_told,
        Library::Broken,
        &[],
        "libamdhip64.so cannot be loaded: /"
    ),
    Case {
        name: "the_newest_runtime_is_taken",
        library: Library::Installed,
        environment: &[],
        run: || assert_eq!(hip().missing_functions(), ["hipStreamGetId"]),
    },
    Case {
        name: "a_runtime_that_is_loaded_already_is_taken",
        library: Library::Installed,
        environment: &[],
        run: loaded,
    },
    refused!(
        a_machine_without_device_is_told,
        WHOLE,
        &[("GPU_IPC_HOST_DEVICES", "0")],
        "7.2.53211 gave 100"
    ),
    refused!(
        a_machine_without_device_is_told_by_the_oldest_too,
        WHOLE,
        &[
            ("GPU_IPC_HOST_DEVICES", "0"),
            ("GPU_IPC_SHIM_VERSION", "50221153")
        ],
        "5.2.21153 gave 101"
    ),
    refused!(
        a_version_before_all_is_told,
        WHOLE,
        &[("GPU_IPC_SHIM_VERSION", "40400000")],
        "older"
    ),
    numa_node!(
        the_runtime_names_the_numa_node,
        &[("GPU_IPC_SHIM_NUMA_NODE", "1")],
        Some(1)
    ),
    numa_node!(a_machine_of_one_node_names_none, &[], None),
    numa_node!(
        a_runtime_before_7_2_is_not_asked_for_the_node,
        &[
            ("GPU_IPC_SHIM_NUMA_NODE", "1"),
            ("GPU_IPC_SHIM_VERSION", "70051831")
        ],
        None
    ),
    starts!(version_5_2_starts, "50221153", "5.2.21153"),
    starts!(version_5_7_starts, "50731921", "5.7.31921"),
    starts!(version_6_4_starts, "60443484", "6.4.43484"),
    starts!(version_7_0_starts, "70051831", "7.0.51831"),
    starts!(version_7_2_starts, "70253211", "7.2.53211"),
    Case {
        name: "without_a_proof_only_handles_are_used",
        library: WHOLE,
        environment: &[],
        run: without_a_proof,
    },
    Case {
        name: "a_proof_of_elsewhere_is_refused",
        library: WHOLE,
        environment: &[],
        run: proof_of_elsewhere,
    },
    Case {
        name: "a_proof_in_the_environment_of_elsewhere_is_none",
        library: WHOLE,
        environment: &[(backend_hip::PROOF, "70253211 0.0.1-none vmm words")],
        run: || assert!(HipBackend::load().expect("it starts").proof().is_none()),
    },
    Case {
        name: "a_proof_in_the_environment_that_is_none_is_told",
        library: WHOLE,
        environment: &[(backend_hip::PROOF, "yes")],
        run: || assert!(matches!(HipBackend::load(), Err(Error::Invalid { .. }))),
    },
    Case {
        name: "old_runtimes_have_no_virtual_memory",
        library: WHOLE,
        environment: &[("GPU_IPC_SHIM_VERSION", "50221153")],
        run: || assert!(!proved(&[Step::Vmm]).caps(GPU).expect("it is a device").fd),
    },
    Case {
        name: "what_the_runtime_lacks_is_listed",
        library: Library::Without(&["hipLaunchHostFunc", "hipMemGetHandleForAddressRange"]),
        environment: &[],
        run: || {
            assert_eq!(
                hip().missing_functions(),
                ["hipMemGetHandleForAddressRange", "hipLaunchHostFunc"]
            )
        },
    },
    Case {
        name: "a_device_without_identity_has_its_place",
        library: WHOLE,
        environment: NO_UUID,
        run: identity_by_place,
    },
    Case {
        name: "a_runtime_without_identities_has_places",
        library: Library::Without(&["hipDeviceGetUuid"]),
        environment: TWO,
        run: identity_by_place,
    },
    Case {
        name: "devices_of_one_identity_have_their_places",
        library: WHOLE,
        environment: &[
            ("GPU_IPC_SHIM_INJECT", "same-uuid"),
            ("GPU_IPC_HOST_DEVICES", "2"),
        ],
        run: identity_by_place,
    },
    Case {
        name: "partitions_of_one_identity_are_told_apart_by_their_nodes",
        library: WHOLE,
        environment: PARTITIONS,
        run: partitions,
    },
    Case {
        name: "partitions_whose_nodes_are_not_certain_are_refused",
        library: WHOLE,
        environment: PARTITIONS,
        run: uncertain_partitions,
    },
    Case {
        name: "a_sick_device_hides_no_other",
        library: WHOLE,
        environment: &[
            ("GPU_IPC_SHIM_INJECT", "sick-device"),
            ("GPU_IPC_HOST_DEVICES", "8"),
        ],
        run: sick_device,
    },
    Case {
        name: "the_thread_is_left_as_it_was",
        library: WHOLE,
        environment: TWO,
        run: thread_is_left,
    },
    Case {
        name: "no_error_of_ours_is_left_behind",
        library: WHOLE,
        environment: &[],
        run: no_error_is_left,
    },
];

fn unavailable(expected: &str) {
    let error = HipBackend::load().expect_err("the runtime does not start");
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(expected), "{text}");
}

fn loaded() {
    // SAFETY: `Library::new` runs the library's initialisers, which have no conditions.
    let application = unsafe { libloading::os::unix::Library::new("libamdhip64.so.6") }
        .expect("it is on the path");
    assert!(
        hip().missing_functions().is_empty(),
        "another copy was loaded beside the application's"
    );
    drop(application);
}

fn without_a_proof() {
    let hip = HipBackend::load().expect("it starts");
    assert!(hip.proof().is_none());
    let caps = hip.caps(GPU).expect("it is a device");
    assert!(
        caps.handle
            && !caps.fd
            && !caps.read_only
            && !caps.event_ipc
            && !caps.stream_writes
            && !caps.stream_waits
    );
    for refused in [
        hip.alloc(GPU, 1, Sharing::Fd).map(|_| ()),
        hip.create_event(GPU, EventKind::Interprocess).map(|_| ()),
        hip.open_event(GPU, &gpu_api::EventHandle([0; 64]))
            .map(|_| ()),
    ] {
        let error = refused.expect_err("it is not proved");
        assert!(error.to_string().contains("GPU_IPC_HIP_PROOF"), "{error}");
    }
}

fn proof_of_elsewhere() {
    let elsewhere: Proof = "70253211 0.0.1-none vmm".parse().expect("it is one");
    let error = Hip::load_with(Some(elsewhere)).expect_err("it is of another kernel");
    assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
}

fn identity_by_place() {
    let hip = hip();
    let uuid = |device| {
        hip.device_info(DeviceId(device))
            .expect("there are two")
            .uuid
            .0
    };
    assert_eq!(
        (&uuid(0), &uuid(1)),
        (b"pci-0000:00:00.0", b"pci-0000:01:00.0")
    );
}

fn sick_device() {
    let hip = hip();
    assert_eq!(hip.device_count().expect("it counts"), 8);
    let works = |device: &DeviceId| hip.device_info(*device).is_ok();
    assert_eq!((0..8).map(DeviceId).filter(works).count(), 7);
    let error = hip
        .device_info(DeviceId(7))
        .expect_err("it answers nothing");
    assert!(
        matches!(&error, Error::Driver { source, .. } if source.code == 999),
        "{error:?}"
    );
}

fn thread_is_left() {
    let hip = hip();
    assert_eq!(set_device(1), 0);
    let mut mode = 1;
    assert_eq!(exchange_mode(&raw mut mode), 0);
    let memory = hip.alloc(GPU, 1, Sharing::Handle).expect("there is room");
    assert!(hip.alloc(GPU, u64::MAX, Sharing::Handle).is_err());
    assert_eq!(
        hip.memory_info(DeviceId(1)).expect("it tells").total_bytes,
        1 << 30
    );
    // SAFETY: `free`: just made.
    unsafe { hip.free(memory.base) }.expect("it frees");
    let mut device: c_int = -1;
    assert_eq!((get_device(&raw mut device), device), (0, 1));
    let mut mode = 7;
    assert_eq!((exchange_mode(&raw mut mode), mode), (0, 1));
}

fn no_error_is_left() {
    let hip = hip();
    assert!(hip.address_range(gpu_api::DevicePtr(0x10)).is_err());
    assert!(hip.open_handle(GPU, &gpu_api::MemHandle([0; 64])).is_err());
    let stream = hip.create_stream(GPU).expect("a stream");
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let wait = Box::new(move || assert!(gate.recv().is_err(), "nothing is ever sent"));
    // SAFETY: `host_function`: the stream is alive.
    unsafe { hip.host_function(stream, wait) }.expect("it queues");
    // "Not ready" is no success either, and an application that looks for errors would find it.
    // SAFETY: `query_stream`: the stream is alive.
    assert!(!unsafe { hip.query_stream(stream) }.expect("it tells"));
    assert_eq!(get_last_error(), 0);
    drop(go);
    assert_eq!(version().to_string(), hip.version().to_string());
}

/// Has KFD list a processor, and GPUs with one unique number.
fn list_gpus(nodes: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a directory");
    let add = |node: &str, properties: &str| {
        std::fs::create_dir(folder.path().join(node)).expect("made");
        std::fs::write(folder.path().join(node).join("properties"), properties).expect("written");
    };
    add("0", "gfx_target_version 0\nunique_id 0\n");
    for node in nodes {
        let unique = 0x00c0_ffee_1234_5678_u64;
        add(
            node,
            &format!("gfx_target_version 90402\ndevice_id 29857\nunique_id {unique}\n"),
        );
    }
    // SAFETY: `set_var` asks that no other thread reads the environment: this is the only thread.
    unsafe { std::env::set_var("GPU_IPC_SHIM_TOPOLOGY", folder.path()) };
    folder
}

fn partitions() {
    // In the order of their numbers, not of their names.
    let _folder = list_gpus(&["2", "10"]);
    let hip = hip();
    let uuid = |number| {
        hip.device_info(DeviceId(number))
            .expect("it is told apart")
            .uuid
    };
    assert_eq!(uuid(0).0[..8], *b"kfd-0002");
    assert_eq!(uuid(1).0[..8], *b"kfd-000a");
    assert_eq!(uuid(0).0[8..], *b"12345678");
}

fn uncertain_partitions() {
    let _folder = list_gpus(&["2", "10", "11"]);
    let error = hip().device_info(GPU).expect_err("it may be any of them");
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert!(
        error.to_string().contains("ROCR_VISIBLE_DEVICES"),
        "{error}"
    );
}
