//! Errors of a gateway, by what the caller can do.

/// An error of a gateway.
///
/// The cause, where there is one, is in [`source`](std::error::Error::source) and not repeated in
/// the text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Something that this host lacks: a library, a device, an address.
    #[error("{what} cannot be had: {why}; {remedy}")]
    Unavailable {
        /// What is missing.
        what: String,
        /// Why.
        why: String,
        /// How to get it.
        remedy: &'static str,
    },
    /// A transfer has ended with an error: nothing is written to its destination any more.
    #[error("the transfer failed: {why}; the object is read again from the start")]
    Transfer {
        /// What the transport says.
        why: String,
    },
    /// The other gateway said something that makes no sense.
    #[error(
        "{what} of the other gateway is {got}, and must be {must}; run the same version on both hosts"
    )]
    Malformed {
        /// Which value.
        what: &'static str,
        /// What came.
        got: String,
        /// What is allowed.
        must: &'static str,
    },
    /// What a caller gave makes no sense.
    #[error("{what} is {got}, and must be {must}")]
    Invalid {
        /// Which value.
        what: &'static str,
        /// What came.
        got: String,
        /// What is allowed.
        must: &'static str,
    },
}

/// What calls of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
