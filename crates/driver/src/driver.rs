//! A driver's calls, and what was made with them.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;

use gpu_api::lock::Acquire;
use gpu_api::{DeviceId, RawEvent};

use crate::calls::Calls;
use crate::given::Given;
use crate::leak_table::LeakTable;
use crate::memory_table::MemoryTable;
use crate::peer_table::PeerTable;
use crate::stream_table::StreamTable;

/// How host memory was got, and so how it is given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Got {
    /// From the driver.
    Driver,
    /// From the kernel.
    Mapped,
    /// From the kernel, bound to a node, and pinned then.
    Registered,
}

/// One piece of host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostPin {
    pub(crate) len: usize,
    pub(crate) device: DeviceId,
    pub(crate) got: Got,
}

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
    /// Host memory, and how each piece was got.
    pub(crate) hosts: LeakTable<HostPin>,
    pub(crate) events: Mutex<HashMap<u64, DeviceId>>,
    /// Memory that streams may write words of, and the device in whose context it was registered.
    pub(crate) registrations: LeakTable<DeviceId>,
    pub(crate) peers: PeerTable,
    pub(crate) given: Mutex<HashMap<u64, Given>>,
    /// Events that no wait uses at this moment: `pass` has them.
    pub(crate) marks: Mutex<Vec<(DeviceId, RawEvent)>>,
    pub(crate) pools: Mutex<BTreeSet<u64>>,
}

impl Driver {
    /// Begins with nothing made.
    pub fn new(calls: Calls) -> Driver {
        Driver {
            calls,
            memory: MemoryTable::default(),
            streams: StreamTable::default(),
            hosts: LeakTable::default(),
            events: Mutex::default(),
            registrations: LeakTable::default(),
            peers: PeerTable::default(),
            given: Mutex::default(),
            marks: Mutex::default(),
            pools: Mutex::default(),
        }
    }

    /// Says whether nothing is left of what was made.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
            && self.pools.acquire().is_empty()
            && self.hosts.is_empty()
            && self.events.acquire().is_empty()
            && self.streams.is_empty()
            && self.registrations.is_empty()
    }
}
