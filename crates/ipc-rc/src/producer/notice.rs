//! What a session tells its application.

use gpu_api::ParticipantId;

use crate::notices::Vital;

/// How a participant went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Departure {
    /// It said goodbye: it was closed, or its program ended in order.
    Goodbye,
    /// Its process has ended without a goodbye, and the kernel proves it.
    Died,
    /// Its connection has ended without a goodbye, and its process lives. It held nothing.
    ConnectionLost,
}

/// Something a producer may want to know at once.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SessionNotice {
    /// A participant is connected.
    Joined {
        /// Its number.
        participant: ParticipantId,
    },
    /// A participant is gone, and nothing that it held is held any more. Other participants, and the
    /// session, go on.
    Left {
        /// Its number.
        participant: ParticipantId,
        /// What it called itself, or else the command that it ran.
        name: String,
        /// How it went.
        how: Departure,
    },
    /// The session itself has failed, and no participant: its own thread panicked: see the log. Participants are told that the producer is
    /// gone, nothing more can be shared, and what they still hold stays taken until this process
    /// ends.
    Failed,
    /// A block is released of which a [`wait_released`](crate::SentBlock::wait_released) said that
    /// it was not.
    TryAgain,
    /// A [`collect`](crate::Session::collect) returns tokens of adopted memory that no process
    /// holds or maps.
    TokensReturned,
}

impl Vital for SessionNotice {
    fn is_vital(&self) -> bool {
        !matches!(
            self,
            SessionNotice::Joined { .. } | SessionNotice::Left { .. }
        )
    }
}
