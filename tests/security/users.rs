//! Users that a session does not let in. Needs root, and a test binary that others may run.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use gpu_ipc::backend::Access;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Claims, Participant, Session, To};
use harness::surroundings::{NOBODY, as_user};
use harness::{Child, say, wait_until};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::read_only::{is_to_be_read, open_to_write, question_by_ticket};
use crate::stranger::{
    HELLO, INSPECT, MAP_REGION, REFUSED, Stranger, WELCOME, hear, hello, say as send, say_bytes,
};
use crate::{Case, Stage, open_gpu};

pub const CASES: &[Case] = &[
    (
        "users::one_that_is_not_allowed_cannot_reach_a_private_directory",
        private_directory,
    ),
    ("users::one_that_is_not_allowed_cannot_connect", not_allowed),
    ("users::one_that_is_not_allowed_cannot_look", no_look),
    (
        "users::one_that_is_not_allowed_cannot_read_what_a_process_holds",
        no_reading,
    ),
    (
        "users::one_that_may_only_read_cannot_open_the_memory_to_write",
        no_writing,
    ),
    (
        "users::one_that_is_not_allowed_keeps_nobody_out",
        nobody_kept_out,
    ),
];

/// What a process does, of another user where nothing else is said.
#[derive(Serialize, Deserialize, Debug)]
pub enum Role {
    /// Connects as a participant.
    Connect { socket: PathBuf },
    /// Says hello as any user could, also one whose own side would not.
    Hello { socket: PathBuf },
    /// Asks for a look as any user could.
    Inspect { socket: PathBuf },
    /// Connects, and says hello in these bytes when it is told to: as this user.
    Slow { socket: PathBuf, hello: Vec<u8> },
    /// Connects as often as it can, and says nothing.
    Silent { socket: PathBuf },
    /// Asks for what it was granted to read, and opens its memory to write.
    Write { socket: PathBuf, ticket: Vec<u8> },
    /// Reads a file.
    Read { file: PathBuf },
    /// Lays something where a session's socket is to be.
    Lay { path: PathBuf },
}

/// What came of it.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub enum Said {
    Connected,
    /// How many connections are open.
    Open(usize),
    Welcome,
    /// Another packet: its number, its descriptors, its text.
    Heard(u16, usize, String),
    HungUp,
    /// How many bytes were read.
    Bytes(usize),
    Laid,
    Failed(String),
}

/// A process in a role, told nothing but to go on.
pub type Process = Child<(), Said>;

/// Another user than [`NOBODY`].
const SOMEBODY: u32 = NOBODY - 1;

/// Runs a role as another user until it ends, and returns what came of it.
#[track_caller]
pub fn nobody(role: &Role) -> Said {
    let mut process = Process::run(as_user(NOBODY), role);
    let said = process
        .answer()
        .unwrap_or_else(|| panic!("{role:?}: it died"));
    assert!(process.end().success(), "{role:?}: {said:?}");
    said
}

/// Runs a role that fails, and returns why.
#[track_caller]
fn refused(role: &Role) -> String {
    match nobody(role) {
        Said::Failed(why) => why,
        other => panic!("{role:?}: {other:?}"),
    }
}

/// What another user tries; it says what came of it.
pub fn run(role: Role) {
    match role {
        Role::Connect { socket } => say(&match Participant::builder(open_gpu()).connect(socket) {
            Ok(_) => Said::Connected,
            Err(error) => Said::Failed(error.to_string()),
        }),
        Role::Hello { socket } => say(&greet(&socket, HELLO)),
        Role::Inspect { socket } => say(&greet(&socket, INSPECT)),
        Role::Slow { socket, hello } => {
            let socket = Stranger::connect(&socket).expect("it listens");
            say(&Said::Connected);
            harness::next::<()>().expect("it is told to go on");
            let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).expect("it lives");
            let sent = say_bytes(&socket, &hello, &[pidfd.as_fd()]);
            say(&match sent.ok().and_then(|()| hear(&socket)) {
                Some(heard) if heard.number == WELCOME => Said::Welcome,
                Some(heard) => Said::Heard(heard.number, heard.fds.len(), heard.text(0)),
                None => Said::HungUp,
            });
        }
        Role::Silent { socket } => {
            let open: Vec<_> = (0..600)
                .map_while(|_| Stranger::connect(&socket).ok())
                .collect();
            say(&Said::Open(open.len()));
            harness::next::<()>();
        }
        Role::Write { socket, ticket } => {
            let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).expect("it lives");
            let stranger = Stranger::join(&socket, &open_gpu(), pidfd.as_fd());
            let question = question_by_ticket(&stranger, &ticket, Access::ReadOnly);
            let heard = stranger.ask(MAP_REGION, &question);
            say(&match open_to_write(is_to_be_read(&heard)) {
                Ok(_) => Said::Laid,
                Err(error) => Said::Failed(error.to_string()),
            });
        }
        Role::Read { file } => say(&match std::fs::File::open(file)
            .and_then(|mut file| file.read(&mut [0; 8]))
        {
            Ok(len) => Said::Bytes(len),
            Err(error) => Said::Failed(error.to_string()),
        }),
        Role::Lay { path } => {
            crate::directory::lay(&path);
            say(&Said::Laid);
        }
    }
}

