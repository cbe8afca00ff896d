//! The bytes between producer and participant: descriptors by any transport, messages by the
//! socket.

pub mod checksum;
pub mod descriptor;
pub mod lease_address;
pub mod message;
pub mod packet;
