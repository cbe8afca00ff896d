//! Where a process runs: namespaces, a small file system, as another user, with a descriptor of
//! this process.
//!
//! Each is a command that ends as this program; whether a machine lets this user do so is asked
//! once, by starting the program there. It ends in [`role`](crate::role) or, if it has none, lists
//! its cases, and asks nothing itself.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::io::{FdFlags, fcntl_setfd};

use crate::program::{ends_well, this_program};
use crate::role::STARTS;

/// A user that owns nothing.
pub const NOBODY: u32 = 65_534;

/// Opens the folder of the program (`$1`), hides /mnt behind a directory (`$0`) and /tmp behind
/// nothing, and shows the folder again where it was, read only, in case it lay there: the program
/// finds itself and its libraries.
const CONTAIN: &str = r#"
set -e
folder=${1%/*}
exec 9<"$folder"
mount --bind "$0" /mnt
mount -t tmpfs none /tmp
mkdir -p "$folder"
mount --no-canonicalize --bind /proc/self/fd/9 "$folder"
mount -o remount,bind,ro "$folder"
exec 9<&-
exec "$@"
"#;

/// A command that runs this program, with what is added to it, in namespaces of its own, with
/// `shared` at /mnt and an empty /tmp: nothing else that can be written is seen by another.
pub fn contained(shared: &Path) -> Command {
    contain(shared, Path::new(this_program().get_program()))
}

/// As [`contained`], for another program.
pub fn contain(shared: &Path, program: &Path) -> Command {
    let mut command = with_own_pids();
    command.args(["--ipc", "sh", "-c", CONTAIN]);
    command.arg(shared).arg(program);
    command
}

/// A command that runs what is added to it in namespaces of users, mounts and pids of its own, with
/// a /proc of those pids.
pub fn with_own_pids() -> Command {
    let mut command = Command::new("unshare");
    command.args([
        "--user",
        "--map-root-user",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]);
    // KFD shows the pids of the first namespace: the library that stands in for AMD's must not
    // take these for them.
    command.env("GPU_IPC_SHIM_KFD", "");
    command
}

/// Says whether namespaces of users, mounts, pids and System V's objects can be made here.
pub fn has_namespaces() -> bool {
    starts(contained(&std::env::temp_dir()))
}

/// A command that runs this program with a file system at /mnt that has room for this many files.
pub fn with_files(files: u32) -> Command {
    let script =
        format!(r#"mount -t tmpfs -o size=1m,nr_inodes={files} none /mnt && exec "$0" "$@""#);
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
        .arg(script)
        .arg(this_program().get_program());
    command
}

/// Says whether a file system can be mounted here.
pub fn can_mount() -> bool {
    starts(with_files(8))
}

/// A command that runs this program as another user.
pub fn as_user(uid: u32) -> Command {
    let mut command = this_program();
    command.uid(uid).gid(uid);
    command
}

/// A command that runs this program as another user in these groups, of which the first is its own.
pub fn as_member(uid: u32, groups: &[u32]) -> Command {
    let mut command = this_program();
    member(&mut command, uid, groups);
    command
}

/// Has a command run as another user in these groups, of which the first is its own.
pub fn member(command: &mut Command, uid: u32, groups: &[u32]) {
    let (own, groups) = (groups.first().copied().unwrap_or(uid), groups.to_vec());
    let become_member = move || {
        // SAFETY: `setgroups` asks for as many numbers as it is told of.
        let grouped = unsafe { libc::setgroups(groups.len(), groups.as_ptr()) };
        // SAFETY: `setgid` asks for nothing.
        if grouped != 0 || unsafe { libc::setgid(own) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: `setuid` asks for nothing.
        if unsafe { libc::setuid(uid) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: `pre_exec` asks that the closure does only what is safe after a fork: it makes three
    // system calls, and reads numbers that were there before.
    unsafe { command.pre_exec(become_member) };
}

/// Says whether a process of another user can run this program: its folders must be open to others.
pub fn has_users() -> bool {
    rustix::process::geteuid().is_root() && starts(as_user(NOBODY))
}

/// Says whether a command comes as far as the beginning of this program.
fn starts(mut command: Command) -> bool {
    ends_well(command.arg("--list").env(STARTS, ""))
}

/// Gives a process a descriptor of this one, under the same number, which no other child gets.
pub fn keep_open(command: &mut Command, fd: &OwnedFd) {
    let number = fd.as_raw_fd();
    let keep = move || {
        // SAFETY: `borrow_raw` asks for a descriptor that stays open meanwhile: it is the child's
        // copy of one that the parent keeps until the child is started.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        Ok(fcntl_setfd(fd, FdFlags::empty())?)
    };
    // SAFETY: `pre_exec` asks that the closure does only what is safe after a fork: it makes one
    // system call.
    unsafe { command.pre_exec(keep) };
}
