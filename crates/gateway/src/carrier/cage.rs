//! What a carrier may do: speak to the network, and use the memory and the descriptors that it has.
//!
//! | kept from it | by |
//! |---|---|
//! | files to write; all files but libraries, `/proc`, `/sys` and `/dev` | no `open` to write; Landlock, where the kernel has it |
//! | other programs and processes | no `execve`, no process made, signals to itself alone, no `ptrace`, none of the calls on another's memory and descriptors |
//! | the broker and other services of the host | no socket but of IP and of the kernel's routes, so none of `AF_UNIX` |
//! | code of its own | no mapping that is executed |
//! | the user's files and processes, where the gateway may change users | another user |
//! | a core with what was lent | `RLIMIT_CORE` of 0 |
//!
//! A call that is not in the list fails with `EPERM`. The list is what UCX and the C library were
//! seen to use over TCP, and what their sources name; a call that is missing costs a feature, and
//! the rest goes on.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus,
    path_beneath_rules,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};

use crate::error::{Error, Result};

/// Calls that are allowed with any arguments.
const PLAIN: &[libc::c_long] = &[
    // What it has open.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_pipe2,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    // What UCX looks at when it connects: interfaces and routes. `openat` is below.
    libc::SYS_getdents64,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getcwd,
    // The network. `socket` is below.
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    // Memory. `mmap` and `mprotect` are below.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_mincore,
    libc::SYS_membarrier,
    libc::SYS_get_mempolicy,
    // Threads. `clone` is below.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    // Signals of its own.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // What time it is, and what the machine has.
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_getcpu,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
];

/// Older forms of some, which one architecture alone has.
#[cfg(target_arch = "x86_64")]
const OLDER: &[libc::c_long] = &[
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_create,
    libc::SYS_eventfd,
    libc::SYS_pipe,
    libc::SYS_dup2,
    libc::SYS_time,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_getrlimit,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[libc::c_long] = &[];

/// Puts characters into a terminal's input, which standard error may be.
const TIOCSTI: u64 = 0x5412;
/// The same, and more, of a console.
const TIOCLINUX: u64 = 0x541c;

/// What may be read: libraries, and what the kernel says of itself and of its devices.
const READ: &[&str] = &[
    "/usr",
    "/lib",
    "/lib64",
    "/opt",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/proc",
    "/sys",
];
/// What may be read and written, until seccomp forbids to open more to write.
const USED: &[&str] = &["/dev"];

/// Hides all other files from this thread, and from those that it starts, for good: call it first.
/// `folders` are where the engine's library is. Returns what is lacking.
pub fn hide_files(folders: &[PathBuf]) -> Vec<String> {
    let hidden = || -> std::result::Result<RulesetStatus, RulesetError> {
        let abi = ABI::V5;
        let read = AccessFs::from_read(abi);
        let folders = folders.iter().map(PathBuf::as_path);
        let paths = READ.iter().map(Path::new).chain(folders);
        // One that is not there is not opened.
        let status = Ruleset::default()
            .handle_access(AccessFs::from_all(abi))?
            .create()?
            .add_rules(path_beneath_rules(paths, read))?
            .add_rules(path_beneath_rules(USED, AccessFs::from_all(abi)))?
            .restrict_self()?;
        Ok(status.ruleset)
    };
    match hidden() {
        Ok(RulesetStatus::NotEnforced) => {
            vec!["it can read the files that its user may: this kernel has no Landlock".into()]
        }
        Ok(_) => Vec::new(),
        Err(error) => vec![format!("it can read the files that its user may: {error}")],
    }
}

/// Cages this process, all its threads, for good. Returns what of the cage it could not have.
///
/// # Errors
///
/// [`Error::Unavailable`] without seccomp: nothing is carried by a process that is not caged.
pub fn enter(user: Option<u32>) -> Result<Vec<String>> {
    let mut lacks = Vec::new();
    let none = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `setrlimit` reads the structure.
    if unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) } != 0 {
        lacks.push(format!("RLIMIT_CORE: {}", std::io::Error::last_os_error()));
    }
    if let Some(user) = user
        && let Err(error) = become_user(user)
    {
        lacks.push(format!(
            "it runs as the gateway's user, and not as {user}: {error}"
        ));
    }
    let refused = |why: String| Error::Unavailable {
        what: "a cage for the process that carries bytes".into(),
        why,
        remedy: "allow seccomp in this container",
    };
    for filter in [no_clone3(), allowed()] {
        let program: BpfProgram = filter
            .and_then(TryInto::try_into)
            .map_err(|e| refused(e.to_string()))?;
        apply_filter_all_threads(&program).map_err(|e| refused(e.to_string()))?;
    }
    Ok(lacks)
}

