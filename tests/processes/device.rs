//! The device that is tested, and stamps in its memory.

use std::sync::{Arc, OnceLock};

use gpu_ipc::backend::{DeviceId, DevicePtr};
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{Gpu, Stream};

/// Names the backend to test, if it is not the host.
pub const BACKEND: &str = "GPU_IPC_TEST_BACKEND";

/// Says whether the host backend is tested, which can do what a GPU does only by accident.
pub fn is_host() -> bool {
    std::env::var(BACKEND).map_or(true, |backend| backend == "host")
}

/// Says whether the device shares memory that can only be read.
pub fn can_share_read_only() -> bool {
    let gpu = open_gpu();
    let caps = gpu.caps();
    caps.fd && caps.read_only
}

/// Opens the first device of the backend that is tested: of a GPU's, once in a process, as an
/// application would. A driver waits for the whole process before some of its calls, and only one
/// object of ours can know what it waits for.
pub fn open_gpu() -> Gpu {
    static OPENED: OnceLock<Gpu> = OnceLock::new();
    if is_host() {
        return open_host().1;
    }
    OPENED
        .get_or_init(|| open_named(&std::env::var(BACKEND).expect("it is set")))
        .clone()
}

/// Names the device to open by its uuid, if it is not the first.
pub const DEVICE: &str = "GPU_IPC_TEST_DEVICE";

fn open_named(name: &str) -> Gpu {
    let kind = gpu_ipc::BackendKind::ALL
        .into_iter()
        .find(|kind| kind.name() == name)
        .expect("a backend's name");
    let found = gpu_ipc::detect().expect("the backends can be asked");
    match std::env::var(DEVICE) {
        Ok(uuid) => found
            .gpus()
            .iter()
            .find(|gpu| gpu.kind() == kind && gpu.uuid().to_string() == uuid)
            .cloned(),
        Err(_) => found.first(kind).ok(),
    }
    .expect("the backend that was asked for is here")
}

/// Opens the first host device.
pub fn open_host() -> (Arc<HostBackend>, Gpu) {
    let backend = HostBackend::new(HostConfig::from_env().expect("the variables are good"))
        .expect("it opens");
    let gpu = Gpu::new(backend.clone(), DeviceId(0)).expect("there is a device");
    (backend, gpu)
}

/// Writes a stamp into the first 8 bytes at an address, in stream order, and waits for it.
pub fn write_stamp(gpu: &Gpu, stream: &Stream, ptr: DevicePtr, stamp: u64) {
    let bytes = stamp.to_le_bytes();
    // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the copy
    // is done: the stream is synchronised before `bytes` goes, and every block here has 8 bytes.
    unsafe {
        gpu.backend()
            .copy_to_device(stream.raw(), ptr, bytes.as_ptr(), 8)
    }
    .expect("it copies");
    stream.synchronize().expect("it runs");
}

/// Reads a stamp.
pub fn read_stamp(gpu: &Gpu, stream: &Stream, ptr: DevicePtr) -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is
    // done: the stream is synchronised before `bytes` is read, and every block here has 8 bytes.
    unsafe {
        gpu.backend()
            .copy_to_host(stream.raw(), bytes.as_mut_ptr(), ptr, 8)
    }
    .expect("it copies");
    stream.synchronize().expect("it runs");
    u64::from_le_bytes(bytes)
}
