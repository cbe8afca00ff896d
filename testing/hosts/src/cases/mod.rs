//! What is done to hosts. Each case has a world of its own; a case that finds nothing says what it
//! saw.

mod garbage;
mod gateways;
mod link;
mod names;
mod relay;
mod replay;
mod rogue;
mod steps;
mod stop;

pub use stop::STALLS_AFTER;

use crate::world::Means;

/// A case: what it saw, or what it found.
pub type Case = fn(&Means) -> Result<String, String>;

/// All of them, the longest first.
pub const ALL: &[(&str, Case)] = &[
    ("killed at each step", steps::itself),
    ("the other side killed at each step", steps::other_side),
    (
        "the origin's broker killed at each step",
        steps::broker_of_origin,
    ),
    (
        "the replica's broker killed at each step",
        steps::broker_of_replica,
    ),
    ("killed at each step of a ring", steps::of_a_ring),
    (
        "a reader is stopped while its object's name and memory become another's",
        stop::reader,
    ),
    (
        "a reader is stopped beyond its lease, and goes on",
        stop::reader_beyond_its_lease,
    ),
    (
        "a carrier is stopped beyond its lease, and reads on",
        stop::carrier_beyond_its_lease,
    ),
    (
        "an origin is stopped while its object's name becomes another's",
        stop::origin,
    ),
    (
        "a relay delays, cuts and truncates",
        relay::delays_cuts_and_truncates,
    ),
    (
        "a link is down in the middle of a read, and up again",
        link::down_and_up,
    ),
    (
        "a link is down until the reader gives up",
        link::down_for_good,
    ),
    (
        "a gateway is started again at the same address",
        gateways::same_address,
    ),
    ("two gateways for one broker", gateways::two_for_one_broker),
    ("a rogue edits metadata", rogue::edits_metadata),
    (
        "a rogue edits metadata beside rings",
        rogue::edits_metadata_beside_rings,
    ),
    ("a certificate of another host", names::of_another),
    ("garbage on every port", garbage::on_every_port),
    ("an old confirmation is asked again", replay::confirmation),
    ("control: what nobody confirmed is committed", stop::control),
];

/// Those that `--carrier nixl` runs unless some are named. Others need what plain TCP can be told,
/// or take long.
pub const BY_NIXL: &[&str] = &[
    "a carrier is stopped beyond its lease, and reads on",
    "a reader is stopped beyond its lease, and goes on",
    "a link is down in the middle of a read, and up again",
    "a link is down until the reader gives up",
    "a rogue edits metadata",
    "a rogue edits metadata beside rings",
    "garbage on every port",
];
