//! The manifest: the bytes that say what an object is. With its regions' descriptors it is all
//! there is of one.
//!
//! A writer sends it as a *draft*, without epoch, owner and granularity; the broker fills these in
//! at the commit. The draft of a *replica* has the epoch that it has at its home, and the home's
//! name.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `GIPCobj1` |
//! | 8 | 4 | version: 2 of a pool, and where the readers are groups; else 1 |
//! | 12 | 4 | crc32c of all other bytes |
//! | 16 | 16 | identity |
//! | 32 | 8 | epoch; 0 in a draft, unless it is of a replica |
//! | 40 | 16 | device |
//! | 56 | 1 | backend: 1 host, 2 cuda, 3 hip |
//! | 57 | 1 | readers: 0 the owner alone, 1 everybody, 2 the uids listed, 3 the gids listed |
//! | 58 | 1 | regions, at most 16 |
//! | 59 | 1 | uids or gids, at most 16 |
//! | 60 | 4 | owner's uid; 0 in a draft |
//! | 64 | 8 | granularity that regions were rounded up to; 0 in a draft |
//! | 72 | 4 | parts, at most 1,000,000 |
//! | 76 | 4 | bytes of the name |
//! | 80 | 8 | user bytes |
//! | 88 | 8 | bytes of the home's name; 0 for an object that was first committed here |
//! | 96 | | in version 2 the bytes of a pool's journal, u64, 0 of what is no pool; regions' bytes, u64 each; uids or gids, u32 each; the name; the home's name; the user bytes; the parts |
//!
//! A part: name's bytes u16, region u8, dimensions u8, type's code u8, bits u8, lanes u16, offset
//! u64, bytes u64, then for each dimension its extent and stride, u64 both, then the name. Parts
//! are in the order of their names.
//!
//! All numbers are little-endian. Every byte string that decodes has exactly one meaning and every
//! meaning one byte string. The file is a memfd sealed against writing, shrinking, growing and
//! further seals, of at most 64 MiB.

use gpu_api::{BackendKind, DeviceUuid, Error, Result};

use crate::object::identity::{Epoch, Identity, check_name};
use crate::object::layout::{Layout, MOST_PARTS, MOST_REGIONS};
use crate::object::part::{DType, Dimension, MOST_RANK, Part, PartSpec};

/// The most bytes of a manifest.
pub const MOST_MANIFEST: u64 = 64 << 20;
/// The versions that this crate reads. It writes the lowest that can say what is to be said, so that
/// an older program reads as much as it can.
pub const VERSIONS: std::ops::RangeInclusive<u32> = FIRST..=SECOND;
/// The most users, or groups, that an object can be opened to by number.
pub const MOST_UIDS: usize = 16;
/// The version of an object whose readers are not groups.
const FIRST: u32 = 1;
/// The version of a pool, and of an object whose readers are groups.
const SECOND: u32 = 2;

const MAGIC: [u8; 8] = *b"GIPCobj1";
const HEADER: usize = 96;
/// A part without dimensions and name.
const PART: usize = 24;

/// Which users, beside its owner, may open an object.
///
/// No driver has read-only descriptors: a user that may open an object can write to it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Readers {
    /// Nobody.
    #[default]
    Owner,
    /// Every user that may connect.
    Everybody,
    /// These users, at most 16.
    Uids(Vec<u32>),
    /// The users that are in one of these groups when they connect, at most 16.
    Gids(Vec<u32>),
}

impl Readers {
    /// Says whether a user who is in these groups may open an object of `owner`.
    pub fn admit(&self, owner: u32, uid: u32, groups: &[u32]) -> bool {
        uid == owner
            || match self {
                Readers::Owner => false,
                Readers::Everybody => true,
                Readers::Uids(uids) => uids.contains(&uid),
                Readers::Gids(gids) => groups.iter().any(|group| gids.contains(group)),
            }
    }
}

/// What an object is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Manifest {
    /// Which object.
    pub identity: Identity,
    /// Its name.
    pub name: String,
    /// Its epoch; 0 in a draft, unless it is of a replica.
    pub epoch: Epoch,
    /// The host whose broker committed it first, if this is a replica.
    pub home: Option<String>,
    /// The vendor of its memory.
    pub backend: BackendKind,
    /// The device that its memory lies on.
    pub device: DeviceUuid,
    /// The user that owns it and its name; 0 in a draft.
    pub owner: u32,
    /// Which other users may open it.
    pub readers: Readers,
    /// What each region's bytes were rounded up to; 0 in a draft.
    pub granularity: u64,
    /// Its parts.
    pub layout: Layout,
}

