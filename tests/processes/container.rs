//! Processes that share little: other namespaces, other users, connections that came another way.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use gpu_ipc::{After, Participant, ParticipantId, Session, To};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::agent::{Agent, WATCHDOG, number, open_gpu};
use crate::{Case, Producer, wait_until};

pub const CASES: &[Case] = &[
    ("container::a_connection_passed_on_by_another_process", passed_on),
    ("container::a_socket_pair_that_was_inherited", socket_pair),
    ("container::a_listening_socket_that_was_inherited", listener),
    ("container::what_is_no_connection_is_refused", no_connection),
];

/// Needs a kernel and a machine that let this user make namespaces.
pub const NAMESPACES: &[Case] = &[("container::two_containers_share_a_directory_alone", two_containers)];

/// Needs root, and a test binary that others may run.
pub const USERS: &[Case] = &[("container::another_user_connects_only_where_it_is_allowed", other_user)];

/// A user that owns nothing.
const NOBODY: u32 = 65534;

/// Says whether namespaces of pids, mounts and users can be made here.
pub fn has_namespaces() -> bool {
    ends_well(contained(&std::env::temp_dir()).arg("--list"))
}

/// Says whether a process of another user can run this binary.
pub fn has_users() -> bool {
    rustix::process::geteuid().is_root() && ends_well(this_binary().uid(NOBODY).arg("--list"))
}

fn ends_well(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

fn this_binary() -> Command {
    Command::new(std::env::current_exe().expect("a test binary has a path"))
}

/// A command that runs this binary, with what is added to it, in namespaces of its own, with `shared` at /mnt and an
/// empty /tmp: nothing else that can be written is seen by another.
///
/// The binary is opened before the mounts, one of which may cover it.
fn contained(shared: &Path) -> Command {
    let script =
        r#"exec 9<"$1" && shift && mount --bind "$0" /mnt && mount -t tmpfs none /tmp && exec /proc/self/fd/9 "$@""#;
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.args(["sh", "-c", script]).arg(shared).arg(std::env::current_exe().expect("a test binary has a path"));
    command
}

fn container(shared: &Path) -> Agent {
    Agent::run(contained(shared))
}

/// Starts an agent that has a descriptor of this process under the same number.
fn agent_with(fd: &OwnedFd) -> Agent {
    let number = fd.as_raw_fd();
    let mut command = this_binary();
    let keep = move || {
        // SAFETY: `fcntl(F_SETFD)` asks for a descriptor of this process: the child's copy of one that the parent
        // keeps.
        if unsafe { libc::fcntl(number, libc::F_SETFD, 0) } == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    };
    // SAFETY: `pre_exec` asks that the closure does only what is safe after a fork: it makes one system call.
    unsafe { command.pre_exec(keep) };
    Agent::run(command)
}

fn two_containers() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut producer = container(dir.path());
    producer.must("open /mnt/s");
    let first = producer.must("alloc 4096 11")[0].clone();
    let mut consumer = container(dir.path());
    let id = consumer.must("connect /mnt/s")[0].clone();
    let descriptor = producer.must(&format!("share {first} {id}"))[0].clone();
    let index = consumer.must(&format!("claim {descriptor}"))[0].clone();
    assert_eq!(consumer.must(&format!("stamp {index}")), ["11"]);
    producer.must(&format!("drop {first}"));
    assert_eq!(producer.must("collect")[1], "1", "the block is in limbo while it is held");
    consumer.kill();
    wait_until("the dead container's block to come back", || producer.must("collect")[1] == "0");

    let mut survivor = container(dir.path());
    let id = survivor.must("connect /mnt/s")[0].clone();
    let second = producer.must("alloc 4096 12")[0].clone();
    let descriptor = producer.must(&format!("share {second} {id}"))[0].clone();
    let index = survivor.must(&format!("claim {descriptor}"))[0].clone();
    producer.kill();
    survivor.must("await-event ProducerGone");
    assert_eq!(survivor.must(&format!("stamp {index}")), ["12"]);
    survivor.must("drop-all");
    wait_until("the dead producer's region to go", || survivor.must("mappings") == ["0"]);
}

