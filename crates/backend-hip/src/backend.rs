//! The backend itself: the runtime, and what was made with it. Each of its traits is kept in the
//! module that does its work.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use gpu_api::vendor::device_table::DeviceTable;
use gpu_api::vendor::host_memory::HostTable;
use gpu_api::vendor::peer_table::PeerTable;
use gpu_api::vendor::stream_table::StreamTable;
use gpu_api::{Error, GpuRanges, GpuStore, Result};

use crate::driver::{self, Driver};
use crate::library;
use crate::memory::Memory;
use crate::proof::{Proof, Step};
use crate::sys::Symbols;
use crate::version::Version;

/// What a runtime says of itself, which needs no device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// Its version.
    pub version: Version,
    /// The functions that it lacks, of those that this backend would call.
    pub missing: Vec<&'static str>,
}

/// AMD's runtime, loaded at run time.
///
/// Beyond plain memory with 64-byte handles, waits on the host and functions that streams call, it
/// does only what a [`Proof`] says was seen to work: see [`probe`](crate::probe).
///
/// # Portability
///
/// - Only streams of this backend and adopted ones have an identity where the runtime does not
///   number streams.
/// - `classify` offers no memory for sharing that this backend did not allocate or adopt: the
///   runtime does not tell which of it can be exported.
/// - `export_handle` asks the runtime once for each allocation, and gives the same bytes again
///   afterwards.
/// - A stream's wait compares words as unsigned numbers on some runtimes, which is the same as the
///   trait's comparison as long as word and value are below 2^63.
/// - A batch of operations on words is queued one by one: after an error its beginning may be
///   queued.
/// - `close` of a handle waits for all work of the device, whichever stream it is on.
pub struct HipBackend {
    pub(crate) driver: Driver,
    pub(crate) memory: Memory,
    pub(crate) hosts: HostTable,
    pub(crate) events: DeviceTable,
    pub(crate) streams: StreamTable,
    /// Memory that streams may write words of, by its first address.
    pub(crate) registrations: DeviceTable,
    pub(crate) peers: PeerTable,
}

/// Its tables grow with what is allocated, and are nobody's to read.
impl fmt::Debug for HipBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HipBackend").finish_non_exhaustive()
    }
}

impl HipBackend {
    /// Loads the runtime and starts it, with the proof that [`PROOF`](crate::PROOF) holds.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] with what is missing and what to do about it: no library, a
    /// library that is not AMD's, no device. [`Error::Invalid`] when the variable holds what is
    /// no proof.
    ///
    /// # Examples
    ///
    /// ```
    /// use backend_hip::HipBackend;
    /// use gpu_api::{Error, GpuDevices};
    ///
    /// match HipBackend::load() {
    ///     Ok(hip) => println!("HIP {}: {} devices", hip.version(), hip.device_count()?),
    ///     Err(Error::Unavailable { why, remedy, .. }) => println!("no HIP here: {why}; {remedy}"),
    ///     Err(other) => return Err(other),
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn load() -> Result<Arc<HipBackend>> {
        let proof = Proof::from_env()?;
        HipBackend::start(|version| proof.filter(|proof| proof.is_of(version)))
    }

    /// Loads the runtime and starts it, with a proof, or with none.
    ///
    /// # Errors
    ///
    /// As [`load`](HipBackend::load), and [`Error::Mismatch`] for a proof of another runtime or
    /// kernel.
    pub fn load_with(proof: Option<Proof>) -> Result<Arc<HipBackend>> {
        let hip = HipBackend::start(|version| proof.clone().filter(|proof| proof.is_of(version)))?;
        match (&proof, hip.proof()) {
            (Some(given), None) => Err(Error::Mismatch {
                what: "the proof",
                theirs: given.to_string(),
                ours: Proof::new(hip.version(), []).to_string(),
                remedy: "run the probe again (`gpu-ipc doctor`)",
            }),
            _ => Ok(hip),
        }
    }

    /// Loads the runtime and takes some steps for proved: for the probe, which is to find out.
    pub(crate) fn load_assuming(steps: &[Step]) -> Result<Arc<HipBackend>> {
        HipBackend::start(|version| Some(Proof::new(version, steps.iter().copied())))
    }

    /// Loads the runtime and asks what it is, without starting it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without a library, or with one that is not AMD's.
    ///
    /// # Examples
    ///
    /// ```
    /// match backend_hip::HipBackend::inspect() {
    ///     Ok(found) => println!("HIP {}, without {:?}", found.version, found.missing),
    ///     Err(error) => println!("{error}"),
    /// }
    /// ```
    pub fn inspect() -> Result<Inspection> {
        let symbols = HipBackend::symbols()?;
        Ok(Inspection {
            version: driver::version(&symbols)?,
            missing: symbols.missing(),
        })
    }

    fn symbols() -> Result<Symbols> {
        // Never unloaded: the runtime has threads of its own, and its functions and names are used
        // until the end.
        let library = ManuallyDrop::new(library::load()?);
        // SAFETY: `Symbols::find` asks for a HIP runtime, which the library's name says it is, that
        // stays loaded.
        Ok(unsafe { Symbols::find(&library) })
    }

    fn start(choose: impl FnOnce(Version) -> Option<Proof>) -> Result<Arc<HipBackend>> {
        let symbols = HipBackend::symbols()?;
        Ok(Arc::new(HipBackend {
            driver: Driver::start(symbols, choose)?.identified(),
            memory: Memory::default(),
            hosts: HostTable::default(),
            events: DeviceTable::default(),
            streams: StreamTable::default(),
            registrations: DeviceTable::default(),
            peers: PeerTable::default(),
        }))
    }

    /// Returns the runtime's version.
    pub fn version(&self) -> Version {
        self.driver.version()
    }

    /// Returns the proof that is in force: `None` without one, or with one of another runtime or
    /// kernel.
    pub fn proof(&self) -> Option<&Proof> {
        self.driver.proof()
    }

    /// Lists the functions that the runtime lacks, of those that this backend would call.
    pub fn missing_functions(&self) -> Vec<&'static str> {
        self.driver.symbols.missing()
    }
}

// SAFETY: `GpuStore`: it gives none until its virtual memory is proved to hold.
unsafe impl GpuStore for HipBackend {}
// SAFETY: `GpuRanges`: it gives none, as above.
unsafe impl GpuRanges for HipBackend {}
