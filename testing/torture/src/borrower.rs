//! Taking by the library: a participant, and its claims.

use std::sync::Arc;
use std::time::Duration;

use gpu_ipc::host::HostBackend;
use gpu_ipc::{
    ClaimError, Error, Gone, Participant, ParticipantId, ReceivedBlock, State, To, Wait,
};

use rustix::process::{Resource, Rlimit, setrlimit};

use super::lender::QUARANTINE;
use super::message::{self, Message};
use super::seat::Seat;
use super::shared_stats::{Board, Count, microseconds};
use super::sides::{Borrower, Taken};
use gpu_ipc_cli::copier::Copier;
use gpu_ipc_cli::device::explain;
use harness::rng::Dice;

/// How long a claim may take: a producer may be stopped, or dead.
const CLAIMING: Duration = Duration::from_secs(4);
/// Writes that are under way when a process dies.
const WRITES: u32 = 50;
/// What a late write begins with; below it is when its process died, in microseconds.
const LATE: u64 = 0x6666 << 48;
/// What work under way writes.
const SCRIBBLE: u8 = 0x66;

/// A participant of one producer's session.
pub struct Leases {
    board: &'static Board,
    host: Option<Arc<HostBackend>>,
    copier: Copier,
    participant: Participant,
}

impl Leases {
    /// Connects; `None` when that fails as it may.
    pub fn open(seat: &Seat, dice: &mut Dice) -> Result<Option<Leases>, String> {
        let device = seat.gpu()?;
        let copier = Copier::new(&device.gpu).map_err(|e| explain(&e))?;
        if seat.lasts.is_none() && dice.in_thousand(100) {
            few_files(dice)?;
        }
        let path = message::session(&seat.dir, seat.producer);
        let mut builder = Participant::builder(device.gpu.clone()).timeout(Some(CLAIMING));
        if dice.in_thousand(200) {
            builder = builder.mapping_cache(0, 0);
        }
        match builder.connect(path) {
            Ok(participant) => Ok(Some(Leases {
                board: seat.board,
                host: device.host,
                copier,
                participant,
            })),
            Err(Error::Refused { .. } | Error::Deadline { .. }) => Ok(None),
            Err(error) if Gone::of(&error).is_some() => Ok(None),
            Err(error) if is_few_files(&error) => {
                seat.board.count(Count::FewFiles);
                Ok(None)
            }
            // It died, or is stopped and its backlog is full.
            Err(Error::Connect { .. }) => Ok(None),
            Err(error) => Err(explain(&error)),
        }
    }
}

/// Leaves this process only a few descriptors more than it has.
fn few_files(dice: &mut Dice) -> Result<(), String> {
    let open = std::fs::read_dir("/proc/self/fd").map_or(16, Iterator::count) as u64;
    let most = open + 3 + dice.below(16);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(most),
            maximum: Some(most),
        },
    )
    .map_err(|e| format!("setrlimit: {e}"))
}

/// Says whether a call failed for want of a descriptor.
pub fn is_few_files(error: &Error) -> bool {
    let source = match error {
        Error::System { source, .. }
        | Error::Connect {
            source: Some(source),
            ..
        } => source,
        _ => return false,
    };
    // The kernel counts what is on its way against the same limit, for all processes of the user
    // together: what visitors sent to a stopped producer, too.
    matches!(
        source.raw_os_error(),
        Some(libc::EMFILE | libc::ETOOMANYREFS)
    )
}

impl Borrower for Leases {
    type Held = ReceivedBlock;

    fn participant(&self) -> u64 {
        self.participant.id().0
    }

