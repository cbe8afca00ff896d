//! What a receiver drops comes back when its work is done, and a counter file goes with its last
//! counter.

use std::collections::BTreeSet;

use gpu_ipc_torch::{Collected, CounterFile, Recipient, Released, SLOTS};
use ipc_rc::After;

use crate::Case;
use crate::agent::{Agent, Answer, Command, bytes, stop};
use crate::side::{Side, coded, counter, emptied, path, settled};

pub const CASES: &[Case] = &[
    (
        "what_is_dropped_comes_back_in_one_collect",
        what_is_dropped_comes_back_in_one_collect,
    ),
    (
        "a_drop_blocks_nobody_and_counts_when_the_work_is_done",
        a_drop_blocks_nobody_and_counts_when_the_work_is_done,
    ),
    (
        "a_stream_that_waits_for_the_sender_counts_as_used",
        a_stream_that_waits_for_the_sender_counts_as_used,
    ),
    ("what_is_declined_comes_back", what_is_declined_comes_back),
    (
        "files_rotate_and_go_with_their_last_counter",
        files_rotate_and_go_with_their_last_counter,
    ),
    (
        "a_dropped_sender_takes_nothing_away",
        a_dropped_sender_takes_nothing_away,
    ),
];

fn what_is_dropped_comes_back_in_one_collect() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let to = Recipient::process(agent.pid()).expect("it lives");
    let mut file = None;
    for byte in 1..=3 {
        let (_, message) = side.send(&side.block(byte), to.clone());
        assert_eq!(
            agent.ask(&Command::Open(coded(&message))),
            Answer::Content(vec![byte; 4])
        );
        file = Some(path(&message.fields));
    }
    assert_eq!(side.sender.collect(), Collected::default());
    assert_eq!(side.session.stats().live_blocks, 3);
    assert_eq!(agent.ask(&Command::DropAll), settled(3, 0, 0));
    let back = side.sender.collect();
    assert_eq!(
        (back.released, back.abandoned, back.bytes),
        (3, 0, 3 * 4096)
    );
    emptied(&side.session);
    drop(side.sender);
    assert!(!file.expect("sent").exists());
}

fn a_drop_blocks_nobody_and_counts_when_the_work_is_done() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(1);
    let (_, message) = side.send(&block, Recipient::Unknown);
    assert_eq!(
        agent.ask(&Command::DropBusy(coded(&message))),
        Answer::Pending(1)
    );
    let (file, slot) = counter(&message);
    assert_eq!(
        (file.count(slot), side.sender.collect()),
        (1, Collected::default())
    );
    assert_eq!(agent.ask(&Command::GoOn), settled(1, 0, 0));
    assert_eq!(side.sender.collect().released, 1);
    // Released means that its last work is here.
    assert_eq!(bytes(&side.stream, block.device_ptr(), 4096), [9; 4096]);
}

fn a_stream_that_waits_for_the_sender_counts_as_used() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(1);
    let gate = stop(&side.stream);
    let (_, message) = side.send(&block, Recipient::Unknown);
    assert_eq!(
        agent.ask(&Command::OpenOnStreamAndDrop(coded(&message))),
        Answer::GivenBack(false)
    );
    assert_eq!(side.sender.collect(), Collected::default());
    drop(gate);
    assert_eq!(agent.ask(&Command::Settle), settled(1, 0, 0));
    assert_eq!(side.sender.collect().released, 1);
}

fn what_is_declined_comes_back() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let (_, message) = side.send(&side.block(1), Recipient::Unknown);
    assert_eq!(agent.ask(&Command::Decline(coded(&message))), Answer::Done);
    assert_eq!(agent.ask(&Command::Settle), settled(1, 0, 0));
    assert_eq!(side.sender.collect().released, 1);
}

fn files_rotate_and_go_with_their_last_counter() {
    let side = Side::new();
    let block = side.block(1);
    let mut messages = Vec::new();
    for _ in 0..SLOTS + 1 {
        let sending = side
            .sender
            .send(&block, Recipient::Unknown, After::Done)
            .expect("sent");
        messages.push(sending.fields);
    }
    let slots: Vec<u64> = messages
        .iter()
        .map(|fields| fields.ref_counter_offset)
        .collect();
    assert!(
        slots[..SLOTS as usize]
            .iter()
            .copied()
            .eq(0..u64::from(SLOTS))
            && slots[SLOTS as usize] == 0
    );
    let files: BTreeSet<_> = messages.iter().map(path).collect();
    assert_eq!(files.len(), 2);
    // Who receives maps the file anew for each, as PyTorch does.
    for fields in &messages {
        let place = fields.decode().expect("good").place.expect("bytes");
        let file = CounterFile::attach(&place.counter.file).expect("it is there");
        assert_eq!(file.release(place.counter.slot), Released::Yes);
    }
    side.sender.collect();
    assert!(side.sender.outstanding().is_empty());
    assert!(
        !path(&messages[0]).exists(),
        "a used-up file goes with its last counter"
    );
    assert!(
        path(&messages[SLOTS as usize]).exists(),
        "the current one has counters left"
    );
    drop(side.sender);
    assert!(files.iter().all(|file| !file.exists()));
}

fn a_dropped_sender_takes_nothing_away() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let (_, message) = side.send(&side.block(7), Recipient::Unknown);
    agent.ask(&Command::Open(coded(&message)));
    let Side {
        sender, session, ..
    } = side;
    drop(sender);
    assert_eq!(session.stats().live_blocks, 1);
    // The receiver has the file mapped, and needs its name no more.
    assert!(!path(&message.fields).exists());
    assert_eq!(agent.ask(&Command::DropAll), settled(1, 0, 0));
}
