//! Names a vendor, a device and what the device can do.

use std::fmt;
use std::time::Duration;

/// Names the vendor whose driver a backend speaks to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(u8)]
#[non_exhaustive]
pub enum BackendKind {
    /// Shared memory instead of a GPU.
    Host = 1,
    /// NVIDIA, through the CUDA driver.
    Cuda = 2,
    /// AMD, through the HIP runtime.
    Hip = 3,
}

impl BackendKind {
    /// All vendors, in the order in which they are tried.
    pub const ALL: [BackendKind; 3] = [BackendKind::Cuda, BackendKind::Hip, BackendKind::Host];

    /// Returns what is known of a vendor beside its driver.
    const fn facts(self) -> &'static Facts {
        match self {
            BackendKind::Host => &Facts {
                name: "host",
                driver_files: &[],
                variables: &[],
                driver: "",
                no_device: "set GPU_IPC_HOST_DEVICES to 1 or more, or unset it",
                maker: "shared memory instead of a GPU",
                version_file: None,
                in_host_memory: true,
                may_share_context: false,
                needs_proof: false,
                // The late writes of tests are another process's, which waits for a turn.
                unseen_ms: 400,
                arrays: Arrays {
                    dlpack_device: 1,
                    default_stream: None,
                    has_cuda_interface: false,
                    torch_allocates: false,
                    torch_opens: true,
                },
            },
            BackendKind::Cuda => &Facts {
                name: "cuda",
                driver_files: &["/dev/nvidiactl", "/dev/dxg"],
                variables: &["CUDA_VISIBLE_DEVICES"],
                driver: "install the NVIDIA driver, or pass the GPU into the container (--gpus all, with the NVIDIA \
                         Container Toolkit)",
                no_device: "check CUDA_VISIBLE_DEVICES",
                maker: "NVIDIA",
                version_file: Some("/proc/driver/nvidia/version"),
                in_host_memory: false,
                may_share_context: true,
                needs_proof: false,
                unseen_ms: 100,
                arrays: Arrays {
                    dlpack_device: 2,
                    default_stream: Some(1),
                    has_cuda_interface: true,
                    torch_allocates: true,
                    torch_opens: true,
                },
            },
            BackendKind::Hip => &Facts {
                name: "hip",
                driver_files: &["/dev/kfd"],
                variables: &["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"],
                driver: "install the amdgpu driver, or pass the GPU into the container (--device=/dev/kfd \
                         --device=/dev/dri)",
                no_device: "check HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
                maker: "AMD",
                version_file: Some("/sys/module/amdgpu/version"),
                in_host_memory: false,
                may_share_context: false,
                needs_proof: true,
                unseen_ms: 5_000,
                arrays: Arrays {
                    dlpack_device: 10,
                    default_stream: Some(0),
                    has_cuda_interface: false,
                    torch_allocates: false,
                    torch_opens: false,
                },
            },
        }
    }

    /// Reads the byte that descriptors and messages carry; `None` for a byte that names no vendor.
    pub fn from_byte(byte: u8) -> Option<BackendKind> {
        BackendKind::ALL
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }

    /// Returns the name that features, options and messages use: `host`, `cuda` or `hip`.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Lists the files of which the first is there where the vendor's driver is, and any where the
    /// kernel shows a GPU of the vendor's; none for host memory.
    pub const fn driver_files(self) -> &'static [&'static str] {
        self.facts().driver_files
    }

    /// Lists the variables that hide devices from a process.
    pub const fn variables(self) -> &'static [&'static str] {
        self.facts().variables
    }

    /// Says what makes the driver's files appear.
    pub const fn driver_remedy(self) -> &'static str {
        self.facts().driver
    }

    /// Says what to do where a driver has no device for this process.
    pub const fn no_device_remedy(self) -> &'static str {
        self.facts().no_device
    }

    /// Names who makes the devices.
    pub const fn maker(self) -> &'static str {
        self.facts().maker
    }

    /// Returns the file in which the kernel says which version of the vendor's driver runs.
    pub const fn version_file(self) -> Option<&'static str> {
        self.facts().version_file
    }

    /// Says whether the devices' memory is the host's own, which any thread reads and writes.
    pub const fn in_host_memory(self) -> bool {
        self.facts().in_host_memory
    }

    /// Says whether the vendor has a service by which processes share one context on a device (NVIDIA
    /// MPS); [`Caps::shared_context`] says whether they do.
    pub const fn may_share_context(self) -> bool {
        self.facts().may_share_context
    }

    /// Says whether what the driver claims is used only where a probe saw it work.
    pub const fn needs_proof(self) -> bool {
        self.facts().needs_proof
    }

    /// Returns for how long GPU work of a dead process may go on where the driver shows no sign of it.
    pub const fn quarantine_unseen(self) -> Duration {
        Duration::from_millis(self.facts().unseen_ms)
    }

    /// Returns what array libraries know the devices as.
    pub const fn arrays(self) -> &'static Arrays {
        &self.facts().arrays
    }
}

