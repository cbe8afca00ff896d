//! Hearing the producer: by the participant's service, or by a thread that waits for an answer.
//!
//! Whoever waits for an answer reads the socket itself, so that the answer wakes one thread and not two. While it does,
//! the service does not watch the socket; the lock says whose turn it is, so packets are obeyed in their order.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu_api::Result;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::consumer::desk::Forwarded;
use crate::consumer::link::{Link, SOCKET};
use crate::consumer::mapping_cache::Answer;
use crate::consumer::notice::Notice;
use channel::os::socket::{self, ReceiveOutcome};
use channel::shared::counter_file::CounterFile;
use channel::wire::descriptor::LeaseId;
use channel::wire::message::{MOST_BYTES, ToParticipant};

/// What there was to hear.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Heard {
    /// A message, which was obeyed, or passed over and logged.
    Message,
    /// Nothing, or a packet that was lost for want of a descriptor.
    Nothing,
    /// The connection has ended.
    End,
}

impl Link {
    /// Waits until `done` gives something, as [`wait_until`](Link::wait_until) does, for what comes by the socket.
    pub fn wait_for_answer<T>(&self, deadline: Option<Instant>, mut done: impl FnMut() -> Option<T>) -> Option<T> {
        if let Some(value) = done() {
            return Some(value);
        }
        let Ok(turn) = self.hearing.try_lock() else { return self.wait_until(deadline, done) };
        if let Some(value) = done() {
            return Some(value);
        }
        self.poller.pause(self.socket.as_fd(), SOCKET);
        let answered = loop {
            match self.hear() {
                Heard::Message => {
                    if let Some(value) = done() {
                        break Some(Some(value));
                    }
                }
                Heard::Nothing => {
                    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if left == Some(Duration::ZERO) {
                        break Some(None);
                    }
                    if !self.await_packet(left) {
                        break None;
                    }
                }
                Heard::End => break None,
            }
        };
        self.poller.resume(self.socket.as_fd(), SOCKET);
        drop(turn);
        // The end, and the producer's death, are the service's business; it tells.
        answered.unwrap_or_else(|| self.wait_until(deadline, done))
    }

    /// Waits for a packet, and says whether that is worth while: not when the producer is dead.
    fn await_packet(&self, left: Option<Duration>) -> bool {
        let timeout = left.map(|left| Timespec {
            tv_sec: left.as_secs().min(3600).cast_signed(),
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN), PollFd::new(&self.producer_pidfd, PollFlags::IN)];
        // An interruption, or an error, has the socket looked at once more.
        let _ = poll(&mut fds, timeout.as_ref());
        fds[1].revents().is_empty()
    }

    /// Takes one packet from the socket and does what it says. For whoever has the turn.
    pub fn hear(&self) -> Heard {
        let mut bytes = [0; MOST_BYTES];
        let mut fds = Vec::new();
        match socket::receive(self.socket.as_fd(), &mut bytes, &mut fds) {
            Ok(ReceiveOutcome::Packet(len)) => {
                if let Err(error) = self.obey(&bytes[..len], fds) {
                    tracing::warn!(%error, "a message of the producer's is passed over");
                }
                Heard::Message
            }
            Ok(ReceiveOutcome::Empty) => Heard::Nothing,
            Ok(ReceiveOutcome::HungUp) => Heard::End,
            Err(error) => {
                tracing::warn!(%error, "the producer cannot be read");
                Heard::Nothing
            }
        }
    }

    fn obey(&self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<()> {
        let message = ToParticipant::decode(bytes, fds.len())?;
        let mut fds = fds.into_iter();
        match message {
            ToParticipant::CounterFile { index, slots } => {
                if let Some(fd) = fds.next() {
                    self.add_file(index, CounterFile::open(fd, slots)?)?;
                }
            }
            ToParticipant::Region { request, region, len, device, place, .. } => {
                let answer = Answer::Yes { len, device, place, fd: fds.next() };
                self.mappings.answered(self, request, region, answer);
            }
            ToParticipant::NoRegion { request, region, code, why } => {
                self.mappings.answered(self, request, region, Answer::No { code, why });
            }
            ToParticipant::PleaseUnmap { region } => {
                self.note_asked(region);
                self.wants_idle.store(true, Ordering::Relaxed);
                self.waker.nudge();
                self.notices.push(Notice::PleaseUnmap { region });
            }
            ToParticipant::Tickets { answers, .. } => {
                self.desk.tickets_answered(&answers);
                self.announce_change();
            }
            ToParticipant::Forwarded { request, descriptor } => {
                self.desk.forward_answered(request, Forwarded::Yes(Box::new(descriptor)));
                self.announce_change();
            }
            ToParticipant::Declined { request, code, why } => {
                self.desk.forward_answered(request, Forwarded::No(code, why));
                self.announce_change();
            }
            ToParticipant::Revoked { lease } => {
                let lease = LeaseId::new(lease.file, lease.slot, lease.generation.get());
                self.notices.push(Notice::Revoked { lease });
            }
            ToParticipant::Closing => self.notices.push(Notice::Closing),
            ToParticipant::Report { .. }
            | ToParticipant::Snapshot { .. }
            | ToParticipant::Welcome { .. }
            | ToParticipant::Refused { .. } => {}
        }
        Ok(())
    }
}