/// Says whether bytes are a manifest of a version that this crate does not read: they begin as all
/// manifests do, with another version, and nothing in them was changed.
pub fn is_of_another_version(bytes: &[u8]) -> bool {
    let Some(head) = bytes.first_chunk::<16>() else {
        return false;
    };
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    let is_manifest = head[..7] == MAGIC[..7];
    // Another magic may have its sum elsewhere.
    is_manifest
        && (head[7] != MAGIC[7]
            || (!VERSIONS.contains(&number(8)) && number(12) == checksum(bytes)))
}

impl Manifest {
    /// Returns the bytes of each region as it was made and is mapped.
    pub fn mapped_regions(&self) -> impl Iterator<Item = u64> + '_ {
        self.layout
            .regions()
            .iter()
            .map(|&bytes| round_up(bytes, self.granularity))
    }

    /// Returns the bytes of memory that the object takes.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_regions().sum()
    }

    /// Writes it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a bad name, more than 16 uids, or more than 64 MiB in all.
    pub fn encode(&self) -> Result<Vec<u8>> {
        check_name("the name of an object", &self.name)?;
        let home = self.home.as_deref().unwrap_or_default();
        if self.home.is_some() {
            check_name("the home of an object", home)?;
        }
        let (readers, uids): (u8, &[u32]) = match &self.readers {
            Readers::Owner => (0, &[]),
            Readers::Everybody => (1, &[]),
            Readers::Uids(uids) => (2, uids),
            Readers::Gids(gids) => (3, gids),
        };
        if uids.len() > MOST_UIDS || (readers >= 2 && uids.is_empty()) {
            return Err(invalid(
                "the number of uids or gids",
                uids.len().to_string(),
                "1 to 16; or let everybody read it",
            ));
        }
        let layout = &self.layout;
        let version = version_of(layout, &self.readers);
        let mut out = Vec::with_capacity(HEADER + layout.user().len() + layout.parts().len() * 64);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&version.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.identity.0);
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
        out.extend_from_slice(&self.device.0);
        out.extend_from_slice(&[
            self.backend as u8,
            readers,
            layout.regions().len() as u8,
            uids.len() as u8,
        ]);
        out.extend_from_slice(&self.owner.to_le_bytes());
        out.extend_from_slice(&self.granularity.to_le_bytes());
        out.extend_from_slice(&(layout.parts().len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.name.len() as u32).to_le_bytes());
        out.extend_from_slice(&(layout.user().len() as u64).to_le_bytes());
        out.extend_from_slice(&(home.len() as u64).to_le_bytes());
        debug_assert_eq!(out.len(), HEADER);
        if version == SECOND {
            out.extend_from_slice(&layout.journal().to_le_bytes());
        }
        layout
            .regions()
            .iter()
            .for_each(|bytes| out.extend_from_slice(&bytes.to_le_bytes()));
        uids.iter()
            .for_each(|uid| out.extend_from_slice(&uid.to_le_bytes()));
        out.extend_from_slice(self.name.as_bytes());
        out.extend_from_slice(home.as_bytes());
        out.extend_from_slice(layout.user());
        layout
            .parts()
            .iter()
            .for_each(|part| encode_part(part, &mut out));
        if out.len() as u64 > MOST_MANIFEST {
            let got = format!("{} bytes", out.len());
            return Err(invalid(
                "a manifest",
                got,
                "at most 64 MiB: shorten names and user bytes, or make several objects",
            ));
        }
        let sum = checksum(&out);
        out[12..16].copy_from_slice(&sum.to_le_bytes());
        Ok(out)
    }

    /// Reads it, checking every field and every extent.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for another version, [`Error::Invalid`] for anything that
    /// [`encode`](Manifest::encode) does not write.
    pub fn decode(bytes: &[u8]) -> Result<Manifest> {
        if bytes.len() as u64 > MOST_MANIFEST || bytes.len() < HEADER {
            return Err(invalid(
                "a manifest",
                format!("{} bytes", bytes.len()),
                "96 bytes to 64 MiB",
            ));
        }
        let mut r = Reader { rest: bytes };
        let magic: [u8; 8] = r.array()?;
        if magic != MAGIC {
            return Err(invalid(
                "a manifest's magic",
                format!("{magic:02x?}"),
                "GIPCobj1",
            ));
        }
        let version = r.u32()?;
        if !VERSIONS.contains(&version) {
            return Err(Error::mismatch(
                "the version of a manifest",
                version,
                format!("{} to {}", VERSIONS.start(), VERSIONS.end()),
                "commit the object again with this version",
            ));
        }
        let sum = r.u32()?;
        if sum != checksum(bytes) {
            return Err(invalid(
                "a manifest's checksum",
                format!("{sum:#010x}"),
                "that of its bytes",
            ));
        }
        let identity = Identity(r.array()?);
        let epoch = Epoch(r.u64()?);
        let device = DeviceUuid(r.array()?);
        let [backend, readers, regions, uids] = r.array()?;
        let backend = BackendKind::from_byte(backend)
            .ok_or_else(|| invalid("a manifest's backend", backend.to_string(), "1, 2 or 3"))?;
        let owner = r.u32()?;
        let granularity = r.u64()?;
        if granularity != 0 && !granularity.is_power_of_two() {
            return Err(invalid(
                "a manifest's granularity",
                granularity.to_string(),
                "a power of two",
            ));
        }
        let (parts, name, user) = (r.u32()? as usize, r.u32()? as usize, r.u64()?);
        let home = usize::try_from(r.u64()?).unwrap_or(usize::MAX);
        let regions = usize::from(regions);
        if regions > MOST_REGIONS || parts > MOST_PARTS {
            let got = format!("{regions} regions and {parts} parts");
            return Err(invalid(
                "a manifest",
                got,
                "at most 16 regions and 1,000,000 parts",
            ));
        }
        let journal = if version == SECOND { r.u64()? } else { 0 };
        let regions = (0..regions)
            .map(|_| r.u64())
            .collect::<Result<Vec<u64>>>()?;
        let uids = (0..uids).map(|_| r.u32()).collect::<Result<Vec<u32>>>()?;
        let readers = match (version, readers, uids.len()) {
            (_, 0, 0) => Readers::Owner,
            (_, 1, 0) => Readers::Everybody,
            (_, 2, 1..=MOST_UIDS) => Readers::Uids(uids),
            (SECOND, 3, 1..=MOST_UIDS) => Readers::Gids(uids),
            (_, kind, count) => {
                let got = format!("{kind} with {count} uids or gids in version {version}");
                return Err(invalid(
                    "a manifest's readers",
                    got,
                    "0 or 1 with none, 2 with 1 to 16, or 3 with as many in version 2",
                ));
            }
        };
        let name = r.text(name)?;
        check_name("the name of an object", &name)?;
        let home = if home == 0 { None } else { Some(r.text(home)?) };
        if let Some(home) = &home {
            check_name("the home of an object", home)?;
        }
        let user = r
            .bytes(usize::try_from(user).unwrap_or(usize::MAX))?
            .to_vec();
        // What is announced but not there must cost nothing.
        if r.rest.len() / PART < parts {
            return Err(invalid(
                "the number of parts",
                parts.to_string(),
                "what the manifest has bytes for",
            ));
        }
        let parts = (0..parts)
            .map(|_| decode_part(&mut r))
            .collect::<Result<Vec<Part>>>()?;
        if !r.rest.is_empty() {
            return Err(invalid(
                "the bytes behind a manifest",
                r.rest.len().to_string(),
                "0",
            ));
        }
        let mut layout = Layout::of(regions, parts, user)?;
        if journal > 0 {
            layout = layout.with_journal(journal)?;
        }
        if version != version_of(&layout, &readers) {
            return Err(invalid(
                "a manifest's version",
                version.to_string(),
                "1: it is neither of a pool nor for groups",
            ));
        }
        let manifest = Manifest {
            identity,
            name,
            epoch,
            home,
            backend,
            device,
            owner,
            readers,
            granularity,
            layout,
        };
        let fits = granularity == 0
            || manifest
                .layout
                .regions()
                .iter()
                .all(|&bytes| bytes <= u64::MAX - granularity);
        if !fits {
            return Err(invalid(
                "a manifest's granularity",
                granularity.to_string(),
                "one that regions fit into",
            ));
        }
        Ok(manifest)
    }
}

