//! A producer dies in a grant or a revocation: its consumer is told, reads on, and lets go.

use std::path::PathBuf;

use gpu_ipc::{ClaimError, Participant, State, Wait};
use harness::{WATCHDOG, wait_until};

use crate::agent::{Call, Said, Told, open_gpu, read_stamp};
use crate::trace::Trace;
use crate::{Case, chosen};

pub const CASES: &[Case] = &[
    ("producer::dies_before_each_instruction_of_a_grant", || {
        dies_in("grant", |socket| Call::Grant { socket })
    }),
    (
        "producer::dies_before_each_instruction_of_a_revocation",
        || dies_in("revocation", |socket| Call::Revoke { socket }),
    ),
];

/// Lets the agent execute `at` instructions of its call, kills it, and looks at its consumer.
/// Returns how many it executed.
fn die_at(call: fn(PathBuf) -> Call, at: usize) -> usize {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let mut trace = Trace::start(&call(path.clone()));
    assert_eq!(trace.hear(), Said::Open);
    let gpu = open_gpu();
    let consumer = Participant::builder(gpu.clone())
        .connect(&path)
        .expect("connected");
    trace.tell(&Told::Participant(consumer.id().0));
    let said = trace.hear();
    let Said::Shared(bytes) = said else {
        panic!("it shares nothing: {said:?}")
    };
    let held = consumer
        .claim(&bytes, Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    trace.tell(&Told::Held);
    assert_eq!(trace.hear(), Said::Ready);
    trace.begin();
    while trace.executed() < at && trace.step() {}
    let executed = trace.executed();
    assert_eq!(held.state(), State::Ready);
    trace.kill();
    wait_until("the news of its death", || consumer.is_producer_gone());
    assert_eq!(held.state(), State::ReadyProducerGone);
    assert_eq!(
        read_stamp(&gpu, held.device_ptr()),
        7,
        "the bytes went with the producer"
    );
    let refused = consumer.claim(&bytes, Wait::Host, Some(WATCHDOG));
    assert!(
        matches!(refused, Err(ClaimError::ProducerGone)),
        "{refused:?}"
    );
    drop(held);
    wait_until("the mapping to go", || consumer.mappings() == 0);
    executed
}

fn dies_in(name: &str, call: fn(PathBuf) -> Call) {
    let total = die_at(call, usize::MAX);
    let points = chosen(total, &[]);
    for &at in &points {
        die_at(call, at);
    }
    println!("{name}: {total} instructions, {} deaths", points.len());
}
