//! The bytes between producer and participant: descriptors by any transport, messages by the
//! socket.

// Tests: `crates/transport/tests/wire_document.rs`, `crates/ipc-rc/tests/nonsense.rs`.

pub mod descriptor;
pub mod field;
pub mod lease_address;
pub mod message;
pub mod packet;
pub mod refusal;
pub mod table;
