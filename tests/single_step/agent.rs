//! The process that dies: this test's own binary, started again, with one call to make, and what it
//! is told and says.

use std::path::PathBuf;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{Gpu, Stream};
use serde::{Deserialize, Serialize};

/// The call that an agent makes, and with what.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub enum Call {
    Claim { socket: PathBuf },
    Release { socket: PathBuf },
    Grant { socket: PathBuf },
    Revoke { socket: PathBuf },
    Count { file: PathBuf },
    None,
}

/// What it is told while it gets ready.
#[derive(Serialize, Deserialize, Debug)]
pub enum Told {
    /// The other side's number.
    Participant(u64),
    Descriptor(Vec<u8>),
    /// What it shared is held.
    Held,
    Go,
}

/// How far it is.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
pub enum Said {
    Joined(u64),
    Mapped,
    Open,
    Shared(Vec<u8>),
    Ready,
}

/// Opens a host device.
pub fn open_gpu() -> Gpu {
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    Gpu::new(backend, DeviceId(0)).expect("there is a device")
}

/// Writes a stamp into a block.
pub fn write_stamp(gpu: &Gpu, ptr: gpu_ipc::backend::DevicePtr, stamp: u64) {
    let stream = Stream::create(gpu).expect("a stream");
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
pub fn read_stamp(gpu: &Gpu, ptr: gpu_ipc::backend::DevicePtr) -> u64 {
    let stream = Stream::create(gpu).expect("a stream");
    let mut bytes = [0; 8];
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is
    // done: as above.
    unsafe {
        gpu.backend()
            .copy_to_host(stream.raw(), bytes.as_mut_ptr(), ptr, 8)
    }
    .expect("it copies");
    stream.synchronize().expect("it runs");
    u64::from_le_bytes(bytes)
}
