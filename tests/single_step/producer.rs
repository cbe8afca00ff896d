//! A producer dies in a grant or a revocation: its consumer is told, reads on, and lets go.

use gpu_ipc::{ClaimError, Participant, State, Wait};

use crate::agent::{open_gpu, read_stamp};
use crate::trace::Trace;
use crate::{Case, WATCHDOG, chosen, wait_until};

pub const CASES: &[Case] = &[
    ("producer::dies_before_each_instruction_of_a_grant", || dies_in("grant")),
    ("producer::dies_before_each_instruction_of_a_revocation", || dies_in("revoke")),
];

/// Lets the agent execute `at` instructions of its call, kills it, and looks at its consumer. Returns how many it
/// executed.
fn die_at(call: &str, at: usize) -> usize {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let (mut trace, _) = Trace::start(call, &[path.to_str().expect("a plain name")]);
    let gpu = open_gpu();
    let consumer = Participant::builder(gpu.clone()).connect(&path).expect("connected");
    trace.tell(&consumer.id().0.to_string());
    let descriptor = trace.line();
    let bytes: Vec<u8> = (0..descriptor.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&descriptor[at..at + 2], 16).expect("hex"))
        .collect();
    let held = consumer.claim(&bytes, Wait::Host, Some(WATCHDOG)).expect("claimed");
    trace.tell("held");
    assert_eq!(trace.line(), "ready");
    trace.begin();
    while trace.executed() < at && trace.step() {}
    let executed = trace.executed();
    assert_eq!(held.state(), State::Ready);
    trace.kill();
    wait_until("the news of its death", || consumer.is_producer_gone());
    assert_eq!(held.state(), State::ReadyProducerGone);
    assert_eq!(read_stamp(&gpu, held.device_ptr()), 7, "the bytes went with the producer");
    let refused = consumer.claim(&bytes, Wait::Host, Some(WATCHDOG));
    assert!(matches!(refused, Err(ClaimError::ProducerGone)), "{refused:?}");
    drop(held);
    wait_until("the mapping to go", || consumer.mappings() == 0);
    executed
}

fn dies_in(call: &str) {
    let total = die_at(call, usize::MAX);
    let points = chosen(total, &[]);
    for &at in &points {
        die_at(call, at);
    }
    println!("{call}: {total} instructions, {} deaths", points.len());
}
