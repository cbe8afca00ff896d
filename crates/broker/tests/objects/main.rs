//! Real processes: keeper, broker, writers, readers, through the public interface.
//!
//! With `GPU_IPC_TEST_BACKEND=cuda` they run on a GPU; what only the host backend can be made to do
//! shows as ignored, and so does without one what only a GPU can show.
//!
//! Each case starts this binary again as an [`agent`], and kills or stops it. Nothing here sleeps
//! to be in time: a case waits for a condition, under a watchdog.

mod agent;
mod bad_input;
mod death;
mod gpu;
mod histories;
mod holder;
mod keeping;
mod limits;
mod naming;
mod objects;
mod pools;
mod raw;
mod replicas;
mod rules;
mod step;
mod takeover;
mod versions;

use harness::surroundings::{has_namespaces, has_users};
use harness::wait_until as until;
use libtest_mimic::{Arguments, Failed, Trial};

/// Cases that need what the host backend alone can be made to do: a capture, a shared context, a
/// device that is nearly full, a limit of addresses.
const HOST_ONLY: &[&str] = &[
    "bad_input::a_fill_that_cannot_be_followed_is_refused",
    "bad_input::a_client_of_mps_may_read_and_not_write",
    "bad_input::another_device_is_refused_by_name",
    "bad_input::out_of_memory_half_way_gives_all_back",
    "rules::lost_addresses_say_so_and_the_object_opens_anew",
];

/// A case: its name and what it does.
type Case = (&'static str, fn());

fn main() {
    if let Some(role) = harness::role() {
        return agent::run(role);
    }
    let arguments = Arguments::from_args();
    let trial = |(name, case): Case, ignored| {
        Trial::test(name, move || {
            std::panic::catch_unwind(case).map_err(|panic| Failed::from(text(&*panic)))
        })
        .with_ignored_flag(ignored)
    };
    let mut trials = Vec::new();
    for case in [
        objects::CASES,
        death::CASES,
        keeping::CASES,
        histories::CASES,
        bad_input::CASES,
        limits::CASES,
        naming::CASES,
        pools::CASES,
        takeover::CASES,
        rules::CASES,
        replicas::CASES,
        versions::CASES,
    ]
    .concat()
    {
        trials.push(trial(
            case,
            !agent::is_host() && HOST_ONLY.contains(&case.0),
        ));
    }
    trials.extend(gpu::CASES.iter().map(|&case| trial(case, agent::is_host())));
    let lacks_devices = agent::is_host() || agent::gpu().backend().device_count().unwrap_or(0) < 2;
    trials.extend(
        gpu::TWO_DEVICES
            .iter()
            .map(|&case| trial(case, lacks_devices)),
    );
    let (lacks_namespaces, lacks_users) = (!has_namespaces(), !has_users());
    trials.extend(
        rules::NAMESPACES
            .iter()
            .map(|&case| trial(case, lacks_namespaces)),
    );
    trials.extend(rules::USERS.iter().map(|&case| trial(case, lacks_users)));
    libtest_mimic::run(&arguments, trials).exit();
}

fn text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied())
        .unwrap_or("a panic")
        .to_owned()
}
