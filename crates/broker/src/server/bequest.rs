//! What a broker leaves to its successor: names in the keeper's store, and the file of removed
//! names.
//!
//! | name in the store | what it is |
//! |---|---|
//! | `rSEQ.i` | region `i` of object `SEQ` |
//! | `mSEQ` | the sealed manifest of object `SEQ`, stored after all its regions |
//! | `tSEQ` | the tombs; of several the one with the highest number holds |
//!
//! Numbers are in base 36, regions a hexadecimal digit: a name has at most 12 bytes.
//!
//! An object is whole if its manifest is there, checks, and has all its regions. Whatever else is
//! found is closed.
//!
//! The tombs are a sealed file: `GIPCtmb1`, crc32c of the rest u32, count u32, then for each name:
//! owner u32, bytes of the name u16, bytes of its home's name u16 (0 for a name whose home is
//! here), last epoch u64, removed up to u64, name, home's name.

use std::collections::BTreeMap;

use gpu_api::{Error, Result};

use crate::object::identity::{Epoch, check_name};
use crate::object::manifest::Manifest;

/// The most bytes of the file of tombs.
pub const MOST_TOMBS: u64 = 64 << 20;
const MAGIC: [u8; 8] = *b"GIPCtmb1";
/// Numbers of objects stay below this: nine digits of base 36.
const MOST_SEQ: u64 = 36u64.pow(9);

/// What a name keeps when its objects are gone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tomb {
    /// The name.
    pub name: String,
    /// The host that the name is written on, if not on this one.
    pub home: Option<String>,
    /// The user that owns it.
    pub owner: u32,
    /// The last epoch that it had.
    pub last: Epoch,
    /// Every epoch up to this one was removed.
    pub removed: Epoch,
}

/// The tombs of all names that have one.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tombs(pub Vec<Tomb>);

impl Tombs {
    /// Writes them.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&(self.0.len() as u32).to_le_bytes());
        for tomb in &self.0 {
            out.extend_from_slice(&tomb.owner.to_le_bytes());
            let home = tomb.home.as_deref().unwrap_or_default();
            out.extend_from_slice(&(tomb.name.len() as u16).to_le_bytes());
            out.extend_from_slice(&(home.len() as u16).to_le_bytes());
            out.extend_from_slice(&tomb.last.0.to_le_bytes());
            out.extend_from_slice(&tomb.removed.0.to_le_bytes());
            out.extend_from_slice(tomb.name.as_bytes());
            out.extend_from_slice(home.as_bytes());
        }
        let sum = crc32c::crc32c(&out[12..]);
        out[8..12].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Reads them.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for anything that [`encode`](Tombs::encode) does not write.
    pub fn decode(bytes: &[u8]) -> Result<Tombs> {
        let invalid = || Error::Invalid {
            what: "the file of removed names",
            got: format!("{} other bytes", bytes.len()),
            must: "what a broker of this version wrote",
        };
        let (magic, rest) = bytes.split_first_chunk::<8>().ok_or_else(invalid)?;
        let (sum, body) = rest.split_first_chunk::<4>().ok_or_else(invalid)?;
        if *magic != MAGIC || u32::from_le_bytes(*sum) != crc32c::crc32c(body) {
            return Err(invalid());
        }
        let (count, mut rest) = body.split_first_chunk::<4>().ok_or_else(invalid)?;
        let mut tombs = Vec::new();
        for _ in 0..u32::from_le_bytes(*count) {
            let (head, more) = rest.split_first_chunk::<24>().ok_or_else(invalid)?;
            let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
            let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
            let (names, homes) = (half(4) & 0xffff, half(4) >> 16);
            let (name, more) = more.split_at_checked(names as usize).ok_or_else(invalid)?;
            let name = str::from_utf8(name).map_err(|_| invalid())?;
            check_name("a removed name", name)?;
            let (home, more) = more.split_at_checked(homes as usize).ok_or_else(invalid)?;
            let home = str::from_utf8(home).map_err(|_| invalid())?;
            if !home.is_empty() {
                check_name("the home of a removed name", home)?;
            }
            let home = (!home.is_empty()).then(|| home.to_owned());
            let (last, removed) = (Epoch(word(8)), Epoch(word(16)));
            tombs.push(Tomb {
                name: name.into(),
                home,
                owner: half(0),
                last,
                removed,
            });
            rest = more;
        }
        if rest.is_empty() {
            Ok(Tombs(tombs))
        } else {
            Err(invalid())
        }
    }
}

