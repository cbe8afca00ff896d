//! Which descendants of this process keep a device's files, and with them its GPU work, alive.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use gpu_api::{Error, Result};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use super::{has_exited, pidfd_error, proc_error};

/// The most descendants that one message can name: the kernel passes at most 253 descriptors with a
/// packet.
pub const MOST_DESCENDANTS: usize = 200;

/// How often the process table is read again because the last reading found more descendants than
/// the one before.
const MOST_READINGS: usize = 16;

/// Returns pidfds of the living descendants of this process that keep open, or mapped, a file whose
/// name in `/proc` starts with one of `prefixes`.
///
/// A descendant whose files this process may not see is counted as one that keeps them: naming one
/// too many holds memory longer, one too few frees it early. One that was left behind by a parent
/// that has exited is no descendant any more, and nobody can find it.
///
/// # Errors
///
/// [`Error::Exhausted`] for more than [`MOST_DESCENDANTS`], [`Error::System`] when `/proc` cannot
/// be read or no file descriptor is left.
pub fn descendants_holding(prefixes: &[&str]) -> Result<Vec<OwnedFd>> {
    descendants_holding_at_most(prefixes, MOST_DESCENDANTS)
}

fn descendants_holding_at_most(prefixes: &[&str], most: usize) -> Result<Vec<OwnedFd>> {
    let mut holders = Vec::new();
    if prefixes.is_empty() {
        return Ok(holders);
    }
    for Identity { pid, start } in descendants()? {
        let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
            continue;
        };
        let pidfd = match pidfd_open(raw, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH) => continue,
            Err(e) => return Err(pidfd_error(e)),
        };
        // The pid may have been used again between the reading of the table and the opening.
        let Some(stat) = Stat::of(pid)?.filter(|stat| stat.start == start) else {
            continue;
        };
        // Whose first thread has ended while others go on shows no files, though the others have
        // them.
        let keeps = stat.state == b'Z' || holds(pid, prefixes)?;
        if !keeps || has_exited(pidfd.as_fd()) {
            continue;
        }
        if holders.len() == most {
            return Err(Error::exhausted(
                "child processes that keep the device's files open",
                most as u64,
                "connect before starting them, or close the device's files in them",
            ));
        }
        holders.push(pidfd);
    }
    Ok(holders)
}

/// A process and when it started: what a pid alone is not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Identity {
    pid: u32,
    start: u64,
}

/// What `/proc/PID/stat` says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stat {
    state: u8,
    parent: u32,
    start: u64,
}

impl Stat {
    /// Reads it; `None` of a process that is gone, or that is hidden because it is another user's.
    ///
    /// Whatever else keeps it from being read is an error: a descendant that was passed over for
    /// lack of a descriptor could use memory that its parent's death seems to free.
    fn of(pid: u32) -> Result<Option<Stat>> {
        match fs::read(format!("/proc/{pid}/stat")) {
            Ok(line) => Ok(Stat::parse(&line)),
            Err(e) if is_gone(&e) || e.kind() == io::ErrorKind::PermissionDenied => Ok(None),
            Err(e) => Err(proc_error(e)),
        }
    }

    /// The name in the second field may hold spaces and parentheses, so the fields are counted from
    /// the last `)`.
    fn parse(line: &[u8]) -> Option<Stat> {
        let after = line.iter().rposition(|&byte| byte == b')')? + 1;
        let mut fields = line[after..]
            .split(u8::is_ascii_whitespace)
            .filter(|field| !field.is_empty());
        let state = *fields.next()?.first()?;
        let parent = number(fields.next()?)?;
        // Field 22 of proc_pid_stat(5); the state is the third and the parent the fourth.
        let start = number(fields.nth(22 - 5)?)?;
        Some(Stat {
            state,
            parent: u32::try_from(parent).ok()?,
            start,
        })
    }
}

fn number(digits: &[u8]) -> Option<u64> {
    str::from_utf8(digits).ok()?.parse().ok()
}

