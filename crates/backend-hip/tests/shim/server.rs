//! Memory that a thread of the exporter's runtime hands out: what happens when either side dies or
//! stops, and what a handle opens.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use gpu_api::groups::*;
use gpu_api::{DevicePtr, Error, MemHandle, Result, Sharing};

use crate::foreign::{Exporter, namesake};
use crate::library::{launch_host_func, stream_create};
use crate::{Case, GPU, WHOLE, hip};

/// The server waits less long than AMD's, where a case has it wait.
const QUICK: (&str, &str) = ("GPU_IPC_SHIM_PATIENCE_MS", "300");
const OF_7_2: &[(&str, &str)] = &[QUICK];
const OF_6_4: &[(&str, &str)] = &[
    QUICK,
    ("GPU_IPC_SHIM_VERSION", "60443484"),
    ("HSA_ENABLE_IPC_MODE_LEGACY", "0"),
];
const BY_CALLS: &[(&str, &str)] = &[QUICK, ("HSA_ENABLE_IPC_MODE_LEGACY", "1")];
const WAITS: &[(&str, &str)] = &[QUICK, ("GPU_IPC_SHIM_INJECT", "destroy-event-waits")];
const SPINS: &[(&str, &str)] = &[QUICK, ("GPU_IPC_SHIM_INJECT", "open-spins")];

/// What a call that waits for nothing may take, before the case fails.
const WATCHDOG: Duration = Duration::from_secs(60);

macro_rules! case {
    ($name:ident, $environment:expr) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            environment: $environment,
            run: $name,
        }
    };
}

pub const CASES: &[Case] = &[
    // Clients of the server that die: `AsyncIPCSockServerConnLoop`.
    case!(a_consumer_killed_in_an_open_takes_no_handles_away, OF_7_2),
    Case {
        name: "a_consumer_killed_in_an_open_takes_no_handles_away_in_6_4",
        library: WHOLE,
        environment: OF_6_4,
        run: a_consumer_killed_in_an_open_takes_no_handles_away,
    },
    case!(a_server_that_ends_is_replaced, OF_7_2),
    case!(
        a_consumer_killed_in_the_queue_does_not_end_a_c_producer,
        OF_7_2
    ),
    // Exporters that die or do not answer: `IPCRecvHandle`; rs#9827.
    case!(an_open_is_left_when_its_exporter_dies, SPINS),
    case!(an_open_that_gets_no_answer_is_left, OF_7_2),
    case!(handles_of_kernel_calls_need_no_server, BY_CALLS),
    // `bind` of a name that is taken.
    case!(a_name_that_another_process_has_is_told, OF_7_2),
    // rs#11892, rs#11462.
    case!(memory_that_is_not_the_handles_is_refused, OF_7_2),
    case!(memory_of_other_libraries_opens_without_a_seal, OF_7_2),
    // rs#7520.
    case!(a_free_destroys_no_event, WAITS),
];

/// Opens and closes a handle.
fn opens(handle: &MemHandle) -> Result<()> {
    let hip = hip();
    let base = hip.open_handle(GPU, handle)?;
    // SAFETY: `close`: opened above, and nothing uses it.
    unsafe { hip.close(base) }
}

/// Connects to a server and asks for the memory, as an importer's runtime does.
fn ask(exporter: &Exporter) -> UnixStream {
    let mut client = UnixStream::connect_addr(&exporter.server()).expect("it listens");
    client
        .write_all(&exporter.handle.0[..32])
        .expect("it is asked");
    client
}

fn await_service(exporter: &mut Exporter) {
    while !exporter.is_served() {
        thread::yield_now();
    }
}

fn a_consumer_killed_in_an_open_takes_no_handles_away() {
    let mut exporter = Exporter::start();
    let client = ask(&exporter);
    // It dies with the answer unread.
    let mut answer = [0];
    rustix::net::recv(&client, &mut answer, rustix::net::RecvFlags::PEEK).expect("it answers");
    drop(client);
    while UnixStream::connect_addr(&exporter.server()).is_ok() {
        thread::yield_now();
    }
    assert!(opens(&exporter.handle).is_err(), "nothing serves it");
    assert!(!exporter.is_served(), "it is exported again");
    await_service(&mut exporter);
    opens(&exporter.handle).expect("the same bytes open again");
}

fn a_server_that_ends_is_replaced() {
    let mut exporter = Exporter::with("server-dies");
    for _ in 0..3 {
        await_service(&mut exporter);
        opens(&exporter.handle).expect("one client is served");
        while UnixStream::connect_addr(&exporter.server()).is_ok() {
            thread::yield_now();
        }
    }
}

fn a_consumer_killed_in_the_queue_does_not_end_a_c_producer() {
    let mut exporter = Exporter::start();
    let mut first = ask(&exporter);
    first.read_exact(&mut [0; 64]).expect("it answers");
    drop(ask(&exporter));
    // Now the server comes to the one that has gone.
    first.write_all(&[1]).expect("it waits for that");
    while UnixStream::connect_addr(&exporter.server()).is_ok() {
        thread::yield_now();
    }
    await_service(&mut exporter);
    opens(&exporter.handle).expect("the producer is alive");
}

