//! Counts what a child process executes between two marks, one instruction after the other.
//!
//! A step is what callgrind calls an instruction, and the kernel's own clock functions are stepped
//! through too. Valgrind itself would not do: most releases know no `pidfd_open`, and the library
//! has no path without it.

use std::collections::HashMap;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Where the kernel puts a program that is not moved about.
pub const BASE: u64 = 0x5555_5555_4000;

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Instructions.
    Instructions,
    /// Instructions, and how often each address was the next to execute.
    Places,
    /// System calls of the thread that marks: entries and returns.
    Calls,
}

/// What was counted.
#[derive(Default)]
pub struct Steps {
    pub count: u64,
    pub at: HashMap<u64, u64>,
}

/// Lets this process be stepped by its parent (child, before its first mark).
pub fn submit() {
    // SAFETY: `ptrace(PTRACE_TRACEME)` touches no memory of ours.
    let done = unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0usize, 0usize) };
    assert_eq!(
        done,
        0,
        "tracing is not allowed: {}",
        io::Error::last_os_error()
    );
}

/// Has the child's addresses be the same in every run: which shard a thread begins with depends on
/// them.
pub fn fix_addresses(command: &mut Command) {
    let fix = || {
        // SAFETY: `personality` has no conditions.
        let before = unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) };
        if before < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    };
    // SAFETY: `pre_exec` asks for a closure that does only what is safe between fork and exec: one
    // system call.
    unsafe { command.pre_exec(fix) };
}

/// Has the tracer stop all other threads of this process for good (child).
pub fn hold_others_here() {
    // SAFETY: `raise` has no conditions; the tracer takes the signal away.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Marks the beginning or the end of what is counted (child).
#[inline(always)]
pub fn mark() {
    // SAFETY: `raise` has no conditions; the tracer takes the signal away.
    unsafe { libc::raise(libc::SIGTRAP) };
}

/// Runs a child to its end and counts between every odd mark and the next.
///
/// # Errors
///
/// What the child did instead.
pub fn count(command: &mut Command, what: What) -> Result<Steps, String> {
    let mut child = command.spawn().map_err(|e| format!("no process: {e}"))?;
    let pid = child.id().cast_signed();
    let mut steps = Steps::default();
    let mut counting = false;
    loop {
        let mut status = 0;
        // Any child of this process, because the end of a thread that is held must be taken too.
        // SAFETY: `waitpid` asks for a valid place for the status.
        let waited = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL) };
        if waited < 0 {
            let _ = child.kill();
            return Err(format!("lost: {}", io::Error::last_os_error()));
        }
        if waited != pid {
            continue;
        }
        if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0 {
            return Ok(steps);
        }
        if !libc::WIFSTOPPED(status) {
            return Err(format!("it ended with status {status:#x}"));
        }
        let mut signal = libc::WSTOPSIG(status);
        if signal == libc::SIGTRAP {
            signal = 0;
            if is_mark(pid) {
                counting = !counting;
            } else if counting {
                steps.count += 1;
                if what == What::Places {
                    *steps.at.entry(place(pid)).or_default() += 1;
                }
            }
        }
        if signal == libc::SIGSTOP {
            signal = 0;
            hold_others(pid)?;
        }
        let how = match what {
            _ if !counting => libc::PTRACE_CONT,
            What::Calls => libc::PTRACE_SYSCALL,
            What::Instructions | What::Places => libc::PTRACE_SINGLESTEP,
        };
        // SAFETY: none of the three touches memory of ours.
        let resumed = unsafe { libc::ptrace(how, pid, 0usize, signal as usize) };
        if resumed != 0 {
            return Err(format!(
                "it cannot be stepped: {}",
                io::Error::last_os_error()
            ));
        }
    }
}

/// Stops every other thread of a stopped child where it waits in the kernel, for the rest of the
/// child's life: there none holds a lock that the counted thread may need.
fn hold_others(pid: libc::pid_t) -> Result<(), String> {
    let threads =
        std::fs::read_dir(format!("/proc/{pid}/task")).map_err(|e| format!("no threads: {e}"))?;
    let numbers = threads.filter_map(|thread| {
        thread
            .ok()?
            .file_name()
            .to_str()?
            .parse::<libc::pid_t>()
            .ok()
    });
    for thread in numbers.filter(|&thread| thread != pid) {
        hold(thread).map_err(|e| format!("thread {thread} cannot be held: {e}"))?;
    }
    Ok(())
}

fn hold(thread: libc::pid_t) -> io::Result<()> {
    trace(libc::PTRACE_SEIZE, thread)?;
    loop {
        trace(libc::PTRACE_INTERRUPT, thread)?;
        let mut status = 0;
        // SAFETY: `waitpid` asks for a valid place for the status.
        let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
        if waited != thread || !libc::WIFSTOPPED(status) {
            return Err(io::Error::last_os_error());
        }
        // An interrupted wait for descriptors or for a futex without a competitor; a lock that is
        // contended is not held by the thread that waits for it either.
        let call = registers(thread).orig_rax.cast_signed();
        if [
            libc::SYS_epoll_wait,
            libc::SYS_epoll_pwait,
            libc::SYS_epoll_pwait2,
            libc::SYS_futex,
        ]
        .contains(&call)
        {
            return Ok(());
        }
        trace(libc::PTRACE_CONT, thread)?;
    }
}

fn trace(request: libc::c_uint, thread: libc::pid_t) -> io::Result<()> {
    // SAFETY: seizing, interrupting and continuing touch no memory of ours.
    let done = unsafe { libc::ptrace(request, thread, 0usize, 0usize) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Says whether the SIGTRAP was sent by the child itself.
fn is_mark(pid: libc::pid_t) -> bool {
    // SAFETY: a `siginfo_t` of zeroes is valid: it is plain data.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: `PTRACE_GETSIGINFO` asks for a writable `siginfo_t`.
    let got = unsafe { libc::ptrace(libc::PTRACE_GETSIGINFO, pid, 0usize, &raw mut info) };
    got == 0 && info.si_code == libc::SI_TKILL
}

/// Returns the address of the next instruction.
fn place(pid: libc::pid_t) -> u64 {
    registers(pid).rip
}

/// Returns the registers of a stopped thread.
fn registers(thread: libc::pid_t) -> libc::user_regs_struct {
    // SAFETY: a `user_regs_struct` of zeroes is valid: it is plain data.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    // SAFETY: `PTRACE_GETREGS` asks for a writable `user_regs_struct`.
    unsafe { libc::ptrace(libc::PTRACE_GETREGS, thread, 0usize, &raw mut registers) };
    registers
}
