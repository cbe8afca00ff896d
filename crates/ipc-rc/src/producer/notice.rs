//! What a session tells its application.

use gpu_api::ParticipantId;

use crate::notices::Vital;

/// Something a producer may want to know at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SessionNotice {
    /// A participant is connected.
    Joined {
        /// Its number.
        participant: ParticipantId,
    },
    /// A participant is gone: it said goodbye or died, and nothing that it held is held any more.
    Left {
        /// Its number.
        participant: ParticipantId,
    },
    /// The session's own thread panicked: see the log. Participants are told that the producer is
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
