//! A backend whose n-th call fails, and that keeps a ledger of what it gave and what it was given
//! back.

mod memory_calls;
mod stream_calls;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpu_ipc::backend::groups::*;
use gpu_ipc::backend::{DeviceId, DeviceInfo, DriverError, Group, MemoryInfo};
use gpu_ipc::{BackendKind, Error, Result};

/// The code of a call that was made to fail.
pub const FAULT: u32 = 9999;

/// What a backend can give.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Thing {
    /// Device memory.
    Memory(u64),
    /// Host memory.
    HostMemory(usize),
    /// Another process' memory.
    Mapping(u64),
    /// Physical memory.
    Physical(u64),
    /// Reserved addresses.
    Range(u64),
    /// A piece of such.
    Piece(u64),
    /// An event.
    Event(u64),
    /// A stream.
    Stream(u64),
    /// Registered words.
    Words(usize),
    /// A pool of the driver's.
    Pool(u64),
    /// Memory of one.
    Pooled(u64),
}

#[derive(Debug, Default)]
struct Ledger {
    /// Calls so far; `None` while nothing is counted and nothing fails.
    calls: Option<u32>,
    /// The call that fails.
    nth: u32,
    /// Its name, once it has failed.
    failed: Option<&'static str>,
    /// What was given and not given back: how often, and whether a call that gives it back has
    /// failed.
    given: BTreeMap<Thing, (u32, bool)>,
    /// What must not happen.
    faults: Vec<String>,
}

/// Passes every call on to another backend, but for one.
///
/// A call that fails has done nothing, which is the worst that a failed `free` can mean: who tries
/// again succeeds, and is found out.
pub struct Faulty<B> {
    backend: Arc<B>,
    ledger: Mutex<Ledger>,
    gate: Mutex<Gate>,
    opened: Condvar,
    capture: Mutex<Option<AfterQuestion<B>>>,
}

/// What happens when a participant's thread has asked whether a stream is captured.
type AfterQuestion<B> = Box<dyn FnOnce(&B) + Send>;

/// Before a mapping of another process' memory.
#[derive(Debug, Default)]
struct Gate {
    is_shut: bool,
    waiting: usize,
}

impl<B: fmt::Debug> fmt::Debug for Faulty<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty")
            .field("backend", &self.backend)
            .finish_non_exhaustive()
    }
}

impl<B: GpuBackend> Faulty<B> {
    /// Wraps a backend, which fails at nothing yet.
    pub fn new(backend: Arc<B>) -> Arc<Faulty<B>> {
        let (ledger, gate, opened, capture) = (
            Mutex::default(),
            Mutex::default(),
            Condvar::new(),
            Mutex::new(None),
        );
        Arc::new(Faulty {
            backend,
            ledger,
            gate,
            opened,
            capture,
        })
    }

    /// Does something as soon as a participant's own thread has been told that a stream is not
    /// captured.
    pub fn after_question_of_capture(&self, act: impl FnOnce(&B) + Send + 'static) {
        *self.capture.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(act));
    }

    /// Returns the backend below.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Holds up the calls that map another process' memory, or lets them go on.
    pub fn hold_mappings(&self, is_shut: bool) {
        self.gate().is_shut = is_shut;
        self.opened.notify_all();
    }

    /// Says how many calls are held up.
    pub fn held_mappings(&self) -> usize {
        self.gate().waiting
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass_gate(&self) {
        let mut gate = self.gate();
        gate.waiting += 1;
        gate = self
            .opened
            .wait_while(gate, |gate| gate.is_shut)
            .unwrap_or_else(PoisonError::into_inner);
        gate.waiting -= 1;
    }

    /// Makes the n-th call from here on fail; the first is 1.
    pub fn fail_at(&self, nth: u32) {
        let mut ledger = self.ledger();
        (ledger.calls, ledger.nth, ledger.failed) = (Some(0), nth, None);
    }

    /// Fails nothing more, and names the call that failed.
    pub fn heal(&self) -> Option<&'static str> {
        let mut ledger = self.ledger();
        ledger.calls = None;
        ledger.failed
    }

    /// Lists what was given, not given back, and did not refuse to be.
    pub fn outstanding(&self) -> Vec<Thing> {
        let ledger = self.ledger();
        ledger
            .given
            .iter()
            .filter(|(_, (_, refused))| !refused)
            .map(|(&thing, _)| thing)
            .collect()
    }

    /// Lists what was done that must not be done.
    pub fn wrongs(&self) -> Vec<String> {
        self.ledger().faults.clone()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails if it is this call's turn.
    fn turn(&self, call: &'static str) -> Result<()> {
        let mut ledger = self.ledger();
        let Some(calls) = &mut ledger.calls else {
            return Ok(());
        };
        *calls += 1;
        if *calls != ledger.nth {
            return Ok(());
        }
        ledger.failed = Some(call);
        let source = DriverError {
            backend: self.backend.kind(),
            code: FAULT,
            name: "made to fail".into(),
        };
        Err(Error::Driver {
            call,
            device: DeviceId(0),
            source,
        })
    }

    fn gives(&self, call: &'static str, thing: impl FnOnce() -> Result<Thing>) -> Result<()> {
        self.turn(call)?;
        let thing = thing()?;
        self.ledger().given.entry(thing).or_insert((0, false)).0 += 1;
        Ok(())
    }

    fn takes(
        &self,
        call: &'static str,
        thing: Thing,
        take: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        {
            let mut ledger = self.ledger();
            match ledger.given.get(&thing) {
                None => ledger.faults.push(format!(
                    "{call} of {thing:?}, which was not given or was given back"
                )),
                Some((_, true)) => ledger.faults.push(format!(
                    "{call} of {thing:?}, whose {call} has failed before"
                )),
                Some(_) => {}
            }
        }
        if let Err(error) = self.turn(call) {
            if let Some(entry) = self.ledger().given.get_mut(&thing) {
                entry.1 = true;
            }
            return Err(error);
        }
        // Before it is gone: its number may be given again at once.
        let mut ledger = self.ledger();
        if let Some(entry) = ledger.given.get_mut(&thing) {
            entry.0 -= 1;
            if entry.0 == 0 {
                ledger.given.remove(&thing);
            }
        }
        drop(ledger);
        take()
    }
}

