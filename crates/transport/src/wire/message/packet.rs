//! What tells the messages of sessions from those of other protocols.

use crate::wire::descriptor::VERSION;
use crate::wire::packet::{Protocol, Versions};

pub(super) static PROTOCOL: Protocol = Protocol {
    magic: *b"GI",
    magic_is: "18759, the bytes GI",
    versions: Versions {
        lowest: VERSION,
        highest: VERSION,
    },
    in_all_versions: &[],
    most_text: 256,
    most_text_is: "at most 256",
    refusals: 1..=63,
    refusals_are: "1 to 14, but 3 and 9",
};