/// Returns the lowest version that can say it.
fn version_of(layout: &Layout, readers: &Readers) -> u32 {
    if layout.journal() > 0 || matches!(readers, Readers::Gids(_)) {
        SECOND
    } else {
        FIRST
    }
}

fn encode_part(part: &Part, out: &mut Vec<u8>) {
    let spec = &part.spec;
    out.extend_from_slice(&(spec.name.len() as u16).to_le_bytes());
    out.extend_from_slice(&[
        part.region,
        spec.dimensions.len() as u8,
        spec.dtype.code,
        spec.dtype.bits,
    ]);
    out.extend_from_slice(&spec.dtype.lanes.to_le_bytes());
    out.extend_from_slice(&part.offset.to_le_bytes());
    out.extend_from_slice(&spec.len.to_le_bytes());
    for dimension in &spec.dimensions {
        out.extend_from_slice(&dimension.extent.to_le_bytes());
        out.extend_from_slice(&dimension.stride.to_le_bytes());
    }
    out.extend_from_slice(spec.name.as_bytes());
}

fn decode_part(r: &mut Reader<'_>) -> Result<Part> {
    let name = usize::from(u16::from_le_bytes(r.array()?));
    let [region, rank, code, bits] = r.array()?;
    let lanes = u16::from_le_bytes(r.array()?);
    let (offset, len) = (r.u64()?, r.u64()?);
    if usize::from(rank) > MOST_RANK {
        return Err(invalid(
            "the number of dimensions",
            rank.to_string(),
            "at most 32",
        ));
    }
    let dimension = |r: &mut Reader<'_>| {
        Ok(Dimension {
            extent: r.u64()?,
            stride: r.u64()?,
        })
    };
    let dimensions = (0..rank)
        .map(|_| dimension(r))
        .collect::<Result<Vec<Dimension>>>()?;
    let spec = PartSpec {
        name: r.text(name)?,
        dtype: DType { code, bits, lanes },
        dimensions,
        len,
    };
    Ok(Part {
        spec,
        region,
        offset,
    })
}

