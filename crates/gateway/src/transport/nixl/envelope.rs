//! The metadata that one gateway gives another: NIXL's own, with what NIXL does not say.
//!
//! ```text
//! magic 8 | length of the name 2 | name | ranges 4 | { address 8, bytes 8, place 4, serial 8 } ...
//!         | { length 4, NIXL's metadata } ... | check 8
//! ```
//!
//! All numbers are little-endian. A range's *serial* is of its registration: NIXL refuses a range
//! that it knows with another key, and forgets the peer when it does
//! (`nixlRemoteSection::loadRemoteData`), so that transfers under way are lost. With the serials
//! that is seen before NIXL is asked.
//!
//! NIXL's metadata are several: how to connect, then a list of ranges each. Its library's C
//! functions cannot ask for both in one.
//!
//! The *check* is FNV-1a of all bytes before it, against a message cut off or damaged, and not
//! against a peer that lies: UCX's backend keeps the name of an agent whose metadata it has read
//! half, and refuses that name from then on (`nixlUcxEngine::loadRemoteConnInfo`).

use crate::error::{Error, Result};
use crate::transport::{Place, Span};

const MAGIC: [u8; 8] = *b"gipcnix2";

/// The longest name of an agent.
pub const MAX_NAME: usize = 128;
/// The most ranges of one gateway: an object of 64 Ki parts, twice.
pub const MAX_RANGES: usize = 1 << 17;
/// The most bytes of one of NIXL's metadata: UCX's keys take about 100 bytes a range.
const MAX_BLOB: usize = 64 << 20;
/// The most of NIXL's metadata: how to connect, and lists of two kinds of memory for an object and
/// each of its rings.
const MAX_BLOBS: usize = 16;

const HOST: u32 = u32::MAX;

/// A registered range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// Where.
    pub span: Span,
    /// Of which registration of that process.
    pub serial: u64,
}

/// What a gateway tells of its memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Envelope {
    /// The agent's name.
    pub name: String,
    /// What is registered.
    pub ranges: Vec<Range>,
    /// NIXL's metadata: how to connect, then ranges.
    pub blobs: Vec<Vec<u8>>,
}

impl Envelope {
    /// Writes it.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend((self.name.len() as u16).to_le_bytes());
        bytes.extend(self.name.as_bytes());
        bytes.extend((self.ranges.len() as u32).to_le_bytes());
        for Range { span, serial } in &self.ranges {
            bytes.extend(span.address.to_le_bytes());
            bytes.extend(span.bytes.to_le_bytes());
            let place = match span.place {
                Place::Host => HOST,
                Place::Device(ordinal) => ordinal,
            };
            bytes.extend(place.to_le_bytes());
            bytes.extend(serial.to_le_bytes());
        }
        for blob in &self.blobs {
            bytes.extend((blob.len() as u32).to_le_bytes());
            bytes.extend(blob);
        }
        bytes.extend(check(&bytes).to_le_bytes());
        bytes
    }

    /// Reads one: bytes from the network, which may be anything.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] for what is none.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let whole = bytes.len();
        let Some((bytes, &said)) = bytes.split_last_chunk() else {
            return Err(malformed(format!("{whole} bytes")));
        };
        let (must, said) = (check(bytes), u64::from_le_bytes(said));
        if said != must {
            return Err(malformed(format!(
                "{whole} bytes with the check {said:#x} instead of {must:#x}"
            )));
        }
        let mut rest = Reader(bytes);
        let (Some(MAGIC), Some(length)) = (rest.array(), rest.array()) else {
            return Err(malformed(format!(
                "{whole} bytes without the mark of this version"
            )));
        };
        let length = usize::from(u16::from_le_bytes(length));
        let name = rest
            .take(length)
            .and_then(|name| std::str::from_utf8(name).ok())
            .unwrap_or("");
        if name.is_empty() || length > MAX_NAME || !name.bytes().all(|byte| byte.is_ascii_graphic())
        {
            return Err(malformed(format!(
                "{whole} bytes with a name of {length} that is none"
            )));
        }
        let count = rest
            .array()
            .map_or(usize::MAX, |count| u32::from_le_bytes(count) as usize);
        if count > MAX_RANGES {
            return Err(malformed(format!(
                "{whole} bytes that speak of {count} ranges"
            )));
        }
        let mut ranges = Vec::new();
        for _ in 0..count {
            let Some(range) = rest.range() else {
                return Err(malformed(format!(
                    "{whole} bytes that end within {count} ranges, or hold an empty one"
                )));
            };
            ranges.push(range);
        }
        let mut blobs = Vec::new();
        while !rest.0.is_empty() {
            let length = rest.array().map(u32::from_le_bytes).unwrap_or_default() as usize;
            match rest.take(length) {
                Some(blob) if !blob.is_empty() && length <= MAX_BLOB && blobs.len() < MAX_BLOBS => {
                    blobs.push(blob.to_vec());
                }
                _ => return Err(malformed(format!("{whole} bytes that end within NIXL's"))),
            }
        }
        if blobs.is_empty() {
            return Err(malformed(format!("{whole} bytes without NIXL's")));
        }
        Ok(Self {
            name: name.to_owned(),
            ranges,
            blobs,
        })
    }
}

