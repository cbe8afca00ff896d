//! A sender and a receiver in two processes, on the host backend, with everything between them that PyTorch would have.
//!
//! What PyTorch itself does with the same files and fields is in the workspace's `tests/torch`.

mod agent;

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent::{Agent, Answer, Command, bytes, fill, open_gpu, stop};
use gpu_api::{Error, Gpu, Sharing};
use gpu_ipc_torch::{
    Chunks, Collected, CounterFile, Dtype, Fields, Layout, Receiver, Recipient, Released, SLOTS, SegmentHandle, SendId,
    Sender, TensorMessage,
};
use harness::{WATCHDOG, wait_until};
use ipc_rc::{After, Claims, SentBlock, Session, Stream, To, Wait};
use libtest_mimic::{Arguments, Failed, Trial};

const CASES: &[(&str, fn())] = &[
    ("what_is_dropped_comes_back_in_one_collect", what_is_dropped_comes_back_in_one_collect),
    ("a_drop_blocks_nobody_and_counts_when_the_work_is_done", a_drop_blocks_nobody_and_counts_when_the_work_is_done),
    ("the_senders_work_is_waited_for", the_senders_work_is_waited_for),
    ("a_stream_that_waits_for_the_sender_counts_as_used", a_stream_that_waits_for_the_sender_counts_as_used),
    ("a_message_opens_once", a_message_opens_once),
    ("a_message_opens_once_in_a_process_however_many_its_receivers", a_message_opens_once_in_a_process),
    ("storages_of_a_segment_share_one_mapping", storages_of_a_segment_share_one_mapping),
    ("threads_open_and_close_one_segment", threads_open_and_close_one_segment),
    ("a_forked_child_opens_and_ends_nothing", a_forked_child_opens_and_ends_nothing),
    ("a_block_goes_both_ways_at_once", a_block_goes_both_ways_at_once),
    ("a_killed_receivers_storages_come_back_when_its_pid_is_gone", a_killed_receivers_storages_come_back),
    ("a_killed_receiver_has_its_quarantine", a_killed_receiver_has_its_quarantine),
    ("without_a_pid_it_is_held_until_told", without_a_pid_it_is_held_until_told),
    (
        "a_receiver_that_is_named_later_brings_it_back_by_its_death",
        a_receiver_that_is_named_later_brings_it_back_by_its_death,
    ),
    ("what_is_declined_comes_back", what_is_declined_comes_back),
    ("bad_fields_are_refused_and_stay_counted", bad_fields_are_refused_and_stay_counted),
    ("files_rotate_and_go_with_their_last_counter", files_rotate_and_go_with_their_last_counter),
    ("a_block_shared_by_descriptor_is_an_expandable_segment", a_block_shared_by_descriptor_is_an_expandable_segment),
    ("a_block_across_pieces_is_an_expandable_segment_of_several_chunks", a_block_across_pieces),
    ("pieces_of_unequal_lengths_are_refused", pieces_of_unequal_lengths),
    ("a_send_whose_export_fails_counts_nothing", a_send_whose_export_fails_counts_nothing),
    ("an_expandable_segment_is_opened_by_pidfd", an_expandable_segment_is_opened_by_pidfd),
    (
        "chunks_that_cannot_be_opened_are_refused_and_stay_counted",
        chunks_that_cannot_be_opened_are_refused_and_stay_counted,
    ),
    ("a_read_is_checked_and_in_stream_order", a_read_is_checked_and_in_stream_order),
    (
        "a_stream_of_another_gpu_is_refused_and_nothing_is_counted_down",
        a_stream_of_another_gpu_is_refused_and_nothing_is_counted_down,
    ),
    ("a_dropped_sender_takes_nothing_away", a_dropped_sender_takes_nothing_away),
];

fn main() {
    if let Some(agent::Role::Agent) = harness::role() {
        return agent::run();
    }
    let trial = |&(name, run): &(&str, fn())| {
        Trial::test(name, move || {
            run();
            Ok::<(), Failed>(())
        })
    };
    libtest_mimic::run(&Arguments::from_args(), CASES.iter().map(trial).collect()).exit();
}

/// A session whose blocks PyTorch could open, and a sender.
struct Side {
    sender: Sender,
    stream: Stream,
    session: Session,
    gpu: Gpu,
    /// Kept for its removal.
    _dir: tempfile::TempDir,
}

