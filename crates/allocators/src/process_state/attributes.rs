//! What memory is for, by which an allocator is chosen.

/// What memory must be able to do: a process asks for an allocator by these and a device.
///
/// | `on_host` | `gpu_compatible` or `nic_compatible` | memory |
/// |---|---|---|
/// | no | | the device's |
/// | yes | no | plain host memory |
/// | yes | yes | pinned host memory, which neither device nor network card has to stage |
///
/// # Examples
///
/// ```
/// use allocators::AllocatorAttributes;
///
/// let staging = AllocatorAttributes::default().on_host().gpu_compatible();
/// let any = AllocatorAttributes::default().on_host();
/// assert!(any.is_equal_or_less_restrictive_than(staging));
/// assert_eq!(any.merge(staging), staging);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct AllocatorAttributes {
    /// In host memory.
    pub on_host: bool,
    /// The device reaches it directly.
    pub gpu_compatible: bool,
    /// A network card reaches it directly.
    pub nic_compatible: bool,
}

impl AllocatorAttributes {
    /// Asks for host memory.
    #[must_use]
    pub fn on_host(self) -> AllocatorAttributes {
        AllocatorAttributes { on_host: true, ..self }
    }

    /// Asks that the device reaches it directly.
    #[must_use]
    pub fn gpu_compatible(self) -> AllocatorAttributes {
        AllocatorAttributes { gpu_compatible: true, ..self }
    }

    /// Asks that a network card reaches it directly.
    #[must_use]
    pub fn nic_compatible(self) -> AllocatorAttributes {
        AllocatorAttributes { nic_compatible: true, ..self }
    }

    /// Asks for everything that either asks for.
    #[must_use]
    pub fn merge(self, other: AllocatorAttributes) -> AllocatorAttributes {
        AllocatorAttributes {
            on_host: self.on_host || other.on_host,
            gpu_compatible: self.gpu_compatible || other.gpu_compatible,
            nic_compatible: self.nic_compatible || other.nic_compatible,
        }
    }

    /// Says whether memory that does for `other` does for this.
    pub fn is_equal_or_less_restrictive_than(self, other: AllocatorAttributes) -> bool {
        self.merge(other) == other
    }
}

#[cfg(test)]
mod tests {
    use super::AllocatorAttributes as Attributes;

    #[test]
    fn merging_asks_for_both() {
        let none = Attributes::default();
        let (host, gpu, nic) = (none.on_host(), none.gpu_compatible(), none.nic_compatible());
        assert_eq!(gpu.merge(nic), none.nic_compatible().gpu_compatible());
        assert_eq!(none.merge(none), none);
        for attributes in [none, host, gpu, nic, host.merge(gpu).merge(nic)] {
            assert!(none.is_equal_or_less_restrictive_than(attributes));
            assert!(attributes.is_equal_or_less_restrictive_than(attributes));
        }
        assert!(!gpu.is_equal_or_less_restrictive_than(nic));
        assert!(!gpu.merge(nic).is_equal_or_less_restrictive_than(gpu));
    }
}
