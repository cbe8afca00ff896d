//! What a broker allows.

use std::collections::HashSet;

use crate::wire::RefusalCode;
use transport::server::Refused;

/// What a broker allows.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of all objects.
    pub bytes: u64,
    /// Bytes of the objects of one user.
    pub bytes_per_uid: u64,
    /// Epochs of a name that are kept.
    pub epochs: usize,
    /// Participants at a time.
    pub participants: usize,
    /// Reads the slots before it publishes; without, the negative control of the tests.
    pub reads_slots: bool,
}

impl Default for Limits {
    /// No limit of bytes; two epochs of each name; 4,096 participants.
    fn default() -> Limits {
        Limits {
            bytes: u64::MAX,
            bytes_per_uid: u64::MAX,
            epochs: 2,
            participants: 4_096,
            reads_slots: true,
        }
    }
}

/// A region of an object.
pub(super) struct Region {
    /// The user that its object belongs to.
    pub owner: u32,
    /// Which memory it is: what two epochs share has one number, and counts once. `None` for one
    /// that is to be made.
    pub number: Option<u64>,
    pub bytes: u64,
}

impl Limits {
    /// Refuses regions of a user that would be more than is allowed beside those that are there.
    pub(super) fn check(
        &self,
        asked: impl Iterator<Item = Region>,
        uid: u32,
        there: impl Iterator<Item = Region>,
    ) -> Result<(), Refused> {
        let mut counted = HashSet::new();
        let mut is_first =
            |region: &Region| region.number.is_none_or(|number| counted.insert(number));
        let (mut all, mut own, mut more) = (0u64, 0u64, 0u64);
        for region in there.filter(&mut is_first) {
            all = all.saturating_add(region.bytes);
            if region.owner == uid {
                own = own.saturating_add(region.bytes);
            }
        }
        for region in asked.filter(is_first) {
            more = more.saturating_add(region.bytes);
        }
        let refuse = |why| Err((RefusalCode::Limit, why));
        if all.saturating_add(more) > self.bytes {
            let limit = self.bytes;
            return refuse(format!(
                "asked for {more} bytes, {all} of the broker's limit of {limit} are taken"
            ));
        }
        if own.saturating_add(more) > self.bytes_per_uid {
            let limit = self.bytes_per_uid;
            return refuse(format!(
                "asked for {more} bytes, {own} of uid {uid}'s limit of {limit} are taken"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_epochs_share_counts_once() {
        let limits = Limits {
            bytes: 30,
            bytes_per_uid: 20,
            ..Limits::default()
        };
        let region = |owner, number, bytes| Region {
            owner,
            number,
            bytes,
        };
        let there = || {
            [
                region(1, Some(1), 10),
                region(1, Some(1), 10),
                region(2, Some(2), 5),
            ]
            .into_iter()
        };
        let check = |asked: Vec<Region>| limits.check(asked.into_iter(), 1, there());
        assert!(
            check(vec![region(1, Some(1), 10), region(1, None, 10)]).is_ok(),
            "10 there, 10 more"
        );
        let why = check(vec![region(1, None, 11)])
            .expect_err("one more than the user's")
            .1;
        assert_eq!(
            why,
            "asked for 11 bytes, 10 of uid 1's limit of 20 are taken"
        );
        let why = check(vec![region(1, None, 16)])
            .expect_err("one more than all")
            .1;
        assert_eq!(
            why,
            "asked for 16 bytes, 15 of the broker's limit of 30 are taken"
        );
    }
}