/// Returns all living descendants of this process.
fn descendants() -> Result<BTreeSet<Identity>> {
    let own = own_pid_in_proc()?;
    let mut family = BTreeSet::new();
    // One reading is not a moment: a descendant may fork while the table is read. What was found
    // once stays found, also when its parent exits and the next reading sees it adopted by another.
    for _ in 0..MOST_READINGS {
        let before = family.len();
        read_descendants(own, &mut family)?;
        if family.len() == before {
            break;
        }
    }
    Ok(family)
}

fn read_descendants(own: u32, family: &mut BTreeSet<Identity>) -> Result<()> {
    let mut children: BTreeMap<u32, Vec<Identity>> = BTreeMap::new();
    let mut parents = vec![own];
    for entry in fs::read_dir("/proc").map_err(proc_error)? {
        let name = entry.map_err(proc_error)?.file_name();
        let Some(pid) = number(name.as_bytes()).and_then(|pid| u32::try_from(pid).ok()) else {
            continue;
        };
        let Some(stat) = Stat::of(pid)? else { continue };
        let identity = Identity {
            pid,
            start: stat.start,
        };
        if family.contains(&identity) {
            parents.push(pid);
        }
        children.entry(stat.parent).or_default().push(identity);
    }
    while let Some(parent) = parents.pop() {
        for child in children.remove(&parent).into_iter().flatten() {
            family.insert(child);
            parents.push(child.pid);
        }
    }
    Ok(())
}

/// Returns the own pid as `/proc` counts, and refuses a `/proc` that counts otherwise than
/// `pidfd_open` does.
fn own_pid_in_proc() -> Result<u32> {
    let link = fs::read_link("/proc/self").map_err(proc_error)?;
    let own = getpid().as_raw_nonzero().get().unsigned_abs();
    if number(link.as_os_str().as_bytes()) != Some(u64::from(own)) {
        return Err(Error::unsupported(
            "finding child processes that keep the device's files open",
            format!(
                "/proc is of another pid namespace: process {own} is {} there",
                link.display()
            ),
            "mount the /proc of this process' own namespace",
        ));
    }
    Ok(own)
}

/// Says whether an error means that a process or its open file is gone.
fn is_gone(e: &io::Error) -> bool {
    matches!(Errno::from_io_error(e), Some(Errno::NOENT | Errno::SRCH))
}

/// Says whether a process keeps such a file open or mapped, or may not be asked. A process that is
/// gone does not.
fn holds(pid: u32, prefixes: &[&str]) -> Result<bool> {
    let is_one = |name: &[u8]| {
        prefixes
            .iter()
            .any(|prefix| name.starts_with(prefix.as_bytes()))
    };
    let unseen = |e: io::Error| match e.kind() {
        io::ErrorKind::PermissionDenied => Ok(true),
        _ if is_gone(&e) => Ok(false),
        _ => Err(proc_error(e)),
    };

    let fds = match fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(fds) => fds,
        Err(e) => return unseen(e),
    };
    for fd in fds {
        let held = match fd.and_then(|fd| fs::read_link(fd.path())) {
            Ok(link) => is_one(link.as_os_str().as_bytes()),
            Err(e) => unseen(e)?,
        };
        if held {
            return Ok(true);
        }
    }
    match fs::read(format!("/proc/{pid}/maps")) {
        Ok(maps) => Ok(maps
            .split(|&byte| byte == b'\n')
            .any(|line| mapped_name(line).is_some_and(is_one))),
        Err(e) => unseen(e),
    }
}

