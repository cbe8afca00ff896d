//! Who asks for everything gets its share and is told why not more; the others are served.

use std::os::fd::OwnedFd;

use gpu_ipc::{After, Error, Participant, ParticipantId, To};
use harness::wait_until;
use rustix::net::SendFlags;

use crate::stranger::{
    HELLO, INSPECT, Idler, MAP_REGION, REFUSED, REGION, Stranger, hear, hello, map_region, say,
};
use crate::{Case, Stage};

pub const CASES: &[Case] = &[
    ("quotas::slots", slots),
    (
        "quotas::descriptors_that_come_with_a_message",
        descriptors_that_come,
    ),
    (
        "quotas::descriptors_for_one_who_does_not_read",
        descriptors_that_go,
    ),
    ("quotas::mappings", mappings),
    ("quotas::messages", messages),
    ("quotas::connections_that_say_nothing", silent_connections),
];

fn slots() {
    let stage = Stage::with(|builder| builder.max_slots(8192));
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let block = stage.block();
    let to = To::Participant(ParticipantId(stranger.id));
    for _ in 0..8192 {
        block.share(to, After::Done).expect("within the quota");
    }
    let error = block
        .share(to, After::Done)
        .expect_err("the quota is used up");
    assert!(
        matches!(error, Error::Exhausted { limit: 8192, .. }),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("lease slots of a participant"),
        "{error}"
    );
    assert!(
        error.to_string().contains("max_slots"),
        "no remedy: {error}"
    );
    stage.check();
    drop((stranger, block));
    stage.end();
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("proc is mounted")
        .count()
}

fn descriptors_that_come() {
    let stage = Stage::new();
    let idler = Idler::new();
    // More descendants than a hello may name.
    let socket = Stranger::connect(stage.session.socket_path()).expect("it listens");
    let many = vec![idler.fd(); 202];
    say(&socket, HELLO, 0, &hello(&stage.gpu, 201), &many).expect("said");
    let heard = hear(&socket).expect("it answers");
    assert_eq!(heard.number, REFUSED);
    assert!(
        heard
            .text(0)
            .contains("descendants is 201, but must be at most 200"),
        "{:?}",
        heard.text(0)
    );
    drop((socket, heard));
    // With messages that have none, from one who is let in: all are closed again.
    let before = open_files();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    for _ in 0..20 {
        say(&stranger.socket, INSPECT, 9, &[0; 8], &[idler.fd(); 253]).expect("said");
    }
    drop(stranger);
    // It is not proven dead: the process that it named lives.
    drop(idler);
    wait_until("its descriptors to be closed", || open_files() <= before);
    stage.end();
}

/// Each answer to a question for a region carries a descriptor; one who asks and never reads must
/// not use up the producer's.
fn descriptors_that_go() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let block = stage.block();
    let descriptor = block
        .share(To::Participant(ParticipantId(stranger.id)), After::Done)
        .expect("shared");
    let question = map_region(&descriptor);
    let before = open_files();
    let mut most = 0;
    for _ in 0..2000 {
        stranger.say(MAP_REGION, 9, &question);
        most = most.max(open_files());
    }
    stage.check();
    most = most.max(open_files());
    assert!(
        most <= before + 24,
        "{} descriptors are kept for one who does not read",
        most - before
    );
    assert!(most > before, "nothing was kept: it proves nothing");
    drop((stranger, idler, block));
    stage.end();
}

fn mappings() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let block = stage.block();
    let descriptor = block
        .share(To::Participant(ParticipantId(stranger.id)), After::Done)
        .expect("shared");
    for _ in 0..50 {
        assert_eq!(
            stranger.ask(MAP_REGION, &map_region(&descriptor)).number,
            REGION
        );
    }
    let stats = stage.session.stats();
    let holder = stats
        .holders
        .iter()
        .find(|holder| holder.participant.0 == stranger.id)
        .expect("it holds a block");
    assert_eq!(
        holder.mappings, 1,
        "a region counts once, however often it is asked for"
    );
    // An unmapping that was never noted ends nobody else's.
    for region in 0..64u64 {
        stranger.say(3, 0, &region.to_le_bytes());
    }
    stage.check();
    let honest = |stats: &gpu_ipc::session::Stats| {
        stats
            .holders
            .iter()
            .find(|holder| holder.participant == stage.honest.id())
            .map(|holder| holder.mappings)
    };
    assert_eq!(honest(&stage.session.stats()), Some(1));
    drop((stranger, idler, block));
    stage.end();
}

/// A process that asks and never reads is answered while its socket has room, and a few hundred
/// times more. Processes that read are answered as before.
fn messages() {
    let stage = Stage::new();
    let idler = Idler::new();
    let stranger = Stranger::join(stage.session.socket_path(), &stage.gpu, idler.fd());
    let asked = 20_000;
    for _ in 0..asked {
        stranger.say(INSPECT, 9, &[0; 8]);
    }
    stage.check();
    // It stays connected, and reads what was kept.
    let mut answers = 0;
    loop {
        if !hear_now(&stranger.socket) {
            wait_a_turn(&stage);
            if !hear_now(&stranger.socket) {
                break;
            }
        }
        answers += 1;
    }
    assert!(answers > 256, "only {answers} answers were kept");
    assert!(
        answers < asked / 2,
        "{answers} of {asked} answers were kept for one who does not read"
    );
    assert_eq!(
        stranger.ask(INSPECT, &[0; 8]).number,
        138,
        "it is not answered any more"
    );
    drop((stranger, idler));
    stage.end();
}

/// Lets the session's thread take what is in its way: it answers a newcomer after that.
fn wait_a_turn(stage: &Stage) {
    Participant::builder(stage.gpu.clone())
        .connect(stage.session.socket_path())
        .expect("connected");
}

fn hear_now(socket: &OwnedFd) -> bool {
    let mut packet = [0; 4096];
    rustix::net::recv(socket, &mut packet, rustix::net::RecvFlags::DONTWAIT)
        .is_ok_and(|(len, _)| len > 0)
}

/// More connections than a session keeps waiting, of which none says anything.
fn silent_connections() {
    let stage = Stage::new();
    let before = open_files();
    let silent: Vec<OwnedFd> = (0..400)
        .map(|_| Stranger::connect(stage.session.socket_path()).expect("it listens"))
        .collect();
    stage.check();
    // Who comes after them is let in, and so is who was first and is not silent any more.
    let late = Participant::builder(stage.gpu.clone())
        .connect(stage.session.socket_path())
        .expect("it is let in");
    wait_until("the oldest to be closed", || {
        open_files() - before <= 400 + 256 + 32
    });
    let closed = silent.iter().filter(|socket| {
        rustix::net::send(socket, b"x", SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_err()
    });
    assert!(closed.count() >= 100, "hardly any was closed");
    drop((late, silent));
    stage.end();
}
