//! The runtime's version, and what changed from one to the next.

use std::fmt;

/// A version of the runtime, as `hipRuntimeGetVersion` writes it: 60443484 is 6.4.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version(pub u32);

/// What an address points at, whatever number the runtime has for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MemoryType {
    Unregistered,
    Host,
    Device,
    Managed,
    Other,
}

impl Version {
    /// Returns the first number: 6 of 6.4.
    pub const fn major(self) -> u32 {
        self.0 / 10_000_000
    }

    /// Returns the second number: 4 of 6.4.
    pub const fn minor(self) -> u32 {
        self.0 / 100_000 % 100
    }

    /// Says whether it is this version or a later one.
    pub const fn at_least(self, major: u32, minor: u32) -> bool {
        self.0 >= major * 10_000_000 + minor * 100_000
    }

    /// Reads a `hipMemoryType`, whose numbers became CUDA's in ROCm 6.
    pub(crate) const fn memory_type(self, number: u32) -> MemoryType {
        match (self.at_least(6, 0), number) {
            (true, 0) => MemoryType::Unregistered,
            (true, 1) | (false, 0) => MemoryType::Host,
            (true, 2) | (false, 1) => MemoryType::Device,
            (true, 3) | (false, 4) => MemoryType::Managed,
            _ => MemoryType::Other,
        }
    }

    /// Says whether `hipMemRetainAllocationHandle` may be asked of any address, and retains. From
    /// 6.2 to 7.13 it follows a null pointer for memory of `hipMalloc` (clr 6.2.2, `hip_vm.cpp`;
    /// ROCm/rocm-systems#5807), and up to 7.11 it hands out a handle without retaining it
    /// (ROCm/rocm-systems#2696, change log of 7.12).
    pub(crate) const fn tells_virtual_memory(self) -> bool {
        self.at_least(7, 14)
    }

    /// Says whether `ATTRIBUTE_HOST_NUMA_NODE` is that attribute's number: 7.1 ends before it.
    pub(crate) const fn tells_numa_nodes(self) -> bool {
        self.at_least(7, 2)
    }

    /// Says whether a handle names its exporter's number of the device. Before, the bytes are the
    /// caller's.
    pub(crate) const fn handles_name_devices(self) -> bool {
        self.at_least(7, 0)
    }

    /// Says whether `AllocationProperties` lies in memory as the runtime reads it.
    pub(crate) const fn has_virtual_memory(self) -> bool {
        self.at_least(5, 7)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major(), self.minor(), self.0 % 100_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_reads_like_a_version() {
        for (number, text) in [
            (50_221_153, "5.2.21153"),
            (50_731_921, "5.7.31921"),
            (60_443_484, "6.4.43484"),
            (70_253_211, "7.2.53211"),
        ] {
            assert_eq!(Version(number).to_string(), text);
        }
    }

    #[test]
    fn what_changed_between_versions_is_chosen_by_the_version() {
        let (old, late, six) = (
            Version(50_221_153),
            Version(50_731_921),
            Version(60_000_000),
        );
        assert!(!old.has_virtual_memory() && late.has_virtual_memory());
        assert_eq!(old.memory_type(1), MemoryType::Device);
        assert_eq!(six.memory_type(1), MemoryType::Host);
        assert_eq!(six.memory_type(2), MemoryType::Device);
        assert_eq!(old.memory_type(2), MemoryType::Other);
    }
}
