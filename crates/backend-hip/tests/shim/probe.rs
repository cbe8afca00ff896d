//! What the probe proves of a runtime that does as it says, and of one that does not.

use std::env;
use std::time::Duration;

use backend_hip::{Hip, PoolDefect, Step};
use gpu_api::groups::*;
use gpu_api::{DeviceId, Error};
use hip_probe::{Findings, prove, prove_and_tell};

use crate::{Case, GPU, Library, WHOLE, proved};

/// So long a step that does not come back is waited for; steps that do are given all the time they
/// want.
const SHORT: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(600);

macro_rules! fault {
    ($name:ident, $fault:literal, $step:expr, $patience:expr, $why:literal) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            // Virtual memory is proved from 7.14 on.
            environment: &[
                ("GPU_IPC_SHIM_INJECT", $fault),
                ("GPU_IPC_SHIM_VERSION", "71400000"),
            ],
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

macro_rules! proved {
    ($name:ident, $version:literal, $step:expr) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            environment: &[("GPU_IPC_SHIM_VERSION", $version)],
            run: || assert_eq!(findings(&[$step], LONG).proof.steps(), [$step]),
        }
    };
}

macro_rules! pools {
    ($name:ident, $version:literal, $fault:literal, $defect:ident) => {
        Case {
            name: stringify!($name),
            library: WHOLE,
            environment: &[
                ("GPU_IPC_SHIM_VERSION", $version),
                ("GPU_IPC_SHIM_INJECT", $fault),
            ],
            run: || disproved_pools(PoolDefect::$defect),
        }
    };
}

const TWO: &[(&str, &str)] = &[("GPU_IPC_HOST_DEVICES", "2")];

