//! Why a claim gave no block.

use crate::gone::Gone;
use gpu_api::Error;

/// Why a claim gave no block. Closed, so that callers handle each.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The call would have to wait, and was asked not to: only from
    /// [`try_claim`](crate::Participant::try_claim). Wait for
    /// [`Notice::TryAgain`](crate::Notice::TryAgain) and call it again within 30 s, or
    /// [`abandon`](crate::Participant::abandon) it.
    #[error(
        "the claim would have to wait; try again when the participant's descriptor is readable"
    )]
    WouldBlock,
    /// The producer took the grant back: cancelled, not claimed in time, or it went away. Have the
    /// block shared again.
    #[error("the grant was taken back by its producer; ask it to share again")]
    Revoked,
    /// The descriptor was claimed before. If by this participant, clone or slice the block that the
    /// first claim gave; a ticket may also have no claims left. Else have the block shared again.
    #[error(
        "the descriptor was claimed before, as often as it can be; clone the block that its claim gave, or have it \
         shared again"
    )]
    AlreadyClaimed,
    /// The lease ended long ago, and its slot serves another. Have the block shared again.
    #[error("the descriptor is stale: its lease has ended; ask the producer to share again")]
    Stale,
    /// The producer is dead or has closed its session. Held blocks stay readable. Connect to its
    /// successor.
    #[error("the producer is gone; connect to its successor")]
    ProducerGone,
    /// The stream is being captured into a graph, which may run more than once. Claim before the
    /// capture begins, or on another stream.
    #[error("the stream is being captured into a graph; claim before the capture")]
    Capturing,
    /// This is a forked child of the process that connected. Connect anew in the child.
    #[error("the participant belongs to the parent process; connect anew in the child")]
    Forked,
    /// The descriptor is for another participant, or the other side is broken: the text says which.
    #[error("{why}; {remedy}")]
    Refused {
        /// Both sides of what differs.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The descriptor is malformed, the deadline passed, or the driver or the system failed.
    /// Nothing is held. The same claim can be tried again, unless the driver refused the wait on a
    /// stream, which comes last: that ends the lease. After [`Error::Deadline`] nothing is lost; a
    /// grant that is not claimed lapses.
    #[error(transparent)]
    Backend(Error),
}

impl ClaimError {
    /// Makes the error of a refused claim.
    pub(crate) fn refused(why: impl Into<String>, remedy: &'static str) -> ClaimError {
        let why = why.into();
        ClaimError::Refused { why, remedy }
    }

    /// Returns a number that stays the same in every version, for other languages. Variants that
    /// [`Error`] has too have its number.
    pub fn code(&self) -> i32 {
        match self {
            ClaimError::WouldBlock => 101,
            ClaimError::Revoked => 102,
            ClaimError::AlreadyClaimed => 103,
            ClaimError::Stale => 104,
            ClaimError::Refused { .. } => 105,
            ClaimError::ProducerGone => 12,
            ClaimError::Forked => 14,
            ClaimError::Capturing => 15,
            ClaimError::Backend(error) => error.code(),
        }
    }
}

impl From<Error> for ClaimError {
    fn from(error: Error) -> ClaimError {
        match error {
            error if matches!(Gone::of(&error), Some(Gone::Producer { .. })) => {
                ClaimError::ProducerGone
            }
            Error::Capturing { .. } => ClaimError::Capturing,
            Error::Forked { .. } => ClaimError::Forked,
            error => ClaimError::Backend(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_says_what_to_do_and_no_number_changes() {
        let refused = ClaimError::Refused {
            why: "for another".into(),
            remedy: "claim it there",
        };
        let deadline = Error::deadline("the producer's answer");
        for (error, code, text) in [
            (
                ClaimError::WouldBlock,
                101,
                "the claim would have to wait; try again when the participant's descriptor is readable",
            ),
            (
                ClaimError::Revoked,
                102,
                "the grant was taken back by its producer; ask it to share again",
            ),
            (
                ClaimError::AlreadyClaimed,
                103,
                "the descriptor was claimed before, as often as it can be; clone the block that its claim gave, or \
                 have it shared again",
            ),
            (
                ClaimError::Stale,
                104,
                "the descriptor is stale: its lease has ended; ask the producer to share again",
            ),
            (
                ClaimError::ProducerGone,
                12,
                "the producer is gone; connect to its successor",
            ),
            (
                ClaimError::Capturing,
                15,
                "the stream is being captured into a graph; claim before the capture",
            ),
            (
                ClaimError::Forked,
                14,
                "the participant belongs to the parent process; connect anew in the child",
            ),
            (refused, 105, "for another; claim it there"),
            (
                deadline.into(),
                17,
                "the deadline passed while waiting for the producer's answer; ask again",
            ),
        ] {
            assert_eq!((error.code(), error.to_string().as_str()), (code, text));
        }
    }
}