// SAFETY: `GpuDevices`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuDevices for Faulty<B> {
    fn kind(&self) -> BackendKind {
        self.backend.kind()
    }

    fn device_count(&self) -> Result<u32> {
        self.turn("device_count")?;
        self.backend.device_count()
    }

    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo> {
        self.turn("device_info")?;
        self.backend.device_info(device)
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        self.turn("memory_info")?;
        self.backend.memory_info(device)
    }

    fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        self.backend.pci_address(device)
    }

    fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        self.backend.host_numa_node(device)
    }

    fn granularity(&self, device: DeviceId) -> Result<u64> {
        self.turn("granularity")?;
        self.backend.granularity(device)
    }

    fn shared_context(&self, device: DeviceId) -> Result<bool> {
        self.backend.shared_context(device)
    }

    fn own_sign(&self, device: DeviceId) -> Result<u32> {
        self.backend.own_sign(device)
    }

    fn signs_of_life(&self, pid: u32, sign: u32) -> Vec<PathBuf> {
        self.backend.signs_of_life(pid, sign)
    }

    fn quarantine(&self, is_shown: bool) -> Duration {
        self.backend.quarantine(is_shown)
    }

    fn device_files(&self) -> &[&'static str] {
        self.backend.device_files()
    }
}

impl<B: GpuBackend> GpuBackend for Faulty<B> {
    fn handles(&self, device: DeviceId) -> Option<&dyn GpuHandles> {
        self.backend
            .handles(device)
            .map(|_| self as &dyn GpuHandles)
    }

    fn descriptors(&self, device: DeviceId) -> Option<&dyn GpuDescriptors> {
        self.backend
            .descriptors(device)
            .map(|_| self as &dyn GpuDescriptors)
    }

    fn event_handles(&self, device: DeviceId) -> Option<&dyn GpuEventHandles> {
        self.backend
            .event_handles(device)
            .map(|_| self as &dyn GpuEventHandles)
    }

    fn store(&self, device: DeviceId) -> Option<&dyn GpuStore> {
        self.backend.store(device).map(|_| self as &dyn GpuStore)
    }

    fn ranges(&self, device: DeviceId) -> Option<&dyn GpuRanges> {
        self.backend.ranges(device).map(|_| self as &dyn GpuRanges)
    }

    fn pools(&self, device: DeviceId) -> Option<&dyn GpuPools> {
        self.backend.pools(device).map(|_| self as &dyn GpuPools)
    }

    fn managed(&self, device: DeviceId) -> Option<&dyn GpuManaged> {
        self.backend
            .managed(device)
            .map(|_| self as &dyn GpuManaged)
    }

    fn peers(&self, device: DeviceId) -> Option<&dyn GpuPeers> {
        self.backend.peers(device).map(|_| self as &dyn GpuPeers)
    }

    fn host_functions(&self, device: DeviceId) -> Option<&dyn GpuHostFunctions> {
        self.backend
            .host_functions(device)
            .map(|_| self as &dyn GpuHostFunctions)
    }

    /// There always, so that a test can act where it is asked.
    fn captures(&self, _: DeviceId) -> Option<&dyn GpuCaptures> {
        Some(self)
    }

    fn lacks(&self, group: Group, device: DeviceId) -> Error {
        self.backend.lacks(group, device)
    }
}

// SAFETY: `GpuPeers`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuPeers for Faulty<B> {
    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.turn("enable_peer_access")?;
        self.below().enable_peer_access(device, peer)
    }
}

impl<B: GpuBackend> Faulty<B> {
    fn below(&self) -> &dyn GpuBackend {
        &*self.backend
    }
}
