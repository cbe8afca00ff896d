//! Users that a session does not let in. Needs root, and a test binary that others may run.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use gpu_ipc::{Participant, Session};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::stranger::{HELLO, INSPECT, REFUSED, Stranger, WELCOME, hear, hello, say};
use crate::{Case, Stage, open_gpu, wait_until};

pub const CASES: &[Case] = &[
    ("users::one_that_is_not_allowed_cannot_reach_a_private_directory", private_directory),
    ("users::one_that_is_not_allowed_cannot_connect", not_allowed),
    ("users::one_that_is_not_allowed_cannot_look", no_look),
    ("users::one_that_is_not_allowed_cannot_read_what_a_process_holds", no_reading),
    ("users::one_that_is_not_allowed_keeps_nobody_out", nobody_kept_out),
];

/// Says what a process of another user does.
pub const ROLE: &str = "GPU_IPC_TEST_SECURITY";

/// A user that owns nothing, and another.
pub const NOBODY: u32 = 65534;
const SOMEBODY: u32 = 65533;

/// Says whether a process of another user can run this binary.
pub fn has_users() -> bool {
    let mut command = Command::new(std::env::current_exe().expect("a test binary has a path"));
    let command = command.uid(NOBODY).env(ROLE, "nothing").stdin(Stdio::null()).stdout(Stdio::null());
    rustix::process::geteuid().is_root() && command.status().is_ok_and(|status| status.success())
}

/// Runs a role as another user until it ends, and returns what it said.
pub fn nobody(role: &str) -> String {
    let mut child = start(role);
    let mut said = String::new();
    child.stdout.take().expect("piped").read_to_string(&mut said).expect("a pipe");
    assert!(child.wait().expect("it is a child of ours").success(), "{role}: {said}");
    said.trim_end().to_owned()
}

fn start(role: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("a test binary has a path"));
    let command = command.uid(NOBODY).gid(NOBODY).env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().expect("it may run")
}

/// A role that runs as this user, and hears and says lines.
pub struct Role {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Role {
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a pipe");
        line.trim_end().to_owned()
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_ref().expect("piped"), "{line}").expect("it listens");
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a role as this user.
pub fn start_here(role: &str) -> Role {
    let mut command = Command::new(std::env::current_exe().expect("a test binary has a path"));
    let command = command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("it may run");
    let lines = BufReader::new(child.stdout.take().expect("piped"));
    Role { child, lines }
}

/// What another user tries; it says what came of it.
pub fn run(role: &str) {
    let (what, path) = role.split_once(' ').unwrap_or((role, "/"));
    let path = Path::new(path);
    match what {
        "connect" => match Participant::builder(open_gpu()).connect(path) {
            Ok(participant) => println!("connected as {}", participant.id()),
            Err(error) => println!("{error}"),
        },
        // Says hello as any user could, also one whose own side would not.
        "hello" | "inspect" => {
            let gpu = open_gpu();
            let socket = match Stranger::connect(path) {
                Ok(socket) => socket,
                Err(error) => return println!("{error}"),
            };
            let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).expect("it lives");
            let said = match what {
                "hello" => say(&socket, HELLO, 0, &hello(&gpu, 0), &[pidfd.as_fd()]),
                _ => say(&socket, INSPECT, 9, &[0; 8], &[]),
            };
            // A user that is not allowed may be refused before it says anything.
            let _ = said;
            match hear(&socket) {
                Some(heard) => println!("{} {} {}", heard.number, heard.fds.len(), heard.text(0)),
                None => println!("hung up"),
            }
        }
        // Connects, and says hello when it is told to.
        "slow" => {
            let socket = Stranger::connect(path).expect("it listens");
            println!("connected");
            std::io::stdin().read_line(&mut String::new()).expect("a pipe");
            let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).expect("it lives");
            let said = say(&socket, HELLO, 0, &hello(&open_gpu(), 0), &[pidfd.as_fd()]);
            match said.ok().and_then(|()| hear(&socket)) {
                Some(heard) if heard.number == WELCOME => println!("welcome"),
                Some(heard) => println!("{} {}", heard.number, heard.text(0)),
                None => println!("hung up"),
            }
        }
        "silent" => {
            let open: Vec<_> = (0..600).map_while(|_| Stranger::connect(path).ok()).collect();
            println!("{}", open.len());
            let _ = std::io::stdout().flush();
            let _ = std::io::stdin().read(&mut [0]);
        }
        "read" => match std::fs::File::open(path).and_then(|mut file| file.read(&mut [0; 8])) {
            Ok(len) => println!("{len} bytes"),
            Err(error) => println!("{error}"),
        },
        "lay" => crate::directory::lay(path),
        _ => {}
    }
}

