//! What holds for the messages of either direction.

use std::fmt::Debug;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestCaseResult;
use transport::wire::packet::MOST_BYTES;
use transport::wire::table::{Message, decode, encode};

use super::VERSIONS;

/// A message is read as it was written, and not with another length or number of descriptors.
pub(super) fn check_survival<M: Message + PartialEq + Debug>(message: &M) -> TestCaseResult {
    let mut packet = [0; MOST_BYTES];
    let (version, fds) = (VERSIONS.highest, message.fds());
    let len = encode(message, &mut packet, version);
    let (again, of) = decode::<M>(&packet[..len], fds).expect("its own bytes");
    prop_assert_eq!((&again, of), (message, version));
    prop_assert!(decode::<M>(&packet[..len], fds + 1).is_err());
    prop_assert!(decode::<M>(&packet[..len - 1], fds).is_err());
    prop_assert!(decode::<M>(&packet[..=len], fds).is_err());
    Ok(())
}

/// Bytes with one that is another are refused, or have another meaning, of which they are the only
/// ones.
pub(super) fn check_canonical<M: Message + PartialEq + Debug>(
    message: &M,
    at: Index,
    with: u8,
) -> TestCaseResult {
    let mut packet = [0; MOST_BYTES];
    let len = encode(message, &mut packet, VERSIONS.highest);
    packet[at.index(len)] = with;
    let fds = u16::from_le_bytes([packet[6], packet[7]]);
    if let Ok((message, version)) = decode::<M>(&packet[..len], fds.into()) {
        let mut again = [0; MOST_BYTES];
        prop_assert_eq!(encode(&message, &mut again, version), len);
        prop_assert_eq!(&again[..len], &packet[..len]);
    }
    Ok(())
}
