//! Objects of several devices that belong together: one for each rank, and all of them or none.
//!
//! ```text
//! GroupWriter::create ─► a writer for each rank ─► commit: all members, then the roll ─► Epoch of the group
//! Group::open ─► the roll names an identity for each rank ─► each rank opens, or advances to, its own
//! ```
//!
//! The *roll* is an object without parts under the group's name; its user bytes are the identities
//! of the members. It is committed after the last member, so a roll that is visible has all its
//! members. A member that was committed for a roll that never came is only an epoch of its own name
//! that no roll mentions.
//!
//! | step | fails, or its process dies | then |
//! |---|---|---|
//! | create of any member | no room on one device | the others are aborted: none is left |
//! | commit of any member | refused, or the broker went | no roll: readers stay with the group's last epoch |
//! | commit of the roll | refused, or `expect` is not met | as above |

// Tests: `crates/broker/tests/objects/objects.rs`.

use super::commit::Commit;
use super::{Client, CreateOptions, Reader, Writer};
use crate::error::{ObjectError, Result};
use crate::object::identity::{Epoch, Identity, check_name};
use crate::object::layout::Layout;
use crate::wire::Selector;

/// What a roll begins with.
const MAGIC: [u8; 8] = *b"GIPCrol1";

/// The members of one epoch of a group, by rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Roll {
    /// The group's name.
    pub name: String,
    /// The group's epoch.
    pub epoch: Epoch,
    /// The member of each rank.
    pub members: Vec<Identity>,
}

impl Roll {
    /// Reads the newest roll of a group.
    ///
    /// # Errors
    ///
    /// As [`Client::open_one`], and [`gpu_api::Error::Invalid`] for an object that is no roll.
    pub fn newest(client: &Client, name: &str) -> Result<Roll> {
        Roll::read(client, &Selector::Latest(name.into()))
    }

    /// Reads a roll.
    ///
    /// # Errors
    ///
    /// As [`newest`](Roll::newest).
    pub fn read(client: &Client, selector: &Selector) -> Result<Roll> {
        let roll = client.open_one(selector)?;
        let invalid = || {
            gpu_api::Error::invalid(
                "the roll of a group",
                format!(
                    "{} other bytes beside {} parts",
                    roll.layout().user().len(),
                    roll.layout().parts().len()
                ),
                "what `GroupWriter::commit` writes",
            )
        };
        let identities = roll
            .layout()
            .user()
            .strip_prefix(&MAGIC)
            .ok_or_else(invalid)?;
        let (members, rest) = identities.as_chunks::<16>();
        if members.is_empty() || !rest.is_empty() || !roll.layout().parts().is_empty() {
            return Err(invalid().into());
        }
        let members = members.iter().map(|member| Identity(*member)).collect();
        Ok(Roll {
            name: roll.name().into(),
            epoch: roll.epoch(),
            members,
        })
    }

    /// Maps the member of a rank, by a client of its device.
    ///
    /// # Errors
    ///
    /// As [`Client::open_one`]; [`gpu_api::Error::Invalid`] for a rank that the group has not.
    pub fn open(&self, rank: usize, client: &Client) -> Result<Reader> {
        client.open_one(&self.selector(rank)?)
    }

    /// Moves the reader of a rank to its member, at the same addresses; says whether it was
    /// another.
    ///
    /// # Errors
    ///
    /// As [`Reader::advance_to`] and [`open`](Roll::open).
    pub fn advance(&self, rank: usize, reader: &mut Reader) -> Result<bool> {
        reader.advance_to(&self.selector(rank)?)
    }

    fn selector(&self, rank: usize) -> Result<Selector> {
        let member = self.members.get(rank).copied().ok_or_else(|| {
            let got = format!("{rank} of a group of {}", self.members.len());
            gpu_api::Error::invalid("a rank", got, "below the number of members")
        })?;
        Ok(Selector::Identity(member))
    }
}

/// The objects of a group while they are filled. A drop without a commit aborts all of them.
#[derive(Debug)]
pub struct GroupWriter {
    name: String,
    /// Of the broker that the roll is committed to.
    coordinator: Client,
    /// The writer of each rank.
    pub writers: Vec<Writer>,
}

impl GroupWriter {
    /// Asks for memory for every rank, each on the device of its client: all of it, or none.
    ///
    /// The member of rank 3 has the name `NAME/3`, and the group's own name is the roll's.
    ///
    /// # Errors
    ///
    /// As [`Client::create`], of the first rank that has no room: then no rank has anything.
    /// [`gpu_api::Error::Invalid`] for a group of none.
    pub fn create(name: &str, ranks: Vec<(Client, Layout)>) -> Result<GroupWriter> {
        check_name("the name of a group", name)?;
        let Some((coordinator, _)) = ranks.first() else {
            let got = "none";
            return Err(
                gpu_api::Error::invalid("the ranks of a group", got, "at least one").into(),
            );
        };
        let coordinator = coordinator.clone();
        let mut writers = Vec::with_capacity(ranks.len());
        for (rank, (client, layout)) in ranks.into_iter().enumerate() {
            // On the way out the drop of the others aborts them.
            writers.push(client.create(&member_name(name, rank), layout)?);
        }
        Ok(GroupWriter {
            name: name.into(),
            coordinator,
            writers,
        })
    }

    /// Commits all members behind the streams that each has named, and then the roll. With `expect`
    /// the group must be at that epoch; 0 stands for a group that has none.
    ///
    /// # Errors
    ///
    /// As [`Commit::wait`]: then readers find the group's last epoch, as before.
    pub fn commit(self, expect: Option<Epoch>) -> Result<Epoch> {
        let identities: Vec<Identity> = self.writers.iter().map(Writer::identity).collect();
        // All are on their way before the first is waited for.
        let commits: Vec<Commit> = self
            .writers
            .into_iter()
            .map(|writer| writer.commit(&[]))
            .collect::<Result<_>>()?;
        let mut failed: Option<ObjectError> = None;
        for commit in commits {
            if let Err(error) = commit.wait() {
                failed.get_or_insert(error);
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let mut user = MAGIC.to_vec();
        identities
            .iter()
            .for_each(|identity| user.extend_from_slice(&identity.0));
        let options = CreateOptions {
            expect,
            ..CreateOptions::default()
        };
        let roll = self
            .coordinator
            .create_with(&self.name, Layout::pack([], &user)?, &options)?;
        roll.commit(&[])?.wait()
    }
}

fn member_name(name: &str, rank: usize) -> String {
    format!("{name}/{rank}")
}
