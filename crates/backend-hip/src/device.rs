//! What the runtime says of a device, and what may be used of it.

use std::ffi::{c_char, c_int};

use driver::calls::Uuid;
use driver::code::SUCCESS;
use driver::device::{attribute, text};
use driver::{Descriptor, Scope, Vendor};
use gpu_api::{DeviceId, DeviceUuid, Error, Result};

use crate::hip::Hip;
use crate::proof::Step;
use crate::sys::{ATTRIBUTE_HOST_NUMA_NODE, ATTRIBUTE_VIRTUAL_MEMORY};
use crate::{bugs, error, kernel, start};

impl Hip {
    /// Asks every device for its identity. One that fails is asked again, for the reason, by those
    /// who want it: it hides no other.
    pub(crate) fn identified(mut self) -> Hip {
        let all = 0..self.count() as c_int;
        self.identities = all
            .clone()
            .map(|ordinal| self.identify(ordinal).ok())
            .collect();
        self.places = all.map(|ordinal| self.place(ordinal).ok()).collect();
        if let Some(partitions) = self.partitions() {
            self.identities = partitions;
        }
        self
    }

    /// Tells devices of one identity apart by the numbers of their nodes, as the partitions of a
    /// GPU had one identity before ROCm 7.0.1 (ROCm/container-toolkit#118), and some kernels show
    /// them at one place (clr, `pcie.function = hsa_bdf_id & 7`). `None` where all differ, or where
    /// the nodes are not certainly those of the devices.
    fn partitions(&self) -> Option<Vec<Option<DeviceUuid>>> {
        let identities: Option<Vec<DeviceUuid>> = self.identities.iter().copied().collect();
        let identities = identities?;
        let is_shared =
            |uuid: &DeviceUuid| identities.iter().filter(|other| *other == uuid).count() > 1;
        if !identities.iter().any(is_shared) {
            return None;
        }
        let nodes = kernel::visible_gpus(&start::topology(&self.symbols))?;
        let are_theirs = nodes.len() == identities.len()
            && nodes
                .iter()
                .zip(&identities)
                .all(|(node, uuid)| node.is(*uuid));
        are_theirs.then(|| {
            let own = nodes.iter().zip(&identities).map(|(node, uuid)| {
                Some(if is_shared(uuid) {
                    node.identity(*uuid)
                } else {
                    *uuid
                })
            });
            own.collect()
        })
    }

    /// Finds a device's identity: AMD's own 16 bytes, or, where there are none, its place on the
    /// PCI bus.
    fn identify(&self, ordinal: c_int) -> Result<DeviceUuid> {
        let scope: Scope<'_, Hip> = self.relaxed()?;
        let mut uuid = Uuid { bytes: [0; 16] };
        if self.driver().calls.device_uuid.function.is_some() {
            let code = scope.code(&self.driver().calls.device_uuid, |function| {
                // SAFETY: `hipDeviceGetUuid` writes 16 bytes: `uuid` has as many.
                unsafe { function(&raw mut uuid, ordinal) }
            })?;
            // GPUs without a number of their own all say "XX".
            let tells = |byte: c_char| !matches!(byte as u8, 0 | b'0' | b'X');
            if code == SUCCESS && uuid.bytes.iter().any(|&byte| tells(byte)) {
                return Ok(DeviceUuid(uuid.bytes.map(|byte| byte as u8)));
            }
        }
        let place = self.place(ordinal)?;
        // "0000:03:00.0" has twelve characters: with the mark in front it is exactly as long as an
        // identity.
        let mut bytes = *b"pci-............";
        for (to, from) in bytes[4..].iter_mut().zip(place.bytes()) {
            *to = from;
        }
        Ok(DeviceUuid(bytes))
    }

