//! What a session tells its application.

use crate::notices::Vital;

/// Something a producer may want to know at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SessionNotice {
    /// A block is released of which a [`wait_released`](crate::SentBlock::wait_released) said that it was not.
    TryAgain,
    /// A [`collect`](crate::Session::collect) returns tokens of adopted memory: nobody holds or maps it any more.
    TokensReturned,
}

impl Vital for SessionNotice {
    fn is_vital(&self) -> bool {
        true
    }
}
