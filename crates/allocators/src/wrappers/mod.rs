//! Allocators over another, which stack in any order.
//!
//! | wrapper | what it adds |
//! |---|---|
//! | [`Tracking`] | what is live: sizes, tags, and the lines that asked |
//! | [`Guard`] | marks on both ends, checked when it is freed and on demand |
//! | [`NanFill`] | contents that show where memory is read before it is written, or after it is freed |
//! | [`Limit`] | a limit of its own, or one shared with others |
//! | [`Log`] | a line of CSV for each call, to be replayed |

// Tests: `crates/allocators/tests/wrappers.rs`.

mod guard;
mod limit;
mod log;
mod nan_fill;
mod tracking;

pub use guard::{Damage, Guard};
pub use limit::Limit;
pub use log::Log;
pub use nan_fill::NanFill;
pub use tracking::{Sizes, TagUse, Tracked, Tracking};
