//! A server of processes: the way in, the messages, the proof of a death. What a protocol says is
//! its [`Server`]; all else is here, once.
//!
//! | state of a connection | what may happen | goes to |
//! |---|---|---|
//! | accepted | the kernel names its user: nothing that one who may not connect sent is read | greeting, refused |
//! | greeting | speaks | greeting, seated, refused, closed |
//! | | hangs up; is the oldest of the process with the most, when one too many is there | closed |
//! | seated | speaks | seated, silenced |
//! | | any token of its [proof](Proof) | seated, until the handler lets it go |
//! | silenced | it sent what is no message, or shut its end for writing: it is not read again | the same tokens |
//! | refused, closed | one message says why, if any | |
//!
//! One thread serves. A connection, and whatever came with a packet, is [`Foreign`]: its close never
//! keeps this thread. An order of steps that the kernel may choose: a process hangs up, exits and is
//! seated in one wake-up. Each report is looked up by a number that is used once, so a report of what
//! has gone stands for nothing.

mod door;
mod eviction;
mod seat;
mod watch;
mod watches;

pub use door::{Allowed, Door, Greeting, MOST_GREETINGS};
pub use seat::{Newcomer, Proof, Refused, Seat, failed};
pub use watch::Watch;
pub use watches::Watches;

use std::fmt::{Debug, Display};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use gpu_api::{Error, Result};

use crate::os::closer::Foreign;
use crate::os::socket::{self, ReceiveOutcome};
use crate::wire::packet::MOST_BYTES;
use crate::wire::refusal::RefusalCode;
use crate::wire::table::{self, DecodeError, Message};

/// Connections accepted before the participants get their turn.
const ACCEPTS_A_TURN: usize = 64;
/// Packets read from one participant before the others get their turn.
const PACKETS_A_TURN: usize = 64;

/// What becomes of a connection whose first message is good.
#[derive(Debug)]
pub enum First<P> {
    /// It has yet to say hello.
    Stays,
    /// It was answered, and is closed.
    Ends,
    /// It said hello.
    Seat(P),
}

/// What a protocol's server says and does. The handler calls [`dispatch`](Server::dispatch) with
/// each number that its [`Watches`] report.
pub trait Server {
    /// Numbers a participant.
    type Id: Copy + PartialEq + Debug;
    /// What participants say.
    type Said: Message;
    /// What a participant gets before any thread sees it.
    type Prepared;
    /// Participants send descriptors after their hello.
    const TAKES_FDS: bool;

    /// Returns the door.
    fn door(&mut self) -> &mut Door<Self::Id>;

    /// Returns a participant's seat.
    fn seat(&self, id: Self::Id) -> Option<Arc<Seat>>;

    /// Writes the message that refuses a connection.
    fn write_refusal(refused: Refused, packet: &mut [u8; MOST_BYTES]) -> usize;

    /// Answers the first message of a connection, or makes what a participant needs. After an error
    /// nothing was made.
    ///
    /// # Errors
    ///
    /// Why the connection is refused.
    fn greet(
        &mut self,
        from: &Greeting,
        said: Self::Said,
        fds: Vec<Foreign>,
    ) -> Result<First<Self::Prepared>, Refused>;

    /// Seats a participant, welcomes it, and shows it to other threads; or lets it go again.
    fn admit(&mut self, key: u64, socket: Foreign, prepared: Self::Prepared);

    /// Does what a participant says.
    ///
    /// # Errors
    ///
    /// Why it may not say that. It is silenced.
    fn obey(
        &mut self,
        id: Self::Id,
        said: Self::Said,
        fds: Vec<Foreign>,
    ) -> Result<(), &'static str>;

    /// A participant is not read any more.
    fn silenced(&mut self, _id: Self::Id) {}

    /// The proof of a participant's death has one more token.
    fn noted(&mut self, id: Self::Id, proof: Proof);

    /// A descriptor of the handler's own is ready.
    fn extra(&mut self, _key: u64) {}