/// Says one thing to a session, and returns what it answers.
fn greet(socket: &Path, number: u16) -> Said {
    let gpu = open_gpu();
    let socket = match Stranger::connect(socket) {
        Ok(socket) => socket,
        Err(error) => return Said::Failed(error.to_string()),
    };
    let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).expect("it lives");
    // A user that is not allowed may be refused before it says anything.
    let _ = match number {
        HELLO => send(&socket, HELLO, 0, &hello(&gpu, 0), &[pidfd.as_fd()]),
        _ => send(&socket, number, 9, &[0; 8], &[]),
    };
    match hear(&socket) {
        Some(heard) => Said::Heard(heard.number, heard.fds.len(), heard.text(0)),
        None => Said::HungUp,
    }
}

/// Lets other users enter a case's directory.
fn let_in(dir: &Path) {
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).expect("ours");
}

fn private_directory() {
    let dir = tempfile::tempdir().expect("a directory");
    let_in(dir.path());
    let session = Session::builder(open_gpu())
        .runtime_dir(dir.path().join("run"))
        .open()
        .expect("a session");
    let socket = || session.socket_path().to_path_buf();
    for role in [
        Role::Connect { socket: socket() },
        Role::Hello { socket: socket() },
        Role::Inspect { socket: socket() },
    ] {
        let why = refused(&role);
        assert!(
            why.to_lowercase().contains("permission denied") || why.contains("this user may not"),
            "{why}"
        );
    }
    assert_eq!(session.stats().participants, 0);
}

fn not_allowed() {
    // The name is for everybody there; who is let in, the session decides.
    let stage = Stage::with(|builder| builder.allow_uids([SOMEBODY]));
    let_in(stage.dir.path());
    let socket = || stage.session.socket_path().to_path_buf();
    let why = refused(&Role::Connect { socket: socket() });
    assert!(why.contains("uid 65534 is not allowed"), "{why}");
    let said = nobody(&Role::Hello { socket: socket() });
    let Said::Heard(REFUSED, 0, why) = said else {
        panic!("it is let in: {said:?}")
    };
    assert!(why.contains("uid 65534 is not allowed"), "{why}");
    assert_eq!(stage.session.stats().participants, 1);
    stage.end();
}

fn no_look() {
    let stage = Stage::with(|builder| builder.allow_uids([SOMEBODY]));
    let_in(stage.dir.path());
    let said = nobody(&Role::Inspect {
        socket: stage.session.socket_path().into(),
    });
    assert!(matches!(said, Said::Heard(REFUSED, 0, _)), "{said:?}");
    stage.end();
}

/// The counter files and regions of a process are open there, and nowhere by name.
fn no_reading() {
    let stage = Stage::with(|builder| builder.allow_uids([SOMEBODY]));
    let mut tried = 0;
    for entry in std::fs::read_dir("/proc/self/fd").expect("proc is mounted") {
        let entry = entry.expect("an entry");
        let is_memory = std::fs::read_link(entry.path())
            .is_ok_and(|to| to.to_string_lossy().contains("memfd:"));
        if is_memory {
            let fd = entry.file_name().into_string().expect("a number");
            let why = refused(&Role::Read {
                file: format!("/proc/{}/fd/{fd}", std::process::id()).into(),
            });
            assert!(why.to_lowercase().contains("permission denied"), "{why}");
            tried += 1;
        }
    }
    assert!(tried >= 2, "a counter file and a region are memory files");
    let why = refused(&Role::Read {
        file: format!("/proc/{}/mem", std::process::id()).into(),
    });
    assert!(why.to_lowercase().contains("permission denied"), "{why}");
    stage.end();
}

/// The mode of the memory keeps it to its owner, who is this process' user.
fn no_writing() {
    let stage = Stage::with(|builder| builder.allow_uids([0, NOBODY]));
    let_in(stage.dir.path());
    let block = stage.block();
    let ticket = block
        .share_with(
            To::Ticket(Claims::Once),
            After::Done,
            &ShareOptions::default().read_only(),
        )
        .expect("shared");
    let why = refused(&Role::Write {
        socket: stage.session.socket_path().into(),
        ticket: ticket.as_bytes().to_vec(),
    });
    assert!(why.to_lowercase().contains("permission denied"), "{why}");
    drop(block);
    stage.end();
}

/// Who may reach the socket but is not let in can connect as often as it likes.
fn nobody_kept_out() {
    let stage = Stage::with(|builder| builder.allow_uids([SOMEBODY]));
    let_in(stage.dir.path());
    let mut many = Process::run(
        as_user(NOBODY),
        &Role::Silent {
            socket: stage.session.socket_path().into(),
        },
    );
    let said = many.answer();
    assert!(
        matches!(said, Some(Said::Open(257..))),
        "only {said:?} connections"
    );
    let late = Participant::builder(stage.gpu.clone()).connect(stage.session.socket_path());
    drop(late.expect("it is let in"));
    stage.check();
    many.kill();
    wait_until("the others to be gone", || {
        stage.session.stats().participants == 1
    });
    stage.end();
}