pub const CASES: &[Case] = &[
    Case {
        name: "what_works_is_proved_on_every_device",
        library: WHOLE,
        environment: &[
            ("GPU_IPC_HOST_DEVICES", "2"),
            ("GPU_IPC_SHIM_VERSION", "71400000"),
            ("GPU_IPC_SHIM_INJECT", "free-queues"),
        ],
        run: everything,
    },
    Case {
        name: "what_one_device_fails_is_used_on_the_others",
        library: WHOLE,
        environment: &[
            ("GPU_IPC_HOST_DEVICES", "2"),
            ("GPU_IPC_SHIM_INJECT", "poor-device"),
        ],
        run: poor_device,
    },
    // A stream's wait occupies a hardware queue: `getQueueFromPool`; rs#1958, rs#9249.
    version!(
        waits_on_queues_that_streams_are_bound_to_are_not_proved,
        "60443484",
        Step::Waits,
        "another works on"
    ),
    version!(
        waits_that_occupy_every_queue_are_not_proved,
        "71400000",
        Step::Waits,
        "another works on"
    ),
    proved!(
        writes_of_6_4_are_proved_without_waits,
        "60443484",
        Step::Words
    ),
    proved!(
        writes_of_7_14_are_proved_without_waits,
        "71400000",
        Step::Words
    ),
    proved!(handles_of_5_2_are_proved, "50221153", Step::Handles),
    proved!(handles_of_7_2_are_proved, "70253211", Step::Handles),
    proved!(dma_bufs_of_7_2_are_proved, "70253211", Step::DmaBuf),
    // Handles of nothing, which 5.7 to 6.1 call a success; and memory that stays: hip#3886,
    // hip#3781.
    Case {
        name: "handles_that_nobody_can_open_are_not_proved",
        library: WHOLE,
        environment: &[
            ("GPU_IPC_SHIM_INJECT", "no-kernel-ipc"),
            ("GPU_IPC_SHIM_VERSION", "60141133"),
        ],
        run: || disproved(Step::Handles, LONG, "never exported"),
    },
    // `bind`, and rs#8517.
    fault!(
        handles_that_nothing_hands_out_are_not_proved,
        "export-collides",
        Step::Handles,
        LONG,
        "hipIpcGetMemHandle"
    ),
    fault!(
        dma_bufs_after_which_an_allocation_crashes_are_not_proved,
        "alloc-after-export-crashes",
        Step::DmaBuf,
        LONG,
        "signal: 6"
    ),
    Case {
        name: "handles_that_open_other_memory_are_not_proved",
        library: WHOLE,
        environment: &[
            ("GPU_IPC_SHIM_INJECT", "opens-others"),
            ("GPU_IPC_HOST_BYTES", "8589934592"),
        ],
        run: || disproved(Step::Handles, LONG, "other memory"),
    },
    fault!(
        handles_whose_memory_stays_are_not_proved,
        "export-leaks",
        Step::Handles,
        LONG,
        "comes back"
    ),
    fault!(
        virtual_memory_that_stays_is_not_proved,
        "export-leaks",
        Step::Vmm,
        LONG,
        "comes back"
    ),
    // Mapping runs on the null stream before 7.14: rs#6982.
    version!(
        virtual_memory_of_5_7_is_not_proved,
        "50731921",
        Step::Vmm,
        "default stream"
    ),
    version!(
        virtual_memory_of_6_4_is_not_proved,
        "60443484",
        Step::Vmm,
        "default stream"
    ),
    version!(
        virtual_memory_of_7_2_is_not_proved,
        "70253211",
        Step::Vmm,
        "default stream"
    ),
    Case {
        name: "findings_are_told_as_they_come",
        library: WHOLE,
        environment: TWO,
        run: told_as_they_come,
    },
    fault!(
        words_that_are_refused_are_not_proved,
        "no-words",
        Step::Words,
        LONG,
        "801"
    ),
    fault!(
        words_that_come_early_are_not_proved,
        "early-words",
        Step::Words,
        LONG,
        "the work before it"
    ),
    fault!(
        events_that_do_not_wait_are_not_proved,
        "event-lies",
        Step::Events,
        LONG,
        "waits for the event"
    ),
    fault!(
        events_that_lapse_are_not_proved,
        "event-lapses",
        Step::Events,
        LONG,
        "waits for the event"
    ),
    fault!(
        events_that_are_forgotten_are_not_proved,
        "event-forgets",
        Step::Events,
        LONG,
        "waits for the event"
    ),
    fault!(
        events_that_block_are_not_proved,
        "event-blocks",
        Step::Events,
        SHORT,
        "did not come back"
    ),
    fault!(
        memory_that_is_not_exported_is_not_proved,
        "no-export",
        Step::Vmm,
        LONG,
        ""
    ),
    fault!(
        memory_that_dies_with_its_exporter_is_not_proved,
        "export-dies",
        Step::Vmm,
        LONG,
        "signal"
    ),
    fault!(
        read_only_memory_that_can_be_written_is_not_proved,
        "writable-reads",
        Step::ReadOnly,
        LONG,
        "stayed"
    ),
    fault!(
        an_import_that_kills_is_not_proved,
        "import-aborts",
        Step::Vmm,
        LONG,
        "signal: 6"
    ),
    fault!(
        an_import_that_hangs_is_not_proved,
        "import-hangs",
        Step::Vmm,
        SHORT,
        "did not come back"
    ),
    version!(
        virtual_memory_of_5_2_is_not_proved,
        "50221153",
        Step::Vmm,
        "file descriptor"
    ),
    version!(
        dma_bufs_of_6_4_are_not_proved,
        "60443484",
        Step::DmaBuf,
        "801"
    ),
    // Pools: rs#10943, rs#11642, rs#11690 of 7.2, hip#3775 of 6.3, and what else an allocator must
    // not do.
    proved!(pools_of_5_2_are_proved, "50221153", Step::Pools),
    proved!(pools_of_6_2_are_proved, "60242134", Step::Pools),
    proved!(pools_of_7_0_are_proved, "70051831", Step::Pools),
    proved!(pools_of_7_14_are_proved, "71400000", Step::Pools),
    pools!(pools_of_6_4_are_not_proved, "60443484", "", RunsOut),
    pools!(pools_of_7_2_are_not_proved, "70253211", "", LosesBytes),
    pools!(
        pools_that_lose_bytes_are_not_proved,
        "71400000",
        "pool-loses",
        LosesBytes
    ),
    pools!(
        pools_that_give_too_early_are_not_proved,
        "71400000",
        "pool-early",
        TooEarly
    ),
    pools!(
        pools_that_wait_are_not_proved,
        "71400000",
        "pool-waits",
        Waits
    ),
    pools!(
        pools_that_run_out_are_not_proved,
        "71400000",
        "pool-runs-out",
        RunsOut
    ),
    pools!(
        pools_without_memory_are_not_proved,
        "71400000",
        "pool-fails",
        RunsOut
    ),
    pools!(
        pools_that_keep_nothing_are_not_proved,
        "71400000",
        "pool-drops",
        IgnoresThreshold
    ),
    pools!(
        pools_that_keep_everything_are_not_proved,
        "71400000",
        "pool-keeps",
        GivesNothingBack
    ),
    pools!(
        pools_that_keep_the_rest_are_not_proved,
        "71400000",
        "pool-hoards",
        KeepsTheRest
    ),
    pools!(
        pools_that_end_in_a_crash_are_not_proved,
        "71400000",
        "pool-crashes",
        CrashesAtTheEnd
    ),
    Case {
        name: "a_pool_that_the_runtime_lacks_is_not_proved",
        library: Library::Without(&["hipMemPoolTrimTo"]),
        environment: &[],
        run: || disproved(Step::Pools, LONG, "hipMemPoolTrimTo"),
    },
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
    assert_eq!(found.all.len(), 2 * Step::ALL.len());
    for finding in &found.all {
        assert_eq!(
            finding.seen,
            Ok(()),
            "{} on {}",
            finding.step,
            finding.device
        );
    }
    assert_eq!(found.proof.steps(), Step::ALL);
    let caps = proved(found.proof.steps())
        .caps(DeviceId(1))
        .expect("there are two");
    assert!(
        caps.fd
            && caps.read_only
            && caps.event_ipc
            && caps.stream_writes
            && caps.stream_waits
            && caps.pools
    );
}

