//! What the kernel gives, tried and not looked up: a sandbox may forbid what the version has.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use gpu_ipc::backend::ForkGuard;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::PidfdFlags;

use super::check::Check;

const SANDBOX: &str =
    "allow this call in the sandbox (seccomp profile of the container), or update the kernel";

/// Tries everything.
pub fn checks() -> Vec<Check> {
    vec![
        version(),
        proc_files(),
        pidfd(),
        peer_pidfd(),
        memfd_seals(),
        wipe_on_fork(),
        packets(),
    ]
}

fn version() -> Check {
    let Ok(release) = std::fs::read_to_string("/proc/sys/kernel/osrelease") else {
        return Check::warning("version", "unknown")
            .why("/proc/sys is hidden")
            .remedy("nothing, if all else is ok");
    };
    let release = release.trim();
    let found = format!("Linux {release}");
    match parse(release) {
        Some(version) if version >= (5, 3) => Check::ok("version", found),
        _ => Check::warning("version", found)
            .why("Linux 5.3 or later is expected")
            .remedy("update the kernel"),
    }
}

fn parse(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Both sides tell a pidfd from other descriptors by its name there, and find their forked children
/// there.
fn proc_files() -> Check {
    let name = "/proc/self/fd";
    let readable = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
        .map_err(Into::into)
        .and_then(|fd| std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())));
    match readable {
        Ok(_) => Check::ok(name, "readable").needed(),
        Err(error) => Check::failed(name, error.to_string())
            .why("no process can be told from another without it")
            .remedy("mount /proc in this container")
            .needed(),
    }
}

fn pidfd() -> Check {
    let name = "pidfd_open";
    match rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()) {
        Ok(_) => Check::ok(name, "works: a death is proven by it").needed(),
        Err(error) => Check::failed(name, error.to_string())
            .why("without it no death can be proven, and sessions refuse to open")
            .remedy(remedy(error, "Linux 5.3"))
            .needed(),
    }
}

fn peer_pidfd() -> Check {
    let name = "SO_PEERPIDFD";
    match try_peer_pidfd() {
        Ok(()) => Check::ok(name, "works: the kernel identifies connecting processes"),
        Err(error) => Check::warning(name, error.to_string())
            .why(
                "a peer that never says hello is shown without its pid; leases do not depend on it",
            )
            .remedy(remedy(error, "Linux 6.5")),
    }
}

fn try_peer_pidfd() -> Result<(), Errno> {
    let (ours, _theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let mut pidfd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    let (socket, to) = (ours.as_fd().as_raw_fd(), (&raw mut pidfd).cast());
    // SAFETY: `getsockopt` writes at most `len` bytes, which is the size of the integer that it is
    // given.
    let answer = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            to,
            &raw mut len,
        )
    };
    if answer != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    // SAFETY: `from_raw_fd` asks for an open descriptor that nobody else owns: the kernel has just
    // made it.
    drop(unsafe { OwnedFd::from_raw_fd(pidfd) });
    Ok(())
}

/// The files that leases are counted in are sealed, so that neither side can make the other's reads
/// fault.
fn memfd_seals() -> Check {
    let name = "memfd with seals";
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let sealed = rustix::fs::memfd_create(
        "gpu-ipc-doctor",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )
    .and_then(|file| {
        rustix::fs::ftruncate(&file, 4096)?;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        // A seal that does not hold is worse than none.
        match rustix::fs::ftruncate(&file, 0) {
            Err(Errno::PERM) => rustix::fs::fcntl_get_seals(&file),
            Err(error) => Err(error),
            Ok(()) => Ok(SealFlags::empty()),
        }
    });
    match sealed {
        Ok(set) if set.contains(seals) => Check::ok(name, "SHRINK, GROW and SEAL hold").needed(),
        Ok(_) => Check::failed(name, "the seals do not hold")
            .why("leases are counted in such files")
            .remedy("run on a Linux kernel, not under an emulation of one")
            .needed(),
        Err(error) => Check::failed(name, error.to_string())
            .why("leases are counted in such files")
            .remedy(remedy(error, "Linux 3.17"))
            .needed(),
    }
}

fn wipe_on_fork() -> Check {
    let name = "MADV_WIPEONFORK";
    match ForkGuard::new() {
        Ok(_) => Check::ok(name, "works: a forked child knows that it is one").needed(),
        // The error ends with what to do.
        Err(error) => Check::failed(name, error.to_string())
            .why("a forked child could not tell that it is one, and would end its parent's leases")
            .needed(),
    }
}

fn packets() -> Check {
    let name = "unix packet sockets";
    match rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    ) {
        Ok(_) => Check::ok(name, "SOCK_SEQPACKET works").needed(),
        Err(error) => Check::failed(name, error.to_string())
            .why("sessions and participants talk through them")
            .remedy(SANDBOX)
            .needed(),
    }
}

fn remedy(error: Errno, since: &str) -> String {
    match error {
        Errno::MFILE | Errno::NFILE => "raise RLIMIT_NOFILE or close descriptors".into(),
        Errno::NOSYS | Errno::INVAL | Errno::NOPROTOOPT => {
            format!("use {since} or later, or {SANDBOX}")
        }
        _ => SANDBOX.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::CheckState;

    #[test]
    fn versions_are_read() {
        assert_eq!(parse("6.18.44-generic"), Some((6, 18)));
        assert_eq!(parse("5.3"), Some((5, 3)));
        assert_eq!(parse("x"), None);
    }

    #[test]
    fn what_the_tests_themselves_need_is_found() {
        for check in checks() {
            assert!(!check.needed || check.state == CheckState::Ok, "{check:?}");
            assert!(
                check.state == CheckState::Ok || check.remedy.is_some(),
                "{check:?}"
            );
        }
    }

    #[test]
    fn a_remedy_fits_its_cause() {
        assert!(remedy(Errno::MFILE, "x").contains("RLIMIT_NOFILE"));
        assert!(remedy(Errno::NOSYS, "Linux 9").contains("Linux 9"));
        assert!(remedy(Errno::PERM, "Linux 9").contains("seccomp"));
    }
}
