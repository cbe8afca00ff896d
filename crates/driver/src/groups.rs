//! What a device has of the groups that it may lack.

use gpu_api::{
    DeviceId, Error, GpuBackend, GpuCaptures, GpuDescriptors, GpuEventHandles, GpuHandles,
    GpuHostFunctions, GpuManaged, GpuPeers, GpuPools, GpuRanges, GpuStore, Group,
};

use crate::backend::Backend;
use crate::vendor::Vendor;

impl<V: Vendor> GpuBackend for Backend<V> {
    fn handles(&self, device: DeviceId) -> Option<&dyn GpuHandles> {
        self.shares_handles(device).then_some(self)
    }

    fn descriptors(&self, device: DeviceId) -> Option<&dyn GpuDescriptors> {
        matches!(self.descriptor(device), Ok(Some(_))).then_some(self)
    }

    fn event_handles(&self, device: DeviceId) -> Option<&dyn GpuEventHandles> {
        self.shares_events(device).then_some(self)
    }

    fn store(&self, device: DeviceId) -> Option<&dyn GpuStore> {
        self.require_ranges(device).is_ok().then_some(self)
    }

    fn ranges(&self, device: DeviceId) -> Option<&dyn GpuRanges> {
        self.require_ranges(device).is_ok().then_some(self)
    }

    fn pools(&self, device: DeviceId) -> Option<&dyn GpuPools> {
        self.require_pools(device).is_ok().then_some(self)
    }

    fn managed(&self, device: DeviceId) -> Option<&dyn GpuManaged> {
        self.has_managed(device).then_some(self)
    }

    fn peers(&self, _: DeviceId) -> Option<&dyn GpuPeers> {
        Some(self)
    }

    fn host_functions(&self, _: DeviceId) -> Option<&dyn GpuHostFunctions> {
        Some(self)
    }

    fn captures(&self, _: DeviceId) -> Option<&dyn GpuCaptures> {
        Some(self)
    }

    fn lacks(&self, group: Group, device: DeviceId) -> Error {
        let refused = match group {
            Group::Store | Group::Ranges => self.require_ranges(device),
            Group::Pools => self.require_pools(device),
            _ => Ok(()),
        };
        match refused {
            Err(error) => error,
            Ok(()) => self.unsupported(group.what(), device),
        }
    }
}