/// Changes the user of all threads, if this one may.
fn become_user(user: u32) -> std::io::Result<()> {
    // SAFETY: `geteuid` has no conditions.
    if unsafe { libc::geteuid() } == user {
        return Ok(());
    }
    let done = |code: libc::c_int| match code {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    };
    // SAFETY: `setgroups` reads no list of 0 entries.
    done(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: `setresgid` takes numbers.
    done(unsafe { libc::setresgid(user, user, user) })?;
    // SAFETY: `setresuid` takes numbers; the C library's changes all threads.
    done(unsafe { libc::setresuid(user, user, user) })
}

type Built<T> = std::result::Result<T, seccompiler::BackendError>;

/// The C library takes `clone`, whose flags a filter can see, where this one does not exist.
fn no_clone3() -> Built<SeccompFilter> {
    SeccompFilter::new(
        BTreeMap::from([(libc::SYS_clone3, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS as u32),
        std::env::consts::ARCH.try_into()?,
    )
}

fn allowed() -> Built<SeccompFilter> {
    let word = |argument, operator, value| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
    };
    let masked = |argument, mask: libc::c_int, value: libc::c_int| {
        let operator = SeccompCmpOp::MaskedEq(mask.cast_unsigned().into());
        word(argument, operator, value.cast_unsigned().into())
    };
    let rule = |conditions: Vec<SeccompCondition>| SeccompRule::new(conditions);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = PLAIN
        .iter()
        .chain(OLDER)
        .map(|&call| (call, Vec::new()))
        .collect();
    // Passed on to the filter that lets it not exist.
    rules.insert(libc::SYS_clone3, Vec::new());
    let mut families = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK] {
        let is = word(0, SeccompCmpOp::Eq, family.cast_unsigned().into())?;
        families.push(rule(vec![is])?);
    }
    rules.insert(libc::SYS_socket, families);
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![rule(vec![masked(2, libc::PROT_EXEC, 0)?])?]);
    }
    let writes = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC;
    rules.insert(libc::SYS_openat, vec![rule(vec![masked(2, writes, 0)?])?]);
    let thread = masked(0, libc::CLONE_THREAD, libc::CLONE_THREAD)?;
    rules.insert(libc::SYS_clone, vec![rule(vec![thread])?]);
    let own = u64::from(std::process::id());
    rules.insert(
        libc::SYS_tgkill,
        vec![rule(vec![word(0, SeccompCmpOp::Eq, own)?])?],
    );
    let name = u64::from(libc::PR_SET_NAME.cast_unsigned());
    rules.insert(
        libc::SYS_prctl,
        vec![rule(vec![word(0, SeccompCmpOp::Eq, name)?])?],
    );
    let terminals = vec![
        word(1, SeccompCmpOp::Ne, TIOCSTI)?,
        word(1, SeccompCmpOp::Ne, TIOCLINUX)?,
    ];
    rules.insert(libc::SYS_ioctl, vec![rule(terminals)?]);
    SeccompFilter::new(
        rules,
        SeccompAction::Errno(libc::EPERM as u32),
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )
}