/// Waits until a process has a thread of this name.
fn await_thread(pid: u32, name: &str) {
    let is_it = |task: fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
    };
    let tasks = || fs::read_dir(format!("/proc/{pid}/task")).expect("it is alive");
    while !tasks().flatten().any(is_it) {
        thread::yield_now();
    }
}

fn said(opened: Result<()>) -> String {
    match opened {
        Err(Error::Driver {
            call: "hipIpcOpenMemHandle",
            source,
            ..
        }) => source.name.into_owned(),
        other => panic!("{other:?}"),
    }
}

fn an_open_is_left_when_its_exporter_dies() {
    let (mut stalls, other) = (Exporter::with("server-stalls"), Exporter::start());
    let handle = stalls.handle;
    let opening = thread::spawn(move || opens(&handle));
    await_thread(stalls.pid(), "hsa-stalls");
    opens(&other.handle).expect("it waits for no other process's memory");
    stalls.kill();
    let why = said(opening.join().expect("no panic"));
    assert!(why.contains("has died"), "{why}");
    opens(&other.handle).expect("nor for a call that was left");
}

fn an_open_that_gets_no_answer_is_left() {
    let (mut stalls, other) = (Exporter::with("server-stalls"), Exporter::start());
    let why = said(opens(&stalls.handle));
    assert!(why.contains("does not answer"), "{why}");
    let hip = hip();
    let kept = hip.open_handle(GPU, &stalls.handle);
    // Another backend of the process has its own table of calls.
    let why = said(kept.map(|_| ()));
    assert!(why.contains("does not answer"), "{why}");
    let why = said(hip.open_handle(GPU, &stalls.handle).map(|_| ()));
    assert!(why.contains("has not returned"), "{why}");
    opens(&other.handle).expect("another process answers");
    stalls.kill();
}

fn handles_of_kernel_calls_need_no_server() {
    let mut exporter = Exporter::with("server-dies");
    assert!(
        UnixStream::connect_addr(&exporter.server()).is_err(),
        "there is none"
    );
    assert!(exporter.is_served());
    opens(&exporter.handle).expect("the kernel has it");
}

fn a_name_that_another_process_has_is_told() {
    let mut namesake = namesake();
    let hip = hip();
    let memory = hip.alloc(GPU, 1, Sharing::Handle).expect("there is room");
    match hip.export_handle(memory.base) {
        Err(Error::Driver { source, .. }) => {
            assert_eq!(source.code, 1);
            assert!(source.name.contains("--pid=host"), "{source}");
        }
        other => panic!("{:?}", other.map(|_| ())),
    }
    namesake.end();
    hip.export_handle(memory.base).expect("the name is free");
}

fn memory_that_is_not_the_handles_is_refused() {
    let exporter = Exporter::with("opens-others");
    let mappings = || {
        let maps = fs::read_to_string("/proc/self/maps").expect("it is there");
        maps.lines()
            .filter(|line| line.contains("memfd:gpu-ipc-host"))
            .count()
    };
    let hip = hip();
    let before = mappings();
    let why = said(hip.open_handle(GPU, &exporter.handle).map(|_| ()));
    assert!(why.contains("other memory"), "{why}");
    assert_eq!(mappings(), before, "it stayed mapped");
}

fn memory_of_other_libraries_opens_without_a_seal() {
    let exporter = Exporter::start();
    let mut bytes = exporter.handle.0;
    // What PyTorch's handles end with is whatever was on its stack.
    bytes[56..].copy_from_slice(b"anything");
    opens(&MemHandle(bytes)).expect("there is nothing to compare");
}

fn a_free_destroys_no_event() {
    let hip = hip();
    let memory = hip.alloc(GPU, 1, Sharing::Handle).expect("there is room");
    let _known = hip.create_stream(GPU).expect("a stream");
    let mut application = 0;
    assert_eq!(stream_create(&raw mut application, 1), 0);
    let (go, gate) = mpsc::channel::<()>();
    let gate = Box::into_raw(Box::new(gate)).cast();
    assert_eq!(launch_host_func(application, held, gate), 0);
    let (freed, is_freed) = mpsc::channel();
    thread::spawn(move || {
        free_all(&hip, memory.base);
        freed.send(()).expect("the case waits");
    });
    is_freed
        .recv_timeout(WATCHDOG)
        .expect("a free waits for the application's stream");
    drop(go);
}

fn free_all(hip: &backend_hip::HipBackend, base: DevicePtr) {
    // SAFETY: `free`: allocated by the caller, and nothing uses it.
    unsafe { hip.free(base) }.expect("it frees");
}

/// Holds up a stream until the other end is dropped.
unsafe extern "C" fn held(gate: *mut std::ffi::c_void) {
    // SAFETY: `Box::from_raw`: the case made it so, for one call.
    let gate = unsafe { Box::from_raw(gate.cast::<mpsc::Receiver<()>>()) };
    assert!(gate.recv().is_err(), "nothing is ever sent");
}
