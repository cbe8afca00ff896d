//! Hearing the producer: by the participant's service, or by a thread that waits for an answer.
//!
//! A thread that waits for an answer reads the socket itself, so that the answer wakes one thread
//! and not two. Meanwhile the service does not watch the socket; the lock says whose turn it is, so
//! packets are obeyed in their order.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu_api::Result;
use rustix::event::{PollFd, PollFlags};

use crate::consumer::connection::link::Link;
use crate::consumer::connection::question::{Answer, Key, No};
use crate::consumer::notice::Notice;
use transport::os::poller::poll_for;
use transport::os::socket::{self, ReceiveOutcome};
use transport::trace_point;
use transport::wire::descriptor::LeaseId;
use transport::wire::message::{MOST_BYTES, RefusalCode, ToParticipant};

/// What there was to hear.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Heard {
    /// A message, which was obeyed, or passed over and logged.
    Message,
    /// Nothing, or a packet that was lost for lack of a descriptor.
    Nothing,
    /// An invalid packet: the producer shut its end for writing, or is broken. Nothing more is
    /// read.
    Nonsense,
    /// The connection has ended.
    End,
}

impl Link {
    /// Waits for a packet, and says whether that is worth while: not when the producer is dead.
    pub fn await_packet(&self, left: Option<Duration>) -> bool {
        let mut fds = [
            PollFd::new(&self.socket, PollFlags::IN),
            PollFd::new(&self.facts.producer_pidfd, PollFlags::IN),
        ];
        // An interruption, or an error, has the socket looked at once more.
        let _ = poll_for(&mut fds, left);
        fds[1].revents().is_empty()
    }

    /// Takes one packet from the socket and does what it says. The caller has the turn.
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
            // An end that is shut for writing reads as an empty packet, each time.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => Heard::Nonsense,
            Err(error) => {
                tracing::warn!(%error, "the producer cannot be read");
                Heard::Nothing
            }
        }
    }

    fn obey(&self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<()> {
        let message = ToParticipant::decode(bytes, fds.len())?;
        let fd = fds.into_iter().next();
        match message {
            ToParticipant::CounterFile {
                request,
                index,
                slots,
            } => {
                let added = self.files.take(&self.facts.gpu, index, slots, fd);
                let said = match &added {
                    Ok(()) => Ok(Answer::Done),
                    Err(error) => Err(No {
                        code: RefusalCode::Failed,
                        why: error.to_string(),
                    }),
                };
                // Announced or asked for: threads that wait for the file have it.
                self.answered(request, said.is_err().then_some(Key::File(index)), said);
                return added;
            }
            ToParticipant::Region {
                request,
                region,
                len,
                device,
                place,
                ..
            } => {
                self.answered(
                    request,
                    Some(Key::Region(region)),
                    Ok(Answer::Region {
                        len,
                        device,
                        place,
                        fd,
                    }),
                );
            }
            ToParticipant::NoRegion {
                request,
                region,
                code,
                why,
            } => {
                self.answered(request, Some(Key::Region(region)), Err(No { code, why }));
            }
            ToParticipant::Forwarded {
                request,
                descriptor,
            } => {
                self.answered(
                    request,
                    Some(Key::Wish(request)),
                    Ok(Answer::Forwarded(Box::new(descriptor))),
                );
            }
            ToParticipant::Fetched { request, .. } => {
                let said = Ok(Answer::Fetched(fd));
                self.answered(request, Some(Key::Wish(request)), said);
            }
            ToParticipant::Declined { request, code, why } => {
                self.answered(request, None, Err(No { code, why }))
            }
            ToParticipant::Noted { request } => self.answered(request, None, Ok(Answer::Done)),
            ToParticipant::Tickets { request, answers } => {
                let (mut table, now) = (self.table(), Instant::now());
                for answer in answers {
                    table.hear(
                        request,
                        Key::Ticket(answer.ticket),
                        Ok(Answer::Ticket(answer.outcome)),
                        now,
                    );
                }
                table.hand_over();
                self.announce_change();
            }
            ToParticipant::PleaseUnmap { region } => {
                self.note_asked(region);
                self.notices.push(Notice::PleaseUnmap { region });
            }
            ToParticipant::Revoked { lease } => {
                let lease = LeaseId::new(lease.file, lease.slot, lease.generation.get());
                self.notices.push(Notice::Revoked { lease });
            }
            ToParticipant::Closing {} => self.notices.push(Notice::Closing),
            ToParticipant::Report { .. }
            | ToParticipant::Snapshot { .. }
            | ToParticipant::Welcome { .. }
            | ToParticipant::Refused { .. } => {}
        }
        Ok(())
    }

    /// Takes in an answer; of a message that names nothing but its request, the row tells what it
    /// is about.
    fn answered(&self, request: u64, key: Option<Key>, said: Result<Answer, No>) {
        let mut table = self.table();
        let passed_over = match key.or_else(|| table.key_of(request)) {
            Some(key) => {
                let passed_over = table.hear(request, key, said, Instant::now());
                if key == Key::Goodbye && passed_over.is_none() {
                    // Under the lock: a thread that says goodbye looks here first.
                    self.farewell.store(true, Ordering::Relaxed);
                    trace_point!("bye");
                }
                passed_over
            }
            None => Some(said),
        };
        table.hand_over();
        // What nobody asked for may be a file of any kind: its close is not for a lock.
        drop(passed_over);
        self.announce_change();
    }
}
