//! What two gateways say to each other: JSON of at most [`MOST_BYTES`], an answer with two
//! attachments behind it.
//!
//! | question | answer | may it be repeated or come late? |
//! |---|---|---|
//! | [`Ask`]: lease an object | [`Grant`] | the number makes it the same question; late it opens a lease that nobody uses |
//! | [`Renew`]: the lease goes on | yes or no | its number must rise |
//! | [`Confirm`]: was the lease alive all the time? | yes or no, with the question's number | changes nothing |
//! | [`Release`]: the lease has ended | yes | lease numbers are never used twice |
//! | [`Fill`]: put pieces into slots of the lease's ring | yes when they are there | the number of each slot must rise |

// Tests: `crates/gateway/tests/protocol.rs`.

use gpu_ipc::broker::{Epoch, Identity};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::transport::choice::Way;

/// The most bytes of a question.
pub const MOST_BYTES: usize = 4096;
/// The most bytes of an answer: a manifest of 64 MiB, and metadata.
pub const MOST_ANSWER: usize = (64 << 20) + (1 << 20);

/// Numbers a gateway's process: random, so that its successor at the same address is another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Incarnation(#[serde(with = "hex")] pub [u8; 16]);

impl Incarnation {
    /// Draws one.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where a sandbox forbids `getrandom`.
    pub fn random() -> Result<Incarnation> {
        let drawn = Identity::random().map_err(|e| Error::Unavailable {
            what: "random bits".into(),
            why: e.to_string(),
            remedy: "allow getrandom in this sandbox",
        })?;
        Ok(Incarnation(drawn.0))
    }
}

impl std::fmt::Display for Incarnation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Identity(self.0).fmt(f)
    }
}

/// Which object is asked for.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// Its epoch; the newest if nothing is said.
    pub epoch: Option<u64>,
    /// Its identity, where the asker knows it.
    #[serde(with = "hex_or_none")]
    pub identity: Option<[u8; 16]>,
}

/// Whether something that was refused or failed is worth another attempt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Again {
    /// It is, as soon as somebody has room: nothing has failed.
    Busy,
    /// It is.
    Later,
    /// It will be the same.
    Never,
}

/// Asks for a lease.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ask {
    /// The process that asks.
    pub asker: Incarnation,
    /// Its host, which the limits count by: each pull is a process of its own.
    pub host: String,
    /// The asker's number of this question; the same question has the same.
    pub number: u64,
    /// What for.
    pub wanted: Wanted,
    /// Whether the others that have it failed the asker or kept it waiting, so that it is not to be
    /// pointed to them.
    pub last_resort: bool,
}

/// Names a lease of a gateway: neither half is ever used again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseId {
    /// The origin's process.
    pub incarnation: Incarnation,
    /// Its number there.
    pub lease: u64,
}

/// Asks whether a lease is alive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Confirm {
    /// Which lease.
    pub lease: LeaseId,
    /// Of which object.
    #[serde(with = "hex")]
    pub identity: [u8; 16],
    /// The asker's number, drawn after the last byte was read: an answer counts for this question
    /// alone.
    pub number: u64,
}

/// Lets a lease go on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Renew {
    /// Which lease.
    pub lease: LeaseId,
    /// Rises with each renewal, so that an old one renews nothing.
    pub number: u64,
}

/// Asks for pieces of the object in slots of the ring that the lease has.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fill {
    /// Which lease.
    pub lease: LeaseId,
    /// Which of the lease's rings.
    pub way: Way,
    /// Rises with each question, so that an old one writes to no slot that is read.
    pub number: u64,
    /// A slot each, the first byte of its piece, counted through all regions of the object, and how
    /// many there are.
    pub pieces: Vec<(usize, u64, u64)>,
}

/// Ends a lease.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// Which lease.
    pub lease: LeaseId,
}

/// A lease, as the machines of both sides see it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Grant {
    /// The lease.
    pub lease: LeaseId,
    /// The object that it holds.
    #[serde(with = "hex")]
    pub identity: [u8; 16],
    /// Its epoch.
    pub epoch: u64,
    /// How long the lease lives without a renewal, in milliseconds.
    pub lives_ms: u64,
}

impl Grant {
    /// Returns the object.
    pub fn identity(&self) -> Identity {
        Identity(self.identity)
    }

    /// Returns its epoch.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch)
    }
}

/// 16 bytes as 32 hexadecimal digits.
pub(crate) mod hex {
    use gpu_ipc::broker::Identity;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(bytes: &[u8; 16], to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&Identity(*bytes))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<[u8; 16], D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(from)?;
        text.parse::<Identity>()
            .map(|identity| identity.0)
            .map_err(D::Error::custom)
    }
}

/// The same, or nothing.
pub(crate) mod hex_or_none {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Bytes(#[serde(with = "super::hex")] [u8; 16]);

    pub fn serialize<S: Serializer>(bytes: &Option<[u8; 16]>, to: S) -> Result<S::Ok, S::Error> {
        bytes.map(Bytes).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<[u8; 16]>, D::Error> {
        Ok(Option::<Bytes>::deserialize(from)?.map(|bytes| bytes.0))
    }
}
