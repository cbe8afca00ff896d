//! The memory of all objects: what each region takes, who pays for it, and how many objects it is part
//! of. Kept at each change, so that a question costs the same however many objects there are.

use std::collections::{BTreeMap, HashMap, HashSet};

use gpu_api::DeviceUuid;

use crate::server::limits::Limits;
use crate::server::listing::Usage;
use crate::wire::RefusalCode;
use transport::server::Refused;

#[derive(Debug)]
struct Region {
    owner: u32,
    device: DeviceUuid,
    bytes: u64,
    objects: u32,
}

/// The memory of all objects. Two epochs that share a region have the same number for it: it counts
/// once.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    regions: HashMap<u64, Region>,
    users: BTreeMap<u32, Usage>,
    devices: HashMap<DeviceUuid, u64>,
    bytes: u64,
}

/// What an object would take.
#[derive(Debug)]
pub(super) struct Asked {
    /// The user that pays.
    pub uid: u32,
    /// The device that it would lie on.
    pub device: DeviceUuid,
    /// All of that device's memory.
    pub device_bytes: u64,
    /// The number of each region that is there already, and the bytes of all.
    pub regions: Vec<(Option<u64>, u64)>,
    /// The regions of the objects that go first, once for each object.
    pub given_up: Vec<u64>,
}

impl Ledger {
    /// Counts an object of a user: numbers and bytes of its regions.
    pub(super) fn add(
        &mut self,
        owner: u32,
        device: DeviceUuid,
        regions: impl Iterator<Item = (u64, u64)>,
    ) {
        let user = self.users.entry(owner).or_insert(Usage {
            uid: owner,
            ..Usage::default()
        });
        user.objects += 1;
        for (number, bytes) in regions {
            let region = self.regions.entry(number).or_insert(Region {
                owner,
                device,
                bytes,
                objects: 0,
            });
            region.objects += 1;
            if region.objects == 1 {
                self.bytes += bytes;
                *self.devices.entry(device).or_default() += bytes;
                user.bytes += bytes;
            }
        }
    }

    /// Counts an object no more.
    pub(super) fn remove(&mut self, owner: u32, regions: impl Iterator<Item = (u64, u64)>) {
        for (number, _) in regions {
            let Some(region) = self.regions.get_mut(&number) else {
                continue;
            };
            region.objects -= 1;
            if region.objects == 0 {
                self.bytes -= region.bytes;
                if let Some(bytes) = self.devices.get_mut(&region.device) {
                    *bytes -= region.bytes;
                }
                if let Some(user) = self.users.get_mut(&region.owner) {
                    user.bytes -= region.bytes;
                }
                self.regions.remove(&number);
            }
        }
        if let Some(user) = self.users.get_mut(&owner) {
            user.objects -= 1;
            if user.objects == 0 {
                self.users.remove(&owner);
            }
        }
    }

    /// Returns the bytes of all objects.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns what a user's objects take.
    pub(super) fn usage(&self, uid: u32) -> Usage {
        self.users.get(&uid).cloned().unwrap_or(Usage {
            uid,
            ..Usage::default()
        })
    }

    /// Lists what each user's objects take.
    pub(super) fn users(&self) -> Vec<Usage> {
        self.users.values().cloned().collect()
    }

    /// Returns the bytes that would be free if some regions were given up, once for each object
    /// that has them, and those of `stays` were not.
    pub(super) fn freed(&self, given_up: &[u64], stays: &HashSet<u64>) -> u64 {
        let mut times: HashMap<u64, u32> = HashMap::new();
        given_up
            .iter()
            .for_each(|number| *times.entry(*number).or_default() += 1);
        let freed = times.into_iter().filter_map(|(number, times)| {
            let region = self.regions.get(&number)?;
            (region.objects == times && !stays.contains(&number)).then_some(region.bytes)
        });
        freed.sum()
    }

    /// Says whether memory for a user is beyond what that user may have.
    pub(super) fn presses_user(&self, limits: &Limits, asked: &Asked) -> bool {
        let limits = Limits {
            bytes: u64::MAX,
            device_percent: 100,
            bytes_per_uid: limits.bytes_per_uid,
            ..Limits::default()
        };
        let unbounded = Asked {
            device_bytes: u64::MAX,
            regions: asked.regions.clone(),
            given_up: asked.given_up.clone(),
            ..*asked
        };
        self.check(&limits, &unbounded).is_err()
    }