fn other_user() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("ours");
    let gpu = open_gpu();
    let mut command = this_binary();
    command.uid(NOBODY);
    let mut nobody = Agent::run(command);

    let ours = Session::builder(gpu.clone()).socket(dir.path().join("ours")).open().expect("a session");
    let refused = nobody.ask(&format!("connect {}", ours.socket_path().display()));
    assert!(refused[0] == "error" && refused.join(" ").contains("allow_uids"), "{refused:?}");

    // A name that anybody may connect to, and a session that lets another user in: not this one.
    let path = dir.path().join("theirs");
    let theirs = Session::builder(gpu.clone()).socket(&path).allow_uids([NOBODY - 1]).open().expect("a session");
    let refused = nobody.ask(&format!("connect {}", path.display()));
    assert!(refused[0] == "error" && refused.join(" ").contains("uid 65534 is not allowed"), "{refused:?}");
    assert!(theirs.participants().is_empty());

    let path = dir.path().join("allowed");
    let allowed = Session::builder(gpu).socket(&path).allow_uids([NOBODY]).open().expect("a session");
    let id: u64 = number(&nobody.must(&format!("connect {}", path.display()))[0]);
    let block = allowed.alloc(4096).expect("there is room");
    let descriptor = block.share(To::Participant(ParticipantId(id)), After::Done).expect("shared");
    nobody.claim(&descriptor);
    drop(block);
    nobody.kill();
    wait_until("its block to come back", || {
        allowed.collect();
        allowed.stats().live_blocks == 0
    });
}

fn connect(path: &Path) -> OwnedFd {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("a socket");
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).expect("a short path")).expect("it listens");
    socket
}

/// The whole life of a consumer that came by `connection`, and its death.
fn live_and_die(producer: &Producer, connection: OwnedFd) {
    let mut consumer = agent_with(&connection);
    let id = consumer.must(&format!("connect-by {}", connection.as_raw_fd()))[0].clone();
    // As long as this copy is open, its death is not proven.
    let block = producer.block(5);
    let descriptor = block.share(To::Participant(ParticipantId(number(&id))), After::Done).expect("shared");
    let index = consumer.claim(&descriptor);
    assert_eq!(consumer.must(&format!("stamp {index}")), ["5"]);
    assert_eq!(producer.session.stats().holders[0].pid, consumer.pid(), "the process that said hello");
    drop(block);
    consumer.kill();
    wait_until("its death to be seen", || producer.session.stats().holders[0].dying);
    assert_eq!(producer.session.stats().limbo_blocks, 1, "a copy of its connection lives");
    drop(connection);
    producer.wait_for_nothing_held();
    assert_eq!(producer.session.stats().live_blocks, 0);
}

fn passed_on() {
    let producer = Producer::new();
    // This process connects, and hands the connection on; the kernel still names it as who connected.
    live_and_die(&producer, connect(producer.session.socket_path()));
}

fn socket_pair() {
    let producer = Producer::new();
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .expect("a pair");
    producer.session.accept(ours).expect("taken in");
    live_and_die(&producer, theirs);
}

fn listener() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("made-by-another");
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("a socket");
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).expect("a short path")).expect("bound");
    let gpu = open_gpu();
    let early = Session::builder(gpu.clone()).listener(socket.try_clone().expect("a copy")).open();
    assert!(early.expect_err("it does not listen").to_string().contains("`listen`"));
    rustix::net::listen(&socket, 16).expect("it listens");
    let session = Session::builder(gpu.clone()).listener(socket).open().expect("a session");
    assert_eq!(session.socket_path(), path);
    let mut consumer = Agent::start();
    let id = consumer.connect(&session);
    let block = session.alloc(4096).expect("there is room");
    consumer.claim(&block.share(To::Participant(id), After::Done).expect("shared"));
    consumer.must("drop-all");
    drop(block);
    assert!(session.shutdown(WATCHDOG).clean);
    assert!(path.exists(), "the name is not ours to remove");
}

fn no_connection() {
    let producer = Producer::new();
    let gpu = open_gpu();
    let stream = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (a, b) = stream.expect("a pair");
    let file: OwnedFd = std::fs::File::open("/dev/null").expect("a file").into();
    for wrong in [a, file] {
        let error = producer.session.accept(wrong).expect_err("it is something else");
        assert!(error.to_string().contains("SOCK_SEQPACKET"), "{error}");
    }
    let error = Participant::builder(gpu.clone()).connect_by(b).expect_err("it is something else");
    assert!(error.to_string().contains("SOCK_SEQPACKET"), "{error}");
    // A pair whose other end nobody accepts ends at the deadline, and one that is closed at once.
    let pair = || rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (kept, ours) = pair().expect("a pair");
    let builder = Participant::builder(gpu).timeout(Some(std::time::Duration::ZERO));
    assert!(matches!(builder.clone().connect_by(ours), Err(gpu_ipc::Error::Deadline { .. })));
    drop(kept);
    let (closed, ours) = pair().expect("a pair");
    drop(closed);
    assert!(matches!(builder.connect_by(ours), Err(gpu_ipc::Error::Refused { .. })));
}