fn poor_device() {
    let found = findings(&[Step::Handles, Step::Words], LONG);
    assert_eq!(found.proof.steps(), [Step::Handles, Step::Words]);
    let text = found.proof.to_string();
    assert!(
        text.ends_with(" handles words -words@0000:01:00.0"),
        "{text}"
    );
    let hip = Hip::load_with(Some(found.proof)).expect("it is of here");
    let writes = |number| {
        hip.caps(DeviceId(number))
            .expect("it is a device")
            .stream_writes
    };
    assert!(writes(0) && !writes(1));
}

fn told_as_they_come() {
    let program = env::current_exe().expect("a program has a path");
    let mut told = Vec::new();
    let found = prove_and_tell(&program, &[Step::Handles, Step::Words], LONG, |finding| {
        told.push(finding.clone())
    });
    let found = found.expect("the runtime starts");
    assert_eq!(told, found.all);
    assert_eq!(
        told.iter().map(|finding| finding.step).collect::<Vec<_>>(),
        {
            use Step::{Handles, Words};
            [Handles, Handles, Words, Words]
        }
    );
}

fn disproved(step: Step, patience: Duration, why: &str) {
    let found = findings(&[step], patience);
    let [finding] = &found.all[..] else {
        panic!("one step on one device: {found:?}")
    };
    let said = finding.seen.as_ref().expect_err("it does not work");
    assert!(said.contains(why), "{said}");
    assert!(found.proof.steps().is_empty());
    let caps = proved(found.proof.steps())
        .caps(GPU)
        .expect("it is a device");
    assert!(
        caps.handle && !caps.fd && !caps.event_ipc && !caps.stream_writes && !caps.stream_waits
    );
}

fn disproved_pools(defect: PoolDefect) {
    let found = findings(&[Step::Pools], LONG);
    let [finding] = &found.all[..] else {
        panic!("one step on one device: {found:?}")
    };
    let said = finding.seen.as_ref().expect_err("it does not work");
    assert!(said.contains(&defect.to_string()), "{said}");
    assert_eq!(
        (found.proof.steps(), found.proof.pool_defects()),
        (&[][..], &[defect][..])
    );
    let hip = Hip::load_with(Some(found.proof)).expect("it is of here");
    assert!(!hip.caps(GPU).expect("it is a device").pools);
    let error = hip.create_pool(GPU, 0).expect_err("it is wrong");
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(&defect.to_string()) && text.contains("GPU_IPC_HIP_TRY=pools"),
        "{text}"
    );
}
