//! What a receiver opens: once, in stream order, in one mapping, and in no forked child.

use gpu_api::Error;
use gpu_ipc_torch::{Collected, Receiver, Recipient, TensorMessage};
use harness::WATCHDOG;
use ipc_rc::{After, Claims, Stream, To, Wait};

use crate::Case;
use crate::agent::{self, Agent, Answer, Command, fill, open_gpu, stop};
use crate::side::{Side, coded, counter, emptied, settled};

pub const CASES: &[Case] = &[
    (
        "the_senders_work_is_waited_for",
        the_senders_work_is_waited_for,
    ),
    ("a_message_opens_once", a_message_opens_once),
    (
        "a_message_opens_once_in_a_process_however_many_its_receivers",
        a_message_opens_once_in_a_process,
    ),
    (
        "storages_of_a_segment_share_one_mapping",
        storages_of_a_segment_share_one_mapping,
    ),
    (
        "threads_open_and_close_one_segment",
        threads_open_and_close_one_segment,
    ),
    (
        "a_forked_child_opens_and_ends_nothing",
        a_forked_child_opens_and_ends_nothing,
    ),
    (
        "a_block_goes_both_ways_at_once",
        a_block_goes_both_ways_at_once,
    ),
    (
        "bad_fields_are_refused_and_stay_counted",
        bad_fields_are_refused_and_stay_counted,
    ),
    (
        "a_stream_of_another_gpu_is_refused_and_nothing_is_counted_down",
        a_stream_of_another_gpu_is_refused_and_nothing_is_counted_down,
    ),
];

fn the_senders_work_is_waited_for() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(1);
    side.stream.synchronize().expect("done");
    let gate = stop(&side.stream);
    fill(&side.stream, block.device_ptr(), 2, 4096);
    let (_, message) = side.send(&block, Recipient::Unknown);
    let answer = agent.cannot(&Command::OpenAtOnce(coded(&message)));
    assert!(
        answer.contains("the work of the process that shared"),
        "{answer}"
    );
    let (file, slot) = counter(&message);
    assert_eq!(file.count(slot), 1, "what was not opened stays counted");
    agent.tell(&Command::OpenOnStream(coded(&message)));
    assert_eq!(agent.answer(), Some(Answer::Opening));
    drop(gate);
    assert_eq!(agent.answer(), Some(Answer::Content(vec![2; 4])));
    agent.ask(&Command::Settle);
    assert_eq!(side.sender.collect().released, 1);
}

fn a_message_opens_once() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let (_, message) = side.send(&side.block(5), Recipient::Unknown);
    assert_eq!(
        agent.ask(&Command::Open(coded(&message))),
        Answer::Content(vec![5; 4])
    );
    let answer = agent.cannot(&Command::Open(coded(&message)));
    assert!(answer.contains("opened once"), "{answer}");
    assert_eq!(agent.ask(&Command::DropAll), settled(1, 0, 0));
    let answer = agent.cannot(&Command::Open(coded(&message)));
    assert!(answer.contains("opened once"), "{answer}");
    let (file, slot) = counter(&message);
    assert_eq!(file.count(slot), 0);
    // Sent anew by the same counter, as a sender could that uses them again.
    file.grant(slot);
    assert_eq!(
        agent.ask(&Command::Open(coded(&message))),
        Answer::Content(vec![5; 4])
    );
}

fn a_message_opens_once_in_a_process() {
    let (side, mut agent, mut other) = (Side::new(), Agent::start(), Agent::start());
    let (_, message) = side.send(&side.block(5), Recipient::Unknown);
    assert_eq!(
        agent.ask(&Command::Open(coded(&message))),
        Answer::Content(vec![5; 4])
    );
    let answer = agent.cannot(&Command::OpenByAnother(coded(&message)));
    assert!(answer.contains("opened once"), "{answer}");
    // Another process cannot know; what both count down is never less than nothing.
    assert_eq!(
        other.ask(&Command::Open(coded(&message))),
        Answer::Content(vec![5; 4])
    );
    assert_eq!(agent.ask(&Command::DropAll), settled(1, 0, 0));
    other.ask(&Command::DropAll);
    let (file, slot) = counter(&message);
    assert_eq!(file.count(slot), 0);
}

fn storages_of_a_segment_share_one_mapping() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let blocks: Vec<_> = (0..4).map(|byte| side.block(byte)).collect();
    for block in &blocks {
        agent.ask(&Command::Open(coded(
            &side.send(block, Recipient::Unknown).1,
        )));
    }
    assert_eq!(agent.ask(&Command::Settle), settled(0, 1, 0));
    let mut here: Vec<u64> = blocks.iter().map(|block| block.device_ptr().0).collect();
    here.sort_unstable();
    let answer = agent.ask(&Command::Addresses);
    let Answer::Addresses(there) = answer else {
        panic!("{answer:?}")
    };
    for (one, other) in here.windows(2).zip(there.windows(2)) {
        assert_eq!(
            one[1] - one[0],
            other[1] - other[0],
            "the same distances in one mapping"
        );
    }
}

