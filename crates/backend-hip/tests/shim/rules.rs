//! Rules that stand in AMD's own sources, each with what the backend did wrong before it knew of
//! it.

use std::env;
use std::fs;
use std::os::fd::AsFd;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use backend_hip::Step;
use gpu_api::groups::*;
use gpu_api::{Access, DeviceId, DevicePtr, Error, MemHandle, Sharing};
use rustix::process::{Pid, Signal, kill_process};

use crate::foreign::Exporter;
use crate::library::{self, PROPERTIES};
use crate::{Case, GPU, WHOLE, hip, proved};

macro_rules! rule {
    ($name:ident, $environment:expr, $run:expr) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            environment: $environment,
            run: $run,
        }
    };
}

const OF_5_7: &[(&str, &str)] = &[
    ("GPU_IPC_SHIM_VERSION", "50731921"),
    ("GPU_IPC_SHIM_INJECT", "no-kernel-ipc"),
];
const OF_6_2: &[(&str, &str)] = &[("GPU_IPC_SHIM_VERSION", "60242134")];
const OF_7_2: &[(&str, &str)] = &[("GPU_IPC_SHIM_VERSION", "70253211")];
const OF_7_14: &[(&str, &str)] = &[
    ("GPU_IPC_SHIM_VERSION", "71400000"),
    ("GPU_IPC_HOST_DEVICES", "2"),
];
const NO_IPC: &[(&str, &str)] = &[
    ("GPU_IPC_SHIM_INJECT", "no-kernel-ipc"),
    ("GPU_IPC_SHIM_VERSION", "60443484"),
];
const TAKES: &[(&str, &str)] = &[("GPU_IPC_SHIM_INJECT", "import-takes")];

const TWO: &[(&str, &str)] = &[("GPU_IPC_HOST_DEVICES", "2")];

const NO_KFD: &[(&str, &str)] = &[("GPU_IPC_SHIM_KFD", "")];

pub const CASES: &[Case] = &[
    // `hipMemRetainAllocationHandle`: rs#5807, rs#2696, change logs of 7.12 and 7.14.
    rule!(
        looking_at_others_virtual_memory_drops_no_reference_of_theirs_in_7_2,
        OF_7_2,
        others_virtual_memory
    ),
    rule!(
        looking_at_others_virtual_memory_drops_no_reference_of_theirs_in_7_14,
        OF_7_14,
        others_virtual_memory
    ),
    // `hipStreamDestroy` waits: its header, hip#3367.
    rule!(a_held_stream_is_destroyed_without_waiting, &[], held_stream),
    // A wait occupies one of few hardware queues, so a proof of writes is none of waits.
    rule!(
        waits_are_not_used_where_writes_are_proved,
        &[],
        writes_alone
    ),
    // Queues of a dead process that go later: `kfd_process_remove_sysfs`, and the two patches of
    // amdkfd.
    rule!(
        a_process_shows_its_life_where_the_kernel_does,
        &[],
        life_is_shown
    ),
    rule!(
        where_the_kernel_shows_no_life_the_quarantine_is_longer,
        NO_KFD,
        life_is_hidden
    ),
    rule!(a_process_in_a_container_finds_its_own_sign, &[], contained),
    // Handles: ROCR-Runtime#270, rs#2209; success of 5.7.1 to 6.1.2; the exporter's ordinal.
    rule!(
        a_kernel_that_exports_nothing_is_named,
        NO_IPC,
        no_kernel_ipc
    ),
    rule!(
        a_false_success_is_explained_where_it_is_opened,
        OF_5_7,
        false_success
    ),
    rule!(
        a_handle_opens_where_the_processes_see_different_devices,
        &[],
        unseen_device
    ),
    // External memory: `retain` in `hipExternalMemoryGetMappedBuffer`; nothing closes the
    // descriptor.
    rule!(
        an_imported_dma_buf_is_given_back_whole,
        &[],
        dma_buf_given_back
    ),
    rule!(
        a_descriptor_that_the_runtime_closed_is_not_closed_again,
        TAKES,
        dma_buf_given_back
    ),
    // One agent maps it: `rocmemory.cpp`, 212 to 214; every failure is out of memory:
    // `hip_memory.cpp`, 129 to 132.
    rule!(an_imported_dma_buf_is_for_one_device, TWO, one_device),
    rule!(
        a_refused_dma_buf_is_told_with_both_causes,
        &[],
        refused_dma_buf
    ),
    // Virtual memory: `hip_vm.cpp` of 6.2.2; rs#8304, rs#8436.
    rule!(what_was_not_mapped_is_not_unmapped, OF_6_2, failed_mapping),
    rule!(
        a_descriptor_is_kept_while_the_runtime_needs_it,
        OF_7_14,
        kept_descriptor
    ),
];

