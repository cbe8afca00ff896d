//! A question to a producer or a session, and what may answer it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::consumer::claim_error::ClaimError;
use gpu_api::{Access, DeviceUuid, Error, RegionId};
use transport::wire::descriptor::Descriptor;
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{
    DepositId, Heir, Outcome, RefusalCode, RegionPlace, ReportPage, TicketId,
};

/// What a question is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Key {
    Region(RegionId),
    Ticket(TicketId),
    File(u32),
    /// A wish, to forward, deposit or fetch, by a number of the participant's own: two are never the
    /// same.
    Wish(u64),
    /// All of it: the participant goes.
    Goodbye,
    /// What the session holds, from a place on. This and the next are asked on connections of their
    /// own.
    Report(u32),
    /// What the session's source of regions looks like.
    Snapshot,
}

/// The subject of a question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Question {
    /// How to map the region, by the right of a lease.
    Map { access: Access, lease: LeaseAddress },
    /// Whether the producer has noted that the region is not mapped.
    Unmapped,
    /// What the ticket gives.
    Ticket,
    /// Whether the producer has taken back what the ticket gave.
    GiveBack,
    /// For the counter file.
    File,
    /// For a descriptor for somebody else.
    Forward {
        lease: LeaseAddress,
        /// Where in its region the part begins that is forwarded, and the bytes of it.
        part: (u64, u64),
        heir: Heir,
        user: Box<[u8; 64]>,
    },
    /// Whether a descriptor is kept for the one that fetches it.
    Deposit { id: DepositId, file: File },
    /// For a descriptor that is kept.
    Fetch { id: DepositId },
    /// Whether the producer has noted that a deposit or a fetch is over, and whether what was
    /// fetched returns.
    EndDeposit { id: DepositId, returns: bool },
    /// Whether the producer has noted that the participant goes.
    Goodbye,
    /// For a page of what the session holds.
    Report,
    /// For a snapshot.
    Snapshot,
}

/// A descriptor that is sent with a question, each time.
#[derive(Clone, Debug)]
pub(crate) struct File(pub Arc<OwnedFd>);

impl File {
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl PartialEq for File {
    fn eq(&self, other: &File) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for File {}

impl Question {
    /// Says whether it undoes what another question of the same key may have brought about.
    pub fn undoes(&self) -> bool {
        matches!(
            self,
            Question::Unmapped | Question::GiveBack | Question::EndDeposit { .. }
        )
    }

    /// Says whether this can be the answer: what a producer says is input.
    pub fn is_answered_by(&self, said: &Result<Answer, No>) -> bool {
        matches!(
            (self, said),
            (Question::Map { .. }, Ok(Answer::Region { .. }) | Err(_))
                | (Question::Ticket, Ok(Answer::Ticket(_)))
                | (Question::File, Ok(Answer::Done) | Err(_))
                | (Question::Forward { .. }, Ok(Answer::Forwarded(_)) | Err(_))
                | (
                    Question::Unmapped
                        | Question::GiveBack
                        | Question::EndDeposit { .. }
                        | Question::Goodbye,
                    Ok(Answer::Done)
                )
                | (Question::Deposit { .. }, Ok(Answer::Done) | Err(_))
                | (Question::Fetch { .. }, Ok(Answer::Fetched(_)) | Err(_))
                | (Question::Report, Ok(Answer::Report(_)))
                | (Question::Snapshot, Ok(Answer::Snapshot { .. }) | Err(_))
        )
    }
}

/// What the producer said.
#[derive(Debug)]
pub(crate) enum Answer {
    Region {
        len: u64,
        device: DeviceUuid,
        place: RegionPlace,
        fd: Option<OwnedFd>,
    },
    Ticket(Outcome),
    Forwarded(Box<Descriptor>),
    /// `None` of a producer that sent no descriptor with it.
    Fetched(Option<OwnedFd>),
    Report(Box<ReportPage>),
    Snapshot {
        len: u64,
        file: Option<OwnedFd>,
    },
    /// The answer has arrived, or the message was noted.
    Done,
}

/// The producer's no.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct No {
    pub code: RefusalCode,
    pub why: String,
}

impl From<No> for ClaimError {
    fn from(no: No) -> ClaimError {
        ClaimError::refused(no.why, no.code.remedy())
    }
}

impl From<No> for Error {
    fn from(no: No) -> Error {
        Error::refused(no.why, no.code.remedy())
    }
}