impl Side {
    fn new() -> Side {
        let (gpu, dir) = (open_gpu(), tempfile::tempdir().expect("a directory"));
        let builder = Session::builder(gpu.clone()).socket(dir.path().join("s")).sharing(Sharing::Handle);
        let (session, stream) = (builder.open().expect("a session"), Stream::create(&gpu).expect("a stream"));
        Side { sender: Sender::new(gpu.clone()).quarantine(Duration::ZERO), stream, session, gpu, _dir: dir }
    }

    fn block(&self, byte: u8) -> Arc<SentBlock> {
        let block = Arc::new(self.session.alloc(4096).expect("room"));
        fill(&self.stream, block.device_ptr(), byte, 4096);
        block
    }

    fn send(&self, block: &Arc<SentBlock>, to: Recipient) -> (SendId, TensorMessage) {
        let sending = self.sender.send(block, to, After::Stream(&self.stream)).expect("sent");
        let layout = Layout::contiguous(Dtype::U8, &[block.len()]);
        (sending.id, TensorMessage { fields: sending.fields, uuid: Some(sending.uuid), layout })
    }
}

fn coded(message: &TensorMessage) -> Vec<u8> {
    message.encode().expect("it fits")
}

fn settled(released: u64, segments: u64, kept: u64) -> Answer {
    Answer::Settled { released, segments, kept }
}

fn path(fields: &Fields) -> std::path::PathBuf {
    let name = String::from_utf8(fields.ref_counter_handle.clone().expect("named")).expect("text");
    Path::new("/dev/shm").join(&name[1..])
}

fn counter(message: &TensorMessage) -> (CounterFile, u32) {
    let place = message.fields.decode().expect("good").place.expect("bytes");
    (CounterFile::attach(&place.counter.file).expect("it is there"), place.counter.slot)
}

fn emptied(session: &Session) {
    wait_until("the session's blocks", || {
        session.collect();
        session.stats().live_blocks == 0
    });
}

fn what_is_dropped_comes_back_in_one_collect() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let to = Recipient::process(agent.pid()).expect("it lives");
    let mut file = None;
    for byte in 1..=3 {
        let (_, message) = side.send(&side.block(byte), to.clone());
        assert_eq!(agent.ask(&Command::Open(coded(&message))), Answer::Content(vec![byte; 4]));
        file = Some(path(&message.fields));
    }
    assert_eq!(side.sender.collect(), Collected::default());
    assert_eq!(side.session.stats().live_blocks, 3);
    assert_eq!(agent.ask(&Command::DropAll), settled(3, 0, 0));
    let back = side.sender.collect();
    assert_eq!((back.released, back.abandoned, back.bytes), (3, 0, 3 * 4096));
    emptied(&side.session);
    drop(side.sender);
    assert!(!file.expect("sent").exists());
}

fn a_drop_blocks_nobody_and_counts_when_the_work_is_done() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(1);
    let (_, message) = side.send(&block, Recipient::Unknown);
    assert_eq!(agent.ask(&Command::DropBusy(coded(&message))), Answer::Pending(1));
    let (file, slot) = counter(&message);
    assert_eq!((file.count(slot), side.sender.collect()), (1, Collected::default()));
    assert_eq!(agent.ask(&Command::GoOn), settled(1, 0, 0));
    assert_eq!(side.sender.collect().released, 1);
    // Released means that its last work is here.
    assert_eq!(bytes(&side.stream, block.device_ptr(), 4096), [9; 4096]);
}

fn the_senders_work_is_waited_for() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(1);
    side.stream.synchronize().expect("done");
    let gate = stop(&side.stream);
    fill(&side.stream, block.device_ptr(), 2, 4096);
    let (_, message) = side.send(&block, Recipient::Unknown);
    let answer = agent.cannot(&Command::OpenAtOnce(coded(&message)));
    assert!(answer.contains("the work of the process that shared"), "{answer}");
    let (file, slot) = counter(&message);
    assert_eq!(file.count(slot), 1, "what was not opened stays counted");
    agent.tell(&Command::OpenOnStream(coded(&message)));
    assert_eq!(agent.answer(), Some(Answer::Opening));
    drop(gate);
    assert_eq!(agent.answer(), Some(Answer::Content(vec![2; 4])));
    agent.ask(&Command::Settle);
    assert_eq!(side.sender.collect().released, 1);
}