    fn take(&mut self, message: &Message, dice: &mut Dice) -> Result<Taken<ReceivedBlock>, String> {
        let wait = if dice.in_thousand(700) {
            Wait::Stream(self.copier.stream())
        } else {
            Wait::Host
        };
        match self.participant.claim(&message.bytes, wait, Some(CLAIMING)) {
            Ok(block) => Ok(Taken::Held(block)),
            Err(ClaimError::AlreadyClaimed) => Ok(Taken::Refused),
            Err(ClaimError::ProducerGone) => Ok(Taken::Gone),
            // It was for another, came late, or met a stopped producer.
            Err(
                ClaimError::Refused { .. }
                | ClaimError::Revoked
                | ClaimError::Stale
                | ClaimError::WouldBlock,
            ) => Ok(Taken::Nothing),
            Err(ClaimError::Backend(Error::Deadline { .. } | Error::Exhausted { .. })) => {
                Ok(Taken::Nothing)
            }
            Err(ClaimError::Backend(error)) if is_few_files(&error) => {
                self.board.count(Count::FewFiles);
                Ok(Taken::Nothing)
            }
            Err(error) => Err(explain(&error)),
        }
    }

    fn is_intact(&mut self, held: &ReceivedBlock, message: &Message) -> Result<bool, String> {
        let intact = self
            .copier
            .holds(held, message.stamp)
            .map_err(|e| explain(&e))?;
        // Of what its producer never finished nothing is promised.
        if intact || held.state() == State::Poisoned {
            return Ok(true);
        }
        // A late write says when its process died. A block that was allocated when the quarantine
        // was over is nobody's mistake but the machine's; if anything else in it has changed, too,
        // it is somebody's.
        let is_late = |word: u64| {
            let died = word.checked_sub(LATE);
            died.is_some_and(|died| {
                message.since >= died.saturating_add(QUARANTINE.as_micros() as u64)
            })
        };
        let lawful = self
            .copier
            .differences(message.stamp)
            .all(|(_, word)| is_late(word));
        if lawful {
            self.board.count(Count::TooLate);
        }
        Ok(lawful)
    }

    fn describe(&self, held: &ReceivedBlock, message: &Message) -> String {
        let changed = self.copier.differences(message.stamp).count();
        let (index, first) = self
            .copier
            .differences(message.stamp)
            .next()
            .unwrap_or((0, 0));
        let died = (first >> 48 == LATE >> 48)
            .then(|| format!(", of one that died at {} us", first - LATE));
        let (state, died) = (held.state(), died.unwrap_or_default());
        format!(
            "{state:?}, {changed} of {} words, the first of them word {index}: {first:#018x}{died}",
            held.len() / 8
        )
    }

    fn is_gone(&self) -> bool {
        self.participant.is_producer_gone()
    }

    fn forward(
        &mut self,
        held: &ReceivedBlock,
        to: u64,
        message: &Message,
    ) -> Result<Option<Message>, String> {
        match held.forward(To::Participant(ParticipantId(to)), Some(CLAIMING)) {
            Ok(descriptor) => Ok(Some(Message {
                grant: self.board.next_grant(),
                stamp: message.stamp,
                since: message.since,
                most: 1,
                exclusive: false,
                across: message.across,
                bytes: descriptor.as_bytes().to_vec(),
            })),
            // The third, or the producer, may be gone or stopped.
            Err(
                ClaimError::Refused { .. }
                | ClaimError::ProducerGone
                | ClaimError::Revoked
                | ClaimError::Stale
                | ClaimError::WouldBlock
                | ClaimError::Backend(_),
            ) => Ok(None),
            Err(error) => Err(explain(&error)),
        }
    }

    fn memory(&self, held: &ReceivedBlock) -> Option<(*mut u8, usize)> {
        let len = usize::try_from(held.len()).ok()?;
        self.host
            .as_ref()
            .map(|_| (held.device_ptr().0 as *mut u8, len))
    }

    fn write_late(&mut self, held: &ReceivedBlock, delay: Duration) -> Result<bool, String> {
        if let Some(host) = &self.host {
            return match host.arm_late_write(
                held.device_ptr(),
                &(LATE + microseconds()).to_le_bytes(),
                delay,
            ) {
                Ok(()) => Ok(true),
                // Its helper process needs descriptors too.
                Err(Error::System { .. }) => Ok(false),
                Err(error) => Err(explain(&error)),
            };
        }
        self.copier
            .overwrite(held, SCRIBBLE, WRITES)
            .map_err(|e| explain(&e))?;
        Ok(true)
    }
}
