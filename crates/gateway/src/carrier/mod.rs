//! The carrier: the process that speaks to the fabric, and that is worth nothing to an attacker.
//!
//! UCX checks no key on its software paths: a peer that reaches the port reads and writes the memory
//! of the process behind it. So that process has no connection to the broker and none to Zenoh, no
//! keys and no environment but UCX's and NIXL's; it may open no file to write, start no program and
//! signal no other process; and it maps what is lent, and nothing else. A gateway that serves has one, and the
//! process that pulls has another.
//!
//! ```text
//! gateway, or the process that pulls          carrier
//! ─── socket pair: one packet a message ───────────────────────────────────────────────────
//! Slots(bytes), 1 descriptor          ─►      maps them to write: reads land there
//!                                     ◄─      Ready
//! Lend(bytes of each), descriptors    ─►      maps them to read, registers them
//!                                     ◄─      Lent(addresses)
//! Metadata(lendings)                  ─►
//!                                     ◄─      Metadata, bytes: of these alone
//! End(lending)                        ─►      takes the registration back, and maps zeroes there
//! Load, bytes of a peer's metadata    ─►
//!                                     ◄─      Loaded
//! Read(peer, address, bytes, slot)    ─►      reads into the slot
//!                                     ◄─      Read
//! Forget(peer)                        ─►
//! ```
//!
//! Each question has a number that no other has; the answer names it. `Failed(why)` may answer any.
//! A lending is named by the number of its `Lend`, a peer by that of its `Load`.
//!
//! | state of the carrier | what the gateway does | leaves by |
//! |---|---|---|
//! | starting | waits: a lease or a pull that comes meanwhile waits with it | `Ready`, or its end |
//! | alive | asks | its end, an answer that makes no sense, a question without an answer for [`PATIENCE`], a packet that it does not take: it is killed |
//! | dead | fails all questions, ends the leases of its lendings, starts another after a pause | the start |
//!
//! | who dies | what is lost |
//! |---|---|
//! | the carrier that serves | its lendings, and so their leases: readers ask again. The gateway and all other work go on |
//! | the carrier that pulls | the reads under way fail, and are tried again |
//! | the gateway | its carrier ends with the socket |
//!
//! **The bytes that are read.** The carrier reads into slots that it shares with the process that
//! pulls, which copies them to the object: an object that is being filled is never mapped where a
//! peer could write to it. A slot is used again when its read was answered, or the carrier is dead.
//!
//! **A lease that has ended.** Zeroes are mapped over its memory in one step (`mmap` with
//! `MAP_FIXED`), so a late read finds zeroes, and the object's memory comes back at once. The
//! addresses stay taken, 16 TiB of them at most, and then the oldest go: a read that is later still
//! can end the carrier, and nothing else.
//!
//! **What a hostile carrier can do**: read what is lent at this moment, give peers wrong bytes, and
//! put wrong bytes into slots. Bytes are compared with the origin's digest before they are committed
//! ([`digest`](crate::digest)), so they cost another attempt. It cannot write to an object, since
//! what is lent can be mapped to read alone, and it cannot make the gateway confirm a lease.
//!
//! Objects in device memory are carried by the gateway's own process: see docs/HOSTS.md.
//!
//! 1. `packet`: one message. `table`: questions and slots; pure, and checked by `tests/carrier.rs`
//!    against a carrier that answers anything, twice, late or never.
//! 2. [`client`]: the gateway's side, a [`Transport`](crate::transport::Transport).
//! 3. [`worker`]: the carrier. `memory`: what it maps. `cage`: what it may do.

// Tests: `crates/gateway/tests/carrier.rs`, `crates/gateway/tests/gateways/carriers.rs`.

mod cage;
pub mod client;
mod memory;
mod packet;
pub mod table;
pub mod worker;

use std::time::Duration;

/// How long a question may be without an answer.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Slots that reads land in.
pub const SLOTS: usize = 24;
/// Bytes of each.
pub const SLOT: u64 = 4 << 20;
