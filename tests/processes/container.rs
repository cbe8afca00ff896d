//! Processes that share little: other namespaces, other users, connections that came another way.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use gpu_ipc::{After, Participant, ParticipantId, Session, To};
use harness::program::this_program;
use harness::surroundings::{NOBODY, as_user, contained, keep_open};
use harness::{WATCHDOG, wait_until};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::agent::{Agent, number};
use crate::device::open_gpu;
use crate::words::{Command, Heard};
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    (
        "container::a_connection_passed_on_by_another_process",
        passed_on,
    ),
    ("container::a_socket_pair_that_was_inherited", socket_pair),
    ("container::a_listening_socket_that_was_inherited", listener),
    ("container::what_is_no_connection_is_refused", no_connection),
];

/// Needs a kernel and a machine that let this user make namespaces.
pub const NAMESPACES: &[Case] = &[(
    "container::two_containers_share_a_directory_alone",
    two_containers,
)];

/// Needs root, and a test binary that others may run.
pub const USERS: &[Case] = &[(
    "container::another_user_connects_only_where_it_is_allowed",
    other_user,
)];

fn container(shared: &Path) -> Agent {
    Agent::run(contained(shared))
}

/// Starts an agent that has a descriptor of this process under the same number.
fn agent_with(fd: &OwnedFd) -> Agent {
    let mut program = this_program();
    keep_open(&mut program, fd);
    Agent::run(program)
}

fn two_containers() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut producer = container(dir.path());
    producer.open("/mnt/s".as_ref());
    let first = producer.alloc(4096, 11);
    let mut consumer = container(dir.path());
    let id = consumer.connect_to("/mnt/s".as_ref());
    let descriptor = producer.share(first, To::Participant(id));
    let index = consumer.claim(&descriptor);
    assert_eq!(consumer.stamp(index), 11);
    producer.let_go(first);
    assert_eq!(
        producer.limbo(),
        1,
        "the block is in limbo while it is held"
    );
    consumer.kill();
    wait_until("the dead container's block to come back", || {
        producer.limbo() == 0
    });

    let mut survivor = container(dir.path());
    let id = survivor.connect_to("/mnt/s".as_ref());
    let second = producer.alloc(4096, 12);
    let descriptor = producer.share(second, To::Participant(id));
    let index = survivor.claim(&descriptor);
    producer.kill();
    survivor.hears(&Heard::ProducerGone);
    assert_eq!(survivor.stamp(index), 12);
    survivor.let_go_of_all();
    wait_until("the dead producer's region to go", || {
        survivor.mappings() == 0
    });
}

fn other_user() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("ours");
    let gpu = open_gpu();
    let mut nobody = Agent::run(as_user(NOBODY));

    let ours = Session::builder(gpu.clone())
        .socket(dir.path().join("ours"))
        .open()
        .expect("a session");
    let refused = nobody.cannot_connect(&ours);
    assert!(refused.text.contains("allow_uids"), "{refused:?}");

    // A name that anybody may connect to, and a session that lets another user in: not this one.
    let path = dir.path().join("theirs");
    let theirs = Session::builder(gpu.clone())
        .socket(&path)
        .allow_uids([NOBODY - 1])
        .open()
        .expect("a session");
    let refused = nobody.cannot_connect(&theirs);
    assert!(
        refused.text.contains("uid 65534 is not allowed"),
        "{refused:?}"
    );
    assert!(theirs.participants().is_empty());

    let path = dir.path().join("allowed");
    let allowed = Session::builder(gpu)
        .socket(&path)
        .allow_uids([NOBODY])
        .open()
        .expect("a session");
    let id = nobody.connect_to(&path);
    let block = allowed.alloc(4096).expect("there is room");
    let descriptor = block
        .share(To::Participant(id), After::Done)
        .expect("shared");
    nobody.claim(&descriptor);
    drop(block);
    nobody.kill();
    wait_until("its block to come back", || {
        allowed.collect();
        allowed.stats().live_blocks == 0
    });
}

