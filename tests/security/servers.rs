//! What holds for every server, whatever its protocol: a session and a broker go through the same
//! cases, each in its own bytes.

use std::any::Any;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use broker::{Broker, Limits, Options};
use harness::surroundings::NOBODY;
use harness::wait_until;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::stranger::{HELLO, Heard, Idler, REFUSED, Stranger, WELCOME, hear, hello, say_bytes};
use crate::users::{Process, Role, Said};
use crate::{Case, Stage, open_gpu};

pub const CASES: &[Case] = &[
    (
        "servers::silent_connections_keep_out_no_other_process",
        || each(silent),
    ),
    ("servers::a_bad_hello_is_refused_and_leaves_nothing", || {
        each(bad_hellos)
    }),
    ("servers::a_half_closed_connection_costs_nothing", || {
        each(half_closed)
    }),
    ("servers::nonsense_is_not_read_again", || each(nonsense)),
    (
        "servers::connections_beyond_the_descriptors_are_closed_and_the_next_is_served",
        || each(few_descriptors),
    ),
];

pub const USERS: &[Case] = &[(
    "servers::one_that_is_not_allowed_is_refused_before_it_speaks",
    || each(not_allowed),
)];

/// What messages of a session begin with, and the version of its protocol.
const SESSION: (&[u8; 2], u16) = (b"GI", 2);
/// Likewise of a broker.
const BROKER: (&[u8; 2], u16) = (b"GO", 1);

/// A server in this process.
struct Server {
    path: PathBuf,
    /// The name of its thread.
    thread: &'static str,
    /// A good hello of a process without descendants.
    hello: Vec<u8>,
    /// The first bytes of its messages, and the version that they are of.
    speaks: (&'static [u8; 2], u16),
    _kept: Box<dyn Any>,
}

impl Server {
    /// Starts a session that lets another user in, too.
    fn session() -> Server {
        let stage = Stage::with(|builder| builder.allow_uids([NOBODY - 1]));
        let path = stage.session.socket_path().to_owned();
        open_to_all(&path);
        Server {
            hello: packet(SESSION, 1, &hello(&stage.gpu, 0)),
            path,
            thread: "gpu-ipc-session",
            speaks: SESSION,
            _kept: Box::new(stage),
        }
    }

    /// Likewise a broker, which serves until this process ends.
    fn broker() -> Server {
        let dir = tempfile::tempdir().expect("a directory");
        let options = Options {
            dir: dir.path().to_owned(),
            gpus: Arc::new(|| Ok(vec![open_gpu()])),
            limits: Limits::default(),
            allowed: vec![NOBODY - 1].into(),
            keeper: None,
        };
        let broker = Broker::open(options).expect("a broker");
        std::thread::Builder::new()
            .name("a-broker".into())
            .spawn(move || broker.run())
            .expect("a thread");
        let path = dir.path().join("broker");
        open_to_all(&path);
        // The versions 1 to 1, no shared context, no descendants, no name.
        let body = [1, 0, 1, 0, 0, 0, 0, 0, 0, 0];
        Server {
            path,
            thread: "a-broker",
            hello: packet(BROKER, 1, &body),
            speaks: BROKER,
            _kept: Box::new(dir),
        }
    }

    fn connect(&self) -> OwnedFd {
        Stranger::connect(&self.path).expect("it listens")
    }

    /// Connects as the process behind `pidfd`, and returns the answer too.
    fn greet(&self, pidfd: BorrowedFd<'_>) -> (OwnedFd, Option<Heard>) {
        let socket = self.connect();
        say_bytes(&socket, &self.hello, &[pidfd]).expect("said");
        let answer = hear(&socket);
        (socket, answer)
    }

    /// Connects, and must be let in.
    #[track_caller]
    fn join(&self, idler: &Idler) -> OwnedFd {
        let (socket, answer) = self.greet(idler.fd());
        let answer = answer.expect("it answers");
        assert_eq!(answer.number, WELCOME, "{}", answer.text(0));
        socket
    }

