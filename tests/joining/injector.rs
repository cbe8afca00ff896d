//! System calls of this process' own threads that fail, wait or kill, the n-th of them.
//!
//! A filter of the kernel's (seccomp, `SECCOMP_RET_USER_NOTIF`) asks a thread of this process about
//! every call that takes something: a descriptor, memory, a thread, a place in a socket. The
//! library that runs is the one that ships; nothing in it knows of this. The filter belongs to the
//! thread that made it and to those that this one starts.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, getpid, kill_process};

/// What is done with a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// It fails as it does for want of what it takes.
    Fail,
    /// It waits until it is released.
    Stall,
    /// The process is killed where it stands.
    Die,
}

/// A call: its number, and the error that it fails with.
type Call = (libc::c_long, i32);

/// Calls that take something, each with what it says when there is none.
const CALLS: &[Call] = &[
    (libc::SYS_socket, libc::EMFILE),
    (libc::SYS_connect, libc::ECONNREFUSED),
    (libc::SYS_accept4, libc::EMFILE),
    (libc::SYS_sendmsg, libc::ENOBUFS),
    (libc::SYS_recvmsg, libc::ENOMEM),
    (libc::SYS_getsockopt, libc::ENOBUFS),
    (libc::SYS_memfd_create, libc::EMFILE),
    (libc::SYS_ftruncate, libc::ENOSPC),
    (libc::SYS_fallocate, libc::ENOSPC),
    (libc::SYS_mmap, libc::ENOMEM),
    (libc::SYS_fcntl, libc::EMFILE),
    (libc::SYS_eventfd2, libc::EMFILE),
    (libc::SYS_epoll_create1, libc::EMFILE),
    (libc::SYS_epoll_ctl, libc::ENOSPC),
    (libc::SYS_pidfd_open, libc::EMFILE),
    (libc::SYS_openat, libc::EMFILE),
    (libc::SYS_readlinkat, libc::ENOMEM),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_readlink, libc::ENOMEM),
    (libc::SYS_clone, libc::EAGAIN),
    (libc::SYS_clone3, libc::EAGAIN),
];

/// Looks into other processes that count, of a search through all of them: each is like the one
/// before.
const MOST_LOOKS: u32 = 4;

#[derive(Debug)]
struct Plan {
    threads: &'static [&'static str],
    step: u32,
    action: Action,
    seen: u32,
    looks: u32,
    fired: Option<libc::c_long>,
    held: Option<u64>,
}

/// Asks what is to become of the calls of its thread, and of the threads that this one starts.
#[derive(Debug)]
pub struct Injector {
    listener: Arc<AtomicI32>,
    plan: Arc<Mutex<Option<Plan>>>,
}

impl Injector {
    /// Begins with the calling thread; nothing is done to anybody until [`arm`](Injector::arm).
    ///
    /// # Errors
    ///
    /// What the kernel says where a process may not filter itself.
    pub fn new() -> io::Result<Injector> {
        let (listener, plan) = (Arc::new(AtomicI32::new(-1)), Arc::new(Mutex::new(None)));
        // Before the filter: it does not apply to the thread that answers.
        let (told, of) = (listener.clone(), plan.clone());
        std::thread::Builder::new()
            .name("injector".into())
            .spawn(move || answer(&told, &of))?;
        listener.store(install()?, Ordering::Release);
        Ok(Injector { listener, plan })
    }

    /// From here on the `step`-th call, from 1, of threads of these names is treated so.
    pub fn arm(&self, threads: &'static [&'static str], step: u32, action: Action) {
        *lock(&self.plan) = Some(Plan {
            threads,
            step,
            action,
            seen: 0,
            looks: 0,
            fired: None,
            held: None,
        });
    }

    /// Says which call has come, if it has.
    pub fn fired(&self) -> Option<&'static str> {
        lock(&self.plan).as_ref()?.fired.map(name_of)
    }

    /// Lets everybody pass, also who waits, and says which call had come.
    pub fn disarm(&self) -> Option<&'static str> {
        let plan = lock(&self.plan).take()?;
        if let Some(id) = plan.held {
            respond(self.listener.load(Ordering::Acquire), id, None);
        }
        plan.fired.map(name_of)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn name_of(call: libc::c_long) -> &'static str {
    let names = BTreeMap::from([
        (libc::SYS_socket, "socket"),
        (libc::SYS_connect, "connect"),
        (libc::SYS_accept4, "accept4"),
        (libc::SYS_sendmsg, "sendmsg"),
        (libc::SYS_recvmsg, "recvmsg"),
        (libc::SYS_getsockopt, "getsockopt"),
        (libc::SYS_memfd_create, "memfd_create"),
        (libc::SYS_ftruncate, "ftruncate"),
        (libc::SYS_fallocate, "fallocate"),
        (libc::SYS_mmap, "mmap"),
        (libc::SYS_fcntl, "fcntl"),
        (libc::SYS_eventfd2, "eventfd2"),
        (libc::SYS_epoll_create1, "epoll_create1"),
        (libc::SYS_epoll_ctl, "epoll_ctl"),
        (libc::SYS_pidfd_open, "pidfd_open"),
        (libc::SYS_openat, "openat"),
        (libc::SYS_clone, "clone"),
        (libc::SYS_clone3, "clone3"),
    ]);
    names.get(&call).copied().unwrap_or("readlink")
}

