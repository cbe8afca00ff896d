//! A receiver that is killed: what it had comes back by its pid, and without one when it is told.

use std::time::Duration;

use gpu_ipc_torch::{Collected, Recipient, Sender};
use harness::WATCHDOG;

use crate::Case;
use crate::agent::{Agent, Command};
use crate::side::{Side, coded, emptied, path};

pub const CASES: &[Case] = &[
    (
        "a_killed_receivers_storages_come_back_when_its_pid_is_gone",
        a_killed_receivers_storages_come_back,
    ),
    (
        "a_killed_receiver_has_its_quarantine",
        a_killed_receiver_has_its_quarantine,
    ),
    (
        "without_a_pid_it_is_held_until_told",
        without_a_pid_it_is_held_until_told,
    ),
    (
        "a_receiver_that_is_named_later_brings_it_back_by_its_death",
        a_receiver_that_is_named_later_brings_it_back_by_its_death,
    ),
];

fn a_killed_receivers_storages_come_back() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let to = Recipient::process(agent.pid()).expect("it lives");
    let (_, held) = side.send(&side.block(1), to.clone());
    agent.ask(&Command::Open(coded(&held)));
    // Sent, and never received.
    side.send(&side.block(2), to);
    assert_eq!(side.sender.collect(), Collected::default());
    agent.kill();
    assert!(
        side.sender
            .outstanding()
            .iter()
            .all(|send| send.gone && send.pid == Some(agent.pid()))
    );
    let back = side.sender.collect();
    assert_eq!(
        (back.released, back.abandoned, back.bytes),
        (0, 2, 2 * 4096)
    );
    emptied(&side.session);
    drop(side.sender);
    assert!(
        !path(&held.fields).exists(),
        "a killed receiver leaves no file"
    );
}

fn a_killed_receiver_has_its_quarantine() {
    let mut side = Side::new();
    side.sender = Sender::new(side.gpu.clone()).quarantine(Duration::from_secs(3600));
    let mut agent = Agent::start();
    let (id, message) = side.send(
        &side.block(1),
        Recipient::process(agent.pid()).expect("it lives"),
    );
    agent.ask(&Command::Open(coded(&message)));
    agent.kill();
    assert_eq!(side.sender.collect(), Collected::default());
    let outstanding = side.sender.outstanding();
    assert_eq!(
        (outstanding.len(), outstanding[0].id, outstanding[0].gone),
        (1, id, true)
    );
    // SAFETY: `reclaim` asks that nobody has it: the receiver is dead and had no children.
    assert!(unsafe { side.sender.reclaim(id) });
}

fn without_a_pid_it_is_held_until_told() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let (id, message) = side.send(&side.block(1), Recipient::Unknown);
    agent.ask(&Command::Open(coded(&message)));
    agent.kill();
    assert_eq!(side.sender.collect(), Collected::default());
    let outstanding = side.sender.outstanding();
    assert_eq!(
        (outstanding.len(), outstanding[0].pid, outstanding[0].gone),
        (1, None, false)
    );
    assert_eq!(side.session.stats().live_blocks, 1);
    // SAFETY: `reclaim` asks that nobody has it: the receiver is dead and had no children.
    assert!(unsafe { side.sender.reclaim(id) });
    // SAFETY: as above; and it must not be there a second time.
    assert!(!unsafe { side.sender.reclaim(id) });
    emptied(&side.session);
}

fn a_receiver_that_is_named_later_brings_it_back_by_its_death() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let (id, message) = side.send(&side.block(1), Recipient::Unknown);
    agent.ask(&Command::Open(coded(&message)));
    let receiver = Recipient::process(agent.pid()).expect("it lives");
    assert!(side.sender.sent_to(id, receiver.clone()));
    assert_eq!(
        (side.sender.collect(), side.sender.outstanding()[0].pid),
        (Collected::default(), Some(agent.pid()))
    );
    agent.kill();
    assert!(side.sender.wait_released(WATCHDOG));
    assert!(
        !side.sender.sent_to(id, receiver),
        "it is not outstanding any more"
    );
    emptied(&side.session);
}