fn a_stream_that_waits_for_the_sender_counts_as_used() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(1);
    let gate = stop(&side.stream);
    let (_, message) = side.send(&block, Recipient::Unknown);
    assert_eq!(agent.ask(&Command::OpenOnStreamAndDrop(coded(&message))), Answer::GivenBack(false));
    assert_eq!(side.sender.collect(), Collected::default());
    drop(gate);
    assert_eq!(agent.ask(&Command::Settle), settled(1, 0, 0));
    assert_eq!(side.sender.collect().released, 1);
}

fn a_message_opens_once_in_a_process() {
    let (side, mut agent, mut other) = (Side::new(), Agent::start(), Agent::start());
    let (_, message) = side.send(&side.block(5), Recipient::Unknown);
    assert_eq!(agent.ask(&Command::Open(coded(&message))), Answer::Content(vec![5; 4]));
    let answer = agent.cannot(&Command::OpenByAnother(coded(&message)));
    assert!(answer.contains("opened once"), "{answer}");
    // Another process cannot know; what both count down is never less than nothing.
    assert_eq!(other.ask(&Command::Open(coded(&message))), Answer::Content(vec![5; 4]));
    assert_eq!(agent.ask(&Command::DropAll), settled(1, 0, 0));
    other.ask(&Command::DropAll);
    let (file, slot) = counter(&message);
    assert_eq!(file.count(slot), 0);
}

fn a_message_opens_once() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let (_, message) = side.send(&side.block(5), Recipient::Unknown);
    assert_eq!(agent.ask(&Command::Open(coded(&message))), Answer::Content(vec![5; 4]));
    let answer = agent.cannot(&Command::Open(coded(&message)));
    assert!(answer.contains("opened once"), "{answer}");
    assert_eq!(agent.ask(&Command::DropAll), settled(1, 0, 0));
    let answer = agent.cannot(&Command::Open(coded(&message)));
    assert!(answer.contains("opened once"), "{answer}");
    let (file, slot) = counter(&message);
    assert_eq!(file.count(slot), 0);
    // Sent anew by the same counter, as a sender could that uses them again.
    file.grant(slot);
    assert_eq!(agent.ask(&Command::Open(coded(&message))), Answer::Content(vec![5; 4]));
}

fn storages_of_a_segment_share_one_mapping() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let blocks: Vec<_> = (0..4).map(|byte| side.block(byte)).collect();
    for block in &blocks {
        agent.ask(&Command::Open(coded(&side.send(block, Recipient::Unknown).1)));
    }
    assert_eq!(agent.ask(&Command::Settle), settled(0, 1, 0));
    let mut here: Vec<u64> = blocks.iter().map(|block| block.device_ptr().0).collect();
    here.sort_unstable();
    let answer = agent.ask(&Command::Addresses);
    let Answer::Addresses(there) = answer else { panic!("{answer:?}") };
    for (one, other) in here.windows(2).zip(there.windows(2)) {
        assert_eq!(one[1] - one[0], other[1] - other[0], "the same distances in one mapping");
    }
}

fn threads_open_and_close_one_segment() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let blocks: Vec<_> = (0..8).map(|byte| side.block(byte)).collect();
    let blocks = (0..).zip(&blocks).cycle().take(400);
    let storm = blocks.map(|(byte, block)| (coded(&side.send(block, Recipient::Unknown).1), byte)).collect();
    assert_eq!(agent.ask(&Command::Storm(storm)), settled(400, 0, 0));
    side.sender.collect();
    assert!(side.sender.outstanding().is_empty());
}

fn a_forked_child_opens_and_ends_nothing() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(6);
    let ((_, held), (_, other)) = (side.send(&block, Recipient::Unknown), side.send(&block, Recipient::Unknown));
    agent.ask(&Command::Open(coded(&held)));
    assert_eq!(agent.ask(&Command::OpenInFork(coded(&other))), Answer::ChildEnded(Some(0)));
    assert_eq!(side.sender.collect(), Collected::default());
    assert_eq!(agent.ask(&Command::Open(coded(&other))), Answer::Content(vec![6; 4]));
    assert_eq!(agent.ask(&Command::DropAll), settled(2, 0, 0));
    assert_eq!(side.sender.collect().released, 2);
}