fn connect(path: &Path) -> OwnedFd {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a socket");
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).expect("a short path"))
        .expect("it listens");
    socket
}

/// The whole life of a consumer that came by `connection`, and its death.
fn live_and_die(producer: &Producer, connection: OwnedFd) {
    let mut consumer = agent_with(&connection);
    let id = ParticipantId(number(consumer.must(&Command::ConnectBy {
        connection: connection.as_raw_fd(),
    })));
    // As long as this copy is open, its death is not proven.
    let block = producer.block(5);
    let descriptor = block
        .share(To::Participant(id), After::Done)
        .expect("shared");
    let index = consumer.claim(&descriptor);
    assert_eq!(consumer.stamp(index), 5);
    assert_eq!(
        producer.session.stats().holders[0].pid,
        consumer.pid(),
        "the process that said hello"
    );
    drop(block);
    consumer.kill();
    wait_until("its death to be seen", || {
        producer.session.stats().holders[0].dying
    });
    assert_eq!(
        producer.session.stats().limbo_blocks,
        1,
        "a copy of its connection lives"
    );
    drop(connection);
    producer.wait_for_nothing_held();
    assert_eq!(producer.session.stats().live_blocks, 0);
}

fn passed_on() {
    let producer = Producer::new();
    // This process connects, and hands the connection on; the kernel still names it as who
    // connected.
    live_and_die(&producer, connect(producer.session.socket_path()));
}

fn socket_pair() {
    let producer = Producer::new();
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a pair");
    producer.session.accept(ours).expect("taken in");
    live_and_die(&producer, theirs);
}

fn listener() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("made-by-another");
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a socket");
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).expect("a short path")).expect("bound");
    let gpu = open_gpu();
    let early = Session::builder(gpu.clone())
        .listener(socket.try_clone().expect("a copy"))
        .open();
    assert!(
        early
            .expect_err("it does not listen")
            .to_string()
            .contains("`listen`")
    );
    rustix::net::listen(&socket, 16).expect("it listens");
    let session = Session::builder(gpu.clone())
        .listener(socket)
        .open()
        .expect("a session");
    assert_eq!(session.socket_path(), path);
    let mut consumer = Agent::start();
    let id = consumer.connect(&session);
    let block = session.alloc(4096).expect("there is room");
    consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    consumer.let_go_of_all();
    drop(block);
    assert!(session.shutdown(WATCHDOG).clean);
    assert!(path.exists(), "the name is not ours to remove");
}

fn no_connection() {
    let producer = Producer::new();
    let gpu = open_gpu();
    let stream = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    );
    let (a, b) = stream.expect("a pair");
    let file: OwnedFd = std::fs::File::open("/dev/null").expect("a file").into();
    for wrong in [a, file] {
        let error = producer
            .session
            .accept(wrong)
            .expect_err("it is something else");
        assert!(error.to_string().contains("SOCK_SEQPACKET"), "{error}");
    }
    let error = Participant::builder(gpu.clone())
        .connect_by(b)
        .expect_err("it is something else");
    assert!(error.to_string().contains("SOCK_SEQPACKET"), "{error}");
    // A pair whose other end nobody accepts ends at the deadline, and one that is closed at once.
    let pair = || {
        rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
    };
    let (kept, ours) = pair().expect("a pair");
    let builder = Participant::builder(gpu).timeout(Some(std::time::Duration::ZERO));
    assert!(matches!(
        builder.clone().connect_by(ours),
        Err(gpu_ipc::Error::Deadline { .. })
    ));
    drop(kept);
    let (closed, ours) = pair().expect("a pair");
    drop(closed);
    // A process that another case is about to start has a copy of it for a moment.
    let builder = builder.timeout(Some(WATCHDOG));
    assert!(matches!(
        builder.connect_by(ours),
        Err(gpu_ipc::Error::Refused { .. })
    ));
}