/// Returns the sixth field of a line of `/proc/PID/maps`: everything after the fifth and the spaces
/// behind it.
fn mapped_name(line: &[u8]) -> Option<&[u8]> {
    let mut rest = line;
    for _ in 0..5 {
        let end = rest.iter().position(|&byte| byte == b' ')?;
        rest = rest[end..].trim_ascii_start();
    }
    (!rest.is_empty()).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::process::forked::{Forked, await_readable, stand_still};
    use crate::os::process::pid_of;
    use crate::os::socket::scratch::{in_own_process, limit_files_to};
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    fn close(fd: i32) {
        // SAFETY: called in a forked child that never uses the descriptor again.
        unsafe { libc::close(fd) };
    }

    /// A file of a name of its own, removed at the end; children that others fork may inherit it,
    /// so tests ask only about their own.
    struct Held {
        path: PathBuf,
        file: File,
    }

    impl Held {
        fn new(name: &str) -> Held {
            let path =
                std::env::temp_dir().join(format!("gpu-ipc-process-{}-{name}", std::process::id()));
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(&path)
                .expect("a file");
            file.set_len(4096).expect("a page");
            Held { path, file }
        }

        fn holders(&self) -> Vec<u32> {
            let name = self.path.to_str().expect("a plain name");
            let holders = descendants_holding(&["/no such file", name]).expect("a readable /proc");
            holders
                .iter()
                .map(|pidfd| pid_of(pidfd.as_fd()).expect("a readable /proc"))
                .collect()
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.path);
        }
    }

    #[test]
    fn a_name_with_parentheses_does_not_hide_the_parent() {
        let line = b"7 (x) Z 1 (y)) S 42 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 31337 9 9";
        assert_eq!(
            Stat::parse(line),
            Some(Stat {
                state: b'S',
                parent: 42,
                start: 31337
            })
        );
        for end in 0..line.len() - 8 {
            assert_eq!(Stat::parse(&line[..end]), None, "cut at {end}");
        }
    }

    #[test]
    fn a_mapped_name_is_what_follows_five_fields() {
        let line = b"7f0-7f1 rw-s 00000000 00:06 1034                       /dev/a b (deleted)";
        assert_eq!(mapped_name(line), Some(&b"/dev/a b (deleted)"[..]));
        assert_eq!(mapped_name(b"7f0-7f1 rw-p 00000000 00:00 0 "), None);
        assert_eq!(mapped_name(b""), None);
    }

    #[test]
    fn a_child_with_the_file_is_found_and_one_that_closed_it_is_not() {
        let held = Held::new("closed");
        let fd = held.file.as_raw_fd();
        let keeps = Forked::start(|| {});
        let closed = Forked::start(|| close(fd));
        let holders = held.holders();
        assert!(holders.contains(&keeps.pid()));
        assert!(!holders.contains(&closed.pid()));
        assert!(!holders.contains(&std::process::id()));
    }

    #[test]
    fn a_dead_child_is_not_found() {
        let held = Held::new("dead");
        let child = Forked::start(|| {});
        assert!(held.holders().contains(&child.pid()));
        child.kill();
        await_readable(child.pidfd().as_fd());
        assert!(!held.holders().contains(&child.pid()));
    }

    #[test]
    fn a_child_is_found_or_the_search_fails_with_however_few_descriptors() {
        let name = "os::process::descendants::tests::a_child_is_found_or_the_search_fails_with_however_few_descriptors";
        in_own_process(name, || {
            let held = Held::new("few");
            let child = Forked::start(|| {});
            let path = held.path.to_str().expect("a plain name");
            let mut failures = 0;
            for room in 0.. {
                let lowest = rustix::io::fcntl_dupfd_cloexec(&held.file, 0)
                    .expect("a descriptor")
                    .as_raw_fd();
                limit_files_to(lowest + room);
                let found = descendants_holding(&[path]);
                limit_files_to(1024);
                match found {
                    Ok(holders) => {
                        assert_eq!(holders.len(), 1, "with room for {room} it is passed over");
                        break;
                    }
                    Err(error) => assert!(matches!(error, Error::System { .. }), "{error}"),
                }
                failures += 1;
            }
            assert!(failures >= 2, "{failures} searches failed");
            drop(child);
        });
    }

    #[test]
    fn a_mapping_alone_is_found() {
        let held = Held::new("mapped");
        let fd = held.file.as_raw_fd();
        // SAFETY: the file is this test's own and nobody shortens it.
        let map = unsafe { memmap2::MmapOptions::new().len(4096).map_mut(&held.file) }
            .expect("a mapping");
        let child = Forked::start(|| close(fd));
        assert!(held.holders().contains(&child.pid()));
        drop(map);
    }

    #[test]
    fn a_grandchild_behind_a_strange_name_is_found() {
        let held = Held::new("grandchild");
        let fd = held.file.as_raw_fd();
        let (mut end, tell) = io::pipe().expect("a pipe");
        let tell = tell.as_raw_fd();
        let child = Forked::start(|| {
            // SAFETY: `prctl(PR_SET_NAME)` reads a string that ends in 0.
            unsafe { libc::prctl(libc::PR_SET_NAME, c") S 1 (".as_ptr()) };
            // SAFETY: as in `Forked::start`: the grandchild only makes system calls.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                stand_still(tell);
            }
            // SAFETY: `write` reads four bytes that live on this frame.
            unsafe { libc::write(tell, (&raw const pid).cast(), 4) };
            close(fd);
        });
        // One byte from the grandchild and four from the child, in either order, each whole. A pid
        // is below 2^22, so its last byte is 0.
        let mut words = [0; 5];
        await_readable(end.as_fd());
        end.read_exact(&mut words).expect("both words");
        let at = usize::from(words[4] != b'!');
        let pid = u32::from_ne_bytes(words[at..at + 4].try_into().expect("four bytes"));
        let holders = held.holders();
        assert!(holders.contains(&pid), "{pid} is not in {holders:?}");
        assert!(!holders.contains(&child.pid()));
    }

    #[test]
    fn an_exec_ends_what_closes_at_it_and_keeps_the_rest() {
        let held = Held::new("exec");
        let spawn = |stdin| {
            Command::new("sleep")
                .arg("1000")
                .stdin(stdin)
                .spawn()
                .expect("sleep")
        };
        let mut plain = spawn(Stdio::null());
        let mut keeps = spawn(Stdio::from(
            held.file.try_clone().expect("a second descriptor"),
        ));
        let holders = held.holders();
        for child in [&mut plain, &mut keeps] {
            child.kill().expect("kill");
            child.wait().expect("wait");
        }
        assert!(!holders.contains(&plain.id()));
        assert!(holders.contains(&keeps.id()));
    }

    #[test]
    fn too_many_are_an_error_that_names_the_limit() {
        let held = Held::new("many");
        let _children: Vec<Forked> = (0..3).map(|_| Forked::start(|| {})).collect();
        let name = held.path.to_str().expect("a plain name");
        let error = descendants_holding_at_most(&[name], 2).expect_err("three are more than two");
        assert!(
            matches!(error, Error::Exhausted { limit: 2, .. }),
            "{error}"
        );
    }

    #[test]
    fn a_first_thread_that_ended_does_not_hide_the_others() {
        let held = Held::new("thread");
        let (end, tell) = io::pipe().expect("a pipe");
        let tell = tell.as_raw_fd();
        // SAFETY: `fork` as in `Forked::start`. The child makes a thread, which is more than a
        // signal handler may do, by a bare system call that takes no lock.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let flags = libc::CLONE_VM
                | libc::CLONE_FILES
                | libc::CLONE_FS
                | libc::CLONE_SIGHAND
                | libc::CLONE_THREAD;
            let mut stack = [0u64; 2048];
            let top = stack.as_mut_ptr_range().end;
            extern "C" fn body(tell: *mut libc::c_void) -> libc::c_int {
                stand_still(tell as usize as i32)
            }
            // SAFETY: `clone` asks for a stack that nobody else uses: the first thread ends without
            // touching it.
            unsafe { libc::clone(body, top.cast(), flags, tell as usize as *mut libc::c_void) };
            // SAFETY: `exit` of one thread has no conditions.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
        let child = Forked::of(pid);
        await_readable(end.as_fd());
        let deadline = Instant::now() + Duration::from_secs(60);
        while Stat::of(child.pid())
            .expect("a readable /proc")
            .expect("its row")
            .state
            != b'Z'
        {
            assert!(
                Instant::now() < deadline,
                "the first thread did not end within 60 s"
            );
            std::thread::yield_now();
        }
        assert!(!has_exited(child.pidfd().as_fd()));
        assert!(held.holders().contains(&child.pid()));
    }
}
