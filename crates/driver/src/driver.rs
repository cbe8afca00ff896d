//! The backend itself: a vendor's driver, and what was made with it.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_api::{DeviceId, RawEvent, Result};

use crate::calls::Calls;
use crate::device_table::DeviceTable;
use crate::given::GivenTable;
use crate::host_memory::HostTable;
use crate::memory_table::{Entry, MemoryTable, Way};
use crate::peer_table::PeerTable;
use crate::registration::Registrations;
use crate::stream_table::StreamTable;
use crate::vendor::Vendor;

/// A driver's calls, and everything that was made with them and not given back.
///
/// Nothing is counted here but how often one handle was opened, because drivers count that too.
#[derive(Debug)]
pub struct Driver {
    /// The calls that drivers have in common.
    pub calls: Calls,
    /// Device memory.
    pub memory: MemoryTable,
    /// Streams that need not be asked for.
    pub streams: StreamTable,
    pub(crate) hosts: HostTable,
    pub(crate) events: DeviceTable,
    pub(crate) registrations: Registrations,
    pub(crate) peers: PeerTable,
    pub(crate) given: GivenTable,
    /// Events that no wait uses at this moment: [`pass`](crate::pass).
    pub(crate) marks: Mutex<Vec<(DeviceId, RawEvent)>>,
    pools: Mutex<BTreeSet<u64>>,
}

impl Driver {
    /// Begins with nothing made.
    pub fn new(calls: Calls) -> Driver {
        Driver {
            calls,
            memory: MemoryTable::default(),
            streams: StreamTable::default(),
            hosts: HostTable::default(),
            events: DeviceTable::default(),
            registrations: Registrations::default(),
            peers: PeerTable::default(),
            given: GivenTable::default(),
            marks: Mutex::default(),
            pools: Mutex::default(),
        }
    }

    /// Says whether nothing is left of what was made.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
            && self.pools().is_empty()
            && self.hosts.is_empty()
            && self.events.is_empty()
            && self.streams.is_empty()
            && self.registrations.is_empty()
    }

    pub(crate) fn pools(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn marks(&self) -> MutexGuard<'_, Vec<(DeviceId, RawEvent)>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A backend over a CUDA-shaped driver: [`GpuBackend`](gpu_api::GpuBackend), with what the vendor
/// adds behind [`Deref`].
pub struct Backend<V: Vendor>(V);

impl<V: Vendor> Backend<V> {
    /// Loads the vendor's driver and starts it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](gpu_api::Error::Unavailable) with what is missing and what to do about
    /// it: no library, one that is not the vendor's, no device.
    pub fn load() -> Result<Arc<Backend<V>>> {
        Ok(Arc::new(Backend(V::load()?)))
    }

    /// Takes a driver that runs.
    pub fn new(vendor: V) -> Backend<V> {
        Backend(vendor)
    }

    /// Takes memory out of the table before the driver is called: it may hand the same address out
    /// again before that call has returned.
    pub(crate) fn take(&self, base: gpu_api::DevicePtr, way: Way) -> Result<Entry> {
        let entry = self.driver().memory.take(base, way)?;
        self.forgotten(base);
        Ok(entry)
    }
}

impl<V: Vendor> Drop for Backend<V> {
    fn drop(&mut self) {
        V::end(self);
    }
}

impl<V: Vendor> Deref for Backend<V> {
    type Target = V;

    fn deref(&self) -> &V {
        &self.0
    }
}

/// Its tables grow with what is allocated, and are private.
impl<V: Vendor> fmt::Debug for Backend<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(V::NAME).finish_non_exhaustive()
    }
}
