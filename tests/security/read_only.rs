//! A participant that was granted a block to be read only, and wants to write it.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use gpu_ipc::backend::{Access, RegionId};
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Claims, Descriptor, ParticipantId, To};
use rustix::fs::OFlags;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect};

use crate::stranger::{
    CLAIM_TICKETS, DECLINED, FORWARD, Heard, Idler, MAP_REGION, NO_REGION, REGION, Stranger,
    TICKETS, lease, map_region,
};
use crate::{Case, Stage};

pub const CASES: &[Case] = &[
    (
        "read_only::the_writable_region_by_a_read_only_lease",
        writable_region,
    ),
    (
        "read_only::the_readable_region_by_a_writable_lease",
        readable_region,
    ),
    (
        "read_only::the_writable_region_by_a_read_only_ticket",
        by_ticket,
    ),
    ("read_only::a_writable_descriptor_by_a_forward", by_forward),
];

fn read_only() -> ShareOptions {
    ShareOptions::default().read_only()
}

/// A question for the region that a descriptor names, mapped so, by the lease that it names.
fn question(descriptor: &Descriptor, access: Access) -> Vec<u8> {
    let mut body = map_region(descriptor);
    let region = region_of(&body[..8]).with_access(access);
    body[..8].copy_from_slice(&region.0.to_le_bytes());
    body
}

fn region_of(bytes: &[u8]) -> RegionId {
    RegionId(u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
}

/// Checks that an answer brings a descriptor through which nothing can be written.
#[track_caller]
pub fn is_to_be_read(heard: &Heard) -> &OwnedFd {
    assert_eq!((heard.number, heard.fds.len()), (REGION, 1));
    assert_eq!(region_of(&heard.body[..8]).access(), Access::ReadOnly);
    assert_eq!(heard.body[32], Access::ReadOnly as u8);
    let fd = &heard.fds[0];
    let flags = rustix::fs::fcntl_getfl(fd).expect("it is open");
    assert_eq!(flags & OFlags::ACCMODE, OFlags::RDONLY);
    let map = |protection| {
        // SAFETY: `mmap` at no fixed address replaces nothing.
        unsafe {
            mmap(
                std::ptr::null_mut(),
                4096,
                protection,
                MapFlags::SHARED,
                fd,
                0,
            )
        }
    };
    let mapped = map(ProtFlags::READ).expect("it can be read");
    // SAFETY: `mprotect` asks for pages that are mapped: just now, and nothing unmaps them.
    unsafe { mprotect(mapped, 4096, MprotectFlags::READ | MprotectFlags::WRITE) }
        .expect_err("it can be made writable");
    map(ProtFlags::READ | ProtFlags::WRITE).expect_err("it can be written");
    fd
}

/// Opens the memory behind a descriptor once more, to write.
pub fn open_to_write(fd: &OwnedFd) -> std::io::Result<std::fs::File> {
    OpenOptions::new()
        .write(true)
        .open(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

#[track_caller]
fn is_refused(heard: &Heard) {
    assert_eq!((heard.number, heard.fds.len()), (NO_REGION, 0));
    assert!(
        heard.text(8).contains("another access"),
        "{:?}",
        heard.text(8)
    );
}

fn writable_region() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let block = stage.block();
    let descriptor = block
        .share_with(
            To::Participant(ParticipantId(stranger.id)),
            After::Done,
            &read_only(),
        )
        .expect("shared");
    let ask = |access| stranger.ask(MAP_REGION, &question(&descriptor, access));
    // Before it has mapped what it may, and after.
    is_refused(&ask(Access::ReadWrite));
    is_to_be_read(&ask(Access::ReadOnly));
    is_refused(&ask(Access::ReadWrite));
    // The byte in which a participant says what it wants gives no more.
    let mut wants_more = question(&descriptor, Access::ReadOnly);
    wants_more[8] = Access::ReadWrite as u8;
    is_to_be_read(&stranger.ask(MAP_REGION, &wants_more));
    drop((stranger, idler, block));
    stage.end();
}

/// Each kind of lease is the right to its own number of the region, and to no other.
fn readable_region() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let block = stage.block();
    let descriptor = block
        .share(To::Participant(ParticipantId(stranger.id)), After::Done)
        .expect("shared");
    is_refused(&stranger.ask(MAP_REGION, &question(&descriptor, Access::ReadOnly)));
    let heard = stranger.ask(MAP_REGION, &question(&descriptor, Access::ReadWrite));
    assert_eq!((heard.number, heard.fds.len()), (REGION, 1));
    drop((stranger, idler, block));
    stage.end();
}

/// Claims a ticket, and returns the question for the region that the answer names, mapped so.
pub fn question_by_ticket(stranger: &Stranger, ticket: &[u8], access: Access) -> Vec<u8> {
    let asked = [
        &1u32.to_le_bytes()[..],
        &[0; 4],
        &ticket[52..56],
        &[0; 4],
        &ticket[56..64],
    ];
    let heard = stranger.ask(CLAIM_TICKETS, &asked.concat());
    assert_eq!(heard.number, TICKETS);
    // Behind the count: ticket, outcome, generation, the lease, the place.
    let answer = &heard.body[8..];
    assert!(matches!(answer[4], 0 | 7), "it is refused: {}", answer[4]);
    let region = region_of(&answer[32..40]);
    assert_eq!(region.access(), Access::ReadOnly);
    let region = region.with_access(access).0.to_le_bytes();
    [&region[..], &[0; 8], &answer[16..32]].concat()
}

fn by_ticket() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let block = stage.block();
    for claims in [Claims::Once, Claims::Unlimited] {
        let ticket = block
            .share_with(To::Ticket(claims), After::Done, &read_only())
            .expect("shared");
        let ask = |access| {
            let question = question_by_ticket(&stranger, ticket.as_bytes(), access);
            stranger.ask(MAP_REGION, &question)
        };
        is_refused(&ask(Access::ReadWrite));
        is_to_be_read(&ask(Access::ReadOnly));
    }
    drop((stranger, idler, block));
    stage.end();
}

/// A forward to itself gives no more than it was granted.
fn by_forward() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let block = stage.block();
    let descriptor = block
        .share_with(
            To::Participant(ParticipantId(stranger.id)),
            After::Done,
            &read_only(),
        )
        .expect("shared");
    for (kind, claims, to) in [(1u8, 0u32, stranger.id), (2, 1, 0), (2, 0, 0)] {
        let body = [
            &[0; 8],
            &lease(&descriptor)[..],
            &descriptor.as_bytes()[72..88],
            &[kind, 0, 0, 0],
            &claims.to_le_bytes(),
            &to.to_le_bytes(),
            &[0; 64],
        ];
        let heard = stranger.ask(FORWARD, &body.concat());
        assert_ne!(heard.number, DECLINED, "{:?}", heard.text(0));
        let forwarded = Descriptor::decode(&heard.body).expect("a descriptor");
        assert!(forwarded.is_read_only());
        let ask = |access| match kind {
            1 => stranger.ask(MAP_REGION, &question(&forwarded, access)),
            _ => {
                let question = question_by_ticket(&stranger, forwarded.as_bytes(), access);
                stranger.ask(MAP_REGION, &question)
            }
        };
        is_refused(&ask(Access::ReadWrite));
        is_to_be_read(&ask(Access::ReadOnly));
    }
    drop((stranger, idler, block));
    stage.end();
}