/// FNV-1a (draft-eastlake-fnv, 64 bits).
fn check(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn malformed(got: String) -> Error {
    Error::Malformed {
        what: "the metadata of its memory",
        got,
        must: "what this version's `metadata` gives",
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(first)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn range(&mut self) -> Option<Range> {
        let address = u64::from_le_bytes(self.array()?);
        let bytes = u64::from_le_bytes(self.array()?);
        let place = match u32::from_le_bytes(self.array()?) {
            HOST => Place::Host,
            ordinal => Place::Device(ordinal),
        };
        let serial = u64::from_le_bytes(self.array()?);
        super::agent::range(address, bytes).ok()?;
        Some(Range {
            span: Span {
                address,
                bytes,
                place,
            },
            serial,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Envelope {
        let span = |address, place| Range {
            span: Span {
                address,
                bytes: 4096,
                place,
            },
            serial: 7,
        };
        Envelope {
            name: "gateway-1".into(),
            ranges: vec![span(0x1000, Place::Host), span(0x2000, Place::Device(3))],
            blobs: vec![vec![1, 2, 3], vec![4]],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(
            Envelope::decode(&sample().encode()).expect("it is one"),
            sample()
        );
    }

    #[test]
    fn each_prefix_is_refused() {
        let bytes = sample().encode();
        for length in 0..bytes.len() {
            Envelope::decode(&bytes[..length]).expect_err("it is cut off");
            // With a check that fits, as one who lies would send it.
            let mut short = bytes[..length].to_vec();
            short.extend(check(&short).to_le_bytes());
            // One that ends behind the first of NIXL's is whole, and NIXL's to judge.
            let whole = bytes.len() - 8;
            assert!(
                Envelope::decode(&short).is_err() || length == whole || length == whole - 5,
                "{length} of {}",
                bytes.len()
            );
        }
    }

    #[test]
    fn an_empty_range_and_one_beyond_the_address_space_are_refused() {
        for (address, bytes) in [(4096, 0), (u64::MAX - 8, 16)] {
            let mut wrong = sample();
            wrong.ranges[1].span = Span {
                address,
                bytes,
                place: Place::Host,
            };
            Envelope::decode(&wrong.encode()).expect_err("it is wrong");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
            let mut checked = bytes.clone();
            checked.extend(check(&checked).to_le_bytes());
            prop_assert!(Envelope::decode(&bytes).is_err());
            prop_assert!(Envelope::decode(&checked).is_err());
        }

        #[test]
        fn one_changed_byte_is_refused_and_with_its_check_gives_what_is_there(at in 0usize..96, value in any::<u8>()) {
            let mut bytes = sample().encode();
            bytes.truncate(bytes.len() - 8);
            let at = at % bytes.len();
            bytes[at] = value;
            bytes.extend(check(&bytes).to_le_bytes());
            if let Ok(read) = Envelope::decode(&bytes) {
                prop_assert_eq!(read.encode(), bytes);
            }
        }
    }
}