/// Rounds up to the granularity of a device; a draft has none.
pub fn round_up(bytes: u64, granularity: u64) -> u64 {
    if granularity == 0 {
        bytes
    } else {
        bytes.next_multiple_of(granularity)
    }
}

fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..])
}

fn invalid(what: &'static str, got: String, must: &'static str) -> Error {
    Error::invalid(what, got, must)
}

/// Takes from the bytes, and refuses to take more than there are.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8]> {
        let Some((bytes, rest)) = self.rest.split_at_checked(count) else {
            return Err(invalid(
                "the bytes left of a manifest",
                self.rest.len().to_string(),
                "what its fields announce",
            ));
        };
        self.rest = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.bytes(N)?.try_into().expect("as many as asked for"))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self, count: usize) -> Result<String> {
        let bytes = self.bytes(count)?;
        match str::from_utf8(bytes) {
            Ok(text) => Ok(text.into()),
            Err(e) => Err(invalid(
                "a name's good bytes",
                e.valid_up_to().to_string(),
                "all: UTF-8",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Repairs the checksum, as an attacker who forges a manifest would.
    fn seal(bytes: &mut [u8]) {
        let sum = checksum(bytes);
        bytes[12..16].copy_from_slice(&sum.to_le_bytes());
    }

    fn manifest(layout: Layout, readers: Readers) -> Manifest {
        Manifest {
            identity: Identity([7; 16]),
            name: "model/é".into(),
            epoch: Epoch(3),
            home: None,
            backend: BackendKind::Host,
            device: DeviceUuid([9; 16]),
            owner: 1000,
            readers,
            granularity: 1 << 16,
            layout,
        }
    }

    fn small() -> Manifest {
        let parts = [
            PartSpec::contiguous("b", DType::F32, &[2, 3]).expect("a part"),
            PartSpec::bytes("a", 5).expect("a part"),
        ];
        manifest(
            Layout::pack(parts, b"user").expect("a layout"),
            Readers::Uids(vec![1, 2]),
        )
    }

    fn pool() -> Manifest {
        let mut pool = small();
        pool.layout = pool.layout.with_journal(8_192).expect("a journal's size");
        pool
    }

    fn for_groups() -> Manifest {
        Manifest {
            readers: Readers::Gids(vec![3, 4]),
            ..small()
        }
    }

    #[test]
    fn the_recorded_bytes_of_version_1_are_read_and_written() {
        let recorded = include_bytes!("../../tests/recorded/manifest-1.bin");
        assert_eq!(
            Manifest::decode(recorded).expect("a manifest of version 1"),
            small()
        );
        assert_eq!(small().encode().expect("bytes"), recorded);
    }

    /// An older broker leaves what it cannot read in the keeper, and an older client names both
    /// versions: either would take kind 3 or a journal in version 1 for a broken manifest.
    #[test]
    fn pools_and_readers_by_group_alone_are_of_version_2() {
        let of = |readers| Manifest { readers, ..small() };
        for (readers, version) in [
            (Readers::Owner, 1),
            (Readers::Everybody, 1),
            (Readers::Uids(vec![1]), 1),
            (Readers::Gids(vec![1]), 2),
        ] {
            let layout = pool().layout;
            for (manifest, version) in [
                (of(readers.clone()), version),
                (
                    Manifest {
                        layout,
                        ..of(readers.clone())
                    },
                    2,
                ),
            ] {
                let mut bytes = manifest.encode().expect("bytes");
                assert_eq!(bytes[8], version, "{readers:?}");
                assert!(!is_of_another_version(&bytes));
                bytes[8] ^= 3;
                seal(&mut bytes);
                Manifest::decode(&bytes).expect_err("the other version");
            }
        }
        let groups = Readers::Gids(vec![5, 6]);
        assert!(groups.admit(1, 2, &[4, 6]) && groups.admit(1, 1, &[]));
        assert!(!groups.admit(1, 2, &[4]) && !groups.admit(1, 5, &[]));
        of(Readers::Gids(Vec::new())).encode().expect_err("none");
    }

    /// Version 2 has one form: what can be said in version 1 is not said in version 2.
    #[test]
    fn version_2_without_a_journal_and_groups_is_refused() {
        let mut bytes = for_groups().encode().expect("bytes");
        bytes[57] = 2;
        seal(&mut bytes);
        let error = Manifest::decode(&bytes).expect_err("version 1 says it");
        assert!(error.to_string().contains("neither of a pool"), "{error}");
    }

    #[test]
    fn the_recorded_bytes_of_version_2_are_read_and_written() {
        let pool_for_groups = Manifest {
            readers: for_groups().readers,
            ..pool()
        };
        let all: [(&[u8], Manifest); 3] = [
            (
                include_bytes!("../../tests/recorded/manifest-2.bin"),
                pool(),
            ),
            (
                include_bytes!("../../tests/recorded/manifest-2-groups.bin"),
                for_groups(),
            ),
            (
                include_bytes!("../../tests/recorded/manifest-2-both.bin"),
                pool_for_groups,
            ),
        ];
        for (recorded, manifest) in all {
            let decoded = Manifest::decode(recorded).expect("a manifest of version 2");
            assert_eq!(decoded, manifest);
            assert_eq!(manifest.encode().expect("bytes"), recorded);
            assert_eq!(recorded[8..12], SECOND.to_le_bytes());
        }
    }

    #[test]
    fn every_single_changed_byte_is_noticed() {
        every_byte_counts(&small());
        every_byte_counts(&pool());
        every_byte_counts(&for_groups());
    }

    fn every_byte_counts(manifest: &Manifest) {
        let good = manifest.encode().expect("bytes");
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(Manifest::decode(&bad).is_err(), "byte {at}");
        }
        for len in 0..good.len() {
            assert!(Manifest::decode(&good[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn another_version_names_both() {
        let mut bytes = small().encode().expect("bytes");
        bytes[8] = 3;
        let error = Manifest::decode(&bytes)
            .expect_err("another version")
            .to_string();
        assert_eq!(
            error,
            "the version of a manifest differs: 3 there, 1 to 2 here; commit the object again with this version"
        );
    }

    #[test]
    fn a_manifest_that_announces_more_than_it_has_costs_nothing() {
        let mut bytes = small().encode().expect("bytes");
        bytes[72..76].copy_from_slice(&1_000_000u32.to_le_bytes());
        seal(&mut bytes);
        assert!(
            Manifest::decode(&bytes)
                .expect_err("no such parts")
                .to_string()
                .contains("has bytes for")
        );
        bytes[80..88].copy_from_slice(&u64::MAX.to_le_bytes());
        seal(&mut bytes);
        assert!(Manifest::decode(&bytes).is_err());
    }

    #[test]
    fn one_that_is_too_large_is_refused() {
        let user = vec![0; MOST_MANIFEST as usize];
        let large = manifest(Layout::pack([], &user).expect("a layout"), Readers::Owner);
        assert!(
            large
                .encode()
                .expect_err("too large")
                .to_string()
                .contains("at most 64 MiB")
        );
    }

    fn any_part(index: usize) -> impl Strategy<Value = PartSpec> {
        let dimension =
            (0u64..9, 0u64..99).prop_map(|(extent, stride)| Dimension { extent, stride });
        let dtype = (0u8..=17, 1u8..=128, 1u16..=4).prop_map(|(code, bits, lanes)| DType {
            code,
            bits,
            lanes,
        });
        (
            "[a-zäé./0-9]{0,12}",
            dtype,
            vec(dimension, 0..5),
            0u64..1 << 40,
        )
            .prop_map(move |(name, dtype, dimensions, more)| {
                // No name has a hyphen, so that no two parts are called alike.
                let mut spec = PartSpec {
                    name: format!("{name}-{index}"),
                    dtype,
                    dimensions,
                    len: 0,
                };
                // As long as it must be, and a bit more.
                spec.len = (0..64)
                    .map(|bit| 1u64 << bit)
                    .find(|&len| {
                        spec.len = len;
                        spec.check().is_ok()
                    })
                    .map_or(1 << 20, |len| len + more);
                spec
            })
    }

    fn any_manifest() -> impl Strategy<Value = Manifest> {
        let parts =
            (0usize..12).prop_flat_map(|count| (0..count).map(any_part).collect::<Vec<_>>());
        let readers = prop_oneof![
            Just(Readers::Owner),
            Just(Readers::Everybody),
            vec(any::<u32>(), 1..=MOST_UIDS).prop_map(Readers::Uids),
            vec(any::<u32>(), 1..=MOST_UIDS).prop_map(Readers::Gids),
        ];
        let home = proptest::option::of("[a-zé]{1,20}");
        (
            parts,
            vec(any::<u8>(), 0..100),
            readers,
            any::<u64>(),
            0u32..31,
            home,
            any::<bool>(),
        )
            .prop_map(
                |(parts, user, readers, epoch, granularity, home, is_pool)| {
                    let mut layout = Layout::pack(parts, &user).expect("good parts");
                    if is_pool && !layout.regions().is_empty() {
                        layout = layout.with_journal(8_192).expect("a journal's size");
                    }
                    let mut manifest = manifest(layout, readers);
                    manifest.epoch = Epoch(epoch);
                    manifest.home = home;
                    manifest.granularity = 1 << granularity;
                    manifest
                },
            )
    }

    proptest! {
        #[test]
        fn a_manifest_survives_its_bytes(manifest in any_manifest()) {
            let bytes = manifest.encode().expect("bytes");
            prop_assert_eq!(Manifest::decode(&bytes).expect("its own bytes"), manifest);
        }

        #[test]
        fn no_bytes_panic_and_what_decodes_is_canonical(
            manifest in any_manifest(), at in any::<proptest::sample::Index>(), with in vec(any::<u8>(), 1..9),
        ) {
            let mut bytes = manifest.encode().expect("bytes");
            let at = at.index(bytes.len());
            for (byte, new) in bytes[at..].iter_mut().zip(with) {
                *byte = new;
            }
            seal(&mut bytes);
            if let Ok(manifest) = Manifest::decode(&bytes) {
                prop_assert_eq!(manifest.encode().expect("bytes"), bytes);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(mut bytes in vec(any::<u8>(), 0..400)) {
            let _ = Manifest::decode(&bytes);
            if bytes.len() >= HEADER {
                bytes[..12].copy_from_slice(b"GIPCobj1\x01\0\0\0");
                seal(&mut bytes);
                let _ = Manifest::decode(&bytes);
            }
        }
    }
}