fn a_block_goes_both_ways_at_once() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let block = side.block(3);
    let descriptor = block.share(To::Ticket(Claims::Once), After::Stream(&side.stream)).expect("shared");
    let (_, message) = side.send(&block, Recipient::Unknown);
    drop(block);
    agent.ask(&Command::Open(coded(&message)));
    let socket = side.session.socket_path().into();
    let claim = Command::Claim { socket, descriptor: descriptor.as_bytes().to_vec() };
    assert_eq!(agent.ask(&claim), Answer::Content(vec![3; 4]));
    agent.ask(&Command::DropAll);
    assert_eq!(side.sender.collect().released, 1);
    side.session.collect();
    assert_eq!(side.session.stats().live_blocks, 1, "the other holds it");
    assert_eq!(agent.ask(&Command::Unclaim), Answer::Done);
    emptied(&side.session);
}

fn a_killed_receivers_storages_come_back() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let to = Recipient::process(agent.pid()).expect("it lives");
    let (_, held) = side.send(&side.block(1), to.clone());
    agent.ask(&Command::Open(coded(&held)));
    // Sent, and never received.
    side.send(&side.block(2), to);
    assert_eq!(side.sender.collect(), Collected::default());
    agent.kill();
    assert!(side.sender.outstanding().iter().all(|send| send.gone && send.pid == Some(agent.pid())));
    let back = side.sender.collect();
    assert_eq!((back.released, back.abandoned, back.bytes), (0, 2, 2 * 4096));
    emptied(&side.session);
    drop(side.sender);
    assert!(!path(&held.fields).exists(), "a killed receiver leaves no file");
}

fn a_killed_receiver_has_its_quarantine() {
    let mut side = Side::new();
    side.sender = Sender::new(side.gpu.clone()).quarantine(Duration::from_secs(3600));
    let mut agent = Agent::start();
    let (id, message) = side.send(&side.block(1), Recipient::process(agent.pid()).expect("it lives"));
    agent.ask(&Command::Open(coded(&message)));
    agent.kill();
    assert_eq!(side.sender.collect(), Collected::default());
    let outstanding = side.sender.outstanding();
    assert_eq!((outstanding.len(), outstanding[0].id, outstanding[0].gone), (1, id, true));
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
    assert_eq!((outstanding.len(), outstanding[0].pid, outstanding[0].gone), (1, None, false));
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
    assert_eq!((side.sender.collect(), side.sender.outstanding()[0].pid), (Collected::default(), Some(agent.pid())));
    agent.kill();
    assert!(side.sender.wait_released(WATCHDOG));
    assert!(!side.sender.sent_to(id, receiver), "it is not outstanding any more");
    emptied(&side.session);
}

fn what_is_declined_comes_back() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let (_, message) = side.send(&side.block(1), Recipient::Unknown);
    assert_eq!(agent.ask(&Command::Decline(coded(&message))), Answer::Done);
    assert_eq!(agent.ask(&Command::Settle), settled(1, 0, 0));
    assert_eq!(side.sender.collect().released, 1);
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
        (spoiled(|m| m.uuid = Some(agent::NOBODY)), "the storage's device"),
        (spoiled(|m| m.fields.offset_bytes = 1 << 40), "inside its segment"),
        (spoiled(|m| m.fields.size_bytes = 1 << 40), "inside its segment"),
        (spoiled(|m| m.fields.handle = Some(vec![1; 64])), "open_handle"),
        (spoiled(|m| m.fields.event_handle = Some(vec![1; 64])), "open_event"),
        (spoiled(|m| m.fields.ref_counter_offset += 1), "opened once"),
        (spoiled(|m| m.fields.ref_counter_handle = Some(b"/torch_0_0_0".to_vec())), "shm_open"),
    ] {
        let answer = agent.cannot(&Command::Open(coded(&message)));
        assert!(answer.contains(expected), "{expected}: {answer}");
    }
    let (file, slot) = counter(&good);
    assert_eq!(file.count(slot), 1);
    drop(file);
    assert_eq!(agent.ask(&Command::Open(coded(&good))), Answer::Content(vec![1; 4]));
    assert_eq!(agent.ask(&Command::DropAll), settled(1, 0, 0));
    assert_eq!(side.sender.collect().released, 1);
}