fn others_virtual_memory() {
    let hip = hip();
    let (len, mut handle, mut base) = (2 << 20, 0, 0);
    assert_eq!(
        library::mem_create(&raw mut handle, len, &raw const PROPERTIES, 0),
        0
    );
    assert_eq!(library::mem_reserve(&raw mut base, len, 0, 0, 0), 0);
    assert_eq!(library::mem_map(base, len, 0, handle, 0), 0);
    for _ in 0..3 {
        let info = hip.classify(DevicePtr(base)).expect("it tells");
        assert_eq!((info.sharing, info.device), (None, Some(GPU)));
    }
    assert_eq!(library::mem_unmap(base, len), 0);
    assert_eq!(
        library::mem_release(handle),
        0,
        "its reference was dropped by somebody else"
    );
}

fn held_stream() {
    let hip = hip();
    let stream = hip.create_stream(GPU).expect("a stream");
    let (go, gate) = channel::<()>();
    let done = Arc::new(AtomicBool::new(false));
    let seen = done.clone();
    let wait = Box::new(move || {
        assert!(gate.recv().is_err(), "nothing is ever sent");
        seen.store(true, Ordering::Release);
    });
    // SAFETY: `host_function`: the stream is alive.
    unsafe { hip.host_function(stream, wait) }.expect("it queues");
    // SAFETY: `destroy_stream`: the stream is alive, and nobody uses it afterwards.
    unsafe { hip.destroy_stream(stream) }.expect("it returns while the stream is held");
    assert!(!done.load(Ordering::Acquire));
    drop(go);
    while !done.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
}

fn writes_alone() {
    let hip = proved(&[Step::Words]);
    let caps = hip.caps(GPU).expect("it is a device");
    assert!(caps.stream_writes && !caps.stream_waits);
    let stream = hip.create_stream(GPU).expect("a stream");
    let wait = gpu_api::StreamOp::WaitGeq {
        word: gpu_api::WordPtr(64),
        value: 1,
    };
    // SAFETY: `stream_batch`: it is refused before the word is looked at.
    let error = unsafe { hip.stream_batch(stream, &[wait]) }.expect_err("a wait is not proved");
    assert!(error.to_string().contains("GPU_IPC_HIP_PROOF"), "{error}");
}

fn life_is_shown() {
    let hip = hip();
    let shown = |pid| hip.signs_of_life(pid, 0).iter().all(|sign| sign.exists());
    assert_eq!(hip.own_sign(GPU).expect("a device"), process::id());
    assert_eq!(hip.signs_of_life(process::id(), 0).len(), 1);
    assert!(shown(process::id()));
    assert_eq!(hip.quarantine(true), Duration::from_millis(100));
    // It goes with the process, before anything waits for that.
    let mut other = Exporter::start();
    assert!(shown(other.pid()));
    let pid = Pid::from_raw(other.pid().cast_signed()).expect("a number");
    kill_process(pid, Signal::KILL).expect("it is alive");
    while shown(other.pid()) {
        std::thread::yield_now();
    }
    other.kill();
}

fn life_is_hidden() {
    let hip = hip();
    assert!(hip.signs_of_life(process::id(), 7).is_empty());
    assert_eq!(hip.own_sign(GPU).expect("a device"), 0);
    assert!(hip.quarantine(false) >= Duration::from_secs(1));
}

fn contained() {
    let folder = tempfile::tempdir().expect("a directory");
    let stranger = folder.path().join("17");
    fs::create_dir(&stranger).expect("made");
    fs::write(stranger.join("vram_7"), "4096").expect("written");
    let named = format!("hidden:{}", folder.path().display());
    // SAFETY: `set_var` asks that no other thread reads the environment: this is the only thread.
    unsafe { env::set_var("GPU_IPC_SHIM_KFD", named) };
    let hip = hip();
    let before = hip.memory_info(GPU).expect("a device").free_bytes;
    let sign = hip.own_sign(GPU).expect("a device");
    assert_eq!(sign, 1_000_000 + process::id());
    let after = hip.memory_info(GPU).expect("a device").free_bytes;
    assert_eq!(before, after, "it gives back what it held");
    let shown = folder.path().join(sign.to_string());
    assert!(shown.exists());
    assert_eq!(hip.signs_of_life(process::id(), sign), [shown]);
    assert!(hip.signs_of_life(process::id(), 0).is_empty());
}

fn no_kernel_ipc() {
    let hip = hip();
    let memory = hip.alloc(GPU, 1, Sharing::Handle).expect("there is room");
    match hip.export_handle(memory.base) {
        Err(Error::Driver {
            call: "hipIpcGetMemHandle",
            source,
            ..
        }) => {
            assert_eq!(source.code, 1);
            assert!(source.name.contains("KFD's calls"), "{source}");
            assert!(
                !source.name.contains("export_handle"),
                "advice to call what just failed: {source}"
            );
        }
        other => panic!("{:?}", other.map(|_| ())),
    }
}

fn false_success() {
    let (hip, exporter) = (hip(), Exporter::start());
    match hip.open_handle(GPU, &exporter.handle) {
        Err(Error::Driver { source, .. }) => {
            assert_eq!(source.code, 17);
            assert!(source.name.contains("never exported"), "{source}");
        }
        other => panic!("{other:?}"),
    }
}

