//! What memory is for, by which an allocator is chosen.

use gpu_api::{Error, Result};

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
/// assert_eq!(any.merge(staging)?, staging);
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct AllocatorAttributes {
    /// In host memory.
    pub on_host: bool,
    /// The device reaches it directly.
    pub gpu_compatible: bool,
    /// A network card reaches it directly.
    pub nic_compatible: bool,
    /// Which scope it belongs to, such as a collective's buffers; 0 for none.
    pub scope: u32,
    /// What else a kind of device tells apart: handed on, and for a wrapper of yours to look at.
    pub device_bits: u8,
}

impl AllocatorAttributes {
    /// Asks for host memory.
    #[must_use]
    pub fn on_host(self) -> AllocatorAttributes {
        AllocatorAttributes {
            on_host: true,
            ..self
        }
    }

    /// Asks that the device reaches it directly.
    #[must_use]
    pub fn gpu_compatible(self) -> AllocatorAttributes {
        AllocatorAttributes {
            gpu_compatible: true,
            ..self
        }
    }

    /// Asks that a network card reaches it directly.
    #[must_use]
    pub fn nic_compatible(self) -> AllocatorAttributes {
        AllocatorAttributes {
            nic_compatible: true,
            ..self
        }
    }

    /// Puts it into a scope.
    #[must_use]
    pub fn scope(self, scope: u32) -> AllocatorAttributes {
        AllocatorAttributes { scope, ..self }
    }

    /// Sets what a kind of device tells apart.
    #[must_use]
    pub fn device_bits(self, device_bits: u8) -> AllocatorAttributes {
        AllocatorAttributes {
            device_bits,
            ..self
        }
    }

    /// Asks for everything that either asks for.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for two scopes: memory lies in one.
    pub fn merge(self, other: AllocatorAttributes) -> Result<AllocatorAttributes> {
        if self.scope != 0 && other.scope != 0 && self.scope != other.scope {
            return Err(Error::invalid(
                "the scope of merged attributes",
                format!("{} and {}", self.scope, other.scope),
                "one, or none for one of them",
            ));
        }
        Ok(AllocatorAttributes {
            on_host: self.on_host || other.on_host,
            gpu_compatible: self.gpu_compatible || other.gpu_compatible,
            nic_compatible: self.nic_compatible || other.nic_compatible,
            scope: self.scope | other.scope,
            device_bits: self.device_bits | other.device_bits,
        })
    }

    /// Says whether memory that does for `other` does for this.
    pub fn is_equal_or_less_restrictive_than(self, other: AllocatorAttributes) -> bool {
        self.merge(other).is_ok_and(|merged| merged == other)
    }
}

#[cfg(test)]
mod tests {
    use super::AllocatorAttributes as Attributes;

    #[test]
    fn merging_asks_for_both() {
        let none = Attributes::default();
        let merge = |one: Attributes, other| one.merge(other).expect("one scope at most");
        let (host, gpu, nic) = (none.on_host(), none.gpu_compatible(), none.nic_compatible());
        assert_eq!(merge(gpu, nic), none.nic_compatible().gpu_compatible());
        assert_eq!(merge(none, none), none);
        for attributes in [none, host, gpu, nic, merge(merge(host, gpu), nic)] {
            assert!(none.is_equal_or_less_restrictive_than(attributes));
            assert!(attributes.is_equal_or_less_restrictive_than(attributes));
        }
        let scoped = host.scope(7).device_bits(1);
        assert_eq!(
            merge(scoped, host.device_bits(2)),
            host.scope(7).device_bits(3)
        );
        assert!(
            scoped.merge(host.scope(8)).is_err(),
            "memory lies in one scope"
        );
        assert!(!scoped.is_equal_or_less_restrictive_than(host.scope(8)));
        assert!(!gpu.is_equal_or_less_restrictive_than(nic));
        assert!(!merge(gpu, nic).is_equal_or_less_restrictive_than(gpu));
    }
}
