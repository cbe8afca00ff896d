//! Processes as the kernel names them: pidfds.
//!
//! A pid is for people to read. Every decision uses a pidfd: it names one process for ever, also
//! when the pid is reused and across pid namespaces.
//!
//! `descendants`: which descendants of this process keep a device's files open.

mod descendants;
#[cfg(test)]
mod forked;

pub use descendants::{MOST_DESCENDANTS, descendants_holding};

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use gpu_api::{Error, Result};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::os::poller::is_now;

/// Returns a pidfd of this process.
///
/// # Errors
///
/// [`Error::System`] where the kernel or a sandbox has none, or when no file descriptor is left.
pub fn own_pidfd() -> Result<OwnedFd> {
    pidfd_open(getpid(), PidfdFlags::empty()).map_err(pidfd_error)
}

/// Says whether the process is dead, which its parent need not have noticed yet.
///
/// In doubt it says no: a process that is wrongly taken for alive holds memory longer, the other
/// way round it would lose memory that it still uses.
pub fn has_exited(pidfd: BorrowedFd<'_>) -> bool {
    is_now(pidfd, PollFlags::IN)
}

/// `PF_EXITING` of the kernel's `include/linux/sched.h`.
const EXITING: u64 = 4;

/// Returns whether the kernel is ending the process: it was killed or called `exit`, and closes
/// files, or has yet to be waited for. `false` where `/proc` does not show the process.
///
/// It is also true of a process that lives on after its first thread has ended.
pub fn is_exiting(pid: u32) -> bool {
    // The fields of proc_pid_stat(5): the name, in parentheses, may hold anything; the flags are the
    // seventh behind it.
    fs::read(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        let stat = String::from_utf8_lossy(&stat);
        let behind_name = stat.rsplit(')').next().unwrap_or_default();
        let flags = behind_name.split_ascii_whitespace().nth(6);
        flags
            .and_then(|flags| flags.parse::<u64>().ok())
            .unwrap_or(0)
            & EXITING
            != 0
    })
}

/// Says whether a descriptor from another process is a pidfd, by the name that the kernel gave its
/// file.
///
/// A pipe or an event would 'fire' when its sender likes, and pass for a death. Reading a link
/// takes no descriptor, so the answer is the same where none is left.
///
/// # Errors
///
/// [`Error::System`] when `/proc` cannot be read.
pub fn is_pidfd(fd: BorrowedFd<'_>) -> Result<bool> {
    let name = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_err(proc_error)?;
    // The names of proc_pid_fd(5), before and with pidfs. A file with a path of its own starts with
    // a slash.
    let name = name.as_os_str().as_bytes();
    Ok(name == b"anon_inode:[pidfd]" || name.starts_with(b"pidfd:["))
}

/// Returns the pid as this process sees it; 0 when the process is in a namespace that hides it or
/// is gone.
///
/// # Errors
///
/// [`Error::System`] when `/proc` cannot be read or no file descriptor is left.
pub fn pid_of(pidfd: BorrowedFd<'_>) -> Result<u32> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))
        .map_err(proc_error)?;
    // A process that was waited for reads -1.
    let pid = info
        .lines()
        .find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
    Ok(pid.unwrap_or(0))
}

/// Says whether the pidfd names this process.
///
/// # Errors
///
/// As [`pid_of`] and [`own_pidfd`].
pub fn same_process(pidfd: BorrowedFd<'_>) -> Result<bool> {
    // Both numbers come from the same /proc, which may count in another namespace than `getpid`
    // does.
    let pid = pid_of(pidfd)?;
    Ok(pid != 0 && pid == pid_of(own_pidfd()?.as_fd())?)
}

/// Returns the name of the command that a process runs, fit for printing; `?` if unknown.
pub fn command_of(pid: u32) -> String {
    let Ok(name) = fs::read(format!("/proc/{pid}/comm")) else {
        return "?".into();
    };
    let name = String::from_utf8_lossy(&name);
    // A process names itself as it likes; what it chooses must not steer a terminal.
    let name: String = name
        .trim_end_matches('\n')
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect();
    if name.is_empty() { "?".into() } else { name }
}

fn pidfd_error(e: Errno) -> Error {
    let remedy = match e {
        Errno::MFILE | Errno::NFILE => "raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files",
        _ => "use Linux 5.3 or later, and allow pidfd_open in this sandbox",
    };
    Error::system("pidfd_open", remedy, e)
}

fn proc_error(e: io::Error) -> Error {
    let remedy = match Errno::from_io_error(&e) {
        Some(Errno::MFILE | Errno::NFILE) => {
            "raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files"
        }
        _ => "mount /proc and let this process read it",
    };
    Error::system("reading /proc", remedy, e)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::process::forked::{Forked, await_readable};
    use std::os::fd::FromRawFd;

    #[test]
    fn the_own_pidfd_names_this_living_process() {
        let own = own_pidfd().expect("a pidfd");
        assert!(is_pidfd(own.as_fd()).expect("a readable /proc"));
        assert_eq!(
            pid_of(own.as_fd()).expect("a readable /proc"),
            std::process::id()
        );
        assert!(same_process(own.as_fd()).expect("a readable /proc"));
        assert!(!has_exited(own.as_fd()));
    }

    #[test]
    fn a_childs_death_shows_and_its_number_goes() {
        let child = Forked::start(|| {});
        let pidfd = child.pidfd();
        assert_eq!(
            pid_of(pidfd.as_fd()).expect("a readable /proc"),
            child.pid()
        );
        assert!(!same_process(pidfd.as_fd()).expect("a readable /proc"));
        assert!(!has_exited(pidfd.as_fd()));
        assert!(!is_exiting(child.pid()));
        child.kill();
        await_readable(pidfd.as_fd());
        assert!(is_exiting(child.pid()), "dead, and not waited for");
        assert!(
            has_exited(pidfd.as_fd()),
            "dead, though nobody waited for it"
        );
        drop(child);
        assert!(has_exited(pidfd.as_fd()));
        assert_eq!(pid_of(pidfd.as_fd()).expect("a readable /proc"), 0);
        assert!(!same_process(pidfd.as_fd()).expect("a readable /proc"));
    }

    #[test]
    fn a_pipe_is_no_pidfd() {
        let (end, _other) = io::pipe().expect("a pipe");
        assert!(!is_pidfd(end.as_fd()).expect("a readable /proc"));
        assert_eq!(pid_of(end.as_fd()).expect("a readable /proc"), 0);
        assert!(!same_process(end.as_fd()).expect("a readable /proc"));
    }

    #[test]
    fn a_command_is_fit_for_printing() {
        let child = Forked::start(|| {
            // SAFETY: `prctl(PR_SET_NAME)` reads a string that ends in 0.
            unsafe { libc::prctl(libc::PR_SET_NAME, c"\x1b[2J) R 1 (\n\xff".as_ptr()) };
        });
        assert_eq!(command_of(child.pid()), "?[2J) R 1 (?\u{fffd}");
        assert_eq!(command_of(0), "?");
        assert!(!is_exiting(child.pid()), "the name holds what ends a name");
        assert!(!is_exiting(0));
    }

    #[test]
    fn a_closed_descriptor_is_no_death() {
        // SAFETY: the number is far above any limit, so it is nobody's; `poll` answers that it is
        // closed.
        let nobodys = unsafe { std::mem::ManuallyDrop::new(OwnedFd::from_raw_fd(1 << 28)) };
        assert!(!has_exited(nobodys.as_fd()));
    }
}
