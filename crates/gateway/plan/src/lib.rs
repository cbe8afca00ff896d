//! Decides which host reads an object from which.
//!
//! Every gateway decides for itself from what it has heard; there is no coordinator. Reports come
//! late, differ between hosts, and may be false. So each decision is a pure function of a [`View`]
//! with a seed in it, and what a host saw itself outranks what others say of themselves.
//!
//! | module | decision | who takes it |
//! |---|---|---|
//! | [`view`] | what a host has heard and seen | |
//! | [`choose`](mod@choose) | from whom to read, or how long to wait | the host that wants the object |
//! | [`keep`](mod@keep) | whether to go on with a slow read | the same host, during the read |
//! | [`pace`] | how long a read is expected to take | both |
//! | [`admit`](mod@admit) | whether to serve a host that asks | the host that has the object |
//!
//! Four rules give about log2 n rounds for n hosts. A host serves few reads of one object at a
//! time, so a read gets most of the link. A host that has read the object serves it. The origin
//! steps aside after two reads, when others serve. A host that finds everybody busy waits a time
//! drawn from its seed and looks again at what it has heard, which costs no message.
//!
//! ```
//! use std::time::Duration;
//! use gpu_ipc_gateway_plan::{Source, Step, View, choose};
//!
//! let second = Duration::from_secs(1);
//! let source = |host, origin, reads| Source { host, origin, heard: second, reads, limit: 1 };
//! let sources = [source("a", true, 1), source("b", false, 0)];
//! let view = View {
//!     me: "c", now: 2 * second, wanted_since: second, expected: second, sources: &sources,
//!     troubles: &[], seed: 7 };
//! assert_eq!(choose(&view), Step::Read { host: "b", last_resort: false });
//! ```

// Tests: `crates/gateway/plan/tests/properties.rs`, `testing/simulation/tests`.

pub mod admit;
pub mod choose;
pub mod dice;
pub mod keep;
pub mod pace;
pub mod view;

pub use admit::{Admission, Desk, READS_AT_ONCE, admit, announced};
pub use choose::{Step, choose};
pub use dice::Dice;
pub use keep::{Reading, Verdict, keep};
pub use pace::Pace;
pub use view::{Source, Trouble, TroubleKind, View};