/// What a name in the store stands for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Label {
    /// A region of an object.
    Region(u64, u8),
    /// An object's manifest.
    Manifest(u64),
    /// The tombs.
    Tombs(u64),
}

impl Label {
    /// Reads a name; `None` for one that no broker gives.
    pub fn parse(name: &str) -> Option<Label> {
        let (kind, rest) = name.split_at_checked(1)?;
        let number = |digits: &str| {
            let canonical = !digits.is_empty() && (digits == "0" || !digits.starts_with('0'));
            let lower = digits
                .bytes()
                .all(|b| b.is_ascii_digit() || b.is_ascii_lowercase());
            let number = u64::from_str_radix(digits, 36).ok()?;
            (canonical && lower && number < MOST_SEQ).then_some(number)
        };
        match kind {
            "r" => {
                let (seq, region) = rest.split_once('.')?;
                let [digit @ (b'0'..=b'9' | b'a'..=b'f')] = region.as_bytes() else {
                    return None;
                };
                let region = char::from(*digit).to_digit(16)?;
                Some(Label::Region(number(seq)?, region as u8))
            }
            "m" => Some(Label::Manifest(number(rest)?)),
            "t" => Some(Label::Tombs(number(rest)?)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Label::Region(seq, region) => write!(f, "r{}.{region:x}", base36(*seq)),
            Label::Manifest(seq) => write!(f, "m{}", base36(*seq)),
            Label::Tombs(seq) => write!(f, "t{}", base36(*seq)),
        }
    }
}

fn base36(mut number: u64) -> String {
    let mut digits = Vec::new();
    loop {
        digits.push(b"0123456789abcdefghijklmnopqrstuvwxyz"[(number % 36) as usize]);
        number /= 36;
        if number == 0 {
            digits.reverse();
            return digits.into_iter().map(char::from).collect();
        }
    }
}

/// What was found in a store, sorted.
#[derive(Debug)]
pub struct Found<F> {
    /// Manifests with their regions in order.
    pub whole: Vec<(u64, F, Vec<F>)>,
    /// The newest tombs.
    pub tombs: Option<(u64, F)>,
    /// Names of what belongs to nothing, to be taken out.
    pub rest: Vec<String>,
    /// A number above all that were found.
    pub next_seq: u64,
}

/// Sorts what a store holds. `regions_of` reads a manifest and says how many regions it has, or
/// nothing if it is none.
pub fn sort<F>(
    store: Vec<(String, F)>,
    mut regions_of: impl FnMut(&F) -> Option<usize>,
) -> Found<F> {
    let mut rest = Vec::new();
    let mut manifests = BTreeMap::new();
    let mut regions: BTreeMap<u64, BTreeMap<u8, F>> = BTreeMap::new();
    let mut tombs: Option<(u64, F)> = None;
    let mut next_seq = 1;
    for (name, file) in store {
        let seq = match Label::parse(&name) {
            Some(Label::Region(seq, region)) => {
                regions.entry(seq).or_default().insert(region, file);
                seq
            }
            Some(Label::Manifest(seq)) => {
                manifests.insert(seq, file);
                seq
            }
            Some(Label::Tombs(seq)) => {
                match &tombs {
                    Some((newest, _)) if *newest >= seq => rest.push(name),
                    Some((older, _)) => {
                        rest.push(Label::Tombs(*older).to_string());
                        tombs = Some((seq, file));
                    }
                    None => tombs = Some((seq, file)),
                }
                seq
            }
            None => {
                rest.push(name);
                continue;
            }
        };
        next_seq = next_seq.max(seq + 1);
    }
    let mut whole = Vec::new();
    for (seq, manifest) in manifests {
        let mine = regions.remove(&seq).unwrap_or_default();
        let complete = regions_of(&manifest)
            .is_some_and(|count| mine.len() == count && mine.keys().copied().eq(0..count as u8));
        if complete {
            whole.push((seq, manifest, mine.into_values().collect()));
        } else {
            rest.push(Label::Manifest(seq).to_string());
            rest.extend(
                mine.into_keys()
                    .map(|region| Label::Region(seq, region).to_string()),
            );
        }
    }
    for (seq, orphans) in regions {
        rest.extend(
            orphans
                .into_keys()
                .map(|region| Label::Region(seq, region).to_string()),
        );
    }
    Found {
        whole,
        tombs,
        rest,
        next_seq,
    }
}

/// A whole object that was found in a keeper.
#[derive(Clone, Debug)]
pub struct Inherited<F> {
    /// Its number.
    pub seq: u64,
    /// What its manifest says.
    pub manifest: Manifest,
    /// The manifest itself.
    pub file: F,
    /// Its regions, in order.
    pub regions: Vec<F>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn store(names: &[&str]) -> Vec<(String, usize)> {
        names
            .iter()
            .enumerate()
            .map(|(i, name)| ((*name).to_owned(), i))
            .collect()
    }

