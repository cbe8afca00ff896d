//! A participant that speaks the protocol itself, and not as a good one would.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use broker::wire::{MOST_BYTES, ToBroker, ToClient};
use rustix::event::PollFlags;
use transport::os::process::own_pidfd;
use transport::os::socket::{ReceiveOutcome, connect_within, receive, send, wait_ready};

pub struct Raw {
    socket: OwnedFd,
}

impl Raw {
    pub fn connect(dir: &Path) -> Raw {
        Raw {
            socket: connect_within(&dir.join("broker"), None).expect("a broker that listens"),
        }
    }

    /// Connects, and returns the counter file too.
    pub fn greeted(dir: &Path) -> (Raw, OwnedFd) {
        let raw = Raw::connect(dir);
        raw.say(&hello(1, 1), &[own_pidfd().expect("a pidfd").as_fd()]);
        let (answer, mut fds) = raw.hear().expect("an answer");
        assert!(matches!(answer, ToClient::Welcome { .. }), "{answer:?}");
        (raw, fds.remove(1))
    }

    pub fn say(&self, message: &ToBroker, fds: &[BorrowedFd<'_>]) {
        let mut bytes = [0; MOST_BYTES];
        let len = message.encode(&mut bytes);
        self.say_bytes(&bytes[..len], fds);
    }

    /// Closes the half that this side writes to.
    pub fn half_close(&self) {
        rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write)
            .expect("a connected socket");
    }

    pub fn say_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let _ = send(&self.socket, bytes, fds).expect("sent");
    }

    /// Returns the next message, or nothing if the broker hung up.
    pub fn hear(&self) -> Option<(ToClient, Vec<OwnedFd>)> {
        self.hear_until(Some(Instant::now() + Duration::from_secs(120)))
            .expect("an answer within two minutes")
    }

    /// Returns the bytes of the next message, or nothing if the broker hung up.
    pub fn hear_bytes(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut bytes = [0; MOST_BYTES];
        loop {
            let mut fds = Vec::new();
            match receive(&self.socket, &mut bytes, &mut fds).expect("received") {
                ReceiveOutcome::Packet(len) => return Some((bytes[..len].to_vec(), fds)),
                ReceiveOutcome::HungUp => return None,
                ReceiveOutcome::Empty => {
                    let end = Some(Instant::now() + Duration::from_secs(120));
                    wait_ready(self.socket.as_fd(), PollFlags::IN, "a message", end)
                        .expect("an answer within two minutes");
                }
            }
        }
    }

    /// Returns the message that has come, if there is one.
    pub fn hear_now(&self) -> Option<ToClient> {
        let (said, _) = self.hear_until(Some(Instant::now())).ok()??;
        Some(said)
    }

    /// Says whether nothing comes while another participant is answered; `None` is a hang-up.
    pub fn hear_until(
        &self,
        deadline: Option<Instant>,
    ) -> Result<Option<(ToClient, Vec<OwnedFd>)>, ()> {
        let mut bytes = [0; MOST_BYTES];
        loop {
            let mut fds = Vec::new();
            match receive(&self.socket, &mut bytes, &mut fds).expect("received") {
                ReceiveOutcome::Packet(len) => {
                    return Ok(Some((
                        ToClient::decode(&bytes[..len], fds.len()).expect("a message"),
                        fds,
                    )));
                }
                ReceiveOutcome::HungUp => return Ok(None),
                ReceiveOutcome::Empty => {
                    wait_ready(self.socket.as_fd(), PollFlags::IN, "a message", deadline)
                        .map_err(drop)?;
                }
            }
        }
    }
}

pub fn hello(lowest: u16, highest: u16) -> ToBroker {
    ToBroker::Hello {
        lowest,
        highest,
        shared_context: false,
        descendants: 0,
        name: "raw".into(),
    }
}