/// Lets other users enter a case's directory.
fn let_in(dir: &Path) {
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).expect("ours");
}

fn private_directory() {
    let dir = tempfile::tempdir().expect("a directory");
    let_in(dir.path());
    let session = Session::builder(open_gpu()).runtime_dir(dir.path().join("run")).open().expect("a session");
    for role in ["connect", "hello", "inspect"] {
        let said = nobody(&format!("{role} {}", session.socket_path().display()));
        assert!(said.to_lowercase().contains("permission denied") || said.contains("this user may not"), "{said}");
    }
    assert_eq!(session.stats().participants, 0);
}

fn not_allowed() {
    // The name is for everybody there; who is let in, the session decides.
    let stage = Stage::with(|builder| builder.allow_uids([SOMEBODY]));
    let_in(stage.dir.path());
    let path = stage.session.socket_path().display().to_string();
    let said = nobody(&format!("connect {path}"));
    assert!(said.contains("uid 65534 is not allowed"), "{said}");
    let said = nobody(&format!("hello {path}"));
    assert!(said.starts_with(&format!("{REFUSED} 0 ")) && said.contains("uid 65534 is not allowed"), "{said}");
    assert_eq!(stage.session.stats().participants, 1);
    stage.end();
}

fn no_look() {
    let stage = Stage::with(|builder| builder.allow_uids([SOMEBODY]));
    let_in(stage.dir.path());
    let said = nobody(&format!("inspect {}", stage.session.socket_path().display()));
    assert!(said.starts_with(&format!("{REFUSED} 0 ")), "{said}");
    stage.end();
}

/// The counter files and regions of a process are open there, and nowhere by name.
fn no_reading() {
    let stage = Stage::with(|builder| builder.allow_uids([SOMEBODY]));
    let mut tried = 0;
    for entry in std::fs::read_dir("/proc/self/fd").expect("proc is mounted") {
        let entry = entry.expect("an entry");
        let is_memory = std::fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().contains("memfd:"));
        if is_memory {
            let fd = entry.file_name().into_string().expect("a number");
            let said = nobody(&format!("read /proc/{}/fd/{fd}", std::process::id()));
            assert!(said.to_lowercase().contains("permission denied"), "{said}");
            tried += 1;
        }
    }
    assert!(tried >= 2, "a counter file and a region are memory files");
    let said = nobody(&format!("read /proc/{}/mem", std::process::id()));
    assert!(said.to_lowercase().contains("permission denied"), "{said}");
    stage.end();
}

/// Who may reach the socket but is not let in can connect as often as it likes.
fn nobody_kept_out() {
    let stage = Stage::with(|builder| builder.allow_uids([SOMEBODY]));
    let_in(stage.dir.path());
    let mut many = start(&format!("silent {}", stage.session.socket_path().display()));
    let mut line = String::new();
    BufReader::new(many.stdout.take().expect("piped")).read_line(&mut line).expect("a pipe");
    let open: usize = line.trim_end().parse().expect("a number");
    assert!(open > 256, "only {open} connections");
    let late = Participant::builder(stage.gpu.clone()).connect(stage.session.socket_path());
    drop(late.expect("it is let in"));
    stage.check();
    many.kill().expect("it is a child of ours");
    many.wait().expect("it is a child of ours");
    wait_until("the others to be gone", || stage.session.stats().participants == 1);
    stage.end();
}
