//! What tells the messages of brokers from those of other protocols.

use transport::wire::packet::{Protocol, Versions};

/// The versions that this crate speaks.
pub const VERSIONS: Versions = Versions {
    lowest: 1,
    highest: 3,
};

/// The first version in which there are pools.
pub const KNOWS_POOLS: u16 = 3;

pub(super) static PROTOCOL: Protocol = Protocol {
    magic: *b"GO",
    magic_is: "20295, the bytes GO",
    versions: VERSIONS,
    in_all_versions: &[1, 130],
    most_text: 512,
    most_text_is: "at most 512",
    refusals: 64..=127,
    refusals_are: "1, 2, 4, 5, 6, 10 or 64 to 74",
};
