//! The control socket: whole packets with file descriptors, between processes of one host.
//!
//! 1. `packet_socket`: making one, its address, and the errors of its calls.
//! 2. `directory`: where sockets lie by default, and the removal of those whose owner died.
//! 3. `listener`: a producer's end. Its name appears only once it listens; `bind_lock` is the right
//!    to make one.
//! 4. `connect`: a participant's end.
//! 5. `transfer`: sending and receiving, on either. `peer`: the process at the other end.
//!
//! Nothing here blocks. A caller that has to wait polls the descriptor.

mod bind_lock;
mod connect;
mod directory;
mod listener;
mod packet_socket;
mod peer;
#[cfg(test)]
pub(super) mod scratch;
mod transfer;

pub use connect::{Connecting, connect_within};
pub use directory::{list, runtime_dir, sweep_stale};
pub use listener::{Endpoint, Listener};
pub use packet_socket::take_over;
pub use peer::{Credentials, credentials, groups, peer_pidfd};
pub use transfer::{
    ReceiveOutcome, SendOutcome, hang_up, has_hung_up, is_lost, receive, receive_from,
    receive_guarded, send, wait_ready,
};
