//! Remote leases, at the origin: which objects other gateways read at this moment, and until when.
//!
//! ```text
//! ask ─► Opening ──registered──► Live ──release, timer──► (ended) ─► registration taken back
//!           │                      ▲ │                       ▲
//!           │                renew └─┘                       │
//!           └───────── could not be opened, timer ───────────┘
//! ```
//!
//! | step | who | what |
//! |---|---|---|
//! | ask | replica | a number of its own. The origin opens the object at its broker (an ordinary lease, which keeps the bytes as they are), registers it, and answers (incarnation, lease, asker, identity, epoch). The lease's number is 128 random bits, which the asker alone is told |
//! | read | replica | as long as it likes; renews meanwhile |
//! | fill | replica, where it reads through a ring | the origin copies pieces to the lease's slots, if the lease is `Live` and its time is not over: see [`rings`] |
//! | confirm | replica, after its last byte | the origin says yes if (incarnation, lease, asker, identity) is `Live`, its time is not over, and the digest is its object's |
//! | end | origin, also when the carrier of the lease has died | **first** the row goes, so that no confirmation can say yes any more, **then** the registration is taken back, **then** the object is closed |
//!
//! Why a confirmed copy is right: objects never change, and a `Live` lease holds one open. The
//! confirmation was asked after the last byte had arrived and answered while the lease was `Live`.
//! It was `Live` from the registration on without a gap, since no row comes back: so every byte was
//! read from that object. Memory under an ended lease may give bytes of anything (NIXL does not
//! protect it), and then the confirmation says no.
//!
//! The order *ended, then taken back* is kept by the types: what a lease holds is inside the table,
//! and comes out of it as an [`Ended`] alone.
//!
//! A replay changes nothing that matters: a confirmation is only looked up, and its answer counts
//! for the question whose number it has; a renewal's number must rise, so an old one cannot keep a
//! lease alive; a release names a lease that no other will ever be; an ask that comes again while
//! its lease lives gets the same lease, and later one that nobody uses, until the timer ends it. A
//! timer ends remote leases only: local ones end by proof of death.
//!
//! What is forged names a lease by a number that cannot be guessed, and by the process that asked
//! for it: so no gateway renews, fills, confirms or ends the lease of another.
//!
//! Bytes that something on the way alters: the confirmation names a digest of what was read
//! ([`digest`](crate::digest)), and the origin says no to another than its object's. Memory of a
//! device has none, and there the fabric under the transport is trusted.
//!
//! What it does not cover: a gateway that lies about its own objects, or a certificate in wrong
//! hands. Gateways that may connect are trusted.
//!
//! Checked by `tests/protocol.rs`: every order of deliveries, losses, delays, repetitions, deaths,
//! timers and reuse of memory up to a bound, on these machines; the control there commits without a
//! confirmation, and publishes a mixture.
//!
//! `table`: the leases. `index`: what this host has, for those that ask. `admit`: whether to serve
//! one more, by the plan. [`rings`]: staging memory
//! for those that read. `digests`: what objects' bytes are. `register`: objects are registered beside the thread of [`serve`], which
//! answers questions.

pub mod admit;
mod digests;
pub mod index;
mod register;
pub mod rings;
pub mod serve;
mod table;

pub use register::TELL;
pub use table::{Asked, Ended, Limits, Table};
