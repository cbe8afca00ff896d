//! A layout: the parts of an object in their regions, before anybody has an identity or memory for
//! them.
//!
//! Parts are packed into few regions, because a mapping costs the driver tens of microseconds
//! whatever its size: a hundred thousand small tensors must not cost as many mappings.

use gpu_api::{Error, Result};
use transport::shared::journal_file;

use crate::object::part::{Part, PartSpec};

/// The most regions of an object; they come with its manifest in one packet.
pub const MOST_REGIONS: usize = 16;
/// The most parts of an object.
pub const MOST_PARTS: usize = 1_000_000;
/// What every part's offset is a multiple of: DLPack's alignment, and that of CUDA's allocations.
pub const PART_ALIGNMENT: u64 = 256;
/// A region is closed when it reaches this size or a sixteenth of the object, whichever is larger.
const REGION_BYTES: u64 = 4 << 30;

/// The parts of an object and the regions that they lie in.
///
/// Parts are in the order of their names, which are unique; no two share a byte.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    regions: Vec<u64>,
    parts: Vec<Part>,
    user: Vec<u8>,
    /// Bytes of a pool's journal; 0 for an object.
    journal: u64,
}

impl Layout {
    /// Packs parts into regions, in the order given, and keeps `user` bytes beside them.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a part that is wrong in itself, two of one name, or an object beyond
    /// 2^63 bytes; [`Error::Exhausted`] for more than a million parts.
    ///
    /// # Examples
    ///
    /// ```
    /// use broker::{DType, Layout, PartSpec};
    ///
    /// let parts = [PartSpec::contiguous("w", DType::F32, &[3, 5])?, PartSpec::bytes("tokenizer", 9)?];
    /// let layout = Layout::pack(parts, b"step 7")?;
    /// assert_eq!(layout.regions(), [512]);
    /// assert_eq!(layout.part("w").map(|part| part.offset), Some(0));
    /// # Ok::<(), gpu_api::Error>(())
    /// ```
    pub fn pack(specs: impl IntoIterator<Item = PartSpec>, user: &[u8]) -> Result<Layout> {
        let specs: Vec<PartSpec> = specs.into_iter().collect();
        let close_at = REGION_BYTES.max(total_of(&specs)?.div_ceil(MOST_REGIONS as u64));
        Layout::place([specs], close_at, user)
    }

    /// As [`pack`](Layout::pack), with a region for each group of parts. What a later epoch takes
    /// over unchanged, it takes over by whole regions
    /// ([`CreateOptions::unchanged`](crate::CreateOptions::unchanged)): parts that change together
    /// belong in one group.
    ///
    /// # Errors
    ///
    /// As [`pack`](Layout::pack), and [`Error::Invalid`] for more than 16 groups.
    ///
    /// # Examples
    ///
    /// ```
    /// use broker::{Layout, PartSpec};
    ///
    /// let (base, adapter) = ([PartSpec::bytes("base", 1 << 20)?], [PartSpec::bytes("adapter", 4096)?]);
    /// let layout = Layout::pack_groups([base, adapter], b"")?;
    /// assert_eq!(layout.regions(), [1 << 20, 4096]);
    /// # Ok::<(), gpu_api::Error>(())
    /// ```
    pub fn pack_groups<G>(groups: impl IntoIterator<Item = G>, user: &[u8]) -> Result<Layout>
    where
        G: IntoIterator<Item = PartSpec>,
    {
        let groups: Vec<Vec<PartSpec>> = groups
            .into_iter()
            .map(|group| group.into_iter().collect())
            .collect();
        total_of(groups.iter().flatten())?;
        Layout::place(groups, u64::MAX, user)
    }