    /// Returns what identifies a device in every process.
    pub(crate) fn identity(&self, device: DeviceId) -> Result<DeviceUuid> {
        let ordinal = self.ordinal(device)?;
        let uuid = match self.identities[device.0 as usize] {
            Some(uuid) => uuid,
            None => self.identify(ordinal)?,
        };
        if self
            .identities
            .iter()
            .filter(|other| **other == Some(uuid))
            .count()
            > 1
        {
            return Err(Error::unsupported(
                "a device that cannot be told from another",
                format!("the runtime gives {device} and another one the identity {uuid}"),
                "update ROCm to 7.0.1 or later, show each process one of them (ROCR_VISIBLE_DEVICES), or do not \
                         partition the GPU",
            ));
        }
        Ok(uuid)
    }

    /// Says how file descriptors of a device's memory are made, if at all.
    pub(crate) fn way_of_descriptors(&self, device: DeviceId) -> Result<Option<Descriptor>> {
        self.ordinal(device)?;
        if self.proved(Step::Vmm, device) && self.has_virtual_memory(device)? {
            return Ok(Some(Descriptor::Vmm));
        }
        let dma_buf = self.proved(Step::DmaBuf, device)
            && self.own().hipMemGetHandleForAddressRange.function.is_some();
        Ok(dma_buf.then_some(Descriptor::DmaBuf))
    }

    fn has_virtual_memory(&self, device: DeviceId) -> Result<bool> {
        let value = attribute(self, self.ordinal(device)?, ATTRIBUTE_VIRTUAL_MEMORY);
        let calls = &self.driver().calls;
        Ok(self.version().has_virtual_memory()
            && value.is_some_and(|value| value != 0)
            && calls.memory_create.function.is_some()
            && calls.memory_import.function.is_some())
    }

    /// Returns the host's NUMA node that a device is closest to, which runtimes from 7.2 on tell.
    pub(crate) fn numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        let ordinal = self.ordinal(device)?;
        if !self.version().tells_numa_nodes() {
            return Ok(None);
        }
        let node = attribute(self, ordinal, ATTRIBUTE_HOST_NUMA_NODE);
        Ok(node.and_then(|node| u32::try_from(node).ok()))
    }

    /// Refuses pools where the runtime lacks a call of theirs, and where no probe saw that they are
    /// right.
    pub(crate) fn proved_pools(&self, device: DeviceId) -> Result<()> {
        let missing = self.driver().calls.missing();
        let names = [
            "hipMemPoolCreate",
            "hipMemPoolDestroy",
            "hipMemPoolSetAttribute",
            "hipMemPoolGetAttribute",
            "hipMemPoolTrimTo",
            "hipMallocFromPoolAsync",
            "hipFreeAsync",
        ];
        if let Some(name) = names.into_iter().find(|name| missing.contains(name)) {
            return Err(error::missing(name));
        }
        if self.proved(Step::Pools, device) {
            return Ok(());
        }
        let seen = self
            .proof()
            .map(|proof| proof.pool_defects())
            .unwrap_or_default();
        let why = if seen.is_empty() {
            format!(
                "no probe has proved it with this runtime and driver; {}",
                bugs::of_pools(self.version())
            )
        } else {
            let seen: Vec<String> = seen.iter().map(ToString::to_string).collect();
            format!("the probe saw here what it does wrong: {}", seen.join("; "))
        };
        Err(Error::unsupported(
            "a pool of the driver's",
            why,
            bugs::PROVE_POOLS,
        ))
    }

    /// Returns where a device lies on the PCI bus (`0000:03:00.0`).
    pub(crate) fn place(&self, ordinal: c_int) -> Result<String> {
        let scope: Scope<'_, Hip> = self.relaxed()?;
        let mut place = [0 as c_char; 64];
        scope.call(&self.own().hipDeviceGetPCIBusId, |function| {
            // SAFETY: `hipDeviceGetPCIBusId` writes at most the number of bytes that it is told:
            // one less than `place` has.
            unsafe { function(place.as_mut_ptr(), place.len() as c_int - 1, ordinal) }
        })?;
        Ok(text(&place))
    }
}