fn threads_open_and_close_one_segment() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let blocks: Vec<_> = (0..8).map(|byte| side.block(byte)).collect();
    let blocks = (0..).zip(&blocks).cycle().take(400);
    let storm = blocks
        .map(|(byte, block)| (coded(&side.send(block, Recipient::Unknown).1), byte))
        .collect();
    assert_eq!(agent.ask(&Command::Storm(storm)), settled(400, 0, 0));
    side.sender.collect();
    assert!(side.sender.outstanding().is_empty());
}

fn a_forked_child_opens_and_ends_nothing() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(6);
    let ((_, held), (_, other)) = (
        side.send(&block, Recipient::Unknown),
        side.send(&block, Recipient::Unknown),
    );
    agent.ask(&Command::Open(coded(&held)));
    assert_eq!(
        agent.ask(&Command::OpenInFork(coded(&other))),
        Answer::ChildEnded(Some(0))
    );
    assert_eq!(side.sender.collect(), Collected::default());
    assert_eq!(
        agent.ask(&Command::Open(coded(&other))),
        Answer::Content(vec![6; 4])
    );
    assert_eq!(agent.ask(&Command::DropAll), settled(2, 0, 0));
    assert_eq!(side.sender.collect().released, 2);
}

fn a_block_goes_both_ways_at_once() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(3);
    let descriptor = block
        .share(To::Ticket(Claims::Once), After::Stream(&side.stream))
        .expect("shared");
    let (_, message) = side.send(&block, Recipient::Unknown);
    drop(block);
    agent.ask(&Command::Open(coded(&message)));
    let socket = side.session.socket_path().into();
    let claim = Command::Claim {
        socket,
        descriptor: descriptor.as_bytes().to_vec(),
    };
    assert_eq!(agent.ask(&claim), Answer::Content(vec![3; 4]));
    agent.ask(&Command::DropAll);
    assert_eq!(side.sender.collect().released, 1);
    side.session.collect();
    assert_eq!(side.session.stats().live_blocks, 1, "the other holds it");
    assert_eq!(agent.ask(&Command::Unclaim), Answer::Done);
    emptied(&side.session);
}

fn bad_fields_are_refused_and_stay_counted() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(1);
    let (_, good) = side.send(&block, Recipient::Unknown);
    let spoiled = |spoil: fn(&mut TensorMessage)| {
        let mut message = good.clone();
        spoil(&mut message);
        message
    };
    for (message, expected) in [
        (
            spoiled(|m| m.uuid = Some(agent::NOBODY)),
            "the storage's device",
        ),
        (
            spoiled(|m| m.fields.offset_bytes = 1 << 40),
            "inside its segment",
        ),
        (
            spoiled(|m| m.fields.size_bytes = 1 << 40),
            "inside its segment",
        ),
        (
            spoiled(|m| m.fields.handle = Some(vec![1; 64])),
            "open_handle",
        ),
        (
            spoiled(|m| m.fields.event_handle = Some(vec![1; 64])),
            "open_event",
        ),
        (spoiled(|m| m.fields.ref_counter_offset += 1), "opened once"),
        (
            spoiled(|m| m.fields.ref_counter_handle = Some(b"/torch_0_0_0".to_vec())),
            "shm_open",
        ),
    ] {
        let answer = agent.cannot(&Command::Open(coded(&message)));
        assert!(answer.contains(expected), "{expected}: {answer}");
    }
    let (file, slot) = counter(&good);
    assert_eq!(file.count(slot), 1);
    drop(file);
    assert_eq!(
        agent.ask(&Command::Open(coded(&good))),
        Answer::Content(vec![1; 4])
    );
    assert_eq!(agent.ask(&Command::DropAll), settled(1, 0, 0));
    assert_eq!(side.sender.collect().released, 1);
}

fn a_stream_of_another_gpu_is_refused_and_nothing_is_counted_down() {
    let (side, other) = (Side::new(), open_gpu());
    let (receiver, foreign) = (
        Receiver::new(open_gpu()).expect("a thread"),
        Stream::create(&other).expect("a stream"),
    );
    let block = side.block(1);
    let (_, message) = side.send(&block, Recipient::Unknown);
    let storage = message.fields.decode().expect("good");
    let refused = receiver.open(&storage, Wait::Stream(&foreign), None);
    assert!(
        matches!(refused, Err(Error::Mismatch { .. })),
        "{refused:?}"
    );
    let refused = side
        .sender
        .send(&block, Recipient::Unknown, After::Stream(&foreign));
    assert!(
        matches!(refused, Err(Error::Mismatch { .. })),
        "{refused:?}"
    );
    assert!(receiver.wait_released(WATCHDOG));
    assert_eq!(
        (side.sender.collect(), side.sender.outstanding().len()),
        (Collected::default(), 1)
    );
}
