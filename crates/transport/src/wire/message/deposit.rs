//! The names of file descriptors that a session keeps.

use std::fmt;

use crate::wrappers;

/// Names a file descriptor that a session keeps: 16 bytes that its depositor draws.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DepositId(pub [u8; 16]);

wrappers!(DepositId);

impl fmt::Display for DepositId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
