//! Writes that come after their process' death, as a GPU's unfinished kernel's do.
//!
//! A helper process is forked that waits for this process' death, then for a delay, and then
//! writes. It is forked twice, so that it is nobody's descendant, and it closes every descriptor
//! that it inherited: nothing but the write itself tells of it. It ends when this process does,
//! with or without a write.

// Tests: `tests/processes/death.rs`, `crates/broker/tests/objects/death.rs`.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use gpu_api::{Error, Result};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// The most bytes of one write.
pub const MOST_BYTES: usize = 64;
/// The most writes that one process can arm.
const MOST_WRITES: usize = 32;

/// What the helper is told, beside the file.
#[repr(C)]
#[derive(Clone, Copy)]
struct Order {
    offset: i64,
    delay_ns: u64,
    len: u64,
    bytes: [u8; MOST_BYTES],
}

/// The helper, as this process sees it.
#[derive(Debug)]
pub struct Helper {
    socket: OwnedFd,
    armed: usize,
}

impl Helper {
    /// Starts it.
    pub fn start() -> Result<Helper> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| Error::system("socketpair", "raise RLIMIT_NOFILE", e))?;
        let pidfd = rustix::process::pidfd_open(
            rustix::process::getpid(),
            rustix::process::PidfdFlags::empty(),
        )
        .map_err(|e| Error::system("pidfd_open", "use Linux 5.3 or later", e))?;
        // SAFETY: `fork` asks that the child of a process with threads calls only async-signal-safe
        // functions: `helper_main` makes system calls alone and never returns.
        let child = unsafe { libc::fork() };
        match child {
            -1 => Err(Error::system(
                "fork",
                "raise RLIMIT_NPROC",
                std::io::Error::last_os_error(),
            )),
            0 => helper_main(theirs.as_raw_fd(), pidfd.as_raw_fd()),
            child => {
                let mut status = 0;
                // SAFETY: `waitpid` asks for a valid place for the status; the child ends at once,
                // having forked.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                Ok(Helper {
                    socket: ours,
                    armed: 0,
                })
            }
        }
    }

    /// Arms a write.
    pub fn arm(
        &mut self,
        file: &OwnedFd,
        offset: u64,
        bytes: &[u8],
        delay: Duration,
    ) -> Result<()> {
        if bytes.len() > MOST_BYTES {
            let got = format!("{} bytes", bytes.len());
            return Err(Error::invalid("a late write", got, "at most 64 bytes"));
        }
        if self.armed == MOST_WRITES {
            // The helper listens to no more.
            let limit = MOST_WRITES as u64;
            return Err(Error::exhausted("late writes", limit, "arm fewer"));
        }
        let mut order = [0; size_of::<Order>()];
        order[..8].copy_from_slice(&offset.to_ne_bytes());
        order[8..16].copy_from_slice(
            &u64::try_from(delay.as_nanos())
                .unwrap_or(u64::MAX)
                .to_ne_bytes(),
        );
        order[16..24].copy_from_slice(&(bytes.len() as u64).to_ne_bytes());
        order[24..24 + bytes.len()].copy_from_slice(bytes);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [file.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(&order)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
        .map_err(|e| Error::system("sendmsg to the late writer", "arm fewer writes", e))?;
        let mut ready = [0];
        rustix::io::read(&self.socket, &mut ready)
            .map_err(|e| Error::system("reading from the late writer", "report this", e))?;
        self.armed += 1;
        Ok(())
    }
}

