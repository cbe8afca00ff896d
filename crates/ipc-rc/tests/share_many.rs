//! Many grants by one call: more than fit one shard, tickets among them, and by threads that lock
//! the same ledgers.

use std::num::NonZeroU32;
use std::sync::Barrier;
use std::time::Duration;

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Gpu};
use ipc_rc::{After, Claims, Participant, SentBlock, Session, ShareOptions, To, Wait};

/// A wait that is longer will never end.
const PATIENCE: Duration = Duration::from_secs(120);

struct Group {
    session: Session,
    participants: Vec<Participant>,
    _dir: tempfile::TempDir,
}

fn open(participants: usize) -> Group {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = Gpu::new(
        HostBackend::new(HostConfig::default()).expect("it opens"),
        DeviceId(0),
    )
    .expect("a device");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let join = || {
        Participant::builder(gpu.clone())
            .connect(session.socket_path())
            .expect("connected")
    };
    Group {
        participants: (0..participants).map(|_| join()).collect(),
        session,
        _dir: dir,
    }
}

#[test]
fn one_call_grants_more_than_a_shard_has_room_for_and_tickets_in_between() {
    let group = open(2);
    let block = group.session.alloc(256).expect("there is room");
    let to = |n: usize| match n % 100 {
        99 => To::Ticket(Claims::Times(NonZeroU32::MIN)),
        _ => To::Participant(group.participants[n % 2].id()),
    };
    // A shard of a first file has 512 slots.
    let grants: Vec<(&SentBlock, To)> = (0..1_500).map(|n| (&block, to(n))).collect();
    let descriptors = group
        .session
        .share_many(&grants, After::Done, &ShareOptions::default())
        .expect("shared");
    assert_eq!((descriptors.len(), block.outstanding()), (1_500, 1_500));
    for (n, descriptor) in descriptors.iter().enumerate() {
        let claimed = group.participants[n % 2].claim(descriptor.as_bytes(), Wait::None, None);
        assert_eq!(
            claimed.expect("addressed to it, or a ticket").len(),
            256,
            "grant {n}"
        );
    }
    block
        .wait_released(Some(PATIENCE))
        .expect("all are released");
}

#[test]
fn threads_that_share_with_the_same_participants_in_any_order_wait_for_nobody() {
    const ROUNDS: usize = 300;
    let group = open(8);
    let blocks: Vec<SentBlock> = (0..4)
        .map(|_| group.session.alloc(256).expect("there is room"))
        .collect();
    let barrier = Barrier::new(blocks.len());
    std::thread::scope(|scope| {
        for (number, block) in blocks.iter().enumerate() {
            let (group, barrier) = (&group, &barrier);
            scope.spawn(move || {
                let mut order: Vec<&Participant> = group.participants.iter().collect();
                barrier.wait();
                for round in 0..ROUNDS {
                    order.rotate_left(number + 1);
                    if round % 2 == number % 2 {
                        order.reverse();
                    }
                    let grants: Vec<_> = order
                        .iter()
                        .map(|to| (block, To::Participant(to.id())))
                        .collect();
                    let shared =
                        group
                            .session
                            .share_many(&grants, After::Done, &ShareOptions::default());
                    for (to, descriptor) in order.iter().zip(shared.expect("shared")) {
                        drop(
                            to.claim(descriptor.as_bytes(), Wait::None, None)
                                .expect("addressed to it"),
                        );
                    }
                    group.session.collect();
                }
            });
        }
    });
    blocks.iter().for_each(|block| {
        block
            .wait_released(Some(PATIENCE))
            .expect("all are released")
    });
}