    /// Places parts one behind the other, in a region of its own for each group and from `close_at`
    /// bytes on.
    fn place(
        groups: impl IntoIterator<Item = Vec<PartSpec>>,
        close_at: u64,
        user: &[u8],
    ) -> Result<Layout> {
        let mut regions: Vec<u64> = Vec::new();
        let mut parts = Vec::new();
        for group in groups {
            for (n, spec) in group.into_iter().enumerate() {
                if n == 0 || regions.last().is_none_or(|&bytes| bytes >= close_at) {
                    regions.push(0);
                }
                let region = regions.len() - 1;
                let offset = regions[region];
                regions[region] += aligned(spec.len).unwrap_or(0);
                // More regions than 16 are refused below.
                parts.push(Part {
                    spec,
                    region: u8::try_from(region).unwrap_or(u8::MAX),
                    offset,
                });
            }
        }
        // A region without a byte would be none that a driver makes.
        regions
            .iter_mut()
            .for_each(|bytes| *bytes = (*bytes).max(PART_ALIGNMENT));
        parts.sort_unstable_by(|a, b| a.spec.name.cmp(&b.spec.name));
        Layout::of(regions, parts, user.to_vec())
    }

    /// Takes parts that have their places, and checks every one.
    ///
    /// # Errors
    ///
    /// As [`pack`](Layout::pack), and [`Error::Invalid`] for parts that overlap, lie outside their
    /// region, are not aligned or not in the order of their names.
    pub fn of(regions: Vec<u64>, parts: Vec<Part>, user: Vec<u8>) -> Result<Layout> {
        let invalid = |what, got: String, must| Err(Error::invalid(what, got, must));
        if parts.len() > MOST_PARTS {
            return Err(Error::exhausted(
                "parts of an object",
                MOST_PARTS as u64,
                "pack small tensors together, or make several objects",
            ));
        }
        if regions.is_empty() != parts.is_empty() || regions.len() > MOST_REGIONS {
            let got = format!("{} for {} parts", regions.len(), parts.len());
            return invalid("the number of regions", got, "1 to 16, or none for no part");
        }
        let total = regions
            .iter()
            .try_fold(0u64, |total, &bytes| total.checked_add(bytes));
        if regions.contains(&0) || total.is_none_or(|total| i64::try_from(total).is_err()) {
            return invalid(
                "the regions' bytes",
                format!("{regions:?}"),
                "each above 0, all below 2^63",
            );
        }
        for part in &parts {
            part.spec.check()?;
            let end = part.offset.checked_add(part.spec.len);
            let inside = regions
                .get(usize::from(part.region))
                .is_some_and(|&bytes| end.is_some_and(|end| end <= bytes));
            if !inside || !part.offset.is_multiple_of(PART_ALIGNMENT) {
                let got = format!(
                    "{} bytes at {} of region {} ({})",
                    part.spec.len, part.offset, part.region, part.spec.name
                );
                return invalid(
                    "the place of a part",
                    got,
                    "inside its region, at a multiple of 256",
                );
            }
        }
        if let Some(pair) = parts
            .windows(2)
            .find(|pair| pair[0].spec.name >= pair[1].spec.name)
        {
            if pair[0].spec.name == pair[1].spec.name {
                let got = format!("{} twice", pair[0].spec.name);
                return invalid("the parts of an object", got, "each of a name of its own");
            }
            let got = format!("{} behind {}", pair[1].spec.name, pair[0].spec.name);
            return invalid(
                "the order of parts",
                got,
                "that of their names, each of which is there once",
            );
        }
        let mut places: Vec<&Part> = parts.iter().filter(|part| part.spec.len > 0).collect();
        places.sort_unstable_by_key(|part| (part.region, part.offset));
        let overlap = |pair: &&[&Part]| {
            pair[0].region == pair[1].region && pair[0].offset + pair[0].spec.len > pair[1].offset
        };
        if let Some(pair) = places.windows(2).find(overlap) {
            let got = format!("{} over {}", pair[0].spec.name, pair[1].spec.name);
            return invalid(
                "the place of a part",
                got,
                "its own: no two parts share a byte",
            );
        }
        Ok(Layout {
            regions,
            parts,
            user,
            journal: 0,
        })
    }