/// The helper's life: async-signal-safe calls only.
fn helper_main(socket: RawFd, pidfd: RawFd) -> ! {
    // SAFETY: `fork`: as above; the first child leaves so that the second is nobody's descendant.
    if unsafe { libc::fork() } != 0 {
        // SAFETY: `_exit` has no conditions.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: `setsid` has no conditions.
    unsafe { libc::setsid() };
    // High numbers first, so that neither duplicate overwrites the other's source.
    // SAFETY: `fcntl` with F_DUPFD asks for an open descriptor: the parent's copies.
    let socket = unsafe { libc::fcntl(socket, libc::F_DUPFD, 100) };
    // SAFETY: as above.
    let pidfd = unsafe { libc::fcntl(pidfd, libc::F_DUPFD, 101) };
    // SAFETY: `dup2` asks for an open descriptor; 0 may be anything.
    unsafe { libc::dup2(socket, 0) };
    // SAFETY: as above.
    unsafe { libc::dup2(pidfd, 1) };
    // SAFETY: `close_range` has no conditions here: nobody uses what is closed.
    unsafe { libc::syscall(libc::SYS_close_range, 2u32, u32::MAX, 0u32) };
    let mut orders = [Order {
        offset: 0,
        delay_ns: 0,
        len: 0,
        bytes: [0; MOST_BYTES],
    }; MOST_WRITES];
    let mut files = [-1; MOST_WRITES];
    let mut count = 0;
    let mut open = true;
    loop {
        let mut polled = [
            libc::pollfd {
                fd: if open && count < MOST_WRITES { 0 } else { -1 },
                events: libc::POLLIN,
                revents: 0,
            },
            libc::pollfd {
                fd: 1,
                events: libc::POLLIN,
                revents: 0,
            },
        ];
        // SAFETY: `poll` asks for an array of as many entries as it is told.
        unsafe { libc::poll(polled.as_mut_ptr(), 2, -1) };
        if polled[0].revents != 0 {
            match receive() {
                Some((order, file)) => {
                    orders[count] = order;
                    files[count] = file;
                    count += 1;
                    // SAFETY: `write` asks for as many readable bytes as it is told.
                    unsafe { libc::write(0, (&raw const count).cast(), 1) };
                }
                // The backend is gone and arms nothing more; the process may live on.
                None => open = false,
            }
            continue;
        }
        if polled[1].revents != 0 {
            break;
        }
    }
    for n in 0..count {
        let order = &orders[n];
        let delay = libc::timespec {
            tv_sec: (order.delay_ns / 1_000_000_000).cast_signed(),
            tv_nsec: (order.delay_ns % 1_000_000_000).cast_signed(),
        };
        // SAFETY: `nanosleep` asks for a valid time; the rest may be null.
        unsafe { libc::nanosleep(&raw const delay, std::ptr::null_mut()) };
        let len = (order.len as usize).min(MOST_BYTES);
        // SAFETY: `pwrite` asks for as many readable bytes as it is told: at most the array's.
        unsafe { libc::pwrite(files[n], order.bytes.as_ptr().cast(), len, order.offset) };
    }
    // SAFETY: `_exit` has no conditions.
    unsafe { libc::_exit(0) }
}

/// Receives an order and its file.
fn receive() -> Option<(Order, RawFd)> {
    let mut order = Order {
        offset: 0,
        delay_ns: 0,
        len: 0,
        bytes: [0; MOST_BYTES],
    };
    let mut control = [0u64; 8];
    let mut part = libc::iovec {
        iov_base: (&raw mut order).cast(),
        iov_len: size_of::<Order>(),
    };
    // SAFETY: a `msghdr` of zeroes is valid: no name, no parts, no control.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: `recvmsg` asks for a header whose parts and control are writable for as long as they
    // say: just set.
    let len = unsafe { libc::recvmsg(0, &raw mut message, 0) };
    if len != size_of::<Order>().cast_signed() {
        return None;
    }
    // SAFETY: `CMSG_FIRSTHDR` asks for a header that `recvmsg` filled in.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if header.is_null() {
        return None;
    }
    // SAFETY: `CMSG_DATA` asks for a control header, which is not null.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: `read_unaligned` asks for a readable descriptor: the helper is only ever sent one
    // with each order.
    let file = unsafe { data.cast::<RawFd>().read_unaligned() };
    Some((order, file))
}