    /// How often its thread went to sleep.
    fn sleeps(&self) -> u64 {
        let tasks = fs::read_dir("/proc/self/task")
            .expect("proc is mounted")
            .flatten();
        let status = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
        let name = format!("Name:\t{}\n", self.thread);
        let count = |status: String| {
            let line = "voluntary_ctxt_switches:\t";
            let count = |text: &str| text.strip_prefix(line)?.parse::<u64>().ok();
            status.lines().find_map(count)
        };
        status
            .filter(|status| status.starts_with(&name))
            .filter_map(count)
            .sum()
    }

    /// Waits until its thread has slept between answers: one that spins never does.
    fn await_sleeps(&self, idler: &Idler) {
        let before = self.sleeps();
        wait_until("the server's thread to sleep between answers", || {
            drop(self.join(idler));
            self.sleeps() >= before + 50
        });
    }
}

/// Runs a case on a server of each kind.
fn each(case: fn(&Server)) {
    for server in [Server::session(), Server::broker()] {
        println!("{}", server.thread);
        case(&server);
    }
}

/// Lets other users reach a socket, so that the server alone keeps them out.
fn open_to_all(path: &std::path::Path) {
    let dir = path.parent().expect("it lies in a directory");
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("it is ours");
}

/// A packet with as many descriptors as a message of that number has.
fn packet((magic, version): (&[u8; 2], u16), fds: u16, body: &[u8]) -> Vec<u8> {
    let mut packet = magic.to_vec();
    packet.extend(version.to_le_bytes());
    packet.extend(HELLO.to_le_bytes());
    packet.extend(fds.to_le_bytes());
    packet.extend([0; 8]);
    packet.extend(body);
    packet
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd")
        .expect("proc is mounted")
        .count()
}

fn silent(server: &Server) {
    let idler = Idler::new();
    let mut slow = Process::start(&Role::Slow {
        socket: server.path.clone(),
        hello: server.hello.clone(),
    });
    assert_eq!(slow.answer(), Some(Said::Connected));
    let silent: Vec<OwnedFd> = (0..600).map(|_| server.connect()).collect();
    // They are all taken in when one that comes after them is served.
    drop(server.join(&idler));
    assert_eq!(
        slow.ask(&()),
        Said::Welcome,
        "a silent crowd of another process had it closed"
    );
    drop((silent, slow));
}

fn bad_hellos(server: &Server) {
    let idler = Idler::new();
    let (pipe, _other) = std::io::pipe().expect("a pipe");
    drop(server.join(&idler));
    let files = open_files();
    let said = |bytes: &[u8], fds: &[BorrowedFd<'_>]| {
        let socket = server.connect();
        say_bytes(&socket, bytes, fds).expect("said");
        socket
    };
    let mut other_magic = server.hello.clone();
    other_magic[0] ^= 1;
    let mut other_version = server.hello.clone();
    other_version[2] = 77;
    other_version[4] = 2;
    let short = &server.hello[..server.hello.len() - 1];
    let cases: [(&str, &[u8], &[BorrowedFd<'_>]); 6] = [
        ("no message", b"nonsense", &[]),
        ("another protocol", &other_magic, &[idler.fd()]),
        (
            "a message of another version",
            &other_version,
            &[idler.fd()],
        ),
        ("a hello that is cut", short, &[idler.fd()]),
        ("a hello without a pidfd", &server.hello, &[]),
        ("a pipe for a pidfd", &server.hello, &[pipe.as_fd()]),
    ];
    for (what, bytes, fds) in cases {
        let socket = said(bytes, fds);
        let heard = hear(&socket).unwrap_or_else(|| panic!("{what}: it is told nothing"));
        assert_eq!(heard.number, REFUSED, "{what}");
        assert!(hear(&socket).is_none(), "{what}: the connection stays");
        drop((socket, heard));
        wait_until(what, || open_files() <= files);
    }
    drop(server.join(&idler));
}

fn half_closed(server: &Server) {
    let idler = Idler::new();
    let before_hello = server.connect();
    rustix::net::shutdown(&before_hello, Shutdown::Write).expect("shut");
    let after = server.join(&idler);
    rustix::net::shutdown(&after, Shutdown::Write).expect("shut");
    server.await_sleeps(&idler);
    drop((before_hello, after));
}

fn nonsense(server: &Server) {
    let idler = Idler::new();
    let socket = server.join(&idler);
    let flags = rustix::net::SendFlags::DONTWAIT;
    let body = packet(server.speaks, 0, b"nonsense");
    let send = || rustix::net::send(&socket, &body, flags);
    // What is not read fills the socket, and stays.
    wait_until("the socket to be full", || send().is_err());
    server.await_sleeps(&idler);
    assert!(send().is_err(), "it was read again");
}

/// The kernel gives a server no descriptor: a connection is refused with the reason and closed, the
/// thread sleeps, and the next is served.
fn few_descriptors(server: &Server) {
    let idler = Idler::new();
    drop(server.join(&idler));
    let sockets: Vec<OwnedFd> = (0..40)
        .map(|_| {
            let flags = SocketFlags::CLOEXEC;
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .expect("a socket")
        })
        .collect();
    let address = SocketAddrUnix::new(&server.path).expect("a path");
    let before = getrlimit(Resource::Nofile);
    let most = sockets.len() as u64 / 2;
    let top = sockets
        .iter()
        .map(|socket| std::os::fd::AsRawFd::as_raw_fd(socket) as u64)
        .max()
        .expect("forty");
    let few = Rlimit {
        current: Some(top + 1 + most),
        ..before
    };
    let lowered = Lowered::to(few, before);
    let refused = |socket: &OwnedFd| {
        let mut text = [0; 4096];
        let flags = rustix::net::RecvFlags::DONTWAIT;
        match rustix::net::recv(socket, &mut text, flags) {
            Ok((_, len)) => {
                String::from_utf8_lossy(&text[..len]).contains("has no file descriptor left")
            }
            Err(_) => false,
        }
    };
    let mut fillers: Vec<OwnedFd> = Vec::new();
    let mut to_connect = sockets.iter();
    wait_until("one that finds no room to be refused", || {
        // What earlier cases close meanwhile makes room, so it is filled before each connection.
        fillers.extend(std::iter::from_fn(|| rustix::io::dup(&sockets[0]).ok()));
        if let Some(socket) = to_connect.next() {
            rustix::net::connect(socket, &address).expect("it listens");
        }
        sockets.iter().any(refused)
    });
    drop((fillers, lowered));
    drop(sockets);
    server.await_sleeps(&idler);
}

/// A limit of this process that was lowered, until it is dropped.
struct Lowered(Rlimit);

impl Lowered {
    fn to(limit: Rlimit, before: Rlimit) -> Lowered {
        setrlimit(Resource::Nofile, limit).expect("it may lower it");
        Lowered(before)
    }
}

impl Drop for Lowered {
    fn drop(&mut self) {
        setrlimit(Resource::Nofile, self.0).expect("it may raise it again");
    }
}

/// Another user, on a thread of its own, says nothing.
fn not_allowed(server: &Server) {
    let path = server.path.clone();
    let heard = std::thread::spawn(move || {
        // Of this thread alone: the kernel keeps a user for each.
        let nobody = rustix::process::Uid::from_raw(NOBODY);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
        let socket = Stranger::connect(&path).expect("it may reach the socket");
        hear(&socket)
    });
    let heard = heard.join().expect("no panic").expect("it is told why");
    assert_eq!(heard.number, REFUSED);
    let body = String::from_utf8_lossy(&heard.body).into_owned();
    assert!(
        body.contains(&format!("uid {NOBODY} is not allowed")),
        "{body}"
    );
    drop(server.join(&Idler::new()));
}
