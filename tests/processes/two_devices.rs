//! What takes two GPUs: a device under another ordinal, sessions on both, and a consumer whose kernels
//! run on the device that the memory is not on.

use gpu_ipc::backend::{DeviceId, Sharing};
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Gpu, Participant, Stream, To, Wait};
use harness::{WATCHDOG, wait_until};

use crate::agent::Agent;
use crate::device::open_gpu;
use crate::gpu::fill;
use crate::growth::{PIECE, growing};
use crate::kernel::Kernels;
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    (
        "two_devices::a_device_is_found_under_another_ordinal",
        other_ordinal,
    ),
    (
        "two_devices::a_peer_device_writes_into_a_claimed_block",
        peer_device,
    ),
    (
        "two_devices::a_peer_device_reads_a_block_across_pieces_in_both_ways_of_mapping",
        across_pieces,
    ),
    (
        "two_devices::a_consumer_that_names_another_device_is_refused",
        another_device,
    ),
    (
        "two_devices::sessions_on_both_devices_in_one_process",
        both_devices,
    ),
];

/// Bytes of a block that a peer writes.
const LEN: u64 = 1 << 20;

/// Counts the devices of the backend that is tested.
pub fn devices() -> usize {
    if crate::device::is_host() {
        return 0;
    }
    gpu_ipc::detect().map_or(0, |found| {
        found
            .gpus()
            .iter()
            .filter(|gpu| gpu.kind() == open_gpu().kind())
            .count()
    })
}

fn other_ordinal() {
    let producer = Producer::new();
    let uuid = producer.gpu.uuid().to_string();
    let mut consumer = Agent::start_with(&[
        ("CUDA_VISIBLE_DEVICES", "1,0"),
        (crate::device::DEVICE, &uuid),
    ]);
    let id = consumer.connect(&producer.session);
    let block = producer.block(12);
    let index = consumer.claim(
        &block
            .share(To::Participant(id), After::Stream(&producer.stream))
            .expect("shared"),
    );
    assert_eq!(consumer.stamp(index), 12);
    // The first of the two is another device there, and is told so.
    let mut wrong = Agent::start_with(&[("CUDA_VISIBLE_DEVICES", "1,0")]);
    let refused = wrong.cannot_connect(&producer.session);
    assert!(refused.text.contains(&uuid), "{refused:?}");
}

/// A kernel of the second device writes into memory of the first that another process shares by
/// file descriptor.
fn peer_device() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let mut producer = Agent::start();
    producer.open(&path);
    let block = producer.alloc(1048576, 6);
    let participant = Participant::builder(open_gpu())
        .connect(&path)
        .expect("connected");
    let (here, there) = (participant.gpu().device(), DeviceId(1));
    let peer = Gpu::new(participant.gpu().backend().clone(), there).expect("the second device");
    peer.backend()
        .enable_peer_access(there, here)
        .expect("one reaches the other");
    let kernels = Kernels::open_on(there);
    let stream = Stream::create(&peer).expect("a stream");
    let descriptor = producer.share(block, To::Participant(participant.id()));
    let claimed = participant
        .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    kernels.write_once(&stream, claimed.device_ptr(), LEN / 8);
    // The drop waits for the second device's stream, not for the caller.
    claimed.used_on(&stream).expect("a stream of its own");
    drop(claimed);
    wait_until("the lease to end", || producer.outstanding(block) == 0);
    assert_eq!(producer.stamp(block), 1);
}

/// A kernel of the second device reads a block of three pieces, once mapped to be written and once to
/// be read alone, in another process.
fn across_pieces() {
    const BYTE: u8 = 0x5a;
    let producer = growing(64);
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    producer.grow(3);
    let block = producer
        .session
        .alloc(3 * PIECE)
        .expect("three free pieces");
    fill(&producer.gpu, &producer.stream, &block, BYTE);
    let only_read = ShareOptions::default().read_only();
    for options in [ShareOptions::default(), only_read] {
        let shared = block
            .share_with(To::Participant(id), After::Done, &options)
            .expect("shared");
        let claimed = consumer.claim(&shared);
        assert_eq!(
            consumer.look_from(1, claimed),
            u64::from_ne_bytes([BYTE; 8]),
            "{options:?}"
        );
    }
    assert_eq!(consumer.mappings(), 6, "each piece is mapped in both ways");
    drop(block);
    consumer.let_go_of_all();
    producer.wait_for_nothing_held();
}

/// Memory by handle is reached from the device that opened it alone, so a participant names the
/// session's device, whichever way the memory is shared.
fn another_device() {
    for sharing in [Sharing::Fd, Sharing::Handle] {
        let producer = Producer::with(|builder| builder.sharing(sharing));
        let other =
            Gpu::new(producer.gpu.backend().clone(), DeviceId(1)).expect("the second device");
        let uuids = [producer.gpu.uuid(), other.uuid()].map(|uuid| uuid.to_string());
        let refused = Participant::builder(other)
            .connect(producer.session.socket_path())
            .expect_err("the session is on the first device")
            .to_string();
        assert!(
            uuids.iter().all(|uuid| refused.contains(uuid)),
            "{sharing:?}: {refused}"
        );
    }
}

/// Two sessions, each on a device of its own, and a consumer of both.
fn both_devices() {
    let first = Producer::new();
    let gpu = Gpu::new(first.gpu.backend().clone(), DeviceId(1)).expect("the second device");
    let uuid = gpu.uuid().to_string();
    let second = Producer::on(gpu, |builder| builder);
    let (mut one, mut other) = (
        Agent::start(),
        Agent::start_with(&[(crate::device::DEVICE, &uuid)]),
    );
    for ((producer, agent), round) in [(&first, &mut one), (&second, &mut other)]
        .into_iter()
        .zip(0..)
    {
        let id = agent.connect(&producer.session);
        let block = producer.block(round + 20);
        let shared = block
            .share(To::Participant(id), After::Stream(&producer.stream))
            .expect("shared");
        let claimed = agent.claim_on_stream(&shared);
        assert_eq!(agent.stamp(claimed), round + 20);
    }
    one.kill();
    second.session.collect();
    assert_eq!(
        second.session.stats().held,
        1,
        "a death on one device is none on the other"
    );
    first.wait_for_nothing_held();
    other.let_go_of_all();
    second.wait_for_nothing_held();
}
