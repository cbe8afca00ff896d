//! What became of a pull, for people and programs.

use serde::{Deserialize, Serialize};

use crate::transport::choice::Tried;
use crate::transport::choice::{Land, Way};

/// What became of it, as data.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// The name.
    pub name: String,
    /// Its epoch.
    pub epoch: u64,
    /// Its identity.
    pub identity: String,
    /// The host that it was read from.
    pub from: String,
    /// The host that committed it first.
    pub home: String,
    /// Bytes of the object.
    pub bytes: u64,
    /// Bytes that were compared with the origin's digest. Those in memory of a device are not.
    pub checked: u64,
    /// Bytes a second while it was read, in 10^9.
    pub gb_s: f64,
    /// Seconds in all.
    pub seconds: f64,
    /// Attempts before the last.
    pub retries: u32,
    /// It was here already.
    pub was_here: bool,
    /// How the bytes were carried.
    pub transport: String,
    /// The way that they took; none for what was here, and for objects too small for a choice.
    pub way: Option<Way>,
    /// Where the bytes of a ring landed; none without a ring.
    pub land: Option<Land>,
    /// What each way was found to do.
    pub ways: Vec<Tried>,
    /// What its time went to.
    pub steps: Steps,
}

/// What the seconds of the last attempt went to.
#[derive(Clone, Copy, Default, Debug, Serialize, Deserialize)]
pub struct Steps {
    /// The question for a lease: the origin opens the object, registers it and fills its rings.
    pub lease: f64,
    /// The object is made at this host's broker and registered.
    pub create: f64,
    /// Slots are taken and registered on this side.
    pub stage: f64,
    /// Trials of ways.
    pub trials: f64,
    /// The read.
    pub read: f64,
    /// The read through a ring, while a slot or more was read.
    pub ring_reading: f64,
    /// While none was, because the origin was waited for.
    pub ring_filling: f64,
    /// While none was, because copies to the object were waited for.
    pub ring_copying: f64,
    /// Questions to fill slots that were answered.
    pub fills: u64,
    /// The time from such a question to its answer, in mean.
    pub fill: f64,
    /// What came by a network card is made visible.
    pub flush: f64,
    /// What came is digested.
    pub digest: f64,
    /// The confirmation.
    pub confirm: f64,
    /// The commit.
    pub commit: f64,
}

/// Why a pull ended without its object, for programs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// All gateways were asked, and none has it.
    NotFound,
    /// No gateway that answered has it, and some did not answer, or none was reached.
    Unreached,
    /// All that have it were busy, or another process of this host was pulling it, for as long as
    /// the caller waits.
    Busy,
    /// This host's broker does not take it.
    Refused,
    /// It could not be read, confirmed or committed.
    #[default]
    Failed,
    /// A transfer may be writing yet: this process must end.
    Stuck,
}

/// A pull that ended without its object.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// For programs.
    pub kind: Kind,
    /// For people.
    pub why: String,
}