/// A row of the table of vendors.
struct Facts {
    name: &'static str,
    driver_files: &'static [&'static str],
    variables: &'static [&'static str],
    driver: &'static str,
    no_device: &'static str,
    maker: &'static str,
    version_file: Option<&'static str>,
    in_host_memory: bool,
    may_share_context: bool,
    needs_proof: bool,
    /// Where AMD's kernel does not show when a dead process' queues are gone: versions from 6.0 to 6.18
    /// remove them on a work queue some time after the process' end, within no bound (amdkfd; guessed
    /// from the dates of both patches). Long beside any delay of a work queue that is not stuck.
    unseen_ms: u64,
    arrays: Arrays,
}

/// What array libraries know a vendor's devices as, and which of their own ways they have for them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Arrays {
    /// DLPack's number of the kind of device (`DLDeviceType`).
    pub dlpack_device: i32,
    /// The number by which `__dlpack__` names the legacy default stream; `None` for devices without
    /// streams.
    pub default_stream: Option<i64>,
    /// The CUDA array interface is for these devices.
    pub has_cuda_interface: bool,
    /// PyTorch takes an allocator of another library's for these devices.
    pub torch_allocates: bool,
    /// PyTorch opens descriptors and events of other processes on these devices.
    pub torch_opens: bool,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Numbers a device as this process sees it.
///
/// Two processes may see one GPU under two numbers (`CUDA_VISIBLE_DEVICES`), so a number never
/// travels: a [`DeviceUuid`] does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

/// Identifies a physical device in every process: 16 bytes as the driver reports them, opaque.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct DeviceUuid(pub [u8; 16]);

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Describes a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// The number under which this process sees it.
    pub device: DeviceId,
    /// The identity under which every process sees it.
    pub uuid: DeviceUuid,
    /// The vendor's name for it.
    pub name: String,
    /// Bytes of device memory.
    pub total_bytes: u64,
}

/// Says how much device memory there is at this moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Bytes that an allocation could take, all processes counted where the driver counts them.
    pub free_bytes: u64,
    /// Bytes of device memory.
    pub total_bytes: u64,
}

/// Says what a device can do, as data, asked once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Caps {
    /// [`Sharing::Handle`](crate::Sharing::Handle) works: a 64-byte handle that another process
    /// opens.
    pub handle: bool,
    /// [`Sharing::Fd`](crate::Sharing::Fd) works: a file descriptor that another process imports.
    pub fd: bool,
    /// An imported file descriptor can be mapped read-only.
    pub read_only: bool,
    /// Events can be opened by another process.
    pub event_ipc: bool,
    /// Streams can write 64-bit words in registered shared memory.
    pub stream_writes: bool,
    /// Streams can wait for such words too. They may be able to write alone: where a wait keeps one
    /// of the device's few hardware queues busy, the host waits instead, and leases still end by
    /// stream writes.
    pub stream_waits: bool,
    /// Memory can be made apart from addresses, and mapped where the caller says:
    /// [`GpuStore`](crate::GpuStore) and [`GpuRanges`](crate::GpuRanges).
    pub ranges: bool,
    /// The driver has pools of its own, in stream order: [`GpuPools`](crate::GpuPools).
    pub pools: bool,
    /// The driver has managed memory, which moves between host and device
    /// ([`alloc_managed`](crate::GpuManaged::alloc_managed)), and both may touch it at once.
    pub managed: bool,
    /// The driver shares the device between processes in one context (NVIDIA MPS), so that the
    /// death of a process proves nothing about its GPU work.
    pub shared_context: bool,
    /// Allocations are rounded up to a multiple of this many bytes.
    pub granularity: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_its_byte_and_no_other_byte_names_one() {
        let named = (0..=u8::MAX).filter_map(BackendKind::from_byte).count();
        assert_eq!(named, BackendKind::ALL.len());
        for kind in BackendKind::ALL {
            assert_eq!(BackendKind::from_byte(kind as u8), Some(kind));
        }
    }

    #[test]
    fn a_uuid_reads_like_a_uuid() {
        let uuid = DeviceUuid(*b"0123456789abcdef");
        assert_eq!(uuid.to_string(), "30313233-3435-3637-3839-616263646566");
    }
}
