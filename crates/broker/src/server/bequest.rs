//! What a broker leaves to its successor: names in the keeper's store, the file of removed names and
//! that of the history.
//!
//! | name in the store | what it is |
//! |---|---|
//! | `rSEQ.i` | region `i` of object `SEQ` |
//! | `mSEQ` | the sealed manifest of object `SEQ`, stored after all its regions |
//! | `tSEQ` | the tombs; of several the one with the highest number that can be read holds |
//! | `hSEQ` | the history; of several the one with the highest number that can be read holds |
//!
//! Numbers are in base 36, regions a hexadecimal digit: a name has at most 12 bytes.
//!
//! An object is whole if its manifest is there, checks, and has all its regions. A part of one, and
//! what has another kind of name, is closed. What another version wrote stays as it is: a manifest,
//! with the regions of its number, and a file of tombs or of the history that cannot be read, and a
//! name that another letter begins.
//!
//! The tombs are a sealed file: `GIPCtmb1`, crc32c of the rest u32, count u32, then for each name:
//! owner u32, bytes of the name u16, bytes of its home's name u16 (0 for a name whose home is
//! here), last epoch u64, removed up to u64, name, home's name.
//!
//! The history is a sealed file: `GIPChis1`, crc32c of the rest u32, 0 u32, lineage 16, the epoch
//! after which names begin that neither have an object nor a tomb u64.

use std::collections::BTreeMap;
use std::time::SystemTime;

use gpu_api::{Error, Result};

use crate::object::identity::{Epoch, Lineage, check_name};
use crate::object::manifest::Manifest;

/// The bytes of the file of the history.
pub const HISTORY_BYTES: u64 = 40;
const HISTORY_MAGIC: [u8; 8] = *b"GIPChis1";
/// The most bytes of the file of tombs.
pub const MOST_TOMBS: u64 = 64 << 20;
const MAGIC: [u8; 8] = *b"GIPCtmb1";
/// Numbers of objects stay below this: nine digits of base 36.
const MOST_SEQ: u64 = 36u64.pow(9);

/// What a successor must know besides the objects.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Bequest {
    /// What the epochs are of.
    pub history: History,
    /// Names that have lost objects.
    pub tombs: Tombs,
}

/// What the epochs are of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct History {
    /// Which history.
    pub lineage: Lineage,
    /// The epoch after which a name begins of which nothing else is known.
    pub floor: Epoch,
}

impl History {
    /// Writes it.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = HISTORY_MAGIC.to_vec();
        out.extend_from_slice(&[0; 8]);
        out.extend_from_slice(&self.lineage.0);
        out.extend_from_slice(&self.floor.0.to_le_bytes());
        let sum = crc32c::crc32c(&out[12..]);
        out[8..12].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Reads it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for anything that [`encode`](History::encode) does not write.
    pub fn decode(bytes: &[u8]) -> Result<History> {
        let invalid = || {
            Error::invalid(
                "the file of the history",
                format!("{} other bytes", bytes.len()),
                "what a broker of this version wrote",
            )
        };
        let whole: &[u8; HISTORY_BYTES as usize] = bytes.try_into().map_err(|_| invalid())?;
        let (lineage, floor) = whole[16..].split_first_chunk::<16>().ok_or_else(invalid)?;
        let floor = floor.try_into().map_err(|_| invalid())?;
        let history = History {
            lineage: Lineage(*lineage),
            floor: Epoch(u64::from_le_bytes(floor)),
        };
        if history.encode() == bytes {
            Ok(history)
        } else {
            Err(invalid())
        }
    }
}

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
        let invalid = || {
            Error::invalid(
                "the file of removed names",
                format!("{} other bytes", bytes.len()),
                "what a broker of this version wrote",
            )
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
    /// The history.
    History(u64),
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
            "h" => Some(Label::History(number(rest)?)),
            _ => None,
        }
    }
}

