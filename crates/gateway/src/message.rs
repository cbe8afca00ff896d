//! What two gateways say to each other: JSON of at most [`MOST_BYTES`], an answer with two
//! attachments behind it.
//!
//! | question | answer | may it be repeated or come late? |
//! |---|---|---|
//! | [`Ask`]: lease an object | [`Grant`] | the number makes it the same question; late it opens a lease that nobody uses |
//! | [`Renew`]: the lease goes on | yes or no | its number must rise |
//! | [`Confirm`]: was the lease alive all the time, and are these its object's bytes? | yes, no, other bytes, or not yet, with the question's number | changes nothing |
//! | [`Release`]: the lease has ended | yes | lease numbers are never used twice |
//! | [`Fill`]: put pieces into slots of the lease's ring | yes when they are there | the number of each slot must rise |
//! | [`Find`]: who has this name? | [`Has`], or nothing | changes nothing: see `replica::search` |
//! | [`List`]: a page of all objects | [`Listed`], and whether more follow | changes nothing |
//! | the gateways that are there, as the other has heard | their keys | changes nothing |
//! | [`Removed`]: what its home has removed | names and epochs | a removal is for good |
//! | [`Manifest`]: a piece of the object's manifest, where it is long | the piece | changes nothing |
//!
//! Those about a lease name it by [`LeaseId`], which only the gateway that granted it and the
//! process that asked for it know. So a question about a lease that is forged is answered with no.

// Tests: `crates/gateway/tests/protocol.rs`.

use gpu_ipc::broker::{Epoch, Identity};
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::transport::choice::Way;

/// The most bytes of a question.
pub const MOST_BYTES: usize = 4096;
/// The most bytes of an answer: the metadata of an object of many regions.
pub const MOST_ANSWER: usize = 8 << 20;
/// The most bytes of a manifest in one answer; what is longer is asked for in pieces.
pub const MANIFEST_PIECE: usize = 256 << 10;
/// The most bytes of a manifest.
pub const MOST_MANIFEST: usize = 64 << 20;

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
        random_bits().map(Incarnation)
    }
}

impl std::fmt::Display for Incarnation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Identity(self.0).fmt(f)
    }
}

/// Numbers a lease of a gateway: random, so that it cannot be guessed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct LeaseNumber(#[serde(with = "hex")] pub [u8; 16]);

impl LeaseNumber {
    /// Draws one.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] where a sandbox forbids `getrandom`.
    pub fn random() -> Result<LeaseNumber> {
        random_bits().map(LeaseNumber)
    }
}

fn random_bits() -> Result<[u8; 16]> {
    let drawn = Identity::random().map_err(|e| Error::Unavailable {
        what: "random bits".into(),
        why: e.to_string(),
        remedy: "allow getrandom in this sandbox",
    })?;
    Ok(drawn.0)
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

/// Where an object was committed first: a host, and the number of its broker's directory, so that
/// another machine of the same name is another home.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub struct Home {
    /// The host's name.
    pub host: String,
    /// The number.
    pub broker: [u8; 16],
}

impl Home {
    /// Reads what is written in a replica's manifest. One without a number is of no broker.
    pub fn read(text: &str) -> Home {
        let parts = text.rsplit_once('#').and_then(|(host, number)| {
            let number = number.parse::<Identity>().ok()?;
            Some((host, number.0))
        });
        let (host, broker) = parts.unwrap_or((text, [0; 16]));
        Home {
            host: host.into(),
            broker,
        }
    }
}

impl std::fmt::Display for Home {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}#{}", self.host, Identity(self.broker))
    }
}

impl From<Home> for String {
    fn from(home: Home) -> String {
        home.to_string()
    }
}

impl From<String> for Home {
    fn from(text: String) -> Home {
        Home::read(&text)
    }
}

/// Asks whether a gateway's host has a name.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Find {
    /// The name.
    pub name: String,
    /// The epoch; the newest if nothing is said.
    pub epoch: Option<u64>,
}

/// An object that a host has, and how busy it is with it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Has {
    /// Its epoch.
    pub epoch: u64,
    /// Its identity, as hexadecimal digits.
    pub identity: String,
    /// Bytes of memory.
    pub bytes: u64,
    /// Whether it was committed there first.
    pub origin: bool,
    /// Where it was committed first.
    pub home: Home,
    /// Reads of it that take the host's link.
    pub reads: u32,
    /// How many it serves at most at a time.
    pub limit: u32,
    /// Reads of it that were admitted and did not fail.
    pub admitted: u32,
}

/// Asks for a page of all objects of a host.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// Name and epoch of the last object of the former page; none for the first page.
    pub after: Option<(String, u64)>,
}

/// An object of a host.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its epoch.
    pub epoch: u64,
    /// Its identity, as hexadecimal digits.
    pub identity: String,
    /// Bytes of memory.
    pub bytes: u64,
    /// Whether it was committed there first.
    pub origin: bool,
    /// Where it was committed first.
    pub home: Home,
}

/// Asks up to which epochs names were removed at their home.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Removed {
    /// The home's number: another's removals do not count.
    #[serde(with = "hex")]
    pub broker: [u8; 16],
    /// The names.
    pub names: Vec<String>,
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
    /// How many other hosts the asker knows that have it.
    pub others: u32,
    /// Whether the others that have it failed the asker or kept it waiting, so that it is not to be
    /// pointed to them.
    pub last_resort: bool,
}

/// Names a lease of a gateway: no part is ever used again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseId {
    /// The origin's process.
    pub incarnation: Incarnation,
    /// Its number there, which is said to the asker alone.
    pub lease: LeaseNumber,
    /// The process that asked for it.
    pub asker: Incarnation,
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
    /// What it has read; none if it is in memory of a device, and so not compared.
    pub digest: Option<Digest>,
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

/// Asks for a piece of the manifest of a lease's object: of at most [`MANIFEST_PIECE`] bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Which lease.
    pub lease: LeaseId,
    /// The piece's first byte.
    pub from: usize,
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