    /// Obeys a number that the watches reported.
    fn dispatch(&mut self, key: u64) {
        match self.door().watches.get(key) {
            None | Some(Watch::Waker) => {}
            Some(Watch::Listener) => self.accept(),
            Some(Watch::Greeting) => self.hear_greeting(key),
            Some(Watch::Socket(id)) => self.hear(key, id),
            Some(Watch::Silenced(id)) => {
                if let Some(seat) = self.seat(id)
                    && socket::has_hung_up(&seat.socket)
                {
                    self.note(key, id);
                }
            }
            Some(Watch::Process(id) | Watch::Descendant(id, _)) => self.note(key, id),
            Some(Watch::Extra) => self.extra(key),
        }
    }

    /// Accepts connections that came.
    fn accept(&mut self) {
        for _ in 0..ACCEPTS_A_TURN {
            let refuse = |socket: BorrowedFd<'_>, refused| Self::tell(socket, refused);
            let Some(socket) = self.door().accept(refuse) else {
                return;
            };
            self.take_in(socket);
        }
    }

    /// Takes in a connection that was passed on.
    fn take_over(&mut self, socket: OwnedFd) {
        let socket = self.door().closer.guard(socket);
        self.take_in(socket);
    }

    /// Waits for a connection's hello, or refuses it before that.
    fn take_in(&mut self, socket: Foreign) {
        let of = match self.door().identify(&socket) {
            Ok(of) => of,
            Err(refused) => return self.refuse(&socket, refused),
        };
        if let Some(key) = self.door().to_evict() {
            self.evict(
                key,
                "too many connections say nothing: the oldest is closed",
            );
        }
        if let Err((socket, refused)) = self.door().await_hello(Greeting { socket, of }) {
            self.refuse(&socket, refused);
        }
    }

    /// Closes a connection that has yet to say hello.
    fn evict(&mut self, key: u64, why: &'static str) {
        // It may have spoken since epoll was asked.
        self.hear_greeting(key);
        let door = self.door();
        if let Some(greeting) = door.greetings.remove(&key) {
            door.watches.remove(key, greeting.socket.as_fd());
            tracing::warn!(pid = greeting.of.pid, "{why}");
        }
    }

    /// Closes every connection that has yet to say hello.
    fn evict_all(&mut self, why: &'static str) {
        let keys: Vec<u64> = self.door().greetings.keys().copied().collect();
        keys.into_iter().for_each(|key| self.evict(key, why));
    }

    /// Hears the first message of a connection.
    fn hear_greeting(&mut self, key: u64) {
        let Some(greeting) = self.door().greetings.remove(&key) else {
            return;
        };
        let mut bytes = [0; MOST_BYTES];
        let mut fds = Vec::new();
        let socket = &greeting.socket;
        let closer = &self.door().closer;
        let first = match socket::receive_guarded(socket, &mut bytes, closer, &mut fds) {
            Ok(ReceiveOutcome::Packet(len)) => match table::decode(&bytes[..len], fds.len()) {
                Ok((said, _)) => self.greet(&greeting, said, fds),
                Err(error @ DecodeError::Version { .. }) => {
                    Err((RefusalCode::Version, error.to_string()))
                }
                Err(error) => Err((RefusalCode::Protocol, error.to_string())),
            },
            Ok(ReceiveOutcome::Empty) => Ok(First::Stays),
            Ok(ReceiveOutcome::HungUp) => Ok(First::Ends),
            Err(error) => Err(unreceived(error)),
        };
        match first {
            Ok(First::Stays) => drop(self.door().greetings.insert(key, greeting)),
            Ok(First::Seat(prepared)) => self.admit(key, greeting.socket, prepared),
            Ok(First::Ends) => self.door().watches.remove(key, greeting.socket.as_fd()),
            Err(refused) => {
                self.door().watches.remove(key, greeting.socket.as_fd());
                self.refuse(&greeting.socket, refused);
            }
        }
    }

