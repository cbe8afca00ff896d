//! Children that are forked and live on for a while, as a framework's worker processes do, and the
//! death of this process.

use std::time::Duration;

/// The exit status of a process that could not kill itself: what a shell gives for one that was.
pub const KILLED: i32 = 128 + libc::SIGKILL;
/// What a child writes into memory that its dead parent held.
const SCRIBBLE: u8 = 0xa5;

/// Forks a child that ends by itself after a time, and until then writes to memory again and again.
/// Says whether it was forked: the system may have no room for another process.
pub fn child(lives: Duration, memory: &[(*mut u8, usize)]) -> Result<bool, String> {
    let rounds = lives.as_millis() + 1;
    // SAFETY: `fork` asks that the child of a process with threads calls only async-signal-safe
    // functions: `live` does.
    match unsafe { harness::fork(|| live(rounds, memory)) } {
        Ok(child) => {
            child.leave();
            Ok(true)
        }
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(format!("fork: {error}")),
    }
}

/// Ends this process as the kernel would, without another instruction of its own.
pub fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    // The first process of a pid namespace cannot kill itself.
    // SAFETY: `_exit` has no conditions.
    unsafe { libc::_exit(KILLED) }
}

/// Writes and waits for a millisecond, for this many rounds, then ends.
fn live(rounds: u128, memory: &[(*mut u8, usize)]) -> i32 {
    let millisecond = libc::timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    for _ in 0..rounds {
        for &(start, len) in memory {
            // SAFETY: `write_bytes` asks for writable bytes: blocks that the parent held, whose
            // mappings a forked child has too and nobody takes away. Other processes may write
            // there at the same time; no value read depends on it.
            unsafe { start.write_bytes(SCRIBBLE, len) };
        }
        // SAFETY: `nanosleep` asks for a valid time; the rest may be null.
        unsafe { libc::nanosleep(&raw const millisecond, std::ptr::null_mut()) };
    }
    0
}