fn files_rotate_and_go_with_their_last_counter() {
    let side = Side::new();
    let block = side.block(1);
    let mut messages = Vec::new();
    for _ in 0..SLOTS + 1 {
        let sending = side.sender.send(&block, Recipient::Unknown, After::Done).expect("sent");
        messages.push(sending.fields);
    }
    let slots: Vec<u64> = messages.iter().map(|fields| fields.ref_counter_offset).collect();
    assert!(slots[..SLOTS as usize].iter().copied().eq(0..u64::from(SLOTS)) && slots[SLOTS as usize] == 0);
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
    assert!(!path(&messages[0]).exists(), "a used-up file goes with its last counter");
    assert!(path(&messages[SLOTS as usize]).exists(), "the current one has counters left");
    drop(side.sender);
    assert!(files.iter().all(|file| !file.exists()));
}

/// Returns which file a descriptor of this process is.
fn file_of(number: u32) -> Option<(u64, u64)> {
    let found = std::fs::metadata(format!("/proc/self/fd/{number}")).ok()?;
    Some((found.dev(), found.ino()))
}

fn a_block_shared_by_descriptor_is_an_expandable_segment() {
    let (gpu, dir) = (open_gpu(), tempfile::tempdir().expect("a directory"));
    let builder = Session::builder(gpu.clone()).socket(dir.path().join("s")).sharing(Sharing::Fd);
    let (session, stream) = (builder.open().expect("a session"), Stream::create(&gpu).expect("a stream"));
    let sender = Sender::new(gpu.clone()).quarantine(Duration::ZERO);
    let side = Side { sender, stream, session, gpu, _dir: dir };
    let mut agent = Agent::start();
    // Where Yama lets only a parent take descriptors (`ptrace_scope` 1), it lets the process that is named here.
    // SAFETY: `prctl(PR_SET_PTRACER)` takes a process' number; without Yama it is refused, and not needed.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::from(agent.pid())) };
    let blocks = [side.block(5), side.block(6)];
    let mut descriptors = BTreeSet::new();
    let messages = blocks.each_ref().map(|block| side.send(block, Recipient::Unknown).1);
    for (message, block) in messages.iter().zip(&blocks) {
        let place = message.fields.decode().expect("good").place.expect("it has bytes");
        let SegmentHandle::Expandable(segment) = place.segment else { panic!("{place:?}") };
        let Chunks::Descriptors(numbers) = &segment.chunks else { panic!("{segment:?}") };
        assert_eq!((segment.pid, numbers.len()), (std::process::id(), 1));
        let range = side.gpu.backend().address_range(block.device_ptr()).expect("it is known");
        assert_eq!(segment.chunk_bytes, range.len);
        descriptors.insert(numbers[0]);
    }
    assert_eq!(descriptors.len(), 1, "one for the region of both");
    let number = *descriptors.first().expect("there is one");
    let file = file_of(number).expect("it is open");
    drop(blocks);
    for (message, byte) in messages.iter().zip([5, 6]) {
        match agent.ask(&Command::Open(coded(message))) {
            Answer::Content(bytes) => assert!(bytes.iter().all(|&found| found == byte), "{bytes:?}"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((side.sender.collect(), side.session.stats().live_blocks), (Collected::default(), 2));
    assert_eq!(agent.ask(&Command::DropAll), settled(2, 0, 0));
    assert!(side.sender.wait_released(WATCHDOG));
    wait_until("their blocks to go back", || {
        side.session.collect();
        side.session.stats().live_blocks == 0
    });
    assert_ne!(file_of(number), Some(file), "it goes with the last send");
    // The descriptor of a later send is its own.
    let (_, message) = side.send(&side.block(7), Recipient::Unknown);
    assert!(matches!(agent.ask(&Command::Open(coded(&message))), Answer::Content(bytes) if bytes[0] == 7));
    assert_eq!(agent.ask(&Command::DropAll), settled(3, 0, 0));
}

/// The bytes of a piece of memory that grows in place.
const PIECE: u64 = 1 << 20;

/// A session whose memory grows in place, with this number of free pieces.
fn growing(pieces: usize) -> Side {
    let (gpu, dir) = (open_gpu(), tempfile::tempdir().expect("a directory"));
    let builder = Session::builder(gpu.clone()).socket(dir.path().join("s")).region_bytes(PIECE).grows_in_place(true);
    let (session, stream) = (builder.open().expect("a session"), Stream::create(&gpu).expect("a stream"));
    let sender = Sender::new(gpu.clone()).quarantine(Duration::ZERO);
    let held: Vec<_> = (0..pieces).map(|_| session.alloc(PIECE).expect("room")).collect();
    drop(held);
    assert_eq!(session.stats().source.regions, pieces as u64);
    Side { sender, stream, session, gpu, _dir: dir }
}

fn a_block_across_pieces() {
    let side = growing(3);
    let mut agent = Agent::start();
    // SAFETY: `prctl(PR_SET_PTRACER)` takes a process' number; without Yama it is refused, and not needed.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::from(agent.pid())) };
    // It begins 256 bytes before the end of the first piece, and reaches into the third.
    let before = side.session.alloc(PIECE - 256).expect("room");
    let block = Arc::new(side.session.alloc(PIECE + 512).expect("room"));
    assert_eq!(block.device_ptr().0, before.device_ptr().0 + PIECE - 256);
    fill(&side.stream, block.device_ptr(), 8, block.len());
    let (_, mut message) = side.send(&block, Recipient::Unknown);
    let place = message.fields.decode().expect("good").place.expect("it has bytes");
    let SegmentHandle::Expandable(segment) = place.segment else { panic!("{place:?}") };
    assert_eq!((segment.chunk_bytes, segment.len()), (PIECE, 3 * PIECE));
    drop((block, before));
    // The receiver tells the first four bytes: a storage whose first four lie on both sides of an end.
    message.fields.offset_bytes += 254;
    message.fields.size_bytes -= 254;
    message.layout = Layout::contiguous(Dtype::U8, &[message.fields.size_bytes]);
    match agent.ask(&Command::Open(coded(&message))) {
        Answer::Content(bytes) => assert!(bytes.iter().all(|&found| found == 8), "{bytes:?}"),
        other => panic!("{other:?}"),
    }
    side.session.trim().expect("nothing fails here");
    assert_eq!(side.session.stats().source.reserved, 3 * PIECE, "what PyTorch counts stays");
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
    let refused = side.sender.send(&block, Recipient::Unknown, After::Done).expect_err("of 1 and of 2 MiB");
    assert!(refused.to_string().contains("pieces of 1048576 and 2097152 bytes"), "{refused}");
    assert!(side.sender.outstanding().is_empty());
}

fn a_send_whose_export_fails_counts_nothing() {
    // In a process of its own: others here need descriptors.
    let why = Agent::start().cannot(&Command::SendWithoutDescriptors);
    assert!(why.contains("RLIMIT_NOFILE") && why.ends_with("; outstanding 0, then 1"), "{why}");
}

/// What `_share_cuda_` writes of a storage in chunks of another process, each named by `word`.
fn chunked(pid: u32, chunks: u64, words: &[u8], counter: &str, (offset, len): (u64, u64)) -> Fields {
    let mut handle = vec![2, b'e'];
    handle.extend(u64::from(pid).to_ne_bytes());
    handle.extend(agent::CHUNK.to_ne_bytes());
    handle.extend(chunks.to_ne_bytes());
    handle.extend(words);
    Fields {
        handle: Some(handle),
        size_bytes: len,
        offset_bytes: offset,
        ref_counter_handle: Some(counter.as_bytes().to_vec()),
        event_handle: Some(vec![0; 64]),
        ..Fields::default()
    }
}

/// Lets the other process export this many chunks, and returns the counter's file and the descriptors' numbers.
fn exported(agent: &mut Agent, chunks: u8) -> (String, Vec<i32>) {
    match agent.ask(&Command::Export { chunks }) {
        Answer::Exported { file, fds } => (file, fds),
        other => panic!("{other:?}"),
    }
}

fn numbers(fds: &[i32]) -> Vec<u8> {
    fds.iter().flat_map(|fd| fd.to_ne_bytes()).collect()
}

fn an_expandable_segment_is_opened_by_pidfd() {
    let mut agent = Agent::start();
    let gpu = open_gpu();
    let (receiver, stream) = (Receiver::new(gpu.clone()).expect("a thread"), Stream::create(&gpu).expect("a stream"));
    for chunks in [1, 3] {
        let (file, fds) = exported(&mut agent, chunks);
        let chunks = u64::from(chunks);
        // All but 512 bytes at either end.
        let len = chunks * agent::CHUNK - 1024;
        let fields = chunked(agent.pid(), chunks, &numbers(&fds), &file, (512, len));
        let storage = receiver.open(&fields.decode().expect("good"), Wait::None, None).expect("a parent may");
        let seen = bytes(&stream, storage.device_ptr(), len);
        assert!((512..).zip(&seen).all(|(at, byte)| u64::from(*byte) == 0x50 + at / agent::CHUNK), "{chunks} chunks");
        assert_eq!((agent.ask(&Command::Exported), receiver.stats().segments), (Answer::Count(1), 1));
        drop(storage);
        assert!(receiver.wait_released(WATCHDOG));
        assert_eq!((agent.ask(&Command::Exported), receiver.stats().segments), (Answer::Count(0), 0));
    }
}

fn chunks_that_cannot_be_opened_are_refused_and_stay_counted() {
    let mut agent = Agent::start();
    let receiver = Receiver::new(open_gpu()).expect("a thread");
    let (file, fds) = exported(&mut agent, 2);
    let pid = agent.pid();
    // One that is not open, one that is no device memory, and what only an NVLink network can open.
    for (words, expected) in [
        (numbers(&[fds[0], 1 << 20]), "pidfd_getfd"),
        (numbers(&[fds[0], 0]), "a file descriptor to import"),
        (vec![0; 128], "fabric handles"),
    ] {
        let fields = chunked(pid, 2, &words, &file, (0, 2 * agent::CHUNK));
        let error = receiver.open(&fields.decode().expect("good"), Wait::None, None).expect_err("not memory");
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!((agent.ask(&Command::Exported), receiver.stats().segments), (Answer::Count(1), 0));
    }
    let fields = chunked(pid, 2, &numbers(&fds), &file, (0, 2 * agent::CHUNK));
    assert!(receiver.open(&fields.decode().expect("good"), Wait::None, None).is_ok());
}

fn a_read_is_checked_and_in_stream_order() {
    let side = Side::new();
    let (receiver, foreign) =
        (Receiver::new(side.gpu.clone()).expect("a thread"), Stream::create(&open_gpu()).expect("a stream"));
    let stream = Stream::create(&side.gpu).expect("a stream");
    let mut agent = Agent::start();
    let (file, fds) = exported(&mut agent, 1);
    let fields = chunked(agent.pid(), 1, &numbers(&fds), &file, (512, 4096));
    let storage = receiver.open(&fields.decode().expect("good"), Wait::None, None).expect("a parent may");
    let mut read = vec![0; 4097];
    let refused = storage.read(&stream, &mut read);
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    let refused = storage.read(&foreign, &mut read[..4096]);
    assert!(matches!(refused, Err(Error::Mismatch { .. })), "{refused:?}");
    assert_eq!(read, [0; 4097], "a read that failed left something");
    let gate = stop(&stream);
    fill(&stream, storage.device_ptr(), 9, 4096);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| storage.read(&stream, &mut read[..4096]));
        assert!(!reading.is_finished(), "it did not wait for the stream");
        drop(gate);
        reading.join().expect("it waits").expect("it reads");
    });
    assert!(read[..4096] == [9; 4096] && read[4096] == 0);
    storage.read(&stream, &mut []).expect("nothing is always there");
}

