//! Carries bytes from the memory of one gateway to that of another.
//!
//! A transport knows addresses and nothing of objects. The origin registers memory and gives its
//! metadata away; the replica loads that and reads. Nobody writes into another host's memory.
//!
//! ```text
//! origin                                   replica
//! register(memory) ─► Registration         register(memory) ─► Registration
//! metadata(registrations) ── bytes ──────► load_peer(bytes) ─► Peer
//!                                          peer.read(pairs)  ─► Transfer
//!                                          transfer.poll()   ─► Running ... Done
//!                                          flush()
//! ```
//!
//! A [`Peer`] reads, and not the transport with a peer as an argument: a transport is used as a
//! `dyn Transport`, and could not tell its own peers from another's.
//!
//! What a caller may lean on:
//!
//! - After [`Progress::Done`] and [`Transport::flush`] all bytes are in the destination, for the
//!   CPU or for work that is given to the device afterwards.
//! - After `Done`, or an error of [`Transfer::poll`], nothing is written to the destination any
//!   more. **A transfer that does neither may write for ever**: a stopped peer or a link that is
//!   down is not told by NIXL. Its destination must stay mapped until the process ends, and
//!   dropping the transfer takes nothing back.
//! - **Which** bytes were read is not the transport's affair: memory that the origin took back
//!   meanwhile may give others, without an error. The protocol of leases and confirmations is there
//!   for that.
//!
//! 1. [`nixl`]: NIXL, by its C library, loaded at run time. `tcp`: plain TCP, for tests: with the
//!    feature `faults`.
//! 2. [`choice`]: which ways there are, what a trial of each says, and which is taken.
//! 3. [`ring`]: the way through staging buffers, with copies and reads overlapped, as one
//!    [`Transfer`]. [`staging`]: the buffers of one side, and copies between them and an object.
//! 4. [`route`]: trials, the choice and the read, as one [`Transfer`].
//!
//! The way that bytes take is not known, but measured when a pull begins to read: UCX carries
//! virtual memory (`cuMemCreate`) by its slowest way where there is no RDMA: 0.4 GB/s between two
//! GPUs of one host, where `cudaMalloc` gets 368 (NVLink) and pinned host memory 1.4 over TCP
//! (H200, NIXL 1.5.1, UCX 1.23).

// Tests: `crates/gateway/tests/staging.rs`, `crates/gateway/tests/gateways/rings.rs`.

pub mod choice;
pub mod nixl;
pub mod ring;
pub mod route;
pub mod staging;
#[cfg(feature = "faults")]
#[doc(hidden)]
pub mod tcp;

use std::fmt;
use std::os::fd::OwnedFd;

use crate::error::Result;

/// Where memory lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Place {
    /// In the host's memory.
    Host,
    /// On the device with this ordinal, as the process that gives the span counts them.
    Device(u32),
}

/// A range of this process' memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Span {
    /// The first byte.
    pub address: u64,
    /// How many.
    pub bytes: u64,
    /// Where they lie.
    pub place: Place,
}

/// A range of another gateway's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RemoteSpan {
    /// The first byte, as an address of that process.
    pub address: u64,
    /// How many.
    pub bytes: u64,
    /// Where they lie, with that process' ordinal.
    pub place: Place,
}

/// Bytes to read, and where to: both of one length.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Pair {
    /// The source.
    pub from: RemoteSpan,
    /// The destination, in registered memory.
    pub to: Span,
}

/// How far a transfer is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Progress {
    /// Under way. The bytes that are known to have arrived: a transport that does not know says 0
    /// until it is done.
    Running {
        /// How many.
        bytes: u64,
    },
    /// All bytes have arrived.
    Done,
}

/// An engine that carries bytes.
///
/// Its methods may be called by several threads.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Names the engine, for people and figures: `nixl`, `tcp`.
    fn kind(&self) -> &'static str;

    /// Makes memory readable for peers, and a possible destination of reads, until the registration
    /// is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) for memory that the engine does not take.
    ///
    /// # Safety
    ///
    /// The memory is mapped in this process, readable and, if reads go there, writable, until the
    /// registration is dropped and all transfers into it have ended.
    unsafe fn register(&self, memory: &[Span]) -> Result<Box<dyn Registration>>;

    /// Makes memory readable for peers, as [`register`](Transport::register) does. An engine in a
    /// process of its own maps it by `files`, one for each span, from the first byte of each.
    ///
    /// # Errors
    ///
    /// As [`register`](Transport::register).
    ///
    /// # Safety
    ///
    /// As [`register`](Transport::register); nothing is written to the memory.
    unsafe fn lend(&self, memory: &[Span], files: Vec<OwnedFd>) -> Result<Box<dyn Registration>> {
        drop(files);
        // SAFETY: `register` has our conditions.
        unsafe { self.register(memory) }
    }

    /// Says whether [`lend`](Transport::lend) needs descriptors.
    fn wants_files(&self) -> bool {
        false
    }

    /// Returns what a peer needs in order to read from these registrations, by their numbers, and
    /// from no others.
    ///
    /// # Errors
    ///
    /// What the engine gives, and [`Error::Unavailable`](crate::Error::Unavailable) for a
    /// registration that has ended.
    fn metadata(&self, registrations: &[u64]) -> Result<Vec<u8>>;

    /// Takes the metadata of another gateway: bytes from the network, which may be anything.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`](crate::Error::Malformed) for what is none,
    /// [`Error::Unavailable`](crate::Error::Unavailable) for a peer that cannot be reached.
    fn load_peer(&self, metadata: &[u8]) -> Result<Box<dyn Peer>>;

    /// Says whether a registration that is taken back ends the reads of it that are under way. Else
    /// the origin may be answering them yet, from memory that must be mapped.
    fn ends_reads(&self) -> bool {
        false
    }

    /// Waits until the device sees what a network card wrote to its memory.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn flush(&self) -> Result<()>;
}

/// Memory that peers may read. Dropping it takes the registration back.
///
/// A read that is under way then fails, or gives any bytes; [`Transport::ends_reads`] says if the
/// memory may go.
pub trait Registration: fmt::Debug + Send {
    /// Returns its number among those of its transport.
    fn number(&self) -> u64;

    /// Lists where peers find each span.
    fn addresses(&self) -> Vec<u64>;

    /// Says whether peers can read it yet. An engine in a process of its own may have died.
    fn is_alive(&self) -> bool {
        true
    }
}

/// Another gateway, whose memory can be read.
pub trait Peer: fmt::Debug + Send {
    /// Starts to read. The destinations must be registered with the transport that loaded this
    /// peer.
    ///
    /// # Errors
    ///
    /// [`Error::Transfer`](crate::Error::Transfer) when it cannot begin: then nothing is written.
    ///
    /// # Safety
    ///
    /// Until the transfer has ended, as the module says, the destinations stay mapped and writable,
    /// and nobody reads or writes there.
    unsafe fn read(&self, pairs: &[Pair]) -> Result<Box<dyn Transfer>>;
}

/// A read that is under way.
pub trait Transfer: fmt::Debug + Send {
    /// Looks how far it is, without waiting.
    ///
    /// # Errors
    ///
    /// [`Error::Transfer`](crate::Error::Transfer) when it has failed: nothing is written any more.
    fn poll(&mut self) -> Result<Progress>;
}
