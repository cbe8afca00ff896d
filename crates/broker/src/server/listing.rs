//! The list of a broker's objects and their readers, as JSON.

use serde::{Deserialize, Serialize};

/// A broker and its objects.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Listing {
    /// The broker's process, as it counts itself.
    pub pid: u32,
    /// Seconds since it started.
    pub age_s: u64,
    /// `none`, `absent` or `fed`.
    pub keeper: String,
    /// Bytes of all objects; a region that two epochs share counts once, and after a restart of the
    /// broker for each.
    pub bytes: u64,
    /// The limit of them; `None` without.
    pub limit: Option<u64>,
    /// Objects that were found whole at the start.
    pub restored: u64,
    /// Descriptors that belonged to no whole object, and were closed at the start.
    pub orphans: u64,
    /// Commits since the start.
    pub commits: u64,
    /// Opens since the start.
    pub opens: u64,
    /// Objects that went because their writer died.
    pub aborted: u64,
    /// The objects that the asker may know of.
    pub objects: Vec<Row>,
    /// Removals among the asker's names.
    #[serde(default)]
    pub removed: Vec<Removed>,
}

/// An object.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its epoch; 0 before its commit.
    pub epoch: u64,
    /// Its identity, in hexadecimal.
    pub identity: String,
    /// The host that it is a replica from; `None` for an object that was committed here.
    #[serde(default)]
    pub home: Option<String>,
    /// Bytes of memory; a region that two epochs share counts for each.
    pub bytes: u64,
    /// The user that owns it.
    pub owner: u32,
    /// `making`, `filling`, `keeping`, `visible` or `scratch`.
    pub state: String,
    /// Its writer.
    pub writer: Option<Process>,
    /// Its readers.
    pub readers: Vec<Process>,
}

/// A name that was removed up to an epoch, for good.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Removed {
    /// The name.
    pub name: String,
    /// The host that it is written on; `None` for this one.
    pub home: Option<String>,
    /// The last epoch that was removed with all before it.
    pub up_to: u64,
}

/// A participant, for people.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Process {
    /// Its number as the broker sees it; 0 from another namespace.
    pub pid: u32,
    /// The name of its command.
    pub command: String,
    /// The name that it gave itself.
    pub name: String,
}
