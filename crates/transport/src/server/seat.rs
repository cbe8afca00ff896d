//! A participant's process as its server knows it, and the proof of its death.
//!
//! | token | comes from | alone it is wrong, because |
//! |---|---|---|
//! | hung up | the socket: no copy of its other end is open | it comes up to 9 ms before the dying process' last GPU write |
//! | exited | the pidfd that came with the hello | a forked child may keep the driver's files |
//! | descendants | the pidfds that came behind it | they are those that the process named |
//!
//! A death is proven when all have come, in any order. What follows is the handler's: a session
//! waits for its quarantine, a broker closes what a dead writer leaves and never hands it out again.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use gpu_api::lock::Acquire;
use gpu_api::{Error, Result, explain};

use super::watch::Watch;
use crate::os::closer::Foreign;
use crate::os::process;
use crate::wire::refusal::RefusalCode;

/// Why a connection is refused: for programs, and for people.
pub type Refused = (RefusalCode, String);

/// Returns the refusal of a connection for which something failed here. The cause goes along: the
/// other side has no other way to it.
pub fn failed(error: &Error) -> Refused {
    (RefusalCode::Failed, explain(error))
}

/// A process whose hello brought pidfds.
#[derive(Debug)]
pub struct Newcomer {
    /// Its pid as this process sees it; 0 in another pid namespace.
    pub pid: u32,
    /// It is this very process.
    pub local: bool,
    pidfd: Foreign,
    descendants: Vec<Foreign>,
}

impl Newcomer {
    /// Checks the descriptors of a hello: its process' pidfd, then those of descendants.
    ///
    /// # Errors
    ///
    /// [`RefusalCode::Protocol`] for anything but pidfds, [`RefusalCode::Failed`] when `/proc`
    /// cannot be read.
    pub fn of(fds: Vec<Foreign>) -> Result<Newcomer, Refused> {
        let protocol = |why: &str| (RefusalCode::Protocol, why.to_owned());
        for fd in &fds {
            if !process::is_pidfd(fd.as_fd()).map_err(|e| failed(&e))? {
                return Err(protocol("a descriptor of the hello is not a pidfd"));
            }
        }
        let mut fds = fds.into_iter();
        let pidfd = fds
            .next()
            .ok_or_else(|| protocol("the hello came without a pidfd"))?;
        Ok(Newcomer {
            pid: process::pid_of(pidfd.as_fd()).map_err(|e| failed(&e))?,
            local: process::same_process(pidfd.as_fd()).map_err(|e| failed(&e))?,
            pidfd,
            descendants: fds.collect(),
        })
    }

    /// Gives it the place at the other end of a socket.
    pub fn sit_down(self, socket: Foreign) -> Seat {
        Seat {
            pid: self.pid,
            local: self.local,
            socket,
            pidfd: self.pidfd,
            proof: Mutex::new(Proof {
                descendants: self.descendants.len(),
                ..Proof::default()
            }),
            descendants: self.descendants,
        }
    }
}

/// The process at the other end of a connection.
#[derive(Debug)]
pub struct Seat {
    /// Its pid as this process sees it; 0 in another pid namespace.
    pub pid: u32,
    /// It is this very process.
    pub local: bool,
    /// The connection.
    pub socket: Foreign,
    pub(super) pidfd: Foreign,
    pub(super) descendants: Vec<Foreign>,
    proof: Mutex<Proof>,
}

impl Seat {
    /// Returns how far the proof of its death has come.
    pub fn proof(&self) -> Proof {
        *self.proof.acquire()
    }

    /// Returns pidfds of its own: of the process, then of the descendants that it named. They outlive
    /// the seat.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when no descriptor is left.
    pub fn processes(&self) -> Result<Vec<OwnedFd>> {
        let all = [&self.pidfd].into_iter().chain(&self.descendants);
        all.map(|of| {
            let own = of.as_fd().try_clone_to_owned();
            own.map_err(|e| Error::without_descriptors("dup of a pidfd", e))
        })
        .collect()
    }

    /// Returns whether the kernel is ending the process; `false` where its pid is hidden.
    pub fn is_exiting(&self) -> bool {
        process::is_exiting(self.pid)
    }

    /// Takes the token that a watch brought.
    pub(super) fn note<Id>(&self, watch: Watch<Id>) {
        self.proof.acquire().note(watch);
    }
}

/// How far the proof of a process' death has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Proof {
    /// The process has exited.
    pub exited: bool,
    /// No copy of its socket is open any more.
    pub hung_up: bool,
    /// Descendants that it named and that are still alive.
    pub descendants: usize,
}

impl Proof {
    /// Says whether everything that can prove the death has.
    pub fn is_complete(self) -> bool {
        self.exited && self.hung_up && self.descendants == 0
    }

    fn note<Id>(&mut self, watch: Watch<Id>) {
        match watch {
            Watch::Socket(_) | Watch::Silenced(_) => self.hung_up = true,
            Watch::Process(_) => self.exited = true,
            Watch::Descendant(..) => self.descendants -= 1,
            Watch::Listener | Watch::Waker | Watch::Greeting | Watch::Extra => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// In whatever order the tokens come, the death is proven by the last and by none before.
        #[test]
        fn the_last_token_proves_a_death(
            mut tokens in (0usize..5).prop_map(|descendants| {
                let below = (0..descendants).map(|n| Watch::Descendant((), n));
                [Watch::Process(()), Watch::Socket(())].into_iter().chain(below).collect::<Vec<_>>()
            }).prop_shuffle(),
            silenced: bool,
        ) {
            let mut proof = Proof { descendants: tokens.len() - 2, ..Proof::default() };
            while let Some(token) = tokens.pop() {
                prop_assert!(!proof.is_complete());
                let token = match token {
                    Watch::Socket(of) if silenced => Watch::Silenced(of),
                    token => token,
                };
                proof.note(token);
            }
            prop_assert!(proof.is_complete());
        }
    }
}
