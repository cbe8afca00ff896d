//! What has ended: a session, or one of its two sides.

use gpu_api::error::OtherError;
use gpu_api::{Error, ParticipantId};

/// What has ended. [`Error::Other`] carries it.
///
/// # Examples
///
/// ```
/// use gpu_api::Error;
/// use ipc_rc::Gone;
///
/// let error = Error::from(Gone::Session);
/// assert_eq!(Gone::of(&error), Some(Gone::Session));
/// assert_eq!(error.to_string(), "the session is shutting down; open a new one");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Gone {
    /// The producer's process is dead or has closed its session. Held blocks stay readable; no new
    /// ones come.
    #[error("the producer (process {pid}) is gone; connect to its successor")]
    Producer {
        /// Its process.
        pid: u32,
    },
    /// The participant is unknown, dead or gone. Nothing can be granted to it.
    #[error("{0} is gone; share with one that is connected")]
    Participant(ParticipantId),
    /// The session is shutting down.
    #[error("the session is shutting down; open a new one")]
    Session,
}

impl Gone {
    /// Returns what an error says has ended, if it says so.
    pub fn of(error: &Error) -> Option<Gone> {
        let Error::Other(error) = error else {
            return None;
        };
        let error: &(dyn std::error::Error + 'static) = &**error;
        error.downcast_ref().copied()
    }
}

impl OtherError for Gone {
    fn code(&self) -> i32 {
        match self {
            Gone::Producer { .. } => 12,
            Gone::Participant(_) => 13,
            Gone::Session => 16,
        }
    }
}

impl From<Gone> for Error {
    fn from(gone: Gone) -> Error {
        Error::Other(Box::new(gone))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_has_its_text_and_its_number_through_every_error() {
        for (gone, code, text) in [
            (
                Gone::Producer { pid: 7 },
                12,
                "the producer (process 7) is gone; connect to its successor",
            ),
            (
                Gone::Participant(ParticipantId(3)),
                13,
                "participant 3 is gone; share with one that is connected",
            ),
            (
                Gone::Session,
                16,
                "the session is shutting down; open a new one",
            ),
        ] {
            let error = Error::from(gone);
            assert_eq!((error.code(), error.to_string()), (code, text.to_owned()));
            assert_eq!(Gone::of(&error), Some(gone));
        }
        assert_eq!(Gone::of(&Error::Deadline { what: "an answer" }), None);
    }
}
