//! What a side of a step works with: the runtime, a device, a stream, and the other side.

use std::sync::{Arc, mpsc};

use backend_hip::HipBackend;
use gpu_api::{
    DeviceId, DevicePtr, Error, GpuCopies, GpuDevices, GpuHostFunctions, GpuStreams, RawStream,
};

use driver::Vendor;

use crate::channel::Channel;

/// What became of one side of a step; the text says why not.
pub type Seen = Result<(), String>;

/// One side of a step, as it sees itself.
pub(crate) struct Runtime {
    pub(crate) hip: Arc<HipBackend>,
    pub(crate) device: DeviceId,
    pub(crate) stream: RawStream,
    pub(crate) channel: Channel,
}

impl Runtime {
    /// Writes eight bytes and waits for it.
    pub(crate) fn write(&self, to: DevicePtr, value: u64) -> Seen {
        let bytes = value.to_le_bytes();
        // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until it is
        // done: this process has the memory and waits.
        unsafe {
            self.hip
                .copy_to_device(self.stream, to, bytes.as_ptr(), bytes.len())
        }
        .map_err(told)?;
        self.synchronize(self.stream)
    }

    /// Reads eight bytes.
    pub(crate) fn read(&self, from: DevicePtr) -> Result<u64, String> {
        self.read_by(self.stream, from)
    }

    /// Reads eight bytes by a stream.
    pub(crate) fn read_by(&self, stream: RawStream, from: DevicePtr) -> Result<u64, String> {
        let mut bytes = [0; 8];
        // SAFETY: `copy_to_host` asks for a live stream and ranges that are valid until it is done:
        // this process has the memory and waits.
        unsafe {
            self.hip
                .copy_to_host(stream, bytes.as_mut_ptr(), from, bytes.len())
        }
        .map_err(told)?;
        self.synchronize(stream)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Allocates by the runtime's own call, of any size.
    pub(crate) fn malloc(&self, len: usize) -> Result<DevicePtr, String> {
        let scope = self.hip.on_device(self.device).map_err(told)?;
        let mut base = 0;
        scope
            .call(&self.hip.driver().calls.malloc, |function| {
                // SAFETY: `hipMalloc` writes one address: `base` is one.
                unsafe { function(&raw mut base, len) }
            })
            .map_err(told)?;
        Ok(DevicePtr(base))
    }

    /// Frees what `malloc` gave.
    pub(crate) fn free(&self, base: DevicePtr) -> Seen {
        let scope = self.hip.on_device(self.device).map_err(told)?;
        scope
            .call(&self.hip.driver().calls.free, |function| {
                // SAFETY: `hipFree` asks for memory that nothing uses: each use was waited for.
                unsafe { function(base.0) }
            })
            .map_err(told)
    }

    /// Returns the free bytes of the device.
    pub(crate) fn free_bytes(&self) -> Result<u64, String> {
        Ok(self.hip.memory_info(self.device).map_err(told)?.free_bytes)
    }

    /// Holds up a stream until the result is dropped.
    pub(crate) fn hold(&self, stream: RawStream) -> Result<mpsc::Sender<()>, String> {
        let (go, gate) = mpsc::channel::<()>();
        let wait = Box::new(move || {
            // An error is the sign: the other end was dropped.
            let _ = gate.recv();
        });
        // SAFETY: `host_function` asks for a live stream that nobody captures: until the process
        // ends.
        unsafe { self.hip.host_function(stream, wait) }.map_err(told)?;
        Ok(go)
    }

    pub(crate) fn synchronize(&self, stream: RawStream) -> Seen {
        // SAFETY: `synchronize_stream` asks for a live stream: none is destroyed before the process
        // ends.
        unsafe { self.hip.synchronize_stream(stream) }.map_err(told)
    }

    pub(crate) fn is_idle(&self, stream: RawStream) -> Result<bool, String> {
        // SAFETY: `query_stream` asks for a live stream: none is destroyed before the process ends.
        unsafe { self.hip.query_stream(stream) }.map_err(told)
    }
}

/// Says what an error says, its cause included.
pub(crate) fn told(error: Error) -> String {
    match std::error::Error::source(&error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Makes a reason of what should have been.
pub(crate) fn expect(what: &str, holds: bool) -> Seen {
    if holds {
        Ok(())
    } else {
        Err(format!("not so: {what}"))
    }
}