    /// Makes it the layout of a pool, whose journal has so many bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for bytes that no journal has, and for no region or 16: a pool has 1 to
    /// 15, which come with the journal in one packet.
    pub(crate) fn with_journal(mut self, bytes: u64) -> Result<Layout> {
        journal_file::check_bytes(bytes)?;
        let most = MOST_REGIONS - 1;
        if !(1..=most).contains(&self.regions.len()) {
            return Err(Error::Invalid {
                what: "the regions of a pool",
                got: self.regions.len().to_string(),
                must: "1 to 15: pack the parts into fewer",
            });
        }
        self.journal = bytes;
        Ok(self)
    }

    /// Returns the bytes of a pool's journal; 0 for an object.
    pub fn journal(&self) -> u64 {
        self.journal
    }

    /// Returns the bytes of each region.
    pub fn regions(&self) -> &[u64] {
        &self.regions
    }

    /// Returns the parts, in the order of their names.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Finds a part.
    pub fn part(&self, name: &str) -> Option<&Part> {
        let at = self
            .parts
            .binary_search_by(|part| part.spec.name.as_str().cmp(name))
            .ok()?;
        self.parts.get(at)
    }

    /// Returns the bytes that the writer put beside the parts.
    pub fn user(&self) -> &[u8] {
        &self.user
    }

    /// Returns the bytes of all regions.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().sum()
    }

    /// Says where another layout first differs, in words; `None` if regions and parts are the same.
    /// User bytes may differ: they name no address.
    pub fn difference(&self, other: &Layout) -> Option<String> {
        if let Some((ours, theirs)) = self
            .parts
            .iter()
            .zip(&other.parts)
            .find(|(ours, theirs)| ours != theirs)
        {
            let (ours, theirs) = (describe(ours), describe(theirs));
            return Some(format!("{ours} here, {theirs} there"));
        }
        if self.parts.len() != other.parts.len() {
            return Some(format!(
                "{} parts here, {} there",
                self.parts.len(),
                other.parts.len()
            ));
        }
        (self.regions != other.regions)
            .then(|| format!("regions {:?} here, {:?} there", self.regions, other.regions))
    }
}

fn describe(part: &Part) -> String {
    let shape: Vec<u64> = part
        .spec
        .dimensions
        .iter()
        .map(|dimension| dimension.extent)
        .collect();
    let (name, dtype) = (&part.spec.name, part.spec.dtype);
    format!(
        "{name} {shape:?} of type {}/{} at {}+{}",
        dtype.code, dtype.bits, part.region, part.offset
    )
}

/// Adds up what parts need.
fn total_of<'a>(specs: impl IntoIterator<Item = &'a PartSpec>) -> Result<u64> {
    let (mut count, mut total) = (0u64, Some(0u64));
    for spec in specs {
        count += 1;
        total = total.and_then(|total| total.checked_add(aligned(spec.len)?));
    }
    total
        .filter(|total| i64::try_from(*total).is_ok())
        .ok_or_else(|| {
            let got = format!("the sum of {count} parts");
            Error::invalid("the size of an object", got, "below 2^63 bytes")
        })
}

