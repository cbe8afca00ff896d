//! The running runtime, its devices, and what was proved of it.

use std::fmt;

use driver::{Driver, Quirks, Vendor};
use gpu_api::{DeviceId, DeviceUuid, Result};

use crate::handles::Handles;
use crate::kernel::IpcMode;
use crate::proof::{Proof, Step};
use crate::signs::Signs;
use crate::sys::{Own, Symbols};
use crate::version::Version;

/// What AMD's runtime has beyond the calls that drivers have in common.
pub struct Hip {
    pub(crate) driver: Driver,
    pub(crate) symbols: Symbols,
    pub(crate) version: Version,
    pub(crate) quirks: Quirks,
    pub(crate) proof: Option<Proof>,
    /// What tells the devices apart; `None` for one that would not say.
    pub(crate) identities: Vec<Option<DeviceUuid>>,
    /// Where the devices lie on the PCI bus, likewise.
    pub(crate) places: Vec<Option<String>>,
    pub(crate) device_files: Vec<&'static str>,
    pub(crate) signs: Option<Signs>,
    /// How the runtime shares plain memory.
    pub(crate) mode: IpcMode,
    pub(crate) handles: Handles,
}

impl fmt::Debug for Hip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hip")
            .field("version", &self.version)
            .field("devices", &self.identities.len())
            .field("proof", &self.proof)
            .finish_non_exhaustive()
    }
}

impl Hip {
    /// Returns the runtime's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the proof that is in force: `None` without one, or with one of another runtime or
    /// kernel.
    pub fn proof(&self) -> Option<&Proof> {
        self.proof.as_ref()
    }

    /// Says whether a step was seen to work with this runtime on a device.
    pub(crate) fn proved(&self, step: Step, device: DeviceId) -> bool {
        let place = self.places.get(device.0 as usize);
        let place = place.and_then(|place| place.as_deref());
        let proof = self.proof.as_ref();
        proof.is_some_and(|proof| proof.holds(step, place))
    }

    /// Lists the functions that the runtime lacks, of those that this backend would call.
    pub fn missing_functions(&self) -> Vec<&'static str> {
        self.symbols.missing(&self.driver.calls)
    }

    /// Holds memory of this length for as long as `then` runs.
    pub(crate) fn hold(&self, device: DeviceId, len: u64, then: &mut dyn FnMut()) -> Result<()> {
        let (scope, calls) = (self.on_device(device)?, &self.driver.calls);
        let mut base = 0;
        scope.call(&calls.malloc, |function| {
            // SAFETY: `hipMalloc` writes one address: `base` is one.
            unsafe { function(&raw mut base, len as usize) }
        })?;
        then();
        scope.call(&calls.free, |function| {
            // SAFETY: `hipFree` asks for memory that nothing uses: allocated above, never touched.
            unsafe { function(base) }
        })
    }

    pub(crate) fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    pub(crate) fn own(&self) -> &Own {
        &self.symbols.own
    }

    /// Returns the device, if it is the only one.
    pub(crate) fn only_device(&self) -> Option<DeviceId> {
        (self.identities.len() == 1).then_some(DeviceId(0))
    }
}