fn a_stream_of_another_gpu_is_refused_and_nothing_is_counted_down() {
    let (side, other) = (Side::new(), open_gpu());
    let (receiver, foreign) = (Receiver::new(open_gpu()).expect("a thread"), Stream::create(&other).expect("a stream"));
    let block = side.block(1);
    let (_, message) = side.send(&block, Recipient::Unknown);
    let storage = message.fields.decode().expect("good");
    let refused = receiver.open(&storage, Wait::Stream(&foreign), None);
    assert!(matches!(refused, Err(Error::Mismatch { .. })), "{refused:?}");
    let refused = side.sender.send(&block, Recipient::Unknown, After::Stream(&foreign));
    assert!(matches!(refused, Err(Error::Mismatch { .. })), "{refused:?}");
    assert!(receiver.wait_released(WATCHDOG));
    assert_eq!((side.sender.collect(), side.sender.outstanding().len()), (Collected::default(), 1));
}

fn a_dropped_sender_takes_nothing_away() {
    let (side, mut agent) = (Side::new(), Agent::start());
    let (_, message) = side.send(&side.block(7), Recipient::Unknown);
    agent.ask(&Command::Open(coded(&message)));
    let Side { sender, session, .. } = side;
    drop(sender);
    assert_eq!(session.stats().live_blocks, 1);
    // The receiver has the file mapped, and needs its name no more.
    assert!(!path(&message.fields).exists());
    assert_eq!(agent.ask(&Command::DropAll), settled(1, 0, 0));
}