    /// Refuses memory for a user beyond what is allowed beside what is there.
    pub(super) fn check(&self, limits: &Limits, asked: &Asked) -> Result<(), Refused> {
        let numbers: HashSet<u64> = asked
            .regions
            .iter()
            .filter_map(|(number, _)| *number)
            .collect();
        let freed = self.freed(&asked.given_up, &numbers);
        let new = asked.regions.iter().filter(|(number, _)| number.is_none());
        let more = new.fold(0u64, |more, (_, bytes)| more.saturating_add(*bytes));
        let uid = asked.uid;
        let (all, own) = (
            self.bytes.saturating_sub(freed),
            self.usage(uid).bytes.saturating_sub(freed),
        );
        let refuse = |why| Err((RefusalCode::Limit, why));
        let on_device = self.devices.get(&asked.device).copied().unwrap_or(0);
        let (there, has) = (on_device.saturating_sub(freed), asked.device_bytes);
        if there.saturating_add(more) > has {
            let why = format!("asked for {more} bytes, {there} of the device's {has} are taken");
            return Err((RefusalCode::OutOfMemory, why));
        }
        let percent = limits.device_percent;
        let limit = (u128::from(has) * u128::from(percent) / 100) as u64;
        if there.saturating_add(more) > limit {
            return refuse(format!(
                "asked for {more} bytes, {there} of {limit} are taken, which is {percent}% of the device"
            ));
        }
        if all.saturating_add(more) > limits.bytes {
            let limit = limits.bytes;
            return refuse(format!(
                "asked for {more} bytes, {all} of the broker's limit of {limit} are taken"
            ));
        }
        if own.saturating_add(more) > limits.bytes_per_uid {
            let limit = limits.bytes_per_uid;
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

    const DEVICE: DeviceUuid = DeviceUuid([0; 16]);

    fn ledger() -> Ledger {
        let mut ledger = Ledger::default();
        ledger.add(1, DEVICE, [(1, 10)].into_iter());
        ledger.add(1, DEVICE, [(1, 10)].into_iter());
        ledger.add(2, DEVICE, [(2, 5)].into_iter());
        ledger
    }

    #[test]
    fn what_cannot_fit_a_device_is_refused_before_anything_goes() {
        let limits = Limits {
            device_percent: 50,
            ..Limits::default()
        };
        let check = |device, bytes, given_up| {
            let asked = Asked {
                uid: 1,
                device,
                device_bytes: 40,
                regions: vec![(None, bytes)],
                given_up,
            };
            ledger().check(&limits, &asked)
        };
        check(DEVICE, 5, vec![]).expect("20 of 20");
        check(DEVICE, 15, vec![1, 1]).expect("10 go first");
        check(DeviceUuid([1; 16]), 20, vec![]).expect("another device");
        let why = |refused: Result<(), Refused>| refused.expect_err("too much");
        assert_eq!(
            why(check(DEVICE, 6, vec![])),
            (
                RefusalCode::Limit,
                "asked for 6 bytes, 15 of 20 are taken, which is 50% of the device".into()
            )
        );
        assert_eq!(
            why(check(DEVICE, 36, vec![1, 1])),
            (
                RefusalCode::OutOfMemory,
                "asked for 36 bytes, 5 of the device's 40 are taken".into()
            )
        );
    }

    #[test]
    fn what_two_epochs_share_counts_once() {
        let limits = Limits {
            bytes: 30,
            bytes_per_uid: 20,
            ..Limits::default()
        };
        let check = |regions: Vec<(Option<u64>, u64)>, given_up: Vec<u64>| {
            ledger().check(
                &limits,
                &Asked {
                    uid: 1,
                    device: DEVICE,
                    device_bytes: u64::MAX,
                    regions,
                    given_up,
                },
            )
        };
        assert!(
            check(vec![(Some(1), 10), (None, 10)], vec![]).is_ok(),
            "10 there, 10 more"
        );
        let why = |refused: Result<(), Refused>| refused.expect_err("too much").1;
        assert_eq!(
            why(check(vec![(None, 11)], vec![])),
            "asked for 11 bytes, 10 of uid 1's limit of 20 are taken"
        );
        assert_eq!(
            why(check(vec![(None, 16)], vec![])),
            "asked for 16 bytes, 15 of the broker's limit of 30 are taken"
        );
        assert!(check(vec![(None, 20)], vec![1, 1]).is_ok(), "both go first");
        assert!(
            check(vec![(None, 20)], vec![1]).is_err(),
            "one of two keeps it"
        );
        assert!(
            check(vec![(Some(1), 10), (None, 11)], vec![1, 1]).is_err(),
            "it is taken over"
        );
    }

    #[test]
    fn what_was_added_and_removed_leaves_nothing() {
        let mut ledger = ledger();
        assert_eq!((ledger.bytes(), ledger.users().len()), (15, 2));
        let own = ledger.usage(1);
        assert_eq!((own.objects, own.bytes), (2, 10));
        for _ in 0..2 {
            ledger.remove(1, [(1, 10)].into_iter());
        }
        ledger.remove(2, [(2, 5)].into_iter());
        assert_eq!((ledger.bytes(), ledger.users()), (0, Vec::new()));
        assert!(ledger.regions.is_empty());
    }
}