fn aligned(len: u64) -> Option<u64> {
    len.checked_next_multiple_of(PART_ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(name: &str, len: u64) -> PartSpec {
        PartSpec::bytes(name, len).expect("a good part")
    }

    fn placed(name: &str, region: u8, offset: u64, len: u64) -> Part {
        Part {
            spec: bytes(name, len),
            region,
            offset,
        }
    }

    #[test]
    fn small_parts_share_a_region_and_large_ones_fill_at_most_sixteen() {
        let small = Layout::pack((0..100_000).map(|i| bytes(&format!("p{i:06}"), 1)), b"")
            .expect("a layout");
        assert_eq!(small.regions(), [100_000 * 256]);
        let large = Layout::pack((0..1_000).map(|i| bytes(&format!("p{i:04}"), 1 << 40)), b"")
            .expect("a layout");
        assert!(
            large.regions().len() <= MOST_REGIONS,
            "{:?}",
            large.regions()
        );
        let empty = Layout::pack([], b"only this").expect("a layout");
        assert_eq!(
            (empty.regions(), empty.user()),
            (&[][..], &b"only this"[..])
        );
        assert_eq!(
            Layout::pack([bytes("e", 0)], b"")
                .expect("a layout")
                .regions(),
            [256]
        );
    }

    #[test]
    fn a_group_has_a_region_of_its_own_and_an_empty_one_has_none() {
        let group = |names: &[&str]| {
            names
                .iter()
                .map(|name| bytes(name, 300))
                .collect::<Vec<_>>()
        };
        let layout = Layout::pack_groups([group(&["b", "a"]), group(&[]), group(&["c"])], b"")
            .expect("a layout");
        assert_eq!(layout.regions(), [1024, 512]);
        assert_eq!(
            layout.part("c").map(|part| (part.region, part.offset)),
            Some((1, 0))
        );
        let many = (0..=MOST_REGIONS).map(|n| [bytes(&format!("{n}"), 1)]);
        let error = Layout::pack_groups(many, b"")
            .expect_err("17 groups")
            .to_string();
        assert!(
            error.contains("number of regions") && error.contains("17 for 17 parts"),
            "{error}"
        );
    }

    #[test]
    fn a_million_parts_are_taken_and_one_more_is_refused() {
        let parts = |count: usize| (0..count).map(|i| bytes(&format!("{i}"), 4));
        assert_eq!(
            Layout::pack(parts(MOST_PARTS), b"")
                .expect("a layout")
                .parts()
                .len(),
            MOST_PARTS
        );
        let error = Layout::pack(parts(MOST_PARTS + 1), b"")
            .expect_err("one too many")
            .to_string();
        assert!(
            error.contains("parts of an object used up: the limit is 1000000"),
            "{error}"
        );
    }

    #[test]
    fn bad_places_are_refused_by_name() {
        let of =
            |regions: &[u64], parts: Vec<Part>| Layout::of(regions.to_vec(), parts, Vec::new());
        for (regions, parts, word) in [
            (
                &[512][..],
                vec![placed("a", 0, 0, 257), placed("b", 0, 256, 1)],
                "share a byte",
            ),
            (&[512], vec![placed("a", 0, 256, 257)], "inside its region"),
            (&[512], vec![placed("a", 1, 0, 1)], "inside its region"),
            (
                &[512],
                vec![placed("a", 0, u64::MAX - 255, 1 << 20)],
                "inside its region",
            ),
            (&[512], vec![placed("a", 0, 8, 1)], "at a multiple of 256"),
            (
                &[512],
                vec![placed("b", 0, 0, 1), placed("a", 0, 256, 1)],
                "order of parts",
            ),
            (
                &[512],
                vec![placed("a", 0, 0, 1), placed("a", 0, 256, 1)],
                "the parts of an object is a twice",
            ),
            (&[], vec![placed("a", 0, 0, 1)], "number of regions"),
            (&[256; 17], vec![placed("a", 0, 0, 1)], "number of regions"),
            (&[0], vec![placed("a", 0, 0, 0)], "regions' bytes"),
            (&[u64::MAX, 2], vec![placed("a", 0, 0, 1)], "regions' bytes"),
        ] {
            let error = of(regions, parts).expect_err(word).to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_difference_names_the_first_part_that_is_not_the_same() {
        let one = Layout::pack([bytes("a", 1), bytes("b", 1)], b"x").expect("a layout");
        let other = Layout::pack([bytes("a", 1), bytes("b", 2)], b"y").expect("a layout");
        assert_eq!(one.difference(&one.clone()), None);
        let text = one.difference(&other).expect("b differs");
        assert!(
            text.contains("b [1] of type 1/8 at 0+256 here, b [2]"),
            "{text}"
        );
    }

    proptest! {
        #[test]
        fn what_is_packed_passes_every_check(lens in proptest::collection::vec(0u64..1 << 44, 0..40)) {
            let specs = lens.iter().enumerate().map(|(i, &len)| bytes(&format!("p{i}"), len));
            let layout = Layout::pack(specs, b"").expect("packing makes good layouts");
            prop_assert_eq!(layout.parts().len(), lens.len());
            prop_assert!(layout.regions().len() <= MOST_REGIONS);
        }
    }
}
