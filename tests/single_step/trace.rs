//! A process that is executed instruction by instruction.
//!
//! Only its first thread is: it marks the beginning and the end of the call with a SIGTRAP to
//! itself, and its other threads run as they please.

use harness::Child;
use rustix::process::Signal;

use crate::agent::{Call, Said, Told};

/// More instructions than any call has.
const MOST: usize = 2_000_000;

/// A traced process. Killed when dropped.
pub struct Trace {
    child: Child<Told, Said>,
    /// Instructions executed since the beginning of the call.
    executed: usize,
    /// The call is over.
    over: bool,
}

/// Why a thread stopped.
enum Stop {
    /// It executed one instruction.
    Step,
    /// It is at a mark.
    Mark,
}

impl Trace {
    /// Starts an agent, which gets ready for its call.
    pub fn start(call: &Call) -> Trace {
        Trace {
            child: Child::start(call),
            executed: 0,
            over: false,
        }
    }

    /// Hears how far the agent is.
    #[track_caller]
    pub fn hear(&mut self) -> Said {
        self.child.answer().expect("it died while it got ready")
    }

    /// Tells the agent something while it gets ready.
    pub fn tell(&mut self, told: &Told) {
        self.child.tell(told);
    }

    /// Takes hold of the agent, which is ready, and lets it go to the beginning of its call.
    pub fn begin(&mut self) {
        self.seize().expect("it was tried before");
        self.tell(&Told::Go);
        assert!(
            matches!(self.stopped(), Some(Stop::Mark)),
            "the agent did not come to its call"
        );
    }

    /// Has one instruction executed, and says whether the call goes on.
    pub fn step(&mut self) -> bool {
        if self.over {
            return false;
        }
        assert!(self.executed < MOST, "the call does not end");
        self.resume(libc::PTRACE_SINGLESTEP, 0);
        match self.stopped() {
            Some(Stop::Step) => self.executed += 1,
            Some(Stop::Mark) => self.over = true,
            None => panic!("the agent died in its call"),
        }
        !self.over
    }

    /// Returns how many instructions were executed.
    pub fn executed(&self) -> usize {
        self.executed
    }

    /// Kills it where it stands.
    pub fn kill(self) {
        self.child.signal(Signal::KILL);
        while self.stopped().is_some() {}
    }

    fn pid(&self) -> libc::pid_t {
        self.child.pid().cast_signed()
    }

    fn seize(&self) -> std::io::Result<()> {
        // SAFETY: `ptrace(PTRACE_SEIZE)` asks for no memory of ours; what it does, it does to the
        // agent.
        let seized = unsafe {
            libc::ptrace(
                libc::PTRACE_SEIZE,
                self.pid(),
                0usize,
                libc::PTRACE_O_EXITKILL as usize,
            )
        };
        if seized == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    }

    fn resume(&self, how: libc::c_uint, signal: libc::c_int) {
        // SAFETY: neither `PTRACE_SINGLESTEP` nor `PTRACE_CONT` touches memory of ours.
        let resumed = unsafe { libc::ptrace(how, self.pid(), 0usize, signal as usize) };
        assert_eq!(resumed, 0, "{}", std::io::Error::last_os_error());
    }

    /// Waits until the first thread stops; `None` once the process is gone.
    fn stopped(&self) -> Option<Stop> {
        loop {
            let mut status = 0;
            // SAFETY: `waitpid` asks for a valid place for the status.
            let waited = unsafe { libc::waitpid(self.pid(), &raw mut status, libc::__WALL) };
            if waited != self.pid() || !libc::WIFSTOPPED(status) {
                return None;
            }
            let signal = libc::WSTOPSIG(status);
            if signal == libc::SIGTRAP && status >> 16 == 0 {
                return Some(if self.is_mark() {
                    Stop::Mark
                } else {
                    Stop::Step
                });
            }
            // Anything else is the agent's own business.
            self.resume(
                libc::PTRACE_CONT,
                if status >> 16 == 0 { signal } else { 0 },
            );
        }
    }

    /// Says whether the SIGTRAP was sent by the agent itself.
    fn is_mark(&self) -> bool {
        // SAFETY: a `siginfo_t` of zeroes is valid: it is plain data.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `PTRACE_GETSIGINFO` asks for a writable `siginfo_t`.
        let got =
            unsafe { libc::ptrace(libc::PTRACE_GETSIGINFO, self.pid(), 0usize, &raw mut info) };
        got == 0 && info.si_code == libc::SI_TKILL
    }
}

/// Says whether this process may trace its children.
pub fn is_allowed() -> bool {
    let mut trace = Trace::start(&Call::None);
    trace.hear() == Said::Ready && trace.seize().is_ok()
}
