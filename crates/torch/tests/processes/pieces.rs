//! Blocks that go as expandable segments: shared by descriptor, in one piece or across several.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use gpu_api::Sharing;
use gpu_ipc_torch::{Chunks, Collected, Dtype, Layout, Recipient, SegmentHandle};
use harness::{WATCHDOG, wait_until};
use ipc_rc::After;

use crate::Case;
use crate::agent::{Agent, Answer, Command, fill};
use crate::side::{Side, coded, emptied, settled};

pub const CASES: &[Case] = &[
    (
        "a_block_shared_by_descriptor_is_an_expandable_segment",
        a_block_shared_by_descriptor_is_an_expandable_segment,
    ),
    (
        "a_block_across_pieces_is_an_expandable_segment_of_several_chunks",
        a_block_across_pieces,
    ),
    (
        "pieces_of_unequal_lengths_are_refused",
        pieces_of_unequal_lengths,
    ),
    (
        "a_send_whose_export_fails_counts_nothing",
        a_send_whose_export_fails_counts_nothing,
    ),
];

/// Returns which file a descriptor of this process is.
fn file_of(number: u32) -> Option<(u64, u64)> {
    let found = std::fs::metadata(format!("/proc/self/fd/{number}")).ok()?;
    Some((found.dev(), found.ino()))
}

fn a_block_shared_by_descriptor_is_an_expandable_segment() {
    let side = Side::with(|builder| builder.sharing(Sharing::Fd));
    let mut agent = Agent::start();
    agent.may_take_descriptors();
    let blocks = [side.block(5), side.block(6)];
    let mut descriptors = BTreeSet::new();
    let messages = blocks
        .each_ref()
        .map(|block| side.send(block, Recipient::Unknown).1);
    for (message, block) in messages.iter().zip(&blocks) {
        let place = message
            .fields
            .decode()
            .expect("good")
            .place
            .expect("it has bytes");
        let SegmentHandle::Expandable(segment) = place.segment else {
            panic!("{place:?}")
        };
        let Chunks::Descriptors(numbers) = &segment.chunks else {
            panic!("{segment:?}")
        };
        assert_eq!((segment.pid, numbers.len()), (std::process::id(), 1));
        let range = side
            .gpu
            .backend()
            .address_range(block.device_ptr())
            .expect("it is known");
        assert_eq!(segment.chunk_bytes, range.len);
        descriptors.insert(numbers[0]);
    }
    assert_eq!(descriptors.len(), 1, "one for the region of both");
    let number = *descriptors.first().expect("there is one");
    let file = file_of(number).expect("it is open");
    drop(blocks);
    for (message, byte) in messages.iter().zip([5, 6]) {
        match agent.ask(&Command::Open(coded(message))) {
            Answer::Content(bytes) => {
                assert!(bytes.iter().all(|&found| found == byte), "{bytes:?}")
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        (side.sender.collect(), side.session.stats().live_blocks),
        (Collected::default(), 2)
    );
    assert_eq!(agent.ask(&Command::DropAll), settled(2, 0, 0));
    assert!(side.sender.wait_released(WATCHDOG));
    emptied(&side.session);
    assert_ne!(file_of(number), Some(file), "it goes with the last send");
    // The descriptor of a later send is its own.
    let (_, message) = side.send(&side.block(7), Recipient::Unknown);
    assert!(
        matches!(agent.ask(&Command::Open(coded(&message))), Answer::Content(bytes) if bytes[0] == 7)
    );
    assert_eq!(agent.ask(&Command::DropAll), settled(3, 0, 0));
}

/// The bytes of a piece of memory that grows in place.
const PIECE: u64 = 1 << 20;

/// A session whose memory grows in place, with this number of free pieces.
fn growing(pieces: usize) -> Side {
    let side = Side::with(|builder| builder.region_bytes(PIECE).grows_in_place(true));
    let held: Vec<_> = (0..pieces)
        .map(|_| side.session.alloc(PIECE).expect("room"))
        .collect();
    drop(held);
    assert_eq!(side.session.stats().source.regions, pieces as u64);
    side
}

fn a_block_across_pieces() {
    let side = growing(3);
    let mut agent = Agent::start();
    agent.may_take_descriptors();
    // It begins 256 bytes before the end of the first piece, and reaches into the third.
    let before = side.session.alloc(PIECE - 256).expect("room");
    let block = Arc::new(side.session.alloc(PIECE + 512).expect("room"));
    assert_eq!(block.device_ptr().0, before.device_ptr().0 + PIECE - 256);
    fill(&side.stream, block.device_ptr(), 8, block.len());
    let (_, mut message) = side.send(&block, Recipient::Unknown);
    let place = message
        .fields
        .decode()
        .expect("good")
        .place
        .expect("it has bytes");
    let SegmentHandle::Expandable(segment) = place.segment else {
        panic!("{place:?}")
    };
    assert_eq!((segment.chunk_bytes, segment.len()), (PIECE, 3 * PIECE));
    drop((block, before));
    // The receiver tells the first four bytes: a storage whose first four lie on both sides of an
    // end.
    message.fields.offset_bytes += 254;
    message.fields.size_bytes -= 254;
    message.layout = Layout::contiguous(Dtype::U8, &[message.fields.size_bytes]);
    match agent.ask(&Command::Open(coded(&message))) {
        Answer::Content(bytes) => assert!(bytes.iter().all(|&found| found == 8), "{bytes:?}"),
        other => panic!("{other:?}"),
    }
    side.session.trim().expect("nothing fails here");
    assert_eq!(
        side.session.stats().source.reserved,
        3 * PIECE,
        "what PyTorch counts stays"
    );
    assert_eq!(agent.ask(&Command::DropAll), settled(1, 0, 0));
    assert!(side.sender.wait_released(WATCHDOG));
    wait_until("the pieces to go back", || {
        side.session.collect();
        side.session.trim().expect("nothing fails here");
        side.session.stats().source.reserved == 0
    });
}

fn pieces_of_unequal_lengths() {
    let side = growing(1);
    let held = side.session.alloc(PIECE).expect("room");
    let longer = side.session.alloc(2 * PIECE).expect("room");
    drop((held, longer));
    let block = Arc::new(side.session.alloc(3 * PIECE).expect("both are free"));
    let refused = side
        .sender
        .send(&block, Recipient::Unknown, After::Done)
        .expect_err("of 1 and of 2 MiB");
    assert!(
        refused
            .to_string()
            .contains("pieces of 1048576 and 2097152 bytes"),
        "{refused}"
    );
    assert!(side.sender.outstanding().is_empty());
}

fn a_send_whose_export_fails_counts_nothing() {
    // In a process of its own: others here need descriptors.
    let why = Agent::start().cannot(&Command::SendWithoutDescriptors);
    assert!(
        why.contains("RLIMIT_NOFILE") && why.ends_with("; outstanding 0, then 1"),
        "{why}"
    );
}
