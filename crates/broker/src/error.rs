//! Errors of objects, by what the caller can do.

use crate::object::identity::{Epoch, Identity};
use crate::wire::RefusalCode;

/// An error of an object.
///
/// The cause, where there is one, is in [`source`](std::error::Error::source) and not repeated in
/// the text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// No object of this name is open to this user. List the objects with `gpu-ipc objects`.
    #[error("{name} is not there: {why}; `gpu-ipc objects` lists what is")]
    NotFound {
        /// The object asked for.
        name: String,
        /// The broker's reason.
        why: String,
    },
    /// The name has another epoch than the one that was expected. Open that one and decide again.
    #[error("the commit is refused: {why}; open the epoch that is there, then create anew")]
    Conflict {
        /// Both epochs.
        why: String,
    },
    /// The object does not fit.
    #[error(
        "out of memory: {why}; remove objects, or create with `replace`, which gives the old epoch up first"
    )]
    OutOfMemory {
        /// The bytes asked for, and those available.
        why: String,
    },
    /// The broker refused for another reason.
    #[error("the broker refused: {why}; {remedy}")]
    Refused {
        /// The reason as a number that stays the same in every version.
        refusal: RefusalCode,
        /// The reason.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The broker died while the object was being filled: it is gone, unless the commit had been
    /// asked for. Then [`Client::outcome`](crate::Client::outcome) tells by its identity.
    #[error(
        "the broker went while {identity} was being filled; ask `outcome` if it was committed, else create it anew"
    )]
    WriterLost {
        /// Which object.
        identity: Identity,
    },
    /// The object was aborted before it was committed.
    #[error("{identity} was aborted; create it anew")]
    Aborted {
        /// Which object.
        identity: Identity,
    },
    /// Two epochs have different layouts. Nothing changed; open the other one beside it.
    #[error(
        "epoch {to} of {name} has another layout: {difference}; nothing changed, open it as a reader of its own"
    )]
    LayoutDiffers {
        /// The name.
        name: String,
        /// The epoch that was asked for.
        to: Epoch,
        /// Where they differ first.
        difference: String,
    },
    /// Neither the new memory nor the old could be mapped: the addresses reach nothing.
    #[error("the addresses of {name} are lost: {why}; open it anew")]
    Poisoned {
        /// The name.
        name: String,
        /// The error of the last attempt.
        why: String,
    },
    /// The reader sleeps: its addresses reach nothing.
    #[error("the reader of {name} sleeps; call `wake` first")]
    Asleep {
        /// The name.
        name: String,
    },
    /// What the library below gives.
    #[error(transparent)]
    Gpu(#[from] gpu_api::Error),
}

impl ObjectError {
    /// Returns a number that stays the same in every version: those of [`gpu_api::Error::code`]
    /// where the meaning is the same, and from 201 on what only objects have.
    pub fn code(&self) -> i32 {
        match self {
            ObjectError::OutOfMemory { .. } => 1,
            ObjectError::Refused { .. } => 11,
            ObjectError::NotFound { .. } => 201,
            ObjectError::Conflict { .. } => 202,
            ObjectError::WriterLost { .. } => 203,
            ObjectError::Aborted { .. } => 204,
            ObjectError::LayoutDiffers { .. } => 205,
            ObjectError::Poisoned { .. } => 206,
            ObjectError::Asleep { .. } => 207,
            ObjectError::Gpu(error) => error.code(),
        }
    }
}

/// What calls of this crate return.
pub type Result<T, E = ObjectError> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_its_number_and_its_text() {
        let (name, why) = (|| "model".to_owned(), || "so it is".to_owned());
        let identity = Identity([0xab; 16]);
        let (epoch, difference) = (Epoch(3), "p0 here, p1 there".to_owned());
        let refused = ObjectError::Refused {
            refusal: RefusalCode::Keeper,
            why: why(),
            remedy: RefusalCode::Keeper.remedy(),
        };
        let cases = [
            (
                ObjectError::OutOfMemory { why: why() },
                1,
                "out of memory: so it is; remove objects, or create with",
            ),
            (
                refused,
                11,
                "the broker refused: so it is; start `gpu-ipc keep` with more room, then commit again",
            ),
            (
                ObjectError::NotFound {
                    name: name(),
                    why: why(),
                },
                201,
                "model is not there: so it is; `gpu-ipc objects`",
            ),
            (
                ObjectError::Conflict { why: why() },
                202,
                "the commit is refused: so it is; open the epoch that is there",
            ),
            (
                ObjectError::WriterLost { identity },
                203,
                "the broker went while abababab",
            ),
            (ObjectError::Aborted { identity }, 204, "abababab"),
            (
                ObjectError::LayoutDiffers {
                    name: name(),
                    to: epoch,
                    difference,
                },
                205,
                "epoch 3 of model has another layout: p0 here, p1 there; nothing changed",
            ),
            (
                ObjectError::Poisoned {
                    name: name(),
                    why: why(),
                },
                206,
                "the addresses of model are lost: so it is; open",
            ),
            (
                ObjectError::Asleep { name: name() },
                207,
                "the reader of model sleeps; call `wake` first",
            ),
            (gpu_api::Error::deadline("an answer").into(), 17, ""),
        ];
        for (error, code, text) in cases {
            assert_eq!(error.code(), code, "{error}");
            assert!(error.to_string().starts_with(text), "{error}");
        }
    }
}