    #[test]
    fn only_a_manifest_with_all_its_regions_is_whole() {
        let names = [
            "r1.0", "r1.1", "m1", "r2.0", "m3", "r4.0", "m4", "r4.2", "x", "m05", "t5", "t9", "t7",
        ];
        let found = sort(store(&names), |_| Some(2));
        assert_eq!(found.whole, [(1, 2, vec![0, 1])]);
        assert_eq!(found.tombs, Some((9, 11)));
        let mut rest = found.rest;
        rest.sort();
        assert_eq!(
            rest,
            ["m05", "m3", "m4", "r2.0", "r4.0", "r4.2", "t5", "t7", "x"]
        );
        assert_eq!(found.next_seq, 10);
        let none = sort(store(&["r1.0", "m1"]), |_| None);
        assert!(none.whole.is_empty(), "a manifest that does not check");
    }

    #[test]
    fn the_recorded_tombs_of_version_1_are_read_and_written() {
        let tombs = Tombs(vec![
            Tomb {
                name: "a".into(),
                home: None,
                owner: 1000,
                last: Epoch(7),
                removed: Epoch(7),
            },
            Tomb {
                name: "b/é".into(),
                home: None,
                owner: 0,
                last: Epoch(u64::MAX),
                removed: Epoch(0),
            },
        ]);
        let recorded = include_bytes!("../../tests/recorded/tombs-1.bin");
        assert_eq!(Tombs::decode(recorded).expect("tombs of version 1"), tombs);
        assert_eq!(tombs.encode(), recorded);
        for at in 0..recorded.len() {
            let mut bad = recorded.to_vec();
            bad[at] ^= 1;
            assert!(Tombs::decode(&bad).is_err(), "byte {at}");
            assert!(Tombs::decode(&recorded[..at]).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn a_tomb_keeps_the_home_of_its_name() {
        let tomb = |name: &str, home: Option<&str>| Tomb {
            name: name.into(),
            home: home.map(str::to_owned),
            owner: 7,
            last: Epoch(2),
            removed: Epoch(1),
        };
        let tombs = Tombs(vec![
            tomb("a", Some("host-é")),
            tomb("b", None),
            tomb(&"x".repeat(255), Some(&"y".repeat(255))),
        ]);
        assert_eq!(
            Tombs::decode(&tombs.encode()).expect("its own bytes"),
            tombs
        );
    }

    proptest! {
        #[test]
        fn a_label_survives_its_name(seq in 0..MOST_SEQ, region in 0u8..16) {
            for label in [Label::Region(seq, region), Label::Manifest(seq), Label::Tombs(seq)] {
                let name = label.to_string();
                prop_assert!(name.len() <= 12, "{name}");
                prop_assert_eq!(Label::parse(&name), Some(label));
            }
        }

        #[test]
        fn what_parses_is_canonical(name in "[rmtx][0-9a-zA-Z]{0,10}(\\.[0-9a-g])?") {
            if let Some(label) = Label::parse(&name) {
                prop_assert_eq!(label.to_string(), name);
            }
        }
    }
}
