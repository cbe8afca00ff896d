//! What the probe proves of a runtime that does as it says, and of one that does not.

use std::env;
use std::time::Duration;

use backend_hip::probe::prove;
use backend_hip::{Findings, Step};
use gpu_api::DeviceId;
use gpu_api::groups::*;

use crate::{Case, GPU, Library, WHOLE, proved};

/// So long a step that does not come back is waited for; steps that do are given all the time they want.
const SHORT: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(120);

macro_rules! fault {
    ($name:ident, $fault:literal, $step:expr, $patience:expr, $why:literal) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            environment: &[("GPU_IPC_SHIM_INJECT", $fault)],
            run: || disproved($step, $patience, $why),
        }
    };
}

macro_rules! version {
    ($name:ident, $version:literal, $step:expr, $why:literal) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            environment: &[("GPU_IPC_SHIM_VERSION", $version)],
            run: || disproved($step, LONG, $why),
        }
    };
}

pub const CASES: &[Case] = &[
    Case {
        name: "what_works_is_proved_on_every_device",
        library: WHOLE,
        environment: &[("GPU_IPC_HOST_DEVICES", "2")],
        run: everything,
    },
    fault!(words_that_are_refused_are_not_proved, "no-words", Step::Words, LONG, "801"),
    fault!(words_that_come_early_are_not_proved, "early-words", Step::Words, LONG, "the work before it"),
    fault!(events_that_do_not_wait_are_not_proved, "event-lies", Step::Events, LONG, "waits for the event"),
    fault!(events_that_lapse_are_not_proved, "event-lapses", Step::Events, LONG, "waits for the event"),
    fault!(events_that_are_forgotten_are_not_proved, "event-forgets", Step::Events, LONG, "waits for the event"),
    fault!(events_that_block_are_not_proved, "event-blocks", Step::Events, SHORT, "did not come back"),
    fault!(memory_that_is_not_exported_is_not_proved, "no-export", Step::Vmm, LONG, ""),
    fault!(memory_that_dies_with_its_exporter_is_not_proved, "export-dies", Step::Vmm, LONG, "signal"),
    fault!(read_only_memory_that_can_be_written_is_not_proved, "writable-reads", Step::ReadOnly, LONG, "stayed"),
    fault!(an_import_that_kills_is_not_proved, "import-aborts", Step::Vmm, LONG, "signal: 6"),
    fault!(an_import_that_hangs_is_not_proved, "import-hangs", Step::Vmm, SHORT, "did not come back"),
    version!(virtual_memory_of_5_2_is_not_proved, "50221153", Step::Vmm, "file descriptor"),
    version!(dma_bufs_of_6_4_are_not_proved, "60443484", Step::DmaBuf, "801"),
    Case {
        name: "a_step_that_the_runtime_lacks_is_not_proved",
        library: Library::Without(&["hipStreamWriteValue64"]),
        environment: &[],
        run: || disproved(Step::Words, LONG, "hipStreamWriteValue64"),
    },
];

fn findings(steps: &[Step], patience: Duration) -> Findings {
    let program = env::current_exe().expect("a program has a path");
    prove(&program, steps, patience).expect("the runtime starts")
}

fn everything() {
    let found = findings(&Step::ALL, LONG);
    assert_eq!(found.all.len(), 10);
    for finding in &found.all {
        assert_eq!(finding.seen, Ok(()), "{} on {}", finding.step, finding.device);
    }
    assert_eq!(found.proof.steps(), Step::ALL);
    let caps = proved(found.proof.steps()).caps(DeviceId(1)).expect("there are two");
    assert!(caps.fd && caps.read_only && caps.event_ipc && caps.stream_writes && caps.stream_waits);
}

fn disproved(step: Step, patience: Duration, why: &str) {
    let found = findings(&[step], patience);
    let [finding] = &found.all[..] else { panic!("one step on one device: {found:?}") };
    let said = finding.seen.as_ref().expect_err("it does not work");
    assert!(said.contains(why), "{said}");
    assert!(found.proof.steps().is_empty());
    let caps = proved(found.proof.steps()).caps(GPU).expect("it is a device");
    assert!(caps.handle && !caps.fd && !caps.event_ipc && !caps.stream_writes && !caps.stream_waits);
}
