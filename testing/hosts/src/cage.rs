//! What a run is locked into: namespaces of its own for the network, processes and mounts.
//!
//! ```text
//! outer process ── waits; its end, of whatever kind, ends the inner one
//!   └─ inner process: number 1 of a process namespace. Its end ends everything that was started in it.
//!        a network without a name; folders in memory, mounted where nobody else sees them
//! ```
//!
//! So nothing stays behind, also when a run is killed, and two runs at once have nothing in common:
//! the kernel takes namespaces, interfaces, processes and folders back with the last process. Root
//! is not needed where users may make namespaces.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use harness::program::start_unwatched;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{Signal, getgid, getpid, getuid, set_parent_process_death_signal};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Says to the inner process that it is that.
const INNER: &str = "GPU_IPC_HOSTS_INNER";
/// Where the folders of a run may lie. Every Linux system has them, and what is in them stays under
/// the mount.
const PLACES: [&str; 3] = ["/mnt", "/media", "/srv"];

/// Locks this process in and runs `inner` there; or does nothing but wait for the process that
/// does.
///
/// # Errors
///
/// What this machine forbids.
pub fn run(inner: impl FnOnce(&Path) -> ExitCode) -> Result<ExitCode, String> {
    if std::env::var_os(INNER).is_some() && getpid().as_raw_nonzero().get() == 1 {
        return Ok(inner(&furnish()?));
    }
    let program = std::env::current_exe().map_err(|e| format!("this program's own path: {e}"))?;
    let all = UnshareFlags::NEWNET | UnshareFlags::NEWNS | UnshareFlags::NEWPID;
    // SAFETY: `unshare_unsafe` asks that no file descriptors are shared that others rely on:
    // `FILES` is not among the flags.
    if let Err(error) = unsafe { unshare_unsafe(all) } {
        let (uid, gid) = (getuid().as_raw(), getgid().as_raw());
        // SAFETY: as above.
        unsafe { unshare_unsafe(all | UnshareFlags::NEWUSER) }
            .map_err(|e| format!("namespaces: {error}; with one of users: {e}"))?;
        let write = |file: &str, text: String| {
            std::fs::write(format!("/proc/self/{file}"), text)
                .map_err(|e| format!("{file} of a user namespace: {e}"))
        };
        write("setgroups", "deny".into())?;
        write("uid_map", format!("0 {uid} 1"))?;
        write("gid_map", format!("0 {gid} 1"))?;
    }
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).env(INNER, "1");
    let die_with_parent = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
    // SAFETY: `pre_exec` asks that nothing is done after the fork that is not safe in a signal
    // handler: one system call is.
    unsafe { command.pre_exec(die_with_parent) };
    let status = start_unwatched(&mut command)?
        .wait()
        .map_err(|e| format!("a process in its own namespace: {e}"))?;
    if let Some(signal) = status.signal() {
        return Err(format!("the run was ended by signal {signal}"));
    }
    Ok(ExitCode::from(
        status
            .code()
            .and_then(|code| u8::try_from(code).ok())
            .unwrap_or(1),
    ))
}

/// Mounts what the inner process needs, and returns an empty folder.
fn furnish() -> Result<PathBuf, String> {
    let failed = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
    mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )
    .map_err(failed("private mounts"))?;
    let safe = MountFlags::NOSUID | MountFlags::NODEV;
    mount("proc", "/proc", "proc", safe, None).map_err(failed("/proc of this namespace"))?;
    // The programs may lie in one of them.
    let program = std::env::current_exe().unwrap_or_default();
    let place = PLACES
        .iter()
        .find(|place| Path::new(place).is_dir() && !program.starts_with(place));
    let place =
        *place.ok_or_else(|| format!("none of {PLACES:?} is a folder without this program"))?;
    mount("hosts", place, "tmpfs", safe, Some(c"mode=0700"))
        .map_err(failed("a folder in memory"))?;
    Ok(PathBuf::from(place))
}