/// Says whether a name is as another version of a broker might give it: a letter, then a number.
fn is_of_another_version(name: &str) -> bool {
    let known = name.starts_with(['r', 'm', 't', 'h']);
    let lower = name.starts_with(|c: char| c.is_ascii_lowercase());
    // A known letter's rule for the number holds for all.
    !known && lower && Label::parse(&format!("m{}", &name[1..])).is_some()
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Label::Region(seq, region) => write!(f, "r{}.{region:x}", base36(*seq)),
            Label::Manifest(seq) => write!(f, "m{}", base36(*seq)),
            Label::Tombs(seq) => write!(f, "t{}", base36(*seq)),
            Label::History(seq) => write!(f, "h{}", base36(*seq)),
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

/// What a file in the store is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reading {
    /// A manifest of so many regions.
    Manifest(usize),
    /// Tombs.
    Tombs(Tombs),
    /// The history.
    History(History),
    /// What another version wrote, or what cannot be told from that.
    Foreign,
    /// Nothing that any version wrote.
    Broken,
}

/// What was found in a store, sorted.
#[derive(Debug)]
pub struct Found<F> {
    /// Manifests with their regions in order.
    pub whole: Vec<(u64, F, Vec<F>)>,
    /// The tombs that hold, and their number.
    pub tombs: Option<(u64, Tombs)>,
    /// The history that holds, and its number.
    pub history: Option<(u64, History)>,
    /// Some tombs cannot be read: epochs of names that were removed are not known.
    pub lacks_tombs: bool,
    /// What another version wrote, which stays.
    pub foreign: Vec<(String, F)>,
    /// Names of what belongs to nothing, to be taken out.
    pub rest: Vec<String>,
    /// A number above all that were found.
    pub next_seq: u64,
}

/// Sorts what a store holds; `read` reads a manifest, tombs or the history.
pub fn sort<F>(store: Vec<(String, F)>, mut read: impl FnMut(Label, &F) -> Reading) -> Found<F> {
    let mut found = Found {
        whole: Vec::new(),
        tombs: None,
        history: None,
        lacks_tombs: false,
        foreign: Vec::new(),
        rest: Vec::new(),
        next_seq: 1,
    };
    let mut manifests = BTreeMap::new();
    let mut regions: BTreeMap<u64, BTreeMap<u8, F>> = BTreeMap::new();
    for (name, file) in store {
        let Some(label) = Label::parse(&name) else {
            if is_of_another_version(&name) {
                found.foreign.push((name, file));
            } else {
                found.rest.push(name);
            }
            continue;
        };
        let seq = match label {
            Label::Region(seq, region) => {
                regions.entry(seq).or_default().insert(region, file);
                seq
            }
            Label::Manifest(seq) => {
                manifests.insert(seq, file);
                seq
            }
            Label::Tombs(seq) | Label::History(seq) => {
                let older = match read(label, &file) {
                    Reading::Tombs(tombs) => newest(&mut found.tombs, seq, tombs, Label::Tombs),
                    Reading::History(history) => {
                        newest(&mut found.history, seq, history, Label::History)
                    }
                    _ => {
                        found.lacks_tombs |= matches!(label, Label::Tombs(_));
                        found.foreign.push((name, file));
                        None
                    }
                };
                found.rest.extend(older);
                seq
            }
        };
        found.next_seq = found.next_seq.max(seq + 1);
    }
    for (seq, manifest) in manifests {
        let mine = regions.remove(&seq).unwrap_or_default();
        let label = Label::Manifest(seq);
        let names = |mine: &BTreeMap<u8, F>| -> Vec<String> {
            let regions = mine.keys().map(|region| Label::Region(seq, *region));
            [label]
                .into_iter()
                .chain(regions)
                .map(|label| label.to_string())
                .collect()
        };
        match read(label, &manifest) {
            Reading::Manifest(count)
                if mine.len() == count && mine.keys().copied().eq(0..count as u8) =>
            {
                found
                    .whole
                    .push((seq, manifest, mine.into_values().collect()));
            }
            Reading::Foreign => {
                let names = names(&mine);
                let files = [manifest].into_iter().chain(mine.into_values());
                found.foreign.extend(names.into_iter().zip(files));
            }
            _ => found.rest.extend(names(&mine)),
        }
    }
    for (seq, orphans) in regions {
        let orphans = orphans.into_keys();
        found
            .rest
            .extend(orphans.map(|region| Label::Region(seq, region).to_string()));
    }
    found
}

