//! GPU memory that outlives the process that filled it.
//!
//! An **object** is a name, an epoch and a list of parts with their layout. One writer fills it, it
//! becomes visible whole at its commit, and never changes afterwards. A **broker** owns it: a
//! process that does not touch its bytes and needs no driver context. A **keeper** holds the same
//! descriptors, so that the broker may die too.
//!
//! Read in this order:
//!
//! 1. [`object`]: identity, layout, manifest: what an object is, as bytes.
//! 2. [`memory`]: regions that only descriptors keep, and addresses that they come and go on.
//! 3. [`pool`]: which blocks of memory that stays writable are whole.
//! 4. [`wire`]: the messages between broker and participants.
//! 5. [`server`]: the broker's process. [`keeper`]: the keeper's.
//! 6. [`client`]: writers and readers.

// Tests: `crates/broker/tests/objects`, `crates/cli/tests/objects.rs`.

pub mod client;
mod error;
pub mod keeper;
pub mod memory;
pub mod object;
pub mod pool;
pub mod server;
pub mod wire;

pub use client::{
    Client, ClientBuilder, Commit, CreateOptions, GroupWriter, Pool, PoolReader, Prepared, Reader,
    Roll, Scratch, Writer,
};
pub use error::{ObjectError, Result};
pub use object::identity::{Epoch, Identity, Lineage};
pub use object::layout::Layout;
pub use object::manifest::{Manifest, Readers};
pub use object::part::{DType, Dimension, Part, PartSpec};
pub use server::broker::{Broker, Options};
pub use server::control::Control;
pub use server::limits::Limits;
pub use transport::server::Allowed;
pub use wire::{Selector, Standing};