/// Has the kernel ask about this thread's calls, and returns the descriptor that it asks by.
fn install() -> io::Result<RawFd> {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let asked = CALLS.len() as u8;
    let mut program = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for (place, (call, _)) in (1..).zip(CALLS) {
        // Past the other calls, and past the answer that lets the call pass.
        let jt = asked - place + 1;
        let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        program.push(libc::sock_filter {
            code,
            jt,
            jf: 0,
            k: *call as u32,
        });
    }
    program.push(statement(
        libc::BPF_RET | libc::BPF_K,
        libc::SECCOMP_RET_ALLOW,
    ));
    program.push(statement(
        libc::BPF_RET | libc::BPF_K,
        libc::SECCOMP_RET_USER_NOTIF,
    ));
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: `prctl(PR_SET_NO_NEW_PRIVS)` asks for no memory.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    // SAFETY: `seccomp(SECCOMP_SET_MODE_FILTER)` asks for a program that lives during the call: it
    // is on this frame.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const filter,
        )
    };
    if fd < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(fd as RawFd)
    }
}

/// Answers the kernel for as long as anybody is left to be asked about.
fn answer(listener: &AtomicI32, plan: &Mutex<Option<Plan>>) {
    let fd = loop {
        match listener.load(Ordering::Acquire) {
            -1 => std::thread::yield_now(),
            fd => break fd,
        }
    };
    // SAFETY: `OwnedFd::from_raw_fd` asks for an open descriptor that nobody else closes: `install`
    // made it for this thread.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    loop {
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        if fds[0].revents().contains(PollFlags::HUP) {
            return;
        }
        // SAFETY: a `seccomp_notif` of zeroes is valid: it is plain data.
        let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: `SECCOMP_IOCTL_NOTIF_RECV` asks for a zeroed `seccomp_notif` to write to.
        if unsafe { libc::ioctl(fd.as_raw_fd(), NOTIF_RECV, &raw mut asked) } != 0 {
            match io::Error::last_os_error().raw_os_error() {
                // Who was asked about is gone.
                Some(libc::ENOENT | libc::EINTR) => continue,
                _ => return,
            }
        }
        decide(fd.as_raw_fd(), &asked, plan);
    }
}

fn decide(listener: RawFd, asked: &libc::seccomp_notif, plan: &Mutex<Option<Plan>>) {
    let call = libc::c_long::from(asked.data.nr);
    let mut plan = lock(plan);
    let Some(plan) = plan.as_mut().filter(|plan| plan.fired.is_none()) else {
        return respond(listener, asked.id, None);
    };
    plan.seen += u32::from(plan.is_meant(asked));
    if plan.seen < plan.step {
        return respond(listener, asked.id, None);
    }
    plan.fired = Some(call);
    match plan.action {
        Action::Fail => respond(
            listener,
            asked.id,
            CALLS.iter().find(|it| it.0 == call).map(|it| it.1),
        ),
        Action::Stall => plan.held = Some(asked.id),
        Action::Die => kill_process(getpid(), Signal::KILL).expect("it is this process"),
    }
}

impl Plan {
    /// Says whether a call takes something, and is one of the threads'.
    fn is_meant(&mut self, asked: &libc::seccomp_notif) -> bool {
        let thread =
            fs::read_to_string(format!("/proc/self/task/{}/comm", asked.pid)).unwrap_or_default();
        if !self.threads.contains(&thread.trim_end()) {
            return false;
        }
        let [first, second, _, _, file, _] = asked.data.args;
        match libc::c_long::from(asked.data.nr) {
            // Anonymous memory is the allocator's, which ends a process without any.
            libc::SYS_mmap => file as i32 >= 0,
            libc::SYS_fcntl => matches!(second as i32, libc::F_DUPFD_CLOEXEC | libc::F_ADD_SEALS),
            libc::SYS_epoll_ctl => second as i32 == libc::EPOLL_CTL_ADD,
            libc::SYS_openat => {
                debug_assert_eq!(first as i32, libc::AT_FDCWD);
                self.looks += u32::from(is_other_process(second));
                !is_other_process(second) || self.looks <= MOST_LOOKS
            }
            _ => true,
        }
    }
}

/// Says whether a path at this address begins with `/proc/` and a number.
fn is_other_process(path: u64) -> bool {
    // SAFETY: `CStr::from_ptr` asks for a string that ends with a zero and stays: a thread of this
    // process waits in a call that was given it.
    let path = unsafe { std::ffi::CStr::from_ptr(path as usize as *const libc::c_char) };
    path.to_bytes()
        .strip_prefix(b"/proc/")
        .and_then(|rest| rest.first())
        .is_some_and(u8::is_ascii_digit)
}

/// Lets a call pass, or fail.
fn respond(listener: RawFd, id: u64, error: Option<i32>) {
    let flags = if error.is_none() {
        libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32
    } else {
        0
    };
    let mut said = libc::seccomp_notif_resp {
        id,
        val: 0,
        error: error.map_or(0, |error| -error),
        flags,
    };
    // SAFETY: `SECCOMP_IOCTL_NOTIF_SEND` asks for a `seccomp_notif_resp` to read. Who is gone needs
    // no answer.
    let _ = unsafe { libc::ioctl(listener, NOTIF_SEND, &raw mut said) };
}

/// `_IOWR('!', 0, struct seccomp_notif)` and `_IOWR('!', 1, struct seccomp_notif_resp)` of
/// linux/seccomp.h.
const NOTIF_RECV: libc::Ioctl = request(0, size_of::<libc::seccomp_notif>());
const NOTIF_SEND: libc::Ioctl = request(1, size_of::<libc::seccomp_notif_resp>());

const fn request(number: u32, size: usize) -> libc::Ioctl {
    ((3 << 30) | ((size as u32) << 16) | ((b'!' as u32) << 8) | number) as libc::Ioctl
}
