//! The codes that this backend returns: CUDA's numbers, so that what is tested here is what a GPU
//! says.

use std::borrow::Cow;

use gpu_api::{BackendKind, DeviceId, DriverError, Error};

/// An argument that names nothing.
pub const INVALID_VALUE: (u32, &str) = (1, "invalid value");
/// A device that there is not.
pub const INVALID_DEVICE: (u32, &str) = (101, "invalid device ordinal");
/// A handle that was opened where it was made, or a default stream on a thread without a current
/// device.
pub const INVALID_CONTEXT: (u32, &str) = (
    201,
    "invalid context: the handle was made by this process, or no device is current",
);
/// A handle whose process or allocation is gone, or bytes that are not a handle.
pub const INVALID_HANDLE: (u32, &str) = (400, "invalid handle: its process or allocation is gone");
/// A context that an earlier error broke.
pub const ILLEGAL_ADDRESS: (u32, &str) = (700, "illegal address: the context is broken");
/// An operation that a capture does not allow.
pub const CAPTURE_UNSUPPORTED: (u32, &str) =
    (900, "operation not permitted when the stream is capturing");

/// Makes a driver's error.
pub fn driver(call: &'static str, device: DeviceId, code: (u32, &'static str)) -> Error {
    let source = DriverError {
        backend: BackendKind::Host,
        code: code.0,
        name: Cow::Borrowed(code.1),
    };
    Error::Driver {
        call,
        device,
        source,
    }
}