/// Takes a file in place of one with a lower number, and returns the name of the other.
fn newest<T>(
    holds: &mut Option<(u64, T)>,
    seq: u64,
    found: T,
    label: impl Fn(u64) -> Label,
) -> Option<String> {
    match holds {
        Some((newest, _)) if *newest >= seq => return Some(label(seq).to_string()),
        _ => {}
    }
    let older = holds.replace((seq, found));
    older.map(|(seq, _)| label(seq).to_string())
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
    /// When it was committed.
    pub since: SystemTime,
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

    fn tombs(last: u64) -> Tombs {
        Tombs(vec![Tomb {
            name: "a".into(),
            home: None,
            owner: 0,
            last: Epoch(last),
            removed: Epoch(0),
        }])
    }

    #[test]
    fn only_a_manifest_with_all_its_regions_is_whole() {
        let names = [
            "r1.0", "r1.1", "m1", "r2.0", "m3", "r4.0", "m4", "r4.2", "X", "m05", "t5", "t9", "t7",
            "h6", "h8",
        ];
        let found = sort(store(&names), |label, file| match label {
            Label::Tombs(_) => Reading::Tombs(tombs(*file as u64)),
            Label::History(number) => Reading::History(History {
                floor: Epoch(number),
                ..History::default()
            }),
            _ => Reading::Manifest(2),
        });
        assert_eq!(found.whole, [(1, 2, vec![0, 1])]);
        assert_eq!(found.tombs, Some((9, tombs(11))));
        assert_eq!(
            found.history.map(|(number, of)| (number, of.floor)),
            Some((8, Epoch(8)))
        );
        let mut rest = found.rest;
        rest.sort();
        assert_eq!(
            rest,
            [
                "X", "h6", "m05", "m3", "m4", "r2.0", "r4.0", "r4.2", "t5", "t7"
            ]
        );
        assert_eq!(
            (found.next_seq, found.foreign, found.lacks_tombs),
            (10, vec![], false)
        );
        let none = sort(store(&["r1.0", "m1"]), |_, _| Reading::Broken);
        assert!(none.whole.is_empty(), "a manifest that does not check");
        assert_eq!(none.rest, ["m1", "r1.0"]);
    }

    #[test]
    fn what_another_version_wrote_stays() {
        let names = [
            "r1.0", "m1", "r2.0", "r2.1", "m2", "t5", "t7", "d3", "h4", "dx.1",
        ];
        let found = sort(store(&names), |label, _| match label {
            Label::Manifest(1) => Reading::Manifest(1),
            Label::Tombs(5) => Reading::Tombs(tombs(3)),
            _ => Reading::Foreign,
        });
        assert_eq!(found.whole.len(), 1);
        let mut foreign: Vec<String> = found.foreign.into_iter().map(|(name, _)| name).collect();
        foreign.sort();
        assert_eq!(foreign, ["d3", "h4", "m2", "r2.0", "r2.1", "t7"]);
        assert_eq!(found.rest, ["dx.1"]);
        assert_eq!(
            found.tombs,
            Some((5, tombs(3))),
            "the newest that can be read"
        );
        assert!(found.lacks_tombs && found.history.is_none());
    }

    #[test]
    fn the_recorded_history_of_version_1_is_read_and_written() {
        let history = History {
            lineage: Lineage(std::array::from_fn(|byte| byte as u8)),
            floor: Epoch(7),
        };
        let recorded = include_bytes!("../../tests/recorded/history-1.bin");
        assert_eq!(History::decode(recorded).expect("version 1"), history);
        assert_eq!(history.encode(), recorded);
        assert_eq!(recorded.len() as u64, HISTORY_BYTES);
        for at in 0..recorded.len() {
            let mut bad = recorded.to_vec();
            bad[at] ^= 1;
            assert!(History::decode(&bad).is_err(), "byte {at}");
            assert!(History::decode(&recorded[..at]).is_err(), "{at} bytes");
        }
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
            for label in [
                Label::Region(seq, region), Label::Manifest(seq), Label::Tombs(seq), Label::History(seq),
            ] {
                let name = label.to_string();
                prop_assert!(name.len() <= 12, "{name}");
                prop_assert_eq!(Label::parse(&name), Some(label));
            }
        }

        #[test]
        fn what_parses_is_canonical(name in "[rmthx][0-9a-zA-Z]{0,10}(\\.[0-9a-g])?") {
            if let Some(label) = Label::parse(&name) {
                prop_assert_eq!(label.to_string(), name);
            }
        }
    }
}