fn unseen_device() {
    let (hip, exporter) = (hip(), Exporter::start());
    let mut bytes = exporter.handle.0;
    bytes[52] = 7;
    let opened = hip
        .open_handle(GPU, &MemHandle(bytes))
        .expect("the number is the importer's own in the call");
    // SAFETY: `close`: opened above, and nothing uses it.
    unsafe { hip.close(opened) }.expect("it was opened");
}

/// Lists open descriptors of memory.
fn descriptors() -> usize {
    let open = fs::read_dir("/proc/self/fd")
        .expect("it is there")
        .flatten();
    open.filter(|entry| {
        fs::read_link(entry.path()).is_ok_and(|link| link.to_string_lossy().contains("memfd"))
    })
    .count()
}

/// Counts mappings of memory.
fn mappings() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").expect("it is there");
    maps.lines()
        .filter(|line| line.contains("memfd:gpu-ipc-host"))
        .count()
}

fn dma_buf_given_back() {
    let hip = proved(&[Step::DmaBuf]);
    let memory = hip.alloc(GPU, 1, Sharing::Fd).expect("there is room");
    let fd = hip.export_fd(memory.base).expect("it is exported");
    let before = (descriptors(), mappings());
    for _ in 0..3 {
        let base = hip
            .import_fd(GPU, fd.as_fd(), memory.len, Access::ReadWrite)
            .expect("it is imported");
        assert_ne!(mappings(), before.1);
        // SAFETY: `close`: imported above, and nothing uses it.
        unsafe { hip.close(base) }.expect("it closes");
        let (mut start, mut len) = (0, 0);
        assert_ne!(
            library::address_range(&raw mut start, &raw mut len, base.0),
            0,
            "the mapping stayed"
        );
        assert_eq!(
            (descriptors(), mappings()),
            before,
            "a descriptor or a mapping stayed"
        );
    }
}

fn one_device() {
    let hip = proved(&[Step::DmaBuf]);
    let memory = hip.alloc(GPU, 1, Sharing::Fd).expect("there is room");
    let fd = hip.export_fd(memory.base).expect("it is exported");
    let import = || hip.import_fd(GPU, fd.as_fd(), memory.len, Access::ReadWrite);
    let refused = |error: Error| match error {
        Error::Unsupported { why, .. } => assert!(why.contains("one agent"), "{why}"),
        other => panic!("{other:?}"),
    };
    let base = import().expect("no device reaches another's memory");
    let reach = hip.enable_peer_access(DeviceId(1), GPU);
    refused(reach.expect_err("it would fault there"));
    hip.enable_peer_access(GPU, DeviceId(1))
        .expect("the other has none of it");
    // SAFETY: `close`: imported above, and nothing uses it.
    unsafe { hip.close(base) }.expect("it closes");
    hip.enable_peer_access(DeviceId(1), GPU)
        .expect("nothing is imported");
    refused(import().expect_err("the other device was promised all of it"));
}

fn refused_dma_buf() {
    let hip = proved(&[Step::DmaBuf]);
    let none = fs::File::open("/dev/zero").expect("it is there");
    match hip.import_fd(GPU, none.as_fd(), 2 << 20, Access::ReadWrite) {
        Err(Error::Invalid { got, .. }) => {
            for said in ["hipErrorOutOfMemory", "bad descriptor", "bytes are free"] {
                assert!(got.contains(said), "{got}");
            }
        }
        other => panic!("{other:?}"),
    }
}

fn failed_mapping() {
    let hip = hip();
    let memory = hip.alloc(GPU, 4 << 20, Sharing::Fd).expect("there is room");
    let fd = hip.export_fd(memory.base).expect("it is exported");
    // The stand-in maps whole memory only, and says that it mapped the half.
    assert!(
        hip.import_fd(GPU, fd.as_fd(), 2 << 20, Access::ReadWrite)
            .is_err()
    );
    let base = hip
        .import_fd(GPU, fd.as_fd(), 4 << 20, Access::ReadWrite)
        .expect("it is imported");
    // SAFETY: `close`: imported above, and nothing uses it.
    unsafe { hip.close(base) }.expect("it closes");
}

fn kept_descriptor() {
    let hip = hip();
    let memory = hip.alloc(GPU, 1, Sharing::Fd).expect("there is room");
    let fd = hip.export_fd(memory.base).expect("it is exported");
    let before = descriptors();
    let base = hip
        .import_fd(GPU, fd.as_fd(), memory.len, Access::ReadWrite)
        .expect("it is imported");
    drop(fd);
    // Its number is another file's.
    let _other = fs::File::open("/dev/null").expect("it is there");
    hip.enable_peer_access(DeviceId(1), GPU)
        .expect("the runtime finds the descriptor once more");
    // SAFETY: `close`: imported above, and nothing uses it.
    unsafe { hip.close(base) }.expect("it closes");
    // But for the one that was dropped.
    assert_eq!(descriptors(), before - 1, "a descriptor stayed");
}