    /// Tells a refused process why. An error is ignored: the process is gone.
    fn refuse(&mut self, socket: &Foreign, refused: Refused) {
        let pid = socket::credentials(socket.as_fd()).map_or(0, |of| of.pid);
        if let Some(count) = self.door().refused.note(Instant::now()) {
            tracing::warn!(pid, why = refused.1, count, "a participant is refused");
        }
        Self::tell(socket.as_fd(), refused);
    }

    /// Sends a refusal. An error is ignored: the process is gone.
    fn tell(socket: BorrowedFd<'_>, refused: Refused) {
        let mut bytes = [0; MOST_BYTES];
        let len = Self::write_refusal(refused, &mut bytes);
        let _ = socket::send(socket, &bytes[..len], &[]);
    }

    /// Hears what a participant says.
    fn hear(&mut self, key: u64, id: Self::Id) {
        let Some(seat) = self.seat(id) else {
            return;
        };
        let mut bytes = [0; MOST_BYTES];
        for _ in 0..PACKETS_A_TURN {
            let mut fds = Vec::new();
            let closer = &self.door().closer;
            match socket::receive_guarded(&seat.socket, &mut bytes, closer, &mut fds) {
                Ok(ReceiveOutcome::Packet(len)) => match table::decode(&bytes[..len], fds.len()) {
                    Ok((said, _)) => {
                        if let Err(why) = self.obey(id, said, fds) {
                            return self.silence(key, id, &seat, &why);
                        }
                    }
                    Err(error) => return self.silence(key, id, &seat, &error),
                },
                Ok(ReceiveOutcome::Empty) => return,
                Ok(ReceiveOutcome::HungUp) => return self.note(key, id),
                Err(error) if Self::TAKES_FDS && is_for_want_of_room(&error) => {
                    tracing::warn!(participant = ?id, %error, "a packet is dropped; the participant asks again");
                    let _ = socket::receive(&seat.socket, &mut bytes, &mut Vec::new());
                    return;
                }
                Err(error) if socket::is_lost(&error) => {
                    return self.silence(key, id, &seat, &error);
                }
                // For want of memory here: what it said is still there, and is reported again.
                Err(error) => {
                    tracing::warn!(participant = ?id, %error, "a participant cannot be read at this moment");
                    return;
                }
            }
        }
    }

    /// Reads no more of a participant that sent an invalid message or shut its end for writing. What
    /// it sends from here on stays in its socket, and costs one line in the log.
    fn silence(&mut self, key: u64, id: Self::Id, seat: &Seat, why: &dyn Display) {
        tracing::warn!(
            participant = ?id,
            error = %why,
            "a participant sends what is no message; it is granted nothing more and not read again"
        );
        let watches = &mut self.door().watches;
        watches.pause(key, seat.socket.as_fd(), true);
        watches.become_of(key, Watch::Silenced(id));
        self.silenced(id);
    }

    /// Takes a token of the proof of a participant's death.
    fn note(&mut self, key: u64, id: Self::Id) {
        let Some(seat) = self.seat(id) else {
            return;
        };
        let watches = &mut self.door().watches;
        let Some(watch) = watches.get(key) else {
            return;
        };
        let fd = match watch {
            Watch::Process(_) => &seat.pidfd,
            Watch::Descendant(_, n) => &seat.descendants[n],
            _ => &seat.socket,
        };
        watches.remove(key, fd.as_fd());
        seat.note(watch);
        self.noted(id, seat.proof());
    }
}

/// Says why a hello did not come in: it is none, or no descriptor is left for those that it brings.
fn unreceived(error: io::Error) -> Refused {
    match error.kind() {
        io::ErrorKind::InvalidData => (RefusalCode::Protocol, error.to_string()),
        _ => failed(&Error::without_descriptors("recvmsg", error)),
    }
}

/// Says whether the descriptors that come with a packet find no room here.
fn is_for_want_of_room(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EMFILE)
}
