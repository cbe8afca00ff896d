//! The backend itself: the driver, and what was made with it. Each of its traits is kept in the
//! module that does its work.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::is_culib_present;
use gpu_api::vendor::device_table::DeviceTable;
use gpu_api::vendor::host_memory::HostTable;
use gpu_api::vendor::peer_table::PeerTable;
use gpu_api::vendor::stream_table::StreamTable;
use gpu_api::{ForkGuard, Result};

use crate::driver::Driver;
use crate::error;
use crate::memory::Memory;
use crate::registration::Registrations;
use crate::sys::Symbols;

/// NVIDIA's driver, loaded at run time.
///
/// Each device's primary context is retained when something first needs it, so memory, streams and
/// events are the same ones that the CUDA runtime, PyTorch and cudarc see. Dropped, the backend
/// gives the contexts back if nothing that was made in them is left; else they stay until the
/// process ends.
///
/// # Portability
///
/// - `import_fd` maps all of the memory behind a descriptor or nothing: its length must be what
///   `alloc` gave, or any other that rounds up to that.
/// - A driver before CUDA 12.0 does not number streams; only streams of this backend have an
///   identity there.
/// - `Caps::shared_context` is `true` also where an MPS daemon's control file is found but its
///   device says nothing.
pub struct CudaBackend {
    pub(crate) driver: Driver,
    pub(crate) memory: Memory,
    /// The pools that were not destroyed.
    pub(crate) pools: Mutex<BTreeSet<u64>>,
    pub(crate) hosts: HostTable,
    pub(crate) events: DeviceTable,
    pub(crate) streams: StreamTable,
    pub(crate) registrations: Registrations,
    pub(crate) peers: PeerTable,
    /// A forked child must not call the driver.
    fork: ForkGuard,
}

/// Its tables grow with what is allocated, and are nobody's to read.
impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaBackend").finish_non_exhaustive()
    }
}

impl CudaBackend {
    /// Loads the driver and starts it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](gpu_api::Error::Unavailable) with what is missing and what to do
    /// about it: no library, the toolkit's stub of it, no device, a module and a library of
    /// different versions.
    ///
    /// # Examples
    ///
    /// ```
    /// use backend_cuda::CudaBackend;
    /// use gpu_api::{Error, GpuDevices};
    ///
    /// match CudaBackend::load() {
    ///     Ok(cuda) => println!("{} devices", cuda.device_count()?),
    ///     Err(Error::Unavailable { why, remedy, .. }) => println!("no CUDA here: {why}; {remedy}"),
    ///     Err(other) => return Err(other),
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn load() -> Result<Arc<CudaBackend>> {
        let fork = ForkGuard::new()?;
        // SAFETY: `is_culib_present` runs the initialisers of the libraries that it tries: the
        // driver's have no conditions.
        if !unsafe { is_culib_present() } {
            return Err(error::no_library());
        }
        // SAFETY: `Symbols::load` asks that the library can be loaded: it just was.
        let symbols = unsafe { Symbols::load() };
        Ok(Arc::new(CudaBackend {
            driver: Driver::start(symbols)?,
            memory: Memory::default(),
            pools: Mutex::default(),
            hosts: HostTable::default(),
            events: DeviceTable::default(),
            streams: StreamTable::default(),
            registrations: Registrations::default(),
            peers: PeerTable::default(),
            fork,
        }))
    }

    /// Returns the version of CUDA that the driver speaks, as it writes it: 13000 is 13.0.
    pub fn driver_version(&self) -> u32 {
        self.driver.version()
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // First of all: in a forked child another thread of the parent's may hold a table's lock
        // for good.
        if self.fork.is_child() {
            return;
        }
        let nothing_left = self.memory.is_empty()
            && self.pools().is_empty()
            && self.hosts.is_empty()
            && self.events.is_empty()
            && self.streams.is_empty()
            && self.registrations.is_empty();
        if nothing_left {
            // SAFETY: `Driver::release` asks that nothing made in the contexts be left, and that
            // nobody call afterwards: the tables are empty, and this is the last that anybody does
            // with `self`.
            unsafe { self.driver.release() };
        }
    }
}
