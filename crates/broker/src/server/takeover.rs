//! Parts that an epoch takes over unchanged from the one before it: the same memory, under two
//! epochs.
//!
//! Regions are taken over whole, because a region is one allocation of the driver. Nobody writes to
//! one again: it is leased to no writer, and who opens either epoch maps it read-only.

use crate::object::manifest::Manifest;
use crate::object::part::Part;
use crate::server::object::Object;
use crate::wire::{RefusalCode, Wanted};
use transport::server::Refused;

/// A region that is taken over, and its number; `None` for one that is made.
pub(super) type Former<F> = Option<(F, u64)>;

/// Finds what a draft takes over from the newest epoch of its name, region by region.
pub(super) fn regions<F: Clone>(
    former: Option<&Object<F>>,
    draft: &Manifest,
    wanted: Wanted,
) -> Result<Vec<Former<F>>, Refused> {
    let count = draft.layout.regions().len();
    if wanted.taken == 0 {
        return Ok(vec![None; count]);
    }
    if wanted.scratch {
        return Err((
            RefusalCode::Protocol,
            "a scratch object has no epoch before it".into(),
        ));
    }
    check(
        former.and_then(|former| former.manifest.as_deref()),
        draft,
        wanted.taken,
    )?;
    let region = |n: usize| {
        let former = former.filter(|_| wanted.taken >> n & 1 != 0)?;
        Some((former.regions.get(n)?.clone()?, *former.numbers.get(n)?))
    };
    Ok((0..count).map(region).collect())
}

/// Refuses to take regions over, one bit of `taken` each, unless `draft` says of them what `former`
/// does.
///
/// Both must be open to the same users: a descriptor is permission to write, so one epoch's readers
/// could change the other's contents.
fn check(former: Option<&Manifest>, draft: &Manifest, taken: u16) -> Result<(), Refused> {
    let name = &draft.name;
    let Some(former) = former else {
        return Err((
            RefusalCode::NotFound,
            format!("{name} has no epoch to take parts over from"),
        ));
    };
    let epoch = former.epoch;
    let layout = |why: String| Err((RefusalCode::Layout, why));
    if (former.backend, former.device, former.granularity)
        != (draft.backend, draft.device, draft.granularity)
    {
        return layout(format!("epoch {epoch} of {name} lies on another device"));
    }
    if former.readers != draft.readers {
        return Err((
            RefusalCode::User,
            format!("epoch {epoch} of {name} is open to other users than the draft"),
        ));
    }
    for region in (0..u16::BITS as u8).filter(|region| taken >> region & 1 != 0) {
        let bytes =
            |manifest: &Manifest| manifest.layout.regions().get(usize::from(region)).copied();
        let (Some(theirs), Some(ours)) = (bytes(former), bytes(draft)) else {
            return layout(format!(
                "region {region} is not in both epoch {epoch} of {name} and the draft"
            ));
        };
        if theirs != ours {
            return layout(format!(
                "region {region} has {theirs} bytes in epoch {epoch} of {name}, {ours} in the draft"
            ));
        }
        let of = |part: &&Part| part.region == region;
        let (mut theirs, mut ours) = (
            former.layout.parts().iter().filter(of),
            draft.layout.parts().iter().filter(of),
        );
        loop {
            match (theirs.next(), ours.next()) {
                (None, None) => break,
                (theirs, ours) if theirs == ours => {}
                (theirs, ours) => {
                    let part = ours.or(theirs).map_or("", |part| part.spec.name.as_str());
                    return layout(format!(
                        "{part} of region {region} differs from epoch {epoch} of {name}"
                    ));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use gpu_api::{BackendKind, DeviceUuid};

    use super::*;
    use crate::object::identity::{Epoch, Identity};
    use crate::object::layout::Layout;
    use crate::object::manifest::Readers;
    use crate::object::part::PartSpec;

    fn manifest(first: &[(&str, u64)], second: &[(&str, u64)]) -> Manifest {
        let group = |parts: &[(&str, u64)]| -> Vec<PartSpec> {
            parts
                .iter()
                .map(|(name, len)| PartSpec::bytes(*name, *len).expect("a part"))
                .collect()
        };
        Manifest {
            identity: Identity([1; 16]),
            name: "model".into(),
            epoch: Epoch(3),
            home: None,
            backend: BackendKind::Host,
            device: DeviceUuid([0; 16]),
            owner: 7,
            readers: Readers::Owner,
            granularity: 4096,
            layout: Layout::pack_groups([group(first), group(second)], b"").expect("a layout"),
        }
    }

    #[test]
    fn a_region_is_taken_over_only_as_it_was() {
        let former = manifest(&[("a", 9), ("b", 300)], &[("c", 5)]);
        let check =
            |draft: &Manifest, taken| check(Some(&former), draft, taken).map_err(|(_, why)| why);
        check(&former, 0b11).expect("both are the same");
        check(&manifest(&[("a", 9), ("b", 300)], &[("d", 5)]), 0b01)
            .expect("the other region may differ");
        for (draft, taken, why) in [
            (
                manifest(&[("a", 9), ("b", 300)], &[("d", 5)]),
                0b10,
                "d of region 1 differs from epoch 3 of model",
            ),
            (
                manifest(&[("a", 9), ("b", 301)], &[("c", 5)]),
                0b01,
                "b of region 0 differs from epoch 3 of model",
            ),
            (
                manifest(&[("a", 9)], &[("c", 5)]),
                0b01,
                "region 0 has 768 bytes in epoch 3 of model, 256 in the draft",
            ),
            (
                former.clone(),
                0b100,
                "region 2 is not in both epoch 3 of model and the draft",
            ),
            (
                Manifest {
                    granularity: 64,
                    ..former.clone()
                },
                1,
                "epoch 3 of model lies on another device",
            ),
            (
                Manifest {
                    readers: Readers::Everybody,
                    ..former.clone()
                },
                1,
                "epoch 3 of model is open to other users than the draft",
            ),
        ] {
            assert_eq!(check(&draft, taken).expect_err(why), why);
        }
        let (_, why) = super::check(None, &former, 1).expect_err("nothing to take over from");
        assert_eq!(why, "model has no epoch to take parts over from");
    }
}
